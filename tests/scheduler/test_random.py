"""Random add, cancel, finish, fault and clear, with ``check()`` and verified reads at every step."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from deepseek_flash.scheduler.sequence import Sequence
from tests.kv.toys import SPECS, Driver, undisturbed

ROOTS = ([0] * 40, [1, 2] * 20, [0] * 13 + [2] * 27)


def a_prompt(rng: random.Random, longest: int) -> list[int]:
    """Prompts that share long prefixes and end differently."""
    shared = rng.choice(ROOTS)[: rng.randrange(longest)]
    return [*shared, *(rng.randrange(3) for _ in range(rng.randrange(1, 6)))]


class Traffic:
    """One random run over a driver."""

    def __init__(self, rng: random.Random, spec: str, *, caching: bool) -> None:
        layout, capacity = SPECS[spec]
        self.rng = rng
        self.driver = Driver(
            layout,
            capacity,
            batch=rng.randrange(1, 7),
            budget=rng.choice([1, 3, 8, 17, 64]),
            caching=caching,
            every=rng.randrange(1, 5),
        )
        self.full = capacity
        self.floor = tuple(max(1, n * 2 // 3) for n in capacity)
        self.driver.scheduler.resize(self.floor)
        self.longest = self.driver.kv.most_tokens
        self.driver.scheduler.resize(self.full)
        self.expected: dict[int, tuple[Sequence, list[int]]] = {}
        self.cancelled: set[int] = set()

    def add(self) -> None:
        d, rng = self.driver, self.rng
        prompt = a_prompt(rng, 30)
        new = rng.choice([0, 1, 3, 12, 40])
        if len(prompt) + new > self.longest:
            return
        salt = rng.choice([b"", b"", b"a", b"b"])
        seq = d.add(prompt, new, salt=salt, all_logits=rng.random() < 0.1)
        self.expected[seq.id] = (seq, undisturbed(prompt, new, salt))

    def cancel(self) -> None:
        if self.driver.live:
            seq = self.rng.choice(self.driver.live)
            self.cancelled.add(seq.id)
            self.driver.end(seq)

    def fail(self) -> None:
        if self.driver.scheduler.has_work:
            before = set(self.driver.live)
            self.driver.fail()
            self.cancelled |= {s.id for s in before - set(self.driver.live)}

    def step(self) -> None:
        if self.driver.scheduler.has_work:
            self.driver.step()

    def resize(self) -> None:
        """Anything from what the longest accepted request needs to everything."""
        size = tuple(self.rng.randint(a, b) for a, b in zip(self.floor, self.full, strict=True))
        self.driver.scheduler.resize(size)
        self.driver.scheduler.check()
        if self.driver.scheduler.running <= 1:
            assert self.driver.kv.owed <= sum(b - a for a, b in zip(size, self.full, strict=True))
        assert tuple(p.capacity for p in self.driver.kv.pools) == size

    def finish(self) -> None:
        d = self.driver
        d.drain()
        for number, (seq, answer) in self.expected.items():
            # D07: preempted, resumed, hit or crowded: the same tokens.
            assert seq.output == (answer[: len(seq.output)] if number in self.cancelled else answer)
        d.kv.clear()
        d.scheduler.check()
        assert d.kv.owed == 0
        stats = d.kv.stats()
        assert stats["blocks_cached"] == 0 == stats["blocks_used"]
        assert stats["index_entries"] == 0


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("spec", SPECS)
def test_D07_T05_K03_random_traffic(spec: str, caching: bool) -> None:
    """Isolation (T05), unwritten shared blocks (K03) and equal outputs after preemption (D07), for every kind."""
    hits = preemptions = evictions = 0
    for seed in range(8):
        traffic = Traffic(random.Random(f"{spec} {caching} {seed}"), spec, caching=caching)
        for _ in range(70):
            traffic.rng.choices(
                [traffic.add, traffic.step, traffic.cancel, traffic.fail, traffic.driver.kv.clear, traffic.resize],
                [30, 60, 4, 1, 1, 3],
            )[0]()
            traffic.driver.scheduler.check()
        traffic.finish()
        stats = traffic.driver.scheduler.stats()
        hits, preemptions = hits + stats["hit_tokens"], preemptions + stats["preemptions"]
        evictions += stats["evictions"]
    # The run means something only if what it is about happened.
    assert bool(hits) == bool(evictions) == caching
    assert preemptions or spec == "recurrent"


class CacheMachine(RuleBasedStateMachine):
    """The same traffic, chosen and shrunk by hypothesis."""

    @initialize(seed=st.integers(0, 2**16), spec=st.sampled_from(sorted(SPECS)))
    def begin(self, seed: int, spec: str) -> None:
        self.traffic = Traffic(random.Random(seed), spec, caching=True)

    @rule(many=st.integers(1, 4))
    def add(self, many: int) -> None:
        for _ in range(many):
            self.traffic.add()

    @rule(many=st.integers(1, 6))
    def step(self, many: int) -> None:
        for _ in range(many):
            self.traffic.step()

    @rule()
    def cancel(self) -> None:
        self.traffic.cancel()

    @rule()
    def fail(self) -> None:
        self.traffic.fail()

    @rule()
    def resize(self) -> None:
        self.traffic.resize()

    @rule()
    def clear(self) -> None:
        self.traffic.driver.kv.clear()
        self.traffic.driver.scheduler.check()

    def teardown(self) -> None:
        if hasattr(self, "traffic"):
            self.traffic.finish()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(
    max_examples=30,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
