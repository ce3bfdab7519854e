"""Prompts read into the cache ahead of their use, and kept there if asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from deepseek_flash.errors import RequestError
from deepseek_flash.runtime.generation import Request
from deepseek_flash.runtime.runtime import FlashRuntime

_TRIES = 3


def preload(runtime: FlashRuntime, make: Callable[[], Request], pin: bool) -> Preloaded:
    """Read the prompt of ``make()``, which wants no new tokens, into the cache."""
    if not runtime.config.enable_prefix_caching:
        raise RequestError(
            "preload() with enable_prefix_caching=False: nothing would be kept; open the engine with it on",
            parameter="prompt",
        )
    for _ in range(_TRIES):
        request = make()
        stream = runtime.stream(request)
        try:
            runtime.queue(request)
            stream.result()
        except BaseException:  # nothing may go on running for a caller who has left
            stream.cancel()
            raise
        loaded = Preloaded(runtime, request.tokens)
        if not pin or loaded._pin():
            return loaded
    raise _evicted(len(request.tokens))


class Preloaded:
    """A prompt that was read into the cache. Requests that begin with it start behind it, as far as whole blocks go.

    Without a pin it is evicted like everything else once the room is needed. A pin belongs to the prompt: another
    handle of the same prompt sees and removes it too.
    """

    def __init__(self, runtime: FlashRuntime, tokens: Sequence[int]) -> None:
        self._runtime = runtime
        self._keys: list[bytes] = []
        index, size = runtime.scheduler.kv.index, runtime.plan.spec.block_size
        assert index is not None
        index.extend_keys(self._keys, tokens, runtime.config.cache_salt.encode(), len(tokens) // size)
        self.tokens = len(tokens)
        """Tokens of the prompt."""
        self.bytes = runtime.plan.spec.bytes_for(len(self._keys) * size) if self._keys else 0
        """What its whole blocks take in one tier."""

    @property
    def tiers(self) -> tuple[str, ...]:
        """The tiers that hold all of its whole blocks now: of "l1" (the pool), "l2" (host), "l3" (disk)."""
        if not self._keys:
            return ()
        runtime, keys = self._runtime, self._keys
        index, below = runtime.scheduler.kv.index, runtime.tiers
        assert index is not None
        found = ["l1"] if runtime.loop.call(lambda: index.reach(keys, len(keys)) == len(keys)) else []
        if below is not None:
            found += ["l2"] if runtime.loop.call(lambda: below.host_has(keys)) else []
            found += ["l3"] if below.disk is not None and all(below.disk.has(keys)) else []
        return tuple(found)

    @property
    def pinned(self) -> tuple[str, ...]:
        """The tiers that it is pinned in: of "l1" and "l3"."""
        if not self._keys:
            return ()
        runtime, name = self._runtime, self._keys[-1]
        pins, below = runtime.scheduler.kv.pins, runtime.tiers
        found = ["l1"] if runtime.loop.call(lambda: pins is not None and name in pins) else []
        if below is not None and below.disk is not None and name.hex() in below.disk.pins():
            found.append("l3")
        return tuple(found)

    def pin(self) -> Preloaded:
        """Keep its blocks in the pool, and on disk, where there is such a tier, beyond the end of this process too.

        Pins hold at most half of the pool; more, and a prompt that was evicted meanwhile, is a RequestError. A pin in
        the pool gives way when the only request there is could not go on without its room.
        """
        if not self._pin():
            raise _evicted(self.tokens)
        return self

    def _pin(self) -> bool:
        """False when it is not in the pool any more."""
        size, keys = self._runtime.plan.spec.block_size, self._keys
        if not keys:
            raise RequestError(
                f"a prompt of {self.tokens} tokens fills no block of {size}: there is nothing to pin",
                parameter="pin",
                value=True,
            )
        pins, below = self._runtime.scheduler.kv.pins, self._runtime.tiers
        assert pins is not None
        outcome = self._runtime.loop.call(lambda: pins.add(keys))
        if outcome == "full":
            raise RequestError(
                f"{self.tokens} tokens ({len(keys)} blocks) do not fit: pins may hold half of the pool's "
                f"{self._runtime.plan.blocks[0]} blocks; unpin others, or open the engine with a larger cache",
                parameter="pin",
                value=True,
            )
        if outcome == "pinned" and below is not None and below.disk is not None:
            below.disk.pin(keys[-1].hex(), keys)
        return outcome == "pinned"

    def unpin(self) -> bool:
        """Let it be evicted again, from every tier; whether it was pinned."""
        if not self._keys:
            return False
        name = self._keys[-1]
        pins, below = self._runtime.scheduler.kv.pins, self._runtime.tiers
        was = self._runtime.loop.call(lambda: pins is not None and pins.drop(name))
        if below is not None and below.disk is not None:
            was = below.disk.unpin(name.hex()) or was
        return was

    def release(self) -> None:
        """Done with it: unpins. What is cached stays until the room is needed. Fine to call twice, and when the
        engine is closed, whose end frees the pool and leaves the disk as it is."""
        if not self._runtime.loop.closed:
            self.unpin()

    def __repr__(self) -> str:
        return f"<Preloaded {self.tokens} tokens, {self.bytes} bytes>"


def _evicted(tokens: int) -> RequestError:
    return RequestError(
        f"the prompt of {tokens} tokens was evicted before it could be pinned: other requests need the room; "
        f"preload it again, or open the engine with a larger cache",
        parameter="pin",
        value=True,
    )
