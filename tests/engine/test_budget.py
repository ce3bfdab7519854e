"""Engines under a memory budget: refused before loading, sized to fit, making room for others."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from deepseek_flash.engine import FlashEngine
from deepseek_flash.errors import MemoryBudgetError
from deepseek_flash.memory.ledger import MemoryBudget
from tests.support.engines import open_engine

OPTIONS: dict[str, Any] = {"max_model_len": 800, "max_batch_size": 8, "prefill_chunk_size": 64}
MB = 1 << 20


def needs(tiny: Path) -> dict[str, int]:
    """Bytes of each line with all the room there is."""
    budget = MemoryBudget("cpu", 4096 * MB)
    with open_engine(tiny, budget=budget, **OPTIONS) as engine:
        lines: dict[str, int] = engine.describe()["memory"]["lines"]
        assert budget.held == sum(lines.values())
        assert lines["weights"] == engine.memory_report().weights
    assert budget.held == 0, "a closed engine holds nothing"
    return lines


def test_M07_a_small_budget_gives_a_small_cache(tiny: Path) -> None:
    lines = needs(tiny)
    one = lines["kv_cache"] // 8
    fixed = sum(lines.values()) - lines["kv_cache"]
    prompts = [[(i * 7 + j) % 300 for j in range(300)] for i in range(8)]
    with open_engine(tiny, budget=MemoryBudget("cpu", 4096 * MB), **OPTIONS) as engine:
        expect = [c.token_ids for c in engine.generate(prompt_token_ids=prompts, temperature=0, max_new_tokens=6)]
    budget = MemoryBudget("cpu", fixed + 2 * one + one // 2)
    with open_engine(tiny, budget=budget, memory_budget=budget.limit, **OPTIONS) as engine:
        assert engine.describe()["cache"]["bytes"] == 2 * one
        got = [c.token_ids for c in engine.generate(prompt_token_ids=prompts, temperature=0, max_new_tokens=6)]
    assert got == expect


def test_M08_too_small_fails_before_loading_and_says_what_fits(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = needs(tiny)
    fixed = sum(lines.values()) - lines["kv_cache"]
    limit = fixed + lines["kv_cache"] // 16  # half a sequence

    def loaded(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were read")

    with monkeypatch.context() as patch:
        patch.setattr("deepseek_flash.runtime.runtime.load_model_weights", loaded)
        budget = MemoryBudget("cpu", limit)
        with pytest.raises(MemoryBudgetError, match="does not fit the budget") as e:
            open_engine(tiny, budget=budget, memory_budget=limit, **OPTIONS)
        assert budget.held == 0
    said = str(e.value)
    for line in ("weights", "kv_cache", "workspace", "runtime"):
        assert line in said
    offered = [line.strip() for line in said.splitlines() if "max_model_len <=" in line]
    assert offered, said
    context = int(offered[0].split()[2])
    with open_engine(
        tiny, budget=MemoryBudget("cpu", limit), memory_budget=limit, **{**OPTIONS, "max_model_len": context}
    ) as engine:
        engine.generate(prompt_token_ids=list(range(100)), max_new_tokens=4)
    more = {**OPTIONS, "max_model_len": context + 32}
    with pytest.raises(MemoryBudgetError):
        open_engine(tiny, budget=MemoryBudget("cpu", limit), memory_budget=limit, **more)


def test_every_alternative_offered_opens(tiny: Path) -> None:
    lines = needs(tiny)
    limit = sum(lines.values()) - lines["kv_cache"] + lines["kv_cache"] // 16
    with pytest.raises(MemoryBudgetError) as e:
        open_engine(tiny, budget=MemoryBudget("cpu", limit), memory_budget=limit, **OPTIONS)
    text = str(e.value)
    ways = text[text.index("any one of these fits") :].splitlines()[1:]
    assert len(ways) >= 2
    for way in ways:
        changed: dict[str, Any] = {"memory_budget": limit}
        for part in way.strip().split(" and "):
            name, value = part.replace("<=", "=").replace(">=", "=").replace(" ", "").split("=", 1)
            value = value.strip('"').replace(",", "")
            changed[name] = int(value) if value.isdigit() else value
        size = changed["memory_budget"]
        with open_engine(tiny, budget=MemoryBudget("cpu", size), **{**OPTIONS, **changed}) as engine:
            assert engine.generate(prompt_token_ids=[1, 2, 3], max_new_tokens=2).token_ids


def test_M03_M04_a_second_engine_shrinks_the_cache_of_the_first(tiny: Path) -> None:
    lines = needs(tiny)
    one = lines["kv_cache"] // 8
    budget = MemoryBudget("cpu", sum(lines.values()) + lines["weights"] + lines["runtime"] + one)
    prompt = list(range(200))
    with open_engine(tiny, budget=budget, memory_budget=budget.limit, **OPTIONS) as first:
        full = first.describe()["cache"]["bytes"]
        before = first.generate(prompt_token_ids=prompt, temperature=0, max_new_tokens=6)
        with open_engine(tiny, budget=budget, memory_budget=budget.limit, **OPTIONS) as second:
            kept, got = first.describe()["cache"]["bytes"], second.describe()["cache"]["bytes"]
            assert 2 * one <= kept < full
            assert 2 * one <= got
            assert budget.held <= budget.limit
            assert (
                second.generate(prompt_token_ids=prompt, temperature=0, max_new_tokens=6).token_ids == before.token_ids
            )
            assert (
                first.generate(prompt_token_ids=prompt, temperature=0, max_new_tokens=6).token_ids == before.token_ids
            )
            # Asked for again, it comes back from the second's cache, down to one sequence.
            assert first.resize(kv_cache=full) == full
            assert second.describe()["cache"]["bytes"] == one
            assert budget.held <= budget.limit
            again = second.generate(prompt_token_ids=prompt, temperature=0, max_new_tokens=6)
            assert again.token_ids == before.token_ids
    assert budget.held == 0


def test_a_sleeping_engine_holds_no_weights_and_no_cache(tiny: Path) -> None:
    lines = needs(tiny)
    total = sum(lines.values())
    budget = MemoryBudget("cpu", total)
    with open_engine(tiny, budget=budget, memory_budget=total, **OPTIONS) as engine:
        engine.sleep()
        assert budget.held == lines["workspace"] + lines["runtime"]
        guest = budget.reserve("guest", total - budget.held)
        with pytest.raises(MemoryBudgetError, match="guest"):
            engine.wake()
        assert engine.describe()["cache"]["asleep"]
        guest.release()
        engine.wake()
        assert budget.held == total
        assert engine.generate(prompt_token_ids=[1, 2, 3], max_new_tokens=2).token_ids


def test_the_options_reach_the_shared_budget(tiny: Path) -> None:
    """In a process of its own: the session's fixtures share one here."""
    script = f"""
from deepseek_flash import FlashEngine
from deepseek_flash.errors import ConfigError, MemoryBudgetError
options = dict(max_model_len=256, max_batch_size=2)
with FlashEngine({str(tiny)!r}, memory_budget="300 MiB", **options) as a:
    assert a.describe()["memory"]["limit"] == 300 << 20
    with FlashEngine({str(tiny)!r}, **options) as b:
        assert b.describe()["memory"]["held"] > a.memory_report().engine_bytes
    try:
        FlashEngine({str(tiny)!r}, memory_fraction=0.9)
    except ConfigError as e:
        assert "another engine of this process" in str(e), e
    else:
        raise SystemExit("two budgets")
with FlashEngine({str(tiny)!r}, memory_fraction=0.25, **options) as c:
    memory = c.describe()["memory"]
    assert memory["limit"] == int(memory["total"] * 0.25)
try:
    FlashEngine({str(tiny)!r}, memory_budget="1MiB", **options)
except MemoryBudgetError as e:
    print(e)
else:
    raise SystemExit("one MiB is enough?")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "does not fit" in done.stdout


def test_M06_A04_no_pool_is_larger_than_its_options_can_use(tiny: Path) -> None:
    budget = MemoryBudget("cpu", 4096 * MB)
    with open_engine(tiny, budget=budget, memory_budget=budget.limit, max_model_len=64, max_batch_size=2) as engine:
        cache = engine.describe()["cache"]
        assert cache["blocks"] == [2 * 64 // cache["block_size"]]


def test_M05_engines_that_open_at_once_do_not_pass_the_limit(tiny: Path) -> None:
    lines = needs(tiny)
    budget = MemoryBudget("cpu", int(2.6 * sum(lines.values())))
    opened: list[FlashEngine] = []
    refused: list[MemoryBudgetError] = []

    def open_one() -> None:
        try:
            opened.append(open_engine(tiny, budget=budget, memory_budget=budget.limit, **OPTIONS))
        except MemoryBudgetError as e:
            refused.append(e)

    threads = [threading.Thread(target=open_one) for _ in range(5)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(opened) + len(refused) == 5
    assert len(opened) >= 2
    assert budget.peak <= budget.limit
    for engine in opened:
        assert engine.generate(prompt_token_ids=[1, 2, 3], max_new_tokens=2).token_ids
        engine.close()
    assert budget.held == 0


def test_the_host_tier_is_in_the_budget(tiny: Path) -> None:
    lines = needs(tiny)
    limit = sum(lines.values()) + 10_000_000
    budget = MemoryBudget("cpu", limit)
    with open_engine(tiny, budget=budget, memory_budget=limit, l2_cache_gb=0.01, **OPTIONS) as engine:
        assert engine.describe()["memory"]["lines"]["l2_cache"] == 10_000_000
        assert budget.held == limit
    with pytest.raises(MemoryBudgetError, match="l2_cache"):
        open_engine(tiny, budget=MemoryBudget("cpu", 10 * MB), l2_cache_gb=0.02, **OPTIONS)
    assert budget.held == 0
