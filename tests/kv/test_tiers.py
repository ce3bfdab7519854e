"""The tiers below the pool: the host pool, the disk thread, and restores into the prefix index."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest

from deepseek_flash.kv.disk import DiskStore
from deepseek_flash.kv.files import FileSystem
from deepseek_flash.kv.prefix import NONE
from deepseek_flash.kv.tiers import DiskTier, Fetch, HostPool, Save
from tests.kv.disk_faults import EXTENT, IDENTITY, LIMIT, ROOT, ROWS, SNAPSHOT, chain, content, put
from tests.kv.toys import SPECS, Driver

posix = pytest.mark.skipif(sys.platform == "win32", reason="the disk store needs a POSIX system")

# ---- the host pool


def test_the_least_recently_used_part_goes_first() -> None:
    gone: list[bytes] = []
    pool = HostPool(3 * 64 + 63, 64, gone.append)
    assert (pool.parts, pool.nbytes) == (3, 192)
    for key in (b"a", b"b", b"c"):
        part = pool.put(key)
        assert part is not None
        part[:] = key * 64
    assert pool.put(b"a") is None  # there already: and now the newest
    assert bytes(pool.get(b"b") or b"") == b"b" * 64
    assert pool.put(b"d") is not None
    assert (gone, pool.evictions, len(pool)) == ([b"c"], 1, 3)
    assert pool.get(b"c") is None
    assert bytes(pool.get(b"a") or b"") == b"a" * 64
    assert pool.clear() == 3
    assert b"a" not in pool
    assert all(pool.put(bytes([i])) is not None for i in range(3))
    assert pool.evictions == 1


@pytest.mark.parametrize(("nbytes", "part"), [(0, 64), (63, 64), (64, 0)])
def test_a_pool_without_room_takes_nothing(nbytes: int, part: int) -> None:
    pool = HostPool(nbytes, part)
    assert pool.put(b"a") is None
    assert pool.get(b"a") is None
    assert len(pool) == pool.clear() == 0


# ---- the disk thread


class Wanted:
    """A sink that compares what it gets and gives buffers back, unless it ``keeps`` them."""

    def __init__(self, tier: DiskTier, keys: list[bytes], *, keeps: bool = False, worth: bool = True) -> None:
        self.tier, self.keys, self.keeps, self._worth = tier, keys, keeps, worth
        self.blocks, self.snapshots = 0, list[int]()
        self.reasons: list[str] = []
        self.kept: list[memoryview] = []
        self.first, self.finished = Event(), Event()

    def worth(self, blocks: int, nbytes: int) -> bool:
        return self._worth

    def rows(self, depth: int, payload: memoryview, buffer: memoryview) -> None:
        n = len(payload) // ROWS
        assert bytes(payload) == b"".join(content(k, ROWS) for k in self.keys[depth : depth + n])
        self.blocks += n
        self._back(buffer)

    def snapshot(self, boundary: int, payload: memoryview, buffer: memoryview) -> None:
        assert bytes(payload) == content(self.keys[boundary - 1], SNAPSHOT)
        self.snapshots.append(boundary)
        self._back(buffer)

    def _back(self, buffer: memoryview) -> None:
        if self.keeps:
            self.kept.append(buffer)
        else:
            self.tier.give(buffer)
        self.first.set()

    def done(self, reason: str, nbytes: int, seconds: float) -> None:
        self.reasons.append(reason)
        self.finished.set()


class Stalled(FileSystem):
    """Writes wait until ``go``."""

    def __init__(self) -> None:
        self.go, self.waiting = Event(), Event()

    def write(self, fd: int, data: memoryview | bytes, offset: int) -> int:
        self.waiting.set()
        assert self.go.wait(30)
        return super().write(fd, data, offset)


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    tier = DiskTier(DiskStore(tmp_path, IDENTITY, limit_bytes=LIMIT), ROWS, 0, EXTENT, buffers=2)
    yield tier
    assert tier.close()
    assert not tier.faults


def fetch(tier: DiskTier, keys: list[bytes], start: int = 0, **options: bool) -> Wanted:
    sink = Wanted(tier, keys, **options)
    tier.fetch(Fetch(keys, start, sink))
    assert sink.finished.wait(20)
    assert len(sink.reasons) == 1
    return sink


def save(tier: DiskTier, keys: list[bytes], refused: Event | None = None) -> None:
    buffer = tier.save_buffer(wait=20)
    assert buffer is not None
    for i, key in enumerate(keys):
        at = tier.payload_at(len(keys)) + i * ROWS
        buffer[at : at + ROWS] = content(key, ROWS)
    tier.save(Save("rows", ROOT, 0, tuple(keys), buffer, 1.0, refused.set if refused else lambda: None))


@posix
def test_what_is_saved_is_fetched(tier: DiskTier) -> None:
    keys = chain("a", EXTENT)
    assert fetch(tier, keys).reasons == ["absent"]
    for _ in range(5):  # more than there are buffers
        save(tier, keys)
    assert tier.settle(20)
    sink = fetch(tier, keys, 1)
    assert (sink.blocks, sink.reasons) == (EXTENT - 1, [""])
    assert fetch(tier, [*keys, bytes(32)]).reasons == ["absent"]
    assert fetch(tier, keys, worth=False).reasons == ["slower than computing"]


@posix
def test_an_unforeseen_fault_ends_one_job_and_not_the_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = DiskTier(DiskStore(tmp_path, IDENTITY, limit_bytes=LIMIT), ROWS, 0, EXTENT, buffers=2)
    keys, refused = chain("a", EXTENT), Event()

    def broken(*_: object) -> None:
        raise RuntimeError("what is this?")

    for name in ("write", "find", "read"):
        with monkeypatch.context() as patch:
            patch.setattr(tier.store, name, broken)
            if name == "write":
                save(tier, keys, refused)
                assert refused.wait(20)
                assert tier.settle(20)
                continue
            for _ in range(4):  # no buffer is lost
                assert fetch(tier, keys).reasons == ["failed"]
        if name == "find":
            save(tier, keys)
            assert tier.settle(20)
    assert list(tier.faults) == ["RuntimeError: what is this?"] * 9
    assert fetch(tier, keys).blocks == EXTENT
    assert tier.close()


@posix
def test_a_record_larger_than_a_buffer_is_not_called_damaged(tier: DiskTier) -> None:
    keys = chain("a", 4 * EXTENT)
    assert put(tier.store, keys, 0, 4 * EXTENT).ok
    sink = fetch(tier, keys)
    assert (sink.blocks, sink.reasons) == (0, ["no buffer"])
    assert all(tier.store.has(keys))


@posix
def test_K17_a_fetch_without_buffers_waits_and_can_be_cancelled(tier: DiskTier) -> None:
    keys = chain("a", 4 * EXTENT)
    for at in range(0, 4 * EXTENT, EXTENT):
        assert put(tier.store, keys, at).ok
    sink = Wanted(tier, keys, keeps=True)
    job = Fetch(keys, 0, sink)
    tier.fetch(job)
    assert sink.first.wait(20)
    assert not tier.settle(0.3)
    assert len(sink.kept) == 2
    job.cancelled = True
    assert sink.finished.wait(20)
    assert sink.reasons == ["cancelled"]
    for buffer in sink.kept:
        tier.give(buffer)
    assert fetch(tier, keys).blocks == 4 * EXTENT
    gone = Wanted(tier, keys)
    tier.fetch(Fetch(keys, 0, gone, cancelled=True))
    assert gone.finished.wait(20)
    assert (gone.blocks, gone.reasons) == (0, ["cancelled"])


@posix
def test_a_stalled_disk(tmp_path: Path) -> None:
    files = Stalled()
    tier = DiskTier(DiskStore(tmp_path, IDENTITY, limit_bytes=LIMIT, files=files), ROWS, 0, EXTENT, buffers=2)
    save(tier, chain("a", EXTENT))
    save(tier, chain("b", EXTENT))
    assert files.waiting.wait(20)
    assert tier.busy_since is not None
    assert tier.save_buffer() is None
    assert not tier.settle(0.05)
    waits = Wanted(tier, chain("a", EXTENT))
    tier.fetch(Fetch(waits.keys, 0, waits))
    assert not tier.close(0.05)  # it does not hang
    files.go.set()
    assert tier.close(20)
    assert waits.reasons == ["cancelled"]
    assert tier.settle(0)
    with_both = DiskStore(tmp_path, IDENTITY, limit_bytes=LIMIT)
    assert all(with_both.has([*chain("a", EXTENT), *chain("b", EXTENT)]))  # saves are finished
    with_both.close()


# ---- restores


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("seed", range(3))
def test_random_restores_keep_the_cache_consistent(name: str, seed: int) -> None:
    spec, capacity = SPECS[name]
    kv, rng = Driver(spec, capacity).kv, random.Random(seed)
    index, restores = kv.index, kv.restores
    assert index is not None
    assert restores is not None
    live, placed = {}, 0
    for step in range(300):
        what = rng.random()
        if what < 0.2 and step not in live:
            keys: list[bytes] = []
            index.extend_keys(keys, [rng.randrange(2)] * 24, b"", 6)
            live[step] = restores.begin(step, keys)
        elif what < 0.7 and live:
            restore = rng.choice(list(live.values()))
            before = restore.depth
            places = restores.place(restore) if index.rows else None
            assert restore.depth == before + (places is not None)
            placed += places is not None and any(b != NONE for _, b in places)
        elif what < 0.85 and live:
            restore = rng.choice(list(live.values()))
            restores.place_snapshot(restore, rng.randrange(8))
        elif what < 0.95 and live:
            seq_id = rng.choice(list(live))
            restores.end(seq_id)
            restores.end(seq_id)
            assert restores.place(live.pop(seq_id)) is None
        elif live:
            but = rng.choice(list(live))
            assert restores.close(but) == (len(live) > 1)
            live = {but: live[but]}
        kv.check()
    assert placed or not index.rows
    restores.close()
    assert not list(restores.pins())
    kv.check()
    assert kv.usage()[1] == 0
