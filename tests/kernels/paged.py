"""Caches of every type and plans over them, for tests of kernels."""

from __future__ import annotations

import random

import torch

from deepseek_flash.kernels.ops.cache import quantize_heads
from deepseek_flash.kernels.plan import AttentionPlan, Cache, QuantCache
from deepseek_flash.kv.spec import CacheSpec, Field, Group, Order
from deepseek_flash.kv.store import KVStore

DTYPES = ("float32", "float16", "bfloat16", "int8")


def stored(cache: torch.Tensor, dtype: str) -> Cache:
    """The same rows in another type, unused ones (NaN) still no numbers, blocks further apart than their size."""
    if dtype == "int8":
        dim = cache.shape[-1]
        group = next((g for g in (64, 32, 16) if dim % g == 0), dim)
        values, scales = quantize_heads(cache.nan_to_num(0.0), group)
        scales[torch.isnan(cache[..., 0])] = float("nan")
        return QuantCache(values, scales)
    base = torch.full((cache.shape[0], cache.shape[1] + 1, *cache.shape[2:]), float("nan"))
    base[:, :-1] = cache
    return base.to(getattr(torch, dtype))[:, :-1]


def lying(cache: Cache, order: Order) -> Cache:
    """The same rows in blocks of another order, as the engine's own store lays them."""
    if isinstance(cache, QuantCache):
        return QuantCache(_lying(cache.values, order), _lying(cache.scales, order))
    return _lying(cache, order)


def _lying(rows: torch.Tensor, order: Order) -> torch.Tensor:
    blocks, size, heads, dim = rows.shape
    spec = CacheSpec(size, (Group("kv", "rows", (Field("x", 0, (heads, dim), str(rows.dtype)[6:], order),)),))
    return KVStore(spec, (blocks,), "cpu").view(0, 0, "x").copy_(rows)


def pair(k: Cache, v: Cache, turned: bool) -> tuple[Cache, Cache]:
    """Keys and values, in the order that the native kernels read fastest or as they are."""
    return (lying(k, "turned"), lying(v, "heads")) if turned else (k, v)


def copied(cache: Cache) -> Cache:
    """One that may be written to, its blocks as far apart as before."""
    if isinstance(cache, QuantCache):
        return QuantCache(_copied(cache.values), _copied(cache.scales))
    return _copied(cache)


def _copied(rows: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(rows.shape, rows.stride(), dtype=rows.dtype).copy_(rows)


def tensors_of(cache: Cache) -> list[torch.Tensor]:
    return [cache.values, cache.scales] if isinstance(cache, QuantCache) else [cache]


def random_plan(
    rng: random.Random, lens: list[tuple[int, int]], block_size: int, *, share: bool
) -> tuple[AttentionPlan, torch.Tensor]:
    """A plan for sequences of (new tokens, context), blocks scattered; with ``share`` some begin with blocks of an
    earlier one. Also bool [blocks, block_size]: the rows that belong to a token."""
    counts = [-(-context // block_size) for _, context in lens]
    total = sum(counts) + 2
    ids = rng.sample(range(total), total)
    table = torch.zeros(len(lens), max(counts) + rng.choice((0, 2)), dtype=torch.int64)
    used = torch.zeros(total, block_size, dtype=torch.bool)
    cu, slots = [0], []
    for s, (new, context) in enumerate(lens):
        mine = torch.tensor([ids.pop() for _ in range(counts[s])])
        if share and s:
            other = rng.randrange(s)
            # Whole blocks that hold tokens of both from before this step.
            most = min(context - new, lens[other][1] - lens[other][0]) // block_size
            taken = rng.randint(0, most)
            mine[:taken] = table[other, :taken]
        table[s, : counts[s]] = mine
        at = torch.arange(context)
        used[mine[at // block_size], at % block_size] = True
        cu.append(cu[-1] + new)
        slots.append((mine[at // block_size] * block_size + at % block_size)[context - new :])
    return AttentionPlan(tuple(cu), tuple(c for _, c in lens), table, torch.cat(slots)), used


def random_cache(
    gen: torch.Generator, used: torch.Tensor, kv_heads: int, dim: int, dtype: str, size: float = 1.0
) -> Cache:
    """Normal numbers in the used rows."""
    cache = torch.full((*used.shape, kv_heads, dim), float("nan"))
    cache[used] = size * torch.randn(int(used.sum()), kv_heads, dim, generator=gen)
    return stored(cache, dtype)
