"""A model, a cache and a scheduler without engine or sampler: greedy, with every logit kept."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path

import torch

from deepseek_flash.kernels.registry import select
from deepseek_flash.kv.manager import KVManager
from deepseek_flash.kv.store import KVStore
from deepseek_flash.loading.load import load_model_weights
from deepseek_flash.loading.source import open_source
from deepseek_flash.models.base import Model, ModelInfo
from deepseek_flash.models.registry import resolve
from deepseek_flash.runtime.runner import build_batch
from deepseek_flash.scheduler.scheduler import Scheduler
from deepseek_flash.scheduler.sequence import Sequence


def load(path: Path, prefer: str = "auto", threads: int | None = None) -> tuple[ModelInfo, Model]:
    with open_source(path) as source:
        info = resolve(source.config)
        kernels = select("cpu", prefer, threads)
        model = info.build(kernels)
        load_model_weights(model, model.rules, source, torch.float32, packed=kernels.packs)
    return info, model


def turned_by(model: Model) -> bool:
    """Whether the engine would lay keys turned for this model's kernels."""
    return bool(model._kernels.packs)


def prompt(seed: int, length: int, vocab: int = 320) -> list[int]:
    return torch.randint(0, vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@dataclass
class Answer:
    """A finished sequence: all its tokens, and the logits after each of them (positions found in the cache lack)."""

    tokens: list[int]
    logits: dict[int, torch.Tensor] = field(default_factory=dict)
    cached: int = 0
    preemptions: int = 0

    def matrix(self) -> torch.Tensor:
        """[positions seen, vocab], in order."""
        return torch.stack([self.logits[i] for i in sorted(self.logits)])


class Harness:
    """Serve prompts greedily. The cache stays between calls, so later prompts may hit it."""

    def __init__(
        self,
        info: ModelInfo,
        model: Model,
        *,
        block_size: int = 16,
        chunk: int = 512,
        batch: int = 8,
        blocks: int = 400,
        prefix_caching: bool = True,
        dtype: str | Seq[str] = "float32",
    ) -> None:
        self.model, spec = model, info.cache_spec(block_size, dtype, turned=turned_by(model))
        self.store = KVStore(spec, (blocks,), "cpu")
        for pool in self.store.pools:  # whatever is not written must not matter
            pool.fill_(255)  # NaN in every float type
        manager = KVManager(spec, (blocks,), root=b"test", prefix_caching=prefix_caching)
        self.scheduler = Scheduler(manager, max_batch_size=batch, token_budget=chunk)
        self._ids = 0

    @torch.inference_mode()
    def serve(self, prompts: Seq[list[int]], new: int) -> list[Answer]:
        seqs, answers = [], {}
        for tokens in prompts:
            seq = Sequence(self._ids, list(tokens), len(tokens), len(tokens) + new)
            self._ids += 1
            seqs.append(seq)
            answers[seq.id] = Answer(seq.tokens)
            self.scheduler.add(seq)
        while self.scheduler.has_work:
            plan = self.scheduler.plan()
            assert plan is not None
            self.store.apply(plan.zero, plan.copies)
            batch = build_batch(plan, self.store, torch.device("cpu"))
            logits = self.model.logits(self.model.hidden(batch, self.store))
            chosen = {}
            for item, at in zip(plan.items, batch.cu_q, strict=False):
                for i in range(item.count):
                    answers[item.seq.id].logits[item.start + i] = logits[at + i]
                if item.sample:
                    chosen[item.seq.id] = int(logits[at + item.count - 1].argmax())
            self.scheduler.commit(plan, chosen)
            self.scheduler.check()
            for item in plan.items:
                if item.sample and len(item.seq) >= item.seq.max_tokens:
                    self.scheduler.finish(item.seq)
        for seq in seqs:
            answers[seq.id].cached, answers[seq.id].preemptions = seq.cached_tokens, seq.preemptions
        return [answers[seq.id] for seq in seqs]
