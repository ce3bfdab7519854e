"""The ragged batch of one step, as tensors. Made by the runner, read by models and layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """``T`` tokens of ``S`` sequences, sequence after sequence; ``R`` rows want logits."""

    token_ids: torch.Tensor
    """int64 [T]"""
    positions: torch.Tensor
    """int64 [T], position of each token in its sequence."""
    cu_q: tuple[int, ...]
    """[S + 1] host ints: sequence s owns tokens cu_q[s] .. cu_q[s + 1]."""
    context_lens: tuple[int, ...]
    """[S] host ints: tokens of each sequence after this step."""
    block_tables: tuple[torch.Tensor, ...]
    """Per group: int64 [S, most blocks], padded with 0."""
    slots: tuple[torch.Tensor, ...]
    """Per group: int64 [T], block * rows_per_block + row, for groups with one row a token; else empty."""
    logits_rows: torch.Tensor
    """int64 [R], indices into the T tokens."""

    @property
    def device(self) -> torch.device:
        return self.token_ids.device

    @property
    def sequences(self) -> int:
        return len(self.context_lens)
