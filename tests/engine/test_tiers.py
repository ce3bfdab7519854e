"""The host and disk tiers through an engine: found after eviction and restart, and never a wrong token."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from deepseek_flash import FlashEngine, SamplingParams
from deepseek_flash.kv.disk import DiskStore
from deepseek_flash.runtime.rates import Rates
from tests.support.checkpoints import tiny_llama
from tests.support.engines import open_engine

PROMPT = [(7 * i + 3) % 300 for i in range(150)]
FULL = 144
"""Tokens of its full blocks that may come from a cache."""
GREEDY = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
OPTIONS: dict[str, Any] = {"max_model_len": 400, "max_batch_size": 4, "prefill_chunk_size": 64}


@pytest.fixture(autouse=True)
def loading_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model this small computes a prefix faster than any disk loads it."""
    monkeypatch.setattr(Rates, "worth_loading", lambda *_: True)


@contextmanager
def tiered(tiny: Path, folder: Path, **options: Any) -> Iterator[FlashEngine]:
    """An engine over a disk tier whose writes are done when the block ends."""
    with open_engine(tiny, **{**OPTIONS, "l3_cache_path": folder, **options}) as engine:
        yield engine
        settled(engine)


def settled(engine: FlashEngine) -> None:
    tiers = engine._runtime.tiers
    assert tiers is not None
    assert tiers.settle(20)


def ask(engine: FlashEngine, params: SamplingParams = GREEDY) -> Any:
    return engine.generate(prompt_token_ids=PROMPT, params=params)


@pytest.fixture(scope="module")
def expect(tiny: Path) -> tuple[int, ...]:
    with open_engine(tiny, **OPTIONS) as engine:
        return ask(engine).token_ids  # type: ignore[no-any-return]


def test_K06_K12_a_restart_finds_the_prefix_on_disk(tiny: Path, tmp_path: Path, expect: tuple[int, ...]) -> None:
    seeded = SamplingParams(seed=11, max_new_tokens=12, ignore_eos=True)
    with tiered(tiny, tmp_path) as engine:
        first, drawn = ask(engine), ask(engine, seeded)
        assert first.cache.l3_tokens == 0
        assert first.cache.miss_reason == "absent"
    with tiered(tiny, tmp_path) as engine:
        again = ask(engine)
        assert again.cache.l3_tokens == FULL == again.usage.cached_tokens
        assert again.cache.computed_tokens == len(PROMPT) - FULL
        assert again.cache.load_seconds > 0
        assert again.cache.miss_reason == ""
        assert ask(engine).cache.l1_tokens == FULL  # it is in the pool now
        assert ask(engine, seeded).token_ids == drawn.token_ids
        counters = engine.describe()["counters"]
        assert counters["l3_hit_tokens"] == FULL
    assert again.token_ids == first.token_ids == expect


def test_the_answer_is_kept_too(tiny: Path, tmp_path: Path) -> None:
    with tiered(tiny, tmp_path) as engine:
        first = engine.generate(prompt_token_ids=PROMPT, temperature=0, max_new_tokens=40, ignore_eos=True)
    longer = [*PROMPT, *first.token_ids, 5, 6]
    with tiered(tiny, tmp_path) as engine:
        hit = engine.generate(prompt_token_ids=longer, temperature=0, max_new_tokens=4)
    assert hit.cache.l3_tokens == (len(PROMPT) + 39) // 16 * 16


@pytest.mark.parametrize(
    "other",
    [{"cache_salt": "other"}, {"kv_cache_dtype": "int8"}, {"block_size": 32}, {"weights": 5}, {"quantize": "int8"}],
)
def test_what_was_stored_under_other_settings_is_not_found(tiny: Path, tmp_path: Path, other: dict[str, Any]) -> None:
    """K08, T05: another salt, dtype, layout, or other weights."""
    folder, model = tmp_path / "cache", tiny
    if "weights" in other:
        model = tmp_path / "other"
        tiny_llama(model, seed=other["weights"])
        other = {}
    with tiered(tiny, folder) as engine:
        ask(engine)
    with open_engine(model, **{**OPTIONS, **other}) as engine:
        plain = ask(engine)
    with tiered(model, folder, **other) as engine:
        got = ask(engine)
    assert got.cache.l3_tokens == 0
    assert got.cache.miss_reason == "absent"
    assert got.token_ids == plain.token_ids
    with tiered(tiny, folder) as engine:
        assert ask(engine).cache.l3_tokens == FULL, "others must not hurt what is there"


def test_K09_damaged_records_are_computed_again(tiny: Path, tmp_path: Path, expect: tuple[int, ...]) -> None:
    with tiered(tiny, tmp_path) as engine:
        ask(engine)
    rng = random.Random(3)
    for segment in tmp_path.glob("seg-*"):
        data = bytearray(segment.read_bytes())
        for at in range(0, len(data), 256):
            data[at] ^= rng.randrange(1, 256)
        segment.write_bytes(data)
    with tiered(tiny, tmp_path) as engine:
        got = ask(engine)
        assert got.token_ids == expect
        assert got.cache.l3_tokens == 0
        assert got.cache.miss_reason in ("damaged", "absent")
    with tiered(tiny, tmp_path) as engine:
        assert ask(engine).token_ids == expect, "what was computed again was stored again"


def test_a_stalled_disk_costs_a_bounded_wait(
    tiny: Path, tmp_path: Path, expect: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prefix is computed after the deadline."""
    with tiered(tiny, tmp_path) as engine:
        ask(engine)
    go, find = threading.Event(), DiskStore.find

    def stalled(self: DiskStore, *args: Any, **options: Any) -> Any:
        go.wait(30)
        return find(self, *args, **options)

    monkeypatch.setattr(DiskStore, "find", stalled)
    with tiered(tiny, tmp_path) as engine:
        began = time.perf_counter()
        got = ask(engine)
        took = time.perf_counter() - began
        go.set()
    assert got.token_ids == expect
    assert got.cache.l3_tokens == 0
    assert took < 10


def test_cancelling_and_closing_while_the_disk_stalls(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiered(tiny, tmp_path) as engine:
        ask(engine)
    go, find = threading.Event(), DiskStore.find

    def stalled(self: DiskStore, *args: Any, **options: Any) -> Any:
        go.wait(5)
        return find(self, *args, **options)

    monkeypatch.setattr(DiskStore, "find", stalled)
    monkeypatch.setattr("deepseek_flash.runtime.tiering.PATIENCE", 30.0)
    engine = open_engine(tiny, **OPTIONS, l3_cache_path=tmp_path)
    one, two = (engine.stream(prompt_token_ids=PROMPT, params=GREEDY) for _ in range(2))
    time.sleep(0.1)
    one.cancel()
    assert one.result().finish_reason == "cancelled"
    threading.Timer(0.2, go.set).start()
    engine.close()
    with pytest.raises(Exception, match="closed"):
        two.result()


def test_the_same_prompt_many_times_is_fetched_once(
    tiny: Path, tmp_path: Path, expect: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiered(tiny, tmp_path) as engine:
        ask(engine)
    read, reads = DiskStore.read, []

    def counted(self: DiskStore, piece: Any, into: Any) -> Any:
        reads.append(piece)
        return read(self, piece, into)

    monkeypatch.setattr(DiskStore, "read", counted)
    with tiered(tiny, tmp_path) as engine:
        done = engine.generate(prompt_token_ids=[PROMPT] * 5, params=GREEDY)
        assert all(c.token_ids == expect for c in done)
        assert all(c.usage.cached_tokens == FULL for c in done)
        several = engine.generate(prompt_token_ids=[*PROMPT, 9, 9], temperature=0, max_new_tokens=4, n=3)
        assert len({c.token_ids for c in several.choices}) == 1
    assert len(reads) == 1


def test_G03_prompt_logprobs_compute_everything(tiny: Path, tmp_path: Path) -> None:
    with tiered(tiny, tmp_path) as engine:
        ask(engine)
    with tiered(tiny, tmp_path) as engine:
        got = ask(engine, SamplingParams(temperature=0, max_new_tokens=1, prompt_logprobs=1))
    assert got.cache.miss_reason == "prompt_logprobs"
    assert got.cache.computed_tokens == len(PROMPT)


def test_K13_the_host_tier_brings_back_what_the_pool_evicted(tiny: Path, expect: tuple[int, ...]) -> None:
    others = [[(i * 13 + j * 5) % 300 for j in range(180)] for i in range(4)]
    with open_engine(tiny, kv_blocks=26, **OPTIONS, l2_cache_gb=0.05) as engine:
        assert ask(engine).token_ids == expect
        for other in others:
            engine.generate(prompt_token_ids=other, params=GREEDY)
        got = ask(engine)
        assert got.token_ids == expect
        assert got.cache.l2_tokens > 0
        assert got.cache.l1_tokens + got.cache.l2_tokens == got.usage.cached_tokens == FULL
        assert engine.describe()["tiers"]["l2"]["used"] > 0


def test_verify_every_finds_records_that_are_wrong_but_whole(
    tiny: Path, tmp_path: Path, expect: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record with the right checksums of wrong bytes, as a fault before writing would leave it."""
    write = DiskStore.write

    def spoiled(self: DiskStore, kind: Any, parent: Any, depth: Any, keys: Any, buffer: Any, cost: Any) -> Any:
        at = self.payload_at(len(keys))
        buffer[at : at + 64] = bytes(range(64))
        return write(self, kind, parent, depth, keys, buffer, cost)

    with monkeypatch.context() as patch:
        patch.setattr(DiskStore, "write", spoiled)
        with tiered(tiny, tmp_path) as engine:
            ask(engine)
    with tiered(tiny, tmp_path, verify_every=1) as engine:
        got = ask(engine)
        assert got.token_ids == expect
        assert got.cache.miss_reason == "verifying"
        assert engine.describe()["counters"]["l3_quarantined_blocks"] > 0
    with tiered(tiny, tmp_path) as engine:
        assert ask(engine).token_ids == expect


def test_resizing_and_sleeping_with_tiers_change_no_token(tiny: Path, tmp_path: Path, expect: tuple[int, ...]) -> None:
    """What a smaller pool cannot hold is on disk; nothing is saved from a pool that is not there."""
    with tiered(tiny, tmp_path) as engine:
        cache = engine.describe()["cache"]
        one = cache["bytes"] // cache["blocks"][0] * -(-400 // cache["block_size"])
        assert ask(engine).token_ids == expect
        running = engine.stream(prompt_token_ids=[*PROMPT[:100], 1, 2, 3], params=GREEDY)
        engine.sleep()
        running.cancel()
        late = engine.stream(prompt_token_ids=PROMPT, params=GREEDY)
        engine.wake()
        assert late.result().token_ids == expect
        engine.resize(kv_cache=one)
        other = [(j * 11) % 300 for j in range(380)]
        engine.generate(prompt_token_ids=other, params=GREEDY)
        settled(engine)
        again = ask(engine)
        assert again.token_ids == expect
        assert again.cache.l3_tokens > 0
    with tiered(tiny, tmp_path, verify_every=1) as engine:
        assert ask(engine).token_ids == expect
        engine.generate(prompt_token_ids=[*PROMPT[:100], 1, 2, 3], params=GREEDY)
        engine.generate(prompt_token_ids=other, params=GREEDY)
        counters = engine.describe()["counters"]
        assert counters["l3_verified_blocks"] > 0
        assert counters.get("l3_quarantined_blocks", 0) == 0


def test_K07_other_processes_find_it_whatever_the_hash_seed(
    tiny: Path, tmp_path: Path, expect: tuple[int, ...]
) -> None:
    script = f"""
from deepseek_flash import FlashEngine
from deepseek_flash.runtime.rates import Rates
Rates.worth_loading = lambda *_: True
with FlashEngine({str(tiny)!r}, l3_cache_path={str(tmp_path)!r}, **{OPTIONS!r}) as engine:
    done = engine.generate(prompt_token_ids={PROMPT!r}, temperature=0, max_new_tokens=12, ignore_eos=True)
    print(done.cache.l3_tokens, list(done.token_ids))
"""
    told = []
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        told.append(done.stdout.strip())
    assert told == [f"0 {list(expect)}", f"{FULL} {list(expect)}"]


def test_K18_K04_a_prompt_that_is_on_disk_whole_still_computes_its_last_token(tiny: Path, tmp_path: Path) -> None:
    whole = PROMPT[:FULL]
    with tiered(tiny, tmp_path) as engine:
        first = engine.generate(prompt_token_ids=whole, params=GREEDY)
    with tiered(tiny, tmp_path) as engine:
        again = engine.generate(prompt_token_ids=whole, params=GREEDY)
    assert again.cache.l3_tokens == FULL - 16
    assert again.token_ids == first.token_ids


def test_K01_K02_K05_with_and_without_caches_cold_and_warm(tiny: Path, tmp_path: Path, expect: tuple[int, ...]) -> None:
    with open_engine(tiny, **OPTIONS, enable_prefix_caching=False) as engine:
        assert ask(engine).token_ids == expect
        assert ask(engine).token_ids == expect
    with tiered(tiny, tmp_path, l2_cache_gb=0.05) as engine:
        assert [ask(engine).token_ids for _ in range(3)] == [expect] * 3
        engine.cache.clear("l1")
        assert ask(engine).token_ids == expect
        engine.cache.clear("all")
        assert ask(engine).token_ids == expect


def test_K14_K15_what_follows_a_partial_hit_is_stored_too(tiny: Path, tmp_path: Path) -> None:
    """A branch off a stored prefix is kept from where it leaves it, and both can be found."""
    branch = [*PROMPT[:80], *range(200, 270)]
    with tiered(tiny, tmp_path) as engine:
        ask(engine)
    with tiered(tiny, tmp_path) as engine:
        assert engine.generate(prompt_token_ids=branch, params=GREEDY).cache.l3_tokens == 80
    with tiered(tiny, tmp_path) as engine:
        assert engine.generate(prompt_token_ids=branch, params=GREEDY).cache.l3_tokens == FULL
        assert ask(engine).usage.cached_tokens == FULL
