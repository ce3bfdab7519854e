"""What a request resolves to."""

from __future__ import annotations

import math
from typing import Any

import pytest

from deepseek_flash.errors import FormatError, RequestError
from deepseek_flash.types import SamplingParams
from tests.sampling.rows import VOCAB, resolved


def test_nothing_said_anywhere_gives_the_documented_defaults() -> None:
    p = resolved(fallback=99, fresh_seed=1234)
    assert (p.temperature, p.top_k, p.top_p, p.min_p, p.repetition_penalty) == (1.0, 0, 1.0, 0.0, 1.0)
    assert (p.frequency_penalty, p.presence_penalty, dict(p.logit_bias)) == (0.0, 0.0, {})
    assert (p.seed, p.max_new_tokens, p.min_new_tokens, p.logprobs) == (1234, 99, 0, None)
    assert p.ending_ids == {2}
    assert not p.shapes_logits


def test_the_checkpoint_decides_where_the_request_is_silent() -> None:
    config = {
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.05,
        "max_new_tokens": 77,
        "bos_token_id": 1,
        "transformers_version": "4.39.0",
    }
    p = resolved(generation_config=config)
    assert (p.temperature, p.top_k, p.top_p, p.min_p) == (0.6, 20, 0.95, 0.01)
    assert (p.repetition_penalty, p.max_new_tokens) == (1.05, 77)
    said = resolved(
        generation_config=config,
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        repetition_penalty=1.0,
        max_new_tokens=0,
        seed=0,
        fresh_seed=9,
    )
    assert (said.temperature, said.top_k, said.top_p, said.min_p) == (0.0, 0, 1.0, 0.0)
    assert (said.repetition_penalty, said.max_new_tokens, said.seed) == (1.0, 0, 0)


def test_do_sample_false_is_greedy_unless_the_request_gives_a_temperature() -> None:
    config = {"do_sample": False, "temperature": 0.7, "top_p": None}
    assert resolved(generation_config=config).temperature == 0.0
    assert resolved(generation_config=config, temperature=0.5).temperature == 0.5


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", 10**400),
        ("top_k", 10**400),
        ("temperature", "hot"),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", True),
        ("top_k", 2.5),
        ("top_k", -1),
        ("top_k", [50]),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("max_new_tokens", 0),
        ("do_sample", "yes"),
    ],
)
def test_a_malformed_generation_config_names_its_key(key: str, value: Any) -> None:
    with pytest.raises(FormatError, match=key) as e:
        resolved(generation_config={key: value})
    assert repr(value) in str(e.value)
    assert e.value.file == "generation_config.json"


@pytest.mark.parametrize("token", [-1, VOCAB, VOCAB + 1, 2**40])
def test_G05_ids_outside_the_vocabulary_are_refused_at_submission(token: int) -> None:
    with pytest.raises(RequestError, match=f"logit_bias.*{token}.*0 to {VOCAB - 1}") as e:
        resolved(logit_bias={1: 1.0, token: 5.0})
    assert isinstance(e.value, ValueError)
    assert (e.value.parameter, e.value.value) == ("logit_bias", token)
    with pytest.raises(RequestError, match=f"stop_token_ids.*{token}"):
        resolved(stop_token_ids=[token])


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_none_are_refused(name: str, value: float) -> None:
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("amount", [math.nan, math.inf, 1e31, -1e200])
def test_biases_that_could_leave_fp32_are_refused(amount: float) -> None:
    with pytest.raises(RequestError, match="logit_bias"):
        resolved(logit_bias={3: amount})


def test_a_minimum_beyond_the_maximum_is_refused_whoever_set_the_maximum() -> None:
    with pytest.raises(RequestError, match=r"min_new_tokens=20.*10 tokens"):
        resolved(min_new_tokens=20, generation_config={"max_new_tokens": 10})
    with pytest.raises(RequestError, match=r"min_new_tokens=300.*256 tokens"):
        resolved(min_new_tokens=300)
    assert resolved(min_new_tokens=256).min_new_tokens == 256


def test_G11_a_plain_string_is_one_stop_and_end_of_text_always_ends() -> None:
    assert SamplingParams(stop="###").stop == ("###",)
    p = resolved(stop="###", stop_token_ids=9, eos_ids=[2, 7, VOCAB + 3])
    assert p.ending_ids == {2, 7, 9}
    assert resolved(stop_token_ids=[9], ignore_eos=True).ending_ids == {9}


def test_G10_one_letter_stops_are_fine_and_empty_ones_refused() -> None:
    assert SamplingParams(stop=["a"]).stop == ("a",)
    for stop in ("", ["ok", ""]):
        with pytest.raises(RequestError, match="cannot be empty"):
            SamplingParams(stop=stop)


def test_G09_without_a_limit_the_fallback_is_used_not_a_hidden_small_number() -> None:
    assert resolved(fallback=4000).max_new_tokens == 4000


def test_A03_no_sampling_option_is_dropped_on_the_way() -> None:
    """Every field but those the text side reads changes the resolved value."""
    text_side = {"stop", "include_stop", "n", "prompt_logprobs", "add_special_tokens"}
    changed: dict[str, Any] = {
        "max_new_tokens": 7,
        "min_new_tokens": 3,
        "temperature": 0.3,
        "top_p": 0.5,
        "top_k": 4,
        "min_p": 0.1,
        "stop_token_ids": (8,),
        "ignore_eos": True,
        "seed": 3,
        "logprobs": 2,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.4,
        "presence_penalty": 0.5,
        "logit_bias": {4: 2.0},
    }
    assert set(changed) | text_side == set(SamplingParams.model_fields)
    base = resolved()
    for name, value in changed.items():
        assert resolved(**{name: value}) != base, name
