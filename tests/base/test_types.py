from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
from pydantic import ValidationError

from deepseek_flash import Choice, Completion, Delta, RequestError, SamplingParams, Usage


def refused(**options) -> RequestError:
    with pytest.raises(RequestError) as info:
        SamplingParams(**options)
    return info.value


def test_nothing_said_is_nothing_set():
    p = SamplingParams()
    assert p.model_fields_set == set()
    assert (p.max_new_tokens, p.temperature, p.top_p, p.top_k, p.seed) == (None, None, None, None, None)
    with pytest.raises(ValidationError):
        p.seed = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("temprature", "temperature"),
        ("max_new_token", "max_new_tokens"),
        ("max_token", "max_tokens"),
        ("topp", "top_p"),
    ],
)
def test_A03_an_unknown_option_names_the_near_one(wrong, near):
    e = refused(**{wrong: 1})
    assert f"did you mean '{near}'" in str(e)
    assert e.parameter == wrong


def test_max_tokens_is_max_new_tokens_but_not_both():
    assert SamplingParams(max_tokens=5).max_new_tokens == 5
    assert SamplingParams(max_new_tokens=3).updated(max_tokens=5).max_new_tokens == 5
    assert "same option" in str(refused(max_tokens=5, max_new_tokens=5))


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -0.1},
        {"temperature": 101},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": "hot"},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"top_k": 2.5},
        {"min_p": -0.5},
        {"min_p": 1.5},
        {"max_new_tokens": -1},
        {"min_new_tokens": -1},
        {"n": 0},
        {"n": 1025},
        {"n": None},
        {"seed": -1},
        {"seed": 2**64},
        {"logprobs": -1},
        {"logprobs": 1001},
        {"prompt_logprobs": -1},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": 1e-300},
        {"frequency_penalty": 101},
        {"presence_penalty": float("nan")},
        {"logit_bias": {"a": 1.0}},
        {"logit_bias": {3: float("nan")}},
        {"logit_bias": {3: float("inf")}},
        {"logit_bias": [3]},
        {"stop": 5},
        {"stop": [5]},
        {"stop": ["a", ""]},
        {"stop": ""},
        {"stop": {""}},
        {"stop_token_ids": ["x"]},
    ],
    ids=str,
)
def test_G10_impossible_values_are_refused_by_name(options):
    """G10: an empty stop string is a ValueError; every other bound likewise."""
    (name, value), *_ = options.items()
    e = refused(**options)
    assert isinstance(e, ValueError)
    assert (e.parameter, e.value is value) == (name, True)
    assert f"{name}={value!r}" in str(e)


@pytest.mark.parametrize("name", ["temperature", "top_k", "n", "seed", "max_new_tokens", "logprobs"])
def test_a_bool_is_not_a_number(name):
    assert "not a bool" in str(refused(**{name: True}))


def test_G11_a_plain_string_is_one_stop():
    assert SamplingParams(stop="\n\nUser:").stop == ("\n\nUser:",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop=None).stop == ()
    assert SamplingParams(stop_token_ids=7).stop_token_ids == (7,)
    assert SamplingParams(stop_token_ids=[7, 8]).stop_token_ids == (7, 8)
    assert SamplingParams(stop_token_ids=None).stop_token_ids == ()


def test_min_above_max_is_refused():
    assert refused(min_new_tokens=5, max_new_tokens=4).parameter == "min_new_tokens"
    assert SamplingParams(min_new_tokens=4, max_new_tokens=4).min_new_tokens == 4


def test_updated_keeps_what_was_said_and_validates_again():
    p = SamplingParams(temperature=0.0, stop="x")
    q = p.updated(top_k=3)
    assert (q.temperature, q.top_k, q.stop) == (0.0, 3, ("x",))
    assert q.model_fields_set == {"temperature", "stop", "top_k"}
    with pytest.raises(RequestError):
        p.updated(temperature=-1)
    with pytest.raises(RequestError, match="top_k"):
        p.updated(top_kk=1)


def test_params_survive_pickle_and_copies():
    p = SamplingParams(temperature=0.5, logit_bias={3: -1.0}, stop="x", seed=2**64 - 1)
    for q in (pickle.loads(pickle.dumps(p)), copy.deepcopy(p), copy.copy(p)):
        assert q == p
        assert q.model_fields_set == p.model_fields_set


def test_completion_takes_the_first_choice():
    choices = (
        Choice(0, "a", (1,), "stop", "x", ({1: -0.5},)),
        Choice(1, "b", (2,), "length"),
    )
    c = Completion.from_choices(choices, usage=Usage(3, 2), prompt_token_ids=(9,))
    assert (c.text, c.token_ids, c.finish_reason, c.stop_reason, c.logprobs) == ("a", (1,), "stop", "x", ({1: -0.5},))
    assert (c.choices, c.prompt_token_ids, c.usage.total_tokens, str(c)) == (choices, (9,), 5, "a")
    assert pickle.loads(pickle.dumps(c)) == c
    with pytest.raises(dataclasses.FrozenInstanceError):
        c.text = "z"  # type: ignore[misc]


def test_merged_deltas_join():
    a = Delta(0, "Hel", token_ids=(1,), logprobs=({1: -1.0},))
    b = Delta(0, "lo", token_ids=(2,), logprobs=({2: -2.0},), finish_reason="stop", usage=Usage(1, 2))
    got = a.merged(b)
    assert (got.text, got.token_ids, got.logprobs) == ("Hello", (1, 2), ({1: -1.0}, {2: -2.0}))
    assert (got.finish_reason, got.usage) == ("stop", Usage(1, 2))
    assert Delta(text="x").merged(Delta(text="y")).logprobs is None
