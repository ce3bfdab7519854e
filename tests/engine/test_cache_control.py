"""``engine.cache``: clearing a tier, with the same tokens after it."""

from __future__ import annotations

import os
from errno import ENOSPC
from pathlib import Path
from typing import Any

import pytest

from deepseek_flash.errors import EngineClosed, RequestError
from deepseek_flash.kv.files import FileSystem
from tests.engine.test_tiers import FULL, GREEDY, OPTIONS, PROMPT, ask, expect, loading_pays, settled, tiered
from tests.support.engines import open_engine

__all__ = ["expect", "loading_pays"]
"""Fixtures."""


def test_the_pool_is_cleared_without_a_copy_below(tiny: Path, expect: tuple[int, ...]) -> None:
    with open_engine(tiny, **OPTIONS, l2_cache_gb=0.05) as engine:
        ask(engine)
        cached = engine.cache.stats()["l1"]["blocks_cached"]
        cache = engine.describe()["cache"]
        assert cached >= FULL // 16
        assert engine.cache.clear("l1") == cached * (cache["bytes"] // cache["blocks"][0])
        assert engine.cache.stats()["l1"]["blocks_cached"] == 0
        assert engine.cache.stats()["l2"]["used"] == 0
        again = ask(engine)
        assert again.usage.cached_tokens == 0
        assert again.token_ids == expect
        assert engine.cache.clear("l2") == 0
        assert engine.cache.clear("l3") == 0, "there is none"


def test_what_runs_keeps_its_blocks(tiny: Path) -> None:
    prompt = [*PROMPT, 1, 2]
    with open_engine(tiny, **OPTIONS) as engine:
        alone = engine.generate(prompt_token_ids=prompt, temperature=0, max_new_tokens=200, ignore_eos=True)
        engine.cache.clear("all")
        stream = engine.stream(prompt_token_ids=prompt, temperature=0, max_new_tokens=200, ignore_eos=True)
        for i, _ in enumerate(stream):
            if i % 20 == 0:
                engine.cache.clear("all")
        assert stream.result().token_ids == alone.token_ids


def test_the_host_tier_is_cleared(tiny: Path, expect: tuple[int, ...]) -> None:
    with open_engine(tiny, kv_blocks=26, **OPTIONS, l2_cache_gb=0.05) as engine:
        ask(engine)
        for i in range(4):
            engine.generate(prompt_token_ids=[(i * 13 + j * 5) % 300 for j in range(180)], params=GREEDY)
        used = engine.cache.stats()["l2"]["used"]
        assert used > 0
        assert engine.cache.clear("l2") > 0
        assert engine.cache.stats()["l2"]["used"] == 0
        got = ask(engine)
        assert got.cache.l2_tokens == 0
        assert got.token_ids == expect


def test_K11_the_disk_is_cleared_and_filled_again(tiny: Path, tmp_path: Path, expect: tuple[int, ...]) -> None:
    with tiered(tiny, tmp_path) as engine:
        ask(engine)
        assert engine.cache.clear("l3") > 0
        assert engine.cache.stats()["l3"]["records"] == 0
        assert not list(tmp_path.glob("seg-*"))
        assert ask(engine).cache.l1_tokens == FULL, "the pool was not asked to forget"
        assert engine.cache.clear() > 0
        got = ask(engine)
        assert (got.usage.cached_tokens, got.token_ids) == (0, expect)
        settled(engine)
        assert engine.cache.stats()["l3"]["records"] > 0
    with tiered(tiny, tmp_path) as engine:
        assert ask(engine).cache.l3_tokens == FULL


def test_wrong_use(tiny: Path) -> None:
    engine = open_engine(tiny, **OPTIONS)
    with pytest.raises(RequestError, match="l1"):
        engine.cache.clear("l9")
    with pytest.raises(RequestError, match="unknown tier"):
        engine.cache.clear(None)  # type: ignore[arg-type]
    cache = engine.cache
    engine.close()
    with pytest.raises(EngineClosed):
        cache.clear()
    with pytest.raises(EngineClosed):
        cache.stats()


def test_a_full_disk_costs_the_record_only(
    tiny: Path, tmp_path: Path, expect: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(ENOSPC, os.strerror(ENOSPC))

    with tiered(tiny, tmp_path) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(FileSystem, "write", full)
            assert ask(engine).token_ids == expect
            settled(engine)
            assert engine.cache.stats()["l3"]["disk full"] > 0
            assert engine.cache.stats()["l3"]["records"] == 0
        assert engine.generate(prompt_token_ids=[*PROMPT, 3], params=GREEDY).usage.cached_tokens == FULL
        settled(engine)
        assert engine.cache.stats()["l3"]["records"] > 0, "saved now that there is room"
    with tiered(tiny, tmp_path) as engine:
        assert ask(engine).token_ids == expect
