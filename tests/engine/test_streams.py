"""Streams: whole characters, stops, leaving early, cancelling, faults."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from deepseek_flash import Completion, DeadlineExceeded, FlashEngine, RequestError, SamplingParams, Stream
from deepseek_flash.sampling.sampler import Sampled
from tests.support.checkpoints import byte_alphabet, token_id

LONG: dict[str, Any] = {"max_new_tokens": 400, "ignore_eos": True, "temperature": 0.0}


def idle(engine: FlashEngine) -> bool:
    """Wait until nothing runs; True when every block is free or cached."""
    for _ in range(400):
        if engine.memory_report().kv_cache.used_blocks == 0:
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("seed", range(6))
def test_joined_deltas_are_the_text(engine: FlashEngine, seed: int) -> None:
    """S01, S02: random bytes as output; every delta is whole characters, one event a token."""
    params = SamplingParams(seed=seed, temperature=2.0, max_new_tokens=120, ignore_eos=True)
    deltas = list(engine.stream("bytes", params))
    done = engine.generate("bytes", params)
    assert "".join(d.text for d in deltas) == done.text == engine.detokenize(done.token_ids)
    assert tuple(t for d in deltas for t in d.token_ids) == done.token_ids
    assert len(deltas) == 120
    assert all(d.finish_reason is None and d.usage is None for d in deltas[:-1])
    assert deltas[-1].finish_reason == "length"
    assert deltas[-1].usage == done.usage


@pytest.mark.parametrize("seed", range(4))
def test_stops_cut_streams_and_calls_alike(engine: FlashEngine, seed: int) -> None:
    """P01, P02, P03, P04: nothing of a stop leaks, no text repeats, both modes cut at the same place."""
    params = SamplingParams(seed=seed, temperature=1.5, max_new_tokens=150, ignore_eos=True)
    free = engine.generate("stops", params).text
    stops = (free[30:36], free[30:33] + "\0", free[40:41])
    at, _, stop = min((free.find(s), len(s), s) for s in stops if s in free)
    stopped = params.updated(stop=stops)
    streamed = "".join(d.text for d in engine.stream("stops", stopped))
    done = engine.generate("stops", stopped)
    assert streamed == done.text == free[:at]
    assert done.stop_reason == stop


def test_P02_a_stop_that_cannot_come_holds_nothing_back(engine: FlashEngine) -> None:
    """P02: with stops set, every token's text comes with that token, as without."""
    params = SamplingParams(seed=3, temperature=1.5, max_new_tokens=100, ignore_eos=True)
    free = [d.text for d in engine.stream("release", params)]
    absent = next(c for c in "ЖЩЮЯ" if c not in "".join(free))
    assert [d.text for d in engine.stream("release", params, stop=[absent * 40, absent + "end"])] == free


@pytest.fixture
def script(engine: FlashEngine, monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    """Makes the model say these bytes, one token each, and then end; the rest of the engine is real."""
    eos = engine.tokenize("<|im_end|>")[-1]

    def say(said: bytes) -> None:
        ids = [*(token_id(byte_alphabet()[b]) for b in said), eos]

        def sample(logits: Any, rows: Any) -> list[Sampled]:
            return [Sampled(ids[row.produced]) for row in rows]

        monkeypatch.setattr(engine._runtime.tenant._runner.sampler, "sample", sample)

    return say


@pytest.mark.parametrize(
    "text",
    ["你好，世界。再见！", "Grüße 👩\u200d👩\u200d👧 🇩🇪 e\u0301 नि", "a\ufffd\ufffdb 好\ufffd", "\ufffd" * 5 + "x"],
)
def test_characters_come_whole_and_with_their_last_byte(
    engine: FlashEngine, script: Callable[[bytes], None], text: str
) -> None:
    """S01, S02, S03: three or four tokens a character; an event for each, a genuine U+FFFD delays nothing."""
    script(text.encode())
    deltas = list(engine.stream("say it", max_new_tokens=100))
    assert [len(d.token_ids) for d in deltas] == [1] * (len(text.encode()) + 1)
    for i in range(len(deltas)):
        assert "".join(d.text for d in deltas[:i]) == text.encode()[:i].decode("utf-8", "ignore")
    done = engine.generate("say it", max_new_tokens=100)
    assert done.text == "".join(d.text for d in deltas) == text
    assert (done.finish_reason, len(done.token_ids)) == ("stop", len(text.encode()) + 1)


@pytest.mark.parametrize("stop", ["the and", ["the and of"], ["in", " the and"], "世", "好，世"])
def test_a_stop_is_found_however_it_is_spelled_in_tokens(
    engine: FlashEngine, script: Callable[[bytes], None], stop: str | list[str]
) -> None:
    """P01, P03, P05: the model spells byte by byte what the tokenizer would write in fewer tokens."""
    said = "I th\nthe and the and of it 你好，世界 on"
    found = min((said.find(s), s) for s in ([stop] if isinstance(stop, str) else stop) if s in said)
    assert len(engine.tokenize(found[1])) < len(found[1].encode()) or not found[1].isascii()
    script(said.encode())
    pieces = [d.text for d in engine.stream("say it", stop=stop, max_new_tokens=100)]
    done = engine.generate("say it", stop=stop, max_new_tokens=100)
    assert "".join(pieces) == done.text == said[: found[0]]
    assert done.stop_reason == found[1]
    kept = engine.generate("say it", stop=stop, max_new_tokens=100, include_stop=True)
    assert kept.text == said[: found[0]] + found[1]


def test_several_choices_in_one_stream(engine: FlashEngine) -> None:
    params = SamplingParams(n=3, seed=2, max_new_tokens=20, ignore_eos=True, logprobs=1)
    texts = {0: "", 1: "", 2: ""}
    ends: list[int] = []
    for delta in engine.stream("choices", params):
        texts[delta.index] += delta.text
        if delta.finish_reason:
            ends.append(delta.index)
    done = engine.generate("choices", params)
    assert [texts[i] for i in range(3)] == [c.text for c in done.choices]
    assert sorted(ends) == [0, 1, 2]


def test_leaving_the_loop_frees_the_sequence(engine: FlashEngine) -> None:
    """X01, with nothing scripted; test_leaving.py counts the steps."""
    for i, _ in enumerate(engine.stream("leave early", **LONG)):
        if i == 2:
            break
    assert idle(engine)


def test_dropping_an_unread_stream_frees_it(engine: FlashEngine) -> None:
    """X01: a stream nobody holds is cancelled by garbage collection."""
    stream = engine.submit("nobody reads me", **LONG)
    del stream
    gc.collect()
    assert idle(engine)


def test_cancel_from_another_thread(engine: FlashEngine) -> None:
    """X02: cancel() is thread-safe while the owner iterates; result() is the partial answer."""
    stream = engine.submit("cancel me", **LONG)
    seen = []
    for delta in stream:
        seen.append(delta)
        if len(seen) == 3:
            worker = threading.Thread(target=stream.cancel)
            worker.start()
            worker.join()
    done = stream.result()
    assert done.finish_reason == "cancelled"
    assert seen[-1].finish_reason == "cancelled"
    assert 3 <= len(done.token_ids) < 400
    assert done.text == "".join(d.text for d in seen)
    assert idle(engine)


def test_cancel_during_prefill(engine: FlashEngine) -> None:
    """X04, with nothing scripted: some in their first chunk, some not begun; test_leaving.py counts the steps."""
    streams = [engine.submit("word " * 90, **LONG) for _ in range(12)]
    for s in streams:
        s.cancel()
    assert {s.result().finish_reason for s in streams} == {"cancelled"}
    assert idle(engine)


def test_cancel_twice_or_late_is_fine(engine: FlashEngine) -> None:
    stream = engine.submit("short", max_new_tokens=2, ignore_eos=True)
    done = stream.result()
    stream.cancel()
    stream.cancel()
    assert stream.result() == done
    assert list(stream) != []
    assert list(stream) == []


def test_result_timeout_stops_the_request(engine: FlashEngine) -> None:
    """T03: a time limit raises with the partial result and frees the blocks."""
    stream = engine.submit("too slow", **LONG)
    with pytest.raises(DeadlineExceeded) as e:
        stream.result(timeout=0.05)
    assert isinstance(e.value, TimeoutError)
    assert isinstance(e.value.partial, Completion)
    assert e.value.partial.finish_reason == "cancelled"
    assert idle(engine)


async def test_async_iteration_and_await(engine: FlashEngine) -> None:
    params = SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True)
    text = ""
    async for delta in engine.stream("async", params):
        text += delta.text
    assert text == (await engine.agenerate("async", params)).text
    assert text == (await engine.submit("async", params)).text
    text = ""
    async for delta in engine.astream("async", params):
        text += delta.text
    assert text == engine.generate("async", params).text
    chat = [{"role": "user", "content": "hi"}]
    stream = await engine.achat(chat, params, stream=True)
    assert isinstance(stream, Stream)
    assert (await stream).text == (await engine.achat(chat, params)).text
    many = await engine.agenerate(["a", "b", 3], params, return_errors=True)
    assert [type(m) for m in many] == [Completion, Completion, RequestError]


async def test_cancelling_a_task_cancels_its_requests(engine: FlashEngine) -> None:
    task = asyncio.create_task(engine.agenerate(["one", "two", "three"], **LONG))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(idle, engine)


async def test_the_event_loop_is_never_blocked(engine: FlashEngine) -> None:
    """Another coroutine keeps running while a request is served."""
    beats = 0

    async def heart() -> None:
        nonlocal beats
        while True:
            beats += 1
            await asyncio.sleep(0.001)

    beat = asyncio.create_task(heart())
    await engine.agenerate("keep beating", **{**LONG, "max_new_tokens": 60})
    beat.cancel()
    assert beats > 10


async def test_leaving_an_async_loop_frees_the_sequence(engine: FlashEngine) -> None:
    stream = engine.stream("leave", **LONG)
    iterator = stream.__aiter__()
    await iterator.__anext__()
    await iterator.aclose()
    assert stream.result().finish_reason == "cancelled"
    assert await asyncio.to_thread(idle, engine)


def test_a_slow_reader_costs_bounded_memory(engine: FlashEngine) -> None:
    """Deltas nobody reads are merged; nothing is lost."""
    params = SamplingParams(seed=1, max_new_tokens=400, ignore_eos=True, logprobs=0)
    stream = engine.submit("read me later", params)
    done = stream.result()
    deltas = list(stream)
    assert len(deltas) < 200
    assert "".join(d.text for d in deltas) == done.text
    assert tuple(t for d in deltas for t in d.token_ids) == done.token_ids
    assert tuple(p for d in deltas for p in d.logprobs or ()) == done.logprobs


def test_a_fault_in_a_step_reaches_every_waiting_caller(engine: FlashEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """X05, X06: nobody waits for ever, the error carries what there was, the engine goes on."""
    from deepseek_flash import InternalError, MemoryBudgetError

    runner = engine._runtime.tenant._runner
    real, calls = runner.run, []

    def faulty(plan: Any, rows: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 1 byte")
        if len(calls) == 8:
            raise ZeroDivisionError("boom")
        return real(plan, rows)

    monkeypatch.setattr(runner, "run", faulty)
    stream = engine.submit("fault", **LONG)
    with pytest.raises(MemoryBudgetError, match="not enough memory") as e:
        list(stream)
    assert len(e.value.partial.token_ids) == 3
    with pytest.raises(InternalError, match="ZeroDivisionError: boom"):
        engine.submit("fault", **LONG).result()
    monkeypatch.undo()
    assert len(engine.generate("fine again", **{**LONG, "max_new_tokens": 4}).token_ids) == 4
    assert idle(engine)


def test_stream_takes_one_prompt(engine: FlashEngine) -> None:
    with pytest.raises(RequestError, match="one prompt"):
        engine.stream(["a", "b"])  # type: ignore[arg-type]


def test_a_time_limit_is_a_number_and_a_stop_is_text(engine: FlashEngine) -> None:
    with pytest.raises(RequestError, match="number of seconds"):
        engine.submit("x", max_new_tokens=1).result(timeout="soon")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"stop=5: .*a string, or a list of strings"):
        engine.generate("x", stop=5)
