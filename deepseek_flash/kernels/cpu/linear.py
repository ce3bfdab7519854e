"""Linear layers through oneDNN, whose result for a row does not depend on how many rows come with it.

BLAS picks its kernel, and with it the order of summation, by the number of rows. oneDNN's inner product gives every
row the same bits from two rows on (measured; ``probe.rows_are_invariant`` checks this machine), so a lone row is
computed twice. Weights packed into oneDNN's own layout are read 10 to 30 % faster; a plain weight, as of a tied
embedding, gives the same bits.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from deepseek_flash.kernels.op import Impl

_ONEDNN_OPS = ("_reorder_linear_weight", "_linear_pointwise")


def onednn_missing() -> str | None:
    """Why oneDNN's linear cannot be used here, or None."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return "this torch is built without oneDNN"
    missing = [name for name in _ONEDNN_OPS if not hasattr(torch.ops.mkldnn, name)]
    return f"this torch has no mkldnn.{missing[0]}" if missing else None


def pack_linear(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
    return packed


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    y: torch.Tensor
    if x.shape[0] == 1:
        y = torch.ops.mkldnn._linear_pointwise(x.expand(2, -1), weight, bias, "none", [], "")
        return y[:1]
    y = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return y


def blas_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return F.linear(x, weight, bias)


PACK_LINEAR = Impl("pack_linear", "onednn", pack_linear, onednn_missing)
LINEAR = Impl("linear", "onednn", linear, onednn_missing)
BLAS_LINEAR = Impl("linear", "blas", blas_linear, note="rows are not bit-invariant")
