"""Constructing, sharing, copying and closing the LangChain classes; what they refuse."""

from __future__ import annotations

import copy
import gc
import json
import os
import pickle
import subprocess
import sys
from typing import Any

import pytest
from langchain_core.exceptions import ModelInvalidRequestError
from langchain_core.load import dumps
from langchain_core.messages import AIMessage, ChatMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.runnables import ConfigurableField

import deepseek_flash
from deepseek_flash import ConfigError, EngineClosed, FlashError, ModelNotFound, RequestError
from deepseek_flash.config import LATER, EngineConfig
from deepseek_flash.integrations.langchain import ChatDeepSeekFlash, DeepSeekFlashLLM
from deepseek_flash.integrations.langchain._engines import ENGINE_OPTIONS
from deepseek_flash.integrations.langchain._errors import _PAIRS, adapt
from deepseek_flash.integrations.langchain._messages import to_dicts
from tests.support.fake_engine import FakeEngine

CLASSES = pytest.mark.parametrize("cls", [DeepSeekFlashLLM, ChatDeepSeekFlash], ids=["llm", "chat"])


# constructing


@CLASSES
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_new_token": 5}, ["max_new_token", "did you mean 'max_new_tokens'"]),
        ({"n_ctx": 4096}, ["unknown option 'n_ctx'"]),
        ({"max_model_length": 4096}, ["did you mean 'max_model_len'"]),
        ({"temperature": -1}, ["temperature", "-1", "greater than or equal to 0"]),
        ({"temperature": "warm"}, ["temperature", "warm"]),
        ({"top_p": float("nan")}, ["top_p"]),
        ({"stop": [""]}, ["stop", "empty"]),
        ({"timeout": 0}, ["timeout"]),
        ({"max_tokens": 4, "max_new_tokens": 5}, ["same option"]),
        ({"model_path": "y"}, ["same option"]),
        ({"engine": object()}, ["either engine"]),
    ],
)
def test_L11_wrong_options_are_refused_by_the_constructor(cls: Any, options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as e:
        cls(model="x", **options)
    for word in words:
        assert word in str(e.value)


@CLASSES
def test_a_wrapper_needs_a_model_or_an_engine_and_an_open_engine_takes_no_options(cls: Any) -> None:
    with pytest.raises(ConfigError, match=r"engine= .* or model="):
        cls()
    with pytest.raises(ConfigError, match=r"max_batch_size.*open already"):
        cls(engine=FakeEngine(), max_batch_size=4)


def test_engine_options_are_those_of_the_engine() -> None:
    assert (set(EngineConfig.model_fields) | set(LATER)) - {"model", "seed"} == ENGINE_OPTIONS


@CLASSES
def test_aliases_and_engine_options_arrive(cls: Any, opens: Any, tmp_path: Any) -> None:
    model = cls(model_path=tmp_path, max_tokens=3, max_model_len=77, engine_options={"block_size": 8})
    assert (model.model, model.max_new_tokens) == (str(tmp_path), 3)
    assert opens.made == []
    model.invoke("hello")
    assert opens.made[0].options == {"max_model_len": 77, "block_size": 8}


def test_importing_and_constructing_needs_neither_torch_nor_the_model() -> None:
    code = (
        "import sys\n"
        "from deepseek_flash.integrations.langchain import ChatDeepSeekFlash, DeepSeekFlashLLM\n"
        "ChatDeepSeekFlash(model='nowhere'), DeepSeekFlashLLM(model='nowhere')\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"


# sharing and closing


@CLASSES
def test_equal_wrappers_share_one_engine_and_the_last_one_closes_it(cls: Any, opens: Any) -> None:
    a, b = cls(model="m", max_batch_size=4), DeepSeekFlashLLM(model="m", max_batch_size=4, temperature=0)
    other = cls(model="m", max_batch_size=5)
    for model in (a, b, other):
        model.invoke("hi")
    assert len(opens.made) == 2
    a.close()
    assert not opens.made[0].closed
    b.invoke("still works")
    b.close()
    assert opens.made[0].closed
    assert not opens.made[1].closed
    with pytest.raises(EngineClosed, match="this wrapper was closed"):
        b.invoke("hi")
    b.close()
    with cls(model="m", max_batch_size=4) as again:
        again.invoke("hi")
    assert len(opens.made) == 3
    assert opens.made[2].closed


def test_a_dropped_wrapper_lets_go_of_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    import weakref

    made: list[Any] = []

    def open_engine(model: str, **options: Any) -> FakeEngine:
        engine = FakeEngine(model, **options)
        made.append(weakref.ref(engine))
        return engine

    monkeypatch.setitem(vars(deepseek_flash), "FlashEngine", open_engine)
    model = DeepSeekFlashLLM(model="m")
    model.invoke("hi")
    made[0]().settle()
    assert made[0]() is not None
    del model
    gc.collect()
    assert made[0]() is None


def test_rebuilding_the_wrapper_for_every_call_keeps_the_engine(opens: Any) -> None:
    """configurable_fields makes a new instance for each invoke."""
    chat = ChatDeepSeekFlash(model="m").configurable_fields(temperature=ConfigurableField(id="t"))
    for t in (0.1, 0.2, 0.3):
        chat.with_config(configurable={"t": t}).invoke("hi")
    assert len(opens.made) == 1
    assert [p.temperature for _, p in opens.made[0].requests] == [0.1, 0.2, 0.3]


@CLASSES
def test_a_shared_engine_stays_open_and_usable(cls: Any, fake: FakeEngine) -> None:
    with cls(engine=fake) as model:
        model.invoke("hi")
    assert not fake.closed
    assert model.invoke("hi")


def test_a_failed_opening_is_told_to_every_call_and_can_be_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    from langchain_core.exceptions import ModelNotFoundError

    def refuse(model: str, **options: Any) -> Any:
        raise ModelNotFound(f"no model {model!r}")

    monkeypatch.setitem(vars(deepseek_flash), "FlashEngine", refuse)
    chat = ChatDeepSeekFlash(model="m")
    for _ in range(2):
        with pytest.raises(ModelNotFound, match="no model 'm'") as e:
            chat.invoke("hi")
        assert isinstance(e.value, ModelNotFoundError)
    monkeypatch.setitem(vars(deepseek_flash), "FlashEngine", FakeEngine)
    assert chat.invoke("hi").content


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_child_opens_its_own_engine(opens: Any) -> None:
    llm = DeepSeekFlashLLM(model="forked")  # a name of its own: an earlier test's handle may not be collected yet
    llm.invoke("hi")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            llm.invoke("hi")
            code = 0 if len(opens.made) == 2 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# copying, showing


@CLASSES
def test_copies_share_the_engine_and_pickles_leave_it_behind(cls: Any, opens: Any) -> None:
    model = cls(model="m", temperature=0.5, max_batch_size=2)
    model.invoke("hi")
    for other in (copy.copy(model), copy.deepcopy(model), model.model_copy(update={"temperature": 0.1})):
        assert other.invoke("hi")
    thawed = pickle.loads(pickle.dumps(model))
    assert repr(thawed) == repr(model)
    assert thawed.invoke("hi")
    assert len(opens.made) == 1
    moved = model.model_copy(update={"model": "other"})
    moved.invoke("hi")
    assert [e.model for e in opens.made] == ["m", "other"]


@CLASSES
def test_a_given_engine_is_shared_by_deepcopy_and_left_behind_by_pickle(cls: Any, fake: FakeEngine) -> None:
    model = cls(engine=fake, temperature=0.5)
    assert copy.deepcopy(model).engine is fake
    assert copy.copy(model).engine is fake
    thawed = pickle.loads(pickle.dumps(model))
    assert (thawed.engine, thawed.temperature) == (None, 0.5)
    with pytest.raises(ConfigError, match="no engine"):
        thawed.invoke("hi")


@CLASSES
def test_the_engine_is_never_shown_or_serialised(cls: Any, fake: FakeEngine) -> None:
    model = cls(engine=fake, api_key="secret", temperature=0.5)
    shown = [repr(model), str(model), dumps(model), json.dumps(model.asdict()), str(model.model_dump())]
    for text in shown:
        assert "FakeEngine" not in text
        assert "secret" not in text
    assert "0.5" in shown[0]


def test_cache_keys_tell_models_and_settings_apart(fake: FakeEngine, opens: Any) -> None:
    models = [
        DeepSeekFlashLLM(model="m"),
        DeepSeekFlashLLM(model="n"),
        DeepSeekFlashLLM(model="m", temperature=0.1),
        DeepSeekFlashLLM(model="m", seed=1),
        DeepSeekFlashLLM(model="m", max_model_len=64),
        DeepSeekFlashLLM(engine=fake),
    ]
    assert len({json.dumps(m._identifying_params, sort_keys=True) for m in models}) == len(models)
    assert DeepSeekFlashLLM(engine=fake)._identifying_params["fingerprint"] == "00ff"
    assert opens.made == []


@CLASSES
def test_traces_know_the_model_and_the_settings(cls: Any) -> None:
    model = cls(model="org/name", temperature=0.2, max_tokens=5, stop=["a"])
    params = model._get_ls_params(stop=["b"], max_tokens=6)
    assert params["ls_provider"] == "deepseek_flash"
    assert params["ls_model_name"] == "org/name"
    assert (params["ls_temperature"], params["ls_max_tokens"], params["ls_stop"]) == (0.2, 6, ["b"])
    assert model._get_ls_params()["ls_stop"] == ["a"]


# refusing


@CLASSES
def test_A03_options_of_a_call_are_used_or_refused(cls: Any, fake: FakeEngine) -> None:
    model = cls(engine=fake)
    for options, words in (
        ({"temprature": 0.1}, "did you mean 'temperature'"),
        ({"top_p": 3}, "top_p=3"),
        ({"model": "another"}, "make another one"),
        ({"logprobs": True}, "logprobs"),
        ({"stop": 5}, "stop=5"),
        ({"timeout": "soon"}, "timeout='soon'"),
        ({"timeout": -1}, "timeout=-1"),
    ):
        for call in (model.invoke, lambda x, **o: list(model.stream(x, **o))):
            with pytest.raises(RequestError, match=words) as e:
                call("hi", **options)
            assert isinstance(e.value, ModelInvalidRequestError)
    assert fake.requests == []
    assert model.invoke("hi", model="fake", stream=False, timeout=float("inf"))


def test_tools_and_structured_output_are_refused_by_name(fake: FakeEngine) -> None:
    chat = ChatDeepSeekFlash(engine=fake)
    with pytest.raises(NotImplementedError, match="tool calling"):
        chat.bind_tools([{"type": "function", "function": {"name": "f", "parameters": {}}}])
    with pytest.raises(NotImplementedError, match="structured output"):
        chat.with_structured_output({"title": "x", "type": "object"})
    with pytest.raises(NotImplementedError, match="tool_choice"):
        chat.invoke("hi", tool_choice="auto")
    with pytest.raises(NotImplementedError, match="response_format"):
        chat.invoke("hi", response_format={"type": "json_object"})
    with pytest.raises(NotImplementedError, match="tool calling"):
        chat.get_num_tokens_from_messages([HumanMessage("x")], tools=[{"name": "f"}])
    assert chat.bind_tools([]).invoke("hi").content


def test_messages_become_roles_and_text() -> None:
    messages = [
        SystemMessage("s"),
        HumanMessage(["a", {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}], name="ann"),
        AIMessage([{"type": "reasoning", "reasoning": "hm"}, {"type": "text", "text": "c"}]),
        ToolMessage("t", tool_call_id="1", artifact=object()),
        ChatMessage("d", role="developer"),
        ChatMessage("e", role="human"),
        AIMessage(""),
    ]
    assert to_dicts(messages) == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "ab", "name": "ann"},
        {"role": "assistant", "content": "c"},
        {"role": "tool", "content": "t"},
        {"role": "developer", "content": "d"},
        {"role": "user", "content": "e"},
        {"role": "assistant", "content": ""},
    ]


def test_chunks_can_be_sent_back_as_history(fake: FakeEngine) -> None:
    chat = ChatDeepSeekFlash(engine=fake)
    total: Any = None
    for chunk in chat.stream("hello"):
        total = chunk if total is None else total + chunk
    assert to_dicts([total]) == [{"role": "assistant", "content": total.content}]
    chat.invoke([HumanMessage("hello"), total, HumanMessage("and now?")])
    assert [m["role"] for m in fake.requests[-1][0]] == ["user", "assistant", "user"]


def test_what_cannot_be_sent_is_refused_not_dropped(fake: FakeEngine) -> None:
    chat = ChatDeepSeekFlash(engine=fake)
    image = HumanMessage([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}])
    with pytest.raises(ModelInvalidRequestError, match="image_url"):
        chat.invoke([image])
    called = AIMessage("", tool_calls=[{"name": "f", "args": {}, "id": "1"}])
    with pytest.raises(ModelInvalidRequestError, match="tool calling"):
        list(chat.stream([HumanMessage("x"), called, ToolMessage("y", tool_call_id="1")]))
    assert fake.requests == []


@pytest.mark.parametrize(("ours", "both"), _PAIRS, ids=lambda c: c.__name__)
def test_errors_are_langchains_and_ours_with_everything_they_carried(ours: Any, both: Any) -> None:
    error = ours("what went wrong")
    error.partial = "so far"
    adapted = adapt(error)
    assert type(adapted) is both
    assert isinstance(adapted, ours)
    assert isinstance(adapted, FlashError)
    assert str(adapted) == "what went wrong"
    assert adapted.__dict__ == error.__dict__
    assert adapt(adapted) is adapted
    closed = EngineClosed("closed")
    assert adapt(closed) is closed
