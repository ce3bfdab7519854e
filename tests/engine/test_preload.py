"""engine.preload: prompts that are in the cache before they are asked about, and pins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deepseek_flash.engine import FlashEngine
from deepseek_flash.errors import ContextLengthError, EngineClosed, RequestError
from tests.support.engines import open_engine

IDS = [5 + i % 200 for i in range(100)]


def other(n: int, length: int = 100) -> list[int]:
    return [(7 * i + n) % 200 + 5 for i in range(length)]


def cached(engine: FlashEngine, ids: list[int]) -> int:
    return int(engine.generate(prompt_token_ids=ids, max_new_tokens=1, temperature=0).usage.cached_tokens)


def opened(tiny: Path, **options: Any) -> FlashEngine:
    return open_engine(tiny, **{"kv_blocks": 24, "max_model_len": 384, **options})


def test_what_was_preloaded_is_not_computed_again(tiny: Path) -> None:
    with opened(tiny) as engine:
        loaded = engine.preload(IDS)
        assert (loaded.tokens, loaded.tiers, loaded.pinned) == (100, ("l1",), ())
        assert loaded.bytes == 6 * engine.describe()["cache"]["bytes"] // 24
        assert cached(engine, [*IDS, 9]) == 96
        text = "the rain on the road " * 5
        assert engine.preload(text).tokens == engine.count_tokens(text)
        messages = [{"role": "system", "content": text}]
        assert engine.preload(messages).tiers == ("l1",)
        answer = engine.chat([*messages, {"role": "user", "content": "why"}], max_new_tokens=1)
        assert answer.usage.cached_tokens >= engine.preload(messages).tokens // 16 * 16


def test_only_a_pin_survives_other_requests(tiny: Path) -> None:
    with opened(tiny) as engine:
        kept, lost = engine.preload(IDS, pin=True), engine.preload(other(1))
        assert kept.pinned == ("l1",)
        for n in range(2, 8):
            cached(engine, other(n, 200))
        assert kept.tiers == ("l1",)
        assert lost.tiers == ()
        with pytest.raises(RequestError, match="evicted"):
            lost.pin()
        assert kept.unpin()
        assert not kept.unpin()
        for n in range(8, 14):
            cached(engine, other(n, 200))
        assert kept.tiers == ()


def test_pins_have_half_of_the_pool(tiny: Path) -> None:
    with opened(tiny) as engine:
        first, second = engine.preload(IDS, pin=True), engine.preload(other(1), pin=True)
        with pytest.raises(RequestError, match="half"):
            engine.preload(other(2, 40), pin=True)
        longer = engine.preload([*IDS, *other(3, 10)])
        assert first.pin().pinned == second.pinned == ("l1",)
        second.release()
        assert longer.pin().pinned == ("l1",)


def test_a_pin_gives_way_to_a_request_that_needs_the_pool(tiny: Path) -> None:
    """In admission, and when an answer grows: no request waits for ever because of a pin."""
    with opened(tiny) as engine:
        pinned = engine.preload(IDS, pin=True)
        assert cached(engine, other(1, 383)) == 0
        assert pinned.pinned == ()
        pinned = engine.preload(IDS, pin=True)
        grown = engine.generate(prompt_token_ids=other(2, 200), max_new_tokens=184, ignore_eos=True)
        assert grown.usage.completion_tokens == 184
        assert pinned.pinned == ()


def test_a_pin_outlives_the_process_on_disk(tiny: Path, tmp_path: Path) -> None:
    with opened(tiny, l3_cache_path=tmp_path / "c") as engine:
        loaded = engine.preload(IDS, pin=True)
        assert engine._runtime.tiers is not None
        assert engine._runtime.tiers.settle(20)
        assert loaded.tiers == ("l1", "l3")
        assert loaded.pinned == ("l1", "l3")
    loaded.release()  # of a closed engine: the pin on disk stays
    with opened(tiny, l3_cache_path=tmp_path / "c") as engine:
        again = engine.preload(IDS)
        assert again.pinned == ("l3",)
        assert again.unpin()
        assert again.pinned == ()


def test_the_host_tier_is_named(tiny: Path) -> None:
    with opened(tiny, l2_cache_gb=0.01) as engine:
        loaded = engine.preload(IDS)
        for n in range(1, 6):
            cached(engine, other(n, 200))
        assert loaded.tiers == ("l2",)


def test_what_cannot_be_preloaded(tiny: Path) -> None:
    with opened(tiny) as engine:
        for bad in (5, b"x", ["a"], [], None):
            with pytest.raises(RequestError):
                engine.preload(bad)
        with pytest.raises(ContextLengthError):
            engine.preload(other(1, 400))
        short = engine.preload([5, 6, 7])
        assert (short.bytes, short.tiers, short.pinned) == (0, (), ())
        assert not short.unpin()
        with pytest.raises(RequestError, match="no block"):
            short.pin()
        loaded = engine.preload(IDS)
    loaded.release()
    with pytest.raises(EngineClosed):
        _ = loaded.tiers
    with opened(tiny, enable_prefix_caching=False) as engine, pytest.raises(RequestError, match="prefix_caching"):
        engine.preload(IDS)


def test_pins_share_a_pool_that_shrinks_and_sleeps(tiny: Path) -> None:
    with opened(tiny, max_model_len=160) as engine:
        block = engine.describe()["cache"]["bytes"] // 24
        old, new = engine.preload(IDS, pin=True), engine.preload(other(1, 64), pin=True)
        engine.sleep()
        engine.wake()
        assert (old.pinned, new.pinned) == (("l1",), ("l1",))
        assert engine.resize(kv_cache=12 * block) == 12 * block
        assert (old.pinned, new.pinned) == ((), ("l1",)), "6 and 4 blocks were more than half of 12: the oldest went"
        running = engine.stream(prompt_token_ids=other(2, 90), max_new_tokens=60, ignore_eos=True, temperature=0)
        each = iter(running)
        next(each)
        assert engine.resize(kv_cache=10 * block) == 10 * block
        kv = engine._runtime.scheduler.kv
        assert engine._runtime.loop.call(lambda: kv.owed) == 0, "what the pool gave up is really free"
        assert len(running.result().token_ids) == 60
        assert cached(engine, [*other(2, 90), 3]) > 0
