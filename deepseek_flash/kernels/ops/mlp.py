"""The gate of a SwiGLU feed-forward layer (Shazeer 2020)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from deepseek_flash.kernels.op import Case, Cost, Op, nbytes, rand


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``gate_up [T, 2 n]`` holds gate then up → ``gate * sigmoid(gate) * up`` [T, n]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


def _inputs(gen: torch.Generator) -> Iterator[Case]:
    for tokens, n in ((1, 1), (1, 64), (7, 63), (129, 129), (300, 172)):
        yield Case(f"t{tokens} n{n}", (3 * rand(gen, tokens, 2 * n),))
    yield Case("large", (torch.tensor([[-200.0, 200.0, -90.0, 0.0, 2.0, 3.0, 4.0, 5.0]]),))


def _cost(gate_up: torch.Tensor) -> Cost:
    return Cost(3 * gate_up.numel(), nbytes(gate_up) * 3 // 2)


SILU_MUL = Op("silu_mul", silu_mul, _inputs, 1e-5, _cost)
