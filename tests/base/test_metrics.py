from __future__ import annotations

import threading

import pytest

from deepseek_flash.metrics import Metrics


def test_counters_timers_and_differences():
    m = Metrics()
    m.count("steps")
    m.count("tokens", 5)
    m.add_seconds("step", 0.5)
    first = m.snapshot()
    m.count("tokens", 2)
    m.add_seconds("step", 1.5)
    now = m.snapshot()
    assert first.counters == {"steps": 1, "tokens": 5}  # a snapshot does not move
    assert now.counters["tokens"] == 7
    assert now.mean("step") == 1.0
    assert now.mean("never") == 0.0
    assert now.since(first).counters == {"steps": 0, "tokens": 2}
    assert (now.since(first).seconds["step"], now.since(first).times["step"]) == (1.5, 1)


def test_a_timer_counts_a_body_that_raises():
    m = Metrics()
    with pytest.raises(KeyError), m.timed("step"):
        raise KeyError("x")
    assert m.snapshot().times == {"step": 1}
    assert m.snapshot().seconds["step"] >= 0


def test_snapshots_while_the_writer_adds_names():
    m = Metrics()
    done = threading.Event()

    def write() -> None:
        for i in range(20_000):
            m.count(f"name{i % 500}")
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    sums = []
    while not done.is_set():
        sums.append(sum(m.snapshot().counters.values()))
    writer.join()
    assert sums == sorted(sums)
    assert sum(m.snapshot().counters.values()) == 20_000
