"""Linear layers, their weights kept in the form the kernels like best."""

from __future__ import annotations

import torch
from torch import nn

from deepseek_flash.kernels.registry import Kernels


def empty(*shape: int) -> nn.Parameter:
    """A parameter without memory, to be filled by the loader."""
    return nn.Parameter(torch.empty(*shape, device="meta"), requires_grad=False)


class Linear(nn.Module):
    """``x [T, in]`` → [T, out]. Several projections of the same input are one layer, their rows one below the other."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, kernels: Kernels, inputs: int, outputs: int, *, bias: bool = False) -> None:
        super().__init__()
        self._linear, self._pack = kernels.linear, kernels.pack_linear
        self.inputs, self.outputs = inputs, outputs
        self.weight = empty(outputs, inputs)
        self.bias = empty(outputs) if bias else None
        self._packed: torch.Tensor | None = None

    def after_load(self) -> None:
        """Pack the weight and drop the plain one."""
        if self.weight is not None:
            self._packed = self._pack(self.weight.detach())
            self.weight = None

    def weight_bytes(self) -> int:
        return 4 * self.outputs * (self.inputs + (self.bias is not None))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self._packed is not None, "forward before after_load"
        return self._linear(x, self._packed, self.bias)
