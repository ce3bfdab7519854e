"""Linear layers, their weights kept in the form the kernels like best."""

from __future__ import annotations

import torch
from torch import nn

from deepseek_flash.kernels.ops.packed import PackedLinear
from deepseek_flash.kernels.registry import Kernels
from deepseek_flash.kernels.weights import PackedWeight


def empty(*shape: int) -> nn.Parameter:
    """A parameter without memory, to be filled by the loader."""
    return nn.Parameter(torch.empty(*shape, device="meta"), requires_grad=False)


class Linear(nn.Module):
    """``x [T, in]`` → [T, out]. Several projections of the same input are one layer, their rows one below the other.

    ``fine``: with quantised weights, take activations of 15 bits instead of 8.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, kernels: Kernels, inputs: int, outputs: int, *, bias: bool = False, fine: bool = False) -> None:
        super().__init__()
        self._linear, self._pack = kernels.linear, kernels.pack_linear
        self._packed_linear, self._bind = kernels.packed_linear, kernels.bind_packed
        self.inputs, self.outputs, self.fine = inputs, outputs, fine
        self.weight = empty(outputs, inputs)
        self.bias = empty(outputs) if bias else None
        self._parts: tuple[PackedWeight, ...] = ()
        self._wide: torch.Tensor | None = None
        self.packed: PackedLinear | None = None
        """The weights as they are stored, once loaded so."""

    def take_weight(self, parts: tuple[PackedWeight, ...]) -> None:
        """Weights that stay packed, in place of the parameter."""
        self._parts, self.weight = parts, None

    def after_load(self) -> None:
        """Put the weight into the kernels' form and drop the plain one."""
        if self._parts:
            self.packed = self._bind(self._parts, None if self.bias is None else self.bias.detach(), self.fine)
            self._parts = ()
        elif self.weight is not None:
            self._wide = self._pack(self.weight.detach())
            self.weight = None

    def weight_bytes(self) -> int:
        """Bytes of weights and bias."""
        if self.packed is not None:
            return self.packed.nbytes
        return 4 * self.outputs * (self.inputs + (self.bias is not None))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.packed is not None:
            return self._packed_linear(x, self.packed)
        assert self._wide is not None, "forward before after_load"
        return self._linear(x, self._wide, self.bias)
