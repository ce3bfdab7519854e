"""Who holds which block of one group: reference counts, a free list and the cached blocks in eviction order."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from deepseek_flash.errors import InternalError


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy one block of a group inside the pool (snapshots, restores)."""

    group: int
    src: int
    dst: int


class BlockPool:
    """Blocks ``0 .. most - 1`` of one group, of which ``capacity`` are in service.

    Every block is exactly one of: free, referenced (by one or more holders), cached (published in the
    prefix index and referenced by nobody), or retired (out of service: its memory is given back). ``take`` uses
    free blocks first, then evicts the cached block that was released longest ago. Holders release a sequence's last
    block first, so the tail of the least recently used chain goes before its head and what survives is always a
    usable prefix.
    """

    def __init__(self, capacity: int, evicted: Callable[[int], None], most: int | None = None) -> None:
        """``evicted(block)`` is called while a cached block loses its contents, before it is handed out.
        ``most``: what the pool can ever grow to [capacity]."""
        most = capacity if most is None else most
        if not 1 <= capacity <= most:
            raise InternalError(f"a block pool needs 1 to {most} blocks, not {capacity}")
        self.capacity, self.most = capacity, most
        self.owed = 0
        """Blocks that are yet to be retired, as their holders let go."""
        self.evictions = 0
        self.freed = 0
        """How often a block lost its last holder: while this stands still, no room has appeared."""
        self._evicted = evicted
        self._refs = [0] * most
        self._kept = bytearray(most)
        self._free = list(range(capacity - 1, -1, -1))
        self._retired = list(range(most - 1, capacity - 1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Blocks that ``take`` can hand out: free ones and cached ones."""
        return max(0, len(self._free) + len(self._cached) - self.owed)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        return len(self._cached)

    def resize(self, capacity: int) -> list[int]:
        """Have so many blocks in service: free ones are retired first, then cached ones are evicted, the rest as
        holders let go (``owed``; ``settle`` says which). Returns the blocks retired now."""
        if not 1 <= capacity <= self.most:
            raise InternalError(f"a block pool of 1 to {self.most} blocks cannot have {capacity}")
        self.owed += self.capacity - capacity
        self.capacity = capacity
        while self.owed < 0:
            self.owed += 1
            self._free.append(self._retired.pop())
        return self.settle()

    def settle(self) -> list[int]:
        """Retire what is owed and can go now; returns it."""
        n = min(self.owed, len(self._free))
        gone = self._free[:n]
        del self._free[:n]
        while len(gone) < self.owed and self._cached:
            gone.append(self._evict())
        self._retired += gone
        self.owed -= len(gone)
        return gone

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        self._kept[block] = 0
        self.evictions += 1
        self._evicted(block)
        return block

    def in_use(self) -> list[int]:
        """Blocks whose contents matter: referenced or cached."""
        idle = {*self._free, *self._retired}
        return [b for b in range(self.most) if b not in idle]

    def refs(self, block: int) -> int:
        return self._refs[block]

    def kept(self, block: int) -> bool:
        """Whether the prefix index points at it."""
        return bool(self._kept[block])

    def take(self) -> int:
        """A block with unspecified contents and one reference. Callers look at ``available`` first."""
        if self._free:
            block = self._free.pop()
        elif self._cached:
            block = self._evict()
        else:
            raise InternalError(f"all {self.capacity} blocks are referenced; availability was not checked")
        self._refs[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more reference to a block that is referenced or cached."""
        if self._refs[block] == 0:
            if block not in self._cached:
                raise InternalError(f"block {block} is free and cannot be shared")
            del self._cached[block]
        self._refs[block] += 1

    def release(self, block: int) -> None:
        """One reference fewer; without any, a published block stays cached as the most recently used."""
        if self._refs[block] < 1:
            raise InternalError(f"block {block} was released more often than it was taken")
        self._refs[block] -= 1
        if self._refs[block]:
            return
        self.freed += 1
        if self._kept[block]:
            self._cached[block] = None
        else:
            self._free.append(block)

    def keep(self, block: int) -> None:
        """The index points at this referenced block: cache it when its last holder lets go."""
        if self._refs[block] < 1 or self._kept[block]:
            raise InternalError(f"block {block} must be referenced and unpublished to be published")
        self._kept[block] = 1

    def forget(self, block: int) -> None:
        """The index no longer points at this block: a cached one becomes free."""
        if not self._kept[block]:
            raise InternalError(f"block {block} is not published")
        self._kept[block] = 0
        if block in self._cached:
            del self._cached[block]
            self._free.append(block)

    def oldest_cached(self) -> int | None:
        """The block that would be evicted next."""
        return next(iter(self._cached), None)

    def check(self, held: Mapping[int, int]) -> None:
        """Prove that the counts equal what holders hold (block → how often) and every block has one state."""
        free, cached, retired = set(self._free), set(self._cached), set(self._retired)
        if len(free) != len(self._free) or len(retired) != len(self._retired) or free & cached:
            raise InternalError("a block is in the free list twice, or free and cached at once")
        if self.owed < 0 or len(retired) != self.most - self.capacity - self.owed:
            raise InternalError(f"{len(retired)} of {self.most} blocks are retired and {self.owed} owed")
        for block in range(self.most):
            refs = self._refs[block]
            if refs != held.get(block, 0):
                raise InternalError(f"block {block} has {refs} references, {held.get(block, 0)} holders")
            if (refs > 0) + (block in free) + (block in cached) + (block in retired) != 1:
                raise InternalError(f"block {block} is not exactly one of free, cached, referenced, retired")
            if (block in cached and not self._kept[block]) or (block in free and self._kept[block]):
                raise InternalError(f"block {block} is cached without an index entry, or free with one")
