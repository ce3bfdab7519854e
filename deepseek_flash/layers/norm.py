"""Root-mean-square normalisation with the residual stream's addition."""

from __future__ import annotations

import torch
from torch import nn

from deepseek_flash.kernels.registry import Kernels
from deepseek_flash.layers.linear import empty


class RMSNorm(nn.Module):
    """Normalise the residual stream."""

    def __init__(self, kernels: Kernels, dim: int, eps: float) -> None:
        super().__init__()
        self._norm, self._add_norm = kernels.rms_norm, kernels.add_rms_norm
        self.weight, self.eps = empty(dim), eps

    def forward(self, stream: torch.Tensor, update: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """``s = stream + update`` → (norm of ``s``, ``s``), [T, dim]; no update leaves the stream as it is."""
        if update is None:
            return self._norm(stream, self.weight, self.eps), stream
        return self._add_norm(update, stream, self.weight, self.eps)
