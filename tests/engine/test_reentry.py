"""Whatever may run between any two lines of a consumer (a signal handler, a finaliser): nothing deadlocks or leaks.

A trace function stands in for the signal: at the k-th line executed inside the package it closes the loop, or raises
KeyboardInterrupt, for every k.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import deepseek_flash
from deepseek_flash import Completion, Delta, EngineClosed, FlashEngine
from deepseek_flash.runtime.loop import EngineLoop
from deepseek_flash.runtime.runtime import FlashRuntime
from deepseek_flash.runtime.stream import Channel, Stream

PACKAGE = str(Path(deepseek_flash.__file__).parent)


class Talker:
    """A tenant that answers with ``length`` one-token deltas, one a step."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.at: dict[int, tuple[Channel, int]] = {}
        self.ended = False

    def begin(self, number: int, channel: Channel) -> None:
        if self.ended:
            channel.fail(EngineClosed("closed"))
        else:
            self.at[number] = (channel, 0)

    def cancel(self, number: int) -> None:
        if number in self.at:
            self.at.pop(number)[0].finish(Completion(finish_reason="cancelled"))

    def ready(self) -> bool:
        return bool(self.at)

    def patience(self) -> float | None:
        return None

    def step(self) -> None:
        for number, (channel, done) in list(self.at.items()):
            channel.put(Delta(text="x", token_ids=(done,)))
            self.at[number] = (channel, done + 1)
            if done + 1 == self.length:
                del self.at[number]
                channel.finish(Completion(text="x" * self.length))

    def close(self) -> None:
        self.ended = True
        for channel, _ in self.at.values():
            channel.fail(EngineClosed("closed"))
        self.at = {}


class Served:
    """A loop with a Talker, and submit() as the runtime does it."""

    def __init__(self, length: int = 5) -> None:
        self.tenant = Talker(length)
        self.loop = EngineLoop(lambda: None)
        self.loop.start([self.tenant], "served")
        self._numbers = itertools.count()

    def submit(self) -> Stream:
        channel, number = Channel(), next(self._numbers)
        stream = Stream(channel, lambda: self.loop.post_quietly(lambda: self.tenant.cancel(number)), number)
        self.loop.post(lambda: self.tenant.begin(number, channel))
        return stream


def at_line(k: int, act: Callable[[], None], call: Callable[[], Any], where: str = "") -> tuple[bool, Any]:
    """Run ``call``, and ``act`` at the k-th line it executes inside the package (in files whose path there starts
    with ``where``). (whether it got there, outcome).

    On a thread of its own: a deadlock must not stop the tests, and CPython 3.11 miscounts the recursion depth of a
    thread whose trace function raises.
    """
    told: list[tuple[bool, Any]] = []
    job = threading.Thread(target=lambda: told.append(_at_line(k, act, call, PACKAGE + "/" + where)), daemon=True)
    job.start()
    job.join(20)
    assert not job.is_alive(), f"deadlock at line {k}"
    return told[0]


def _at_line(k: int, act: Callable[[], None], call: Callable[[], Any], where: str) -> tuple[bool, Any]:
    left = k

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.startswith(where):
            return None
        if event == "line":
            left -= 1
            if left == 0 and finalising(frame):
                left = 1  # what is raised there is lost, in any program
            elif left == 0:
                sys.settrace(None)
                act()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        outcome = call()
    except (EngineClosed, KeyboardInterrupt) as e:
        outcome = type(e)
    finally:
        sys.settrace(before)
    return left <= 0, outcome


def finalising(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "_cancel_unfinished":
            return True
        frame = frame.f_back
    return False


def read(served: Served) -> int:
    return sum(len(d.token_ids) for d in served.submit())


def wait(served: Served) -> int:
    return len(served.submit().result(timeout=30).text)


def awaited(served: Served) -> int:
    async def ask() -> int:
        return sum([len(d.token_ids) async for d in served.submit()])

    return asyncio.run(ask())


@pytest.mark.parametrize("use", [read, wait, awaited])
def test_closing_between_any_two_lines_never_deadlocks(use: Callable[[Served], int]) -> None:
    """X05, Z01: as a signal handler or the garbage collector would, on the thread that is reading."""
    for k in range(1, 400):
        served = Served()
        reached, got = at_line(k, served.loop.close, lambda served=served: use(served))
        assert got in (EngineClosed, 5)
        served.loop.close()
        if not reached:
            break
    assert 20 < k < 399


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Interrupted finalisers and tasks are none of anybody's business, now or at a later collection."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # pytest's keeps what it is told, frames and all
    monkeypatch.setattr(logging.getLogger("asyncio"), "disabled", True)
    yield
    gc.collect()


def until(condition: Callable[[], bool], otherwise: str, seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, otherwise
        time.sleep(0.0005)


def interrupt() -> None:
    raise KeyboardInterrupt


LONG: dict[str, Any] = {"max_new_tokens": 300, "ignore_eos": True, "temperature": 0.0}
SOME: dict[str, Any] = {**LONG, "max_new_tokens": 40}
FEW: dict[str, Any] = {**LONG, "max_new_tokens": 3}
CALLS: dict[str, Callable[[FlashEngine], Any]] = {
    "leave": lambda e: next(iter(e.stream("a", **LONG))),
    "submit": lambda e: e.submit("a", **SOME).result(timeout=20),
    "list": lambda e: e.generate(["a", "b"], **SOME),
    "chat": lambda e: e.chat([{"role": "user", "content": "a"}], **SOME),
    "async": lambda e: asyncio.run(e.agenerate(["a", "b"], **SOME)),
    "iterate": lambda e: [d.index for d in e.stream("a", **FEW)],
}


@pytest.mark.parametrize(
    "call", [pytest.param(c, marks=pytest.mark.slow) if c in ("list", "chat") else c for c in CALLS]
)
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_an_interrupt_between_any_two_lines_leaves_nothing_running(engine: FlashEngine, call: str, quiet: None) -> None:
    """X03: KeyboardInterrupt at every line of a call in turn; no request goes on to its end, and the engine answers."""
    tenant, metrics = engine._runtime.tenant, engine._runtime.metrics
    expect = engine.generate("a", **FEW).token_ids
    before: list[int] = []

    def completed() -> int:
        counters = metrics.snapshot().counters
        return counters["requests"] - counters.get("requests_cancelled", 0) - len(tenant._live)

    def note_and_interrupt() -> None:
        before.append(completed())
        interrupt()

    for k in range(1, 2000):
        start = completed()
        reached, _ = at_line(k, note_and_interrupt, lambda: CALLS[call](engine))
        until(lambda: not tenant._live, f"interrupted at line {k}", seconds=20)
        if not reached:
            break
        if before[-1] == start and call != "iterate":  # whose last token may come in any line
            assert completed() == before[-1], f"not cancelled when interrupted at line {k}"
    assert k > 20
    assert engine.generate("a", **FEW).token_ids == expect


def test_an_interrupt_while_opening_leaves_no_thread_and_no_weights(tiny: Path, quiet: None) -> None:
    """X03, Z01: at every line of the runtime in turn, and the traceback may be kept."""
    kept: list[BaseException] = []

    def opening() -> FlashEngine:
        try:
            return FlashEngine(tiny, max_model_len=64)
        except KeyboardInterrupt as e:
            kept.append(e)
            raise

    threads = threading.active_count()
    for k in range(1, 2000):
        reached, engine = at_line(k, interrupt, opening, where="runtime/")
        if isinstance(engine, FlashEngine):
            engine.close()
        for e in kept:
            assert not weights_held(e), f"interrupted at line {k}"
        kept.clear()
        until(lambda: threading.active_count() == threads, f"a thread is left: interrupted at line {k}")
        if not reached:
            break
    assert 50 < k < 1999


def weights_held(error: BaseException) -> int:
    """Bytes that the frames of a traceback keep through a runtime."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    runtimes = [v for f in frames for v in f.f_locals.values() if isinstance(v, FlashRuntime)]
    models = [r.model for r in runtimes if hasattr(r, "model")]
    return sum(p.untyped_storage().nbytes() for m in models for p in m.parameters() if p.device.type == "cpu")


def test_an_interrupt_while_closing_can_be_followed_by_a_second_close(tiny: Path, quiet: None) -> None:
    """X03, M01: whatever line of close() it hits, the thread ends, and close() again waits for it."""
    for k in range(1, 200):
        engine = FlashEngine(tiny, max_model_len=64)
        stream = engine.submit("a", **LONG)
        loop = engine._runtime.loop
        reached, _ = at_line(k, interrupt, engine.close)
        engine.close()
        assert not loop._thread.is_alive()
        with pytest.raises(EngineClosed):
            stream.result(timeout=5)
        if not reached:
            break
    assert 5 < k < 199
