"""Addressing the paged cache as one flat list of rows, which torch gathers and scatters three times faster."""

from __future__ import annotations

import torch

from deepseek_flash.kernels.cpu.pointwise import rope
from deepseek_flash.kernels.op import Impl
from deepseek_flash.kernels.plan import AttentionPlan


def flat_rows(cache: torch.Tensor, width: int) -> torch.Tensor | None:
    """``cache [blocks, block_size, ...]``, rows contiguous, as [n, width] over the same memory.

    The row of (block, row, part) has index ``block * stride(0) / width + row * row size / width + part``. None when
    blocks do not start at a multiple of ``width`` elements from one another, or rows do not lie in one piece.
    """
    per_block = cache.stride(0)
    if per_block % width or cache.stride(1) % width or not cache[0, 0].is_contiguous():
        return None
    used = (cache.shape[0] - 1) * per_block + cache.shape[1] * cache.stride(1)
    return cache.as_strided((used // width, width), (width, 1))


def cache_write(rows: torch.Tensor, cache: torch.Tensor, plan: AttentionPlan) -> None:
    width = cache[0, 0].numel()
    block_size, per_block = cache.shape[1], cache.stride(0)
    flat = flat_rows(cache, width)
    key = ("write", block_size, per_block, width)
    where = plan.scratch.get(key)
    if flat is None:
        if where is None:
            where = plan.scratch[key] = (plan.slots // block_size, plan.slots % block_size)
        cache.index_put_(where, rows)
        return
    if where is None:
        where = plan.slots // block_size * (per_block // width) + plan.slots % block_size
        plan.scratch[key] = where
    flat.index_copy_(0, where, rows.reshape(rows.shape[0], width))


def rope_and_cache_write(
    qk: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    plan: AttentionPlan,
) -> torch.Tensor:
    heads = qk.shape[1] - v.shape[1]
    turned = rope(qk, cos, sin)
    cache_write(turned[:, heads:], k_cache, plan)
    cache_write(v, v_cache, plan)
    return turned[:, :heads]


CACHE_WRITE = Impl("cache_write", "torch-cpu", cache_write)
ROPE_AND_CACHE_WRITE = Impl("rope_and_cache_write", "torch-cpu", rope_and_cache_write)
