"""Token embedding and the output head that may share its table."""

from __future__ import annotations

import torch
from torch import nn

from deepseek_flash.kernels.ops.packed import PackedLinear
from deepseek_flash.kernels.registry import Kernels
from deepseek_flash.kernels.weights import PackedWeight
from deepseek_flash.layers.linear import empty


class Embedding(nn.Module):
    """ids int64 [T] → [T, dim]; as a tied head, rows [R, dim] → logits [R, vocab] with the same table (and fine
    activations: see ``Linear``)."""

    weight: nn.Parameter | None

    def __init__(self, kernels: Kernels, vocab: int, dim: int) -> None:
        super().__init__()
        self._embedding, self._linear = kernels.embedding, kernels.linear
        self._packed_rows, self._packed_linear, self._bind = (
            kernels.packed_rows,
            kernels.packed_linear,
            kernels.bind_packed,
        )
        self.weight = empty(vocab, dim)
        self.packed: PackedLinear | None = None
        """The table as it is stored, once loaded so."""

    def take_weight(self, parts: tuple[PackedWeight, ...]) -> None:
        """A table that stays packed, in place of the parameter."""
        self.packed, self.weight = self._bind(parts, None, True), None

    def weight_bytes(self) -> int:
        """Bytes of the table."""
        if self.packed is not None:
            return self.packed.nbytes
        return 0 if self.weight is None else self.weight.numel() * self.weight.element_size()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self.packed is not None:
            return self._packed_rows(self.packed, ids)
        assert self.weight is not None, "forward before the weights are loaded"
        return self._embedding(self.weight, ids)

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        if self.packed is not None:
            return self._packed_linear(rows, self.packed)
        assert self.weight is not None, "forward before the weights are loaded"
        return self._linear(rows, self.weight, None)
