"""Plans into batches, and what comes back from a step."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from deepseek_flash.errors import InternalError
from deepseek_flash.kv.blocks import BlockCopy
from deepseek_flash.kv.spec import CacheSpec, Field, Group
from deepseek_flash.kv.store import KVStore
from deepseek_flash.models.base import Model
from deepseek_flash.runtime import runner as module
from deepseek_flash.runtime.runner import Runner, StepOutput, build_batch
from deepseek_flash.sampling.params import ResolvedSampling, resolve
from deepseek_flash.sampling.sampler import Sampled, Sampler, SampleRow
from deepseek_flash.scheduler.plan import PlanItem, StepPlan
from deepseek_flash.scheduler.sequence import Sequence
from deepseek_flash.types import SamplingParams
from tests.models.harness import load, prompt
from tests.support.checkpoints import tiny_llama

CPU = torch.device("cpu")
TOY = CacheSpec(
    4,
    (
        Group("kv", "rows", (Field("k", 0, (2,), "float32"),)),
        Group("slow", "rows", (Field("k", 0, (2,), "float32"),), ratio=2),
        Group("window", "window", (Field("k", 0, (2,), "float32"),), window=4),
        Group("state", "state", (Field("s", 0, (2,), "float32"),)),
    ),
)


def _greedy() -> ResolvedSampling:
    return resolve(
        SamplingParams(temperature=0.0),
        generation_config={},
        eos_ids=(),
        vocab_size=320,
        fallback_max_new_tokens=5,
        fresh_seed=0,
    )


def _row(seq: Sequence, prompt_logprobs: int | None = None) -> SampleRow:
    return SampleRow(_greedy(), seq.tokens, seq.prompt_len, 0, prompt_logprobs)


def test_batch_of_a_mixed_plan() -> None:
    a = Sequence(7, [10, 11, 12, 13, 14, 15], 6, 9, tables=[[3, 1], [5, 6], [-1, 2], [4]])
    b = Sequence(8, [20, 21, 22], 3, 9, tables=[[0], [1], [7], [2]])
    plan = StepPlan((PlanItem(a, 5, 1, True), PlanItem(b, 0, 2, False)))
    batch = build_batch(plan, KVStore(TOY, (8, 8, 8, 8), "cpu"), CPU)
    assert batch.token_ids.tolist() == [15, 20, 21]
    assert batch.positions.tolist() == [5, 0, 1]
    assert batch.cu_q == (0, 1, 3)
    assert batch.context_lens == (6, 2)
    assert [t.tolist() for t in batch.block_tables] == [
        [[3, 1], [0, 0]],
        [[5, 6], [1, 0]],
        [[0, 2], [7, 0]],
        [[4], [2]],
    ]
    assert [s.tolist() for s in batch.slots] == [[5, 0, 1], [], [9, 28, 29], []]
    assert batch.logits_rows.tolist() == [0]


def test_a_plan_for_tokens_that_are_not_there_is_refused() -> None:
    seq = Sequence(1, [1, 2], 2, 9, tables=[[0], [0], [0], [0]])
    with pytest.raises(InternalError, match="wants 3 tokens"):
        build_batch(StepPlan((PlanItem(seq, 0, 3, True),)), KVStore(TOY, (1, 1, 1, 1), "cpu"), CPU)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, CacheSpec]:
    info, loaded = load(tiny_llama(tmp_path_factory.mktemp("tiny")))
    return loaded, info.cache_spec(16)


def _runner(model: tuple[Model, CacheSpec]) -> Runner:
    return Runner(model[0], KVStore(model[1], (16,), "cpu"), Sampler(300), "cpu")


def test_samples_the_items_that_ask(model: tuple[Model, CacheSpec]) -> None:
    run = _runner(model)
    a = Sequence(1, prompt(1, 20), 20, 30, tables=[[2, 5]])
    b = Sequence(2, prompt(2, 20), 20, 30, tables=[[3, 4]])
    out = run.run(StepPlan((PlanItem(a, 0, 20, True), PlanItem(b, 0, 9, False))), {1: _row(a), 2: _row(b)})
    assert set(out.sampled) == {1}
    again = run.run(StepPlan((PlanItem(b, 9, 11, True), PlanItem(a, 19, 1, True))), {1: _row(a), 2: _row(b)})
    assert again.sampled[1] == out.sampled[1]
    assert out.prompt_logprobs == {}
    assert isinstance(out.sampled[1], Sampled)
    assert out.sampled[1].token < 300, "ids beyond the tokenizer's are never sampled"


def _scored(run: Runner, seq: Sequence, cuts: list[int]) -> dict[int, dict[int, float]]:
    found: dict[int, dict[int, float]] = {}
    for a, b in pairwise(cuts):
        out: StepOutput = run.run(StepPlan((PlanItem(seq, a, b - a, b == len(seq)),)), {seq.id: _row(seq, 2)})
        found.update(out.prompt_logprobs.get(seq.id, []))
    return found


def test_prompt_logprobs_in_any_chunks(model: tuple[Model, CacheSpec], monkeypatch: pytest.MonkeyPatch) -> None:
    seq = Sequence(1, prompt(3, 40), 40, 50, all_logits=True, tables=[[2, 5, 1]])
    whole = _scored(_runner(model), seq, [0, 40])
    assert sorted(whole) == list(range(1, 40))
    monkeypatch.setattr(module, "_LOGITS_BYTES", 4 * 320 * 7)
    cut = _scored(_runner(model), seq, [0, 1, 17, 39, 40])
    assert sorted(cut) == sorted(whole)
    for at, values in whole.items():
        assert seq.tokens[at] in values
        assert len(values) >= 2
        assert cut[at] == pytest.approx(values, abs=1e-4)


def test_output_tokens_are_not_scored_as_prompt(model: tuple[Model, CacheSpec]) -> None:
    seq = Sequence(1, prompt(3, 20), 15, 50, all_logits=True, tables=[[2, 5]])
    assert sorted(_scored(_runner(model), seq, [0, 20])) == list(range(1, 15))


def test_numbers_that_break_fail_their_own_sequence(tmp_path: Path) -> None:
    info, broken = load(tiny_llama(tmp_path))
    table = broken.embed.packed
    if table is None:
        broken.get_parameter("embed.weight")[5] = float("nan")
    else:  # panels of 16 rows, side by side
        table.parts[0].data.view(torch.float32).view(-1, 16)[:64, 5] = float("nan")
    run = Runner(broken, KVStore(info.cache_spec(16), (16,), "cpu"), Sampler(300), "cpu")
    bad = Sequence(1, [5, 6, 7], 3, 9, all_logits=True, tables=[[2]])
    good = Sequence(2, [6, 7, 8], 3, 9, all_logits=True, tables=[[3]])
    plan = StepPlan((PlanItem(bad, 0, 3, True), PlanItem(good, 0, 3, True)))
    out = run.run(plan, {1: _row(bad, 0), 2: _row(good, 0)})
    assert isinstance(out.sampled[1], InternalError)
    assert isinstance(out.sampled[2], Sampled)
    assert sorted(out.prompt_logprobs) == [2]


def test_copies_run_before_and_snapshots_after_the_pass(model: tuple[Model, CacheSpec]) -> None:
    run = _runner(model)
    seq = Sequence(1, prompt(1, 16), 16, 30, tables=[[2]])
    plan = StepPlan(
        (PlanItem(seq, 0, 16, True),),
        zero=((0, 6),),
        copies=(BlockCopy(0, 2, 7),),
        after=(BlockCopy(0, 2, 8),),
    )
    run.store.pools[0][6] = 1
    run.run(plan, {1: _row(seq)})
    k = run.store.view(0, 0, "k")
    assert torch.equal(k[8], k[2])
    assert not torch.equal(k[7], k[2])
    assert torch.count_nonzero(run.store.pools[0][6]) == 0
