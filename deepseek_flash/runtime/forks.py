"""Heavy work in a process that was forked from one that computed."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from typing import TypeVar

from deepseek_flash.runtime.bell import Bell

T = TypeVar("T")

_IMPORTED_IN = os.getpid()


def forked() -> bool:
    """Whether this process may have been forked from one in which torch had computed."""
    return os.getpid() != _IMPORTED_IN or multiprocessing.parent_process() is not None


def fork_safe(call: Callable[[], T]) -> T:
    """Run ``call`` here, or in a forked process on a new thread, and wait for it.

    GNU OpenMP gives every thread that enters a parallel region a team of workers. In a forked child the forking
    thread still believes in the team it had in the parent and would wait for it for ever; a new thread gets its own.
    """
    if not forked():
        return call()
    results: list[T] = []
    errors: list[BaseException] = []
    bell = Bell()

    def run() -> None:
        try:
            results.append(call())
        except BaseException as e:  # raised where it was asked for
            errors.append(e)
        bell.ring()

    def over() -> bool:
        return bool(results or errors)

    threading.Thread(target=run, name="deepseek-flash-open", daemon=True).start()
    try:
        bell.wait(over)
    except BaseException:
        bell.wait(over)  # what it works on must not be taken away under it
        raise
    if errors:
        raise errors[0]
    return results[0]
