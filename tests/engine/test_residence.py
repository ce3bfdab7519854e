"""The pool is resized while requests run; weights and cache leave memory and come back, and no token changes."""

from __future__ import annotations

import gc
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from deepseek_flash import FlashEngine, SamplingParams
from deepseek_flash.errors import CheckpointError, ConfigError, EngineClosed, MemoryBudgetError
from deepseek_flash.memory.probe import process_rss, trim_heap
from tests.support.checkpoints import tiny_llama
from tests.support.engines import open_engine

PROMPTS = [[(i * 31 + j) % 300 for j in range(20 + 9 * i)] for i in range(8)]
PARAMS = [SamplingParams(seed=i, max_new_tokens=60, ignore_eos=True, repetition_penalty=1.1) for i in range(8)]
OPTIONS: dict[str, Any] = {"max_model_len": 220, "max_batch_size": 8, "prefill_chunk_size": 48}


@pytest.fixture(scope="module")
def expect(tiny: Path) -> list[tuple[int, ...]]:
    with open_engine(tiny, **OPTIONS) as engine:
        return [engine.generate(prompt_token_ids=p, params=s).token_ids for p, s in zip(PROMPTS, PARAMS, strict=True)]


def one_sequence(engine: FlashEngine) -> int:
    cache = engine.describe()["cache"]
    return int(cache["bytes"] // cache["blocks"][0] * -(-220 // cache["block_size"]))


def test_resizing_while_requests_run_changes_no_token(tiny: Path, expect: list[tuple[int, ...]]) -> None:
    with open_engine(tiny, **OPTIONS) as engine:
        full, least = engine.describe()["cache"]["bytes"], one_sequence(engine)
        streams = [engine.stream(prompt_token_ids=p, params=s) for p, s in zip(PROMPTS, PARAMS, strict=True)]
        first = iter(streams[0])
        sizes = [least, full, least * 2, least + least // 2, full // 2, least, full]
        for size in sizes:
            next(first, None)
            assert 0.9 * size - least / 8 < engine.resize(kv_cache=size) <= size
            assert engine.memory_report().kv_cache.pool_bytes <= size
        done = [s.result() for s in streams]
        assert [c.token_ids for c in done] == expect
        assert engine.describe()["cache"]["bytes"] == full


def test_a_pool_grows_to_what_the_options_can_use_and_not_beyond(tiny: Path) -> None:
    with open_engine(tiny, kv_blocks=20, **OPTIONS) as engine:
        assert engine.describe()["cache"]["blocks"] == [20]
        assert engine.resize(kv_cache="1GiB") == 8 * one_sequence(engine)
        assert [c.token_ids for c in engine.generate(prompt_token_ids=PROMPTS, params=PARAMS)]


def test_too_small_and_nonsense_sizes_are_refused_and_nothing_changes(tiny: Path) -> None:
    with open_engine(tiny, **OPTIONS) as engine:
        before = engine.describe()["cache"]
        with pytest.raises(MemoryBudgetError, match="one sequence of max_model_len=220") as e:
            engine.resize(kv_cache=one_sequence(engine) - 1)
        assert e.value.needed == one_sequence(engine)
        for wrong in (0, -1, "much", "3 parsecs", True, 1.5, None):
            with pytest.raises(ConfigError, match="must be a size"):
                engine.resize(kv_cache=wrong)  # type: ignore[arg-type]
        assert engine.describe()["cache"] == before
    with pytest.raises(EngineClosed):
        engine.resize(kv_cache="1MiB")


def test_K20_sleeping_in_the_middle_of_answers_changes_no_token(tiny: Path, expect: list[tuple[int, ...]]) -> None:
    with open_engine(tiny, **OPTIONS) as engine:
        streams = [engine.stream(prompt_token_ids=p, params=s) for p, s in zip(PROMPTS[:6], PARAMS, strict=False)]
        first = iter(streams[0])
        for _ in range(3):
            next(first, None)
            engine.sleep()
            engine.sleep()  # twice is fine
            assert engine.describe()["cache"]["asleep"]
            assert engine.memory_report().engine_bytes == 0
            engine.wake()
            engine.wake()
        late = [engine.stream(prompt_token_ids=p, params=s) for p, s in zip(PROMPTS[6:], PARAMS[6:], strict=True)]
        assert [s.result().token_ids for s in (*streams, *late)] == expect


def test_K19_what_was_cached_is_found_after_waking(tiny: Path) -> None:
    prompt = list(range(100))
    with open_engine(tiny, **OPTIONS) as engine:
        first = engine.generate(prompt_token_ids=prompt, max_new_tokens=8, temperature=0)
        engine.sleep()
        engine.wake()
        again = engine.generate(prompt_token_ids=prompt, max_new_tokens=8, temperature=0)
    assert again.token_ids == first.token_ids
    assert again.usage.cached_tokens == 96


def test_requests_that_come_asleep_wait_and_can_be_cancelled(tiny: Path, expect: list[tuple[int, ...]]) -> None:
    with open_engine(tiny, **OPTIONS) as engine:
        running = engine.stream(prompt_token_ids=PROMPTS[1], params=PARAMS[1])
        next(iter(running))
        engine.sleep()
        waiting = engine.stream(prompt_token_ids=PROMPTS[0], params=PARAMS[0])
        other = engine.stream(prompt_token_ids=PROMPTS[2], params=PARAMS[2])
        other.cancel()
        running.cancel()
        assert other.result().finish_reason == "cancelled"
        assert running.result().finish_reason == "cancelled"
        with pytest.raises(ConfigError, match="wake"):
            engine.resize(kv_cache="1GiB")
        threading.Timer(0.2, engine.wake).start()
        assert waiting.result().token_ids == expect[0]


def test_closing_a_sleeping_engine_ends_what_waits(tiny: Path) -> None:
    engine = open_engine(tiny, **OPTIONS)
    engine.sleep()
    waiting = engine.stream(prompt_token_ids=PROMPTS[0], params=PARAMS[0])
    engine.close()
    with pytest.raises(EngineClosed):
        waiting.result()
    with pytest.raises(EngineClosed):
        engine.wake()


def test_a_full_disk_leaves_the_engine_awake(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_engine(tiny, **OPTIONS) as engine:
        first = engine.generate(prompt_token_ids=PROMPTS[3], params=PARAMS[3])

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr("deepseek_flash.kv.store.KVStore.save", full)
            with pytest.raises(OSError, match="No space left"):
                engine.sleep()
        assert engine.generate(prompt_token_ids=PROMPTS[3], params=PARAMS[3]).token_ids == first.token_ids


def test_K20_other_weights_are_noticed_on_waking_and_the_engine_sleeps_on(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "m")
    file = next((tmp_path / "m").glob("*.safetensors"))
    good = file.read_bytes()
    with open_engine(tmp_path / "m", **OPTIONS) as engine:
        first = engine.generate(prompt_token_ids=PROMPTS[3], params=PARAMS[3])
        engine.sleep()
        bad = bytearray(good)
        bad[-1] ^= 64
        file.write_bytes(bad)
        with pytest.raises(CheckpointError, match="changed while the engine slept"):
            engine.wake()
        assert engine.describe()["cache"]["asleep"]
        file.write_bytes(good)
        engine.wake()
        assert engine.generate(prompt_token_ids=PROMPTS[3], params=PARAMS[3]).token_ids == first.token_ids


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory as Linux counts it")
def test_resident_memory_really_falls(tiny: Path) -> None:
    with open_engine(tiny, max_model_len=1000, max_batch_size=32) as engine:
        kv = engine._runtime.scheduler.kv
        pool = engine._runtime.store.pools[0]
        pool.fill_(1)  # as if it had been full once
        size = pool.numel()
        assert size > 16 << 20
        gc.collect()
        trim_heap()
        before = process_rss()
        engine.resize(kv_cache=size // 4)
        assert before - process_rss() > 0.7 * size
        engine.resize(kv_cache=size)
        engine.generate(prompt_token_ids=PROMPTS[0], max_new_tokens=4)
        engine.sleep()
        assert before - process_rss() > 0.9 * size
        engine.wake()
        assert kv.usage()[0] == kv.pools[0].most
    assert torch.is_tensor(pool)


def test_Q09_an_int8_cache_keeps_its_scales_asleep(tiny: Path) -> None:
    with open_engine(tiny, **OPTIONS, kv_cache_dtype="int8") as engine:
        plain = engine.generate(prompt_token_ids=PROMPTS[5], params=PARAMS[5]).token_ids
        running = engine.stream(prompt_token_ids=PROMPTS[5], params=PARAMS[5])
        engine.sleep()
        engine.wake()
        assert running.result().token_ids == plain
