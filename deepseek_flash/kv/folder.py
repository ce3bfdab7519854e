"""The disk store's folder: its segment files, who writes which, and an index that is made again when it is lost.

    index.sqlite3 (-wal, -shm)   which record is where
    seg-<owner>-<n>.kv           records, one after the other; appended to by one process only
    owner-<owner>.lock           locked as long as that process has the folder open
    folder.lock                  locked while somebody opens or repairs the folder

A process that dies leaves its lock free: whoever opens the folder next frees what it had reserved but not finished,
and takes stock of segments that the index does not know.
"""

from __future__ import annotations

import os
import sqlite3
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from errno import EDQUOT, ENOSPC
from pathlib import Path
from secrets import token_hex
from types import MappingProxyType

from deepseek_flash.errors import ConfigError
from deepseek_flash.kv.disk_index import NAME, DiskIndex, NewerIndex, Row, salvaged_pins
from deepseek_flash.kv.files import FileSystem
from deepseek_flash.kv.records import ALIGN, Header, header_bytes, parse

LOCK = "folder.lock"
INDEX_FILES = (NAME, f"{NAME}-wal", f"{NAME}-shm", f"{NAME}-journal")
GROWTH = 256 << 10
"""Bytes that the index may grow by between two looks at its size."""
_SCAN = 1 << 20
_BUSY = ("locked", "busy")


def _ours(name: str) -> bool:
    return name in (LOCK, *INDEX_FILES) or name.startswith(("seg-", "owner-"))


class Folder:
    """Not thread-safe: the store's lock is held around every call but ``segment_path``."""

    def __init__(self, path: Path, files: FileSystem, max_segments: int, counts: Counter[str]) -> None:
        self.path, self._files, self._max_segments, self._counts = path, files, max_segments, counts
        self.owner = token_hex(8)
        self.disabled = ""
        """Why the store does nothing any more, if so."""
        self._index: DiskIndex | None = None
        self._closed = False
        self._current: tuple[int, str, int, int] | None = None
        """The segment being appended to: id, name, descriptor, size."""
        self._made = 0
        self._check()
        self._owner_lock = self._files.open(str(path / f"owner-{self.owner}.lock"), os.O_RDWR | os.O_CREAT)
        self._files.lock(self._owner_lock, wait=True)
        try:
            self._index = self._opened()
        except (sqlite3.Error, OSError) as e:
            self.close()
            raise ConfigError(f"l3_cache_path={str(path)!r}: {e}", field="l3_cache_path", value=str(path)) from None

    def _check(self) -> None:
        """ConfigError unless the folder is, or can become, ours alone."""
        wrong = ""
        if sys.platform == "win32":
            wrong = "the disk store needs a POSIX system"
        try:
            self._files.mkdir(str(self.path))
            if not self.path.is_dir():
                wrong = "not a folder"
            else:
                strangers = [n for n in self._files.names(str(self.path)) if not _ours(n)]
                if strangers:
                    wrong = f"the folder holds other files ({strangers[0]!r}); give the cache a folder of its own"
                elif self.path.stat().st_uid != os.geteuid():
                    wrong = "the folder belongs to another user"
                else:
                    self.path.chmod(0o700)
        except OSError as e:
            wrong = str(e)
        if wrong:
            raise ConfigError(f"l3_cache_path={str(self.path)!r}: {wrong}", field="l3_cache_path", value=str(self.path))

    # ---- the index

    def index(self) -> DiskIndex | None:
        """The index as it is now, opened again when somebody replaced the file. None when there is none."""
        if self._closed or self.disabled:
            return None
        if self._index is not None:
            with suppress(OSError):
                if self._files.stat(str(self._index.path)).st_ino == self._index.inode:
                    return self._index
            self._index.close()
            self._index = None
        self._drop_current()
        self._index = self._opened()
        return self._index

    def trouble(self, error: Exception) -> None:
        """An index call or a write failed: count it, and make the index again if it is damaged."""
        if isinstance(error, OSError):
            name = "disk full" if error.errno in (ENOSPC, EDQUOT) else "disk errors"
            self._counts[name] += 1
            return
        if any(word in str(error) for word in (*_BUSY, "full", "disk I/O")):
            self._counts["index busy or full"] += 1
            return
        self._counts["index damaged"] += 1
        bad = 0
        if self._index is not None:
            bad = self._index.inode
            self._index.close()
            self._index = None
        try:
            self._drop_current()
            self._index = self._opened(bad)
        except (sqlite3.Error, OSError) as e:
            self.disabled = f"the index cannot be made again: {e}"

    def _opened(self, bad: int = 0) -> DiskIndex:
        """Open the index, or make it again when it is damaged, and put it in agreement with what is on disk.

        ``bad``: inode of a file that is damaged where opening does not look; another process may have replaced it.
        """
        fd = self._files.open(str(self.path / LOCK), os.O_RDWR | os.O_CREAT)
        try:
            self._files.lock(fd, wait=True)
            try:
                index = self._sound_index()
                if index.inode != bad:
                    return index
                index.close()
            except NewerIndex:
                raise
            except sqlite3.DatabaseError as e:
                if any(word in str(e) for word in _BUSY):
                    raise
            self._counts["index made again"] += 1
            pins = salvaged_pins(self.path / NAME)
            for name in INDEX_FILES:
                with suppress(FileNotFoundError):
                    self._files.unlink(str(self.path / name))
            return self._sound_index(pins)
        finally:
            self._files.close(fd)

    def _sound_index(self, pins: Mapping[str, Sequence[bytes]] = MappingProxyType({})) -> DiskIndex:
        index = DiskIndex(self.path)
        try:
            for name in INDEX_FILES:
                with suppress(OSError):
                    os.chmod(self.path / name, 0o600)
            index.used_bytes()
            if pins:
                with self.transaction(index):
                    for pin, keys in pins.items():
                        index.pin(pin, keys)
            self._agree(index)
        except BaseException:
            index.close()
            raise
        return index

    @contextmanager
    def transaction(self, index: DiskIndex) -> Iterator[None]:
        with index.transaction():
            yield
            self._files.note("commit")
        self._files.note("committed")

    def _agree(self, index: DiskIndex) -> None:
        """Forget what the dead reserved and files that are gone, take in segments that the index does not know."""
        present = {n for n in self._files.names(str(self.path)) if n.startswith("seg-")}
        living = {self.owner} | {
            n[6:-5] for n in self._files.names(str(self.path)) if n.startswith("owner-") and self._lives(n)
        }
        with self.transaction(index):
            index.count_bytes()
            torn = [r for i, owner in index.pending() if owner not in living and (r := index.retire(i, self.owner))]
            known = {name: (sid, owner) for sid, name, owner, _ in index.segments()}
            for name, (sid, owner) in known.items():
                if name not in present and owner not in living:
                    rows = [r for i in index.records_in(sid) if (r := index.retire(i, self.owner))]
                    index.remove(rows)
                    index.remove_segment(sid)
        self._free(index, [r for r in torn if r.segment in present])
        for name in sorted(present - known.keys()):
            with self.transaction(index):
                self._take_in(index, name)
        self._sweep(index, living)

    def _lives(self, lock_name: str) -> bool:
        """Whether the process that made an owner's lock still has it; a dead one's is removed."""
        if lock_name == f"owner-{self.owner}.lock":
            return True
        path = str(self.path / lock_name)
        try:
            fd = self._files.open(path, os.O_RDWR)
        except OSError:
            return False
        try:
            if not self._files.lock(fd, wait=False):
                return True
            with suppress(FileNotFoundError):
                self._files.unlink(path)
            return False
        finally:
            self._files.close(fd)

    def _take_in(self, index: DiskIndex, name: str) -> None:
        """Enter every record of a segment that has a valid header; payloads are checked when they are read."""
        segment = index.add_segment(name, name.split("-")[1])
        fd = self._files.open(self.segment_path(name), os.O_RDONLY)
        try:
            for offset, header in self._scan(fd):
                known = index.lookup(header.identity, ("rows", "snapshot").index(header.kind), header.keys)
                if len(known) < len(header.keys):
                    index.publish(index.insert(header, segment, offset, self.owner), header)
                    self._counts["records taken in"] += 1
        finally:
            self._files.close(fd)

    def _scan(self, fd: int) -> Iterator[tuple[int, Header]]:
        size, at = os.fstat(fd).st_size, 0
        buffer = memoryview(bytearray(_SCAN))
        while at < size:
            n = self._files.read(fd, buffer, at)
            if n < ALIGN:
                return
            here = 0
            while here + ALIGN <= n:
                header = parse(buffer[here:n])
                if header is None and here and n - here < header_bytes(4096) and n == _SCAN:
                    break  # it may be cut off at the buffer's end: read on from here
                if header is None:
                    here += ALIGN
                elif at + here + header.length > size:
                    return
                else:
                    yield at + here, header
                    here += header.length
            at += here

    # ---- segments

    def segment_path(self, name: str) -> str:
        return str(self.path / name)

    def overhead(self) -> int:
        """Bytes on disk beside records: the index's files, with room to grow, and what files cost themselves."""
        used = GROWTH
        for name in INDEX_FILES:
            with suppress(OSError):
                found = self._files.stat(str(self.path / name))
                used += max(found.st_size, found.st_blocks * 512)
        return used

    def place(self, index: DiskIndex, header: Header, segment_bytes: int) -> tuple[Row, int] | str:
        """Enter a pending record; where it goes, and the open file. Inside a transaction."""
        if self._current is not None:
            sid, _, _, size = self._current
            if not index.has_segment(sid) or (size and size + header.length > segment_bytes):
                self._drop_current()
        if self._current is None:
            if len(index.segments()) >= self._max_segments:
                return "files"
            self._made += 1
            name = f"seg-{self.owner}-{self._made}.kv"
            fd = self._files.open(self.segment_path(name), os.O_RDWR | os.O_CREAT | os.O_EXCL)
            self._current = index.add_segment(name, self.owner), name, fd, 0
            self._sync_folder()
        sid, name, fd, size = self._current
        record = index.insert(header, sid, size, self.owner)
        self._current = sid, name, fd, size + header.length
        return Row(record, name, size, header.length), fd

    def free(self, rows: Sequence[Row]) -> None:
        """Give retired records' disk space back."""
        if self._index is not None:
            self._free(self._index, rows)
            self._sweep(self._index, None)

    def _free(self, index: DiskIndex, rows: Sequence[Row]) -> None:
        freed = [row for row in rows if self._punch(row)]
        if freed:
            with self.transaction(index):
                index.remove(freed)

    def _punch(self, row: Row) -> bool:
        """False where the file system cannot: the space comes back with the whole segment."""
        try:
            fd = self._files.open(self.segment_path(row.segment), os.O_RDWR)
        except FileNotFoundError:
            return True
        try:
            if self._files.punch(fd, row.offset, row.length):
                return True
            self._files.write(fd, bytes(ALIGN), row.offset)  # so that it is not taken in again
            return False
        except OSError:
            return False
        finally:
            self._files.close(fd)

    def _sweep(self, index: DiskIndex, living: set[str] | None) -> None:
        """Remove segments that hold nothing any more and that nobody appends to."""
        current = None if self._current is None else self._current[0]
        done = []
        for sid, name, owner, _ in index.segments():
            dead = living is not None and owner not in living
            if sid == current or not (dead or owner == self.owner):
                continue
            rows = [r for i, o in index.pending_in(sid) if o == self.owner and (r := index.retire(i, self.owner))]
            if index.whole_in(sid) or len(rows) < len(index.records_in(sid)):
                continue
            with suppress(FileNotFoundError):
                self._files.unlink(self.segment_path(name))
            done.append((sid, rows))
        if done:
            with self.transaction(index):
                for sid, rows in done:
                    index.remove(rows)
                    index.remove_segment(sid)

    def _drop_current(self) -> None:
        """Append to it no more."""
        if self._current is not None:
            fd, self._current = self._current[2], None
            with suppress(OSError):
                self._files.sync(fd)
            self._files.close(fd)

    def _sync_folder(self) -> None:
        with suppress(OSError):
            fd = self._files.open(str(self.path), os.O_RDONLY)
            try:
                self._files.sync(fd)
            finally:
                self._files.close(fd)

    # ---- whole-folder operations

    def pin(self, name: str, keys: Sequence[bytes]) -> bool:
        index = self.index()
        if index is None:
            return False
        with self.transaction(index):
            index.pin(name, keys)
        return True

    def unpin(self, name: str) -> bool:
        index = self.index()
        if index is None:
            return False
        with self.transaction(index):
            return index.unpin(name)

    def clear(self) -> int:
        """Forget everything; bytes freed."""
        index = self.index()
        if index is None:
            return 0
        self._drop_current()
        with self.transaction(index):
            names = [name for _, name, _, _ in index.segments()]
            freed = index.used_bytes()
            index.clear()
        for name in names:
            with suppress(FileNotFoundError):
                self._files.unlink(self.segment_path(name))
        index.shrink()
        return freed

    def sync(self) -> None:
        if self._current is not None:
            self._files.sync(self._current[2])

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._drop_current()
        if self._index is not None:
            with suppress(sqlite3.Error):
                self._index.close()
        with suppress(OSError):
            self._files.unlink(str(self.path / f"owner-{self.owner}.lock"))
        with suppress(OSError):
            self._files.close(self._owner_lock)
