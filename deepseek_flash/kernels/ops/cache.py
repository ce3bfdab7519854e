"""Writing keys and values into the paged cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from deepseek_flash.kernels.op import Case, Cost, Op, nbytes, rand
from deepseek_flash.kernels.ops.rope import rope, tables
from deepseek_flash.kernels.plan import AttentionPlan, Cache, QuantCache

TURNED_SLOTS = 16
"""In blocks of a multiple of this, keys may lie turned: [kv heads, D, block_size], seen as any other cache."""


def cache_write(rows: torch.Tensor, cache: Cache, plan: AttentionPlan) -> None:
    """Put token t's ``rows [T, ...]`` at slot ``plan.slots[t]`` of ``cache [blocks, block_size, ...]``, in its type.

    Blocks may lie further apart than their own size. The native kernels also take keys that lie turned.
    """
    if isinstance(cache, QuantCache):
        values, scales = quantize_heads(rows, cache.group)
        cache_write(values, cache.values, plan)
        cache_write(scales, cache.scales, plan)
        return
    block_size = cache.shape[1]
    cache[plan.slots // block_size, plan.slots % block_size] = rows.to(cache.dtype)


def quantize_heads(rows: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 [..., D] → int8 [..., D] and fp16 [..., D / group]: scale = fp16(max |x| / 127) of each group of values,
    q = x / scale rounded to even, within -127..127; a scale of zero gives zeros."""
    parts = rows.reshape(*rows.shape[:-1], -1, group)
    scales = (parts.abs().amax(-1) / 127.0).half()
    wide = scales.float().unsqueeze(-1)
    q = torch.where(wide > 0, parts / wide, 0.0).round().clamp(-127, 127)
    return q.flatten(-2).to(torch.int8), scales


def cached(cache: Cache, block: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """Rows (block[i], row[i]) as fp32 [..., kv heads, D]."""
    if isinstance(cache, QuantCache):
        scales = cache.scales[block, row].float().repeat_interleave(cache.group, -1)
        return cache.values[block, row].float() * scales
    return cache[block, row].float()


def rope_and_cache_write(
    qk: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: Cache,
    v_cache: Cache,
    plan: AttentionPlan,
) -> torch.Tensor:
    """Rotate ``qk [T, heads + kv heads, D]``, cache its keys and ``v [T, kv heads, D]``, return the queries.

    ``cos``, ``sin`` as in ``rope``; caches [blocks, block_size, kv heads, D]. → [T, heads, D]
    """
    heads = qk.shape[1] - v.shape[1]
    turned = rope(qk, cos, sin)
    cache_write(turned[:, heads:], k_cache, plan)
    cache_write(v, v_cache, plan)
    return turned[:, :heads]


def blank_cache(blocks: int, block_size: int, kv_heads: int, dim: int, *, pad: int = 0) -> torch.Tensor:
    """A NaN-filled cache of one layer; ``pad`` more floats a block, as when other layers share the block."""
    block = block_size * kv_heads * dim
    flat = torch.full((blocks, block + pad), float("nan"))
    return flat[:, :block].view(blocks, block_size, kv_heads, dim)


def _plan(gen: torch.Generator, blocks: int, block_size: int, tokens: int) -> AttentionPlan:
    slots = torch.randperm(blocks * block_size, generator=gen)[:tokens]
    return AttentionPlan((0, tokens), (tokens,), torch.zeros(1, 1, dtype=torch.int64), slots)


def _write_inputs(gen: torch.Generator) -> Iterator[Case]:
    for tokens, blocks, block_size, kv_heads, dim, pad in (
        (1, 1, 1, 1, 1, 0),
        (63, 9, 16, 3, 64, 2 * 3 * 64),
        (129, 40, 4, 2, 8, 16),
        (5, 7, 3, 1, 5, 1),
    ):
        cache = blank_cache(blocks, block_size, kv_heads, dim, pad=pad)
        plan = _plan(gen, blocks, block_size, tokens)
        yield Case(f"t{tokens} bs{block_size} d{dim}", (rand(gen, tokens, kv_heads, dim), cache, plan))


def _rope_inputs(gen: torch.Generator) -> Iterator[Case]:
    for tokens, heads, kv_heads, dim, block_size, pad in (
        (1, 1, 1, 2, 1, 0),
        (1, 9, 3, 64, 16, 3 * 64),
        (63, 4, 2, 6, 5, 7),
        (129, 4, 4, 16, 4, 64),
    ):
        blocks = -(-tokens // block_size) + 2
        caches = [blank_cache(blocks, block_size, kv_heads, dim, pad=pad) for _ in range(2)]
        qkv = rand(gen, tokens, heads + 2 * kv_heads, dim)
        qk, v = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        plan = _plan(gen, blocks, block_size, tokens)
        yield Case(f"t{tokens} h{heads}/{kv_heads} d{dim}", (qk, v, *tables(gen, tokens, dim), *caches, plan))


def _write_cost(rows: torch.Tensor, cache: torch.Tensor, plan: AttentionPlan) -> Cost:
    return Cost(0, 2 * nbytes(rows) + nbytes(plan.slots))


def _rope_cost(qk: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *rest: object) -> Cost:
    return Cost(3 * qk.numel(), 2 * nbytes(qk, v) + nbytes(cos, sin))


CACHE_WRITE = Op("cache_write", cache_write, _write_inputs, 0.0, _write_cost, writes=(1,))
ROPE_AND_CACHE_WRITE = Op("rope_and_cache_write", rope_and_cache_write, _rope_inputs, 1e-6, _rope_cost, writes=(4, 5))
