"""Faults inside the engine, several waiters, odd arguments: nobody hangs, everybody hears of it in their own words."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepseek_flash import Completion, DeadlineExceeded, Delta, EngineClosed, FlashEngine, InternalError, RequestError
from deepseek_flash.runtime.stream import Channel
from tests.support.engines import open_engine

LONG: dict[str, Any] = {"max_new_tokens": 400, "ignore_eos": True, "temperature": 0.0}


def boom(*_: Any) -> Any:
    raise ZeroDivisionError("boom")


def test_a_fault_while_a_request_begins_is_its_own_alone(engine: FlashEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """X05: the engine thread goes on, and so does what was running."""
    other = engine.submit("running", **{**LONG, "max_new_tokens": 50})
    reader = iter(other)
    next(reader)
    tenant = engine._runtime.tenant
    for at, name in ((tenant, "_detokenizer"), (engine._runtime.scheduler, "add")):
        monkeypatch.setattr(at, name, boom)
        with pytest.raises(InternalError, match="ZeroDivisionError: boom"):
            engine.submit("x", max_new_tokens=2).result(timeout=10)
        monkeypatch.undo()
    assert len(other.result(timeout=20).token_ids) == 50
    assert len(engine.generate("x", max_new_tokens=2, ignore_eos=True).token_ids) == 2


@pytest.mark.parametrize("broken", [["plan"], ["plan", "finish", "abort"], ["check", "abort"]])
def test_a_scheduler_gone_wrong_reaches_everybody_and_stops(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, broken: list[str]
) -> None:
    """X05, Z01: also when tidying up fails too; no thread spins, and close() still gives the memory back."""
    with open_engine(tiny, max_model_len=512) as engine:
        streams = [engine.submit(f"request {i}", **LONG) for i in range(3)]
        scheduler = engine._runtime.scheduler
        for name in broken:
            monkeypatch.setattr(scheduler, name, boom)
        for s in streams:
            with pytest.raises(InternalError, match="boom"):
                s.result(timeout=10)
        with pytest.raises(InternalError, match="boom") as later:
            engine.submit("later", max_new_tokens=1).result(timeout=10)
        assert "boom" in "".join(later.value.__notes__)  # where it happened travels along
        steps: list[int] = []
        monkeypatch.setattr(engine._runtime.tenant, "step", lambda: steps.append(1))
        time.sleep(0.05)
        assert not steps
        store = engine._runtime.store
    assert not store.pools


def test_every_waiter_gets_an_error_of_its_own(tiny: Path) -> None:
    """X05: raising writes into an exception, so threads must not share one."""
    heard: list[EngineClosed] = []
    with open_engine(tiny, max_model_len=512) as engine:
        stream = engine.submit("x", **LONG)

        def wait() -> None:
            with pytest.raises(EngineClosed) as e:
                stream.result(timeout=20)
            heard.append(e.value)

        async def await_it() -> None:
            with pytest.raises(EngineClosed) as e:
                await stream
            heard.append(e.value)

        jobs = [wait, wait, lambda: asyncio.run(await_it()), lambda: asyncio.run(await_it())]
        threads = [threading.Thread(target=job) for job in jobs]
        for t in threads:
            t.start()
        time.sleep(0.05)
    for t in threads:
        t.join(20)
    assert len({id(e) for e in heard}) == 4
    assert all(e.partial == heard[0].partial is not None for e in heard)


def test_time_limits_of_any_size(engine: FlashEngine) -> None:
    for timeout in (float("inf"), 1e12):
        assert engine.submit("x", max_new_tokens=2, ignore_eos=True).result(timeout).finish_reason == "length"
    for timeout in (0, -1.0):
        with pytest.raises(DeadlineExceeded) as e:
            engine.submit("x", **LONG).result(timeout)
        assert e.value.partial.finish_reason == "cancelled"


ODD: dict[str, Callable[[FlashEngine], Any]] = {
    "a number": lambda e: e.generate(prompt_token_ids=5),  # type: ignore[call-overload]
    "a list and a number": lambda e: e.generate(prompt_token_ids=[[1], 5]),  # type: ignore[list-item]
    "text": lambda e: e.generate(prompt_token_ids="abc"),  # type: ignore[call-overload]
    "a dict": lambda e: e.generate(prompt_token_ids={1: 2}),  # type: ignore[call-overload]
    "to detokenize": lambda e: e.detokenize(5),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("call", ODD)
def test_odd_token_ids_are_named(engine: FlashEngine, call: str) -> None:
    with pytest.raises(RequestError, match="list of ints"):
        ODD[call](engine)


def test_without_a_token_there_is_no_time_of_the_first(engine: FlashEngine) -> None:
    done = engine.generate("x", max_new_tokens=0, n=3, prompt_logprobs=1)
    assert done.timings.first_token is None
    assert [c.finish_reason for c in done.choices] == ["length"] * 3
    assert done.prompt_logprobs == (None,)


@pytest.mark.parametrize("tiers", [False, True])
def test_a_closed_engine_is_freed_without_the_garbage_collector(tiny: Path, tmp_path: Path, tiers: bool) -> None:
    """M01: no reference cycle, and a stream that somebody keeps keeps nothing else."""
    gc.collect()
    gc.disable()
    try:
        more = {"l2_cache_gb": 0.01, "l3_cache_path": tmp_path} if tiers else {}
        engine = FlashEngine(tiny, max_model_len=128, **more)
        stream = engine.submit("x", **{**LONG, "max_new_tokens": 100})
        runtime = engine._runtime
        parts = [weakref.ref(p) for p in (engine, runtime, runtime.model, runtime.store, runtime.tenant)]
        engine.close()
        del engine, runtime
        assert [p() for p in parts] == [None] * 5
    finally:
        gc.enable()
    stream.cancel()
    with pytest.raises(EngineClosed):
        stream.result()


def test_unread_deltas_of_several_answers_are_merged() -> None:
    """A reader that never comes costs little more than the text, also with n > 1; nothing is lost or reordered."""
    channel = Channel()
    for i in range(3000):
        channel.put(Delta(i % 3, f"{i} ", token_ids=(i,), logprobs=({i: -1.0},)))
    channel.put(Delta(1, "", finish_reason="length"))
    got = []
    while (delta := channel.pop()[0]) is not None:
        got.append(delta)
    assert len(got) < 300
    for index in range(3):
        mine = [d for d in got if d.index == index]
        assert [t for d in mine for t in d.token_ids] == list(range(index, 3000, 3))
        assert "".join(d.text for d in mine) == "".join(f"{i} " for i in range(index, 3000, 3))
        assert [next(iter(p)) for d in mine for p in d.logprobs or ()] == list(range(index, 3000, 3))
    assert got[-1].finish_reason == "length"


def test_who_waits_for_the_result_sleeps_until_it_is_there() -> None:
    """Woken for every token, many callers of generate() would take turns with the engine thread for nothing."""
    channel, looked = Channel(), []
    ended = channel._ended
    channel._ended = lambda: (looked.append(1), ended())[1]  # type: ignore[method-assign]

    async def await_it() -> None:
        await channel.await_event(for_delta=False)

    waits = [lambda: channel.wait(None, for_delta=False), lambda: asyncio.run(await_it())]
    threads = [threading.Thread(target=wait) for wait in waits]
    for t in threads:
        t.start()
    while len(looked) < 4:  # each looks, joins the queue, looks again
        time.sleep(0.001)
    for i in range(50):
        channel.put(Delta(token_ids=(i,)))
        time.sleep(0.001)
    channel.finish(Completion())
    for t in threads:
        t.join(10)
    assert len(looked) <= 6
