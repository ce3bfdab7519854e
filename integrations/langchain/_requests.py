"""Requests on an engine: submit, wait, stream; whoever leaves early, or runs out of time, cancels them."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from types import TracebackType
from typing import Any

from deepseek_flash import Completion, DeadlineExceeded, Delta, SamplingParams

from ._errors import adapted


class Deadline:
    """Cancels the streams put into it when ``seconds`` have passed; None never does."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds, self.fired, self.streams = seconds, False, list[Any]()
        endless = seconds is None or seconds > threading.TIMEOUT_MAX  # float("inf") is how some say None
        self._timer = None if endless else threading.Timer(seconds or 0.0, self._fire)

    def _fire(self) -> None:
        self.fired = True
        self.cancel()

    def add(self, stream: Any) -> Any:
        self.streams.append(stream)
        if self.fired:
            stream.cancel()
        return stream

    def cancel(self) -> None:
        """Stop every request that still runs. Idempotent; any thread."""
        for stream in tuple(self.streams):
            stream.cancel()

    def in_time(self, completion: Completion) -> Completion:
        """The completion, or DeadlineExceeded with it as ``partial`` if the time limit cut it short."""
        if self.fired and completion.finish_reason == "cancelled":
            error = DeadlineExceeded(f"no complete answer within timeout={self.seconds} s; the request was stopped")
            error.partial = completion
            raise error
        return completion

    def __enter__(self) -> Deadline:
        if self._timer is not None:
            self._timer.daemon = True
            self._timer.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.cancel()


def complete(engine: Any, prompts: Sequence[Any], params: SamplingParams, timeout: float | None) -> list[Completion]:
    """Run all prompts as one batch; the first error, in order, stops the others."""
    with adapted(), Deadline(timeout) as deadline:
        streams = [deadline.add(engine.submit(prompt, params)) for prompt in prompts]
        return [deadline.in_time(stream.result()) for stream in streams]


async def acomplete(
    engine: Any, prompts: Sequence[Any], params: SamplingParams, timeout: float | None
) -> list[Completion]:
    """``complete`` for asyncio; cancelling the task stops the requests."""
    with adapted(), Deadline(timeout) as deadline:
        streams = [deadline.add(await engine.asubmit(prompt, params)) for prompt in prompts]
        return [deadline.in_time(await stream) for stream in streams]


def deltas(engine: Any, prompt: Any, params: SamplingParams, timeout: float | None) -> Iterator[Delta]:
    """The pieces of one answer; closing the generator stops the request."""
    with adapted(), Deadline(timeout) as deadline:
        stream = deadline.add(engine.submit(prompt, params))
        for delta in stream:
            if not (deadline.fired and delta.finish_reason == "cancelled"):
                yield delta
        deadline.in_time(stream.result())


async def adeltas(engine: Any, prompt: Any, params: SamplingParams, timeout: float | None) -> AsyncIterator[Delta]:
    """``deltas`` for asyncio."""
    with adapted(), Deadline(timeout) as deadline:
        stream = deadline.add(await engine.asubmit(prompt, params))
        async for delta in stream:
            if not (deadline.fired and delta.finish_reason == "cancelled"):
                yield delta
        deadline.in_time(await stream)
