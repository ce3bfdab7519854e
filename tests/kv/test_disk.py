"""The disk store: what is found and read back, its bound, what goes first, pins, processes that share a folder."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import stat
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from deepseek_flash.errors import ConfigError
from deepseek_flash.kv.disk import SMALLEST_LIMIT, DiskStore
from deepseek_flash.kv.files import FileSystem, aligned_buffer
from deepseek_flash.kv.records import ALIGN, record_bytes
from tests.kv.disk_faults import (
    EXTENT,
    IDENTITY,
    LIMIT,
    OTHER,
    ROWS,
    SNAPSHOT,
    chain,
    check,
    content,
    get,
    opened,
    put,
    put_snapshot,
    right,
    usage,
)  # fmt: skip

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the disk store needs a POSIX system")


def found(store: DiskStore, keys: list[bytes], start: int = 0) -> int:
    """Leading blocks that are found and read back as they were written."""
    outcome = Counter[str]()
    blocks = sum(get(store, piece, outcome) for piece in store.find(keys, start))
    assert not outcome["wrong"]
    return blocks


# ---- write, find, read


def test_what_was_written_is_found_and_read(tmp_path: Path) -> None:
    keys = chain("a", EXTENT)
    with opened(tmp_path) as store:
        assert store.find(keys) == []
        assert put(store, keys).ok
        (piece,) = store.find(keys)
        assert (piece.keys, piece.first, piece.blocks) == (tuple(keys), 0, EXTENT)
        payload = store.read(piece, aligned_buffer(piece.read_bytes))
        assert bytes(payload) == b"".join(content(k, ROWS) for k in keys)
        assert put(store, keys).reason == "exists"
        assert store.stats()["writes"] == 1


def test_a_new_instance_finds_it(tmp_path: Path) -> None:
    keys = chain("a", EXTENT)
    with opened(tmp_path) as store:
        assert put(store, keys).ok
        assert put_snapshot(store, keys, 2).ok
        info = store.records()
    with opened(tmp_path) as store:
        assert found(store, keys) == EXTENT
        assert store.has(keys, "snapshot") == [False, False, True, False]
        snapshot = store.find_snapshot(keys[2])
        assert snapshot is not None
        payload = store.read(snapshot, aligned_buffer(snapshot.read_bytes))
        assert bytes(payload) == content(keys[2], SNAPSHOT)
        assert store.find_snapshot(keys[1]) is None
        assert [(r.kind, r.bytes) for r in info] == [(r.kind, r.bytes) for r in store.records()]


def test_the_longest_chain_from_any_start(tmp_path: Path) -> None:
    keys = chain("a", 4 * EXTENT)
    with opened(tmp_path) as store:
        for at in (0, EXTENT, 3 * EXTENT):  # the third record is missing
            assert put(store, keys, at).ok
        assert [p.keys for p in store.find(keys)] == [tuple(keys[:EXTENT]), tuple(keys[EXTENT : 2 * EXTENT])]
        assert found(store, keys) == 2 * EXTENT
        for start in range(2 * EXTENT):
            assert found(store, keys, start) == 2 * EXTENT - start
        assert store.find(keys, 2 * EXTENT) == []
        assert found(store, keys, 3 * EXTENT + 1) == EXTENT - 1
        fork = [*keys[: EXTENT + 2], *chain("fork", 3)]
        assert found(store, fork) == EXTENT + 2


def test_partial_records_and_what_continues_them(tmp_path: Path) -> None:
    keys = chain("a", 2 * EXTENT)
    with opened(tmp_path) as store:
        assert put(store, keys, 0, 2).ok
        assert put(store, keys, 2, 1).ok
        assert put(store, keys, 3, EXTENT).ok
        assert [len(p.keys) for p in store.find(keys)] == [2, 1, EXTENT]
        assert found(store, keys) == 3 + EXTENT
        assert put(store, keys, 0, EXTENT).reason == "exists"


def test_buffers_that_are_not_aligned_and_no_direct_io(tmp_path: Path) -> None:
    keys = chain("a", EXTENT)
    with opened(tmp_path, direct=False) as store:
        assert put(store, keys).ok
    with opened(tmp_path) as store:
        (piece,) = store.find(keys)
        assert right(piece, store.read(piece, memoryview(bytearray(piece.read_bytes + 1))[1:]))
        assert store.stats()["damaged"] == 0


# ---- identity


@pytest.mark.parametrize(
    "other",
    [OTHER, replace(IDENTITY, rows_bytes=ROWS * 2), replace(IDENTITY, snapshot_bytes=SNAPSHOT + 1)],
    ids=["weights", "rows", "snapshot"],
)
def test_another_identity_finds_nothing_of_its_kind(tmp_path: Path, other: object) -> None:
    keys = chain("a", EXTENT)
    with opened(tmp_path) as store:
        assert put(store, keys).ok
        assert put_snapshot(store, keys, 0).ok
    with opened(tmp_path, identity=other) as store:
        rows = other.rows_bytes == ROWS and other.digest == IDENTITY.digest  # type: ignore[attr-defined]
        assert (len(store.find(keys)) == 1) == rows
        assert (store.find_snapshot(keys[0]) is not None) == (other.snapshot_bytes == SNAPSHOT and other is not OTHER)  # type: ignore[attr-defined]
        assert len(store.records()) == 2  # people see them all the same
    with opened(tmp_path) as store:
        assert found(store, keys) == EXTENT


# ---- the bound


class Measured(FileSystem):
    """Looks at the folder after every write and index transaction, where it is fullest."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.most = folder, 0

    def _look(self) -> None:
        taken = 0
        for path in self.folder.iterdir():
            if path.exists():
                taken += path.stat().st_blocks * 512
        self.most = max(self.most, taken)

    def write(self, fd: int, data: memoryview | bytes, offset: int) -> int:
        done = super().write(fd, data, offset)
        self._look()
        return done

    def note(self, what: str) -> None:
        self._look()


@pytest.mark.parametrize("seed", range(2))
def test_K10_Z04_the_bound_holds_at_every_moment(tmp_path: Path, seed: int) -> None:
    rng, files = random.Random(seed), Measured(tmp_path)
    with opened(tmp_path, files, segment_bytes=200_000) as store:
        for i in range(200):
            keys = chain(f"{seed} {i % 150}", 2 * EXTENT)
            put(store, keys, 0, rng.randrange(1, EXTENT + 1))
            if rng.random() < 0.3:
                put_snapshot(store, keys, 0)
            if rng.random() < 0.3:
                found(store, keys)
        stats = store.stats()
        assert stats["evicted"]
        assert usage(tmp_path) <= stats["bytes"] <= LIMIT  # type: ignore[operator]
    assert LIMIT // 2 < files.most <= LIMIT


def test_a_record_that_cannot_fit_is_refused(tmp_path: Path) -> None:
    big = replace(IDENTITY, rows_bytes=LIMIT)
    with opened(tmp_path, identity=big) as store:
        assert put(store, chain("a", 1)).reason == "space"
        assert usage(tmp_path) <= LIMIT


def test_what_is_worth_little_goes_first_and_tails_before_heads(tmp_path: Path) -> None:
    dear, cheap = chain("dear", 3 * EXTENT), chain("cheap", 3 * EXTENT)
    with opened(tmp_path) as store:
        for at in range(0, 3 * EXTENT, EXTENT):
            assert put(store, cheap, at, cost=0.001).ok
            assert put(store, dear, at, cost=10.0).ok
        lengths = []
        for i in range(400):
            assert put(store, chain(f"filler {i}", EXTENT), cost=1.0).ok
            left = store.has(cheap)
            assert left == sorted(left, reverse=True)  # a prefix at any time
            if not lengths or lengths[-1] != sum(left):
                lengths.append(sum(left))
        assert lengths[-1] == 0
        assert found(store, dear) == 3 * EXTENT


def test_what_is_used_stays(tmp_path: Path) -> None:
    used, idle = chain("used", EXTENT), chain("idle", EXTENT)
    with opened(tmp_path) as store:
        assert put(store, used).ok
        assert put(store, idle).ok
        for i in range(300):
            found(store, used)
            assert put(store, chain(f"filler {i}", EXTENT)).ok
        assert all(store.has(used))
        assert not any(store.has(idle))


def test_the_write_rate(tmp_path: Path) -> None:
    now, length = [0.0], record_bytes(EXTENT, ROWS)
    with opened(
        tmp_path, write_bytes_per_second=length / 10, write_burst_bytes=2 * length, monotonic=lambda: now[0]
    ) as store:
        chains = [chain(f"c{i}", EXTENT) for i in range(4)]
        assert [put(store, c).ok for c in chains[:2]] == [True, True]
        assert put(store, chains[2]).reason == "write rate"
        now[0] += 9.9
        assert put(store, chains[2]).reason == "write rate"
        now[0] += 0.2
        assert put(store, chains[2]).ok
        now[0] -= 1000  # a clock that goes backwards gives nothing
        assert put(store, chains[3]).reason == "write rate"


# ---- pins, drop, clear, verify


def test_pins_keep_records_through_eviction_and_reopening(tmp_path: Path) -> None:
    keys, later = chain("pinned", EXTENT), chain("later", EXTENT)
    with opened(tmp_path) as store:
        assert put(store, keys, cost=1e-6).ok
        assert store.pin("system prompt", [*keys, *later])
    with opened(tmp_path) as store:
        assert put(store, later, cost=1e-6).ok  # pinned before it was written
        assert store.pins() == {"system prompt": 2 * EXTENT}
        for i in range(300):
            put(store, chain(f"filler {i}", EXTENT))
        assert found(store, keys) == found(store, later) == EXTENT
        assert sum(r.pinned for r in store.records()) == 2
        assert store.unpin("system prompt")
        assert not store.unpin("system prompt")
        for i in range(300, 600):
            put(store, chain(f"filler {i}", EXTENT))
        assert not any(store.has(keys))


def test_drop_and_clear(tmp_path: Path) -> None:
    a, b = chain("a", EXTENT), chain("b", EXTENT)
    with opened(tmp_path) as store:
        assert put(store, a).ok
        assert put(store, b).ok
        store.pin("p", b)
        assert store.drop(a[1:2]) == 1
        assert store.drop(a) == 0
        assert store.find(a) == []
        assert found(store, b) == EXTENT
        assert store.clear() == record_bytes(EXTENT, ROWS)
        assert store.find(b) == []
        assert store.pins() == {}
        assert not list(tmp_path.glob("seg-*"))
        assert put(store, a).ok
        assert found(store, a) == EXTENT


def test_verify_drops_what_is_damaged_of_every_identity(tmp_path: Path) -> None:
    chains = [chain(f"c{i}", EXTENT) for i in range(3)]
    with opened(tmp_path) as store:
        for keys in chains:
            assert put(store, keys).ok
        assert store.verify().damaged == 0
        (path,) = tmp_path.glob("seg-*")
    length = record_bytes(EXTENT, ROWS)
    with path.open("r+b") as f:
        f.seek(length + ALIGN)
        byte = f.read(1)[0]
        f.seek(length + ALIGN)
        f.write(bytes([byte ^ 1]))
    with opened(tmp_path, identity=None) as store:
        seen: list[tuple[int, int]] = []
        report = store.verify(lambda done, of: seen.append((done, of)))
        assert (report.records, report.bytes, report.damaged) == (3, 3 * length, 1)
        assert seen == [(n * length, 3 * length) for n in (1, 2, 3)]
        assert store.verify().damaged == 0
    with opened(tmp_path) as store:
        assert [found(store, keys) for keys in chains] == [EXTENT, 0, EXTENT]


# ---- the folder


def test_everything_is_for_its_owner_alone(tmp_path: Path) -> None:
    folder, mask = tmp_path / "deep" / "cache", os.umask(0)
    try:
        with opened(folder) as store:
            assert put(store, chain("a", EXTENT)).ok
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in folder.iterdir()}
    finally:
        os.umask(mask)
    assert len(modes) >= 4
    assert set(modes.values()) == {0o600}, modes


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    file, foreign = tmp_path / "file", tmp_path / "foreign"
    file.write_text("x")
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("x")
    for path, says in ((file, "xists"), (file / "below", "irectory"), (foreign, "other files")):
        with pytest.raises(ConfigError, match=says) as e, opened(path):
            pass
        assert e.value.field == "l3_cache_path"
    with pytest.raises(ConfigError, match="at least") as e, opened(tmp_path / "small", limit_bytes=SMALLEST_LIMIT - 1):
        pass
    assert e.value.field == "l3_cache_gb"


@pytest.mark.parametrize("how", ["deleted", "garbage", "deleted while open"])
def test_a_lost_index_is_made_again(tmp_path: Path, how: str) -> None:
    keys = chain("a", 2 * EXTENT)
    with opened(tmp_path) as store:
        assert put(store, keys, 0).ok
        assert put(store, keys, EXTENT).ok
        assert put_snapshot(store, keys, EXTENT).ok
        if how == "deleted while open":
            for path in tmp_path.glob("index.*"):
                path.unlink()
            assert found(store, keys) == 2 * EXTENT
    for path in tmp_path.glob("index.*"):
        path.unlink() if how == "deleted" else path.write_bytes(b"garbage" * 1000) if how == "garbage" else None
    with opened(tmp_path) as store:
        assert found(store, keys) == 2 * EXTENT
        assert store.find_snapshot(keys[EXTENT]) is not None
        assert len(store.records()) == 3


def index_statement(folder: Path, text: str) -> None:
    db = sqlite3.connect(folder / "index.sqlite3", isolation_level=None)
    db.execute(text)
    db.close()


def test_a_newer_format_is_refused_and_left_alone(tmp_path: Path) -> None:
    keys = chain("a", EXTENT)
    with opened(tmp_path) as store:
        assert put(store, keys).ok
    index_statement(tmp_path, "UPDATE meta SET value = 99 WHERE name = 'version'")
    with pytest.raises(ConfigError, match="newer"), opened(tmp_path):
        pass
    assert not list(tmp_path.glob("owner-*"))
    index_statement(tmp_path, "UPDATE meta SET value = 1 WHERE name = 'version'")
    with opened(tmp_path) as store:
        assert found(store, keys) == EXTENT


@pytest.mark.parametrize(
    "harm", ["DROP TABLE meta", "UPDATE meta SET value = 0", "DELETE FROM meta WHERE name = 'bytes'"]
)
def test_pins_survive_a_damaged_index(tmp_path: Path, harm: str) -> None:
    keys = chain("a", EXTENT)
    with opened(tmp_path) as store:
        assert put(store, keys).ok
        assert store.pin("system prompt", keys)
    index_statement(tmp_path, harm)
    with opened(tmp_path) as store:
        assert store.pins() == {"system prompt": EXTENT}
        assert [r.pinned for r in store.records()] == [True]
        assert found(store, keys) == EXTENT


def test_a_wrong_sum_of_bytes_is_put_right(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        assert put(store, chain("a", EXTENT)).ok
        before = store.stats()["bytes"]
    index_statement(tmp_path, "UPDATE meta SET value = -1000000 WHERE name = 'bytes'")
    with opened(tmp_path) as store:
        assert abs(int(store.stats()["bytes"]) - int(before)) < 100_000  # the index's own files vary


# ---- processes

CHILD = """
import sys
from tests.kv.disk_faults import EXTENT, chain, opened, put, check
from collections import Counter
from pathlib import Path
with opened(Path(sys.argv[1])) as store:
    if sys.argv[2] == "find":
        outcome = Counter()
        sys.exit(0 if check(store, [chain("a", EXTENT)], outcome) == EXTENT and not outcome["wrong"] else 3)
    for i in range(100000 if sys.argv[2] == "forever" else 1):
        assert put(store, chain("b" if not i else f"b{i}", EXTENT)).ok
        print(i, flush=True)
"""


def child(folder: Path, what: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", CHILD, str(folder), what], stdout=subprocess.PIPE, text=True)


def test_two_processes_share_a_folder(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        assert put(store, chain("a", EXTENT)).ok
        assert child(tmp_path, "find").wait(60) == 0  # what the one wrote, the other finds
        with child(tmp_path, "write") as other:
            assert other.wait(60) == 0
        assert found(store, chain("b", EXTENT)) == EXTENT  # while it stayed open
        assert found(store, chain("a", EXTENT)) == EXTENT


def test_a_killed_writer_leaves_a_folder_of_use(tmp_path: Path) -> None:
    with child(tmp_path, "forever") as other:
        assert other.stdout is not None
        for _ in range(20):
            other.stdout.readline()
        os.kill(other.pid, signal.SIGKILL)
    outcome = Counter[str]()
    with opened(tmp_path) as store:
        assert check(store, [chain("b", EXTENT), *(chain(f"b{i}", EXTENT) for i in range(1, 20))], outcome)
        assert outcome == {"hit": 20}
        assert put(store, chain("new", EXTENT)).ok
        assert usage(tmp_path) <= LIMIT
        assert len(list(tmp_path.glob("owner-*"))) == 1
