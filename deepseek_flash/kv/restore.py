"""Blocks on their way back from a lower tier into the prefix index, for sequences that wait. No torch.

What is placed is published at once and pinned until the sequence is admitted or ends. Running sequences come first:
when they need the room, every pin goes, and what was placed stays as ordinary cached blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from deepseek_flash.kv.blocks import BlockPool
from deepseek_flash.kv.prefix import NONE, PrefixIndex
from deepseek_flash.kv.spec import CacheSpec

Place = tuple[int, int]
"""(group, block); block is NONE where the contents are here already and must not be written."""


@dataclass(slots=True, eq=False)
class Restore:
    """One sequence's prefix."""

    keys: Sequence[bytes]
    """Of the full blocks it may use."""
    depth: int = 0
    """Leading blocks whose rows are here and pinned."""
    pins: list[Place] = field(default_factory=list)
    open: bool = True
    """Whether anything may still be placed."""


class Restores:
    """All restores of a cache. Whoever places a block writes its contents before anything else happens."""

    def __init__(self, spec: CacheSpec, index: PrefixIndex, pools: Sequence[BlockPool]) -> None:
        self._spec, self._index, self._pools = spec, index, pools
        self._restores: dict[int, Restore] = {}

    def begin(self, seq_id: int, keys: Sequence[bytes]) -> Restore:
        """Pin the cached rows at the front of a chain."""
        restore = self._restores[seq_id] = Restore(keys)
        for _ in range(self._index.reach(keys, len(keys))):
            self._pin_rows(restore)
        return restore

    def place(self, restore: Restore) -> tuple[Place, ...] | None:
        """Where the rows of the chain's next block go; None without room, or when the restore is over."""
        depth, index = restore.depth, self._index
        if not restore.open or depth >= len(restore.keys):
            return None
        if index.has_rows(restore.keys[depth]):  # somebody computed it in the meantime
            self._pin_rows(restore)
            return tuple((g, NONE) for g in index.rows)
        if any(not self._pools[g].available for g in index.rows):
            return None
        placed = tuple(self._take(restore, depth, g) for g in index.rows)
        restore.depth = depth + 1
        return placed

    def place_snapshot(self, restore: Restore, boundary: int) -> tuple[Place, ...] | None:
        """The same for window rows and state after ``boundary`` of the blocks placed, in ``snapshot_blocks``' order."""
        index = self._index
        if not restore.open or not 0 < boundary <= restore.depth:
            return None
        wanted = self._spec.snapshot_blocks(boundary)
        here = {(g, i): index.get(restore.keys[i], g) for g, i in wanted}
        for (g, _), block in here.items():  # what is here must not be evicted by what is taken
            if block != NONE:
                self._pin(restore, g, block)
        missing = Counter(g for (g, _), block in here.items() if block == NONE)
        if any(self._pools[g].available < n for g, n in missing.items()):
            return None
        return tuple(self._take(restore, i, g) if here[g, i] == NONE else (g, NONE) for g, i in wanted)

    def end(self, seq_id: int) -> None:
        """The sequence was admitted, or has ended. Unknown ids are fine."""
        restore = self._restores.pop(seq_id, None)
        if restore is not None:
            self._unpin(restore)

    def close(self, but: int | None = None) -> bool:
        """End all restores, or all but one; whether there were any."""
        found = [s for s in self._restores if s != but]
        for seq_id in found:
            self.end(seq_id)
        return bool(found)

    def pins(self) -> Iterator[Place]:
        """Every reference that is held."""
        for restore in self._restores.values():
            yield from restore.pins

    def _pin_rows(self, restore: Restore) -> None:
        for g in self._index.rows:
            self._pin(restore, g, self._index.get(restore.keys[restore.depth], g))
        restore.depth += 1

    def _pin(self, restore: Restore, group: int, block: int) -> None:
        self._pools[group].share(block)
        restore.pins.append((group, block))

    def _take(self, restore: Restore, depth: int, group: int) -> Place:
        block = self._pools[group].take()
        self._index.put(restore.keys, depth, group, block)
        self._pools[group].keep(block)
        restore.pins.append((group, block))
        return group, block

    def _unpin(self, restore: Restore) -> None:
        restore.open = False
        for g, block in reversed(restore.pins):  # the chain's end first, as sequences do
            self._pools[g].release(block)
        restore.pins.clear()
