"""Grouped-query attention over the paged cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from deepseek_flash.kernels.op import Case, Cost, Op, nbytes, rand
from deepseek_flash.kernels.ops.cache import blank_cache, cached
from deepseek_flash.kernels.plan import AttentionPlan, Cache, QuantCache


def paged_attention(q: torch.Tensor, k_cache: Cache, v_cache: Cache, plan: AttentionPlan, scale: float) -> torch.Tensor:
    """``softmax(q k^T * scale) v`` for ``q [T, heads, D]`` → [T, heads, D], causal, each sequence on its own.

    ``k_cache``, ``v_cache`` [blocks, block_size, kv heads, D] already hold this step's tokens. Query head h reads kv
    head ``h // (heads / kv heads)``. Rows of the cache that belong to no token of the sequence may hold anything,
    NaN included, and change nothing.
    """
    block_size, kv_heads = values_of(k_cache).shape[1:3]
    group = q.shape[1] // kv_heads
    out = torch.empty_like(q)
    for s, context in enumerate(plan.context_lens):
        a, b = plan.cu_q[s], plan.cu_q[s + 1]
        at = torch.arange(context)
        block, row = plan.block_table[s, at // block_size], at % block_size
        k = cached(k_cache, block, row).repeat_interleave(group, dim=1)  # [context, heads, D]
        v = cached(v_cache, block, row).repeat_interleave(group, dim=1)
        scores = torch.einsum("nhd,lhd->hnl", q[a:b], k) * scale
        future = at[None, :] > torch.arange(context - (b - a), context)[:, None]
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        out[a:b] = torch.einsum("hnl,lhd->nhd", weights, v)
    return out


def values_of(cache: Cache) -> torch.Tensor:
    """The tensor [blocks, block_size, kv heads, D] of a cache of any type."""
    return cache.values if isinstance(cache, QuantCache) else cache


def paged_case(
    gen: torch.Generator,
    lens: list[tuple[int, int]],
    *,
    heads: int,
    kv_heads: int,
    dim: int,
    block_size: int,
    pad: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttentionPlan, float]:
    """Arguments for sequences of (new tokens, context); blocks scattered, every other cache row NaN."""
    counts = [-(-context // block_size) for _, context in lens]
    total = sum(counts) + 3
    ids = torch.randperm(total, generator=gen).tolist()
    table = torch.zeros(len(lens), max(counts), dtype=torch.int64)
    caches = [blank_cache(total, block_size, kv_heads, dim, pad=pad) for _ in range(2)]
    cu, slots = [0], []
    for s, (new, context) in enumerate(lens):
        mine = torch.tensor([ids.pop() for _ in range(counts[s])])
        table[s, : counts[s]] = mine
        at = torch.arange(context)
        for cache in caches:
            cache[mine[at // block_size], at % block_size] = rand(gen, context, kv_heads, dim)
        cu.append(cu[-1] + new)
        slots.append((mine[at // block_size] * block_size + at % block_size)[context - new :])
    plan = AttentionPlan(tuple(cu), tuple(c for _, c in lens), table, torch.cat(slots))
    return rand(gen, cu[-1], heads, dim), caches[0], caches[1], plan, dim**-0.5


def _inputs(gen: torch.Generator) -> Iterator[Case]:
    shapes: list[tuple[str, list[tuple[int, int]], int, int, int, int, int]] = [
        ("one token", [(1, 1)], 1, 1, 2, 1, 0),
        ("decode", [(1, 1), (1, 63), (1, 129), (1, 300)], 9, 3, 64, 16, 192),
        ("decode, wide groups", [(1, 65), (1, 128)], 16, 1, 16, 4, 16),
        ("prefill", [(63, 63)], 4, 2, 8, 16, 0),
        ("chunk after prefix", [(129, 300)], 6, 2, 16, 32, 64),
        ("mix", [(1, 40), (5, 5), (1, 257), (65, 200), (2, 2)], 4, 4, 16, 5, 3),
        ("large blocks", [(3, 200), (1, 70)], 4, 2, 6, 100, 1),
        ("long chunk", [(600, 601)], 2, 1, 8, 16, 0),
    ]
    for label, lens, heads, kv_heads, dim, block_size, pad in shapes:
        args = paged_case(gen, lens, heads=heads, kv_heads=kv_heads, dim=dim, block_size=block_size, pad=pad)
        yield Case(label, args)
    q, k, v, plan, scale = paged_case(gen, [(1, 200), (70, 200)], heads=2, kv_heads=2, dim=16, block_size=16)
    yield Case("weights that vanish", (30 * q, 30 * k, v, plan, scale))


def _cost(q: torch.Tensor, k_cache: Cache, v_cache: Cache, plan: AttentionPlan, scale: float) -> Cost:
    heads, dim = q.shape[1], q.shape[2]
    keys = values_of(k_cache)
    flops = moved = 0
    for s, context in enumerate(plan.context_lens):
        new = plan.cu_q[s + 1] - plan.cu_q[s]
        flops += 4 * heads * dim * (new * context - new * (new - 1) // 2)
        moved += 2 * context * keys.shape[2] * dim * keys.element_size()
    return Cost(flops, moved + 2 * nbytes(q))


PAGED_ATTENTION = Op("paged_attention", paged_attention, _inputs, 1e-5, _cost)
