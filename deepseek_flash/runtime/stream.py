"""One request seen from the caller's side: iterate, await, wait, cancel; from any thread or event loop."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from typing import Any

from deepseek_flash.errors import DeadlineExceeded, EngineForked, FlashError
from deepseek_flash.types import Completion, Delta

_COALESCE_AT = 128
"""Unread deltas after which new ones are merged, so that a slow reader costs bounded memory."""
_POLL = 0.2 if sys.platform == "win32" else None
"""Windows cannot interrupt an endless wait with Ctrl-C."""
_SETTLE = 10.0
"""Seconds a timed-out caller waits for its partial result (at most about one step)."""


class Channel:
    """The shared end between the engine thread (put, finish, fail) and a Stream. Holds no engine parts,
    so a kept Stream or result never keeps a closed engine's memory alive."""

    def __init__(self) -> None:
        self._cond = threading.Condition()
        self._deltas: deque[Delta] = deque()
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self.completion: Completion | None = None
        self.error: BaseException | None = None
        self.pid = os.getpid()

    # engine thread

    def put(self, delta: Delta) -> None:
        with self._cond:
            last = self._deltas[-1] if self._deltas else None
            if last is not None and len(self._deltas) >= _COALESCE_AT and last.index == delta.index:
                self._deltas[-1] = last.merged(delta)
            else:
                self._deltas.append(delta)
            self._wake()

    def finish(self, completion: Completion) -> None:
        with self._cond:
            if not self.done:
                self.completion = completion
            self._wake()

    def fail(self, error: BaseException) -> None:
        with self._cond:
            if not self.done:
                self.error = error
            self._wake()

    def _wake(self) -> None:
        self._cond.notify_all()
        waiters, self._waiters = self._waiters, []
        for loop, future in waiters:
            try:
                loop.call_soon_threadsafe(_resolve, future)
            except RuntimeError:  # that event loop is closed: nobody waits there any more
                continue

    # consumer side

    @property
    def done(self) -> bool:
        return self.completion is not None or self.error is not None

    def guard(self) -> None:
        """In a forked child there is no engine thread: say so instead of waiting for ever."""
        if os.getpid() != self.pid:
            raise EngineForked("this request belongs to an engine of the parent process; open an engine in the child")

    def wait(self, deadline: float | None, *, for_delta: bool) -> bool:
        """Block until there is a delta (if asked) or the end; False when the deadline (monotonic) passed."""
        self.guard()
        with self._cond:
            while not (self.done or (for_delta and self._deltas)):
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return False
                self._cond.wait(left if _POLL is None else _POLL if left is None else min(left, _POLL))
            return True

    async def await_event(self, *, for_delta: bool) -> None:
        self.guard()
        loop = asyncio.get_running_loop()
        while True:
            with self._cond:
                if self.done or (for_delta and self._deltas):
                    return
                future: asyncio.Future[None] = loop.create_future()
                self._waiters.append((loop, future))
            await future

    def pop(self) -> Delta | None:
        with self._cond:
            return self._deltas.popleft() if self._deltas else None

    def outcome(self) -> Completion:
        """The Completion, or raise the error; only once done."""
        if self.error is not None:
            raise self.error.with_traceback(None)
        assert self.completion is not None
        return self.completion


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class Stream:
    """A submitted request. ``for`` and ``async for`` yield :class:`Delta`; ``await stream`` and
    :meth:`result` give the :class:`Completion`.

    Leaving a loop early, cancelling the awaiting task, or dropping the object cancels the request: its
    sequence ends before the next step and its cache blocks are freed. Deltas are delivered once.
    """

    def __init__(self, channel: Channel, cancel: Callable[[], None], request_id: int) -> None:
        self._channel = channel
        self._finalizer = weakref.finalize(self, _cancel_unfinished, channel, cancel)
        self._finalizer.atexit = False
        self._cancel = cancel
        self.request_id = request_id

    @property
    def done(self) -> bool:
        """Whether the request has ended (well or not)."""
        return self._channel.done

    def cancel(self) -> None:
        """Stop now (from any thread, also during prefill). What was produced so far stays available."""
        self._channel.guard()
        if not self._channel.done:
            self._cancel()

    close = cancel

    def result(self, timeout: float | None = None) -> Completion:
        """Wait for the end. After ``timeout`` seconds the request is stopped and
        :class:`DeadlineExceeded` is raised with what there was in ``.partial``."""
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            finished = self._channel.wait(deadline, for_delta=False)
        except KeyboardInterrupt:
            self.cancel()
            raise
        if not finished:
            self.cancel()
            self._channel.wait(time.monotonic() + _SETTLE, for_delta=False)
            error = DeadlineExceeded(f"no result within {timeout} s; the request was stopped")
            error.partial = self._channel.completion
            raise error
        return self._channel.outcome()

    def __iter__(self) -> Iterator[Delta]:
        return self._iterate()

    def _iterate(self) -> Generator[Delta, None, None]:
        channel = self._channel
        try:
            while True:
                channel.wait(None, for_delta=True)
                delta = channel.pop()
                if delta is not None:
                    yield delta
                elif channel.done:
                    break
            channel.outcome()
        finally:
            self._leave()

    def __aiter__(self) -> AsyncGenerator[Delta, None]:
        return self._aiterate()

    async def _aiterate(self) -> AsyncGenerator[Delta, None]:
        channel = self._channel
        try:
            while True:
                await channel.await_event(for_delta=True)
                delta = channel.pop()
                if delta is not None:
                    yield delta
                elif channel.done:
                    break
            channel.outcome()
        finally:
            self._leave()

    def __await__(self) -> Generator[Any, None, Completion]:
        return self._wait_async().__await__()

    async def _wait_async(self) -> Completion:
        try:
            await self._channel.await_event(for_delta=False)
        finally:
            self._leave()
        return self._channel.outcome()

    def _leave(self) -> None:
        if not self._channel.done and os.getpid() == self._channel.pid:
            self._cancel()

    def __repr__(self) -> str:
        return f"<Stream {self.request_id} {'done' if self.done else 'running'}>"

    def __copy__(self) -> Stream:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Stream:
        return self

    def __reduce__(self) -> Any:
        raise TypeError("a Stream belongs to a running engine and cannot be pickled")


def _cancel_unfinished(channel: Channel, cancel: Callable[[], None]) -> None:
    if not channel.done and os.getpid() == channel.pid:
        cancel()


def without_traceback(error: FlashError) -> FlashError:
    """Errors cross threads without frames: a kept traceback would keep the model's tensors alive."""
    error.__traceback__ = None
    error.__cause__ = None
    error.__context__ = None
    return error
