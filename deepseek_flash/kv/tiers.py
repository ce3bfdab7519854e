"""What lies below the device's pool: a host pool (L2), and the thread that reads and writes the disk store (L3).

Bytes only: whoever owns the device pool copies blocks out of it and into it, on its own thread.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, Queue, SimpleQueue
from typing import Protocol, TypeVar

from deepseek_flash.kv.disk import DiskStore, Piece
from deepseek_flash.kv.files import aligned_buffer
from deepseek_flash.kv.records import Kind, checksum, header_bytes, record_bytes

T = TypeVar("T")


class HostPool:
    """L2: equal parts of one allocation, by key, the least recently used first to go. Not thread-safe."""

    def __init__(self, nbytes: int, part_bytes: int, evicted: Callable[[bytes], None] | None = None) -> None:
        """``evicted(key)`` is called while the part still holds its contents."""
        self.parts = nbytes // part_bytes if part_bytes else 0
        self.part_bytes, self.evictions = part_bytes, 0
        self._memory = aligned_buffer(max(1, self.parts * part_bytes))
        self._free = list(range(self.parts - 1, -1, -1))
        self._used: OrderedDict[bytes, int] = OrderedDict()
        self._evicted = evicted

    def __len__(self) -> int:
        return len(self._used)

    def __contains__(self, key: bytes) -> bool:
        return key in self._used

    @property
    def nbytes(self) -> int:
        return self.parts * self.part_bytes

    def put(self, key: bytes) -> memoryview | None:
        """Where to write the contents of a new key; None if it is there already, or nothing can be."""
        if key in self._used:
            self._used.move_to_end(key)
            return None
        if not self.parts:
            return None
        if not self._free:
            oldest = next(iter(self._used))
            if self._evicted is not None:
                self._evicted(oldest)
            self._free.append(self._used.pop(oldest))
            self.evictions += 1
        part = self._used[key] = self._free.pop()
        return self._part(part)

    def get(self, key: bytes) -> memoryview | None:
        """The contents under a key, until the next ``put``."""
        part = self._used.get(key)
        if part is None:
            return None
        self._used.move_to_end(key)
        return self._part(part)

    def clear(self) -> int:
        """Forget everything; how many parts that were."""
        n = len(self._used)
        self._free += self._used.values()
        self._used.clear()
        return n

    def _part(self, part: int) -> memoryview:
        return self._memory[part * self.part_bytes : (part + 1) * self.part_bytes]


class Sink(Protocol):
    """Who asked for blocks. Called on the disk thread; ``buffer`` goes back with ``DiskTier.give``."""

    def worth(self, blocks: int, nbytes: int) -> bool:
        """Whether reading so much is better than computing it."""
        ...

    def rows(self, depth: int, payload: memoryview, buffer: memoryview) -> None: ...
    def snapshot(self, boundary: int, payload: memoryview, buffer: memoryview) -> None: ...
    def done(self, reason: str, nbytes: int, seconds: float) -> None:
        """The last call. ``reason``: why there is no more: ``""`` (all that was asked), ``absent``, ``damaged``,
        ``slower than computing``, ``no buffer``, ``cancelled``, ``failed`` (see ``DiskTier.faults``)."""
        ...


@dataclass(slots=True, eq=False)
class Fetch:
    """A chain's blocks wanted from ``start`` on."""

    keys: Sequence[bytes]
    start: int
    sink: Sink
    cancelled: bool = False
    begun: float = field(default_factory=time.perf_counter)


@dataclass(frozen=True, slots=True)
class Save:
    """A record to write: its payload lies in ``buffer`` where ``DiskTier.payload_at`` says."""

    kind: Kind
    parent: bytes
    depth: int
    keys: tuple[bytes, ...]
    buffer: memoryview
    cost: float
    refused: Callable[[], None]
    """Called on the disk thread when it was not stored."""


class DiskTier:
    """One thread over a DiskStore: fetches go before saves. Buffers for each are apart, so that saving never keeps
    a fetch from its memory."""

    def __init__(self, store: DiskStore, rows_bytes: int, snapshot_bytes: int, extent: int, buffers: int = 3) -> None:
        """``extent``: blocks of a full record. Memory: ``2 * buffers`` records."""
        self.store, self.extent = store, extent
        self._snapshots = snapshot_bytes > 0
        size = max(record_bytes(extent, rows_bytes), record_bytes(1, snapshot_bytes))
        self.nbytes = 2 * buffers * size
        self._buffer_bytes = size
        self._fetch_buffers: Queue[memoryview] = Queue()
        self._save_buffers: Queue[memoryview] = Queue()
        for _ in range(buffers):
            self._fetch_buffers.put(aligned_buffer(size))
            self._save_buffers.put(aligned_buffer(size))
        self._jobs: SimpleQueue[int] = SimpleQueue()
        self._fetches: SimpleQueue[Fetch] = SimpleQueue()
        self._saves: SimpleQueue[Save] = SimpleQueue()
        self._calls: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._closing = False
        self._idle = threading.Event()
        self._idle.set()
        self._left = 0
        self._count = threading.Lock()
        self.busy_since: float | None = None
        """When the job at hand began (perf_counter)."""
        self.faults: deque[str] = deque(maxlen=20)
        """The latest jobs that failed in a way nobody foresaw."""
        self._thread = threading.Thread(target=self._run, name="deepseek-flash-disk", daemon=True)
        self._thread.start()

    @staticmethod
    def payload_at(blocks: int) -> int:
        return header_bytes(blocks)

    def fetch(self, fetch: Fetch) -> None:
        """Its sink hears of it until ``done``."""
        self._add(self._fetches, fetch)

    def save_buffer(self, wait: float = 0.0) -> memoryview | None:
        """Memory for one record, or None when all of it is on its way to the disk."""
        try:
            return self._save_buffers.get(timeout=wait) if wait else self._save_buffers.get_nowait()
        except Empty:
            return None

    def save(self, save: Save) -> None:
        """Write behind; the buffer is taken back."""
        self._add(self._saves, save)

    def call(self, function: Callable[[], object]) -> None:
        """Run something that touches the store on its thread."""
        self._add(self._calls, function)

    def give(self, buffer: memoryview) -> None:
        """A fetch's buffer was read."""
        self._fetch_buffers.put(buffer)

    def settle(self, seconds: float) -> bool:
        """Wait until everything asked for is done; False when it takes longer."""
        return self._idle.wait(seconds)

    def close(self, seconds: float = 10.0) -> bool:
        """Finish saves, drop fetches, close the store. False when the disk does not answer in time: the thread is
        left alone then, and ends when it does."""
        self._closing = True
        self._jobs.put(0)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _add(self, queue: SimpleQueue[T], item: T) -> None:
        with self._count:
            self._left += 1
            self._idle.clear()
        queue.put(item)
        self._jobs.put(1)

    def _run(self) -> None:
        while True:
            self._jobs.get()
            while self._one():
                pass
            if self._closing:
                self.store.close()
                return

    def _one(self) -> bool:
        """Do the most urgent job; False when there is none."""
        job = self._next()
        if job is None:
            return False
        self.busy_since = time.perf_counter()
        try:
            job()
        except Exception as e:  # whatever is wrong with one job, the next ones are served
            self.faults.append(f"{type(e).__name__}: {e}")
        finally:
            self.busy_since = None
            with self._count:
                self._left -= 1
                if not self._left:
                    self._idle.set()
        return True

    def _next(self) -> Callable[[], object] | None:
        with suppress(Empty):
            return partial(self._fetch, self._fetches.get_nowait())
        with suppress(Empty):
            return partial(self._save, self._saves.get_nowait())
        with suppress(Empty):
            return self._calls.get_nowait()
        return None

    def _save(self, save: Save) -> None:
        stored = False
        try:
            written = self.store.write(save.kind, save.parent, save.depth, save.keys, save.buffer, save.cost)
            stored = written.ok or written.reason == "exists"
        finally:
            self._save_buffers.put(save.buffer)
            if not stored:
                save.refused()

    def _fetch(self, fetch: Fetch) -> None:
        begin = time.perf_counter()
        read = 0
        reason = "cancelled"
        try:
            if not (fetch.cancelled or self._closing):
                reason = "failed"
                reason, read = self._bring(fetch)
        finally:
            fetch.sink.done(reason, read, time.perf_counter() - begin)

    def _bring(self, fetch: Fetch) -> tuple[str, int]:
        pieces = self.store.find(fetch.keys, fetch.start)
        end = fetch.start + sum(len(p.keys) for p in pieces)
        if self._snapshots:
            known = self.store.has(fetch.keys[:end], "snapshot")
            end = max((i + 1 for i in range(fetch.start, end) if known[i]), default=fetch.start)
        if end == fetch.start:
            return "absent", 0
        if not fetch.sink.worth(end - fetch.start, sum(p.nbytes for p in pieces)):
            return "slower than computing", 0
        at, read = fetch.start, 0
        for piece in pieces:
            if at >= end:
                break
            got, trouble = self._piece(fetch, piece, at)
            read += piece.read_bytes
            at += got
            if fetch.cancelled or self._closing:
                return "cancelled", read
            if trouble:
                return trouble, read
        if self._snapshots:
            snapshot = self.store.find_snapshot(fetch.keys[end - 1])
            trouble = "damaged" if snapshot is None else self._piece(fetch, snapshot, end)[1]
            if trouble:
                return trouble, read
        return ("" if end == len(fetch.keys) else "absent"), read

    def _piece(self, fetch: Fetch, piece: Piece, depth: int) -> tuple[int, str]:
        """(blocks handed over, why that was not all of the piece)."""
        if piece.read_bytes > self._buffer_bytes:  # written with a larger extent
            return 0, "no buffer"
        buffer = self._take(fetch)
        if buffer is None:
            return 0, "cancelled"
        try:
            payload = self.store.read(piece, buffer)
        except BaseException:
            self.give(buffer)
            raise
        blocks = len(payload) // piece.block_bytes
        if not blocks:
            self.give(buffer)
            return 0, "damaged"
        if piece.kind == "snapshot":
            fetch.sink.snapshot(depth, payload, buffer)
        else:
            fetch.sink.rows(depth, payload, buffer)
        return blocks, "" if blocks == len(piece.keys) else "damaged"

    def _take(self, fetch: Fetch) -> memoryview | None:
        while not (fetch.cancelled or self._closing):
            try:
                return self._fetch_buffers.get(timeout=0.1)
            except Empty:
                continue
        return None


def digest(parts: Sequence[memoryview]) -> bytes:
    """The checksum that a record keeps of a block made of these parts."""
    return checksum(parts[0] if len(parts) == 1 else b"".join(parts))
