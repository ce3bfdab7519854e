"""Callbacks, cancellation, time limits and concurrency of the LangChain classes."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from langchain_core.callbacks import AsyncCallbackHandler, BaseCallbackHandler
from langchain_core.exceptions import ModelTimeoutError
from langchain_core.messages import HumanMessage
from langchain_core.prompts import PromptTemplate

from deepseek_flash import DeadlineExceeded, InternalError, RequestError
from deepseek_flash.integrations.langchain import ChatDeepSeekFlash, DeepSeekFlashLLM
from tests.support.fake_engine import FakeEngine, echo

CLASSES = pytest.mark.parametrize("cls", [DeepSeekFlashLLM, ChatDeepSeekFlash], ids=["llm", "chat"])


class Log(BaseCallbackHandler):
    def __init__(self) -> None:
        self.tokens: list[Any] = []
        self.chunks: list[Any] = []
        self.ends: list[Any] = []
        self.errors: list[BaseException] = []

    def on_llm_new_token(self, token: str, *, chunk: Any = None, **_: Any) -> None:
        self.tokens.append(token)
        self.chunks.append(chunk)

    def on_llm_end(self, response: Any, **_: Any) -> None:
        self.ends.append(response)

    def on_llm_error(self, error: BaseException, **_: Any) -> None:
        self.errors.append(error)


class AsyncLog(AsyncCallbackHandler):
    def __init__(self) -> None:
        self.tokens: list[str] = []

    async def on_llm_new_token(self, token: str, **_: Any) -> None:
        await asyncio.sleep(0)
        self.tokens.append(token)


def text_of(result: Any) -> str:
    return result if isinstance(result, str) else result.content


@CLASSES
def test_L05_L06_every_chunk_reaches_the_callback_before_it_is_yielded(cls: Any, fake: FakeEngine) -> None:
    log = Log()
    seen = []
    for chunk in cls(engine=fake).stream("hello there", config={"callbacks": [log]}):
        assert len(log.tokens) == len(seen) + 1
        assert log.tokens[-1] == text_of(chunk)
        seen.append(text_of(chunk))
    assert log.tokens == seen
    assert "".join(seen) == echo("hello there")
    last = log.chunks[-1]
    usage = last.message.usage_metadata if cls is ChatDeepSeekFlash else last.generation_info["token_usage"]
    assert usage["total_tokens"] > 0
    assert len(log.ends) == 1
    assert not log.errors


@CLASSES
async def test_L03_asynchronous_callbacks_are_awaited(cls: Any, fake: FakeEngine) -> None:
    log = AsyncLog()
    chunks = [text_of(c) async for c in cls(engine=fake).astream("hello there", config={"callbacks": [log]})]
    assert log.tokens == chunks
    assert "".join(chunks) == echo("hello there")


@CLASSES
async def test_L03_the_event_loop_stays_free_while_an_answer_is_made(cls: Any) -> None:
    engine = FakeEngine(delay=0.01)
    task = asyncio.create_task(cls(engine=engine).ainvoke("one two three"))
    turns = 0
    while not task.done():
        await asyncio.sleep(0.002)
        turns += 1
    assert turns > 10
    assert text_of(await task) == echo("one two three")


async def test_opening_a_model_does_not_block_the_event_loop(opens: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = opens.__init__

    def load(self: Any, model: str, **options: Any) -> None:
        time.sleep(0.1)
        slow(self, model, **options)

    monkeypatch.setattr(opens, "__init__", load)
    chat = ChatDeepSeekFlash(model="m")
    tasks = [asyncio.create_task(chat.ainvoke(f"hi {i}")) for i in range(3)]
    turns = 0
    while not all(t.done() for t in tasks):
        await asyncio.sleep(0.005)
        turns += 1
    assert turns > 5
    assert len(opens.made) == 1


def test_streaming_field_sends_invoke_through_token_callbacks(fake: FakeEngine) -> None:
    log = Log()
    answer = ChatDeepSeekFlash(engine=fake, streaming=True).invoke("a b c", config={"callbacks": [log]})
    assert "".join(log.tokens) == answer.content == echo("a b c")
    assert len(log.tokens) > 3
    quiet = Log()
    ChatDeepSeekFlash(engine=fake).invoke("a b c", config={"callbacks": [quiet]})
    assert quiet.tokens == []


async def test_astream_events_tells_every_token_of_an_inner_ainvoke(fake: FakeEngine) -> None:
    chain = PromptTemplate.from_template("{x}") | ChatDeepSeekFlash(engine=fake)
    texts = [
        event["data"]["chunk"].content
        async for event in chain.astream_events({"x": "one two"}, version="v2")
        if event["event"] == "on_chat_model_stream"
    ]
    assert "".join(texts) == echo("one two")


def test_version_1_content_blocks(fake: FakeEngine) -> None:
    chat = ChatDeepSeekFlash(engine=fake, output_version="v1")
    whole = chat.invoke("one two")
    assert whole.content_blocks == [{"type": "text", "text": echo("one two")}]
    total: Any = None
    for chunk in chat.stream("one two"):
        total = chunk if total is None else total + chunk
    assert [b["type"] for b in total.content_blocks] == ["text"]
    assert total.text == whole.text


# leaving early


@CLASSES
def test_leaving_a_stream_stops_the_request(cls: Any) -> None:
    engine = FakeEngine(delay=0.005, reply=lambda _: "word " * 400)
    for chunks in (
        cls(engine=engine).stream("x"),
        (PromptTemplate.from_template("{x}") | cls(engine=engine)).stream({"x": 1}),
    ):
        before = engine.produced
        next(chunks), next(chunks)
        chunks.close()
        engine.settle(1.0)
        assert engine.produced - before < 40
    assert engine.cancelled == 2


@CLASSES
async def test_leaving_an_async_stream_or_cancelling_the_task_stops_the_request(cls: Any) -> None:
    engine = FakeEngine(delay=0.005, reply=lambda _: "word " * 400)
    model = cls(engine=engine)
    chunks = model.astream("x")
    await anext(chunks)
    await chunks.aclose()
    await asyncio.to_thread(engine.settle, 1.0)
    for call, count in ((model.ainvoke("x"), 1), (model.abatch(["x", "y"]), 2), (_collect(model.astream("x")), 1)):
        task = asyncio.create_task(call)
        while engine.running < count:
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(engine.settle, 1.0)
    assert engine.cancelled == 5
    assert engine.produced < 200


async def _collect(chunks: Any) -> list[Any]:
    return [c async for c in chunks]


@CLASSES
async def test_a_time_limit_stops_the_request_and_keeps_what_there_was(cls: Any) -> None:
    engine = FakeEngine(delay=0.01, reply=lambda _: "word " * 400)
    model = cls(engine=engine, timeout=0.1)
    for fail in (
        lambda: model.invoke("x"),
        lambda: list(model.stream("x")),
        lambda: cls(engine=engine).invoke("x", timeout=0.1),
    ):
        with pytest.raises(DeadlineExceeded, match=r"timeout=0\.1") as e:
            fail()
        assert isinstance(e.value, ModelTimeoutError)
        assert isinstance(e.value, TimeoutError)
        assert e.value.partial.text.startswith("word word")
    with pytest.raises(DeadlineExceeded):
        await model.ainvoke("x")
    with pytest.raises(DeadlineExceeded):
        await _collect(model.astream("x"))
    engine.settle(1.0)
    assert text_of(cls(engine=FakeEngine(), timeout=30).invoke("x")) == echo("x")


# many at once


@CLASSES
async def test_a_batch_reaches_the_engine_all_at_once(cls: Any) -> None:
    prompts = [f"prompt {i}" for i in range(40)]
    for run in ("batch", "abatch", "chain", "completed", "limited"):
        engine = FakeEngine(delay=0.03)
        model = cls(engine=engine)
        if run == "batch":
            model.batch(prompts)
        elif run == "abatch":
            await model.abatch(prompts)
        elif run == "chain":
            (PromptTemplate.from_template("{x}") | model).batch([{"x": p} for p in prompts])
        elif run == "completed":
            assert sorted(i for i, _ in model.batch_as_completed(prompts)) == list(range(40))
        else:
            model.batch(prompts[:12], config={"max_concurrency": 3})
        assert engine.peak == 3 if run == "limited" else engine.peak == 40, run


def test_generate_submits_all_prompts_before_it_waits() -> None:
    engine = FakeEngine(delay=0.01)
    DeepSeekFlashLLM(engine=engine).generate([f"prompt {i}" for i in range(20)])
    assert engine.peak == 20


@CLASSES
def test_each_input_of_a_batch_has_its_own_callbacks_and_error(cls: Any) -> None:
    def reply(prompt: Any) -> Any:
        said = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        return InternalError("broken") if "bad" in said else echo(prompt)

    logs = [Log() for _ in range(3)]
    results = cls(engine=FakeEngine(reply=reply)).batch(
        ["one", "bad", "three"], config=[{"callbacks": [log]} for log in logs], return_exceptions=True
    )
    assert [isinstance(r, InternalError) for r in results] == [False, True, False]
    assert results[1].is_retryable
    assert [len(log.ends) for log in logs] == [1, 0, 1]
    assert [len(log.errors) for log in logs] == [0, 1, 0]


def test_one_failing_prompt_of_generate_stops_the_others() -> None:
    engine = FakeEngine(delay=0.01, reply=lambda p: InternalError("broken") if p == "bad" else "word " * 300)
    with pytest.raises(InternalError):
        DeepSeekFlashLLM(engine=engine).generate(["bad", "good", "good too"])
    engine.settle(1.0)
    assert engine.produced < 100
    with pytest.raises(RequestError):
        DeepSeekFlashLLM(engine=engine).generate(["good", "too long " * 300])
    engine.settle(1.0)


def test_sampling_options_reach_the_engine_and_those_of_the_call_win(fake: FakeEngine) -> None:
    options = {
        "temperature": 0.3,
        "top_p": 0.8,
        "top_k": 7,
        "min_p": 0.05,
        "max_tokens": 9,
        "min_new_tokens": 2,
        "stop": ["zz"],
        "include_stop": True,
        "stop_token_ids": [4],
        "ignore_eos": True,
        "seed": 11,
        "n": 1,
        "logprobs": 2,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.3,
        "logit_bias": {3: -1.0},
    }
    for model in (DeepSeekFlashLLM(engine=fake, **options), ChatDeepSeekFlash(engine=fake, **options)):
        model.invoke("x")
        model.invoke("x", max_tokens=4, temperature=0.0, seed=None, stop=["q"])
        for name, value in options.items():
            sent = [getattr(p, "max_new_tokens" if name == "max_tokens" else name) for _, p in fake.requests]
            expected = {"max_tokens": 4, "temperature": 0.0, "stop": ["q"]}.get(name, value)
            assert [list(s) if isinstance(s, tuple) else s for s in sent] == [value, expected], name
        fake.requests.clear()
    ChatDeepSeekFlash(engine=fake).invoke([HumanMessage("x")])
    assert fake.requests[-1][1].model_fields_set == set()
