"""Rotary position embedding, half-split pairing (Su et al. 2021; pairs are dimensions i and i + rot / 2)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from deepseek_flash.kernels.op import Case, Cost, Op, nbytes, rand


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first ``rot`` dimensions of every head of ``x [T, heads, D]`` → [T, heads, D].

    ``cos``, ``sin`` [T, 1, rot] hold one row a token, both halves filled, the first half of ``sin`` negated, so
    that the rotation is ``x * cos + swap_halves(x) * sin``.
    """
    rot = cos.shape[-1]
    turned, rest = x[..., :rot], x[..., rot:]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((second, first), dim=-1) * sin
    return torch.cat((turned, rest), dim=-1)


def tables(gen: torch.Generator, tokens: int, rot: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random valid ``cos`` and ``sin`` arguments."""
    angle = 10 * rand(gen, tokens, 1, rot // 2)
    return torch.cat((angle.cos(), angle.cos()), -1), torch.cat((-angle.sin(), angle.sin()), -1)


def _inputs(gen: torch.Generator) -> Iterator[Case]:
    for tokens, heads, dim, rot in ((1, 1, 2, 2), (1, 9, 64, 64), (63, 3, 6, 6), (129, 2, 32, 32), (5, 3, 32, 8)):
        yield Case(f"t{tokens} h{heads} d{dim} r{rot}", (rand(gen, tokens, heads, dim), *tables(gen, tokens, rot)))
    wide = rand(gen, 9, 7, 16)
    yield Case("strided heads", (wide[:, 1:4], *tables(gen, 9, 16)))


def _cost(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Cost:
    return Cost(3 * x.numel(), 2 * nbytes(x) + nbytes(cos, sin))


ROPE = Op("rope", rope, _inputs, 1e-6, _cost)
