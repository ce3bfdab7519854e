"""The operating system's file calls that the disk store makes, in one place so that tests can make them fail."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import sys
from collections.abc import Sequence
from functools import cache

from deepseek_flash.kv.records import aligned

DIRECT = getattr(os, "O_DIRECT", 0)
_KEEP_SIZE, _PUNCH_HOLE = 1, 2


def aligned_buffer(n: int) -> memoryview:
    """``n`` bytes, rounded up to whole pages, at a page's start: what direct I/O can read into."""
    return memoryview(mmap.mmap(-1, aligned(n)))


class FileSystem:
    """Thin calls; every failure is an OSError."""

    def open(self, path: str, flags: int) -> int:
        """A new file is for its owner alone, whatever the umask says."""
        fd = os.open(path, flags | getattr(os, "O_CLOEXEC", 0), 0o600)
        if flags & os.O_CREAT:
            os.fchmod(fd, 0o600)
        return fd

    def close(self, fd: int) -> None:
        os.close(fd)

    def read(self, fd: int, into: memoryview, offset: int) -> int:
        return os.preadv(fd, [into], offset)

    def write(self, fd: int, data: memoryview | bytes, offset: int) -> int:
        return os.pwrite(fd, data, offset)

    def sync(self, fd: int) -> None:
        os.fsync(fd)

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def mkdir(self, path: str) -> None:
        os.makedirs(path, mode=0o700, exist_ok=True)

    def names(self, path: str) -> Sequence[str]:
        return os.listdir(path)

    def stat(self, path: str) -> os.stat_result:
        return os.stat(path)

    def lock(self, fd: int, *, wait: bool) -> bool:
        """Take the file's lock; False when somebody else has it and ``wait`` is not asked for."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return False
        return True

    def unlock(self, fd: int) -> None:
        fcntl.flock(fd, fcntl.LOCK_UN)

    def note(self, what: str) -> None:
        """Something that is not a file call is about to happen, or just did (an index transaction)."""

    def punch(self, fd: int, offset: int, length: int) -> bool:
        """Give a span's disk space back; False where the file system cannot."""
        call = _fallocate()
        if call is None:
            return False
        return bool(call(fd, _KEEP_SIZE | _PUNCH_HOLE, offset, length) == 0)


@cache
def _fallocate() -> ctypes._CFuncPtr | None:  # type: ignore[name-defined]
    if sys.platform != "linux":
        return None
    call = getattr(ctypes.CDLL(None, use_errno=True), "fallocate64", None)
    if call is not None:
        call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return call
