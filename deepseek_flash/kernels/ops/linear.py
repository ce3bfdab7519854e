"""Matrix multiplication with weights, and the layout those weights are kept in."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from deepseek_flash.kernels.op import Case, Cost, Op, nbytes, rand


def pack_linear(weight: torch.Tensor) -> torch.Tensor:
    """The form of ``weight [out, in]`` that ``linear`` likes best; its values are the same.

    What comes back may be opaque: give it to ``linear`` only.
    """
    return weight


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x [T, in] @ weight[out, in]^T + bias[out]`` → [T, out]. ``weight`` plain or from ``pack_linear``."""
    y = x @ weight.T
    return y if bias is None else y + bias


def _inputs(gen: torch.Generator) -> Iterator[Case]:
    for tokens, k, n in ((1, 1, 1), (1, 64, 129), (2, 63, 5), (17, 129, 63), (129, 64, 192), (300, 33, 1)):
        for bias in (None, rand(gen, n)):
            weight = rand(gen, n, k) / k**0.5
            yield Case(
                f"t{tokens} k{k} n{n}{' bias' if bias is not None else ''}", (rand(gen, tokens, k), weight, bias)
            )


def _pack_inputs(gen: torch.Generator) -> Iterator[Case]:
    for n, k in ((1, 1), (63, 129), (192, 64)):
        yield Case(f"k{k} n{n}", (rand(gen, n, k),))


def _cost(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Cost:
    (tokens, k), n = x.shape, weight.shape[0]
    return Cost(2 * tokens * k * n, nbytes(x, bias) + 4 * n * k + 4 * tokens * n)


def _pack_cost(weight: torch.Tensor) -> Cost:
    return Cost(0, 2 * nbytes(weight))


LINEAR = Op("linear", linear, _inputs, 1e-5, _cost)
PACK_LINEAR = Op("pack_linear", pack_linear, _pack_inputs, 0.0, _pack_cost)
