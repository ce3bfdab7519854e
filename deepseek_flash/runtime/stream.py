"""One request seen from the caller's side: iterate, await, wait, cancel; from any thread or event loop."""

from __future__ import annotations

import copy
import os
import time
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from typing import Any

from deepseek_flash.errors import DeadlineExceeded, EngineForked, FlashError, RequestError
from deepseek_flash.runtime.bell import Bell
from deepseek_flash.types import Completion, Delta

_COALESCE = 128
"""Unread deltas that are merged into one (one an answer), so that a slow reader costs little more than the text."""
_SETTLE = 10.0
"""Seconds a timed-out caller waits for its partial result (at most about one step)."""


class Channel:
    """The shared end between the engine thread (put, finish, fail) and a Stream. Holds no engine parts,
    so a kept Stream or result never keeps a closed engine's memory alive. Holds no lock either: see Bell."""

    def __init__(self) -> None:
        self._news = Bell()
        """Rings for every delta and for the end."""
        self._end = Bell()
        """Rings for the end only: who waits for the result sleeps until then."""
        self._deltas: deque[Delta] = deque()
        self._single = 0
        """Deltas at the end of the queue, unless read by now, that were never merged."""
        self.completion: Completion | None = None
        self.error: FlashError | None = None
        self.pid = os.getpid()

    # engine thread

    def put(self, delta: Delta) -> None:
        self._deltas.append(delta)
        self._single += 1
        if self._single >= _COALESCE and len(self._deltas) >= _COALESCE:
            self._merge()
        self._news.ring()

    def _merge(self) -> None:
        """Merge the newest deltas. A reader that comes now finds them missing, and is woken once they are back."""
        answers: dict[int, list[Delta]] = {}
        try:
            for _ in range(_COALESCE):
                delta = self._deltas.pop()
                answers.setdefault(delta.index, []).append(delta)
        except IndexError:  # read meanwhile
            pass
        # Newest first so far; the request's last delta has to stay its last.
        self._deltas.extend(parts.pop().merged(*parts[::-1]) for parts in reversed(answers.values()))
        self._single = 0

    def finish(self, completion: Completion) -> None:
        if not self.done:
            self.completion = completion
        self._over()

    def fail(self, error: FlashError) -> None:
        if not self.done:
            self.error = error
        self._over()

    def _over(self) -> None:
        self._news.ring()
        self._end.ring()

    # consumer side

    @property
    def done(self) -> bool:
        return self.completion is not None or self.error is not None

    def _ready(self) -> bool:
        return bool(self._deltas) or self.done

    def _ended(self) -> bool:
        return self.done

    def guard(self) -> None:
        """In a forked child there is no engine thread: say so instead of waiting for ever."""
        if os.getpid() != self.pid:
            raise EngineForked("this request belongs to an engine of the parent process; open an engine in the child")

    def wait(self, deadline: float | None, *, for_delta: bool) -> bool:
        """Block until there is a delta (if asked) or the end; False when the deadline (monotonic) passed."""
        self.guard()
        return self._news.wait(self._ready, deadline) if for_delta else self._end.wait(self._ended, deadline)

    async def await_event(self, *, for_delta: bool) -> None:
        self.guard()
        await (self._news.wait_async(self._ready) if for_delta else self._end.wait_async(self._ended))

    def pop(self) -> tuple[Delta | None, bool]:
        """The next delta, if there is one, and whether it can never come."""
        done = self.done  # asked first: nothing is put after the end
        try:
            return self._deltas.popleft(), False
        except IndexError:
            return None, done

    def outcome(self) -> Completion:
        """The Completion, or raise the error; only once done."""
        if self.error is not None:
            raise copy.copy(self.error)  # one each: whoever raises it writes its traceback into it
        assert self.completion is not None
        return self.completion


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
        if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, (int, float))):
            raise RequestError(
                f"timeout={timeout!r}: a number of seconds, or None, is needed", parameter="timeout", value=timeout
            )
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            finished = self._channel.wait(deadline, for_delta=False)
        except BaseException:  # Ctrl-C: nothing may go on running for a caller who has left
            self._leave()
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
                delta, ended = channel.pop()
                if delta is not None:
                    yield delta
                elif ended:
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
                delta, ended = channel.pop()
                if delta is not None:
                    yield delta
                elif ended:
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
