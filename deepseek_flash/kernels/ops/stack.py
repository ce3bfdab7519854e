"""All layers of a dense decoder at once.

An op of its own because at batch 1 a small model's step is shorter than the calls between its kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from deepseek_flash.kernels.op import Case, Cost, Op, nbytes, rand
from deepseek_flash.kernels.ops.attention import paged_attention, paged_case
from deepseek_flash.kernels.ops.cache import rope_and_cache_write
from deepseek_flash.kernels.ops.mlp import silu_mul
from deepseek_flash.kernels.ops.norm import add_rms_norm, rms_norm
from deepseek_flash.kernels.ops.packed import FORMATS, PackedLinear, packed_linear, random_weight
from deepseek_flash.kernels.ops.rope import tables
from deepseek_flash.kernels.plan import AttentionPlan, Cache


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One layer: attention and SwiGLU, each on the normalised residual stream."""

    norm: torch.Tensor
    """fp32 [hidden], before attention"""
    mlp_norm: torch.Tensor
    """fp32 [hidden]"""
    head_norm: torch.Tensor | None
    """fp32 [heads + kv heads, D] for models that normalise query and key heads"""
    qkv: PackedLinear
    out: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear


@dataclass(frozen=True, slots=True, eq=False)
class StackWeights:
    """The layers of a decoder and its last norm."""

    heads: int
    eps: float
    scale: float
    """What scores are multiplied with."""
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    native: Any = field(default=None, repr=False)
    """Belongs to the implementation that bound it."""


LayerCache = tuple[Cache, Cache]
"""Keys and values of one layer."""


def bind_stack(weights: StackWeights) -> StackWeights:
    """What ``decoder_stack`` takes: made once, when the weights are there."""
    return weights


def decoder_stack(
    x: torch.Tensor,
    weights: StackWeights,
    caches: tuple[LayerCache, ...],
    cos: torch.Tensor,
    sin: torch.Tensor,
    plan: AttentionPlan,
) -> torch.Tensor:
    """Embeddings ``x [T, hidden]`` → normalised last hidden states [T, hidden]; rows of this step
    are written to ``caches``. ``cos``, ``sin`` as in ``rope``."""
    stream, update = x, None
    for layer, (k_cache, v_cache) in zip(weights.layers, caches, strict=True):
        stream = stream if update is None else stream + update
        qkv = packed_linear(rms_norm(stream, layer.norm, weights.eps), layer.qkv)
        dim = qkv.shape[1] // (weights.heads + 2 * _kv_heads(k_cache))
        qkv = qkv.view(len(x), -1, dim)
        turning = weights.heads + _kv_heads(k_cache)
        qk, v = qkv[:, :turning], qkv[:, turning:]
        if layer.head_norm is not None:
            qk = rms_norm(qk, layer.head_norm, weights.eps)
        q = rope_and_cache_write(qk, v, cos, sin, k_cache, v_cache, plan)
        attended = paged_attention(q, k_cache, v_cache, plan, weights.scale)
        y, stream = add_rms_norm(packed_linear(attended.flatten(1), layer.out), stream, layer.mlp_norm, weights.eps)
        update = packed_linear(silu_mul(packed_linear(y, layer.gate_up)), layer.down)
    stream = stream if update is None else stream + update
    return rms_norm(stream, weights.norm, weights.eps)


def _kv_heads(cache: Cache) -> int:
    return cache.shape[2] if isinstance(cache, torch.Tensor) else cache.values.shape[2]


def _weights(
    gen: torch.Generator,
    form: Any,
    *,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    dim: int,
    inner: int,
    head_norm: bool,
) -> StackWeights:
    def linear(n: int, k: int, bias: bool = False, fine: bool = False) -> PackedLinear:
        return PackedLinear((random_weight(gen, form, n, k),), 0.1 * rand(gen, n) if bias else None, fine)

    def norm(*shape: int) -> torch.Tensor:
        return 1 + 0.1 * rand(gen, *shape)

    return StackWeights(
        heads=heads,
        eps=1e-5,
        scale=dim**-0.5,
        layers=tuple(
            LayerWeights(
                norm=norm(hidden),
                mlp_norm=norm(hidden),
                head_norm=norm(heads + kv_heads, dim) if head_norm else None,
                qkv=linear((heads + 2 * kv_heads) * dim, hidden, bias=True, fine=True),
                out=linear(hidden, heads * dim),
                gate_up=linear(2 * inner, hidden),
                down=linear(hidden, inner),
            )
            for _ in range(layers)
        ),
        norm=norm(hidden),
    )


def _inputs(gen: torch.Generator) -> Iterator[Case]:
    shape = {"heads": 6, "kv_heads": 2, "dim": 16}
    for form in (FORMATS[-3], FORMATS[0]):
        for head_norm in (False, True):
            lens = [(1, 40), (5, 5), (33, 70)]
            cases = [paged_case(gen, lens, block_size=16, **shape) for _ in range(2)]
            plan = cases[0][3]
            weights = _weights(gen, form, layers=2, hidden=64, inner=96, head_norm=head_norm, **shape)
            # One plan for both layers: their caches use the same blocks.
            caches = tuple((c[1], c[2]) for c in (cases[0], _same_blocks(cases[0])))
            tokens = plan.cu_q[-1]
            yield Case(
                f"{form.kind}{' head norm' * head_norm}",
                (rand(gen, tokens, 64), weights, caches, *tables(gen, tokens, 16), plan),
            )


def _same_blocks(case: tuple[Any, ...]) -> tuple[Any, ...]:
    return (case[0], case[1].clone(), case[2].clone(), *case[3:])


def _cost(x: torch.Tensor, weights: StackWeights, caches: Any, *rest: Any) -> Cost:
    linears = [p for w in weights.layers for p in (w.qkv, w.out, w.gate_up, w.down)]
    flops = sum(2 * len(x) * p.inputs * p.outputs for p in linears)
    return Cost(flops, 2 * nbytes(x) + sum(p.nbytes for p in linears))


BIND_STACK = Op(
    "bind_stack", bind_stack, lambda gen: (Case(c.label, (c.args[1],)) for c in _inputs(gen)), 0.0, lambda w: Cost(0, 1)
)
DECODER_STACK = Op("decoder_stack", decoder_stack, _inputs, 1e-3, _cost, writes=(2,))
