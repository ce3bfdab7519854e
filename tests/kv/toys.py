"""Toy cache specs, and a store that remembers what each row was computed from, so that reads can be verified."""

from __future__ import annotations

from collections.abc import Sequence as Ints
from hashlib import blake2b
from itertools import count
from typing import Any

from deepseek_flash.kv.manager import KVManager
from deepseek_flash.kv.spec import CacheSpec, Field, Group
from deepseek_flash.scheduler.plan import PlanItem, StepPlan
from deepseek_flash.scheduler.scheduler import Scheduler
from deepseek_flash.scheduler.sequence import Sequence, Status

FIELDS = (Field("x", 0, (4,), "float32"),)


def rows_spec(block_size: int = 4) -> CacheSpec:
    """What Llama and Qwen need: one group of rows."""
    return CacheSpec(block_size, (Group("kv", "rows", FIELDS),))


def toy_spec(block_size: int = 4, window: int = 6) -> CacheSpec:
    """Every kind at once: rows at two ratios, a window, a state."""
    return CacheSpec(
        block_size,
        (
            Group("fine", "rows", FIELDS),
            Group("coarse", "rows", FIELDS, ratio=4),
            Group("near", "window", FIELDS, window=window),
            Group("carry", "state", FIELDS),
        ),
    )


SPECS = {
    "rows": (rows_spec(), (24,)),
    "toy": (toy_spec(), (26, 24, 16, 9)),
    "window": (CacheSpec(4, (Group("kv", "rows", FIELDS), Group("near", "window", FIELDS, window=9))), (24, 14)),
    "recurrent": (CacheSpec(4, (Group("near", "window", FIELDS, window=3), Group("carry", "state", FIELDS))), (9, 6)),
}


def chain(salt: bytes, tokens: Ints) -> list[bytes]:
    """Digest of every prefix: ``chain[p]`` stands for what a model computes from tokens 0 .. p - 1."""
    digests = [b"start" + salt]
    for t in tokens:
        digests.append(blake2b(digests[-1] + t.to_bytes(4, "little"), digest_size=12).digest())
    return digests


def next_token(salt: bytes, tokens: Ints, vocabulary: int = 3) -> int:
    """The toy model's greedy choice: a function of the prefix only."""
    return chain(salt, tokens)[-1][0] % vocabulary


class FakeStore:
    """Rows and records as digests. Runs a plan the way a runner does and verifies every read."""

    def __init__(self, kv: KVManager) -> None:
        self.kv, self.size = kv, kv.spec.block_size
        self.data: list[list[list[Any]]] = [
            [[None] * g.rows_per_block(self.size) for _ in range(pool.most)]
            for g, pool in zip(kv.spec.groups, kv.pools, strict=True)
        ]
        kv.retired = self.retired

    def retired(self, group: int, blocks: list[int]) -> None:
        """Their memory is gone: whoever reads them again is found out."""
        for block in blocks:
            self.data[group][block] = ["retired"] * len(self.data[group][block])

    def run(self, plan: StepPlan) -> None:
        for group, block in plan.zero:
            assert self.kv.pools[group].refs(block) == 1
            self.data[group][block] = ["zero"]
        for copy in plan.copies:
            self.data[copy.group][copy.dst] = list(self.data[copy.group][copy.src])
        for item in plan.items:
            self.write(item)
        # Only now: a row that one sequence wrote over another's is seen.
        for item in plan.items:
            self.verify(item)
        for copy in plan.after:
            self.data[copy.group][copy.dst] = list(self.data[copy.group][copy.src])

    def put(self, group: int, block: int, row: int, value: Any) -> None:
        pool = self.kv.pools[group]
        assert pool.refs(block) == 1, "K03: a shared block is written"
        assert not pool.kept(block), "K03: a published block is written"
        self.data[group][block][row] = value

    def write(self, item: PlanItem) -> None:
        seq, end = item.seq, item.start + item.count
        digests = chain(seq.salt, seq.tokens[:end])
        for g, group in enumerate(self.kv.spec.groups):
            table = seq.tables[g]
            if group.kind == "state":
                before = "zero" if item.start == 0 else digests[item.start]
                assert self.data[g][table[0]] == [before], f"the state of sequence {seq.id} at {item.start}"
                self.put(g, table[0], 0, digests[end])
                continue
            per_block = group.rows_per_block(self.size)
            for row in range(item.start // group.ratio, end // group.ratio):
                self.put(g, table[row // per_block], row % per_block, digests[(row + 1) * group.ratio])

    def verify(self, item: PlanItem) -> None:
        seq, end = item.seq, item.start + item.count
        digests = chain(seq.salt, seq.tokens[:end])
        for g, group in enumerate(self.kv.spec.groups):
            table = seq.tables[g]
            if group.kind == "state":
                assert self.data[g][table[0]] == [digests[end]]
                continue
            per_block = group.rows_per_block(self.size)
            first = max(0, item.start - group.window) if group.kind == "window" else 0
            for row in range(first // group.ratio, end // group.ratio):
                got = self.data[g][table[row // per_block]][row % per_block]
                assert got == digests[(row + 1) * group.ratio], f"sequence {seq.id} reads wrong {group.name} row {row}"


class Driver:
    """A scheduler, a store and a model in one; ``check()`` runs around every step."""

    def __init__(
        self,
        spec: CacheSpec | None = None,
        capacity: Ints = (64,),
        *,
        batch: int = 8,
        budget: int = 16,
        caching: bool = True,
        every: int = 3,
        most: Ints | None = None,
    ) -> None:
        spec = spec or rows_spec()
        self.kv = KVManager(spec, capacity, root=b"weights", prefix_caching=caching, snapshot_every=every, most=most)
        self.scheduler = Scheduler(self.kv, max_batch_size=batch, token_budget=budget)
        self.store = FakeStore(self.kv)
        self.ids = count()
        self.plans: list[StepPlan] = []
        self.live: list[Sequence] = []

    def add(self, prompt: Ints, new: int = 4, *, salt: bytes = b"", all_logits: bool = False) -> Sequence:
        seq = Sequence(
            id=next(self.ids),
            tokens=list(prompt),
            prompt_len=len(prompt),
            max_tokens=len(prompt) + new,
            salt=salt,
            all_logits=all_logits,
        )
        self.scheduler.add(seq)
        self.live.append(seq)
        return seq

    def plan(self) -> StepPlan | None:
        plan = self.scheduler.plan()
        self.scheduler.check()
        if plan is not None:
            self.plans.append(plan)
            assert all(i.count > 0 and i.start == i.seq.computed for i in plan.items)
            assert len({i.seq.id for i in plan.items}) == len(plan.items)
        return plan

    def step(self) -> StepPlan:
        """One step; it must exist. Completed sequences are finished."""
        plan = self.plan()
        assert plan is not None, "there is work but no plan"
        self.store.run(plan)
        sampling = [i.seq for i in plan.items if i.sample]
        self.scheduler.commit(plan, {s.id: next_token(s.salt, s.tokens) for s in sampling if len(s) < s.max_tokens})
        self.scheduler.check()
        for seq in sampling:
            if len(seq) == seq.max_tokens:
                self.end(seq)
        return plan

    def end(self, seq: Sequence) -> None:
        self.scheduler.finish(seq)
        self.live.remove(seq)
        self.scheduler.check()

    def fail(self) -> None:
        """A step that raises: what it wrote is unknown, its sequences are aborted."""
        plan = self.plan()
        assert plan is not None
        for item in plan.items:
            for g, group in enumerate(self.kv.spec.groups):
                table = item.seq.tables[g]
                fresh = table if group.kind == "state" else table[item.start // self.store.size :]
                for block in fresh:
                    self.store.data[g][block] = ["garbage"] * group.rows_per_block(self.store.size)
        for item in plan.items:
            self.end(item.seq)

    def drain(self, limit: int = 5000) -> None:
        """Run until nothing is left; every block is free or cached then."""
        for _ in range(limit):
            if not self.scheduler.has_work:
                break
            self.step()
        assert not self.scheduler.has_work, "sequences starve"
        assert self.kv.usage()[1] == 0

    def scheduled(self) -> int:
        return sum(p.tokens for p in self.plans)


def undisturbed(prompt: Ints, new: int, salt: bytes = b"") -> list[int]:
    """The answer of the toy model when a request is alone."""
    tokens = list(prompt)
    for _ in range(new):
        tokens.append(next_token(salt, tokens))
    return tokens[len(prompt) :]


def finished(seq: Sequence) -> bool:
    return seq.status is Status.FINISHED
