"""From logits to tokens (docs/sampling.md has the formulas)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from deepseek_flash.kernels.op import Case, Cost, Op, nbytes, rand

LOWEST_TEMPERATURE = 1e-30
"""Below this a division in fp32 would meet zero; the distribution is one-hot long before."""
# Candidates looked at before top_p sorts a whole vocabulary: nearly always enough, and 20 times cheaper.
_NUCLEUS_GUESSES = (256, 4096)
_NOTHING = float("-inf")


def argmax(logits: Tensor) -> Tensor:
    """``logits`` fp32 [rows, n] → int64 [rows]: index of the largest, the first of equals; -1 where it is not finite or
    any value is NaN."""
    ids = logits.argmax(dim=-1)  # NaN wins over every number
    finite = torch.isfinite(logits.gather(1, ids[:, None])).squeeze(1)
    return torch.where(finite, ids, -1)


@dataclass(frozen=True, slots=True)
class Choice:
    """How the token of one row is chosen. Ids are int64, below the row's length, and no list holds one twice."""

    temperature: float
    """0 takes the largest."""
    top_k: int = 0
    """0 is off."""
    top_p: float = 1.0
    min_p: float = 0.0
    draw: float = 0.0
    """The random number in [0, 1) that decides."""
    repetition: float = 1.0
    seen: Tensor | None = None
    """[s] ids in prompt and output."""
    frequency: float = 0.0
    presence: float = 0.0
    used: Tensor | None = None
    """[o] ids in the output,"""
    times: Tensor | None = None
    """fp64 [o], and how often each is there."""
    bias_ids: Tensor | None = None
    bias: Tensor | None = None
    """fp32 [b], added to the logits of ``bias_ids``."""
    forbidden: Tensor | None = None
    """[f] ids that may not be chosen."""
    allowed: Tensor | None = None
    """int32 [n / 32, rounded up]: bit i % 32 of word i / 32 says whether id i may be chosen; None allows all."""


def sample(logits: Tensor, choices: Sequence[Choice]) -> Tensor:
    """``logits`` fp32 [rows, n] → int64 [rows]: the token of every row, -1 where the largest of what is left is not
    finite or a value is NaN. Rows do not touch one another; ``logits`` stay as they are."""
    return torch.tensor([_choose(row, c) for row, c in zip(logits, choices, strict=True)], dtype=torch.int64)


def _choose(logits: Tensor, choice: Choice) -> int:
    x = shape(logits, choice)
    best = int(x.argmax())
    if not torch.isfinite(x[best]):
        return -1
    if choice.temperature == 0.0:
        return best
    ids, weights = candidates(x, choice)
    cumulative = weights.cumsum(0, dtype=torch.float64)
    at = int(torch.searchsorted(cumulative, choice.draw * cumulative[-1], right=True))
    if at == len(cumulative):  # the product was rounded up to the total
        at = int(weights.nonzero()[-1])
    return at if ids is None else int(ids[at])


def shape(logits: Tensor, choice: Choice) -> Tensor:
    """Logits [n] after penalties, biases and forbidden ids: a new tensor, unless nothing changes.

    Repetition as in arXiv 1909.05858: seen in prompt or output, x / r if x > 0 else x * r.
    Frequency and presence as OpenAI publishes them: x - count * frequency - (count > 0) * presence,
    counted over the output only.
    """
    changes = (choice.seen, choice.used, choice.bias_ids, choice.forbidden, choice.allowed)
    if all(change is None for change in changes):
        return logits
    x = logits.clone()
    if choice.seen is not None:
        at = x[choice.seen]
        x[choice.seen] = torch.where(at < 0, at * choice.repetition, at / choice.repetition)
    if choice.used is not None and choice.times is not None:
        x[choice.used] -= (choice.times * choice.frequency + choice.presence).to(x.dtype)
    if choice.bias_ids is not None and choice.bias is not None:
        x[choice.bias_ids] += choice.bias
    if choice.forbidden is not None:
        x[choice.forbidden] = _NOTHING
    if choice.allowed is not None:
        i = torch.arange(x.numel())
        x[(choice.allowed[i // 32] >> (i % 32) & 1) == 0] = _NOTHING
    return x


def candidates(x: Tensor, choice: Choice) -> tuple[Tensor | None, Tensor]:
    """Kept ids, ascending, and their weights (the likeliest has 1; not normalised).

    ids None stands for every id. ``x`` [n] has a finite largest element; temperature is above 0.
    """
    z = (x - x.max()) / max(choice.temperature, LOWEST_TEMPERATURE)
    ids: Tensor | None = None
    if 0 < choice.top_k < z.numel():
        # Everything that ties with the k-th stays, as in transformers.
        ids = (z >= z.topk(choice.top_k, sorted=False).values.min()).nonzero().squeeze(1)
        z = z[ids]
    if choice.top_p < 1.0:
        kept = _nucleus(z, choice.top_p)
        ids = kept if ids is None else ids[kept]
        z = z[kept]
    weights = z.exp()
    if choice.min_p > 0.0:
        kept = (weights >= choice.min_p).nonzero().squeeze(1)
        ids = kept if ids is None else ids[kept]
        weights = weights[kept]
    return ids, weights


def _nucleus(z: Tensor, top_p: float) -> Tensor:
    """Positions, ascending, of the smallest set of likeliest tokens whose probability reaches ``top_p``.

    Equals rank by position, so the set does not depend on the sort.
    """
    total = z.exp().sum(dtype=torch.float64)
    for size in (*_NUCLEUS_GUESSES, z.numel()):
        order = largest(z, size)
        mass = (z[order].exp().double() / total).cumsum(0)
        if bool(mass[-1] >= top_p) or size >= z.numel():
            break
    before = torch.cat([mass.new_zeros(1), mass[:-1]])
    return order[before < top_p].sort().values


def largest(x: Tensor, size: int) -> Tensor:
    """Positions of the ``size`` largest of ``x``, largest first, equals by position; more when equals end the list."""
    if size < x.numel():
        at = (x >= x.topk(size, sorted=False).values.min()).nonzero().squeeze(1)
    else:
        at = torch.arange(x.numel(), device=x.device)
    return at[x[at].sort(descending=True, stable=True).indices]


def _inputs(gen: torch.Generator) -> Iterator[Case]:
    for rows, n in ((1, 1), (1, 15), (3, 1023), (2, 1024), (5, 5000), (1, 49152)):
        yield Case(f"r{rows} n{n}", (rand(gen, rows, n),))
    yield Case("equals", (rand(gen, 4, 3000).round(),))
    odd = rand(gen, 6, 2500)
    odd[0, 2100], odd[1, 7], odd[2, 2499], odd[3] = float("nan"), float("inf"), -float("inf"), -float("inf")
    odd[4, :2000] = -float("inf")
    yield Case("infinities and NaN", (odd,))
    yield Case("strided rows", (rand(gen, 4, 700)[:, :333],))


def _ids(gen: torch.Generator, n: int, count: int) -> Tensor:
    return torch.randperm(n, generator=gen)[:count]


def _changes(gen: torch.Generator, n: int) -> Choice:
    """Everything that may change a row of n logits before the draw."""
    count = min(n // 2, 20)
    words = torch.randint(-(2**31), 2**31, (-(-n // 32),), generator=gen, dtype=torch.int64).to(torch.int32)
    return Choice(
        0.8,
        repetition=1.3,
        seen=_ids(gen, n, count),
        frequency=0.4,
        presence=0.2,
        used=_ids(gen, n, count),
        times=torch.randint(1, 9, (count,), generator=gen).double(),
        bias_ids=_ids(gen, n, count),
        bias=rand(gen, count),
        forbidden=_ids(gen, n, count),
        allowed=words,
    )


def _sample_inputs(gen: torch.Generator) -> Iterator[Case]:
    kinds = (
        Choice(0.0),
        Choice(1.0),
        Choice(0.7, top_k=1),
        Choice(0.7, top_k=40),
        Choice(1.3, top_p=0.9),
        Choice(0.9, top_k=50, top_p=0.95),
        Choice(0.6, min_p=0.1),
        Choice(2.0, top_k=100, top_p=0.8, min_p=0.02),
        Choice(1e-320, top_p=1e-9),
    )
    for n in (1, 17, 1025, 5000, 49152):
        draws = torch.rand(4 * len(kinds), generator=gen, dtype=torch.float64).tolist()
        rows = [replace(kinds[i % len(kinds)], draw=u) for i, u in enumerate(draws)]
        yield Case(f"n{n}", (3 * rand(gen, len(rows), n), rows))
    for n in (64, 3000):
        rows = [replace(k, **_parts(_changes(gen, n)), draw=0.37) for k in kinds]
        yield Case(f"changed n{n}", (3 * rand(gen, len(rows), n), rows))
    yield Case("equals", ((2 * rand(gen, 9, 3000)).round(), [replace(k, draw=0.61) for k in kinds]))
    odd = rand(gen, 6, 2500)
    odd[0, 2100], odd[1, 7], odd[2, 2499], odd[3] = float("nan"), float("inf"), -float("inf"), -float("inf")
    odd[4, :2000] = -float("inf")
    for kind in kinds:
        yield Case("infinities and NaN", (odd, [replace(kind, draw=0.5)] * 6))
    yield Case("strided rows", (rand(gen, 9, 700)[:, :333], list(kinds)))


def _parts(choice: Choice) -> dict[str, Any]:
    names = ("repetition", "seen", "frequency", "presence", "used", "times", "bias_ids", "bias", "forbidden", "allowed")
    return {name: getattr(choice, name) for name in names}


def _cost(logits: Tensor) -> Cost:
    return Cost(logits.numel(), nbytes(logits))


def _sample_cost(logits: Tensor, choices: Sequence[Choice]) -> Cost:
    return Cost(20 * logits.numel(), 4 * nbytes(logits))


ARGMAX = Op("argmax", argmax, _inputs, 0.0, _cost)
SAMPLE = Op("sample", sample, _sample_inputs, 0.0, _sample_cost)
