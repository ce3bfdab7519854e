"""The calls of FlashEngine: shapes of input and output, options, errors."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from deepseek_flash import (
    Completion,
    ConfigError,
    ContextLengthError,
    FlashEngine,
    FlashError,
    RequestError,
    SamplingParams,
    Stream,
)
from deepseek_flash.engine import LATER_ARGUMENTS
from tests.support.checkpoints import load_reference, tiny_llama
from tests.support.engines import open_engine
from tests.support.tokenizers import DEEPSEEK, byte_bpe

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
        ({"prompt_token_ids": [1, 10**9]}, "outside the model's vocabulary"),
        ({"prompt_token_ids": [-1]}, "outside the model's vocabulary"),
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


CHAT = [{"role": "user", "content": "x"}]
ENTRIES: dict[str, Any] = {
    "generate": lambda e, o: e.generate("x", **o),
    "generate ids": lambda e, o: e.generate(prompt_token_ids=[5], **o),
    "generate list": lambda e, o: e.generate(["x", "y"], [SamplingParams()] * 2, **o),
    "stream": lambda e, o: e.stream("x", **o),
    "chat": lambda e, o: e.chat(CHAT, **o),
    "chat stream": lambda e, o: e.chat(CHAT, stream=True, **o),
    "submit": lambda e, o: e.submit("x", SamplingParams(), **o),
    "submit chat": lambda e, o: e.submit(CHAT, **o),
    "agenerate": lambda e, o: e.agenerate("x", **o),
    "achat": lambda e, o: e.achat(CHAT, **o),
    "asubmit": lambda e, o: e.asubmit("x", **o),
    "astream": lambda e, o: anext(e.astream("x", **o)),
}


@pytest.mark.parametrize("entry", ENTRIES)
async def test_A03_no_call_accepts_what_it_does_not_do(engine: FlashEngine, entry: str) -> None:
    """A03: every argument of a later part, and every unknown one, is refused by name in every call."""

    async def call(name: str) -> None:
        await ENTRIES[entry](engine, {name: 1})

    for name in [*LATER_ARGUMENTS, "temperatur", "lora", "echo"]:
        with pytest.raises(RequestError, match=name):
            await call(name)


@pytest.mark.parametrize("entry", ENTRIES)
async def test_A03_every_call_gives_the_logprobs_that_were_asked_for(engine: FlashEngine, entry: str) -> None:
    """A03: a flag that a call takes has its effect there, in streams too."""
    options = {**GREEDY, "max_new_tokens": 3, "logprobs": 1}
    if entry == "astream":
        deltas = [d async for d in engine.astream("x", **options)]
        assert [len(d.logprobs or ()) for d in deltas] == [1, 1, 1]
        return
    got = ENTRIES[entry](engine, options)
    if inspect.isawaitable(got) and not isinstance(got, Stream):
        got = await got
    if isinstance(got, Stream):
        deltas = [d async for d in got]
        assert [p for d in deltas for p in d.logprobs or ()] == list(got.result().logprobs)
        got = got.result()
    for done in got if isinstance(got, list) else [got]:
        assert [set(p) >= {t} for t, p in zip(done.token_ids, done.logprobs, strict=True)] == [True] * 3


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
    assert "at least 1 new one is wanted" in str(e.value)
    with pytest.raises(ContextLengthError, match=r"min_new_tokens=20 .*500 tokens needs 520.*512"):
        engine.generate(prompt_token_ids=ids[:500], min_new_tokens=20)
    with pytest.raises(ContextLengthError, match=r"the prompt has \d{3,} tokens.*512"):
        engine.chat([{"role": "user", "content": "9" * 600}])


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


def test_G09_defaults_are_the_documented_ones_and_the_end_is_told(engine: FlashEngine) -> None:
    """G09: 256 tokens for raw prompts, the context's end for chat; G10: a one-letter stop ends sooner."""
    raw = engine.generate("x", ignore_eos=True, temperature=0.0)
    assert (len(raw.token_ids), raw.finish_reason, raw.stop_reason) == (256, "length", None)
    chat = engine.chat(CHAT, ignore_eos=True, temperature=0.0)
    assert len(chat.prompt_token_ids) + len(chat.token_ids) == 512
    assert chat.finish_reason == "length"
    letter = next(c for c in raw.text if c.isascii())
    cut = engine.generate("x", ignore_eos=True, temperature=0.0, stop=letter)
    assert (cut.text, cut.finish_reason, cut.stop_reason) == (raw.text[: raw.text.index(letter)], "stop", letter)


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


def test_G04_stops_minimum_and_penalties_hold_for_every_choice(engine: FlashEngine) -> None:
    """G04: what ends an answer is looked for in each of them, not in the first only."""
    params = SamplingParams(n=4, seed=8, max_new_tokens=60, ignore_eos=True, temperature=1.5)
    free = engine.generate("several", params).choices
    assert len({c.token_ids for c in free}) == 4
    letters = "".join(sorted({next(c for c in f.text[9:] if c.isascii()) for f in free}))
    for choice, full in zip(engine.generate("several", params, stop=list(letters)).choices, free, strict=True):
        at = min(full.text.find(c) for c in letters if c in full.text)
        assert (choice.text, choice.finish_reason) == (full.text[:at], "stop")
        assert choice.stop_reason == full.text[at]
    ids = [f.token_ids[10] for f in free]
    for choice, full in zip(engine.generate("several", params, stop_token_ids=ids).choices, free, strict=True):
        at = min(full.token_ids.index(i) for i in ids if i in full.token_ids)
        assert (choice.token_ids, choice.stop_reason) == (full.token_ids[: at + 1], full.token_ids[at])
    late = engine.generate("several", params, stop_token_ids=list(range(200)), min_new_tokens=9, presence_penalty=100.0)
    for choice in late.choices:
        assert len(choice.token_ids) >= 10
        assert all(i >= 200 for i in choice.token_ids[:9])
        assert len(set(choice.token_ids)) == len(choice.token_ids)


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.7},
        {"frequency_penalty": 0.9},
        {"presence_penalty": 1.5},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": -0.3},
    ],
)
def test_G07_penalties_count_prompt_and_output_as_documented(
    engine: FlashEngine, tiny: Path, options: dict[str, Any]
) -> None:
    """G07: through the whole engine, against transformers' model and processor and OpenAI's formula."""
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    repeat = options.get("repetition_penalty", 1.0)
    favourites = engine.generate("penalties", **{**GREEDY, "max_new_tokens": 30}).token_ids
    done = engine.generate(prompt_token_ids=favourites, **{**GREEDY, "max_new_tokens": 40}, **options)
    ids = [*favourites, *done.token_ids]
    with torch.inference_mode():
        logits = load_reference(tiny)(torch.tensor([ids])).logits[0, :, :289]  # the ids that the tokenizer knows
    changed = 0
    for i, token in enumerate(done.token_ids):
        at = len(favourites) + i
        raw = logits[at - 1]
        x = RepetitionPenaltyLogitsProcessor(repeat)(torch.tensor([ids[:at]]), raw[None].clone())[0]
        for seen, count in Counter(done.token_ids[:i]).items():
            x[seen] -= count * options.get("frequency_penalty", 0.0) + options.get("presence_penalty", 0.0)
        best, second = x.topk(2).values
        if best - second > 2e-3:
            assert token == int(x.argmax()), f"token {i}"
        changed += int(x.argmax() != raw.argmax())
    assert changed > 2, "the penalties decided nothing"


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


def test_G11_every_end_of_text_id_that_the_checkpoint_names_ends_an_answer(tmp_path: Path) -> None:
    """G11: a list in generation_config, and the tokenizer's own end besides."""
    import json

    tiny_llama(tmp_path)
    said = json.loads((tmp_path / "generation_config.json").read_text())
    (tmp_path / "generation_config.json").write_text(json.dumps({**said, "eos_token_id": [70, 75]}))
    with FlashEngine(tmp_path, max_model_len=64) as engine:
        own = engine.tokenize("<|im_end|>")[-1]
        for end in (70, 75, own):
            done = engine.generate("x", temperature=0.0, logit_bias={end: 1e6})
            assert (done.token_ids, done.text, done.finish_reason, done.stop_reason) == ((end,), "", "stop", end)
        assert len(engine.generate("x", temperature=0.0, max_new_tokens=4, logit_bias={71: 1e6}).token_ids) == 4


def test_generation_config_is_the_default(tmp_path: Path) -> None:
    """A checkpoint that says do_sample=false is greedy until the caller says otherwise."""
    import json

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
        ({"quantize": "int3"}, "'int4'"),
        ({"memory_fraction": 0.5, "memory_budget": "1GiB"}, "give one of them"),
        ({"memory_fraction": 1.5}, "memory_fraction"),
        ({"memory_budget": "6 parsecs"}, "must be a size"),
        ({"l3_cache_gb": 1}, "without l3_cache_path"),
        ({"l3_cache_path": "/proc/nowhere"}, "l3_cache_path=./proc/nowhere"),
        ({"threads": 0}, "threads=0"),
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


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FlashEngine]:
    """A tokenizer in the manner of DeepSeek's: BOS added to raw text, and written by the chat template too."""
    folder = tiny_llama(tmp_path_factory.mktemp("deepseek"), vocab_size=400)
    template = (
        "{{ bos_token }}{% for m in messages %}{{ '<｜User｜>' + m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
    )
    byte_bpe(folder, DEEPSEEK, bos=DEEPSEEK[0], eos=DEEPSEEK[1], add_bos=True, chat_template=template)
    with open_engine(folder, max_model_len=128) as engine:
        yield engine


def test_V03_V04_V05_one_beginning_of_text_whatever_is_asked(deepseek: FlashEngine) -> None:
    """V03: one from raw text, from text that spells it, and from chat; V04: none if switched off, ids untouched;
    V05: spelled by a user it is text."""
    name, few = DEEPSEEK[0], {"max_new_tokens": 1, "temperature": 0.0}
    bos = deepseek.tokenize("")[0]
    bare = deepseek.tokenize("hello", add_special_tokens=False)
    assert bos not in bare
    assert list(deepseek.generate("hello", **few).prompt_token_ids) == [bos, *bare]
    assert list(deepseek.generate(name + "hello", **few).prompt_token_ids) == [bos, *bare]
    assert list(deepseek.generate("hello", add_special_tokens=False, **few).prompt_token_ids) == bare
    assert list(deepseek.stream("hello", add_special_tokens=False, **few).result().prompt_token_ids) == bare
    assert list(deepseek.generate(prompt_token_ids=bare, **few).prompt_token_ids) == bare
    assert list(deepseek.generate(prompt_token_ids=[bos, bos], **few).prompt_token_ids) == [bos, bos]
    for content in ("hello", f"{name}hello", f"a{name}{DEEPSEEK[2]}"):
        ids = list(deepseek.chat([{"role": "user", "content": content}], **few).prompt_token_ids)
        assert ids[0] == bos
        assert ids.count(bos) == 1
        assert deepseek.detokenize(ids, skip_special_tokens=False) == f"{name}<｜User｜>{content}<｜Assistant｜>"
        user = deepseek.tokenize(DEEPSEEK[2], add_special_tokens=False)
        assert ids.count(user[0]) == len(user) == 1


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


def test_nothing_is_accepted_and_ignored_in_chat(engine: FlashEngine) -> None:
    """A03: what a chat prompt or its template never looks at is refused, not dropped."""
    turns = [{"role": "user", "content": "x"}]
    with pytest.raises(RequestError, match="raw prompts"):
        engine.chat(turns, add_special_tokens=False)
    with pytest.raises(RequestError, match="never looks at 'enable_thinking'"):
        engine.apply_chat_template(turns, enable_thinking=True)
    with pytest.raises(RequestError, match="never looks at 'tools'"):
        engine.apply_chat_template(turns, tools=[{"name": "f"}])


def test_a_refused_request_takes_no_seed(tiny: Path) -> None:
    answers = []
    for refuse in (False, True):
        with FlashEngine(tiny, seed=9, max_model_len=64) as engine:
            if refuse:
                with pytest.raises(RequestError):
                    engine.generate("x", logit_bias={10**7: 1.0})
            answers.append(engine.generate("x", max_new_tokens=8, ignore_eos=True).token_ids)
    assert answers[0] == answers[1]


def test_a_tokenizer_that_knows_more_ids_than_the_model(tmp_path: Path) -> None:
    """V01: text whose ids the model has no rows for is refused; the rest works, and nothing above is sampled."""
    from tests.support.checkpoints import tiny_llama

    tiny_llama(tmp_path, vocab_size=280)
    with FlashEngine(tmp_path, max_model_len=64) as engine:
        with pytest.raises(RequestError, match=r"prompt: token id 28\d is outside the model's vocabulary \[0, 280\)"):
            engine.generate("<|im_start|>hi")
        assert max(engine.generate("hi", max_new_tokens=40, ignore_eos=True, seed=1).token_ids) < 280
