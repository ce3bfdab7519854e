"""Opening engines for tests: tiny checkpoints, small caches, ownership checked after every step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deepseek_flash.config import EngineConfig
from deepseek_flash.engine import FlashEngine
from deepseek_flash.memory.ledger import MemoryBudget
from deepseek_flash.runtime.runtime import FlashRuntime


def open_engine(
    model: Path | str, *, kv_blocks: int | None = None, budget: MemoryBudget | None = None, **options: Any
) -> FlashEngine:
    """A FlashEngine that runs scheduler.check() after every step; ``kv_blocks`` sets the pool's size, ``budget``
    stands in for the one that the process shares."""
    config = EngineConfig.from_options(model, options)
    return FlashEngine._from_runtime(FlashRuntime(config, kv_blocks=kv_blocks, check_every_step=True, budget=budget))
