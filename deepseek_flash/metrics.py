"""Counters and timers: always on, cheap, read as a snapshot.

One thread writes (the engine's); any thread may take a snapshot. Under the interpreter lock a dict of ints needs no
other lock for that: a snapshot may be one event behind, never torn.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Counters (events since the start) and timers (total seconds, number of times) at one moment."""

    counters: Mapping[str, int]
    seconds: Mapping[str, float]
    times: Mapping[str, int]

    def mean(self, name: str) -> float:
        """Mean seconds of a timer; 0.0 before its first run."""
        return self.seconds.get(name, 0.0) / max(1, self.times.get(name, 0))

    def since(self, earlier: Snapshot) -> Snapshot:
        """What happened between an earlier snapshot and this one."""
        return Snapshot(
            {k: v - earlier.counters.get(k, 0) for k, v in self.counters.items()},
            {k: v - earlier.seconds.get(k, 0.0) for k, v in self.seconds.items()},
            {k: v - earlier.times.get(k, 0) for k, v in self.times.items()},
        )


class Metrics:
    """Names are made by their first use."""

    def __init__(self) -> None:
        self._counters: dict[str, int] = {}
        self._seconds: dict[str, float] = {}
        self._times: dict[str, int] = {}

    def count(self, name: str, by: int = 1) -> None:
        """Add to a counter."""
        self._counters[name] = self._counters.get(name, 0) + by

    def add_seconds(self, name: str, seconds: float) -> None:
        """Add one run of a timer."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds
        self._times[name] = self._times.get(name, 0) + 1

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Time the body, also when it raises."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add_seconds(name, time.perf_counter() - start)

    def snapshot(self) -> Snapshot:
        """A copy of everything at this moment."""
        # dict.copy() is one C call, so it never meets a half-made change of the writer.
        return Snapshot(self._counters.copy(), self._seconds.copy(), self._times.copy())
