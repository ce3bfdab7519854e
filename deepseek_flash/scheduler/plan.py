"""What travels between scheduler and runner: a step's plan and its result. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from deepseek_flash.kv.blocks import BlockCopy as BlockCopy
from deepseek_flash.scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class PlanItem:
    """``count`` tokens of ``seq`` from position ``start``; logits of the last one if ``sample``."""

    seq: Sequence
    start: int
    count: int
    sample: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: a ragged batch. ``copies`` and ``zero`` run before the forward pass, in this order:
    zero, then copies; ``after`` copies run after it (snapshots of state at a boundary just reached)."""

    items: tuple[PlanItem, ...]
    zero: tuple[tuple[int, int], ...] = ()
    """(group, block) to clear: fresh state records."""
    copies: tuple[BlockCopy, ...] = ()
    after: tuple[BlockCopy, ...] = ()
    preempted: tuple[Sequence, ...] = ()

    @property
    def tokens(self) -> int:
        return sum(i.count for i in self.items)
