"""Opens the cache tiers that an engine's options ask for."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b

from deepseek_flash.config import EngineConfig
from deepseek_flash.errors import ConfigError
from deepseek_flash.kv.manager import KVManager
from deepseek_flash.kv.spec import CacheSpec
from deepseek_flash.kv.store import KVStore
from deepseek_flash.metrics import Metrics
from deepseek_flash.runtime.rates import Rates
from deepseek_flash.runtime.tiering import CacheTiers, Post
from deepseek_flash.scheduler.sequence import Sequence

CACHE_ABI = 1
"""Counts changes of kernels that change cached bytes: what an older version stored is then not found."""
DEFAULT_GB = 20.0
EXTENT_TOKENS = 256
"""Tokens of a full record on disk."""
_GB = 1e9
SNAPSHOT_SHARE = 0.2
"""Of the host tier, for models that need snapshots."""


def part_bytes(spec: CacheSpec) -> tuple[int, int]:
    """Bytes of one block in all rows groups, and of one whole snapshot (0 where none is needed)."""
    size = spec.block_size
    rows = sum(g.block_bytes(size) for g in spec.groups if g.kind == "rows")
    boundary = max((-(-g.window // size) + 1 for g in spec.groups), default=1)  # far enough for a whole window
    return rows, sum(spec.groups[g].block_bytes(size) for g, _ in spec.snapshot_blocks(boundary))


def open_tiers(
    config: EngineConfig,
    manager: KVManager,
    store: KVStore,
    *,
    root: bytes,
    native: bool,
    post: Post,
    resume: Callable[[Sequence], None],
    metrics: Metrics,
) -> CacheTiers | None:
    """None when no option asks for a tier. ``root``: the weights' fingerprint; ``native``: whether the kernels are."""
    if config.l2_cache_gb is None and config.l3_cache_path is None:
        return None
    from deepseek_flash.kv.tiers import DiskTier, HostPool

    rows, snapshot = part_bytes(manager.spec)
    if not rows:
        raise ConfigError(
            "l2_cache_gb and l3_cache_path need a model that keeps rows for every token; this one does not",
            field="l3_cache_path",
            value=config.l3_cache_path,
        )
    host = host_snapshots = None
    disk: DiskTier | None = None
    if config.l2_cache_gb is not None:
        room = int(config.l2_cache_gb * _GB)
        if snapshot:
            host_snapshots = HostPool(int(room * SNAPSHOT_SHARE), snapshot)
            room -= host_snapshots.nbytes
        host = HostPool(room, rows)
        if not host.parts:
            raise ConfigError(
                f"l2_cache_gb={config.l2_cache_gb}: one block takes {rows} bytes; give at least {rows / _GB:.6f}",
                field="l2_cache_gb",
                value=config.l2_cache_gb,
            )
    if config.l3_cache_path is not None:
        disk = _disk(config, manager.spec, rows, snapshot, root, native)
    return CacheTiers(
        manager,
        store,
        host=host,
        host_snapshots=host_snapshots,
        disk=disk,
        post=post,
        resume=resume,
        rates=Rates(),
        metrics=metrics,
        verify_every=config.verify_every,
    )


def _disk(config: EngineConfig, spec: CacheSpec, rows: int, snapshot: int, root: bytes, native: bool):  # type: ignore[no-untyped-def]
    from pathlib import Path

    from deepseek_flash.kv.disk import DiskStore, StoreIdentity
    from deepseek_flash.kv.tiers import DiskTier

    extent = max(1, EXTENT_TOKENS // spec.block_size)
    told = (CACHE_ABI, native, root, spec.digest(), extent)
    identity = StoreIdentity(blake2b(repr(told).encode(), digest_size=32).digest(), rows, snapshot)
    gigabytes = DEFAULT_GB if config.l3_cache_gb is None else config.l3_cache_gb
    rate = config.l3_write_mb_per_s
    store = DiskStore(
        Path(config.l3_cache_path or "").expanduser(),
        identity,
        limit_bytes=int(gigabytes * _GB),
        write_bytes_per_second=None if rate is None else rate * 1e6,
    )
    return DiskTier(store, rows, snapshot, extent)
