"""How much memory this process may use, how much is free, and how much it holds. Bytes throughout.

Standard library only. Linux reads procfs and cgroup v1 or v2 files, whose paths are parameters so that tests can
fake them; macOS and Windows ask the system through ctypes.
"""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NO_LIMIT = 1 << 60
"""cgroup v1 spells "no limit" as a page-aligned number near 2**63; nothing real is this large."""


@dataclass(frozen=True, slots=True)
class Paths:
    """Where Linux tells about memory."""

    meminfo: Path = Path("/proc/meminfo")
    statm: Path = Path("/proc/self/statm")
    cgroup: Path = Path("/proc/self/cgroup")
    cgroup_root: Path = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Memory of the machine as this process may use it. Bytes."""

    total: int
    """The smaller of the machine's RAM and every cgroup limit above this process."""
    available: int
    """What can still be taken without swapping or being killed; reclaimable file cache counts as free."""
    limited_by: str
    """``"machine"``, ``"cgroup v1"`` or ``"cgroup v2"``: whose number ``total`` is."""


def host_memory(paths: Paths | None = None, *, platform: str | None = None, library: Any = None) -> HostMemory:
    """Total and available memory. ``OSError`` where the system tells neither (no known platform does)."""
    paths = paths or Paths()
    platform = platform or sys.platform
    if platform == "darwin":
        return _darwin_memory(library or _darwin_library())
    if platform in ("win32", "cygwin"):
        return _windows_memory(library or _windows_library().kernel32)
    total, available = _meminfo(paths.meminfo) or _sysconf()
    limited_by = "machine"
    for kind, limit, free in _cgroup_limits(paths):
        available = min(available, free)
        if limit < total:
            total, limited_by = limit, kind
    return HostMemory(total, max(0, min(available, total)), limited_by)


def process_rss(paths: Paths | None = None, *, platform: str | None = None, library: Any = None) -> int:
    """Bytes of RAM this process holds now, mapped file pages included."""
    platform = platform or sys.platform
    if platform == "darwin":
        return _darwin_rss(library or _darwin_library())
    if platform in ("win32", "cygwin"):
        return _windows_rss(library or _windows_library().kernel32)
    fields = (paths or Paths()).statm.read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def _meminfo(path: Path) -> tuple[int, int] | None:
    """(MemTotal, MemAvailable) in bytes; kernels before 3.14 have no MemAvailable: free + cached stands in."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    kib: dict[str, int] = {}
    for line in lines:
        name, _, rest = line.partition(":")
        value = rest.split()
        if value and value[0].isdigit():
            kib[name] = int(value[0])
    if "MemTotal" not in kib:
        return None
    free = kib.get("MemAvailable", kib.get("MemFree", 0) + kib.get("Cached", 0))
    return kib["MemTotal"] * 1024, free * 1024


def _sysconf() -> tuple[int, int]:
    page = os.sysconf("SC_PAGE_SIZE")
    total = os.sysconf("SC_PHYS_PAGES") * page
    available = os.sysconf("SC_AVPHYS_PAGES") * page if "SC_AVPHYS_PAGES" in os.sysconf_names else total
    return total, available


def _cgroup_limits(paths: Paths) -> list[tuple[str, int, int]]:
    """(kind, limit, bytes left under it) of this process's memory cgroup and each one above it that has a limit."""
    try:
        entries = paths.cgroup.read_text().splitlines()
    except OSError:
        return []
    found = []
    for entry in entries:
        number, _, rest = entry.partition(":")
        controllers, _, where = rest.partition(":")
        if number == "0" and not controllers:
            names = ("cgroup v2", "memory.max", "memory.current", "inactive_file")
            root = paths.cgroup_root
        elif "memory" in controllers.split(","):
            names = ("cgroup v1", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            root = paths.cgroup_root / "memory"
        else:
            continue
        kind, limit_file, usage_file, reclaimable = names
        for folder in _upwards(root, where):
            limit, usage = _number(folder / limit_file), _number(folder / usage_file)
            if limit is None or limit >= NO_LIMIT:
                continue
            used = (usage or 0) - _stat(folder / "memory.stat", reclaimable)
            found.append((kind, limit, max(0, limit - max(0, used))))
    return found


def _upwards(root: Path, where: str) -> list[Path]:
    """The cgroup's folder and its parents up to the root. Inside a container the path may be the host's and not be
    there; the root is then the container's own group."""
    parts = [p for p in where.split("/") if p not in ("", ".", "..")]
    return [root.joinpath(*parts[:n]) for n in range(len(parts), -1, -1)]


def _number(path: Path) -> int | None:
    """The file's integer; None for "max", and for a file that is missing or unreadable."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _stat(path: Path, key: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        name, _, value = line.partition(" ")
        if name == key and value.strip().isdigit():
            return int(value)
    return 0


def _darwin_library() -> Any:
    return ctypes.CDLL("/usr/lib/libSystem.dylib", use_errno=True)


def _darwin_memory(lib: Any) -> HostMemory:
    """sysctl hw.memsize; free and inactive pages of host_statistics64 (HOST_VM_INFO64)."""
    total = ctypes.c_uint64(0)
    size = ctypes.c_size_t(ctypes.sizeof(total))
    if lib.sysctlbyname(b"hw.memsize", ctypes.byref(total), ctypes.byref(size), None, ctypes.c_size_t(0)) != 0:
        raise OSError(ctypes.get_errno(), "sysctl hw.memsize failed")
    counts = (ctypes.c_uint32 * 64)()  # vm_statistics64: free, active, inactive, wired, …
    n = ctypes.c_uint32(38)
    if lib.host_statistics64(lib.mach_host_self(), 4, ctypes.byref(counts), ctypes.byref(n)) != 0:
        return HostMemory(total.value, total.value, "machine")
    page = os.sysconf("SC_PAGE_SIZE")
    return HostMemory(total.value, min(total.value, (counts[0] + counts[2]) * page), "machine")


def _darwin_rss(lib: Any) -> int:
    """ri_resident_size of proc_pid_rusage (RUSAGE_INFO_V0): the seventh 64-bit word after a 16-byte id."""
    words = (ctypes.c_uint64 * 16)()
    if lib.proc_pid_rusage(os.getpid(), 0, ctypes.byref(words)) != 0:
        raise OSError(ctypes.get_errno(), "proc_pid_rusage failed")
    return int(words[8])


class _MemoryStatus(ctypes.Structure):
    _fields_ = [
        ("length", ctypes.c_uint32),
        ("load", ctypes.c_uint32),
        ("total", ctypes.c_uint64),
        ("available", ctypes.c_uint64),
        ("rest", ctypes.c_uint64 * 5),
    ]


class _ProcessCounters(ctypes.Structure):
    _fields_ = [
        ("length", ctypes.c_uint32),
        ("faults", ctypes.c_uint32),
        ("peak_working_set", ctypes.c_size_t),
        ("working_set", ctypes.c_size_t),
        ("rest", ctypes.c_size_t * 6),
    ]


def _windows_library() -> Any:
    return getattr(ctypes, "windll")  # noqa: B009  (absent from the stubs elsewhere)


def _windows_memory(kernel32: Any) -> HostMemory:
    status = _MemoryStatus(length=ctypes.sizeof(_MemoryStatus))
    if not kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):
        raise OSError("GlobalMemoryStatusEx failed")
    return HostMemory(int(status.total), int(status.available), "machine")


def _windows_rss(kernel32: Any) -> int:
    counters = _ProcessCounters(length=ctypes.sizeof(_ProcessCounters))
    process = ctypes.c_void_p(-1)  # the pseudo handle of GetCurrentProcess, at full pointer width
    if not kernel32.K32GetProcessMemoryInfo(process, ctypes.byref(counters), ctypes.c_uint32(counters.length)):
        raise OSError("K32GetProcessMemoryInfo failed")
    return int(counters.working_set)


def trim_heap() -> None:
    """Hand freed heap pages back to the system, where the C library has a call for it (glibc).

    After large buffers come and go glibc keeps blocks of up to 32 MiB in its heap; without this a closed
    engine's memory would stay in the process's resident size.
    """
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
