"""What an operation is: a definition, its inputs, tolerance and cost, and implementations of the same signature."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Cost:
    """What one call does, from its shapes alone."""

    flops: int
    bytes: int
    """Bytes read and written once each."""


@dataclass(frozen=True, slots=True)
class Case:
    """One generated input of an op."""

    label: str
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Op:
    """One operation: ``reference`` is its meaning, everything else must agree with it."""

    name: str
    reference: Callable[..., Any]
    inputs: Callable[[torch.Generator], Iterator[Case]]
    tolerance: float
    """Largest allowed difference from the reference, as a share of the reference's largest magnitude."""
    cost: Callable[..., Cost]
    writes: tuple[int, ...] = ()
    """Positions of arguments it writes into."""


@dataclass(frozen=True)
class Impl:
    """One way to do an op on one kind of device."""

    op: str
    name: str
    fn: Callable[..., Any]
    unavailable: Callable[[], str | None] = lambda: None
    """Why it cannot run here, or None when it can."""
    bind: Callable[[Any], Callable[..., Any]] | None = None
    """For implementations with threads of their own: ``fn`` on the threads of one engine (``cpu.native.Native``)."""
    note: str = ""
    """What a reader of ``Kernels.describe()`` should know."""


def rand(gen: torch.Generator, *shape: int) -> torch.Tensor:
    """Standard normal fp32 on the CPU."""
    return torch.randn(*shape, generator=gen)


def nbytes(*tensors: torch.Tensor | None) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)
