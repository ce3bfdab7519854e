"""What of an engine is in memory while it is open: the pool's size changes, weights and cache leave and come back.

Everything here runs on the engine thread, between steps.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from deepseek_flash.errors import ConfigError, MemoryBudgetError
from deepseek_flash.kv.spec import CacheSpec
from deepseek_flash.kv.store import KVStore
from deepseek_flash.memory.ledger import MemoryBudget, Reservation, Shrink
from deepseek_flash.memory.probe import trim_heap
from deepseek_flash.memory.report import human
from deepseek_flash.runtime.generation import GenerationTenant
from deepseek_flash.scheduler.scheduler import Scheduler


def blocks_within(spec: CacheSpec, context: int, most: tuple[int, ...], nbytes: int) -> tuple[int, ...]:
    """Blocks per group that fit ``nbytes``, in the proportion in which sequences of ``context`` tokens use them; at
    least one such sequence, at most ``most``. MemoryBudgetError when not even one fits."""
    one = spec.bytes_for(context)
    if nbytes < one:
        raise MemoryBudgetError(
            f"{human(nbytes)} of cache cannot hold one sequence of max_model_len={context} tokens, which needs "
            f"{human(one)}; give at least that, or open the engine with a smaller max_model_len",
            needed=one,
            available=nbytes,
        )
    return tuple(min(most[g], spec.blocks_for(g, context) * nbytes // one) for g in range(len(spec.groups)))


@dataclass(slots=True)
class Held:
    """What an engine has reserved of its device's budget."""

    budget: MemoryBudget
    owner: str
    weights: Reservation | None = None
    cache: Reservation | None = None
    lines: list[Reservation] = field(default_factory=list)

    def take(self, weights: int, workspace: int, runtime: int) -> None:
        """Everything but the cache, before it is allocated. MemoryBudgetError when it does not fit."""
        self.weights = self.budget.reserve("weights", weights, owner=self.owner)
        self.lines.append(self.weights)
        self.lines.append(self.budget.reserve("runtime", runtime, owner=self.owner))
        self.lines.append(self.budget.reserve("workspace", workspace, kind="workspace", owner=self.owner))

    def take_tier(self, nbytes: int) -> None:
        """The host tier's pool, all of it: it is allocated when the engine opens."""
        self.lines.append(self.budget.reserve("l2_cache", nbytes, owner=self.owner))

    def take_cache(self, nbytes: int, floor: int, shrink: Shrink) -> None:
        self.cache = self.budget.reserve(
            "kv_cache", nbytes, kind="elastic", owner=self.owner, floor=floor, shrink=shrink
        )
        self.lines.append(self.cache)

    def release(self) -> None:
        for line in self.lines:
            line.release()


def image_folder(l3_cache_path: str | None) -> Path:
    """Where a sleeping engine's cache lies: with the disk tier, else where files outlive a restart and are thus not
    in memory."""
    if l3_cache_path is not None:
        return Path(l3_cache_path).expanduser()
    kept = Path("/var/tmp")
    return kept if kept.is_dir() and os.access(kept, os.W_OK) else Path(tempfile.gettempdir())


def _nothing() -> None:
    """Of a closed engine nothing is loaded."""


class Residence:
    """The pool and the weights of one engine. ``unload`` frees the weights, ``reload`` reads them again."""

    def __init__(
        self,
        tenant: GenerationTenant,
        store: KVStore,
        *,
        context: int,
        folder: Path,
        unload: Callable[[], None],
        reload: Callable[[], None],
    ) -> None:
        self._tenant, self._store, self._context, self._folder = tenant, store, context, folder
        self._unload, self._reload = unload, reload
        self._image: BinaryIO | None = None
        self._kv = tenant.scheduler.kv
        self._kv.retired = store.discard
        self._kept: list[list[int]] = []

    @property
    def asleep(self) -> bool:
        return self._tenant.asleep

    @property
    def pool_bytes(self) -> int:
        """Bytes of the blocks in service."""
        spec = self._store.spec
        return sum(
            p.capacity * g.block_bytes(spec.block_size) for p, g in zip(self._kv.pools, spec.groups, strict=True)
        )

    def resize(self, nbytes: int) -> int:
        """Bring the pool to at most ``nbytes``; what it now has. Running requests go on; cached blocks, and if that
        is not enough the youngest requests' blocks, go down to the tiers that are there."""
        if self.asleep:
            raise ConfigError(
                "the engine sleeps: wake() it before its cache is resized", field="kv_cache", value=nbytes
            )
        scheduler: Scheduler = self._tenant.scheduler
        scheduler.resize(blocks_within(self._store.spec, self._context, self._store.capacity, nbytes))
        return self.pool_bytes

    def sleep(self) -> None:
        """Write the cache's contents to an unnamed file, then free cache and weights. When the file cannot be
        written (OSError) nothing has changed. Twice is fine."""
        if self.asleep:
            return
        if self._kv.restores is not None:
            self._kv.restores.close()
        kept = [pool.in_use() for pool in self._kv.pools]
        image = tempfile.TemporaryFile(dir=self._folder, prefix="deepseek-flash-")  # noqa: SIM115  (lives until wake)
        try:
            self._store.save(image, kept)
            image.flush()
        except BaseException:
            image.close()
            raise
        self._tenant.sleep()
        self._image, self._kept = image, kept
        for group, capacity in enumerate(self._store.capacity):
            self._store.discard(group, range(capacity))
        self._unload()
        trim_heap()

    def wake(self) -> None:
        """Read weights and cache back. When that fails the engine sleeps on, and wake() may be tried again."""
        if not self.asleep or self._image is None:
            return
        self._reload()
        self._image.seek(0)
        self._store.load(self._image, self._kept)
        self._image.close()
        self._image, self._kept = None, []
        self._tenant.wake()

    def close(self) -> None:
        """Drop the image, and the owner that the callbacks belong to."""
        if self._image is not None:
            self._image.close()
        self._unload = self._reload = _nothing
        self._kv.retired = None
