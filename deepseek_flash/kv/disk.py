"""The disk store (L3): records of cache blocks in packed files, found by prefix key, within a bound, across restarts.

Trouble with the disk never reaches a caller: a read that fails in any way is a miss, a write that fails is refused,
and both are counted. Nothing is found before it is whole; every read is checked against checksums, so a record can
be lost but not be wrong. Several threads and processes may share a folder.
"""

from __future__ import annotations

import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from errno import EMFILE, ENFILE, ENOENT, ENOMEM
from pathlib import Path
from threading import RLock

from deepseek_flash.errors import ConfigError
from deepseek_flash.kv.disk_index import Found, Row
from deepseek_flash.kv.files import DIRECT, FileSystem
from deepseek_flash.kv.folder import Folder
from deepseek_flash.kv.records import KINDS, Header, Kind, aligned, good_blocks, header_bytes, parse, seal, sums_of

SEGMENT_BYTES = 64 << 20
SMALLEST_LIMIT = 2 << 20
HALF_LIFE = 7 * 86400.0
"""Seconds without use after which a record counts half."""
NOT_ITS_FAULT = (EMFILE, ENFILE, ENOMEM)
"""Errors of a read that say nothing about the record."""


@dataclass(frozen=True, slots=True)
class StoreIdentity:
    """Which engines' records fit together."""

    digest: bytes
    """32 bytes over everything that the stored bytes depend on beside the prefix keys."""
    rows_bytes: int
    """Of one block in all rows groups."""
    snapshot_bytes: int = 0
    """Of what else resuming at a boundary needs; 0: nothing."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive blocks of one record."""

    row: Row
    kind: Kind
    keys: tuple[bytes, ...]
    first: int
    """Position of keys[0] in the record."""
    blocks: int
    """Of the record."""
    block_bytes: int

    @property
    def read_bytes(self) -> int:
        """What a read takes: from the record's start to the end of the last block wanted."""
        return header_bytes(self.blocks) + aligned((self.first + len(self.keys)) * self.block_bytes)

    @property
    def nbytes(self) -> int:
        return len(self.keys) * self.block_bytes


@dataclass(frozen=True, slots=True)
class Written:
    """Whether a record was stored; else why not: ``exists``, ``space``, ``write rate``, ``error: …``."""

    ok: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class RecordInfo:
    """One record, for people. Times in seconds since the epoch."""

    kind: Kind
    identity: str
    depth: int
    blocks: int
    bytes: int
    cost: float
    created: float
    used: float
    hits: int
    pinned: bool


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What reading everything found."""

    records: int
    bytes: int
    damaged: int


class DiskStore:
    """One folder, seen by one process. ``identity`` None: for looking at a folder only."""

    def __init__(
        self,
        path: str | Path,
        identity: StoreIdentity | None,
        *,
        limit_bytes: int,
        segment_bytes: int = SEGMENT_BYTES,
        write_bytes_per_second: float | None = None,
        write_burst_bytes: int = 1 << 30,
        max_segments: int = 4096,
        files: FileSystem | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        direct: bool = True,
        verify: bool = True,
    ) -> None:
        """ConfigError when the folder cannot be used. ``limit_bytes``: of everything in the folder.

        ``write_bytes_per_second``: mean rate of writing beyond a first ``write_burst_bytes``, to spare the disk.
        ``verify=False`` trusts what is on disk; it is there to show that the fault tests need the checksums.
        """
        if limit_bytes < SMALLEST_LIMIT:
            raise ConfigError(
                f"l3_cache_gb: {limit_bytes} bytes are too few; the disk store needs at least {SMALLEST_LIMIT} "
                f"({SMALLEST_LIMIT / 1e9:.3f} GB)",
                field="l3_cache_gb",
                value=limit_bytes,
            )
        self.limit, self.identity = limit_bytes, identity
        self._segment_bytes, self._verify = segment_bytes, verify
        self._clock, self._monotonic = clock, monotonic
        self._files = files or FileSystem()
        self._direct = DIRECT if direct else 0
        self._rate, self._burst = write_bytes_per_second, float(write_burst_bytes)
        self._tokens, self._filled = self._burst, monotonic()
        self._lock = RLock()
        self._counts: Counter[str] = Counter()
        self._hits: Counter[int] = Counter()
        self._folder = Folder(Path(path), self._files, max_segments, self._counts)
        self._closed = False

    # ---- looking

    def find(self, keys: Sequence[bytes], start: int = 0) -> list[Piece]:
        """Pieces that hold keys[start:], one after the other, as far as the store has them."""
        found = self._lookup("rows", keys[start:])
        pieces: list[Piece] = []
        for key in keys[start:]:
            block = found.get(key)
            if block is None:
                break
            last = pieces[-1] if pieces else None
            if last and last.row.id == block.row.id and last.first + len(last.keys) == block.position:
                pieces[-1] = self._piece(block, "rows", (*last.keys, key), last.first)
            else:
                pieces.append(self._piece(block, "rows", (key,), block.position))
        return pieces

    def find_snapshot(self, key: bytes) -> Piece | None:
        """The snapshot at the end of this block."""
        found = self._lookup("snapshot", [key]).get(key)
        return None if found is None else self._piece(found, "snapshot", (key,), 0)

    def has(self, keys: Sequence[bytes], kind: Kind = "rows") -> list[bool]:
        """For each key, whether it is stored."""
        found = self._lookup(kind, keys)
        return [key in found for key in keys]

    def _lookup(self, kind: Kind, keys: Sequence[bytes]) -> dict[bytes, Found]:
        if self.identity is None or not keys:
            return {}
        size = self.identity.rows_bytes if kind == "rows" else self.identity.snapshot_bytes
        with self._lock:
            try:
                index = self._folder.index()
                found = index.lookup(self.identity.digest, KINDS.index(kind), keys) if index else {}
            except (sqlite3.Error, OSError) as e:
                self._folder.trouble(e)
                return {}
        return {k: f for k, f in found.items() if f.block_bytes == size}

    @staticmethod
    def _piece(found: Found, kind: Kind, keys: tuple[bytes, ...], first: int) -> Piece:
        return Piece(found.row, kind, keys, first, found.blocks, found.block_bytes)

    # ---- reading

    def read(self, piece: Piece, buffer: memoryview) -> memoryview:
        """The payload of the piece's leading blocks that are whole, a slice of ``buffer``; empty on a miss.

        ``buffer`` has at least ``piece.read_bytes``; with one of ``aligned_buffer`` the system's cache is bypassed
        where the file system can. One read call, then the checksums.
        """
        buffer = buffer[: piece.read_bytes]
        try:
            whole = self._read_into(piece.row, buffer)
        except OSError as e:
            self._count("read_errors")
            if e.errno not in NOT_ITS_FAULT:
                self.drop_records([piece.row.id], "damaged" if e.errno != ENOENT else "gone")
            return buffer[:0]
        good = self._good(piece, buffer) if whole else 0
        if good < len(piece.keys):
            self.drop_records([piece.row.id], "damaged")
        start = header_bytes(piece.blocks) + piece.first * piece.block_bytes
        with self._lock:
            self._counts["reads"] += 1
            self._counts["read_bytes"] += len(buffer)
            if good:
                self._hits[piece.row.id] += 1
        return buffer[start : start + good * piece.block_bytes]

    def _read_into(self, row: Row, buffer: memoryview) -> bool:
        """False when the file ends before."""
        path = self._folder.segment_path(row.segment)
        for direct in dict.fromkeys((self._direct, 0)):
            try:
                fd = self._files.open(path, direct)
            except OSError:
                if direct:
                    continue  # this file system has no direct I/O
                raise
            try:
                return self._fill(fd, buffer, row.offset)
            except OSError:
                if not direct:
                    raise
            finally:
                self._files.close(fd)
        return False

    def _fill(self, fd: int, buffer: memoryview, offset: int) -> bool:
        at = 0
        while at < len(buffer):
            try:
                n = self._files.read(fd, buffer[at:], offset + at)
            except InterruptedError:
                continue
            if n <= 0:
                return False
            at += n
        return True

    def _good(self, piece: Piece, buffer: memoryview) -> int:
        """Leading blocks of the piece that are what the index says and what was written."""
        header = parse(buffer, verify=self._verify)
        if header is None or self.identity is None or header.identity != self.identity.digest:
            return 0
        same = header.kind == piece.kind and len(header.keys) == piece.blocks
        same = same and header.block_bytes == piece.block_bytes
        if not same or header.keys[piece.first : piece.first + len(piece.keys)] != piece.keys:
            return 0
        if not self._verify:
            return len(piece.keys)
        return good_blocks(header, buffer[header.payload_at :], piece.first, len(piece.keys))

    # ---- writing

    def payload_at(self, blocks: int) -> int:
        """Where the payload of a record of so many blocks begins in the buffer given to ``write``."""
        return header_bytes(blocks)

    def write(
        self,
        kind: Kind,
        parent: bytes,
        depth: int,
        keys: Sequence[bytes],
        buffer: memoryview,
        cost: float,
        protect: frozenset[bytes] = frozenset(),
    ) -> Written:
        """Store blocks ``keys`` of a chain, the first after ``depth`` others, whose payload lies in ``buffer`` at
        ``payload_at``; the rest of the buffer, up to the record's end, is overwritten.

        ``cost``: seconds that computing them again takes. ``protect``: keys that must not make room for these.
        """
        if self.identity is None:
            return Written(False, "error: opened for looking only")
        size = self.identity.rows_bytes if kind == "rows" else self.identity.snapshot_bytes
        payload = buffer[header_bytes(len(keys)) :][: len(keys) * size]
        header = Header(
            kind=kind,
            identity=self.identity.digest,
            parent=parent,
            depth=depth,
            keys=tuple(keys),
            sums=sums_of(payload, len(keys)),
            block_bytes=size,
            created=self._clock(),
            cost=cost,
        )
        seal(header, buffer)
        try:
            written = self._store(header, buffer[: header.length], protect)
        except (sqlite3.Error, OSError) as e:
            with self._lock:
                self._folder.trouble(e)
            written = Written(False, f"error: {e}")
        self._count("writes" if written.ok else f"refused: {written.reason.partition(':')[0]}")
        return written

    def _store(self, header: Header, record: memoryview, protect: frozenset[bytes]) -> Written:
        with self._lock:
            if self._closed:
                return Written(False, "error: closed")
            if not self._may_write(header.length):
                return Written(False, "write rate")
            place = self._reserve(header, protect)
            if isinstance(place, str):
                return Written(False, place)
        row, fd = place
        try:
            at = 0
            while at < len(record):
                with suppress(InterruptedError):
                    at += self._files.write(fd, record[at:], row.offset + at)
        except OSError:
            self.drop_records([row.id], "torn")
            raise
        with self._lock:
            index = self._folder.index()
            if index is None:
                return Written(False, "error: the index is not usable")
            with self._folder.transaction(index):
                if not index.publish(row.id, header):
                    return Written(False, "error: cleared meanwhile")
                index.touch(self._hits.items(), self._clock())
            self._hits.clear()
            self._tokens -= header.length
            self._counts["written_bytes"] += header.length
        return Written(True)

    def _may_write(self, n: int) -> bool:
        if self._rate is None:
            return True
        now = self._monotonic()
        self._tokens = min(self._burst, self._tokens + max(0.0, now - self._filled) * self._rate)
        self._filled = now
        return self._tokens >= n

    def _reserve(self, header: Header, protect: frozenset[bytes]) -> tuple[Row, int] | str:
        """Space under the bound and a place in a segment; or why not."""
        folder, need = self._folder, header.length
        for _ in range(64):  # other processes may take what was freed
            index = folder.index()
            if index is None:
                return "error: the index is not usable"
            victims: list[Row] = []
            with folder.transaction(index):
                known = index.lookup(header.identity, KINDS.index(header.kind), header.keys)
                if len(known) == len(header.keys):
                    return "exists"
                over = index.used_bytes() + need + folder.overhead() - self.limit
                if over <= 0:
                    return folder.place(index, header, self._segment_bytes)
                over += self.limit // 64  # some at once: finding victims costs a walk over all records
                kept = index.records_with(header.identity, [*protect, header.parent])
                for record, length in index.victims(self._clock(), HALF_LIFE, 256):
                    if over <= 0:
                        break
                    if record not in kept and (row := index.retire(record, folder.owner)):
                        victims.append(row)
                        over -= length
            if not victims:
                return "space"
            self._counts["evicted"] += len(victims)
            folder.free(victims)
        return "space"

    # ---- removing

    def drop(self, keys: Sequence[bytes]) -> int:
        """Forget the records of this identity that hold any of these keys; how many there were."""
        with self._lock:
            try:
                index = self._folder.index()
                found = index.records_with(self.identity.digest if self.identity else None, keys) if index else set()
            except (sqlite3.Error, OSError) as e:
                self._folder.trouble(e)
                return 0
        self.drop_records(list(found), "dropped")
        return len(found)

    def drop_records(self, records: Sequence[int], why: str) -> None:
        """Forget records. ``why`` is what they are counted as."""
        with self._lock:
            self._counts[why] += len(records)
            try:
                index = self._folder.index()
                if index is not None:
                    with self._folder.transaction(index):
                        rows = [r for i in records if (r := index.retire(i, self._folder.owner))]
                    self._folder.free(rows)
            except (sqlite3.Error, OSError) as e:
                self._folder.trouble(e)

    def clear(self) -> int:
        """Forget everything of every identity, pins too; bytes freed. Safe while others read or write."""
        with self._lock:
            try:
                return self._folder.clear()
            except (sqlite3.Error, OSError) as e:
                self._folder.trouble(e)
                return 0

    # ---- pins

    def pin(self, name: str, keys: Sequence[bytes]) -> bool:
        """Keep these blocks' records, also those still to come, until ``unpin``; False when that failed."""
        return self._pins(lambda: self._folder.pin(name, keys))

    def unpin(self, name: str) -> bool:
        """Whether there was such a pin."""
        return self._pins(lambda: self._folder.unpin(name))

    def _pins(self, call: Callable[[], bool]) -> bool:
        with self._lock:
            try:
                return call()
            except (sqlite3.Error, OSError) as e:
                self._folder.trouble(e)
                return False

    def pins(self) -> dict[str, int]:
        """Name → keys."""
        with self._lock:
            try:
                index = self._folder.index()
                return index.pins() if index else {}
            except (sqlite3.Error, OSError) as e:
                self._folder.trouble(e)
                return {}

    # ---- for people

    def records(self) -> list[RecordInfo]:
        """Every record of every identity."""
        return [
            RecordInfo(
                kind=KINDS[kind],
                identity=identity.hex(),
                depth=depth,
                blocks=blocks,
                bytes=length,
                cost=cost,
                created=created,
                used=used,
                hits=hits,
                pinned=bool(pinned),
            )
            for _, _, _, length, kind, identity, depth, blocks, _, cost, created, used, hits, pinned in self._all()
        ]

    def _all(self) -> list[tuple]:  # type: ignore[type-arg]
        with self._lock:
            try:
                index = self._folder.index()
                return index.all() if index else []
            except (sqlite3.Error, OSError) as e:
                self._folder.trouble(e)
                return []

    def verify(self, progress: Callable[[int, int], None] | None = None) -> VerifyReport:
        """Read every record of every identity and drop what is damaged. ``progress(bytes done, of)``."""
        listed = self._all()
        total, done, damaged = sum(r[3] for r in listed), 0, 0
        for record, segment, offset, length, _, _, _, blocks, *_ in listed:
            buffer = memoryview(bytearray(length))
            try:
                whole = self._read_into(Row(record, segment, offset, length), buffer)
            except OSError:
                whole = False
            header = parse(buffer) if whole else None
            if header is None or good_blocks(header, buffer[header.payload_at :], 0, blocks) < blocks:
                damaged += 1
                self.drop_records([record], "damaged")
            done += length
            if progress is not None:
                progress(done, total)
        return VerifyReport(len(listed), total, damaged)

    def stats(self) -> dict[str, int | str]:
        """Counters since opening, and sizes now. Any thread may ask."""
        with self._lock:
            out: dict[str, int | str] = {
                name: self._counts[name]
                for name in ("reads", "read_bytes", "writes", "written_bytes", "evicted", "damaged", "read_errors")
            }
            out |= {name: n for name, n in self._counts.items() if name not in out}
            out["limit"] = self.limit
            try:
                index = self._folder.index()
                out["disabled"] = self._folder.disabled
                out["records"] = index.count() if index else 0
                out["bytes"] = (index.used_bytes() if index else 0) + self._folder.overhead()
            except (sqlite3.Error, OSError) as e:
                self._folder.trouble(e)
            return out

    def _count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1

    # ---- life

    def flush(self) -> None:
        """Hits are noted, and what was written survives a power loss."""
        with self._lock:
            try:
                index = self._folder.index()
                if index is not None and self._hits:
                    with self._folder.transaction(index):
                        index.touch(self._hits.items(), self._clock())
                    self._hits.clear()
                self._folder.sync()
            except (sqlite3.Error, OSError) as e:
                self._folder.trouble(e)

    def close(self) -> None:
        """Flush and let go of the files. Idempotent."""
        with self._lock:
            if not self._closed:
                self.flush()
                self._closed = True
                self._folder.close()
