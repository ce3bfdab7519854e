"""Every kind of group through the host and disk tiers: each row that is read was computed from the right prefix."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import pytest

from deepseek_flash.kv.disk import DiskStore, StoreIdentity
from deepseek_flash.kv.tiers import DiskTier, HostPool
from deepseek_flash.metrics import Metrics
from deepseek_flash.runtime.rates import Rates
from deepseek_flash.runtime.tiering import CacheTiers
from deepseek_flash.runtime.tiers_setup import part_bytes
from deepseek_flash.scheduler.sequence import Sequence
from tests.kv.toys import SPECS, Driver, FakeStore, finished, next_token, undisturbed

ROW = 16
PROMPT = [i * 5 % 11 for i in range(45)]


class ByteStore(FakeStore):
    """Digests that tiers see as bytes. A view handed out is read back before anything else happens."""

    def __init__(self, kv: Any) -> None:
        super().__init__(kv)
        self._out: list[tuple[int, int, bytearray]] = []

    def bytes(self, group: int, block: int) -> memoryview:
        self._sync()
        names = {None: b"", "zero": b"zero"}
        rows = [names.get(v, v) if not isinstance(v, bytes) else v for v in self.data[group][block]]
        size = self.kv.spec.groups[group].block_bytes(self.size)
        buffer = bytearray(b"".join(r.ljust(ROW, b"\0") for r in rows).ljust(size, b"\0"))
        self._out.append((group, block, buffer))
        return memoryview(buffer)

    def _sync(self) -> None:
        for group, block, buffer in self._out:
            count = self.kv.spec.groups[group].rows_per_block(self.size)
            rows = [bytes(buffer[i : i + ROW]) for i in range(0, count * ROW, ROW)]
            self.data[group][block] = [None if not any(r) else r[:12] for r in rows]
        self._out.clear()

    def run(self, plan: Any) -> None:
        self._sync()
        super().run(plan)


class Tiered(Driver):
    """The engine thread's part: posts, holding, saving."""

    def __init__(self, name: str, folder: Path | None, host: int = 0) -> None:
        spec, capacity = SPECS[name]
        super().__init__(spec, capacity)
        self.store = ByteStore(self.kv)
        rows, snapshot = part_bytes(spec)
        self.posts: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.disk = None
        if folder is not None:
            store = DiskStore(folder, StoreIdentity(b"t" * 32, rows, snapshot), limit_bytes=64 << 20)
            self.disk = DiskTier(store, rows, snapshot, 4)
        self.tiers = CacheTiers(
            self.kv,
            self.store,  # type: ignore[arg-type]
            host=HostPool(host * rows, rows) if host else None,
            host_snapshots=HostPool(host * snapshot, snapshot) if host and snapshot else None,
            disk=self.disk,
            post=self.posts.put,
            resume=self.scheduler.resume,
            rates=Rates(),
            metrics=Metrics(),
        )

    def read(self, prompt: list[int], new: int = 4) -> Sequence:
        """One request to its end, with the right answer."""
        seq = self.add(prompt, new)
        if self.tiers.arrived(seq):
            self.scheduler.hold(seq)
        until = time.perf_counter() + 20
        while not finished(seq):
            assert time.perf_counter() < until
            self.serve(0.0 if self.scheduler.can_step else 0.05)
            if self.scheduler.can_step:
                self.step()
        assert seq.output == undisturbed(prompt, new)
        return seq

    def serve(self, wait: float) -> None:
        try:
            while True:
                (self.posts.get(timeout=wait) if wait else self.posts.get_nowait())()
                wait = 0.0
        except Empty:
            self.scheduler.check()

    def step(self) -> Any:
        plan = self.plan()
        assert plan is not None
        self.store.run(plan)
        sampling = [i.seq for i in plan.items if i.sample]
        self.scheduler.commit(plan, {s.id: next_token(s.salt, s.tokens) for s in sampling if len(s) < s.max_tokens})
        for item in plan.items:
            if item.start < item.seq.prompt_len:
                self.tiers.computed(item.seq)
        for seq in sampling:
            if len(seq) == seq.max_tokens:
                self.tiers.leaving(seq)
                self.end(seq)
        assert self.tiers.settle(20)  # steps take microseconds here: no save is to find its buffers taken
        return plan


@pytest.fixture(autouse=True)
def loading_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rates, "worth_loading", lambda *_: True)
    monkeypatch.setattr("deepseek_flash.runtime.tiering.PATIENCE", 20.0)


@contextmanager
def tiered(name: str, folder: Path | None, host: int = 0) -> Iterator[Tiered]:
    d = Tiered(name, folder, host)
    try:
        yield d
        assert d.tiers.settle(20)
    finally:
        d.tiers.close()


WITH_ROWS = ["rows", "toy", "window"]


@pytest.mark.parametrize("name", WITH_ROWS)
def test_a_restart_resumes_from_disk(name: str, tmp_path: Path) -> None:
    with tiered(name, tmp_path) as d:
        assert d.read(PROMPT).cached_tokens == 0
    with tiered(name, tmp_path) as d:
        again = d.read(PROMPT)
        assert again.l3_tokens == again.cached_tokens == 44
        assert d.read([*PROMPT[:30], 1, 2, 3]).miss in ("absent", "")
    with tiered(name, tmp_path) as d:
        assert d.read([*PROMPT, *undisturbed(PROMPT, 4), 1, 2]).cached_tokens >= 44


@pytest.mark.parametrize("name", WITH_ROWS)
def test_the_host_tier_brings_back_what_was_evicted(name: str) -> None:
    with tiered(name, None, host=60) as d:
        d.read(PROMPT)
        for i in range(4):
            d.read([(i * 3 + j * 7) % 10 for j in range(60)])
        got = d.read(PROMPT)
        assert got.l2_tokens > 0
        assert got.cached_tokens == 44
