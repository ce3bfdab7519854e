"""Waiting for another thread without holding a lock."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

_LONGEST = 0.2 if sys.platform == "win32" else threading.TIMEOUT_MAX
"""Seconds of one wait. Windows cannot interrupt a longer one with Ctrl-C; others refuse more than TIMEOUT_MAX."""


class Bell:
    """One thread changes something and rings; any thread or event loop waits for the change.

    A signal handler or a finaliser may run on a waiting thread between any two instructions, and may close the
    engine, which waits for the engine thread. A lock held at that moment would stop both for ever, so there is
    none: waiters stand in a deque, whose single operations are atomic, and look again after they have joined it.
    """

    def __init__(self) -> None:
        self._waiters: deque[Callable[[], None]] = deque()

    def ring(self) -> None:
        """Wake everybody. Whoever joins from now on sees what changed before the call."""
        for _ in range(len(self._waiters)):
            self._waiters.popleft()()

    def wait(self, ready: Callable[[], bool], deadline: float | None = None) -> bool:
        """Block until ``ready()``; False when the deadline (monotonic) passed."""
        gate: threading.Lock | None = None
        while not ready():
            left = _LONGEST if deadline is None else min(_LONGEST, deadline - time.monotonic())
            if left <= 0:
                return False
            if gate is None:
                gate = threading.Lock()
                gate.acquire()
                self._waiters.append(gate.release)
            elif gate.acquire(timeout=left):
                gate = None  # it has been used up: join again
        return True

    async def wait_async(self, ready: Callable[[], bool]) -> None:
        """The same on the running event loop, without blocking it."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] | None = None
        while not ready():
            if future is None:
                future = loop.create_future()
                self._waiters.append(partial(_notify, loop, future))
            else:
                await future
                future = None


def _notify(loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> None:
    try:
        loop.call_soon_threadsafe(_resolve, future)
    except Exception:  # closed, or broken in some way of its own: that is nothing the engine thread may fail of
        return


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
