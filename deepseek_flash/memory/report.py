"""The measured memory table that ``engine.memory_report()`` returns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from deepseek_flash.memory.probe import HostMemory, host_memory, process_rss


def human(size: int) -> str:
    """Bytes for people, in binary units: ``"1.5 GiB"``."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{size} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """One holder of memory."""

    name: str
    bytes: int
    what: str
    """What the bytes are, in a few words."""


@dataclass(frozen=True, slots=True)
class CacheUse:
    """The KV pool. A block is in use by a running sequence, cached for reuse, or free."""

    pool_bytes: int
    total_blocks: int
    used_blocks: int
    cached_blocks: int
    """Full blocks that no running sequence holds and a later prompt can reuse."""

    @property
    def free_blocks(self) -> int:
        return self.total_blocks - self.used_blocks - self.cached_blocks


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Measured bytes. ``print(report)`` shows the table."""

    lines: tuple[MemoryLine, ...]
    """What the engine itself holds: weights, kv_cache, and whatever else it counts."""
    weights: int
    kv_cache: CacheUse
    process_rss: int
    """RAM this process holds now: the engine's, the interpreter's, the libraries', yours."""
    available: int
    """What this process could still take."""
    total: int
    """The machine's RAM, or the cgroup limit when that is smaller."""
    limited_by: str = "machine"

    @classmethod
    def measure(
        cls,
        *,
        weights: int,
        kv_cache: CacheUse,
        more: Iterable[MemoryLine] = (),
        host: HostMemory | None = None,
        rss: int | None = None,
    ) -> MemoryReport:
        """Probe the machine now and put the engine's own bytes beside it."""
        host = host or host_memory()
        state = f"{kv_cache.used_blocks} in use, {kv_cache.cached_blocks} cached, {kv_cache.free_blocks} free"
        lines = (
            MemoryLine("weights", weights, "parameters of the model"),
            MemoryLine("kv_cache", kv_cache.pool_bytes, f"{kv_cache.total_blocks} blocks: {state}"),
            *more,
        )
        return cls(
            lines=lines,
            weights=weights,
            kv_cache=kv_cache,
            process_rss=process_rss() if rss is None else rss,
            available=host.available,
            total=host.total,
            limited_by=host.limited_by,
        )

    @property
    def engine_bytes(self) -> int:
        """Sum of the lines: what the engine itself holds."""
        return sum(line.bytes for line in self.lines)

    def __str__(self) -> str:
        rows = [(line.name, human(line.bytes), line.what) for line in self.lines]
        rows += [
            ("engine", human(self.engine_bytes), "sum of the above"),
            ("process", human(self.process_rss), "resident memory of this process, all told"),
            ("available", human(self.available), f"still free, of {human(self.total)} ({self.limited_by})"),
        ]
        name = max(len(r[0]) for r in rows)
        size = max(len(r[1]) for r in rows)
        return "\n".join(f"{n:<{name}}  {b:>{size}}  {w}" for n, b, w in rows)
