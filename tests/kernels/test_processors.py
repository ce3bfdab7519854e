"""How many processors count: affinity and the quotas of control groups, old and new."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from deepseek_flash.kernels.cpu import processors as module
from deepseek_flash.kernels.cpu.processors import processors, quotas


@pytest.fixture(autouse=True)
def eight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)


def groups(folder: Path, own: str, **files: str) -> tuple[Path, Path]:
    """A /proc/self/cgroup, and files under a cgroup root ("__" between folders, "_DOT_" for a dot)."""
    for name, text in files.items():
        path = folder / "root" / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "own").write_text(own)
    return folder / "own", folder / "root"


CASES: dict[str, tuple[str, dict[str, str], int]] = {
    "none": ("0::/\n", {}, 8),
    "two": ("0::/\n", {"cpu_DOT_max": "200000 100000\n"}, 2),
    "one and a half are two": ("0::/\n", {"cpu_DOT_max": "150000 100000\n"}, 2),
    "a tenth is one": ("0::/\n", {"cpu_DOT_max": "10000 100000\n"}, 1),
    "more than there are": ("0::/\n", {"cpu_DOT_max": "6400000 100000\n"}, 8),
    "no limit": ("0::/\n", {"cpu_DOT_max": "max 100000\n"}, 8),
    "the group's own": ("0::/a/b\n", {"a__b__cpu_DOT_max": "300000 100000\n", "a__cpu_DOT_max": "max 100000\n"}, 3),
    "the one above": ("0::/a/b\n", {"a__b__cpu_DOT_max": "max 100000\n", "a__cpu_DOT_max": "400000 100000\n"}, 4),
    "a host's path in a container": ("0::/docker/1234\n", {"cpu_DOT_max": "200000 100000\n"}, 2),
    "a path that leads out": ("0::/../../..\n", {"cpu_DOT_max": "200000 100000\n"}, 2),
    "version 1": (
        "4:memory:/m\n1:cpu,cpuacct:/x\n",
        {"cpu__x__cpu_DOT_cfs_quota_us": "250000\n", "cpu__x__cpu_DOT_cfs_period_us": "100000\n"},
        3,
    ),
    "version 1, no quota": (
        "1:cpu:/\n",
        {"cpu__cpu_DOT_cfs_quota_us": "-1\n", "cpu__cpu_DOT_cfs_period_us": "100000\n"},
        8,
    ),
    "version 1, both names": (
        "1:cpu,cpuacct:/\n",
        {
            "cpu,cpuacct__cpu_DOT_cfs_quota_us": "500000\n",
            "cpu,cpuacct__cpu_DOT_cfs_period_us": "100000\n",
        },
        5,
    ),
    "nonsense": ("0::/\nx\n\n::\n", {"cpu_DOT_max": "many\n"}, 8),
    "a period of zero": ("0::/\n", {"cpu_DOT_max": "100000 0\n"}, 8),
    "three words": ("0::/\n", {"cpu_DOT_max": "100000 100000 7\n"}, 1),
    "empty": ("0::/\n", {"cpu_DOT_max": ""}, 8),
}


@pytest.mark.parametrize("case", CASES)
def test_the_smallest_limit_counts(case: str, tmp_path: Path) -> None:
    own, files, expected = CASES[case]
    assert processors(*groups(tmp_path, own, **files)) == expected


def test_files_that_are_not_there_limit_nothing(tmp_path: Path) -> None:
    assert processors(tmp_path / "none", tmp_path) == 8
    assert not list(quotas(tmp_path / "none", tmp_path))


def test_systems_without_affinity_use_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert processors(tmp_path / "none", tmp_path) == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert processors(tmp_path / "none", tmp_path) == 1


def test_the_systems_own_places_are_read() -> None:
    assert processors.__defaults__ == (module.OWN_GROUPS, module.GROUPS)
    assert 1 <= processors() <= 8
