"""The C++ sampling op: thousands of random rows against the reference, ties, masks, every instruction set."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from deepseek_flash.errors import InternalError
from deepseek_flash.kernels.cpu import lib
from deepseek_flash.kernels.cpu.native import Native
from deepseek_flash.kernels.ops.sample import Choice, candidates, sample, shape

LIBRARY = lib.load()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason=f"no native kernels: {lib.why_missing()}")


@pytest.fixture(autouse=True)
def best_isa() -> Iterator[None]:
    yield
    assert LIBRARY is not None
    LIBRARY.functions.flash_use_isa(None)


def random_choice(rng: random.Random, gen: torch.Generator, n: int) -> Choice:
    def ids() -> torch.Tensor:
        return torch.randperm(n, generator=gen)[: rng.randint(0, min(n - 1, 30))]

    out = Choice(
        rng.choice((0.0, 0.2, 0.7, 1.0, 1.0, 3.0, 100.0)),
        rng.choice((0, 0, 1, 2, 5, 50, n - 1, n, 10 * n)),
        rng.choice((1.0, 1.0, 0.999, 0.95, 0.5, 0.01, 1e-12)),
        rng.choice((0.0, 0.0, 0.01, 0.3, 1.0)),
        draw=rng.choice((0.0, rng.random(), rng.random(), 1 - 2**-53)),
    )
    if rng.random() < 0.3:
        used = ids()
        times = torch.randint(1, 9, (len(used),), generator=gen).double()
        out = replace(out, frequency=rng.uniform(-2, 2), presence=rng.uniform(-2, 2), used=used, times=times)
    if rng.random() < 0.3:
        out = replace(out, repetition=rng.uniform(0.5, 2), seen=ids())
    if rng.random() < 0.3:
        at = ids()
        out = replace(out, bias_ids=at, bias=3 * torch.randn(len(at), generator=gen))
    if rng.random() < 0.2:
        out = replace(out, forbidden=ids())
    if rng.random() < 0.2:
        words = torch.randint(-(2**31), 2**31, (-(-n // 32),), generator=gen)
        out = replace(out, allowed=words.to(torch.int32))
    return out


def near_a_border(logits: torch.Tensor, choice: Choice, got: int, want: int) -> bool:
    """Whether rounding may have decided: the draw falls next to the end of a token's share, or a kept set ends within
    rounding of top_p, min_p or between two equals."""
    x = shape(logits, choice).double()
    loose = [
        replace(choice, top_p=min(1.0, choice.top_p * f), min_p=choice.min_p / f) for f in (1 - 1e-5, 1.0, 1 + 1e-5)
    ]
    for kind in loose:
        ids, weights = candidates(x, kind)
        if ids is None:
            ids = torch.arange(len(x))
        share = weights.cumsum(0) / weights.sum()
        for u in (choice.draw - 1e-5, choice.draw + 1e-5):
            at = int(torch.searchsorted(share, torch.tensor(u, dtype=torch.float64).clamp(0, 1), right=True))
            if int(ids[min(at, len(ids) - 1)]) == got:
                return True
    return False


@pytest.mark.parametrize("seed", range(4))
def test_random_rows_get_the_references_token(seed: int) -> None:
    rng, gen = random.Random(seed), torch.Generator().manual_seed(seed)
    differing = total = 0
    native = Native(2)
    for _ in range(60):
        n = rng.choice((2, 5, 16, 33, 1000, 1024, 1040, 5003))
        logits = rng.choice((0.1, 1.0, 4.0, 30.0)) * torch.randn(8, n, generator=gen)
        if rng.random() < 0.3:
            logits = logits.round()
        choices = [random_choice(rng, gen, n) for _ in range(8)]
        before = logits.clone()
        got, want = native.sample(logits, choices).tolist(), sample(logits, choices).tolist()
        assert torch.equal(logits, before)
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            total += 1
            if a != b:
                differing += 1
                assert near_a_border(logits[i], choices[i], a, b), (n, choices[i], a, b)
    assert differing <= total // 100


def test_a_large_vocabulary() -> None:
    gen = torch.Generator().manual_seed(5)
    logits = 3 * torch.randn(6, 151_936, generator=gen)
    kinds = [
        Choice(0.7, top_p=0.95),
        Choice(1.0),
        Choice(0.8, top_k=50),
        Choice(2.0, top_p=0.999),
        Choice(1.0, min_p=0.05),
    ]
    choices = [replace(k, draw=u) for k, u in zip([*kinds, Choice(0.0)], (0.1, 0.5, 0.9, 0.3, 0.7, 0.0), strict=True)]
    assert Native(2).sample(logits, choices).tolist() == sample(logits, choices).tolist()


def test_the_draw_walks_every_kept_id_in_order() -> None:
    """Draws through the whole of [0, 1) give every kept id its share, and no other."""
    logits = torch.tensor([[2.0, -1.0, 2.0, 0.5, 2.0, -3.0, 0.5, 1.0]])
    for kind in (
        Choice(1.0),
        Choice(1.0, top_k=3),
        Choice(1.0, top_k=4),
        Choice(1.0, top_p=0.5),
        Choice(0.5, min_p=0.2),
    ):
        ids, weights = candidates(logits[0], kind)
        kept = list(range(8)) if ids is None else ids.tolist()
        draws = 4000
        rows = logits.expand(draws, -1)
        got = Native(2).sample(rows, [replace(kind, draw=(i + 0.5) / draws) for i in range(draws)])
        assert got.unique().tolist() == kept, kind
        assert got.tolist() == sorted(got.tolist()), kind
        shares = torch.bincount(got, minlength=8)[kept].double() / draws
        assert torch.allclose(shares, weights.double() / weights.sum().double(), atol=2 / draws), kind


def test_equals_at_the_border_all_stay_for_top_k_and_rank_by_id_for_top_p() -> None:
    logits = torch.full((1, 3000), -5.0)
    at = [7, 1500, 1501, 2999]
    logits[0, at] = 1.0
    draws = [i / 64 for i in range(64)]
    four = Native(1).sample(logits.expand(64, -1), [Choice(1.0, top_k=2, draw=u) for u in draws])
    assert four.unique().tolist() == at
    two = Native(1).sample(logits.expand(64, -1), [Choice(0.01, top_p=0.3, draw=u) for u in draws])
    assert two.unique().tolist() == at[:2]


def test_same_tokens_alone_in_a_crowd_with_other_threads_and_on_every_instruction_set() -> None:
    rng, gen = random.Random(11), torch.Generator().manual_seed(11)
    logits = 3 * torch.randn(40, 4099, generator=gen)
    choices = [random_choice(rng, gen, 4099) for _ in range(40)]
    together = Native(3).sample(logits, choices)
    alone = [int(Native(1).sample(logits[i : i + 1], choices[i : i + 1])) for i in range(40)]
    assert together.tolist() == alone
    assert LIBRARY is not None
    for isa in LIBRARY.isas:
        assert LIBRARY.functions.flash_use_isa(isa.encode()) == 0
        assert Native(2).sample(logits, choices).tolist() == alone, isa


def test_only_allowed_ids_and_never_forbidden_ones() -> None:
    gen = torch.Generator().manual_seed(3)
    n = 1000
    logits = 2 * torch.randn(300, n, generator=gen)
    may = torch.randint(0, 2, (n,), generator=gen).bool()
    words = torch.zeros(-(-n // 32), dtype=torch.int64)
    for i in may.nonzero().squeeze(1).tolist():
        words[i // 32] |= 1 << (i % 32)
    mask = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    forbidden = may.nonzero().squeeze(1)[::3]
    choices = [Choice(5.0, draw=i / 300, allowed=mask, forbidden=forbidden) for i in range(300)]
    got = set(Native(2).sample(logits, choices).tolist())
    assert len(got) > 100
    assert got <= set(may.nonzero().squeeze(1).tolist()) - set(forbidden.tolist())
    nothing = [
        Choice(1.0, allowed=torch.zeros(32, dtype=torch.int32), draw=0.5),
        Choice(0.0, forbidden=torch.arange(n)),
    ]
    assert Native(1).sample(logits[:2], nothing).tolist() == [-1, -1]


def test_what_makes_no_sense_is_refused_before_anything_is_read() -> None:
    logits = torch.zeros(1, 10)
    for bad in (
        Choice(1.0, seen=torch.tensor([10]), repetition=1.1),
        Choice(1.0, forbidden=torch.tensor([-1])),
        Choice(-1.0),
        Choice(1.0, top_p=0.0),
        Choice(1.0, draw=1.0),
        Choice(1.0, allowed=torch.zeros(0, dtype=torch.int32)),
        Choice(math.nan),
    ):
        with pytest.raises(InternalError):
            Native(1).sample(logits, [bad])
    with pytest.raises(InternalError, match="2 choices"):
        Native(1).sample(logits, [Choice(1.0), Choice(1.0)])
    assert Native(1).sample(torch.zeros(0, 10), []).tolist() == []
