"""Token embedding and the output head that may share its table."""

from __future__ import annotations

import torch
from torch import nn

from deepseek_flash.kernels.registry import Kernels
from deepseek_flash.layers.linear import empty


class Embedding(nn.Module):
    """ids int64 [T] → [T, dim]; as a tied head, rows [R, dim] → logits [R, vocab] with the same table."""

    def __init__(self, kernels: Kernels, vocab: int, dim: int) -> None:
        super().__init__()
        self._embedding, self._linear = kernels.embedding, kernels.linear
        self.weight = empty(vocab, dim)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self._embedding(self.weight, ids)

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        return self._linear(rows, self.weight, None)
