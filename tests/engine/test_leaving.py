"""Leaving and faults, step by step: a gate lets single steps of the engine through, so nothing ends by itself."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deepseek_flash import Delta, EngineClosed, FlashEngine, InternalError, Stream
from tests.support.engines import open_engine

LONG: dict[str, Any] = {"max_new_tokens": 400, "ignore_eos": True, "temperature": 0.0}


def until(condition: Callable[[], Any]) -> None:
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.01)
    pytest.fail("it never came to that")


class Gate:
    """Holds every step of an engine until it is let through."""

    def __init__(self, engine: FlashEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine, self.steps, self._passes = engine, 0, threading.Semaphore(0)
        runner = engine._runtime.tenant._runner
        real = runner.run

        def run(plan: Any, rows: Any) -> Any:
            self.steps += 1
            assert self._passes.acquire(timeout=30)
            return real(plan, rows)

        monkeypatch.setattr(runner, "run", run)
        loop = engine._runtime.loop
        self.submitted: list[Any] = []
        """Requests posted to the engine thread."""
        self.cancels: list[Any] = []
        """Cancellations posted to it."""
        post, post_quietly = loop.post, loop.post_quietly
        monkeypatch.setattr(loop, "post", lambda call: (self.submitted.append(call), post(call)))
        monkeypatch.setattr(loop, "post_quietly", lambda call: (self.cancels.append(call), post_quietly(call)))

    def let(self, steps: int) -> None:
        self._passes.release(steps)

    def holds(self, step: int) -> None:
        """Wait until this step has begun and stands at the gate."""
        until(lambda: self.steps == step)

    def ended_by(self, step: int) -> bool:
        """Open the gate: a held step ends, none after ``step`` begins, and no block stays in use."""
        until(lambda: self.cancels)
        self.let(1000)
        until(lambda: not self.engine._runtime.tenant._live)
        return self.steps <= step and self.engine.memory_report().kv_cache.used_blocks == 0


@pytest.fixture
def gate(engine: FlashEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(engine, monkeypatch)
    yield gate
    gate.let(10_000)


def leave_by_break(engine: FlashEngine, gate: Gate) -> None:
    for i, _ in enumerate(engine.stream("leave", **LONG)):
        if i == 1:
            break


def leave_by_an_exception(engine: FlashEngine, gate: Gate) -> None:
    def read() -> None:
        for delta in engine.stream("leave", **LONG):
            raise ZeroDivisionError(delta.text)

    with pytest.raises(ZeroDivisionError):
        read()


def leave_by_close(engine: FlashEngine, gate: Gate) -> None:
    stream = engine.stream("leave", **LONG)
    next(iter(stream))
    stream.close()


def leave_by_closing_the_iterator(engine: FlashEngine, gate: Gate) -> None:
    stream = engine.stream("leave", **LONG)
    iterator = iter(stream)
    next(iterator)
    iterator.close()  # type: ignore[attr-defined]


def leave_by_losing_the_iterator(engine: FlashEngine, gate: Gate) -> None:
    iterator = iter(engine.stream("leave", **LONG))
    next(iterator)
    del iterator
    gc.collect()


def leave_by_losing_an_unread_stream(engine: FlashEngine, gate: Gate) -> None:
    stream = engine.submit("leave", **LONG)
    gate.holds(3)
    del stream
    gc.collect()


LEAVING = [
    leave_by_break,
    leave_by_an_exception,
    leave_by_close,
    leave_by_closing_the_iterator,
    leave_by_losing_the_iterator,
    leave_by_losing_an_unread_stream,
]


@pytest.mark.parametrize("leave", LEAVING)
def test_X01_leaving_ends_the_request_within_the_step(
    engine: FlashEngine, gate: Gate, leave: Callable[[FlashEngine, Gate], None]
) -> None:
    gate.let(2)
    leave(engine, gate)
    assert gate.ended_by(3)


async def aleave_by_break(engine: FlashEngine, gate: Gate) -> None:
    async for _ in engine.stream("leave", **LONG):
        break


async def aleave_an_async_generator(engine: FlashEngine, gate: Gate) -> None:
    async for _ in engine.astream("leave", **LONG):
        break


async def aleave_by_a_timeout(engine: FlashEngine, gate: Gate) -> None:
    stream = engine.submit("leave", **LONG)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(stream, 0.05)
    gate.stream = stream  # type: ignore[attr-defined]  # it is held: only the timeout can have ended it


async def aleave_by_cancelling_a_list(engine: FlashEngine, gate: Gate) -> None:
    task = asyncio.create_task(engine.agenerate(["one", "two"], **LONG))
    await asyncio.to_thread(gate.holds, 3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def aleave_by_cancelling_a_chat(engine: FlashEngine, gate: Gate) -> None:
    task = asyncio.create_task(engine.achat([{"role": "user", "content": "leave"}], **LONG))
    await asyncio.to_thread(gate.holds, 3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def aleave_a_reading_task(engine: FlashEngine, gate: Gate) -> None:
    stream = engine.stream("leave", **LONG)

    async def read() -> None:
        async for _ in stream:
            pass

    task = asyncio.create_task(read())
    await asyncio.to_thread(gate.holds, 3)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


ALEAVING = [
    aleave_by_break,
    aleave_an_async_generator,
    aleave_by_a_timeout,
    aleave_by_cancelling_a_list,
    aleave_by_cancelling_a_chat,
    aleave_a_reading_task,
]


@pytest.mark.parametrize("leave", ALEAVING)
async def test_X01_leaving_in_asyncio_ends_the_request_within_the_step(
    engine: FlashEngine, gate: Gate, leave: Callable[[FlashEngine, Gate], Awaitable[None]]
) -> None:
    gate.let(2)
    await leave(engine, gate)
    gc.collect()
    assert await asyncio.to_thread(gate.ended_by, 3)


@pytest.mark.skipif(sys.platform == "win32", reason="signals are sent the POSIX way")
@pytest.mark.parametrize(
    "call",
    [
        lambda engine, stream: engine.generate("interrupt", **LONG),
        lambda engine, stream: engine.generate(["interrupt", "both"], **LONG),
        lambda engine, stream: engine.chat([{"role": "user", "content": "interrupt"}], **LONG),
        lambda engine, stream: stream().result(),
        lambda engine, stream: list(stream()),
    ],
    ids=["generate", "list", "chat", "result", "iterate"],
)
def test_X03_ctrl_c_ends_the_request_within_the_step(
    engine: FlashEngine, gate: Gate, call: Callable[[FlashEngine, Callable[[], Stream]], Any]
) -> None:
    """X03: also where the stream is still held, as a notebook holds it; the next call is served."""
    held: list[Stream] = []

    def stream() -> Stream:
        held.append(engine.submit("interrupt", **LONG))
        return held[-1]

    def press() -> None:
        gate.holds(3)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    presser = threading.Thread(target=press)
    presser.start()
    gate.let(2)
    with pytest.raises(KeyboardInterrupt):
        call(engine, stream)
    presser.join()
    assert gate.ended_by(3)
    assert len(engine.generate("at once", **{**LONG, "max_new_tokens": 3}).token_ids) == 3


def test_X02_X04_cancel_between_prefill_chunks_while_the_owner_waits(engine: FlashEngine, gate: Gate) -> None:
    """X02: from another thread, the owner blocked in its loop. X04: 450 tokens are eight chunks; two are enough."""
    stream = engine.submit("word " * 90, **LONG)
    got: list[Delta] = []
    owner = threading.Thread(target=lambda: got.extend(stream))
    owner.start()
    gate.let(2)
    gate.holds(3)
    canceller = threading.Thread(target=stream.cancel)
    canceller.start()
    canceller.join()
    assert gate.ended_by(3)
    owner.join(10)
    assert not owner.is_alive()
    assert [(d.text, d.token_ids, d.finish_reason) for d in got] == [("", (), "cancelled")]
    done = stream.result()
    assert (done.token_ids, done.finish_reason, done.usage.completion_tokens) == ((), "cancelled", 0)


def test_X04_a_request_that_waits_for_its_turn_can_be_cancelled(engine: FlashEngine, gate: Gate) -> None:
    running = [engine.submit(f"{i}", **{**LONG, "max_new_tokens": 3}) for i in range(8)]
    waiting = engine.submit("no seat for me", **LONG)
    gate.holds(1)
    waiting.cancel()
    gate.let(1000)
    assert waiting.result(timeout=20).finish_reason == "cancelled"
    assert [r.result().finish_reason for r in running] == ["length"] * 8


def wait_in_every_way(engine: FlashEngine, gate: Gate) -> tuple[list[threading.Thread], list[BaseException]]:
    """Six callers who wait for ever, and what they get to hear."""
    heard: list[BaseException] = []

    async def awaits() -> None:
        await engine.submit("await", **LONG)

    async def iterates() -> None:
        async for _ in engine.stream("async for", **LONG):
            pass

    ways: list[Callable[[], Any]] = [
        lambda: engine.generate("generate", **LONG),
        lambda: engine.generate(["one", "of two"], **LONG),
        lambda: engine.submit("result", **LONG).result(),
        lambda: list(engine.stream("stream", **LONG)),
        lambda: asyncio.run(awaits()),
        lambda: asyncio.run(iterates()),
    ]

    def caller(way: Callable[[], Any]) -> None:
        try:
            way()
        except BaseException as e:
            heard.append(e)

    threads = [threading.Thread(target=caller, args=(way,)) for way in ways]
    for t in threads:
        t.start()
    until(lambda: len(gate.submitted) == 7)
    return threads, heard


def test_X05_a_fault_that_ends_the_engine_reaches_all_who_wait(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """X05: running or waiting for a seat, in whatever way; and later calls fail at once."""
    with open_engine(tiny, max_model_len=512, max_batch_size=3) as engine:
        gate = Gate(engine, monkeypatch)
        threads, heard = wait_in_every_way(engine, gate)

        def check() -> None:
            raise InternalError("block 3 has two owners")

        monkeypatch.setattr(engine._runtime.scheduler, "check", check)
        gate.let(1000)
        for t in threads:
            t.join(20)
        assert not any(t.is_alive() for t in threads)
        assert [type(e) for e in heard] == [InternalError] * 6
        assert all("two owners" in str(e) for e in heard)
        with pytest.raises(InternalError, match="two owners"):
            engine.submit("later", **LONG).result(timeout=10)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_X05_nobody_hangs_when_the_engine_thread_dies(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_engine(tiny, max_model_len=512, max_batch_size=3) as engine:
        gate = Gate(engine, monkeypatch)
        threads, heard = wait_in_every_way(engine, gate)

        def step() -> None:
            raise SystemError("the interpreter itself is unwell")

        monkeypatch.setattr(engine._runtime.tenant, "step", step)
        gate.let(1000)
        for t in threads:
            t.join(20)
        assert not any(t.is_alive() for t in threads)
        assert len(heard) == 6
        assert all(isinstance(e, EngineClosed) for e in heard)
        with pytest.raises(EngineClosed):
            engine.generate("later", **LONG)
