"""Opens a model and owns its parts for as long as it runs: tokenizer, weights, cache, loop."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from deepseek_flash.config import EngineConfig, kernels_preference
from deepseek_flash.errors import CheckpointError, ConfigError, FlashError, FormatError, MemoryBudgetError
from deepseek_flash.kernels.registry import Kernels, select
from deepseek_flash.kv.manager import KVManager
from deepseek_flash.kv.spec import CacheSpec
from deepseek_flash.kv.store import KVStore
from deepseek_flash.loading.fingerprint import weights_fingerprint
from deepseek_flash.loading.load import load_model_weights
from deepseek_flash.loading.locate import locate
from deepseek_flash.loading.source import TensorSource, open_source
from deepseek_flash.memory.ledger import MemoryBudget, shared_budget
from deepseek_flash.memory.plan import Budget, Needs
from deepseek_flash.memory.plan import plan as make_plan
from deepseek_flash.memory.probe import host_memory, trim_heap
from deepseek_flash.memory.report import CacheUse, MemoryReport
from deepseek_flash.metrics import Metrics
from deepseek_flash.models.base import Model, ModelInfo
from deepseek_flash.models.registry import resolve
from deepseek_flash.models.sizes import ModelSizes, StepLimits
from deepseek_flash.runtime.cache_types import cache_dtypes, needs_native, told
from deepseek_flash.runtime.fresh import on_fresh_thread
from deepseek_flash.runtime.generation import GenerationTenant, Request
from deepseek_flash.runtime.loop import EngineLoop
from deepseek_flash.runtime.request import Limits, RequestBuilder
from deepseek_flash.runtime.residence import Held, Residence, image_folder
from deepseek_flash.runtime.runner import Runner
from deepseek_flash.runtime.stream import Stream
from deepseek_flash.runtime.tiering import CacheTiers
from deepseek_flash.runtime.tiers_setup import open_tiers
from deepseek_flash.sampling.params import read_generation_config
from deepseek_flash.sampling.sampler import Sampler
from deepseek_flash.scheduler.scheduler import Scheduler
from deepseek_flash.text.tokenizer import Tokenizer

DEFAULT_BLOCK_SIZE = 16
OPENING = 60.0
"""Seconds that an engine which needs room waits for another one that is still being opened."""
CACHE_SHARE = 0.25
"""Share of the memory free at opening that the cache may take beyond one full sequence."""


@dataclass(frozen=True, slots=True)
class CachePlan:
    """How large the cache is and what context it allows. Bytes and tokens."""

    spec: CacheSpec
    blocks: tuple[int, ...]
    """Per group."""
    context: int
    """Most tokens of one sequence."""
    bytes: int
    most: tuple[int, ...] = ()
    """Blocks that the pool could be resized to, per group."""


class FlashRuntime:
    """Private: everything behind a FlashEngine. Empty until :meth:`open`."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        kv_blocks: int | None = None,
        check_every_step: bool = False,
        budget: MemoryBudget | None = None,
    ) -> None:
        """``budget``: in place of the one that this process shares."""
        self._budget = budget
        self._opened = threading.Event()
        self.config, self._kv_blocks, self._check_every_step = config, kv_blocks, check_every_step
        self.path = Path(config.model)
        self.metrics = Metrics()
        self._memory = ExitStack()
        """Closing it gives back weights and cache, although somebody may still hold references to these objects."""
        self.loop = EngineLoop(self._memory.close)

    def open(self) -> None:
        """Find, check, plan, load, serve; raises before allocating when something cannot work.

        Whoever calls it calls close() if it raises: a kept traceback would keep what was loaded so far.
        """
        self.path = locate(self.config.model)
        generation_config, eos_ids = on_fresh_thread(self._load)
        self._assemble(generation_config, eos_ids)
        self.loop.start([self.tenant], name=f"deepseek-flash-{self.path.name}")
        self._opened.set()

    def _load(self) -> tuple[dict[str, Any], frozenset[int]]:
        """Everything that is read or allocated; the generation config and the end-of-text ids."""
        with open_source(self.path) as source:
            return self._read(source)

    def _read(self, source: TensorSource) -> tuple[dict[str, Any], frozenset[int]]:
        self.info: ModelInfo = resolve(source.config)
        self.tokenizer = _tokenizer(source, self.path)
        generation_config = dict(source.generation_config)
        read_generation_config(generation_config)
        self.kernels: Kernels = select("cpu", kernels_preference(), self.config.threads)
        if self.config.quantize and not self.kernels.packs:
            raise needs_native("quantize", self.config.quantize)
        self.cache_dtypes = cache_dtypes(self.config, source, self.kernels, self.info.num_layers)
        self._memory.callback(trim_heap)
        self._reserve(source)
        self._memory.callback(self._unload)
        self._weights(source)
        self.fingerprint = self._identity(source)
        eos_ids = _eos_ids(source.config, generation_config, self.tokenizer)
        self.weight_bytes = self.model.weight_bytes()
        assert self.held.weights is not None
        self.held.weights.resize(self.weight_bytes)
        self.store = _store(self.plan)
        self._memory.callback(self.store.close)
        return generation_config, eos_ids

    def _reserve(self, source: TensorSource) -> None:
        """Plan what weights, steps and cache will take, and reserve it, before any of it is read or allocated."""
        config = self.config
        budget = self._budget or shared_budget("cpu", fraction=config.memory_fraction, limit=config.budget_bytes)
        self.held = Held(budget, self.path.name)
        self._memory.callback(self.held.release)
        if config.l2_cache_gb is not None:
            self.held.take_tier(int(config.l2_cache_gb * 1e9))
        sizes = ModelSizes(source, self.kernels)
        block = config.block_size or DEFAULT_BLOCK_SIZE
        needs = sizes.needs(
            StepLimits(config.max_batch_size, config.prefill_chunk_size, config.threads, block),
            kv_cache_dtype=self.cache_dtypes,
            quantize=config.quantize,
            max_model_len=min(config.max_model_len or self.info.max_position, self.info.max_position),
        )
        self.plan = plan_cache(
            config, self.info, self.cache_dtypes, self.kernels.packs, self._kv_blocks, needs=needs, budget=budget
        )
        context = self.plan.context
        self.held.take(needs.weights[needs.quantize], needs.step(context), needs.runtime)
        least = self.plan.spec.bytes_for(context)
        self.held.take_cache(self.plan.bytes, min(least, self.plan.bytes), self._shrink)

    def _shrink(self, keep: int) -> None:
        """Somebody else on this device needs room. An engine that closes meanwhile gives everything back anyway."""
        if self._opened.wait(OPENING):
            with suppress(FlashError):
                self.resize(keep)

    def _weights(self, source: TensorSource) -> None:
        self.model: Model = self.info.build(self.kernels)
        load_model_weights(
            self.model,
            self.model.rules,
            source,
            torch.float32,
            packed=self.kernels.packs,
            quantize=self.config.quantize,
        )

    def _identity(self, source: TensorSource) -> bytes:
        """What the weights are: part of every prefix key."""
        known = weights_fingerprint(self.path, source) if self.config.l3_cache_path else source.fingerprint()
        return blake2b(known + (self.config.quantize or "").encode()).digest()[:32]

    def _unload(self) -> None:
        """Give the weights back, as far as any were built."""
        model = getattr(self, "model", None)
        if model is not None:
            model.release()

    def _reload(self) -> None:
        """Read the weights again, and make sure that they are the same."""
        with open_source(self.path) as source:
            now = self._identity(source)
            if now != self.fingerprint:
                raise CheckpointError(
                    f"{self.path}: the weights changed while the engine slept; put the old ones back, or close this "
                    f"engine and open a new one"
                )
            self._weights(source)
        self.runner.model = self.model

    def _assemble(self, generation_config: dict[str, Any], eos_ids: frozenset[int]) -> None:
        """Everything that runs."""
        config = self.config
        vocabulary = min(self.info.vocab_size, self.tokenizer.written_size)
        self.builder = RequestBuilder(
            tokenizer=self.tokenizer,
            template=self.tokenizer.template(),
            limits=Limits(self.plan.context, self.info.max_position, vocabulary, self.info.vocab_size),
            generation_config=generation_config,
            eos_ids=eos_ids,
            seed=config.seed,
        )
        manager = KVManager(
            self.plan.spec,
            self.plan.blocks,
            root=self.fingerprint,
            prefix_caching=config.enable_prefix_caching,
            most=self.store.capacity,
        )
        self.scheduler = Scheduler(
            manager, max_batch_size=config.max_batch_size, token_budget=config.prefill_chunk_size
        )
        self.tiers = self._tiers(manager)
        sampler = Sampler(vocabulary, self.kernels.argmax, self.kernels.sample)
        self.runner = Runner(self.model, self.store, sampler, "cpu")
        self.tenant = GenerationTenant(
            self.scheduler,
            self.runner,
            self.tokenizer.incremental,
            self.metrics,
            tiers=self.tiers,
            salt=config.cache_salt.encode(),
            check_every_step=self._check_every_step,
        )
        self.residence = Residence(
            self.tenant,
            self.store,
            context=self.plan.context,
            folder=image_folder(config.l3_cache_path),
            unload=self._unload,
            reload=lambda: on_fresh_thread(self._reload),
        )
        self._memory.callback(self.residence.close)

    def _tiers(self, manager: KVManager) -> CacheTiers | None:
        """The tiers below the pool, where the options ask for any."""
        tiers = open_tiers(
            self.config,
            manager,
            self.store,
            root=self.fingerprint,
            native=self.kernels.packs,
            post=self.loop.post_quietly,
            resume=lambda seq: self.scheduler.resume(seq),
            metrics=self.metrics,
        )
        if tiers is not None:
            self._memory.callback(tiers.close)
        return tiers

    def stream(self, request: Request) -> Stream:
        """The caller's end of a request that is yet to be queued; cancelling it early is fine."""
        runtime, number = weakref.ref(self), request.id

        def cancel() -> None:
            alive = runtime()
            if alive is not None:
                alive.loop.post_quietly(partial(alive.tenant.cancel, number))

        return Stream(request.channel, cancel, number)

    def queue(self, request: Request) -> None:
        """Hand a request to the engine thread. Whoever calls it holds its Stream already, and cancels it if an
        interrupt comes."""
        self.loop.post(partial(self.tenant.add, request))

    def describe(self) -> dict[str, Any]:
        """Plain data about the model, its limits, the kernels in use, and counters."""
        plan, snapshot = self.plan, self.metrics.snapshot()
        return {
            "model": {
                "path": str(self.path),
                "architecture": self.info.architecture,
                "layers": self.info.num_layers,
                "vocab_size": self.info.vocab_size,
                "fingerprint": self.fingerprint.hex(),
                "weight_bytes": self.weight_bytes,
                "dtype": "float32",
                "chat_template": self.builder.template is not None,
            },
            "limits": {
                "max_model_len": plan.context,
                "max_batch_size": self.config.max_batch_size,
                "prefill_chunk_size": self.config.prefill_chunk_size,
            },
            "cache": {
                "dtype": told(self.cache_dtypes),
                "block_size": plan.spec.block_size,
                "blocks": [p.capacity for p in self.scheduler.kv.pools],
                "bytes": self.residence.pool_bytes,
                "asleep": self.residence.asleep,
                "prefix_caching": self.config.enable_prefix_caching,
            },
            "memory": {
                "limit": self.held.budget.limit,
                "held": self.held.budget.held,
                "total": self.held.budget.total,
                "lines": {line.name: line.bytes for line in self.held.lines},
            },
            "tiers": {} if self.tiers is None else self.tiers.stats(),
            "kernels": self.kernels.describe(),
            "scheduler": self.scheduler.stats(),
            "counters": dict(snapshot.counters),
            "seconds": dict(snapshot.seconds),
        }

    def memory_report(self) -> MemoryReport:
        """Measured bytes of weights and cache, and what the process holds."""
        total, used, cached = self.scheduler.kv.usage()
        asleep = self.residence.asleep
        pool = 0 if asleep else self.residence.pool_bytes
        use = CacheUse(pool_bytes=pool, total_blocks=total, used_blocks=used, cached_blocks=cached)
        return MemoryReport.measure(weights=0 if asleep else self.weight_bytes, kv_cache=use)

    def resize(self, kv_cache: int) -> int:
        """Bring the cache pool to at most so many bytes; what it has then."""
        pool = self.held.cache
        assert pool is not None
        before = pool.bytes
        target = min(kv_cache, self.store.nbytes)
        if target > before:
            pool.resize(target)  # first, and here: whoever is asked to shrink for it may need its engine's thread
        try:
            now = self.loop.call(partial(self.residence.resize, kv_cache))
        except BaseException:
            pool.resize(min(before, pool.bytes))
            raise
        pool.resize(now)
        return now

    def sleep(self) -> None:
        """Give weights and cache back until :meth:`wake`."""
        self.loop.call(self.residence.sleep)
        for line in (self.held.weights, self.held.cache):
            if line is not None:
                line.resize(0)

    def wake(self) -> None:
        """Have them again."""
        if not self.residence.asleep:
            return
        weights, pool = self.held.weights, self.held.cache
        assert weights is not None
        assert pool is not None
        weights.resize(self.weight_bytes)
        try:
            pool.resize(self.residence.pool_bytes)
            self.loop.call(self.residence.wake)
        except BaseException:
            weights.resize(0)
            pool.resize(0)
            raise

    def close(self) -> None:
        """Stop the loop, end what runs, free weights and cache, as far as opening got. Idempotent."""
        self.loop.close()


def plan_cache(
    config: EngineConfig,
    info: ModelInfo,
    dtype: str | Sequence[str],
    turned: bool,
    kv_blocks: int | None = None,
    *,
    needs: Needs,
    budget: MemoryBudget,
) -> CachePlan:
    """Size the cache: what ``max_batch_size`` full sequences can use, but no more than the budget leaves; where no
    budget was asked for, no more than one full sequence or a quarter of the free memory, whichever is larger. Raises
    MemoryBudgetError when one full sequence does not fit."""
    longest = config.max_model_len or info.max_position
    if longest > info.max_position:
        raise ConfigError(
            f"max_model_len={longest}: this checkpoint's positions end at {info.max_position}; give at most that",
            field="max_model_len",
            value=longest,
            allowed=f"2 to {info.max_position}",
        )
    spec = info.cache_spec(config.block_size or DEFAULT_BLOCK_SIZE, dtype, turned=turned)
    free = host_memory().available
    asked = config.memory_fraction is not None or config.memory_budget is not None
    room = max(0, budget.could_give() - needs.fixed(longest))
    fair = max(0, budget.could_give(0.5) - needs.fixed(longest))  # others keep half of what they could give
    share = min(fair, free) if asked else min(fair, int(free * CACHE_SHARE))
    if kv_blocks is None and config.max_model_len is None:
        # Nobody asked for this length: take the longest context whose cache fits the share.
        longest = min(longest, max(_tokens_within(spec, share), min(longest, 2048)))
        room = max(0, budget.could_give() - needs.fixed(longest))
    if kv_blocks is not None:
        longest = min(longest, kv_blocks * spec.block_size)
    need = spec.bytes_for(longest)
    if need > room:
        raise _too_small(replace(needs, max_model_len=longest), budget, config)
    if need > free:
        fits = _tokens_within(spec, free // 2)
        raise MemoryBudgetError(
            f"a context of {longest} tokens needs {need / 2**30:.2f} GiB of cache, but {free / 2**30:.2f} GiB are "
            f"free; set max_model_len to {fits} or less",
            needed=need,
            available=free,
            largest_context=fits,
        )
    if kv_blocks is not None:
        blocks = tuple(kv_blocks if g.kind != "state" else config.max_batch_size for g in spec.groups)
    else:
        sequences = max(1, min(config.max_batch_size, share // need))
        blocks = tuple(sequences * spec.blocks_for(i, longest) for i in range(len(spec.groups)))
    size = sum(n * g.block_bytes(spec.block_size) for n, g in zip(blocks, spec.groups, strict=True))
    useful = (max(n, config.max_batch_size * spec.blocks_for(i, longest)) for i, n in enumerate(blocks))
    return CachePlan(spec, blocks, longest, size, tuple(useful))


def _store(plan: CachePlan) -> KVStore:
    """Pools that map what they may grow to, or as much as they need now where the system does not let them."""
    spec = plan.spec
    total = sum(n * g.block_bytes(spec.block_size) for n, g in zip(plan.most, spec.groups, strict=True))
    if total <= host_memory().total:
        with suppress(MemoryBudgetError):
            return KVStore(spec, plan.most, "cpu")
    return KVStore(spec, plan.blocks, "cpu")


def _too_small(needs: Needs, budget: MemoryBudget, config: EngineConfig) -> MemoryBudgetError:
    """With the table, what would fit, and who else holds memory of the same budget."""
    left = budget.could_give()
    alone = left == budget.limit
    share = budget.limit / budget.total if config.budget_bytes is None and alone else None
    error = make_plan(needs, Budget(left, budget.total, share)).error()
    if not alone:
        error.add_note(f"others of this process share the budget:\n{budget.table()}")
    return error


def _tokens_within(spec: CacheSpec, room: int) -> int:
    """Most tokens (whole blocks) of one sequence whose cache fits ``room`` bytes."""
    low, high = 0, 1
    while spec.bytes_for(high * spec.block_size) <= room and high < 2**40:
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if spec.bytes_for(middle * spec.block_size) <= room else (low, middle)
    return low * spec.block_size


def _tokenizer(source: TensorSource, path: Path) -> Tokenizer:
    if source.metadata:  # of a GGUF file, or kept from one
        return Tokenizer.from_gguf(source.metadata, str(path))
    return Tokenizer.from_folder(path)


def _eos_ids(config: Mapping[str, Any], generation_config: Mapping[str, Any], tokenizer: Tokenizer) -> frozenset[int]:
    """End-of-text ids: generation_config where it speaks, else the model config; and the tokenizer's own."""
    found = set(tokenizer.eos_ids)
    for name, said in (
        ("generation_config.json", generation_config.get("eos_token_id")),
        ("config.json", config.get("eos_token_id")),
    ):
        if said is None:
            continue
        ids = said if isinstance(said, list) else [said]
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise FormatError(f"{name}: eos_token_id={said!r} is neither an id nor a list of ids", file=name)
        found.update(ids)
        break
    return frozenset(found)
