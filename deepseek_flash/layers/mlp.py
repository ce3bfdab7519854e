"""The gated feed-forward layer of Llama-like models."""

from __future__ import annotations

import torch
from torch import nn

from deepseek_flash.kernels.registry import Kernels
from deepseek_flash.layers.linear import Linear


class GatedMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``, [T, hidden] → [T, hidden]; gate and up are one matrix.

    ``fine``: ``down`` takes fine activations (see ``Linear``).
    """

    def __init__(self, kernels: Kernels, hidden: int, inner: int, *, bias: bool = False, fine: bool = False) -> None:
        super().__init__()
        self._silu_mul = kernels.silu_mul
        self.gate_up = Linear(kernels, hidden, 2 * inner, bias=bias)
        self.down = Linear(kernels, inner, hidden, bias=bias, fine=fine)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self._silu_mul(self.gate_up(x)))
        return out
