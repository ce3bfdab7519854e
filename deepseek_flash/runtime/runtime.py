"""Opens a model and owns its parts for as long as it runs: tokenizer, weights, cache, loop."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from deepseek_flash.config import EngineConfig, kernels_preference
from deepseek_flash.errors import ConfigError, FormatError, MemoryBudgetError
from deepseek_flash.kernels.registry import Kernels, select
from deepseek_flash.kv.manager import KVManager
from deepseek_flash.kv.spec import CacheSpec
from deepseek_flash.kv.store import KVStore
from deepseek_flash.loading.fingerprint import weights_fingerprint
from deepseek_flash.loading.load import load_model_weights
from deepseek_flash.loading.locate import locate
from deepseek_flash.loading.source import TensorSource, open_source
from deepseek_flash.memory.probe import host_memory, trim_heap
from deepseek_flash.memory.report import CacheUse, MemoryReport
from deepseek_flash.metrics import Metrics
from deepseek_flash.models.base import Model, ModelInfo
from deepseek_flash.models.registry import resolve
from deepseek_flash.runtime.cache_types import cache_dtypes, needs_native, told
from deepseek_flash.runtime.fresh import on_fresh_thread
from deepseek_flash.runtime.generation import GenerationTenant, Request
from deepseek_flash.runtime.loop import EngineLoop
from deepseek_flash.runtime.request import Limits, RequestBuilder
from deepseek_flash.runtime.runner import Runner
from deepseek_flash.runtime.stream import Stream
from deepseek_flash.runtime.tiering import CacheTiers
from deepseek_flash.runtime.tiers_setup import open_tiers
from deepseek_flash.sampling.params import read_generation_config
from deepseek_flash.sampling.sampler import Sampler
from deepseek_flash.scheduler.scheduler import Scheduler
from deepseek_flash.text.tokenizer import Tokenizer

DEFAULT_BLOCK_SIZE = 16
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


class FlashRuntime:
    """Private: everything behind a FlashEngine. Empty until :meth:`open`."""

    def __init__(self, config: EngineConfig, *, kv_blocks: int | None = None, check_every_step: bool = False) -> None:
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
        self.plan = plan_cache(self.config, self.info, self.cache_dtypes, self.kernels.packs, self._kv_blocks)
        self._memory.callback(trim_heap)
        self.model: Model = self.info.build(self.kernels)
        self._memory.callback(self.model.release)
        load_model_weights(
            self.model,
            self.model.rules,
            source,
            torch.float32,
            packed=self.kernels.packs,
            quantize=self.config.quantize,
        )
        known = weights_fingerprint(self.path, source) if self.config.l3_cache_path else source.fingerprint()
        self.fingerprint = blake2b(known + (self.config.quantize or "").encode()).digest()[:32]
        eos_ids = _eos_ids(source.config, generation_config, self.tokenizer)
        self.weight_bytes = self.model.weight_bytes()
        self.store = KVStore(self.plan.spec, self.plan.blocks, "cpu")
        self._memory.callback(self.store.close)
        return generation_config, eos_ids

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
        )
        self.scheduler = Scheduler(
            manager, max_batch_size=config.max_batch_size, token_budget=config.prefill_chunk_size
        )
        self.tiers = self._tiers(manager)
        self.tenant = GenerationTenant(
            self.scheduler,
            Runner(self.model, self.store, Sampler(vocabulary, self.kernels.argmax, self.kernels.sample), "cpu"),
            self.tokenizer.incremental,
            self.metrics,
            tiers=self.tiers,
            salt=config.cache_salt.encode(),
            check_every_step=self._check_every_step,
        )

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
                "blocks": list(plan.blocks),
                "bytes": plan.bytes,
                "prefix_caching": self.config.enable_prefix_caching,
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
        use = CacheUse(pool_bytes=self.store.nbytes, total_blocks=total, used_blocks=used, cached_blocks=cached)
        return MemoryReport.measure(weights=self.weight_bytes, kv_cache=use)

    def close(self) -> None:
        """Stop the loop, end what runs, free weights and cache, as far as opening got. Idempotent."""
        self.loop.close()


def plan_cache(
    config: EngineConfig, info: ModelInfo, dtype: str | Sequence[str], turned: bool, kv_blocks: int | None = None
) -> CachePlan:
    """Size the cache: what ``max_batch_size`` full sequences can use, but no more than one full sequence or a
    quarter of the free memory, whichever is larger. Raises MemoryBudgetError when even that is not there."""
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
    share = int(free * CACHE_SHARE)
    if kv_blocks is None and config.max_model_len is None:
        # Nobody asked for this length: take the longest context whose cache fits the share.
        longest = min(longest, max(_tokens_within(spec, share), min(longest, 2048)))
    need = spec.bytes_for(longest)
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
        longest = min(longest, kv_blocks * spec.block_size)
    else:
        sequences = max(1, min(config.max_batch_size, share // need))
        blocks = tuple(sequences * spec.blocks_for(i, longest) for i in range(len(spec.groups)))
    size = sum(n * g.block_bytes(spec.block_size) for n, g in zip(blocks, spec.groups, strict=True))
    return CachePlan(spec, blocks, longest, size)


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
