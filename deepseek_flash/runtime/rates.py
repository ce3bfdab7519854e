"""How fast this machine reads prompts and how fast its tiers load: what decides whether loading is worth it."""

from __future__ import annotations

_WEIGHT = 0.3
"""Of the newest observation."""


class Rates:
    """Learned from experience; until there is any, guesses that a first measurement replaces."""

    def __init__(self, seconds_per_token: float = 1e-3, seconds_per_byte: float = 1 / 500e6) -> None:
        self._per_token, self._per_byte = seconds_per_token, seconds_per_byte
        self._tokens_seen = self._bytes_seen = False

    @property
    def prefill_tokens_per_second(self) -> float:
        return 1 / self._per_token

    @property
    def load_bytes_per_second(self) -> float:
        return 1 / self._per_byte

    def prefilled(self, tokens: int, seconds: float) -> None:
        """A step of ``tokens`` prompt tokens took so long."""
        if tokens > 0 and seconds > 0:
            self._per_token = _mixed(self._per_token, seconds / tokens, self._tokens_seen)
            self._tokens_seen = True

    def loaded(self, nbytes: int, seconds: float) -> None:
        """Reading and checking so many bytes of the disk tier took so long."""
        if nbytes > 0 and seconds > 0:
            self._per_byte = _mixed(self._per_byte, seconds / nbytes, self._bytes_seen)
            self._bytes_seen = True

    def prefill_seconds(self, tokens: int) -> float:
        return tokens * self._per_token

    def load_seconds(self, nbytes: int) -> float:
        return nbytes * self._per_byte

    def worth_loading(self, tokens: int, nbytes: int) -> bool:
        """Whether loading is predicted to be faster than computing."""
        return self.load_seconds(nbytes) < self.prefill_seconds(tokens)


def _mixed(old: float, new: float, seen: bool) -> float:
    return new if not seen else (1 - _WEIGHT) * old + _WEIGHT * new
