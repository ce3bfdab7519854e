"""Heavy work on a thread of its own."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_POLL = 0.05
"""Seconds between looks at the worker: a wait without end cannot be interrupted everywhere."""


class _Interrupted(BaseException):
    """Raised inside the worker when its caller was interrupted."""


def on_fresh_thread(call: Callable[[], T]) -> T:
    """Run ``call`` on a new thread, wait for it, and hand over what it returns or raises.

    GNU OpenMP, which torch computes with, gives every thread that enters a parallel region a team of workers.
    Loading on the caller's thread would leave its team behind for as long as that thread lives, and with more
    workers than cores every parallel region of the engine thread waits for sleepers: decoding was 1.7 times slower.
    In a forked child the forking thread still believes in the team it had in the parent, and would wait for ever.

    An interrupt (Ctrl-C) stops the worker at its next instruction and is raised once it has stopped, so that
    nothing it works on is taken away under it.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as e:  # raised where it was asked for
            errors.append(e)

    worker = threading.Thread(target=run, name="deepseek-flash-open", daemon=True)
    try:
        worker.start()
        _wait(worker)
    except BaseException:
        if worker.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(worker.ident), ctypes.py_object(_Interrupted))
            _wait(worker)
        raise
    if errors:
        raise errors[0]
    return results[0]


def _wait(worker: threading.Thread) -> None:
    while worker.is_alive():
        worker.join(_POLL)
