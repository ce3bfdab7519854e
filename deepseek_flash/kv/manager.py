"""The logical cache: which blocks a sequence reads and writes, what a new one can reuse, what must be copied.

Ownership. A sequence's tables hold one reference to each of their blocks: full blocks may be shared and are
never written again, the block being filled and the state record belong to it alone. The prefix index holds no
references: it names blocks, and a pool keeps a named block cached when nobody refers to it any more.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from deepseek_flash.errors import InternalError
from deepseek_flash.kv.blocks import BlockCopy, BlockPool
from deepseek_flash.kv.pins import Pins
from deepseek_flash.kv.prefix import NONE, Entry, PrefixIndex
from deepseek_flash.kv.restore import Restores
from deepseek_flash.kv.spec import CacheSpec


class Holder(Protocol):
    """What the cache needs to know of a sequence (scheduler.Sequence is one). It writes tables, keys, computed."""

    id: int
    tokens: list[int]
    prompt_len: int
    max_tokens: int
    salt: bytes
    all_logits: bool
    computed: int
    tables: list[list[int]]
    keys: list[bytes]


@dataclass(frozen=True, slots=True)
class Hit:
    """The longest cached prefix of a sequence that every group can resume from."""

    tokens: int
    """A multiple of block_size, and less than the sequence: its last token is always computed."""
    reach: int
    """Leading blocks whose rows are cached (at least tokens / block_size)."""
    shared: tuple[tuple[int, ...], ...]
    """Per group: the blocks to put at the front of its table (NONE where the window has passed)."""
    snapshots: tuple[tuple[int, int], ...]
    """(group, state record) at the boundary."""


@dataclass(frozen=True, slots=True)
class Admission:
    """What has to be done to blocks before an admitted sequence's first step: ``zero``, then ``copies``."""

    zero: tuple[tuple[int, int], ...] = ()
    copies: tuple[BlockCopy, ...] = ()


@dataclass(frozen=True, slots=True)
class Shortage:
    """Blocks missing per group."""

    missing: tuple[int, ...]


@dataclass(slots=True)
class _Holding:
    """What the cache keeps for a running sequence beside its tables."""

    seq: Holder
    pins: list[tuple[int, int]] = field(default_factory=list)
    """Snapshots that the coming step restores from."""
    taking: list[tuple[int, int]] = field(default_factory=list)
    """State records that the coming step copies a snapshot to."""
    stops: set[int] = field(default_factory=set)
    """Boundaries, beside the regular ones, at which a snapshot is wanted."""
    pending: list[bytes] = field(default_factory=list)
    """Keys of full blocks it was going to fill when it was admitted."""


class KVManager:
    """Blocks of every group for running sequences, and the index of what they left behind.

    Scheduler's protocol: ``match``, ``awaited``, ``admit`` to start a sequence; ``extend``, ``stop``,
    ``snapshot`` for each step; ``advance`` after a step that succeeded; ``release`` when it ends, at any time.
    """

    def __init__(
        self,
        spec: CacheSpec,
        capacity: Sequence[int],
        *,
        root: bytes,
        prefix_caching: bool,
        snapshot_every: int = 16,
        most: Sequence[int] | None = None,
    ) -> None:
        """``capacity``: blocks per group; ``most``: what they can be resized to [capacity]. ``root``: identity of
        weights and dtype; the layout's is added here. ``snapshot_every``: blocks between snapshots, for models that
        need them to resume."""
        most = capacity if most is None else most
        if not len(capacity) == len(most) == len(spec.groups):
            raise InternalError(f"{len(capacity)} capacities and {len(most)} bounds for {len(spec.groups)} groups")
        self.spec = spec
        self.pools = tuple(
            BlockPool(n, partial(self._evicted, g), m) for g, (n, m) in enumerate(zip(capacity, most, strict=True))
        )
        self.index = PrefixIndex(spec, root + spec.digest()) if prefix_caching else None
        self.no_hit = Hit(0, 0, ((),) * len(spec.groups), ())
        self._size = spec.block_size
        self._kinds = tuple(g.kind for g in spec.groups)
        self._every = max(1, snapshot_every) * self._size
        self._snapshots = prefix_caching and spec.needs_snapshots
        self._held: dict[int, _Holding] = {}
        self._pending: dict[bytes, _Holding] = {}
        self.settled: list[bytes] = []
        """Keys that stopped being pending since ``take_settled`` was called."""
        self._hit_tokens = self._asked_tokens = self._taken = 0
        self.restores = None if self.index is None else Restores(spec, self.index, self.pools)
        """What is being brought back from lower tiers."""
        self.pins = None if self.index is None else Pins(spec, self.index, self.pools)
        """Prefixes that are not evicted."""
        self.spill: Callable[[Entry], None] | None = None
        """Called while a cached block of rows, whole in all groups, loses its place: a lower tier may copy it."""
        self.retired: Callable[[int, list[int]], None] | None = None
        """Called with a group and its blocks that went out of service: their memory may be given back."""

    # ---- sizes

    @property
    def most_tokens(self) -> int:
        """The longest sequence that the pools can hold (sys.maxsize when nothing grows with length)."""
        most = sys.maxsize
        for g, pool in enumerate(self.pools):
            if self._kinds[g] == "rows" or pool.capacity < self.spec.blocks_for(g, most):
                most = min(most, pool.capacity * self._size)
        return most

    def can_ever_fit(self, total_tokens: int) -> bool:
        """Whether a sequence of so many tokens fits when it has the pools to itself."""
        return total_tokens <= self.most_tokens

    @property
    def freed(self) -> int:
        """Grows whenever a block loses its last holder."""
        return sum(p.freed for p in self.pools)

    def claims(self, seq: Holder) -> tuple[int, ...]:
        """Blocks per group that a running sequence still needs for the tokens it has."""
        return tuple(max(0, self._wanted(g, seq) - self._live(g, seq)) for g in range(len(self.pools)))

    def _wanted(self, group: int, seq: Holder) -> int:
        # A window's demand is bounded, so count its steady state; rows grow, so count what is known to be needed.
        tokens = seq.max_tokens if self._kinds[group] == "window" else len(seq.tokens)
        return self.spec.blocks_for(group, tokens)

    def _live(self, group: int, seq: Holder) -> int:
        return len(seq.tables[group]) - self._first(group, seq.computed)

    def _first(self, group: int, computed: int) -> int:
        """Index of the first block of a group that a sequence of so many tokens still reads."""
        return self.spec.first_block(group, computed)

    # ---- starting a sequence

    def match(self, seq: Holder) -> Hit:
        """The longest boundary below the last token for which rows, window rows and state are all cached."""
        if self.index is None or seq.all_logits:
            return self.no_hit
        limit = (len(seq.tokens) - 1) // self._size
        self.index.extend_keys(seq.keys, seq.tokens, seq.salt, limit)
        boundary = reach = self.index.reach(seq.keys, limit)
        while boundary and not self._resumable(self.index, seq.keys, boundary):
            boundary -= 1
        if "rows" not in self._kinds:
            reach = boundary
        if not boundary:
            return replace(self.no_hit, reach=reach)
        tokens = boundary * self._size
        shared: list[tuple[int, ...]] = []
        snapshots = []
        for g, kind in enumerate(self._kinds):
            if kind == "state":
                shared.append(())
                snapshots.append((g, self.index.get(seq.keys[boundary - 1], g)))
                continue
            first = self._first(g, tokens)
            found = (self.index.get(seq.keys[i], g) for i in range(first, boundary))
            shared.append((*(NONE for _ in range(first)), *found))
        return Hit(tokens, reach, tuple(shared), tuple(snapshots))

    def _resumable(self, index: PrefixIndex, keys: list[bytes], boundary: int) -> bool:
        """Whether window rows and state are known at this boundary."""
        for g, kind in enumerate(self._kinds):
            if kind == "rows":
                continue
            first = boundary - 1 if kind == "state" else self._first(g, boundary * self._size)
            if any(index.get(keys[i], g) == NONE for i in range(first, boundary)):
                return False
        return True

    def awaited(self, seq: Holder, hit: Hit) -> bytes | None:
        """The key to wait for when running sequences are computing blocks that this one could then share.

        ``take_settled`` reports the key when it is published or given up.
        """
        if self.index is None or seq.all_logits:
            return None
        limit = (len(seq.tokens) - 1) // self._size
        end = hit.reach
        while end < limit and seq.keys[end] in self._pending:
            end += 1
        if end == hit.reach:
            return None
        key = seq.keys[end - 1]
        if self._snapshots:
            self._pending[key].stops.add(end * self._size)
        return key

    def take_settled(self) -> list[bytes]:
        """Keys that stopped being pending since the last call."""
        settled, self.settled = self.settled, []
        return settled

    def admit(self, seq: Holder, hit: Hit, spare: Sequence[int]) -> Admission | Shortage:
        """Give a sequence its cached prefix and its state records, if the rest of its tokens will fit too.

        ``spare``: blocks per group that must stay available for others. On a Shortage nothing has changed.
        """
        missing = []
        for g, pool in enumerate(self.pools):
            reused = [b for b in hit.shared[g] if b != NONE] + [b for group, b in hit.snapshots if group == g]
            fresh = self._wanted(g, seq) - (0 if self._kinds[g] == "state" else len(reused))
            room = pool.available - sum(pool.refs(b) == 0 for b in reused) - spare[g]
            missing.append(max(0, fresh - room))
        if any(missing):
            if self.restores is not None and self.restores.close(but=seq.id):
                return self.admit(seq, hit, spare)  # what others wait for must not keep this one waiting
            if not self._held and self.pins is not None and self.pins.give_way():
                return self.admit(seq, hit, spare)
            return Shortage(tuple(missing))
        hold = self._held[seq.id] = _Holding(seq, pins=list(hit.snapshots))
        # References first: taking a block may evict, and must not evict what was just matched.
        for g, block in hit.snapshots:
            self.pools[g].share(block)
        for g, blocks in enumerate(hit.shared):
            for block in blocks:
                if block != NONE:
                    self.pools[g].share(block)
        seq.tables = [list(blocks) for blocks in hit.shared]
        seq.computed = hit.tokens
        zero, copies = [], []
        source = dict(hit.snapshots)
        for g, kind in enumerate(self._kinds):
            if kind == "state":
                record = self.pools[g].take()
                seq.tables[g].append(record)
                if g in source:
                    copies.append(BlockCopy(g, source[g], record))
                else:
                    zero.append((g, record))
        self._asked_tokens += len(seq.tokens)
        self._hit_tokens += hit.tokens
        self._announce(hold, hit)
        if self.restores is not None:
            self.restores.end(seq.id)
        return Admission(tuple(zero), tuple(copies))

    def _announce(self, hold: _Holding, hit: Hit) -> None:
        """Register the full blocks this sequence is going to compute, and where its prompt ends."""
        if self.index is None:
            return
        seq = hold.seq
        full = len(seq.tokens) // self._size
        self.index.extend_keys(seq.keys, seq.tokens, seq.salt, full)
        for key in seq.keys[hit.reach : full]:
            if key not in self._pending and not self.index.has_rows(key):
                self._pending[key] = hold
                hold.pending.append(key)
        # One for the same prompt again, which must compute its last token, and one for prompts that extend it.
        hold.stops.update(n // self._size * self._size for n in (seq.prompt_len - 1, seq.prompt_len))

    # ---- one step

    def extend(self, seq: Holder, end: int) -> int:
        """Give it blocks to compute up to ``end``, or as far as blocks go; returns how far that is."""
        growing = [g for g, kind in enumerate(self._kinds) if kind != "state"]
        if self.restores is not None and any(
            (len(seq.tables[g]) + self.pools[g].available) * self._size < end for g in growing
        ):
            self.restores.close()
        while len(self._held) == 1 and any(
            (len(seq.tables[g]) + self.pools[g].available) * self._size <= seq.computed for g in growing
        ):
            if self.pins is None or not self.pins.give_way():
                break
        for g in growing:
            end = min(end, (len(seq.tables[g]) + self.pools[g].available) * self._size)
        for g in growing:
            for _ in range(len(seq.tables[g]), -(-end // self._size)):
                seq.tables[g].append(self.pools[g].take())
        return end

    def stop(self, seq: Holder, end: int) -> int:
        """``end``, or the first boundary before it at which a snapshot is planned: a step must not run past it."""
        if not self._snapshots:
            return end
        regular = (seq.computed // self._every + 1) * self._every
        return min(end, regular, *(s for s in self._held[seq.id].stops if s > seq.computed))

    def snapshot(self, seq: Holder, end: int) -> list[BlockCopy]:
        """Copies, to be made after the step, that keep the state a sequence will have at ``end``.

        A record is taken only if one is free or cached: a snapshot never takes room from a sequence.
        """
        hold = self._held[seq.id]
        if self.index is None or not self._planned(hold, end):
            return []
        self.index.extend_keys(seq.keys, seq.tokens, seq.salt, end // self._size)
        copies = []
        for g, kind in enumerate(self._kinds):
            if kind != "state" or self.index.get(seq.keys[end // self._size - 1], g) != NONE:
                continue
            if self.pools[g].available:
                record = self.pools[g].take()
                hold.taking.append((g, record))
                copies.append(BlockCopy(g, seq.tables[g][0], record))
        return copies

    def _planned(self, hold: _Holding, end: int) -> bool:
        return self._snapshots and end > 0 and (end % self._every == 0 or end in hold.stops)

    def advance(self, seq: Holder, count: int) -> None:
        """The step that computed ``count`` more tokens succeeded: publish full blocks, drop what the window passed."""
        hold = self._held[seq.id]
        before = seq.computed
        seq.computed += count
        for g, block in hold.pins:
            self.pools[g].release(block)
        hold.pins.clear()
        if self.index is not None:
            self._publish(self.index, hold, before // self._size, seq.computed // self._size)
        for g, pool in enumerate(self.pools):
            table = seq.tables[g]
            for i in range(self._first(g, before), self._first(g, seq.computed)):
                pool.release(table[i])
                table[i] = NONE
        self._settle()

    def _publish(self, index: PrefixIndex, hold: _Holding, begin: int, end: int) -> None:
        seq = hold.seq
        index.extend_keys(seq.keys, seq.tokens, seq.salt, end)
        planned = self._planned(hold, seq.computed)
        for g, kind in enumerate(self._kinds):
            if kind == "rows":
                self._publish_blocks(index, seq, g, range(begin, end))
            elif kind == "window" and planned:
                self._publish_blocks(index, seq, g, range(self._first(g, seq.computed), end))
        for g, record in hold.taking:
            if index.get(seq.keys[end - 1], g) == NONE:
                index.put(seq.keys, end - 1, g, record)
                self.pools[g].keep(record)
                self._taken += 1
            self.pools[g].release(record)
        hold.taking.clear()
        hold.stops = {s for s in hold.stops if s > seq.computed}
        for key in seq.keys[begin:end]:
            if self._pending.pop(key, None) is not None:
                self.settled.append(key)

    def _publish_blocks(self, index: PrefixIndex, seq: Holder, group: int, span: range) -> None:
        """Enter blocks of the table into the index. Where another sequence was first, hold its block instead:
        then whoever holds a published block also holds the published blocks before it."""
        pool, table = self.pools[group], seq.tables[group]
        for i in span:
            known = index.get(seq.keys[i], group)
            if known == NONE:
                index.put(seq.keys, i, group, table[i])
                pool.keep(table[i])
            elif known != table[i]:
                pool.share(known)
                pool.release(table[i])
                table[i] = known

    def release(self, seq: Holder) -> None:
        """The sequence ends or yields: everything it holds goes back, its last block first. Unpublished is lost."""
        hold = self._held.pop(seq.id)
        for g, block in (*hold.pins, *hold.taking):
            self.pools[g].release(block)
        for g, table in enumerate(seq.tables):
            for block in reversed(table):
                if block != NONE:
                    self.pools[g].release(block)
        seq.tables = []
        for key in hold.pending:
            if self._pending.get(key) is hold:
                del self._pending[key]
                self.settled.append(key)
        self._settle()

    # ---- the cached blocks

    def _evicted(self, group: int, block: int) -> None:
        if self.index is None:
            raise InternalError("a block was cached without an index")
        if self.spill is not None and group in self.index.rows:
            self.spill(self.index.entry(group, block))
        self._drop(self.index, group, block)

    def _drop(self, index: PrefixIndex, group: int, block: int) -> None:
        for g, other in index.drop(group, block):
            self.pools[g].forget(other)

    def clear(self) -> int:
        """Forget every cached block that no running sequence holds, without a copy in a lower tier; returns how many
        became free."""
        if self.index is None:
            return 0
        before = sum(p.free for p in self.pools)
        for g, pool in enumerate(self.pools):
            while (block := pool.oldest_cached()) is not None:
                pool.forget(block)
                self._drop(self.index, g, block)
        return sum(p.free for p in self.pools) - before

    def resize(self, capacity: Sequence[int]) -> None:
        """Have so many blocks in service per group. Cached blocks go first; what sequences hold goes when they let
        go of it (``owed`` tells how much that is)."""
        if self.restores is not None:
            self.restores.close()
        for g, (pool, n) in enumerate(zip(self.pools, capacity, strict=True)):
            self._gone(g, pool.resize(n))
        while self.pins is not None and self.pins.over():
            self.pins.give_way()
        self._settle()  # evicting rows may have freed what went with them, pins what they held

    def take_a_pin(self) -> bool:
        """Let the oldest pin go for blocks that are owed; False when there is none."""
        if self.pins is None or not self.pins.give_way():
            return False
        self._settle()
        return True

    @property
    def owed(self) -> int:
        """Blocks out of service that sequences still hold."""
        return sum(p.owed for p in self.pools)

    def _settle(self) -> None:
        for g, pool in enumerate(self.pools):
            if pool.owed:
                self._gone(g, pool.settle())

    def _gone(self, group: int, blocks: list[int]) -> None:
        if blocks and self.retired is not None:
            self.retired(group, blocks)

    def usage(self) -> tuple[int, int, int]:
        """Blocks of all groups: how many there are, held by sequences, cached. Any thread may ask."""
        total = sum(p.capacity for p in self.pools)
        cached = sum(p.cached for p in self.pools)
        return total, total + self.owed - cached - sum(p.free for p in self.pools), cached

    def stats(self) -> dict[str, int]:
        """Counters since the start (tokens, events) and numbers of blocks now. Any thread may ask."""
        total, used, cached = self.usage()
        return {
            "asked_tokens": self._asked_tokens,
            "hit_tokens": self._hit_tokens,
            "evictions": sum(p.evictions for p in self.pools),
            "snapshots": self._taken,
            "index_entries": 0 if self.index is None else len(self.index),
            "blocks_total": total,
            "blocks_used": used,
            "blocks_cached": cached,
        }

    # ---- proof

    def holds(self, seq: Holder) -> bool:
        """Whether this sequence was admitted and not yet released."""
        return seq.id in self._held

    def pinned(self) -> Iterator[tuple[int, int]]:
        """(group, block) of every reference that no sequence holds."""
        if self.restores is not None:
            yield from self.restores.pins()
        if self.pins is not None:
            yield from self.pins.blocks()

    def pending(self, key: bytes) -> bool:
        """Whether a running sequence has announced this key and not yet published it."""
        return key in self._pending

    def check(self) -> None:
        """Prove who owns every block; an InternalError says which rule is broken. For tests and idle moments."""
        held: list[Counter[int]] = [Counter() for _ in self.pools]
        for hold in self._held.values():
            for g, table in enumerate(hold.seq.tables):
                held[g].update(b for b in table if b != NONE)
            for g, block in (*hold.pins, *hold.taking):
                held[g][block] += 1
            self._check_holding(hold)
        for g, block in self.pinned():
            held[g][block] += 1
        for g, pool in enumerate(self.pools):
            pool.check(held[g])
            published = set() if self.index is None else set(self.index.blocks(g))
            if published != {b for b in range(pool.most) if pool.kept(b)}:
                raise InternalError(f"group {g}: pool and index disagree about which blocks are published")
        for key, hold in self._pending.items():
            if self._held.get(hold.seq.id) is not hold or key not in hold.pending:
                raise InternalError("a pending key belongs to no running sequence")
        if self.index is not None:
            self.index.check()

    def _check_holding(self, hold: _Holding) -> None:
        seq = hold.seq
        full = seq.computed // self._size
        for g, kind in enumerate(self._kinds):
            table, pool = seq.tables[g], self.pools[g]
            if kind == "state":
                if len(table) != 1 or pool.refs(table[0]) != 1 or pool.kept(table[0]):
                    raise InternalError(f"sequence {seq.id}: its state record is missing, shared or published")
                continue
            first = self._first(g, seq.computed)
            if len(table) * self._size < seq.computed or any((b == NONE) != (i < first) for i, b in enumerate(table)):
                raise InternalError(f"sequence {seq.id}: the table of group {g} does not cover what it reads")
            if any(pool.refs(b) != 1 or pool.kept(b) for b in table[full:]):
                raise InternalError(f"sequence {seq.id}: a block that is not full is shared or published")
            if (
                kind == "rows"
                and self.index is not None
                and any(self.index.get(seq.keys[i], g) != table[i] for i in range(full))
            ):
                raise InternalError(f"sequence {seq.id}: a full block is not the published one")
