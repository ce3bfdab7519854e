"""Grouped-query attention over the paged cache, with what all layers of a step share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from deepseek_flash.kernels.plan import AttentionPlan
from deepseek_flash.kernels.registry import Kernels
from deepseek_flash.kv.store import KVStore
from deepseek_flash.layers.batch import ForwardBatch
from deepseek_flash.layers.linear import Linear, empty
from deepseek_flash.layers.rope import Rotary


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """Made once a step, read by every layer."""

    cos: torch.Tensor
    sin: torch.Tensor
    """[T, 1, rot] each, as ``rope`` takes them."""
    plan: AttentionPlan

    @classmethod
    def of(cls, batch: ForwardBatch, rotary: Rotary, group: int = 0) -> AttentionStep:
        cos, sin = rotary.rows(batch.positions, max(batch.context_lens))
        plan = AttentionPlan(batch.cu_q, batch.context_lens, batch.block_tables[group], batch.slots[group])
        return cls(cos, sin, plan)


class Attention(nn.Module):
    """One layer of GQA: fused q, k, v projection, optional biases, optional norm of each head of q and k.

    Caches fields ``k`` and ``v`` of cache group 0.
    """

    q_norm: nn.Parameter | None
    k_norm: nn.Parameter | None

    def __init__(
        self,
        kernels: Kernels,
        layer: int,
        *,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        qkv_bias: bool = False,
        out_bias: bool = False,
        norm_eps: float | None = None,
    ) -> None:
        super().__init__()
        self._rms_norm, self._rope_and_cache_write = kernels.rms_norm, kernels.rope_and_cache_write
        self._paged_attention = kernels.paged_attention
        self.layer, self.heads, self.kv_heads, self.head_dim = layer, heads, kv_heads, head_dim
        self.scale = head_dim**-0.5
        # Where int8 activations cost the most quality (docs/kernels.md).
        self.qkv = Linear(kernels, hidden, (heads + 2 * kv_heads) * head_dim, bias=qkv_bias, fine=True)
        self.out = Linear(kernels, heads * head_dim, hidden, bias=out_bias)
        self.norm_eps = norm_eps
        self.q_norm = None if norm_eps is None else empty(head_dim)
        self.k_norm = None if norm_eps is None else empty(head_dim)
        self.head_norms: torch.Tensor | None = None
        """[heads + kv heads, D], after loading."""

    def after_load(self) -> None:
        """One weight row a head, so that q and k are normalised together."""
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm.detach(), self.k_norm.detach()
            self.head_norms = torch.cat((q.expand(self.heads, -1), k.expand(self.kv_heads, -1)))

    def forward(self, x: torch.Tensor, step: AttentionStep, store: KVStore) -> torch.Tensor:
        """[T, hidden] → [T, hidden]."""
        qkv = self.qkv(x).view(x.shape[0], -1, self.head_dim)
        turning = self.heads + self.kv_heads
        qk, v = qkv[:, :turning], qkv[:, turning:]
        if self.norm_eps is not None:
            assert self.head_norms is not None, "forward before after_load"
            qk = self._rms_norm(qk, self.head_norms, self.norm_eps)
        k_cache, v_cache = store.cache(0, self.layer, "k"), store.cache(0, self.layer, "v")
        q = self._rope_and_cache_write(qk, v, step.cos, step.sin, k_cache, v_cache, step.plan)
        attended = self._paged_attention(q, k_cache, v_cache, step.plan, self.scale)
        out: torch.Tensor = self.out(attended.reshape(x.shape[0], -1))
        return out
