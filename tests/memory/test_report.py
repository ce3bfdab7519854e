from __future__ import annotations

import dataclasses
import pickle

import pytest

from deepseek_flash.memory.probe import HostMemory
from deepseek_flash.memory.report import CacheUse, MemoryLine, MemoryReport, human

USE = CacheUse(pool_bytes=3 << 20, total_blocks=10, used_blocks=3, cached_blocks=4)


def report() -> MemoryReport:
    return MemoryReport.measure(
        weights=5 << 20,
        kv_cache=USE,
        more=[MemoryLine("workspace", 512, "scratch of a step")],
        host=HostMemory(8 << 30, 2 << 30, "cgroup v2"),
        rss=100 << 20,
    )


def test_the_parts_add_up():
    r = report()
    assert [line.name for line in r.lines] == ["weights", "kv_cache", "workspace"]
    assert r.engine_bytes == (5 << 20) + (3 << 20) + 512
    assert (r.weights, r.process_rss, r.available, r.total) == (5 << 20, 100 << 20, 2 << 30, 8 << 30)
    assert USE.free_blocks == 3


def test_the_table_is_aligned_and_names_the_limit():
    lines = str(report()).splitlines()
    assert len(lines) == 6
    assert lines[1].startswith("kv_cache ")
    assert lines[1].endswith("10 blocks: 3 in use, 4 cached, 3 free")
    assert "of 8.0 GiB (cgroup v2)" in lines[-1]
    starts = {
        line.index(what)
        for line, what in zip(lines, ("param", "10 bl", "scratch", "sum", "resid", "still"), strict=True)
    }
    assert len(starts) == 1


def test_it_is_frozen_and_survives_pickling():
    r = report()
    with pytest.raises(dataclasses.FrozenInstanceError):
        r.total = 0  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(r)) == r


def test_measure_probes_when_nothing_is_given():
    r = MemoryReport.measure(weights=1, kv_cache=USE)
    assert 0 < r.process_rss < r.total
    assert 0 < r.available <= r.total


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536 << 10, "1.5 MiB"),
        (3 << 30, "3.0 GiB"),
        (5 << 40, "5.0 TiB"),
    ],
)
def test_human(size, text):
    assert human(size) == text
