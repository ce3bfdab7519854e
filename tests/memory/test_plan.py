"""The memory plan: sums, what fits, and that every alternative offered does."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepseek_flash.errors import MemoryBudgetError
from deepseek_flash.memory.plan import STORED, Budget, MemoryPlan, Needs, plan

MIB = 1 << 20


def per_token(size: int, block: int = 16):
    """Bytes of a sequence in whole blocks."""
    return lambda tokens: -(-tokens // block) * block * size


def needs(**over) -> Needs:
    return replace(
        Needs(
            weights={STORED: 100 * MIB, "int8": 55 * MIB, "int4": 30 * MIB},
            cache={"float16": per_token(8192), "int8": per_token(4352)},
            workspace=lambda tokens, quantize, dtype: 4 * MIB + 512 * tokens,
            runtime=10 * MIB,
            max_model_len=8192,
            max_batch_size=4,
            kv_cache_dtype="float16",
        ),
        **over,
    )


def apply(given: Needs, budget: Budget, options) -> tuple[Needs, Budget]:
    """What a caller would do with an alternative."""
    options = dict(options)
    if "memory_fraction" in options:
        assert budget.total is not None
        budget = Budget.share(budget.total, options.pop("memory_fraction"))
    if "memory_budget" in options:
        budget = Budget(options.pop("memory_budget"), budget.total)
    return replace(given, **options), budget


def texts(made: MemoryPlan) -> list[str]:
    return [str(a) for a in made.alternatives]


def test_the_table_adds_up():
    made = plan(needs(), 400 * MIB)
    assert [line.name for line in made.lines] == ["weights", "kv_cache", "workspace", "runtime"]
    assert made.holders() == {
        "weights": 100 * MIB,
        "kv_cache": 4 * 64 * MIB,
        "workspace": 8 * MIB,
        "runtime": 10 * MIB,
    }
    assert made.total == 374 * MIB
    assert (made.fits, made.sequences, made.context, made.alternatives) == (True, 4, 8192, ())
    shown = str(made)
    for text in ("weights", "256.0 MiB  4 x 8,192 tokens, float16", "374.0 MiB  fits: 26.0 MiB to spare", "400.0 MiB"):
        assert text in shown


def test_concurrency_is_what_the_rest_holds():
    edge = 118 * MIB + 2 * 64 * MIB
    assert plan(needs(), edge).sequences == 2
    assert plan(needs(), edge - 1).sequences == 1
    assert plan(needs(max_batch_size=1), 10**10).sequences == 1


def test_the_largest_context_may_be_more_than_was_asked_for():
    made = plan(needs(longest=10**6), 300 * MIB)
    wider = needs(max_model_len=made.largest_context)
    assert made.largest_context > 8192
    assert plan(wider, 300 * MIB).fits
    assert not plan(replace(wider, max_model_len=made.largest_context + 1), 300 * MIB).fits
    assert plan(needs(longest=9000), 10**10).largest_context == 9000  # the limit is no whole number of blocks


def test_what_to_do_when_it_does_not_fit():
    short = Budget.share(400 * MIB, 0.4)  # 160 MiB: 46 for cache and the context's part of the workspace
    made = plan(needs(), short)
    assert not made.fits
    assert texts(made) == [
        f"max_model_len <= {made.largest_context}",
        'kv_cache_dtype="int8"',
        'quantize="int8"',
        'quantize="int4"',
        "memory_fraction >= 0.46",
    ]
    assert made.alternatives[1].plan.fits
    assert texts(plan(needs(), 160 * MIB))[-1] == f"memory_budget >= {182 * MIB}"


def test_pairs_where_no_single_option_does():
    rigid = needs(weights={STORED: 100 * MIB, "int8": 86 * MIB})
    made = plan(rigid, Budget(103 * MIB, total=110 * MIB))
    assert texts(made) == ['quantize="int8" and max_model_len <= ' + str(made.alternatives[0].options["max_model_len"])]


def test_a_pair_that_keeps_the_context_is_offered_beside_a_shorter_one():
    rigid = needs(weights={STORED: 100 * MIB, "int8": 80 * MIB}, max_batch_size=1)
    made = plan(rigid, Budget(135 * MIB, total=140 * MIB))
    assert texts(made) == [f"max_model_len <= {made.largest_context}", 'kv_cache_dtype="int8" and quantize="int8"']


def test_nothing_is_offered_when_nothing_helps():
    made = plan(needs(), Budget.share(40 * MIB, 0.5))
    assert made.alternatives == ()
    assert made.largest_context == 0
    assert "no option" in str(made.error())


def test_more_memory_than_there_is_is_no_advice():
    assert not any("memory" in t for t in texts(plan(needs(), Budget(160 * MIB, total=170 * MIB))))
    assert not any("memory" in t for t in texts(plan(needs(), Budget.share(170 * MIB, 0.9))))


def test_the_error_carries_the_table_and_the_numbers():
    made = plan(needs(), 160 * MIB)
    error = made.error()
    assert isinstance(error, MemoryBudgetError)
    assert (error.needed, error.available) == (182 * MIB, 160 * MIB)
    assert error.holders == made.holders()
    assert error.largest_context == made.largest_context
    for text in (str(made), *texts(made)):
        assert text in str(error)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Needs, Budget]:
    size = draw(st.integers(1, 20_000))
    stored = draw(st.integers(0, 200 * MIB))
    weights = {STORED: stored}
    for name in draw(st.sets(st.sampled_from(["int8", "int4"]))):
        weights[name] = draw(st.integers(0, 220 * MIB))
    block = draw(st.sampled_from([1, 5, 16, 64]))
    cache = {"float16": per_token(2 * size, block)}
    if draw(st.booleans()):
        cache["int8"] = per_token(size, block)
    extra = {"int4": draw(st.integers(0, 20 * MIB))}
    base, slope = draw(st.integers(0, 40 * MIB)), draw(st.integers(0, 5000))
    context = draw(st.integers(2, 40_000))
    made = Needs(
        weights=weights,
        cache=cache,
        workspace=lambda tokens, quantize, dtype: base + slope * (tokens // 7) + extra.get(quantize, 0),
        runtime=draw(st.integers(0, 40 * MIB)),
        max_model_len=context,
        max_batch_size=draw(st.integers(1, 64)),
        kv_cache_dtype="float16",
        longest=context + draw(st.integers(0, 50_000)),
        block_size=block,
    )
    total = draw(st.integers(1, 1500 * MIB))
    kind = draw(st.sampled_from(["fraction", "total", "bytes"]))
    if kind == "fraction":
        return made, Budget.share(total, draw(st.integers(1, 100)) / 100)
    size = draw(st.integers(1, total))
    return made, Budget(size, total if kind == "total" else None)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(cases())
def test_every_alternative_fits_and_none_is_larger_than_need_be(case):
    given_needs, budget = case
    made = plan(given_needs, budget)
    assert made.fits == (given_needs.least(given_needs.max_model_len) <= budget.bytes)
    if made.fits:
        assert made.total <= budget.bytes
        assert made.alternatives == ()
        return
    assert made.total > budget.bytes
    for alternative in made.alternatives:
        again, size = apply(given_needs, budget, alternative.options)
        assert plan(again, size).fits, str(alternative)
        assert replace(plan(again, size), alternatives=()) == alternative.plan
        if (tokens := alternative.options.get("max_model_len")) is not None:
            more = min(tokens + again.block_size, given_needs.max_model_len)
            assert not plan(replace(again, max_model_len=more), size).fits
        if (least := alternative.options.get("memory_budget")) is not None:
            assert not plan(again, replace(size, bytes=least - 1)).fits
        if (share := alternative.options.get("memory_fraction")) is not None:
            assert share <= 1.0
            assert not plan(again, Budget.share(size.total, round(share - 0.01, 2))).fits
        if size.total is not None:
            assert size.bytes <= size.total


@settings(max_examples=300, deadline=None, derandomize=True)
@given(cases())
def test_nothing_that_would_fit_is_left_out(case):
    """When no option is offered but more memory, none does, alone or in a pair."""
    given_needs, budget = case
    made = plan(given_needs, budget)
    offered = [a for a in made.alternatives if not any(k.startswith("memory") for k in a.options)]
    if made.fits or offered:
        return
    least = 2 if given_needs.block_size == 1 else min(given_needs.block_size, given_needs.max_model_len)
    for weights, dtype, tokens in product(
        given_needs.weights, given_needs.cache, (given_needs.max_model_len, max(least, 2))
    ):
        changes = (weights != STORED) + (dtype != "float16") + (tokens != given_needs.max_model_len)
        if changes <= 2:
            tried = replace(given_needs, quantize=weights, kv_cache_dtype=dtype, max_model_len=tokens)
            assert not plan(tried, budget).fits, (weights, dtype, tokens)


@pytest.mark.parametrize("total", [1, 99, 100, 101, 3 * MIB + 7, 24 * 10**9])
def test_a_fraction_covers_what_it_is_offered_for(total):
    """Down to the byte, whatever floats make of it."""
    for hundredths in range(1, 101):
        needed = max(total * hundredths // 100, 1)
        tight = needs(weights={STORED: needed}, cache={"float16": lambda n: 0}, workspace=lambda *_: 0, runtime=0)
        (only,) = plan(tight, Budget(0, total, 0.0)).alternatives
        assert Budget.share(total, only.options["memory_fraction"]).bytes >= needed
