"""A tenth of the campaign of random cases, and that the campaign would notice."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle, repeat

import pytest
import torch

from deepseek_flash.kernels.cpu import lib
from tests.kernels import campaign

pytestmark = pytest.mark.skipif(lib.load() is None, reason=f"no native kernels: {lib.why_missing()}")

CASES = 10_000


@pytest.mark.slow
@pytest.mark.parametrize("tenth", range(10))
def test_random_cases_equal_the_reference(tenth: int) -> None:
    """Every tenth of the ten thousand, a hundred at a time."""
    numbers = range(tenth * 1000, (tenth + 1) * 1000, 10)
    assert len(numbers) == CASES // 100
    assert not list(campaign.failures(1, numbers))


@pytest.mark.parametrize("make", [k for _, k in campaign.KINDS], ids=lambda k: k.__name__.strip("_"))
def test_a_wrong_kernel_is_noticed(make: Callable[..., campaign.Trial], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind of case as it is, a fifth too large everywhere, and so on the second instruction set only."""
    library = lib.load()
    assert library is not None

    def spoiled(factors: Iterator[float]) -> Callable[..., campaign.Trial]:
        def made(rng: random.Random, gen: torch.Generator) -> campaign.Trial:
            case = make(rng, gen)
            return replace(case, native=lambda c: _larger(case.native(c), next(factors)))

        return made

    monkeypatch.setattr(campaign, "KINDS", ((1, spoiled(repeat(1.0))),))
    assert not list(campaign.failures(1, range(6)))
    monkeypatch.setattr(campaign, "KINDS", ((1, spoiled(repeat(1.2))),))
    assert all(" apart" in said for said in campaign.failures(1, range(6)))
    assert len(list(campaign.failures(1, range(6)))) == 6
    if len(library.isas) > 1:
        monkeypatch.setattr(campaign, "KINDS", ((1, spoiled(cycle((1.0, 1.2)))),))
        said = list(campaign.failures(1, range(6)))
        assert len(said) == 6
        assert all("differ" in line for line in said)


def _larger(tensors: list[torch.Tensor], factor: float) -> list[torch.Tensor]:
    return [t * factor if t.is_floating_point() else t + int(factor > 1) for t in tensors]
