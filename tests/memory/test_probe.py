"""Memory limits read from fake procfs and cgroup trees, and from fake macOS and Windows libraries."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from deepseek_flash.memory.probe import HostMemory, Paths, host_memory, process_rss

GIB = 1 << 30
MEMINFO = "MemTotal: {total} kB\nMemFree: 1024 kB\nMemAvailable: {free} kB\nCached: 2048 kB\n"


@pytest.fixture
def fake(tmp_path: Path):
    """A 16 GiB machine with 8 GiB free; `files` adds cgroup files by path relative to the cgroup root."""

    def build(cgroup: str = "", files: dict[str, str] | None = None, meminfo: str | None = None) -> Paths:
        text = MEMINFO.format(total=16 * GIB // 1024, free=8 * GIB // 1024) if meminfo is None else meminfo
        (tmp_path / "meminfo").write_text(text)
        (tmp_path / "cgroup").write_text(cgroup)
        (tmp_path / "statm").write_text("1000 250 30 1 0 200 0\n")
        for name, content in (files or {}).items():
            path = tmp_path / "fs" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        return Paths(tmp_path / "meminfo", tmp_path / "statm", tmp_path / "cgroup", tmp_path / "fs")

    return build


def test_without_a_limit_the_machine_decides(fake):
    assert host_memory(fake(), platform="linux") == HostMemory(16 * GIB, 8 * GIB, "machine")


def test_old_kernels_without_mem_available_use_free_plus_cached(fake):
    paths = fake(meminfo="MemTotal: 4096 kB\nMemFree: 1024 kB\nCached: 2048 kB\n")
    assert host_memory(paths, platform="linux") == HostMemory(4096 * 1024, 3072 * 1024, "machine")


@pytest.mark.parametrize("meminfo", ["", "MemTotal:\n", "rubbish"])
def test_a_useless_meminfo_falls_back_to_sysconf(fake, meminfo):
    got = host_memory(fake(meminfo=meminfo), platform="linux")
    assert got.total == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < got.available <= got.total


def test_cgroup_v2_limit_counts_file_cache_as_free(fake):
    files = {
        "app/memory.max": f"{4 * GIB}\n",
        "app/memory.current": f"{3 * GIB}\n",
        "app/memory.stat": f"anon 5\ninactive_file {2 * GIB}\n",
    }
    assert host_memory(fake("0::/app\n", files), platform="linux") == HostMemory(4 * GIB, 3 * GIB, "cgroup v2")


def test_cgroup_v2_the_tightest_parent_wins(fake):
    files = {
        "a/memory.max": f"{2 * GIB}\n",
        "a/memory.current": f"{1 * GIB}\n",
        "a/b/memory.max": "max\n",
        "a/b/memory.current": "10\n",
    }
    assert host_memory(fake("0::/a/b\n", files), platform="linux") == HostMemory(2 * GIB, 1 * GIB, "cgroup v2")


def test_a_loose_limit_can_still_have_the_least_left(fake):
    files = {
        "memory.max": f"{12 * GIB}",
        "memory.current": f"{11 * GIB}",
        "app/memory.max": f"{6 * GIB}",
        "app/memory.current": f"{1 * GIB}",
    }
    assert host_memory(fake("0::/app\n", files), platform="linux") == HostMemory(6 * GIB, 1 * GIB, "cgroup v2")


def test_inside_a_container_the_path_is_the_hosts_and_the_root_is_ours(fake):
    files = {"memory.max": f"{1 * GIB}", "memory.current": "0"}
    got = host_memory(fake("0::/docker/0123abc/../x\n", files), platform="linux")
    assert got == HostMemory(GIB, GIB, "cgroup v2")


def test_cgroup_v1(fake):
    files = {
        "memory/job/memory.limit_in_bytes": f"{3 * GIB}",
        "memory/job/memory.usage_in_bytes": f"{1 * GIB}",
        "memory/job/memory.stat": "total_inactive_file 0\n",
        "memory/memory.limit_in_bytes": "9223372036854771712",
    }
    cgroup = "12:cpu,cpuacct:/job\n5:memory:/job\n"
    assert host_memory(fake(cgroup, files), platform="linux") == HostMemory(3 * GIB, 2 * GIB, "cgroup v1")


def test_over_the_limit_means_nothing_left_and_a_limit_above_ram_changes_nothing(fake):
    over = {"memory.max": f"{GIB}", "memory.current": f"{2 * GIB}"}
    assert host_memory(fake("0::/\n", over), platform="linux").available == 0
    loose = {"memory.max": f"{64 * GIB}", "memory.current": f"{2 * GIB}"}
    assert host_memory(fake("0::/\n", loose), platform="linux") == HostMemory(16 * GIB, 8 * GIB, "machine")


def test_rss_is_resident_pages(fake):
    assert process_rss(fake(), platform="linux") == 250 * os.sysconf("SC_PAGE_SIZE")


def test_this_machine_answers():
    got = host_memory()
    assert 0 < got.available <= got.total
    assert 1 << 20 < process_rss() < got.total
    if sys.platform == "linux":
        before = process_rss()
        # A mapping of its own: the heap may have freed pages to reuse, which would not show.
        with mmap.mmap(-1, 256 << 20) as held:
            held.write(b"x" * len(held))
            grown = process_rss() - before
        assert grown > 200 << 20


def _fill(reference, **fields) -> None:
    for name, value in fields.items():
        setattr(reference._obj, name, value)


def test_windows_structures():
    def memory(ref):
        assert ref._obj.length == 64  # sizeof(MEMORYSTATUSEX)
        _fill(ref, total=16 * GIB, available=5 * GIB)
        return 1

    def counters(process, ref, size):
        assert ref._obj.length == size.value == 72  # sizeof(PROCESS_MEMORY_COUNTERS), 64 bits
        _fill(ref, working_set=77 << 20)
        return 1

    kernel32 = SimpleNamespace(GlobalMemoryStatusEx=memory, K32GetProcessMemoryInfo=counters)
    assert host_memory(platform="win32", library=kernel32) == HostMemory(16 * GIB, 5 * GIB, "machine")
    assert process_rss(platform="win32", library=kernel32) == 77 << 20
    refusing = SimpleNamespace(GlobalMemoryStatusEx=lambda _: 0, K32GetProcessMemoryInfo=lambda *_: 0)
    with pytest.raises(OSError, match="GlobalMemoryStatusEx"):
        host_memory(platform="win32", library=refusing)
    with pytest.raises(OSError, match="K32GetProcessMemoryInfo"):
        process_rss(platform="win32", library=refusing)


def test_macos_calls():
    page = os.sysconf("SC_PAGE_SIZE")

    def sysctl(name, value, size, _new, _new_size):
        assert name == b"hw.memsize"
        assert size._obj.value == 8
        value._obj.value = 8 * GIB
        return 0

    def statistics(host, flavor, counts, n):
        assert (host, flavor, n._obj.value) == (9, 4, 38)
        counts._obj[0], counts._obj[2] = 100, 50
        return 0

    def rusage(pid, flavor, words):
        assert (pid, flavor) == (os.getpid(), 0)
        assert ctypes.sizeof(words._obj) >= 96
        words._obj[8] = 55 << 20
        return 0

    lib = SimpleNamespace(
        sysctlbyname=sysctl, host_statistics64=statistics, mach_host_self=lambda: 9, proc_pid_rusage=rusage
    )
    assert host_memory(platform="darwin", library=lib) == HostMemory(8 * GIB, 150 * page, "machine")
    assert process_rss(platform="darwin", library=lib) == 55 << 20
    lib.host_statistics64 = lambda *_: 5
    assert host_memory(platform="darwin", library=lib).available == 8 * GIB
    lib.sysctlbyname = lib.proc_pid_rusage = lambda *_: -1
    with pytest.raises(OSError, match=r"hw\.memsize"):
        host_memory(platform="darwin", library=lib)
    with pytest.raises(OSError, match="proc_pid_rusage"):
        process_rss(platform="darwin", library=lib)
