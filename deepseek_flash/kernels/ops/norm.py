"""Root-mean-square normalisation (Zhang & Sennrich 2019)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from deepseek_flash.kernels.op import Case, Cost, Op, nbytes, rand


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension.

    ``x [T, D]`` with ``weight [D]``, or ``x [T, heads, D]`` with ``weight [heads, D]``; rows may be strided.
    """
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``s = x + residual`` → (``rms_norm(s)``, ``s``); all [T, D]."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def _inputs(gen: torch.Generator) -> Iterator[Case]:
    for shape in ((1, 1), (1, 64), (7, 63), (129, 129), (3, 5, 32)):
        weight = 1 + 0.1 * rand(gen, *shape[1:])
        yield Case(f"{shape}", (rand(gen, *shape), weight, 1e-5))
    wide = rand(gen, 9, 7, 16)
    yield Case("strided heads", (wide[:, 2:5], 1 + 0.1 * rand(gen, 3, 16), 1e-6))
    yield Case("tiny values", (1e-4 * rand(gen, 4, 64), torch.ones(64), 1e-5))


def _add_inputs(gen: torch.Generator) -> Iterator[Case]:
    for t, d in ((1, 1), (1, 64), (63, 129)):
        yield Case(f"t{t} d{d}", (rand(gen, t, d), rand(gen, t, d), 1 + 0.1 * rand(gen, d), 1e-5))


def _cost(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Cost:
    return Cost(4 * x.numel(), 2 * nbytes(x) + nbytes(weight))


def _add_cost(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> Cost:
    return Cost(5 * x.numel(), 4 * nbytes(x) + nbytes(weight))


RMS_NORM = Op("rms_norm", rms_norm, _inputs, 1e-5, _cost)
ADD_RMS_NORM = Op("add_rms_norm", add_rms_norm, _add_inputs, 1e-5, _add_cost)
