"""Embedding, normalisation, rotation and gate in few torch calls, each row on its own.

torch's vector loops treat the last elements of a thread's share with scalar code. Multiplication, addition, division
and square root are correctly rounded either way; of the functions that are not, only ``exp`` is used, which goes
through a vector library for every element. ``silu`` and ``sigmoid`` do not (their bits change with the position).
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from deepseek_flash.kernels.op import Impl


def embedding(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return table.index_select(0, ids)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if weight.ndim == 1:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x, x.shape[-1:], None, eps).mul_(weight)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + residual
    return F.rms_norm(total, weight.shape, weight, eps), total


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    rot = cos.shape[-1]
    if rot != x.shape[-1]:
        return torch.cat((rope(x[..., :rot], cos, sin), x[..., rot:]), dim=-1)
    # Two halves swapped is a roll by half; not addcmul, which may round once in vector code and twice in scalar code.
    return x.roll(rot // 2, -1).mul_(sin).add_(x * cos)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    n = gate_up.shape[-1] // 2
    gate, up = gate_up[:, :n], gate_up[:, n:]
    y = gate.neg().exp_().add_(1.0)
    return torch.div(gate, y, out=y).mul_(up)


EMBEDDING = Impl("embedding", "torch-cpu", embedding)
RMS_NORM = Impl("rms_norm", "torch-cpu", rms_norm)
ADD_RMS_NORM = Impl("add_rms_norm", "torch-cpu", add_rms_norm)
ROPE = Impl("rope", "torch-cpu", rope)
SILU_MUL = Impl("silu_mul", "torch-cpu", silu_mul)
