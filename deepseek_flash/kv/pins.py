"""Prefixes that the pool must not evict, up to a share of it. On the engine thread only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from deepseek_flash.kv.blocks import BlockPool
from deepseek_flash.kv.prefix import NONE, PrefixIndex
from deepseek_flash.kv.spec import CacheSpec

SHARE = 2
"""Pins hold at most one part in so many of each pool."""


class Pins:
    """One reference to every block of each pinned prefix. A pin is named by the key of its last block.

    A pin is a wish, not a claim: when the only request there is could not go on otherwise, the oldest pin gives way.
    """

    def __init__(self, spec: CacheSpec, index: PrefixIndex, pools: Sequence[BlockPool]) -> None:
        self._spec, self._index, self._pools = spec, index, pools
        self._held: dict[bytes, list[tuple[int, int]]] = {}
        self.yielded = 0
        """Pins that gave way."""

    def __contains__(self, name: bytes) -> bool:
        return name in self._held

    def add(self, keys: Sequence[bytes]) -> Literal["pinned", "absent", "full"]:
        """Pin a prefix, given the keys of its blocks: "absent" when not all of it is cached, "full" when pins would
        hold more than their share. Pinning twice is pinning once."""
        name = keys[-1]
        if name in self._held:
            return "pinned"
        places = [(g, self._index.get(key, g)) for key in keys for g in self._index.rows]
        if any(block == NONE for _, block in places):
            return "absent"
        snapshot = [(g, self._index.get(keys[i], g)) for g, i in self._spec.snapshot_blocks(len(keys))]
        places += [p for p in snapshot if p[1] != NONE]
        after = set(places) | set(self.blocks())
        if any(sum(g == group for g, _ in after) > pool.capacity // SHARE for group, pool in enumerate(self._pools)):
            return "full"
        for g, block in places:
            self._pools[g].share(block)
        self._held[name] = places
        return "pinned"

    def drop(self, name: bytes) -> bool:
        """Whether there was such a pin."""
        places = self._held.pop(name, None)
        for g, block in reversed(places or ()):  # the last block first: the head of a chain goes last
            self._pools[g].release(block)
        return places is not None

    def give_way(self) -> bool:
        """Drop the oldest pin; False when there is none."""
        if not self._held:
            return False
        self.yielded += 1
        return self.drop(next(iter(self._held)))

    def over(self) -> bool:
        """Whether pins hold more than their share, as after a pool shrank."""
        held = set(self.blocks())
        return any(sum(g == group for g, _ in held) > pool.capacity // SHARE for group, pool in enumerate(self._pools))

    def blocks(self) -> Iterator[tuple[int, int]]:
        """(group, block) of every reference held."""
        for places in self._held.values():
            yield from places
