"""The sampler against transformers' processors, against statistics, and against its neighbours."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from deepseek_flash.errors import InternalError
from deepseek_flash.kernels.ops import sample as op
from deepseek_flash.sampling.sampler import Sampled, Sampler, SampleRow, choice_of, prompt_logprobs
from tests.sampling.rows import EOS, VOCAB, resolved, row


def logits(rows: int = 1, vocab: int = VOCAB, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def shape(x: Tensor, r: SampleRow) -> Tensor:
    return op.shape(x, choice_of(r, x.numel()))


def tokens_of(found: list[Sampled | InternalError]) -> list[int]:
    assert all(isinstance(s, Sampled) for s in found)
    return [s.token for s in found if isinstance(s, Sampled)]


def distribution(x: Tensor, r: SampleRow) -> Tensor:
    """Probabilities over all ids that the sampler draws from."""
    ids, weights = op.candidates(shape(x, r), choice_of(r, x.numel()))
    p = torch.zeros(x.numel(), dtype=torch.float64)
    p[torch.arange(x.numel()) if ids is None else ids] = weights.double()
    return p / p.sum()


def reference(x: Tensor, r: SampleRow) -> Tensor:
    """The same through transformers' processors, in the order of its generate()."""
    from transformers.generation import logits_process as hf

    p = r.params
    chain: list[Any] = []
    if p.repetition_penalty != 1.0:
        chain.append(hf.RepetitionPenaltyLogitsProcessor(p.repetition_penalty))
    if p.temperature != 1.0:
        chain.append(hf.TemperatureLogitsWarper(p.temperature))
    if p.top_k:
        chain.append(hf.TopKLogitsWarper(p.top_k))
    if p.top_p < 1.0:
        chain.append(hf.TopPLogitsWarper(p.top_p))
    if p.min_p:
        chain.append(hf.MinPLogitsWarper(p.min_p))
    scores = x[None].double()
    for step in chain:
        scores = step(torch.tensor([list(r.tokens)]), scores)
    return torch.as_tensor(scores[0].softmax(-1))


COMBINATIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": VOCAB},
    {"top_k": 10 * VOCAB},
    {"top_p": 0.9},
    {"top_p": 0.05},
    {"top_p": 1e-9},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7},
    {"temperature": 0.7, "top_k": 12, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.2},
    {"temperature": 1.7, "top_k": 40, "top_p": 0.95, "min_p": 0.02},
]


@pytest.mark.parametrize("options", COMBINATIONS, ids=str)
@pytest.mark.parametrize("vocab", [VOCAB, 6001])
def test_distributions_equal_transformers_processors(options: dict[str, Any], vocab: int) -> None:
    for seed in range(6):
        x = logits(vocab=vocab, seed=seed, scale=1.0 + seed)[0]
        r = row(tokens=[5, 6, 7, 7, 9, 5], prompt_len=3, vocab_size=vocab, **options)
        mine, theirs = distribution(x, r), reference(x, r)
        assert torch.equal(mine > 1e-30, theirs > 1e-30)  # below, fp32 underflows
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-7)


def test_top_p_looks_beyond_its_first_guess_in_a_flat_distribution() -> None:
    x = torch.linspace(0, 0.01, 6001)
    p = distribution(x, row(top_p=0.9, vocab_size=6001))
    assert torch.equal(p > 0, reference(x, row(top_p=0.9, vocab_size=6001)) > 0)
    assert 5000 < int((p > 0).sum()) < 6001


def test_equals_at_the_border_all_stay_for_top_k_and_rank_by_id_for_top_p() -> None:
    x = torch.tensor([1.0, 3.0, 3.0, 3.0, 0.0, 3.0])
    assert (distribution(x, row(top_k=2, vocab_size=6)) > 0).nonzero().squeeze(1).tolist() == [1, 2, 3, 5]
    # Each of the four has about 0.24: two reach 0.4.
    assert (distribution(x, row(top_p=0.4, vocab_size=6)) > 0).nonzero().squeeze(1).tolist() == [1, 2]


def test_G07_repetition_sees_prompt_and_output_presence_and_frequency_the_output_only() -> None:
    x = torch.tensor([2.0, -2.0, 1.0, -1.0, 4.0, 0.0])
    history = {"tokens": [0, 1, 2, 3, 3, 3, 2], "prompt_len": 4, "vocab_size": 6}
    assert shape(x, row(repetition_penalty=2.0, **history)).tolist() == [1.0, -4.0, 0.5, -2.0, 4.0, 0.0]
    assert shape(x, row(frequency_penalty=0.5, **history)).tolist() == [2.0, -2.0, 0.5, -2.0, 4.0, 0.0]
    assert shape(x, row(presence_penalty=0.5, **history)).tolist() == [2.0, -2.0, 0.5, -1.5, 4.0, 0.0]
    both = row(frequency_penalty=0.25, presence_penalty=-1.0, **history)
    assert shape(x, both).tolist() == [2.0, -2.0, 1.75, -0.5, 4.0, 0.0]


def test_penalties_apply_before_biases_and_repetition_before_the_others() -> None:
    r = row(
        tokens=[1, 1],
        prompt_len=1,
        vocab_size=4,
        repetition_penalty=2.0,
        frequency_penalty=1.0,
        logit_bias={1: 10.0, 2: -3.0},
    )
    assert shape(torch.tensor([0.0, 8.0, 1.0, 0.0]), r).tolist() == [0.0, 13.0, -2.0, 0.0]


def test_sampling_leaves_the_logits_as_they_were() -> None:
    x = logits(3)
    before = x.clone()
    rows = [row(repetition_penalty=2.0, logit_bias={4: 9.0}, min_new_tokens=3), row(temperature=0.0), row(top_k=3)]
    Sampler(VOCAB).sample(x, rows)
    assert torch.equal(x, before)


def test_greedy_is_the_lowest_id_among_equals_with_and_without_changes() -> None:
    x = torch.zeros(2, 8)
    x[:, [3, 5, 7]] = 4.0
    rows = [row(temperature=0.0, vocab_size=8), row(temperature=0.0, vocab_size=8, presence_penalty=1.0)]
    assert tokens_of(Sampler(8).sample(x, rows)) == [3, 3]
    moved = row(temperature=0.0, vocab_size=8, logit_bias={6: 5.0})
    assert tokens_of(Sampler(8).sample(x[:1], [moved])) == [6]


def test_min_new_tokens_forbids_every_ending_id_until_enough_were_produced() -> None:
    x = torch.zeros(1, VOCAB)
    x[0, [EOS, 9, 30]] = torch.tensor([50.0, 40.0, 30.0])
    options = {"temperature": 0.0, "stop_token_ids": [9], "min_new_tokens": 2}
    sampler = Sampler(VOCAB)
    for produced, expected in ((0, 30), (1, 30), (2, EOS), (3, EOS)):
        r = row(tokens=[5] * (3 + produced), prompt_len=3, **options)
        assert tokens_of(sampler.sample(x, [r])) == [expected]
    sampled = row(stop_token_ids=[9], min_new_tokens=1, seed=1)
    assert distribution(x[0], sampled)[[EOS, 9]].tolist() == [0.0, 0.0]
    free = row(tokens=[5], prompt_len=1, ignore_eos=True, **options)
    assert tokens_of(sampler.sample(x, [free])) == [EOS]  # it ends nothing, so it is allowed


def test_G06_padded_rows_of_the_vocabulary_are_never_sampled() -> None:
    x = logits(4, vocab=VOCAB + 16)
    x[:, VOCAB:] = 1000.0
    rows = [
        row(temperature=0.0, logprobs=5),
        row(temperature=0.0, logit_bias={0: 0.5}),
        row(seed=4, logprobs=5),
        row(seed=4, top_p=0.5, top_k=9),
    ]
    for s in Sampler(VOCAB).sample(x, rows):
        assert isinstance(s, Sampled)
        assert s.token < VOCAB
        assert all(i < VOCAB for i in s.logprobs or ())


def test_G01_G02_logprobs_are_the_raw_ones_of_the_chosen_token_and_the_likeliest() -> None:
    x = logits(1)
    raw = x[0].double().log_softmax(0)
    best = raw.argsort(descending=True)[:5].tolist()
    for options in ({}, {"temperature": 0.2}, {"top_p": 0.3, "top_k": 4}, {"logit_bias": {60: 40.0}}):
        (s,) = Sampler(VOCAB).sample(x, [row(seed=9, logprobs=5, repetition_penalty=1.5, **options)])
        assert isinstance(s, Sampled)
        assert s.logprobs is not None
        assert next(iter(s.logprobs)) == s.token
        assert set(s.logprobs) == {s.token, *best}
        for token, value in s.logprobs.items():
            assert value == pytest.approx(float(raw[token]), abs=1e-5)
    assert s.token == 60
    (only,) = Sampler(VOCAB).sample(x, [row(logprobs=0, temperature=0.0)])
    assert isinstance(only, Sampled)
    assert list(only.logprobs or {}) == [only.token]


def test_logprobs_are_finite_even_for_impossible_tokens() -> None:
    x = torch.full((1, 4), -math.inf)
    x[0, 1] = 0.0
    (s,) = Sampler(4).sample(x, [row(logprobs=3, temperature=0.0, vocab_size=4)])
    assert isinstance(s, Sampled)
    assert list(s.logprobs or {}) == [1, 0, 2]
    json.dumps(s.logprobs, allow_nan=False)
    (after,) = prompt_logprobs(x, [3], 0)
    assert after[3] < -1e38
    json.dumps(after, allow_nan=False)


def test_prompt_logprobs_are_the_bits_that_sampling_reports() -> None:
    x = logits(5, vocab=2000)
    rows = [row(logprobs=3, seed=i, vocab_size=2000) for i in range(5)]
    sampled = [s for s in Sampler(2000).sample(x, rows) if isinstance(s, Sampled)]
    assert prompt_logprobs(x, [s.token for s in sampled], 3) == [s.logprobs for s in sampled]
    assert prompt_logprobs(x[:0], [], 3) == []


def test_a_row_that_is_not_numbers_fails_alone() -> None:
    x = logits(5)
    good = tokens_of(Sampler(VOCAB).sample(x, [row(temperature=0.0) for _ in range(5)]))
    x[1, 3] = math.nan
    x[2] = -math.inf
    x[3, 8] = math.inf
    for options in ({}, {"logprobs": 2}, {"logit_bias": {1: 0.0001}}):
        found = Sampler(VOCAB).sample(x, [row(temperature=0.0, **options) for _ in range(5)])
        assert [isinstance(s, InternalError) for s in found] == [False, True, True, True, False]
        assert isinstance(found[4], Sampled)
        assert found[4].token == good[4]
    hot = Sampler(VOCAB).sample(x, [row(seed=1) for _ in range(5)])
    assert [isinstance(s, InternalError) for s in hot] == [False, True, True, True, False]


def test_NaN_in_the_padding_matters_only_to_who_asks_for_logprobs() -> None:
    x = logits(2, vocab=VOCAB + 4)
    x[:, -1] = math.nan
    found = Sampler(VOCAB).sample(x, [row(temperature=0.0), row(temperature=0.0, logprobs=1)])
    assert [isinstance(s, InternalError) for s in found] == [False, True]


def test_rows_and_logits_must_agree() -> None:
    with pytest.raises(InternalError, match="2 rows"):
        Sampler(VOCAB).sample(logits(3), [row(), row()])
    assert Sampler(VOCAB).sample(logits(0), []) == []


@pytest.mark.parametrize("temperature", [1e-300, 1e-20, 1e-3, 100.0])
def test_extreme_temperatures_stay_numbers(temperature: float) -> None:
    x = torch.tensor([-3e38, 1.0, 3e37, 1e-30])
    p = distribution(x, row(temperature=temperature, vocab_size=4))
    assert bool(torch.isfinite(p).all())
    assert p.argmax() == 2


DRAWS: list[tuple[int, dict[str, Any]]] = [
    (20_000, {}),
    (5_000, {"temperature": 0.6}),
    (5_000, {"top_k": 6}),
    (5_000, {"top_p": 0.8, "temperature": 1.5}),
    (5_000, {"min_p": 0.2, "repetition_penalty": 1.4, "logit_bias": {3: 1.0}}),
]


@pytest.mark.parametrize(("draws", "options"), DRAWS, ids=str)
def test_draws_follow_the_distribution(draws: int, options: dict[str, Any]) -> None:
    """Chi-square against softmax after transformers' filters; the answers of one request play the draws."""
    vocab = 12
    x = logits(vocab=vocab, seed=3, scale=1.2)[0]
    params = resolved(vocab_size=vocab, seed=20, **options)
    biased = x.clone()
    for token, amount in params.logit_bias.items():
        biased[token] += amount  # not in the history, so the order does not matter here
    expected = reference(biased, SampleRow(params, [1, 2], 2, 0))
    counts = np.zeros(vocab)
    for choice in range(draws):
        counts[tokens_of(Sampler(vocab).sample(x[None], [SampleRow(params, [1, 2], 2, choice)]))[0]] += 1
    kept = (expected > 0).numpy()
    assert not counts[~kept].any()
    want = expected.numpy()[kept] * draws
    chi2 = float(((counts[kept] - want) ** 2 / want).sum())
    freedom = int(kept.sum()) - 1
    assert chi2 < freedom + 3.5 * math.sqrt(2 * freedom)


def test_D09_a_seeded_row_gives_the_same_tokens_whatever_runs_beside_it() -> None:
    sampler = Sampler(VOCAB)
    x = logits(12, seed=5)
    mine = row(seed=77, top_p=0.9, temperature=1.3, frequency_penalty=0.3, logprobs=3)
    alone = sampler.sample(x[4:5], [mine])
    for trial in range(4):
        rows = [row(seed=trial * 100 + i, top_k=i, temperature=float(i % 2)) for i in range(12)]
        rows[4] = mine
        assert sampler.sample(x, rows)[4:5] == alone
    at_the_end = torch.cat([x[:4], x[5:], x[4:5]])
    assert sampler.sample(at_the_end, [row() for _ in range(11)] + [mine])[-1:] == alone


def test_greedy_rows_give_the_same_alone_together_and_among_others() -> None:
    sampler = Sampler(VOCAB)
    x = logits(9, seed=6)
    greedy = row(temperature=0.0)
    together = tokens_of(sampler.sample(x, [greedy] * 9))
    assert together == x.argmax(-1).tolist()
    mixed = [greedy if i % 2 else row(seed=i) for i in range(9)]
    assert tokens_of(sampler.sample(x, mixed))[1::2] == together[1::2]
    assert [tokens_of(sampler.sample(x[i : i + 1], [greedy]))[0] for i in range(9)] == together


def test_G08_the_seed_decides_and_positions_and_answers_differ() -> None:
    sampler = Sampler(VOCAB)
    flat = torch.zeros(1, VOCAB)

    def walk(choice: int, **options: Any) -> list[int]:
        tokens = [5]
        for _ in range(12):
            tokens += tokens_of(sampler.sample(flat, [row(tokens=tokens, prompt_len=1, choice=choice, **options)]))
        return tokens[1:]

    assert walk(0, seed=1) == walk(0, seed=1)
    walks = [walk(0, seed=1), walk(1, seed=1), walk(0, seed=2), walk(0, fresh_seed=3), walk(0, fresh_seed=4)]
    assert len({tuple(w) for w in walks}) == len(walks)
    assert all(len(set(w)) > 4 for w in walks)


def test_a_preempted_row_resumes_with_the_same_tokens() -> None:
    """No state outlives a call: a new sampler that only sees the tokens goes on identically."""
    x = logits(20, seed=8)
    options = {"seed": 3, "repetition_penalty": 1.2, "presence_penalty": 0.5, "top_p": 0.95}

    def run(stops: set[int]) -> list[int]:
        sampler, tokens = Sampler(VOCAB), [4, 9]
        for i in range(20):
            if i in stops:
                sampler = Sampler(VOCAB)
            tokens += tokens_of(sampler.sample(x[i : i + 1], [row(tokens=list(tokens), prompt_len=2, **options)]))
        return tokens

    assert run(set()) == run({1, 7, 8, 19})


def test_G04_every_answer_of_a_request_obeys_every_control() -> None:
    x = torch.zeros(40, VOCAB)
    params = resolved(seed=1, logit_bias={i: -1e9 for i in range(VOCAB) if i % 2}, min_new_tokens=1, top_k=40)
    rows = [SampleRow(params, [5], 1, choice) for choice in range(40)]
    tokens = tokens_of(Sampler(VOCAB).sample(x, rows))
    assert all(t % 2 == 0 and t != EOS for t in tokens)
    assert len(set(tokens)) > 8


class Watched(list[int]):
    """A token list that counts what is read of it."""

    read = 0

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        self.read += len(found) if isinstance(at, slice) else 1
        return found

    def __iter__(self) -> Any:
        self.read += len(self)
        return super().__iter__()


def test_penalties_of_a_growing_answer_read_only_what_is_new() -> None:
    """Counting anew for every token would make long answers cost the square of their length."""
    plain = [3, 3, 9, 5, VOCAB + 7]
    tokens = Watched(plain)
    kept = row(tokens, 5, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2)
    x = torch.randn(VOCAB, generator=torch.Generator().manual_seed(0))
    for i in range(300):
        fresh = row(plain, 5, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2)
        assert torch.equal(shape(x, kept), shape(x, fresh))
        for t in (tokens, plain):
            t.append(i * i % VOCAB)
    assert tokens.read == 5 + 299
