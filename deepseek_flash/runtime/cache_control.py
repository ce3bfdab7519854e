"""``engine.cache``: the tiers of an engine's cache, to look at and to clear, from any thread."""

from __future__ import annotations

from typing import Any

from deepseek_flash.errors import RequestError, near_or_all
from deepseek_flash.runtime.runtime import FlashRuntime

TIERS = ("l1", "l2", "l3")
SETTLE = 10.0
"""Seconds that writes on their way to the disk are waited for before it is cleared."""


class CacheControl:
    """L1 is the engine's pool, L2 host memory, L3 the disk. Holds its engine's parts only while it is used."""

    def __init__(self, runtime: FlashRuntime) -> None:
        self._runtime = runtime

    def clear(self, tier: str = "all") -> int:
        """Forget what a tier holds (``l1``, ``l2``, ``l3`` or ``all``) and return the bytes that became free: of
        blocks for L1 and L2, of the folder for L3, which is emptied for everybody who uses it.

        What running requests hold stays, and no request changes its tokens. L1 is not copied to the tiers below; a
        tier that the engine does not have frees 0. RequestError for another name.
        """
        if tier not in (*TIERS, "all"):
            raise RequestError(
                f"unknown tier {tier!r}{near_or_all(str(tier), [*TIERS, 'all'])}", parameter="tier", value=tier
            )
        wanted = TIERS if tier == "all" else (tier,)
        self._runtime.loop.guard()
        freed = 0
        if "l1" in wanted:
            freed += self._runtime.loop.call(self._clear_pool)
        if (tiers := self._runtime.tiers) is None:
            return freed
        if "l2" in wanted:
            freed += self._runtime.loop.call(tiers.clear_host)
        if "l3" in wanted:
            tiers.settle(SETTLE)  # what was handed over before this call must not appear after it
            freed += tiers.clear_disk()
            self._runtime.loop.call(tiers.forget_saved)
        return freed

    def stats(self) -> dict[str, Any]:
        """Sizes and counters of each tier that is there, as plain data."""
        self._runtime.loop.guard()
        kv, tiers = self._runtime.scheduler.kv, self._runtime.tiers
        counted = kv.stats()
        names = ("asked_tokens", "hit_tokens", "evictions", "blocks_total", "blocks_used", "blocks_cached")
        out: dict[str, Any] = {"l1": {name: counted[name] for name in names}}
        return out if tiers is None else out | tiers.stats()

    def _clear_pool(self) -> int:
        kv = self._runtime.scheduler.kv
        before = [p.free for p in kv.pools]
        kv.clear()
        size = kv.spec.block_size
        return sum((p.free - n) * g.block_bytes(size) for p, n, g in zip(kv.pools, before, kv.spec.groups, strict=True))
