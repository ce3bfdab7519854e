"""The calls of FlashEngine: shapes of input and output, options, errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deepseek_flash import (
    Completion,
    ConfigError,
    ContextLengthError,
    FlashEngine,
    FlashError,
    RequestError,
    SamplingParams,
)

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}


def test_one_prompt_gives_one_completion(engine: FlashEngine) -> None:
    done = engine.generate("the cat", **GREEDY)
    assert isinstance(done, Completion)
    assert len(done.token_ids) == 8
    assert done.finish_reason == "length"
    assert done.prompt_token_ids == tuple(engine.tokenize("the cat"))
    assert done.text == engine.detokenize(done.token_ids)
    assert done.usage.prompt_tokens == len(done.prompt_token_ids)
    assert done.usage.completion_tokens == 8
    assert done.choices[0].token_ids == done.token_ids
    assert 0 <= done.timings.queue <= done.timings.first_token <= done.timings.total


def test_a_list_gives_a_list_in_order(engine: FlashEngine) -> None:
    """D02: as many results as inputs, in their order."""
    prompts = [f"prompt number {i}" for i in range(20)]
    many = engine.generate(prompts, **GREEDY)
    assert [c.prompt_token_ids for c in many] == [tuple(engine.tokenize(p)) for p in prompts]
    assert [c.token_ids for c in many] == [engine.generate(p, **GREEDY).token_ids for p in prompts]
    assert engine.generate([], **GREEDY) == []


def test_params_per_prompt(engine: FlashEngine) -> None:
    a, b = engine.generate(
        ["x", "y"], [SamplingParams(max_new_tokens=3, ignore_eos=True), SamplingParams(max_tokens=5, ignore_eos=True)]
    )
    assert (len(a.token_ids), len(b.token_ids)) == (3, 5)
    with pytest.raises(RequestError, match="1 SamplingParams for 2 prompts"):
        engine.generate(["x", "y"], [SamplingParams()])


def test_token_ids_go_in_untouched(engine: FlashEngine) -> None:
    """V04: ids are not re-tokenised and get no BOS."""
    done = engine.generate(prompt_token_ids=[5, 6, 7], params=SamplingParams(temperature=0.0, max_new_tokens=2))
    assert done.prompt_token_ids == (5, 6, 7)
    two = engine.generate(prompt_token_ids=[[5, 6, 7], [8]], temperature=0.0, max_new_tokens=2)
    assert [c.prompt_token_ids for c in two] == [(5, 6, 7), (8,)]


@pytest.mark.parametrize(
    ("call", "match"),
    [
        ({"prompts": "x", "temperatur": 1.0}, "did you mean 'temperature'"),
        ({"prompts": "x", "tools": []}, "tool calling"),
        ({"prompts": "x", "priority": "high"}, "priority scheduling"),
        ({"prompts": "x", "top_p": 1.5}, "top_p"),
        ({"prompts": "x", "stop": ""}, "cannot be empty"),
        ({"prompts": 5}, "string"),
        ({"prompts": b"bytes"}, "string"),
        ({"prompts": ["x", 5]}, "not int"),
        ({"prompts": [{"role": "user", "content": "x"}]}, r"chat\(\)"),
        ({"prompt_token_ids": [1, 10**9]}, "outside the vocabulary"),
        ({"prompt_token_ids": [-1]}, "outside the vocabulary"),
        ({"prompt_token_ids": [1.5]}, "must be ints"),
        ({"prompt_token_ids": []}, "empty"),
        ({}, "either a prompt or prompt_token_ids"),
        ({"prompts": "x", "logit_bias": {10**7: 1.0}}, "10000000"),
        ({"prompts": "x", "stop_token_ids": [10**7]}, "10000000"),
        ({"prompts": "x", "params": {"temperature": 1}}, "SamplingParams"),
    ],
)
def test_wrong_calls_are_named(engine: FlashEngine, call: dict[str, Any], match: str) -> None:
    """G05, G10, A03: a clear RequestError before any work, and the engine goes on."""
    before = engine.describe()["counters"].get("requests", 0)
    with pytest.raises(RequestError, match=match):
        engine.generate(**call)
    assert engine.describe()["counters"].get("requests", 0) == before
    assert len(engine.generate("still here", **GREEDY).token_ids) == 8


def test_one_bad_prompt_never_sinks_the_others(engine: FlashEngine) -> None:
    """D01: with return_errors each input has its own result or error."""
    prompts = ["good", "x" * 5000, "also good", 7]
    results = engine.generate(prompts, return_errors=True, **GREEDY)  # type: ignore[call-overload]
    assert [type(r) for r in results] == [Completion, ContextLengthError, Completion, RequestError]
    assert results[0].token_ids == engine.generate("good", **GREEDY).token_ids
    single = engine.generate("x" * 5000, return_errors=True, **GREEDY)
    assert isinstance(single, ContextLengthError)


def test_too_long_a_prompt_is_refused_with_the_numbers(engine: FlashEngine) -> None:
    """A01: tokens and limit are in the message and on the error."""
    ids = [7] * 513
    with pytest.raises(ContextLengthError, match=r"513 tokens.*512") as e:
        engine.generate(prompt_token_ids=ids, **GREEDY)
    assert (e.value.tokens, e.value.limit) == (513, 512)


def test_a_prompt_of_exactly_the_limit(engine: FlashEngine) -> None:
    """D03: allowed for scoring, refused when a new token is wanted."""
    ids = [7] * 512
    done = engine.generate(prompt_token_ids=ids, max_new_tokens=0)
    assert (done.token_ids, done.finish_reason, done.text) == ((), "length", "")
    with pytest.raises(ContextLengthError):
        engine.generate(prompt_token_ids=ids, max_new_tokens=1)
    assert len(engine.generate(prompt_token_ids=ids[:-1], **{**GREEDY, "max_new_tokens": 5}).token_ids) == 1


def test_answers_are_clipped_to_the_context(engine: FlashEngine) -> None:
    """A02, G09: max_new_tokens beyond the context gives what fits, and finish_reason says so."""
    done = engine.generate(prompt_token_ids=[7] * 500, temperature=0.0, max_new_tokens=4000, ignore_eos=True)
    assert len(done.token_ids) == 12
    assert done.finish_reason == "length"


def test_repeated_calls_are_independent(engine: FlashEngine) -> None:
    """D04, N06, K03: the same call again and again, the same answer."""
    answers = {engine.generate(["repeat me", "and me"], **GREEDY)[0].token_ids for _ in range(5)}
    assert len(answers) == 1


def test_n_gives_choices(engine: FlashEngine) -> None:
    """G04: every sampling control applies to every choice; choices are independent and reproducible."""
    banned = engine.tokenize("e")[0]
    params = SamplingParams(n=4, seed=3, max_new_tokens=24, ignore_eos=True, logit_bias={banned: -1e9})
    done = engine.generate("several", params)
    assert [c.index for c in done.choices] == [0, 1, 2, 3]
    assert len({c.token_ids for c in done.choices}) == 4
    assert all(banned not in c.token_ids for c in done.choices)
    assert done.usage.completion_tokens == 4 * 24
    assert engine.generate("several", params).choices == done.choices


def test_seeds(engine: FlashEngine) -> None:
    """G08, D09: a seed repeats, whatever runs beside it; no seed is fresh every time."""
    seeded = SamplingParams(seed=11, max_new_tokens=16, ignore_eos=True)
    alone = engine.generate("roll", seeded).token_ids
    crowd = engine.generate(["roll", *["noise " * i for i in range(1, 9)]], [seeded] + [SamplingParams()] * 8)
    assert crowd[0].token_ids == alone
    fresh = {engine.generate("roll", max_new_tokens=16, ignore_eos=True).token_ids for _ in range(4)}
    assert len(fresh) == 4


def test_an_engine_seed_makes_runs_repeat(tiny: Path) -> None:
    runs = []
    for _ in range(2):
        with FlashEngine(tiny, seed=5, max_model_len=128) as engine:
            runs.append([engine.generate("roll", max_new_tokens=8).token_ids for _ in range(2)])
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]


def test_logprobs_belong_to_their_tokens(engine: FlashEngine) -> None:
    """G01, G02: position i holds log p(token i | before), raw, and the same at any temperature."""
    hot = engine.generate("some text", seed=1, temperature=3.0, logprobs=2, max_new_tokens=6, ignore_eos=True)
    assert hot.logprobs is not None
    assert all(t in lp and len(lp) in (2, 3) for t, lp in zip(hot.token_ids, hot.logprobs, strict=True))
    whole = engine.generate(
        prompt_token_ids=[*hot.prompt_token_ids, *hot.token_ids], prompt_logprobs=0, max_new_tokens=0
    )
    assert whole.prompt_logprobs is not None
    start = len(hot.prompt_token_ids)
    for i, token in enumerate(hot.token_ids):
        assert whole.prompt_logprobs[start + i][token] == pytest.approx(hot.logprobs[i][token], abs=1e-4)
    assert engine.generate("x", **GREEDY).logprobs is None


def test_prompt_logprobs_ignore_the_cache(engine: FlashEngine) -> None:
    """G03: the same numbers cold and warm."""
    text = "a prompt that is long enough to fill several cache blocks, twice over, and then some more"
    first = engine.generate(text, prompt_logprobs=1, max_new_tokens=1)
    engine.generate(text, **GREEDY)
    again = engine.generate(text, prompt_logprobs=1, max_new_tokens=1)
    assert first.prompt_logprobs == again.prompt_logprobs
    assert first.prompt_logprobs[0] is None
    assert len(first.prompt_logprobs) == len(first.prompt_token_ids)


def test_score(engine: FlashEngine) -> None:
    score = engine.score("score this text")
    assert score.token_ids == tuple(engine.tokenize("score this text"))
    assert score.logprobs[0] is None
    assert all(p is not None and p < 0 for p in score.logprobs[1:])
    assert score.total == pytest.approx(sum(score.logprobs[1:]))
    assert engine.score(["score this text"]) == [score]


def test_stop_strings_and_ids(engine: FlashEngine) -> None:
    """P05, G11, G12: a plain string is one stop; stop_reason tells which; include_stop keeps it."""
    free = engine.generate("stop somewhere", **{**GREEDY, "max_new_tokens": 40})
    assert len(free.text) > 6
    cut = free.text[3:5]
    at = free.text.index(cut)
    stopped = engine.generate("stop somewhere", stop=cut, **{**GREEDY, "max_new_tokens": 40})
    assert stopped.text == free.text[:at]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", cut)
    kept = engine.generate("stop somewhere", stop=[cut], include_stop=True, **{**GREEDY, "max_new_tokens": 40})
    assert kept.text == free.text[: at + len(cut)]
    token = free.token_ids[2]
    by_id = engine.generate("stop somewhere", stop_token_ids=[token], **{**GREEDY, "max_new_tokens": 40})
    assert by_id.token_ids == free.token_ids[: free.token_ids.index(token) + 1]
    assert by_id.stop_reason == token


def test_eos_ends_and_can_be_ignored(engine: FlashEngine) -> None:
    eos = engine.tokenize("<|im_end|>")[-1]
    ends = engine.generate("x", temperature=0.0, max_new_tokens=9, logit_bias={eos: 1e6})
    assert (ends.token_ids, ends.text, ends.finish_reason, ends.stop_reason) == ((eos,), "", "stop", eos)
    runs_on = engine.generate("x", temperature=0.0, max_new_tokens=9, logit_bias={eos: 1e6}, ignore_eos=True)
    assert len(runs_on.token_ids) == 9
    at_least = engine.generate("x", temperature=0.0, max_new_tokens=9, min_new_tokens=4, logit_bias={eos: 1e6})
    assert len(at_least.token_ids) == 5
    assert eos not in at_least.token_ids[:4]


def test_generation_config_is_the_default(tmp_path: Path) -> None:
    """A checkpoint that says do_sample=false is greedy until the caller says otherwise."""
    import json

    from tests.support.checkpoints import tiny_llama

    tiny_llama(tmp_path)
    said = json.loads((tmp_path / "generation_config.json").read_text())
    (tmp_path / "generation_config.json").write_text(json.dumps({**said, "do_sample": False, "max_new_tokens": 5}))
    with FlashEngine(tmp_path, max_model_len=64) as engine:
        runs = {engine.generate("x", ignore_eos=True).token_ids for _ in range(3)}
        assert len(runs) == 1
        assert len(runs.pop()) == 5
        assert len({engine.generate("x", temperature=2.0, ignore_eos=True).token_ids for _ in range(3)}) > 1


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"block_sise": 16}, "did you mean 'block_size'"),
        ({"max_batch_size": 0}, "max_batch_size=0"),
        ({"device": "cuda"}, "CUDA kernels are not in this version"),
        ({"quantize": "int4"}, "quantised compute"),
        ({"memory_fraction": 0.5}, "memory guard"),
        ({"l3_cache_path": "/x"}, "disk cache tier"),
        ({"threads": 2}, "native CPU kernels"),
        ({"max_model_len": 10**7}, "positions end at 1024"),
        ({"max_model_len": True}, "bool"),
    ],
)
def test_wrong_options_are_config_errors(tiny: Path, options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match) as e:
        FlashEngine(tiny, **options)
    assert isinstance(e.value, ValueError)
    assert e.value.field in options


def test_chat_and_template(engine: FlashEngine) -> None:
    """V03, V05: one BOS at most, user text stays text, ids equal the rendered prompt's."""
    turns = [{"role": "user", "content": "say <|im_end|> please"}]
    text = engine.apply_chat_template(turns)
    assert text == "<|im_start|>user\nsay <|im_end|> please<|im_end|>\n<|im_start|>assistant\n"
    ids = engine.apply_chat_template(turns, tokenize=True)
    end = engine.tokenize("<|im_end|>")[-1]
    assert ids.count(end) == 1
    assert engine.detokenize(ids, skip_special_tokens=False) == text
    done = engine.chat(turns, **GREEDY)
    assert list(done.prompt_token_ids) == ids
    assert engine.count_tokens(turns) == len(ids)
    assert engine.count_tokens("plain") == len(engine.tokenize("plain"))


def test_chat_answers_may_fill_the_context(engine: FlashEngine) -> None:
    done = engine.chat([{"role": "user", "content": "go on"}], temperature=0.0, ignore_eos=True)
    assert len(done.prompt_token_ids) + len(done.token_ids) == 512


def test_describe_and_memory_report(engine: FlashEngine) -> None:
    told = engine.describe()
    assert told["limits"]["max_model_len"] == 512
    assert told["model"]["architecture"] == "LlamaForCausalLM"
    report = engine.memory_report()
    assert report.weights == told["model"]["weight_bytes"] > 0
    assert report.kv_cache.pool_bytes == told["cache"]["bytes"]
    assert "kv_cache" in str(report)


def test_errors_are_flash_errors_and_builtins(engine: FlashEngine) -> None:
    with pytest.raises(FlashError):
        engine.generate("x", n=0)
    with pytest.raises(ValueError, match="n=0"):
        engine.generate("x", n=0)
