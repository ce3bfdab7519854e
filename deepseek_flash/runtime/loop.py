"""The engine thread: serves posted calls and steps its tenants, one step at a time."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from deepseek_flash.errors import EngineClosed, EngineForked


class Tenant(Protocol):
    """Something that does work in steps on the engine thread (generation now; retrieval later)."""

    def ready(self) -> bool:
        """Whether a step would do something."""
        ...

    def step(self) -> None:
        """Do one bounded piece of work. Faults are the tenant's own business: it must not raise."""
        ...

    def close(self) -> None:
        """End everything pending with EngineClosed and give memory back."""
        ...


class EngineLoop:
    """One thread per runtime; the only place where scheduler, cache and device are touched.

    The thread is a daemon so that a forgotten engine never keeps a program alive; an exit handler stops and
    joins it before the interpreter goes down, so no native code runs into shutdown.
    """

    def __init__(self, tenants: Sequence[Tenant], name: str) -> None:
        self._tenants = tuple(tenants)
        self._cond = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._stopping = False
        self._leaving = False
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self._at_exit = partial(_stop_at_exit, weakref.ref(self))
        atexit.register(self._at_exit)

    @property
    def closed(self) -> bool:
        return self._stopping

    def guard(self) -> None:
        """Raise if the loop cannot serve this process."""
        if os.getpid() != self._pid:
            raise EngineForked(
                "this engine was opened in another process and cannot be used after a fork: "
                "open a FlashEngine in the child, or start children with the 'spawn' method"
            )
        if self._leaving and threading.current_thread().daemon:
            threading.Event().wait()  # the interpreter is going down and takes this thread along, in silence
        if self._stopping:
            raise EngineClosed("this engine is closed; open a new FlashEngine")

    def post(self, call: Callable[[], None]) -> None:
        """Run ``call`` on the engine thread before its next step. Raises when closed or forked."""
        self.guard()
        with self._cond:
            if not self._stopping:
                self._inbox.append(call)
                self._cond.notify()
                return
        self.guard()

    def post_quietly(self, call: Callable[[], None]) -> None:
        """Like :meth:`post`, for finalisers: does nothing when closed or forked."""
        if os.getpid() != self._pid or self._stopping:
            return
        # A finaliser may run on any thread at any point, also one that holds the condition right now:
        # deque.append needs no lock, and the loop looks at the inbox before it sleeps and at every step.
        self._inbox.append(call)
        if self._cond.acquire(blocking=False):
            try:
                self._cond.notify()
            finally:
                self._cond.release()

    def close(self, timeout: float | None = None) -> None:
        """Stop after the current step, end what is pending, free memory, join. Idempotent."""
        if os.getpid() != self._pid:
            return
        atexit.unregister(self._at_exit)
        self._stop(timeout)

    def leave(self) -> None:
        """Stop because the interpreter exits: daemon threads that still wait are left to die in silence, where
        an EngineClosed would make each print a traceback."""
        self._leaving = True
        if os.getpid() == self._pid:
            self._stop(None)

    def _stop(self, timeout: float | None) -> None:
        with self._cond:  # a post() that saw the loop open has appended before this line
            self._stopping = True
            self._cond.notify()
        if self._thread is threading.current_thread():
            return  # a finaliser ran on the engine thread itself: the loop ends after this step
        while self._thread.is_alive():
            with self._cond:
                self._cond.notify()
            self._thread.join(0.5 if timeout is None else timeout)
            if timeout is not None:
                break

    def _run(self) -> None:
        try:
            while not self._stopping:
                while self._inbox:
                    self._inbox.popleft()()
                busy = False
                for tenant in self._tenants:
                    if tenant.ready() and not self._stopping:
                        tenant.step()
                        busy = True
                if not busy:
                    with self._cond:
                        if not self._inbox and not self._stopping:
                            # The timeout is a net under post_quietly, which may fail to notify.
                            self._cond.wait(1.0)
        finally:
            with self._cond:
                self._stopping = True
            while (
                self._inbox and not self._leaving
            ):  # requests that were posted but never begun must hear of the end too
                self._inbox.popleft()()
            for tenant in () if self._leaving else self._tenants:
                tenant.close()


def _stop_at_exit(loop: weakref.ref[EngineLoop]) -> None:
    alive = loop()
    if alive is not None:
        alive.leave()
