"""Moves cache blocks between the device's pool and the tiers below it. Everything here runs on the engine thread.

A request whose prefix a lower tier holds is kept back while the blocks come in and others run; blocks are copied
out when a prompt is complete, when a request ends and when the pool evicts them. Whatever goes wrong, the prefix is
computed instead.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby

from deepseek_flash.kv.disk import DiskStore
from deepseek_flash.kv.manager import KVManager
from deepseek_flash.kv.prefix import NONE, Entry
from deepseek_flash.kv.records import Kind
from deepseek_flash.kv.restore import Place, Restore
from deepseek_flash.kv.store import KVStore
from deepseek_flash.kv.tiers import DiskTier, Fetch, HostPool, Save, digest
from deepseek_flash.metrics import Metrics
from deepseek_flash.runtime.rates import Rates
from deepseek_flash.scheduler.sequence import Sequence as Seq

PATIENCE = 0.25
"""Least seconds that a fetch may take before the prefix is computed instead."""
STALLED = 2.0
"""Seconds without an answer after which the disk is left alone until it answers."""
ROOT = bytes(32)
"""Parent of a chain's first block, in records."""

Post = Callable[[Callable[[], None]], None]


@dataclass(slots=True, eq=False)
class _Incoming:
    """A fetch for a sequence that is kept back. ``rows``, ``snapshot`` and ``done`` come from the disk thread."""

    seq: Seq
    restore: Restore
    tiers: CacheTiers
    deadline: float
    audit: bool = False
    """Compare what comes in with what is computed, instead of using it."""
    fetch: Fetch | None = None
    over: bool = False
    followers: list[Seq] = field(default_factory=list)
    """Sequences that wait for the same blocks."""

    def worth(self, blocks: int, nbytes: int) -> bool:
        return self.audit or self.tiers.rates.worth_loading(blocks * self.tiers.block_size, nbytes)

    def rows(self, depth: int, payload: memoryview, buffer: memoryview) -> None:
        self.tiers.post(partial(self.tiers.rows_came, self, depth, payload, buffer))

    def snapshot(self, boundary: int, payload: memoryview, buffer: memoryview) -> None:
        self.tiers.post(partial(self.tiers.snapshot_came, self, boundary, payload, buffer))

    def done(self, reason: str, nbytes: int, seconds: float) -> None:
        self.tiers.post(partial(self.tiers.fetch_done, self, reason, nbytes, seconds))


def _nobody(_: object) -> None:
    """A closed engine runs nothing."""


class CacheTiers:
    """L2 and L3 of one engine's cache. ``resume(seq)``: the scheduler may run it now."""

    def __init__(
        self,
        manager: KVManager,
        store: KVStore,
        *,
        host: HostPool | None,
        host_snapshots: HostPool | None,
        disk: DiskTier | None,
        post: Post,
        resume: Callable[[Seq], None],
        rates: Rates,
        metrics: Metrics,
        verify_every: int | None = None,
    ) -> None:
        assert manager.index is not None
        assert manager.restores is not None
        self._manager, self._index, self._restores = manager, manager.index, manager.restores
        self._store, self._disk, self._host, self._host_snapshots = store, disk, host, host_snapshots
        self.post, self._resume, self.rates, self._metrics = post, resume, rates, metrics
        self.block_size = manager.spec.block_size
        self._verify_every = verify_every
        self._sampled = 0
        self.suspended = False
        """The pool's bytes are not there: nothing may be saved from it."""
        self._incoming: dict[int, _Incoming] = {}
        self._first_keys: dict[bytes, _Incoming] = {}
        self._saved: OrderedDict[bytes, None] = OrderedDict()
        """Keys that the disk has, or will have; forgetting one costs a look at the index."""
        self._most_saved = 4 * sum(p.capacity for p in manager.pools)
        self._done: dict[int, int] = {}
        """Sequence id → leading blocks that need no more saving."""
        self._audits: dict[int, dict[bytes, bytes]] = {}
        manager.spill = self._spill
        self._group_bytes = [g.block_bytes(self.block_size) for g in manager.spec.groups]

    # ---- a request arrives

    def arrived(self, seq: Seq) -> bool:
        """Look for a waiting sequence's prefix below; True if it is to be kept back until ``resume``."""
        if seq.all_logits:
            seq.miss = "prompt_logprobs"
            return False
        limit = (len(seq.tokens) - 1) // self.block_size
        self._index.extend_keys(seq.keys, seq.tokens, seq.salt, limit)
        keys = seq.keys[:limit]
        restore = self._restores.begin(seq.id, keys)
        self._from_host(seq, restore)
        self._done[seq.id] = restore.depth if self._disk is None else 0
        seq.miss = "" if restore.depth == limit and limit else self._unavailable()
        if restore.depth == limit or seq.miss:
            self._settle(seq, restore)
            return False
        running = self._first_keys.get(keys[restore.depth])
        if running is not None:
            running.followers.append(seq)
            self._restores.end(seq.id)
            return True
        self._ask(seq, restore)
        return True

    def _unavailable(self) -> str:
        if self._disk is None:
            return "not in memory"
        since = self._disk.busy_since
        if since is not None and time.perf_counter() - since > STALLED:
            return "disk stalled"
        return ""

    def _settle(self, seq: Seq, restore: Restore) -> None:
        """Nothing more comes: keep the pins only if something was brought back."""
        if not (seq.l2_tokens or seq.l3_tokens):
            self._restores.end(seq.id)

    def _ask(self, seq: Seq, restore: Restore) -> None:
        assert self._disk is not None
        blocks = len(restore.keys) - restore.depth
        patience = max(PATIENCE, 2 * self.rates.prefill_seconds(blocks * self.block_size))
        incoming = _Incoming(seq, restore, self, time.perf_counter() + patience, self._sample())
        incoming.fetch = Fetch(restore.keys, restore.depth, incoming)
        self._incoming[seq.id] = incoming
        self._first_keys[restore.keys[restore.depth]] = incoming
        self._metrics.count("l3_lookups")
        self._disk.fetch(incoming.fetch)

    def _sample(self) -> bool:
        if self._verify_every is None:
            return False
        self._sampled += 1
        return self._sampled % self._verify_every == 0

    def _from_host(self, seq: Seq, restore: Restore) -> None:
        """Bring back what the host pool has, block after block, then the latest snapshot that goes with it."""
        if self._host is None:
            return
        begin, start = time.perf_counter(), restore.depth
        while restore.depth < len(restore.keys):
            data = self._host.get(restore.keys[restore.depth])
            if data is None and not self._index.has_rows(restore.keys[restore.depth]):
                break
            # Placing may evict, and evicting may put into the host pool: take the bytes out of its way first.
            kept = None if data is None else memoryview(bytes(data))
            placed = self._restores.place(restore)
            if placed is None:
                break
            if kept is not None:
                self._fill(placed, kept)
        if restore.depth == start:
            return
        if self._host_snapshots is not None and not self._snapshot_from_host(restore):
            return
        seq.l2_tokens = (restore.depth - start) * self.block_size
        seq.load_seconds += time.perf_counter() - begin
        self._metrics.count("l2_hit_tokens", seq.l2_tokens)

    def _snapshot_from_host(self, restore: Restore) -> bool:
        assert self._host_snapshots is not None
        for boundary in range(restore.depth, 0, -1):
            data = self._host_snapshots.get(restore.keys[boundary - 1])
            if data is not None:
                return self._place_snapshot(restore, boundary, memoryview(bytes(data)))
        return False

    # ---- what the disk thread brings

    def rows_came(self, incoming: _Incoming, depth: int, payload: memoryview, buffer: memoryview) -> None:
        """Blocks of a record, the first after ``depth`` others."""
        assert self._disk is not None
        try:
            if incoming.over or incoming.fetch is None:
                return
            size = sum(self._group_bytes[g] for g in self._index.rows)
            for i in range(len(payload) // size):
                if depth + i != incoming.restore.depth + len(self._audits.get(incoming.seq.id, ())):
                    continue  # somebody computed it in the meantime
                part = payload[i * size : (i + 1) * size]
                if incoming.audit:
                    self._audits.setdefault(incoming.seq.id, {})[incoming.restore.keys[depth + i]] = digest([part])
                    continue
                placed = self._restores.place(incoming.restore)
                if placed is None:  # running sequences need the room
                    incoming.fetch.cancelled = True
                    return
                self._fill(placed, part)
                incoming.seq.l3_tokens += self.block_size
                self._mark_saved(incoming.restore.keys[depth + i])
        finally:
            self._disk.give(buffer)

    def snapshot_came(self, incoming: _Incoming, boundary: int, payload: memoryview, buffer: memoryview) -> None:
        """Window rows and state after ``boundary`` blocks."""
        assert self._disk is not None
        try:
            if not incoming.over and not incoming.audit:
                self._place_snapshot(incoming.restore, boundary, payload)
        finally:
            self._disk.give(buffer)

    def fetch_done(self, incoming: _Incoming, reason: str, nbytes: int, seconds: float) -> None:
        """The disk thread is through with it."""
        if nbytes:
            self.rates.loaded(nbytes, seconds)
            self._metrics.count("l3_read_bytes", nbytes)
            self._metrics.add_seconds("l3_read", seconds)
        if incoming.over:
            return
        self._end(incoming, reason)

    def _end(self, incoming: _Incoming, reason: str) -> None:
        incoming.over = True
        seq = incoming.seq
        self._incoming.pop(seq.id, None)
        for key in [k for k, v in self._first_keys.items() if v is incoming]:
            del self._first_keys[key]
        seq.miss = "verifying" if incoming.audit and seq.id in self._audits else reason
        if incoming.fetch is not None:
            seq.load_seconds += time.perf_counter() - incoming.fetch.begun
        self._metrics.count("l3_hits" if seq.l3_tokens else "l3_misses")
        self._metrics.count("l3_hit_tokens", seq.l3_tokens)
        self._done[seq.id] = incoming.restore.depth if not incoming.audit else 0
        self._settle(seq, incoming.restore)
        self._resume(seq)
        for follower in incoming.followers:
            if not self.arrived(follower):
                self._resume(follower)

    def _place_snapshot(self, restore: Restore, boundary: int, payload: memoryview) -> bool:
        placed = self._restores.place_snapshot(restore, boundary)
        if placed is not None:
            self._fill(placed, payload)
        return placed is not None

    def _fill(self, placed: Sequence[Place], payload: memoryview) -> None:
        at = 0
        for group, block in placed:
            size = self._group_bytes[group]
            if block != NONE:
                self._store.bytes(group, block)[:] = payload[at : at + size]
            at += size

    # ---- time

    def expire(self) -> None:
        """Give up fetches that take too long."""
        if not self._incoming:
            return
        now = time.perf_counter()
        for incoming in [i for i in self._incoming.values() if now >= i.deadline]:
            if incoming.fetch is not None:
                incoming.fetch.cancelled = True
            self._metrics.count("l3_timeouts")
            self._end(incoming, "too slow")

    def patience(self) -> float | None:
        """Seconds until ``expire`` has something to do; None: nothing is coming."""
        if not self._incoming:
            return None
        return max(0.0, min(i.deadline for i in self._incoming.values()) - time.perf_counter())

    # ---- a request goes on and ends

    def computed(self, seq: Seq) -> None:
        """A step of it was committed: save full extents of its prompt, and the rest when the prompt is complete."""
        if seq.id not in self._done:
            return
        full = min(seq.computed, seq.prompt_len) // self.block_size
        if seq.computed < seq.prompt_len:
            full -= full % (self._disk.extent if self._disk is not None else 1)
        if full > self._done[seq.id]:
            self._save_rows(seq, full)
        if seq.computed >= seq.prompt_len:  # its full blocks may all have been saved in the step before
            self._keep_snapshot(seq.keys[:full])
            self._check(seq)

    def leaving(self, seq: Seq) -> None:
        """It is about to give its blocks back: save what its answer added, unless it failed before its prompt was
        read."""
        incoming = self._incoming.get(seq.id)
        if incoming is not None:
            if incoming.fetch is not None:
                incoming.fetch.cancelled = True
            self._drop_waiting(incoming)
        for other in self._incoming.values():
            if seq in other.followers:
                other.followers.remove(seq)
        self._audits.pop(seq.id, None)
        if seq.id in self._done and seq.tables:
            full = seq.computed // self.block_size
            self._save_rows(seq, full)
            self._keep_snapshot(seq.keys[:full])
        self._done.pop(seq.id, None)

    def _drop_waiting(self, incoming: _Incoming) -> None:
        """Whoever waited for a sequence that ends asks again."""
        incoming.over = True
        self._incoming.pop(incoming.seq.id, None)
        for key in [k for k, v in self._first_keys.items() if v is incoming]:
            del self._first_keys[key]
        for follower in incoming.followers:
            if not self.arrived(follower):
                self._resume(follower)

    def _save_rows(self, seq: Seq, end: int) -> None:
        """Copy its blocks, as far as they are not on disk, into records of at most an extent each."""
        keys = seq.keys[:end]
        for begin, stop in self._unsaved(keys, self._done[seq.id]):
            tables = [[(g, seq.tables[g][i]) for g in self._index.rows] for i in range(begin, stop)]
            cost = self.rates.prefill_seconds((stop - begin) * self.block_size)
            parent = keys[begin - 1] if begin else ROOT
            if not self._save("rows", parent, begin, tuple(keys[begin:stop]), tables, cost):
                return  # later, when the prefix is used again or evicted
        self._done[seq.id] = end

    def _unsaved(self, keys: Sequence[bytes], start: int) -> Iterator[tuple[int, int]]:
        """Runs of blocks that are not on disk, cut where extents end."""
        if self._disk is None:
            return
        extent = self._disk.extent
        missing = [i for i in range(start, len(keys)) if keys[i] not in self._saved]
        for _, run in groupby(enumerate(missing), lambda pair: (pair[1] - pair[0], pair[1] // extent)):
            found = [i for _, i in run]
            yield found[0], found[-1] + 1

    def _snapshot_at(self, keys: Sequence[bytes], boundary: int) -> list[Place] | None:
        """The blocks of the snapshot after ``boundary`` blocks; None when there is none, or none is needed."""
        wanted = self._manager.spec.snapshot_blocks(boundary)
        found = [(g, self._index.get(keys[i], g)) for g, i in wanted]
        return None if not found or any(b == NONE for _, b in found) else found

    def _keep_snapshot(self, keys: Sequence[bytes]) -> None:
        """Copy the latest snapshot of a chain, where the model needs them to resume."""
        if not self._manager.spec.needs_snapshots or self.suspended:
            return
        found = ((b, self._snapshot_at(keys, b)) for b in range(len(keys), 0, -1))
        boundary, blocks = next((pair for pair in found if pair[1]), (0, None))
        if blocks is None:
            return
        key = keys[boundary - 1]
        if self._host_snapshots is not None and (into := self._host_snapshots.put(key)) is not None:
            self._copy_out(blocks, into)
        if self._disk is not None and b"s" + key not in self._saved:
            cost = self.rates.prefill_seconds(self.block_size)
            self._save("snapshot", key, boundary - 1, (key,), [blocks], cost)

    def _save(
        self, kind: Kind, parent: bytes, depth: int, keys: tuple[bytes, ...], blocks: list[list[Place]], cost: float
    ) -> bool:
        """Copy blocks into a buffer and hand it to the disk thread; False when there is no buffer."""
        assert self._disk is not None
        if self.suspended:
            return False
        buffer = self._disk.save_buffer()
        if buffer is None:
            self._metrics.count("l3_saves_put_off")
            return False
        at = self._disk.payload_at(len(keys))
        for group, block in (place for places in blocks for place in places):
            size = self._group_bytes[group]
            buffer[at : at + size] = self._store.bytes(group, block)
            at += size
        marks = [b"s" + k for k in keys] if kind == "snapshot" else list(keys)
        for mark in marks:
            self._mark_saved(mark)
        refused = partial(self.post, partial(self._unmark, marks))
        self._disk.save(Save(kind, parent, depth, keys, buffer, cost, refused))
        self._metrics.count("l3_saves")
        return True

    def _mark_saved(self, key: bytes) -> None:
        self._saved[key] = None
        while len(self._saved) > self._most_saved:
            self._saved.popitem(last=False)

    def _unmark(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._saved.pop(key, None)

    # ---- the pool evicts

    def _spill(self, entry: Entry) -> None:
        """A block is about to lose its place in the pool."""
        if self.suspended:
            return
        rows = [(g, entry.blocks[g]) for g in self._index.rows]
        if self._host is not None:
            into = self._host.put(entry.key)
            if into is not None:
                self._copy_out(rows, into)
        if self._disk is not None and entry.key not in self._saved:
            cost = self.rates.prefill_seconds(self.block_size)
            self._save("rows", entry.parent or ROOT, entry.depth, (entry.key,), [rows], cost)

    def _copy_out(self, blocks: Sequence[Place], into: memoryview) -> None:
        at = 0
        for group, block in blocks:
            size = self._group_bytes[group]
            into[at : at + size] = self._store.bytes(group, block)
            at += size

    # ---- looking, and the end

    def stats(self) -> dict[str, object]:
        """Sizes and counters of each tier. Any thread may ask."""
        out: dict[str, object] = {
            "prefill_tokens_per_s": round(self.rates.prefill_tokens_per_second),
            "load_mb_per_s": round(self.rates.load_bytes_per_second / 1e6),
        }
        if self._host is not None:
            out["l2"] = {"bytes": self._host.nbytes, "blocks": self._host.parts, "used": len(self._host)}
        if self._disk is not None:
            out["l3"] = {**self._disk.store.stats(), "faults": list(self._disk.faults)}
        return out

    def host_has(self, keys: Sequence[bytes]) -> bool:
        """Whether the host tier holds all these blocks."""
        host = self._host
        return host is not None and all(key in host for key in keys)

    @property
    def disk(self) -> DiskStore | None:
        """The disk tier's store, if there is one; any thread may use it."""
        return None if self._disk is None else self._disk.store

    def clear_host(self) -> int:
        """Forget the host tier; bytes freed."""
        pools = [p for p in (self._host, self._host_snapshots) if p is not None]
        return sum(p.clear() * p.part_bytes for p in pools)

    def clear_disk(self) -> int:
        """Forget the disk tier, whoever wrote it; bytes freed. Any thread may ask, but for ``forget_saved``."""
        return 0 if self._disk is None else self._disk.store.clear()

    def forget_saved(self) -> None:
        """What was on disk may be gone."""
        self._saved.clear()

    def settle(self, seconds: float) -> bool:
        """Wait until what was handed to the disk thread is done; any thread but the engine's may ask."""
        return self._disk is None or self._disk.settle(seconds)

    def close(self) -> None:
        """Finish saving. Idempotent."""
        self._manager.spill = None
        if self._disk is not None:
            self._disk.close()
        self._resume = self.post = _nobody  # the owner and its loop are not kept

    # ---- verify_every

    def _check(self, seq: Seq) -> None:
        """Compare a sampled hit with what was computed instead of using it."""
        expected = self._audits.pop(seq.id, None)
        if not expected or self._disk is None:
            return
        wrong = []
        for i, key in enumerate(seq.keys[: seq.computed // self.block_size]):
            if key in expected:
                parts = [self._store.bytes(g, seq.tables[g][i]) for g in self._index.rows]
                if digest(parts) != expected[key]:
                    wrong.append(key)
        self._metrics.count("l3_verified_blocks", len(expected))
        if wrong:
            self._metrics.count("l3_quarantined_blocks", len(wrong))
            self._unmark(wrong)
            store = self._disk.store
            self._disk.call(lambda: store.drop(wrong))
