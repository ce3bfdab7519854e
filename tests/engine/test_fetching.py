"""While a prefix is on its way from a disk that does not answer: others run, and every ending is clean."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deepseek_flash.engine import FlashEngine
from deepseek_flash.errors import EngineClosed
from deepseek_flash.kv.disk import DiskStore
from tests.engine.test_tiers import FULL, GREEDY, OPTIONS, PROMPT, ask, expect, loading_pays, settled, tiered
from tests.support.engines import open_engine

__all__ = ["expect", "loading_pays"]
"""Fixtures."""


@pytest.fixture
def go(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A folder that holds the prompt, on a disk that answers nothing until this is set."""
    with tiered(tiny, tmp_path) as engine:
        ask(engine)
    answers, find = threading.Event(), DiskStore.find

    def stalled(self: DiskStore, *args: Any, **options: Any) -> Any:
        answers.wait(20)
        return find(self, *args, **options)

    monkeypatch.setattr(DiskStore, "find", stalled)
    monkeypatch.setattr("deepseek_flash.runtime.tiering.PATIENCE", 30.0)
    yield answers
    answers.set()


def held(engine: FlashEngine, count: int) -> None:
    """Wait until so many sequences are kept back, and prove who owns what."""
    scheduler, until = engine._runtime.scheduler, time.perf_counter() + 10
    while scheduler.waiting != count:
        assert time.perf_counter() < until
        time.sleep(0.002)
    engine._runtime.loop.call(scheduler.check)


def test_others_run_meanwhile(tiny: Path, tmp_path: Path, expect: tuple[int, ...], go: threading.Event) -> None:
    with tiered(tiny, tmp_path) as engine:
        stream = engine.stream(prompt_token_ids=PROMPT, params=GREEDY)
        held(engine, 1)
        short = engine.generate(prompt_token_ids=[5, 6, 7], params=GREEDY)  # no full block: nothing to ask for
        assert len(short.token_ids) == GREEDY.max_new_tokens
        assert engine._runtime.scheduler.waiting == 1
        go.set()
        assert stream.result().token_ids == expect
        assert stream.result().cache.l3_tokens == FULL


def test_who_waited_for_a_cancelled_fetch_asks_again(
    tiny: Path, tmp_path: Path, expect: tuple[int, ...], go: threading.Event
) -> None:
    with tiered(tiny, tmp_path) as engine:
        streams = [engine.stream(prompt_token_ids=PROMPT, params=GREEDY) for _ in range(4)]
        held(engine, 4)
        began = time.perf_counter()
        for stream in (streams[0], streams[2]):  # who fetches, and one of those who wait for it
            stream.cancel()
            assert stream.result().finish_reason == "cancelled"
        assert time.perf_counter() - began < 5, "ending does not wait for the disk"
        held(engine, 2)
        go.set()
        assert [s.result().token_ids for s in (streams[1], streams[3])] == [expect] * 2
        assert streams[1].result().cache.l3_tokens == FULL
        settled(engine)
        engine._runtime.loop.call(engine._runtime.scheduler.check)
        assert engine._runtime.scheduler.kv.usage()[1] == 0, "no block is left pinned"


def test_choices_of_one_request(tiny: Path, tmp_path: Path, expect: tuple[int, ...], go: threading.Event) -> None:
    with tiered(tiny, tmp_path) as engine:
        stream = engine.stream(prompt_token_ids=PROMPT, params=GREEDY, n=3)
        held(engine, 3)
        go.set()
        assert [c.token_ids for c in stream.result().choices] == [expect] * 3
        assert engine.describe()["counters"]["l3_lookups"] == 1


def test_closing_does_not_wait_for_ever(
    tiny: Path, tmp_path: Path, go: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepseek_flash.kv.tiers import DiskTier

    close = DiskTier.close
    monkeypatch.setattr(DiskTier, "close", lambda self, seconds=0.5: close(self, seconds))
    engine = open_engine(tiny, **OPTIONS, l3_cache_path=tmp_path)
    stream = engine.stream(prompt_token_ids=PROMPT, params=GREEDY)
    held(engine, 1)
    began = time.perf_counter()
    engine.close()
    assert time.perf_counter() - began < 5
    with pytest.raises(EngineClosed):
        stream.result()


def test_too_slow_then_stalled(
    tiny: Path, tmp_path: Path, expect: tuple[int, ...], go: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first computes after its patience; once the disk counts as stalled nobody waits for it."""
    monkeypatch.setattr("deepseek_flash.runtime.tiering.PATIENCE", 0.05)
    monkeypatch.setattr("deepseek_flash.runtime.tiering.STALLED", 0.05)
    other = [*range(200, 300), 3]
    with tiered(tiny, tmp_path) as engine:
        first = ask(engine)
        assert (first.cache.miss_reason, first.cache.l3_tokens, first.token_ids) == ("too slow", 0, expect)
        second = engine.generate(prompt_token_ids=other, params=GREEDY)
        assert second.cache.miss_reason == "disk stalled"
        go.set()
        settled(engine)
        third = engine.generate(prompt_token_ids=[9, *other], params=GREEDY)
        assert third.cache.miss_reason == "absent", "it is asked again once it answers"


def test_a_prompt_that_ends_behind_a_full_record_is_verified(tiny: Path, tmp_path: Path) -> None:
    """Its full blocks are saved in the step before its last token is read."""
    prompt = [(3 * i + 1) % 300 for i in range(257)]
    with tiered(tiny, tmp_path) as engine:
        engine.generate(prompt_token_ids=prompt, params=GREEDY)
    with tiered(tiny, tmp_path, verify_every=1) as engine:
        got = engine.generate(prompt_token_ids=prompt, params=GREEDY)
        assert got.cache.miss_reason == "verifying"
        assert engine.describe()["counters"]["l3_verified_blocks"] == 256 // 16
