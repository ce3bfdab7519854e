"""Where the tokens of one step sit in the paged cache. Made once a step, read by every layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """``T`` tokens of ``S`` sequences in one ``rows`` group with one row a token.

    The last ``cu_q[s + 1] - cu_q[s]`` tokens of sequence s's context are the ones computed in this step.
    """

    cu_q: tuple[int, ...]
    """[S + 1] token offsets of the sequences."""
    context_lens: tuple[int, ...]
    """[S] tokens of each sequence after this step."""
    block_table: torch.Tensor
    """int64 [S, most blocks]: block of positions ``i * block_size ...``; entries past the context are not read."""
    slots: torch.Tensor
    """int64 [T], block * block_size + row of each token."""
    scratch: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    """Belongs to the implementations: indices they derive once and use in every layer."""


@dataclass(frozen=True, slots=True)
class QuantCache:
    """Keys or values of one layer as int8, with a scale for every ``group`` values of a head."""

    values: torch.Tensor
    """int8 [blocks, block_size, kv heads, D]"""
    scales: torch.Tensor
    """fp16 [blocks, block_size, kv heads, D / group]"""

    @property
    def group(self) -> int:
        return self.values.shape[-1] // self.scales.shape[-1]


Cache = torch.Tensor | QuantCache
"""Keys or values of one layer; a tensor is fp32, fp16 or bf16 [blocks, block_size, kv heads, D]."""
