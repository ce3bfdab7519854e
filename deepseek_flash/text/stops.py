"""Stop strings, matched on text while it streams.

Definition, for the whole text: of all places where a stop string occurs, the one that starts first wins; of
several that start there, the shortest. The text is cut there (or after it, with ``include_stop``). The result does
not depend on how the text was cut into pieces, so streaming and non-streaming agree.

A stop string found inside the beginning of a longer one (``"cd"`` while ``"abcdef"`` may still come) is decided
only when the longer one has failed or the text ends, because the longer one would start first.
"""

from __future__ import annotations

from collections.abc import Sequence

from deepseek_flash.errors import RequestError


def _borders(word: str) -> list[int]:
    """Knuth-Morris-Pratt failure table: longest proper prefix that is also a suffix of ``word[:i]``, for each i."""
    table = [0, 0]
    k = 0
    for c in word[1:]:
        while k and word[k] != c:
            k = table[k]
        if word[k] == c:
            k += 1
        table.append(k)
    return table


class StopChecker:
    """Holds text back only while it can still become a stop string. One per answer; not thread-safe."""

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        words = (stops,) if isinstance(stops, str) else tuple(stops)
        for word in words:
            if not isinstance(word, str) or not word:
                raise RequestError(
                    f"a stop must be a string of at least one character, not {word!r}", parameter="stop", value=word
                )
        self.matched: str | None = None
        """The stop string that ended the text."""
        self._include = include_stop
        self._stops = [(word, _borders(word)) for word in dict.fromkeys(words)]
        self._state = [0] * len(self._stops)  # characters of each stop that the text seen so far ends with
        self._seen = 0  # characters looked at
        self._held = ""  # the last of them, not yet given back
        self._best: tuple[int, str] | None = None  # where the first complete stop starts, and which

    def push(self, text: str) -> str:
        """Take more text; give back what can be shown now. After a match: nothing."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        base = self._seen - len(self._held)
        self._held += text
        alive = base
        for c in text:
            alive = self._advance(c)
            if self._best is not None and alive >= self._best[0]:
                return self._settle(base)
        return self._release(alive - base)

    def finish(self) -> str:
        """The text has ended: settle what was still open and give back the rest."""
        if self.matched is not None:
            return ""
        if self._best is not None:
            return self._settle(self._seen - len(self._held))
        return self._release(len(self._held))

    def _advance(self, c: str) -> int:
        """Feed one character; where the earliest stop that can still be completed starts."""
        self._seen += 1
        alive = self._seen
        for i, (word, table) in enumerate(self._stops):
            k = self._state[i]
            while k and word[k] != c:
                k = table[k]
            if word[k] == c:
                k += 1
            if k == len(word):
                start = self._seen - k
                if self._best is None or (start, k) < (self._best[0], len(self._best[1])):
                    self._best = (start, word)
                k = table[k]
            self._state[i] = k
            alive = min(alive, self._seen - k)
        return alive

    def _settle(self, base: int) -> str:
        assert self._best is not None
        start, self.matched = self._best
        released = self._release(start - base + (len(self.matched) if self._include else 0))
        self._held = ""
        return released

    def _release(self, count: int) -> str:
        released, self._held = self._held[:count], self._held[count:]
        return released
