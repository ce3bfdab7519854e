"""From logits to tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from deepseek_flash.kernels.op import Case, Cost, Op, nbytes, rand


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """``logits`` fp32 [rows, n] → int64 [rows]: index of the largest, the first of equals; -1 where it is not finite or
    any value is NaN."""
    ids = logits.argmax(dim=-1)  # NaN wins over every number
    finite = torch.isfinite(logits.gather(1, ids[:, None])).squeeze(1)
    return torch.where(finite, ids, -1)


def _inputs(gen: torch.Generator) -> Iterator[Case]:
    for rows, n in ((1, 1), (1, 15), (3, 1023), (2, 1024), (5, 5000), (1, 49152)):
        yield Case(f"r{rows} n{n}", (rand(gen, rows, n),))
    yield Case("equals", (rand(gen, 4, 3000).round(),))
    odd = rand(gen, 6, 2500)
    odd[0, 2100], odd[1, 7], odd[2, 2499], odd[3] = float("nan"), float("inf"), -float("inf"), -float("inf")
    odd[4, :2000] = -float("inf")
    yield Case("infinities and NaN", (odd,))
    yield Case("strided rows", (rand(gen, 4, 700)[:, :333],))


def _cost(logits: torch.Tensor) -> Cost:
    return Cost(logits.numel(), nbytes(logits))


ARGMAX = Op("argmax", argmax, _inputs, 0.0, _cost)
