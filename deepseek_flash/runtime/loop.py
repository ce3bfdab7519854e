"""The engine thread: serves posted calls and steps its tenants, one step at a time."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from queue import Empty, SimpleQueue
from typing import Protocol, TypeVar

from deepseek_flash.errors import EngineClosed, EngineForked
from deepseek_flash.runtime.bell import Bell

T = TypeVar("T")
_LOOK_AGAIN = 1.0
"""Seconds between looks at whether the loop has ended while somebody waits for a call."""


class Tenant(Protocol):
    """Something that does work in steps on the engine thread (generation now; retrieval later)."""

    def ready(self) -> bool:
        """Whether a step would do something."""
        ...

    def patience(self) -> float | None:
        """Seconds after which an idle thread must ask ``ready`` again; None: not before something is posted."""
        ...

    def step(self) -> None:
        """Do one bounded piece of work. Faults are the tenant's own business: it must not raise."""
        ...

    def close(self) -> None:
        """End everything pending with EngineClosed."""
        ...


class EngineLoop:
    """One thread per runtime; the only place where scheduler, cache and device are touched.

    The thread is a daemon so that a forgotten engine never keeps a program alive; an exit handler stops and
    joins it before the interpreter goes down, so no native code runs into shutdown.

    Any method may be called from a signal handler or a finaliser, which may have interrupted any other of them on
    the same thread: so no lock is held here (SimpleQueue.put is reentrant).
    """

    def __init__(self, at_end: Callable[[], None]) -> None:
        """``at_end`` gives back what the tenants use: on the thread, after their close(); on whoever closes a loop
        that was never started."""
        self._at_end = at_end
        self._tenants: tuple[Tenant, ...] = ()
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._stopping = False
        """No new calls."""
        self._ended = False
        """The inbox is read for the last time."""
        self._over = False
        """Everything is freed."""
        self._leaving = False
        self._bell = Bell()
        self._turn = deque([None])
        """Whoever takes its only item ends the loop: the thread, or close() if the thread never got going."""
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._at_exit = partial(_stop_at_exit, weakref.ref(self))

    def start(self, tenants: Sequence[Tenant], name: str) -> None:
        """Once. Whoever calls it makes sure that close() will be called, whatever happens in between."""
        self._tenants = tuple(tenants)
        self._thread.name = name
        atexit.register(self._at_exit)
        self._thread.start()

    @property
    def closed(self) -> bool:
        return self._stopping

    def guard(self) -> None:
        """Raise if the loop cannot serve this process."""
        if os.getpid() != self._pid:
            raise EngineForked(
                "this engine was opened in another process and cannot be used after a fork: "
                "open it in the child, or start children with the 'spawn' method"
            )
        if self._leaving and threading.current_thread().daemon:
            threading.Event().wait()  # the interpreter is going down and takes this thread along, in silence
        if self._stopping:
            raise EngineClosed("this engine is closed; open a new FlashEngine")

    def post(self, call: Callable[[], None]) -> None:
        """Run ``call`` on the engine thread before its next step. Raises when closed or forked."""
        self.guard()
        self._inbox.put(call)
        if self._ended:  # it may have come too late to be read
            self.guard()

    def post_quietly(self, call: Callable[[], None]) -> None:
        """Like :meth:`post`, for finalisers: does nothing when closed or forked."""
        if os.getpid() == self._pid and not self._stopping:
            self._inbox.put(call)

    def call(self, function: Callable[[], T]) -> T:
        """Run ``function`` on the engine thread between steps and wait for what it returns or raises."""
        if self._thread is threading.current_thread():
            return function()
        outcome = Future[T]()

        def run() -> None:
            try:
                outcome.set_result(function())
            except BaseException as e:
                outcome.set_exception(e)

        self.post(run)
        while not wait([outcome], _LOOK_AGAIN).done:
            if self._over and not outcome.done():
                self.guard()
        return outcome.result()

    def close(self) -> None:
        """Stop after the current step, end what is pending, free memory, wait for that. Idempotent."""
        if os.getpid() != self._pid:
            return
        atexit.unregister(self._at_exit)
        self._stop()

    def leave(self) -> None:
        """Stop because the interpreter exits: daemon threads that still wait are left to die in silence, where
        an EngineClosed would make each print a traceback."""
        self._leaving = True
        if os.getpid() == self._pid:
            self._stop()

    def _stop(self) -> None:
        self._stopping = True
        self._inbox.put(_nothing)
        if self._take_turn():
            self._end()
        if self._thread is threading.current_thread():
            return  # a finaliser ran on the engine thread itself: the loop ends after this step
        if self._bell.wait(lambda: self._over) and self._thread.ident is not None:
            # What is left of the thread is a few instructions. Bounded, since join() cannot be entered twice by
            # one thread, and a signal handler may have interrupted it there.
            self._thread.join(1.0)

    def _take_turn(self) -> bool:
        try:
            self._turn.pop()
        except IndexError:
            return False
        return True

    def _run(self) -> None:
        if not self._take_turn():
            return
        try:
            while not self._stopping:
                busy = False
                for tenant in self._tenants:
                    if tenant.ready() and not self._stopping:
                        tenant.step()
                        busy = True
                self._serve(wait=not busy)
        finally:
            self._end()

    def _serve(self, *, wait: bool) -> None:
        """Run the posted calls that are there, or the next one to come."""
        patience = [p for t in self._tenants if (p := t.patience()) is not None] if wait else []
        for _ in range(max(self._inbox.qsize(), int(wait))):
            try:
                call = self._inbox.get(block=wait, timeout=min(patience, default=None) if wait else None)
            except Empty:
                return
            call()
            del call  # a waiting thread must not keep what was asked of it last
            wait = False

    def _end(self) -> None:
        self._stopping = True
        self._ended = True
        try:
            if not self._leaving:
                self._serve(wait=False)  # requests that were posted but never begun must hear of the end too
                for tenant in self._tenants:
                    tenant.close()
                self._at_end()
        finally:
            self._over = True
            self._bell.ring()


def _nothing() -> None:
    """Wakes the thread."""


def _stop_at_exit(loop: weakref.ref[EngineLoop]) -> None:
    alive = loop()
    if alive is not None:
        alive.leave()
