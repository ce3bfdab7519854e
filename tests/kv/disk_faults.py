"""Faults for the disk store: a file system that fails on purpose, an oracle, and campaigns of any size.

    python -m tests.kv.disk_faults --faults 900 --seed 1

prints one line of a table for each kind of fault. What a key's block holds is computed from the key, so whatever a
read returns is right or wrong on its face: the oracle is "the bytes written for these keys, or a miss".
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from errno import EDQUOT, EINTR, EIO, EMFILE, ENOSPC
from functools import lru_cache
from hashlib import blake2b
from itertools import count
from pathlib import Path
from traceback import extract_tb

from deepseek_flash.errors import ConfigError
from deepseek_flash.kv.disk import DiskStore, Piece, StoreIdentity, Written
from deepseek_flash.kv.files import FileSystem, aligned_buffer
from deepseek_flash.kv.records import record_bytes

ROWS, SNAPSHOT = 1536, 150_001
"""Bytes of a block and of a snapshot; neither is a multiple of a page, and a few snapshots fill a store."""
EXTENT = 4
ROOT = bytes(32)
IDENTITY = StoreIdentity(blake2b(b"one", digest_size=32).digest(), ROWS, SNAPSHOT)
OTHER = StoreIdentity(blake2b(b"two", digest_size=32).digest(), ROWS, SNAPSHOT)
LIMIT = 2 << 20
ERRNOS = (EIO, ENOSPC, EMFILE, EDQUOT, EINTR)
SQLITE = (
    "database is locked", "database or disk is full", "disk I/O error", "database disk image is malformed",
)  # fmt: skip

# ---- the oracle


def chain(name: str, blocks: int) -> list[bytes]:
    """Keys of a chain of blocks."""
    keys = [blake2b(name.encode(), digest_size=32).digest()]
    while len(keys) < blocks:
        keys.append(blake2b(keys[-1], digest_size=32).digest())
    return keys[:blocks]


@lru_cache(maxsize=4096)
def content(key: bytes, nbytes: int) -> bytes:
    """What is stored under a key."""
    return random.Random(key).randbytes(nbytes)


def put(store: DiskStore, keys: list[bytes], at: int = 0, n: int = EXTENT, cost: float = 1.0) -> Written:
    """Write the record of blocks at .. at + n of a chain."""
    part = keys[at : at + n]
    size = store.identity.rows_bytes
    buffer = aligned_buffer(record_bytes(len(part), size))
    start = store.payload_at(len(part))
    for i, key in enumerate(part):
        buffer[start + i * size : start + (i + 1) * size] = content(key, size)
    return store.write("rows", keys[at - 1] if at else ROOT, at, part, buffer, cost)


def put_snapshot(store: DiskStore, keys: list[bytes], at: int) -> Written:
    """Write the snapshot at the end of block ``at``."""
    size = store.identity.snapshot_bytes
    buffer = aligned_buffer(record_bytes(1, size))
    buffer[store.payload_at(1) :][:size] = content(keys[at], size)
    return store.write("snapshot", keys[at], at, [keys[at]], buffer, 1.0)


def right(piece: Piece, payload: memoryview) -> bool:
    """Whether a read's result is whole blocks, each as it was written; nothing is right as well (a miss)."""
    n, rest = divmod(len(payload), piece.block_bytes)
    wanted = b"".join(content(k, piece.block_bytes) for k in piece.keys[:n])
    return rest == 0 and n <= len(piece.keys) and bytes(payload) == wanted


def get(store: DiskStore, piece: Piece, outcome: Counter[str]) -> int:
    """Read a piece and note the outcome; whole blocks."""
    payload = store.read(piece, aligned_buffer(piece.read_bytes))
    outcome["wrong" if not right(piece, payload) else "hit" if len(payload) == piece.nbytes else "miss"] += 1
    return len(payload) // piece.block_bytes


def check(store: DiskStore, chains: list[list[bytes]], outcome: Counter[str]) -> int:
    """Read everything that is found, from every start; blocks that were whole."""
    blocks = 0
    for keys in chains:
        for start in range(0, len(keys), EXTENT):
            for piece in store.find(keys, start):
                blocks += get(store, piece, outcome)
        for key in keys:
            if snapshot := store.find_snapshot(key):
                get(store, snapshot, outcome)
    return blocks


def usage(folder: Path) -> int:
    """Bytes that the folder's files take on disk."""
    total = 0
    for path in folder.iterdir():
        with suppress(FileNotFoundError):
            total += path.stat().st_blocks * 512
    return total


# ---- the file system


class Shim(FileSystem):
    """Counts calls and, at chosen ones, does something else.

    ``act(n, name)`` returns None for the real thing; an errno; ``"kill"``, ``"torn"`` (half a write, then die),
    ``"short"`` (half of what was asked); or a function to call first.
    """

    def __init__(self, act: Callable[[int, str], object] = lambda n, name: None) -> None:
        self.act, self.calls = act, 0
        self.seen: Counter[str] = Counter()
        self.armed = True

    def _before(self, name: str) -> object:
        if not self.armed:
            return None
        self.calls += 1
        self.seen[name] += 1
        action = self.act(self.calls, name)
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if callable(action):
            return action()
        return action

    def _maybe(self, name: str) -> None:
        action = self._before(name)
        if isinstance(action, int) and not isinstance(action, bool):
            raise OSError(action, os.strerror(action))

    def open(self, path: str, flags: int) -> int:
        self._maybe("open")
        return super().open(path, flags)

    def close(self, fd: int) -> None:
        super().close(fd)  # a failing close closes all the same
        self._maybe("close")

    def read(self, fd: int, into: memoryview, offset: int) -> int:
        action = self._before("read")
        if action == "short":
            return super().read(fd, into[: len(into) // 2 // 4096 * 4096 or len(into)], offset)
        if isinstance(action, int):
            raise OSError(action, os.strerror(action))
        return super().read(fd, into, offset)

    def write(self, fd: int, data: memoryview | bytes, offset: int) -> int:
        action = self._before("write")
        if action in ("short", "torn"):
            done = super().write(fd, data[: max(1, len(data) // 2)], offset)
            if action == "torn":
                os.kill(os.getpid(), signal.SIGKILL)
            return done
        if isinstance(action, int):
            raise OSError(action, os.strerror(action))
        return super().write(fd, data, offset)

    def sync(self, fd: int) -> None:
        self._maybe("sync")
        super().sync(fd)

    def truncate(self, fd: int, size: int) -> None:
        self._maybe("truncate")
        super().truncate(fd, size)

    def unlink(self, path: str) -> None:
        self._maybe("unlink")
        super().unlink(path)

    def mkdir(self, path: str) -> None:
        self._maybe("mkdir")
        super().mkdir(path)

    def names(self, path: str) -> list[str]:
        self._maybe("names")
        return list(super().names(path))

    def stat(self, path: str) -> os.stat_result:
        self._maybe("stat")
        return super().stat(path)

    def lock(self, fd: int, *, wait: bool) -> bool:
        self._maybe("lock")
        return super().lock(fd, wait=wait)

    def punch(self, fd: int, offset: int, length: int) -> bool:
        self._maybe("punch")
        return super().punch(fd, offset, length)

    def note(self, what: str) -> None:
        """An index transaction is about to end (``commit``) or did: errors of sqlite are put here."""
        action = self._before(what)
        if isinstance(action, str) and action in SQLITE and what == "commit":
            kind = sqlite3.DatabaseError if "malformed" in action else sqlite3.OperationalError
            raise kind(action)


class PowerShim(Shim):
    """Keeps what was done to the segments, and a copy of the index after every commit, so that the folder can be
    laid out as a power loss at any moment could have left it."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.log: list[tuple[object, ...]] = []
        self._paths: dict[int, str] = {}

    def open(self, path: str, flags: int) -> int:
        new = bool(flags & os.O_CREAT) and not Path(path).exists()
        fd = super().open(path, flags)
        self._paths[fd] = Path(path).name
        if new:
            self.log.append(("create", Path(path).name))
        return fd

    def write(self, fd: int, data: memoryview | bytes, offset: int) -> int:
        done = super().write(fd, data, offset)
        self.log.append(("write", self._paths[fd], offset, bytes(data[:done])))
        return done

    def punch(self, fd: int, offset: int, length: int) -> bool:
        self.log.append(("write", self._paths[fd], offset, bytes(length)))
        return super().punch(fd, offset, length)

    def unlink(self, path: str) -> None:
        super().unlink(path)
        self.log.append(("unlink", Path(path).name))

    def sync(self, fd: int) -> None:
        super().sync(fd)
        name = self._paths[fd]
        self.log.append(("sync folder",) if name == self.folder.name else ("sync", name))

    def note(self, what: str) -> None:
        super().note(what)
        if what == "committed":
            names = ("index.sqlite3", "index.sqlite3-wal")
            self.log.append(("index", {n: (self.folder / n).read_bytes() for n in names if (self.folder / n).exists()}))

    def crash(self, at: int, rng: random.Random, to: Path) -> None:
        """Lay out in ``to`` one state that a power loss after event ``at`` may leave."""
        log = self.log[:at]
        to.mkdir(mode=0o700)
        self._lay_out_segments(log, rng, to)
        copies = [e[1] for e in log if e[0] == "index"]
        if copies and rng.random() < 0.95:  # else the index is gone
            # WAL with synchronous=NORMAL may lose the last transactions, and be torn where they were
            newest = len(copies) - 1
            kept = copies[newest if rng.random() < 0.5 else rng.randrange(len(copies))]
            for name, data in kept.items():
                if name.endswith("-wal") and rng.random() < 0.3:
                    data = data[: rng.randrange(len(data) + 1)]
                (to / name).write_bytes(data)

    @staticmethod
    def _lay_out_segments(log: list[tuple[object, ...]], rng: random.Random, to: Path) -> None:
        last_folder_sync = max((i for i, e in enumerate(log) if e[0] == "sync folder"), default=-1)
        files: dict[str, bytearray] = {}
        for i, event in enumerate(log):
            name = str(event[1]) if len(event) > 1 and event[0] != "index" else ""
            if event[0] == "create" and name.startswith("seg-"):
                if i < last_folder_sync or rng.random() < 0.7:
                    files[name] = bytearray()
            elif event[0] == "unlink" and (i < last_folder_sync or rng.random() < 0.7):
                files.pop(name, None)
            elif event[0] == "write" and name in files:
                synced = any(e == ("sync", name) for e in log[i:])
                _persist(files[name], int(event[2]), bytes(event[3]), "whole" if synced else _fate(rng), rng)
        for name, data in files.items():
            (to / name).write_bytes(data)


def _fate(rng: random.Random) -> str:
    return rng.choice(("whole", "whole", "dropped", "cut", "zeros", "pages"))


def _persist(file: bytearray, offset: int, data: bytes, fate: str, rng: random.Random) -> None:
    """Apply a write that was not synced as it may have reached the disk; pages come in any order."""
    if fate == "dropped":
        return
    if fate == "cut":
        data = data[: rng.randrange(len(data))]
    if len(file) < offset + len(data):
        file.extend(bytes(offset + len(data) - len(file)))  # the size may arrive before the data
    for at in range(0, len(data), 4096):
        if fate == "zeros" or (fate == "pages" and rng.random() < 0.5):
            continue
        file[offset + at : offset + at + 4096] = data[at : at + 4096]


# ---- helpers


@contextmanager
def opened(folder: Path, files: FileSystem | None = None, **options: object) -> Iterator[DiskStore]:
    """A store that is closed at the end."""
    identity = options.pop("identity", IDENTITY)
    options.setdefault("limit_bytes", LIMIT)
    store = DiskStore(folder, identity, files=files, **options)  # type: ignore[arg-type]
    try:
        yield store
    finally:
        store.close()


def in_child(body: Callable[[], object]) -> int:
    """Run in a forked child; its exit status, negative for a signal. 99: it raised."""
    pid = os.fork()
    if pid == 0:
        status = 99
        try:
            status = int(body() or 0)  # type: ignore[call-overload]
        except BaseException as e:
            sys.stderr.write(f"child: {type(e).__name__}: {e}\n")
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


CHAINS = [chain(f"c{i}", 3 * EXTENT) for i in range(4)]


def workload(folder: Path, files: FileSystem, seed: int = 0, outcome: Counter[str] | None = None) -> Counter[str]:
    """One of everything that the store does, on segments so small that many are made. Raises nothing, whatever
    fails; ConfigError from opening counts as refused."""
    outcome = Counter() if outcome is None else outcome
    rng = random.Random(seed)
    try:
        store = DiskStore(folder, IDENTITY, limit_bytes=LIMIT, segment_bytes=64 << 10, files=files)
    except ConfigError:
        outcome["not opened"] += 1
        return outcome
    store.pin("kept", CHAINS[0][:2])
    for at in range(0, 3 * EXTENT, EXTENT):
        for keys in CHAINS:
            written = put(store, keys, at)
            outcome["written" if written.ok else "refused"] += 1
        for keys in CHAINS:
            put_snapshot(store, keys, at + rng.randrange(EXTENT))
    check(store, CHAINS, outcome)
    store.drop(CHAINS[1][-2:])
    store.unpin("kept")
    store.stats(), store.records(), store.pins()
    store.flush()
    put(store, CHAINS[1], 2 * EXTENT)
    store.verify()
    if seed % 3 == 2:
        store.clear()
        put(store, CHAINS[2], 0)
    check(store, CHAINS, outcome)
    store.close()
    store.close()
    return outcome


_FRESH = count()


def sound(folder: Path, outcome: Counter[str], chains: list[list[bytes]] = CHAINS) -> None:
    """Reopen after a fault: what is found is right, the bound holds, and the store is of use again."""
    with opened(folder) as store:
        check(store, chains, outcome)
        fresh = chain(f"fresh {next(_FRESH)}", EXTENT)
        if not put(store, fresh).ok or len(store.find(fresh)) != 1 or not get(store, store.find(fresh)[0], outcome):
            outcome["useless"] += 1
        if usage(folder) > LIMIT:
            outcome["over the bound"] += 1


BAD = ("wrong", "raised", "useless", "over the bound", "other exit")

# ---- campaigns: each adds to ``outcome`` and never stops at a bad one


def count_calls(folder: Path, seed: int = 0) -> int:
    shim = Shim()
    workload(folder, shim, seed)
    return shim.calls


def kills(base: Path, n: int, rng: random.Random) -> Counter[str]:
    """Row 1: SIGKILL before (or in the middle of) the Nth call, every N if ``n`` allows."""
    outcome: Counter[str] = Counter()
    total = {seed: count_calls(base / f"count{seed}", seed) for seed in range(3)}
    points = [(seed, at, how) for seed in total for at in range(1, total[seed] + 1) for how in ("kill", "torn")]
    points = points if n >= len(points) else rng.sample(points, n)
    for seed, at, how in points:
        folder = base / "k"
        status = in_child(lambda f=folder, s=seed, a=at, h=how: workload(f, Shim(_once(a, h)), s) and 0)
        outcome["injected"] += 1
        outcome["killed" if status == -signal.SIGKILL else "survived" if status == 0 else "other exit"] += 1
        _guarded(lambda f=folder: sound(f, outcome), outcome)
        shutil.rmtree(folder, ignore_errors=True)
    return outcome


def _once(at: int, what: object) -> Callable[[int, str], object]:
    """At call ``at``; "torn" waits for the next write."""

    def act(n: int, name: str) -> object:
        if what == "torn":
            return "torn" if n >= at and name == "write" else None
        return what if n == at else None

    return act


def _guarded(call: Callable[[], object], outcome: Counter[str]) -> None:
    try:
        call()
    except Exception as e:
        outcome["raised"] += 1
        frames = [f for f in extract_tb(e.__traceback__) if "deepseek_flash" in f.filename]
        where = " < ".join(f"{Path(f.filename).stem}.{f.name}:{f.lineno}" for f in frames[:-5:-1])
        outcome[f"raised {type(e).__name__} {str(e)[-40:]} in {where}"] += 1


def power(base: Path, n: int, rng: random.Random) -> Counter[str]:
    """Row 2: states that a power loss may leave."""
    outcome: Counter[str] = Counter()
    shims = []
    for seed in range(3):
        shim = PowerShim(base / f"p{seed}")
        workload(shim.folder, shim, seed)
        shims.append(shim)
    for i in range(n):
        shim, folder = rng.choice(shims), base / f"x{i}"
        shim.crash(rng.randrange(1, len(shim.log) + 1), rng, folder)
        outcome["injected"] += 1
        _guarded(lambda f=folder: sound(f, outcome), outcome)
        shutil.rmtree(folder)
    return outcome


def errors(base: Path, n: int, rng: random.Random) -> Counter[str]:
    """Row 3: the Nth call fails, is short or is interrupted, once or from then on; sqlite's errors at commits."""
    outcome: Counter[str] = Counter()
    total = {seed: count_calls(base / f"count{seed}", seed) for seed in range(3)}
    for i in range(n):
        seed, folder = rng.randrange(3), base / f"e{i}"
        at, what = rng.randrange(1, total[seed] + 1), rng.choice((*ERRNOS, "short", *SQLITE))
        last = at if what == EINTR or rng.random() < 0.5 else at + rng.randrange(1, 50)
        shim = Shim(lambda k, name, a=at, b=last, w=what: w if a <= k <= b else None)
        outcome["injected"] += 1
        _guarded(lambda f=folder, s=shim, d=seed: workload(f, s, d, outcome), outcome)
        _guarded(lambda f=folder: sound(f, outcome), outcome)
        shutil.rmtree(folder, ignore_errors=True)
    return outcome


def damage(base: Path, n: int, rng: random.Random) -> Counter[str]:
    """Row 4, whole folders: a file of a closed store is changed in some way."""
    outcome: Counter[str] = Counter()
    good = base / "good"
    workload(good, FileSystem(), 0)
    for i in range(n):
        folder = base / f"d{i}"
        shutil.copytree(good, folder)
        victims = sorted(p for p in folder.iterdir() if p.stat().st_size)
        spoil(rng.choice(victims), rng)
        outcome["injected"] += 1
        _guarded(lambda f=folder: sound(f, outcome), outcome)
        shutil.rmtree(folder)
    return outcome


def spoil(path: Path, rng: random.Random) -> None:
    """Change a file: bits, truncation, garbage behind, zero pages, two pages or records swapped, or gone."""
    data = bytearray(path.read_bytes())
    how = rng.choice(("bit", "bit", "bits", "cut", "garbage", "zeros", "swap", "gone"))
    pages = len(data) // 4096
    if how == "bit":
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif how == "bits":
        for _ in range(50):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif how == "cut":
        del data[rng.randrange(len(data)) :]
    elif how == "garbage":
        data += rng.randbytes(rng.randrange(1, 20000))
    elif how == "zeros" and pages:
        at = rng.randrange(pages) * 4096
        data[at : at + 4096] = bytes(4096)
    elif how == "swap" and pages > 1:
        a, b = (x * 4096 for x in rng.sample(range(pages), 2))
        data[a : a + 4096], data[b : b + 4096] = data[b : b + 4096], data[a : a + 4096]
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(data)


def soak(base: Path, n: int, rng: random.Random) -> Counter[str]:
    """Row 11: random calls in children that are killed at a random call, one folder throughout; n children."""
    outcome: Counter[str] = Counter()
    chains = [chain(f"s{i}", 2 * EXTENT) for i in range(60)]
    for i in range(n):
        at = rng.randrange(20, 1500)
        status = in_child(lambda s=i, a=at: random_calls(base / "s", chains, s, 60, Shim(_once(a, "kill"))))
        outcome["injected"] += 1
        outcome["killed" if status == -signal.SIGKILL else "finished" if status == 0 else "other exit"] += 1
        if status == 98:
            outcome["wrong"] += 1
        _guarded(lambda: sound(base / "s", outcome, chains), outcome)
    return outcome


def random_calls(folder: Path, chains: list[list[bytes]], seed: int, n: int, files: FileSystem | None = None) -> int:
    """Random use of a folder that others may use too; 98 when a read was wrong or the bound was passed."""
    rng, outcome = random.Random(seed), Counter[str]()
    skew = rng.choice((0.0, -1e6, 1e6))
    identity = rng.choice((IDENTITY, IDENTITY, OTHER))
    with opened(folder, files, identity=identity, segment_bytes=256 << 10, clock=lambda: time.time() + skew) as store:
        for _ in range(n):
            keys, what = rng.choice(chains), rng.random()
            if what < 0.55:
                at = rng.randrange(len(keys) // EXTENT) * EXTENT
                put(store, keys, at, rng.randrange(1, EXTENT + 1), rng.random())
            elif what < 0.9:
                pieces = store.find(keys)
                for piece in pieces:
                    get(store, piece, outcome)
            elif what < 0.93:
                put_snapshot(store, keys, rng.randrange(len(keys)))
            elif what < 0.96:
                store.drop(keys[-2:])
            elif what < 0.97:
                store.pin(f"p{rng.randrange(3)}", keys[:1])
            elif what < 0.98:
                store.unpin(f"p{rng.randrange(3)}")
            elif what < 0.99:
                store.flush()
            else:
                store.clear()
            outcome["over"] += usage(folder) > LIMIT
    return 98 if outcome["wrong"] or outcome["over"] else 0


CAMPAIGNS: dict[str, Callable[[Path, int, random.Random], Counter[str]]] = {
    "1 SIGKILL": kills, "2 power loss": power, "3 failing calls": errors, "4 damaged files": damage, "11 soak": soak,
}  # fmt: skip


def main() -> None:
    """Run the campaigns and write their table to standard output."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--faults", type=int, default=900, help="of each kind")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="the beginning of a row's name")
    args = parser.parse_args()
    out = sys.stdout.write
    out("| row | injected | hit | miss | wrong | raised | useless | over the bound | other |\n" + "|---" * 9 + "|\n")
    for name, campaign in CAMPAIGNS.items():
        if name.startswith(args.only):
            with tempfile.TemporaryDirectory() as base:
                found = campaign(Path(base), args.faults, random.Random(args.seed))
            cells = [found.pop(c, 0) for c in ("injected", "hit", "miss", *BAD[:4])]
            rest = ", ".join(f"{k}: {v}" for k, v in sorted(found.items()))
            out(f"| {name} | {' | '.join(map(str, cells))} | {rest} |\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
