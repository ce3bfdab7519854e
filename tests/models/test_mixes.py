"""Batch invariance, at large: whatever runs beside a request, its tokens and logits keep their bits.

Random mixes of requests, chunk sizes, block sizes, thread counts, cache sizes that force preemption, and hits of a
warm cache, each request compared with itself served alone by one thread.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from deepseek_flash.kernels.cpu import lib
from deepseek_flash.models.base import Model, ModelInfo
from tests.models.harness import Answer, Harness, load, prompt
from tests.support.checkpoints import tiny_gguf, tiny_llama, tiny_qwen2, tiny_qwen3

pytestmark = pytest.mark.skipif(lib.load() is None, reason=f"no native kernels: {lib.why_missing()}")

MIXES = 50
"""Of each kind of model: 200 in all."""
WIDE = {"hidden_size": 64, "intermediate_size": 96}
THREADS = (1, 2, 3)


@dataclass
class Kind:
    """One model, loaded for several numbers of threads, and what each prompt gives alone."""

    models: dict[int, tuple[ModelInfo, Model]]
    cache: str
    alone: dict[tuple[int, ...], Answer] = field(default_factory=dict)

    def harness(self, threads: int, **options: int) -> Harness:
        info, model = self.models[threads]
        return Harness(info, model, dtype=self.cache, **options)

    def wanted(self, tokens: list[int], new: int) -> Answer:
        key = tuple(tokens)
        if key not in self.alone:
            (self.alone[key],) = self.harness(1, chunk=900).serve([tokens], new)
        return self.alone[key]


def _kind(name: str, folder: Path) -> Kind:
    if name == "llama fp32":
        path, cache = tiny_llama(folder / "m"), "float32"
    elif name == "qwen3 bf16":
        path, cache = tiny_qwen3(folder / "m", dtype=torch.bfloat16), "bfloat16"
    elif name == "qwen2 q4_1":
        path, cache = tiny_gguf(tiny_qwen2(folder / "m", **WIDE), folder / "m.gguf", "Q4_1"), "float16"
    else:
        path, cache = tiny_gguf(tiny_llama(folder / "m", **WIDE), folder / "m.gguf", "Q8_0"), "int8"
    return Kind({n: load(path, threads=n) for n in THREADS}, cache)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["llama fp32", "qwen3 bf16", "qwen2 q4_1", "llama q8_0 int8"])
def test_a_request_is_the_same_in_every_mix(name: str, tmp_path: Path) -> None:
    """Q09 too: the scales of an int8 cache stay with its values, through preemption and prefix hits."""
    kind, rng, new = _kind(name, tmp_path), random.Random(name), 20
    stems = [prompt(1000 + i, 300) for i in range(3)]
    pool = [[*rng.choice(stems)[: rng.choice((0, 16, 40, 290))], *prompt(i, rng.randint(1, 60))] for i in range(14)]
    preempted = hits = 0
    for mix in range(MIXES):
        block_size = rng.choice((4, 16, 32))
        chosen = [rng.choice(pool) for _ in range(rng.randint(1, 9))]
        longest = max(len(t) for t in chosen) + new
        tight = rng.random() < 0.3
        blocks = -(-longest // block_size) + rng.randint(2, 6) if tight else 1600 // block_size
        harness = kind.harness(
            rng.choice(THREADS),
            chunk=rng.choice((5, 17, 64, 300)),
            block_size=block_size,
            blocks=blocks,
            batch=rng.choice((2, 5, 9)),
        )
        for _ in range(rng.choice((1, 1, 2))):  # the second time with a warm cache
            for tokens, answer in zip(chosen, harness.serve(chosen, new), strict=True):
                want = kind.wanted(tokens, new)
                assert answer.tokens == want.tokens, f"mix {mix}"
                for at, logits in answer.logits.items():
                    assert torch.equal(logits, want.logits[at]), f"mix {mix}, position {at}"
                preempted += answer.preemptions
                hits += answer.cached > 0
    assert preempted > 0
    assert hits > 0
