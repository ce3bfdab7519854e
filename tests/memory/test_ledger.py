"""The ledger: what is counted, what is refused, who is asked to give back."""

from __future__ import annotations

import gc
import random
import threading

import pytest

from deepseek_flash.errors import ConfigError, MemoryBudgetError
from deepseek_flash.memory.ledger import MemoryBudget, Reservation, SharedBudgets, shared_budget
from deepseek_flash.memory.probe import HostMemory

MB = 1 << 20


class Pool:
    """An elastic holder that gives back what it is asked for, or only some of it."""

    def __init__(self, budget: MemoryBudget, size: int, floor: int = 0, stubborn: int = 0) -> None:
        self.stubborn = stubborn
        self.asked: list[int] = []
        self.held: Reservation = budget.reserve(
            "kv_cache", size, kind="elastic", owner="m", floor=floor, shrink=self.shrink
        )

    def shrink(self, keep: int) -> None:
        self.asked.append(keep)
        self.held.resize(max(keep, self.stubborn))


def test_workspaces_take_turns_and_the_rest_adds_up() -> None:
    budget = MemoryBudget("cpu", 100)
    budget.reserve("weights", 40, owner="a")
    first = budget.reserve("workspace", 20, kind="workspace", owner="a")
    budget.reserve("workspace", 30, kind="workspace", owner="b")
    assert (budget.held, budget.available) == (70, 30)
    budget.reserve("weights", 30, owner="b")
    with pytest.raises(MemoryBudgetError):
        first.resize(31)
    assert first.bytes == 20
    first.resize(30)
    assert budget.held == budget.peak == 100


def test_a_refusal_says_who_holds_what_and_changes_nothing() -> None:
    budget = MemoryBudget("cpu", 100 * MB)
    budget.reserve("weights", 60 * MB, owner="smol")
    with pytest.raises(MemoryBudgetError, match=r"emb: weights needs 50.0 MiB.*100.0 MiB on cpu has 40.0 MiB") as e:
        budget.reserve("weights", 50 * MB, owner="emb")
    assert e.value.holders == {"smol: weights": 60 * MB}
    assert (e.value.needed, e.value.available) == (50 * MB, 40 * MB)
    assert "smol" in str(e.value)
    assert budget.held == 60 * MB


def test_elastic_holders_give_in_proportion_and_not_below_their_floor() -> None:
    budget = MemoryBudget("cpu", 1000)
    a, b = Pool(budget, 600, floor=200), Pool(budget, 400, floor=300)
    budget.reserve("weights", 250, owner="new")
    assert (a.held.bytes, b.held.bytes) == (400, 350)
    with pytest.raises(MemoryBudgetError):
        budget.reserve("weights", 251, owner="more")
    assert (a.held.bytes, b.held.bytes) == (400, 350)  # nobody gives for what cannot be had anyway
    budget.reserve("weights", 250, owner="more")
    assert (a.held.bytes, b.held.bytes, budget.held) == (200, 300, 1000)


def test_one_that_does_not_give_is_asked_a_few_times_and_then_it_is_refused() -> None:
    budget = MemoryBudget("cpu", 100)
    pool = Pool(budget, 100, stubborn=90)
    with pytest.raises(MemoryBudgetError):
        budget.reserve("weights", 50)
    assert 1 < len(pool.asked) < 10
    assert budget.held == 90


def test_the_limit_moves() -> None:
    budget = MemoryBudget("cpu", 1000)
    pool = Pool(budget, 800, floor=100)
    budget.reserve("weights", 200)
    budget.resize(500)
    assert (budget.limit, pool.held.bytes) == (500, 300)
    with pytest.raises(MemoryBudgetError, match="cannot shrink"):
        budget.resize(250)
    assert budget.limit == 500
    budget.resize(2000)
    pool.held.resize(1800)
    with pytest.raises(ConfigError):
        budget.resize(0)


def test_shrinking_is_always_granted_and_release_is_idempotent() -> None:
    budget = MemoryBudget("cpu", 100)
    one, two = budget.reserve("a", 50), budget.reserve("b", 50)
    one.resize(20)
    two.release()
    two.release()
    assert budget.held == 20
    assert [h.name for h in budget.holdings()] == ["a"]


def test_random_lives_never_pass_the_limit() -> None:
    rng, budget = random.Random(7), MemoryBudget("cpu", 10_000)
    pools = [Pool(budget, 2000, floor=100), Pool(budget, 3000, floor=500, stubborn=700)]
    held: list[Reservation] = []
    for _ in range(3000):
        try:
            match rng.randrange(4):
                case 0:
                    kind = rng.choice(["fixed", "workspace"])
                    held.append(budget.reserve("x", rng.randrange(4000), kind=kind))  # type: ignore[arg-type]
                case 1 if held:
                    held.pop(rng.randrange(len(held))).release()
                case 2 if held:
                    rng.choice(held).resize(rng.randrange(4000))
                case _:
                    rng.choice(pools).held.resize(rng.randrange(500, 6000))
        except MemoryBudgetError:
            pass
        fixed = sum(r.bytes for r in held if r.kind == "fixed") + sum(p.held.bytes for p in pools)
        turns = max((r.bytes for r in held if r.kind == "workspace"), default=0)
        assert budget.held == fixed + turns <= budget.limit


def test_M05_many_threads_agree() -> None:
    budget = MemoryBudget("cpu", 1000)
    pool = Pool(budget, 900, floor=100)
    refused = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(300):
            try:
                budget.reserve("x", rng.randrange(200)).release()
            except MemoryBudgetError:
                refused.append(1)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert budget.held == pool.held.bytes
    assert budget.peak <= 1000


HOST = HostMemory(total=1000, available=900, limited_by="machine")


def test_fractions_of_the_machine() -> None:
    assert MemoryBudget.of("cpu", host=HOST).limit == 500
    assert MemoryBudget.of("cpu", fraction=0.25, host=HOST).limit == 250
    assert MemoryBudget.of("cpu", limit=77, host=HOST).limit == 77
    with pytest.raises(ConfigError, match="give one of them"):
        MemoryBudget.of("cpu", fraction=0.5, limit=77, host=HOST)


def test_engines_of_a_process_share_one_and_conflicts_are_told() -> None:
    shared = SharedBudgets()
    one = shared.get("cpu", fraction=0.25, host=HOST)
    weights = one.reserve("weights", 10)
    assert shared.get("cpu") is one
    assert shared.get("cpu", fraction=0.25) is one
    with pytest.raises(ConfigError, match="another engine of this process"):
        shared.get("cpu", fraction=0.5)
    with pytest.raises(ConfigError, match="memory_budget=300"):
        shared.get("cpu", limit=300)
    weights.release()
    assert shared.get("cpu", limit=300, host=HOST).limit == 300, "closed engines have no say"
    del one
    gc.collect()
    assert shared.get("cpu", host=HOST).limit == 500
    assert shared_budget("cpu").limit > 0
