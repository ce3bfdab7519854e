"""How many processors this process may use: those it may run on, or fewer where a control group limits its time."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

OWN_GROUPS = Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")


def processors(own: Path = OWN_GROUPS, root: Path = GROUPS) -> int:
    """At least one. A quota of one and a half processors counts as two."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min((allowed, *(math.ceil(quota) for quota in quotas(own, root)))))


def quotas(own: Path = OWN_GROUPS, root: Path = GROUPS) -> Iterator[float]:
    """Processors' worth of time that this process's cpu group, and each above it, may take, where that is limited."""
    for line in _text(own).splitlines():
        number, _, rest = line.partition(":")
        controllers, _, where = rest.partition(":")
        if number == "0" and not controllers:
            yield from (q for folder in _upwards(root, where) if (q := _version_2(folder)) is not None)
        elif "cpu" in controllers.split(","):
            for mount in {root / "cpu", root / controllers}:
                yield from (q for folder in _upwards(mount, where) if (q := _version_1(folder)) is not None)


def _version_2(folder: Path) -> float | None:
    """``cpu.max``: microseconds, or "max", of a period."""
    return _ratio(*_text(folder / "cpu.max").split()[:2])


def _version_1(folder: Path) -> float | None:
    """A quota of -1 is none."""
    return _ratio(_text(folder / "cpu.cfs_quota_us").strip(), _text(folder / "cpu.cfs_period_us").strip())


def _ratio(quota: str = "", period: str = "") -> float | None:
    if not (quota.isdecimal() and period.isdecimal() and int(quota) and int(period)):
        return None
    return int(quota) / int(period)


def _upwards(root: Path, where: str) -> list[Path]:
    """The group's folder and its parents. In a container the path may be the host's and not be there; the root is then
    the container's own group."""
    parts = [p for p in where.split("/") if p not in ("", ".", "..")]
    return [root.joinpath(*parts[:n]) for n in range(len(parts), -1, -1)]


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""
