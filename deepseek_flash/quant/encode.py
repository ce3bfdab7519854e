"""Quantising weights ourselves: round to nearest with scales chosen to lose least.

For every group the range is shrunk in steps and the codes that follow are compared by squared error: a group whose
extremes are outliers is better off when they are clipped.
"""

from __future__ import annotations

import torch

from deepseek_flash.errors import ConfigError
from deepseek_flash.kernels.weights import PlainWeight, WeightFormat

_SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
_VALUES = 1 << 20
"""Values encoded at a time."""


def format_of(name: str, group: int = 32) -> WeightFormat:
    """The format that ``quantize="int4"`` or ``"int8"`` stands for: 4 bits with a minimum, 8 bits around zero."""
    if group not in (32, 64, 128):
        raise ConfigError(f"group={group}: must be 32, 64 or 128", field="group", value=group, allowed="32, 64, 128")
    if name == "int4":
        return WeightFormat("group", bits=4, group=group, offset="min")
    if name == "int8":
        return WeightFormat("group", bits=8, group=group, zero=128)
    raise ConfigError(
        f"quantize={name!r}: must be 'int4' or 'int8'", field="quantize", value=name, allowed="int4, int8"
    )


def encode(weight: torch.Tensor, form: WeightFormat) -> PlainWeight:
    """``weight`` of any float type [n, k] in ``form`` (offset ``min`` or ``zero``, no super-blocks)."""
    n, k = weight.shape
    kp = form.padded(k)
    step = max(1, _VALUES // kp)
    pieces = [_encode(weight[a : a + step].float(), form, kp) for a in range(0, n, step)]
    codes, scale, least = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    return PlainWeight(form, n, k, codes, scale, least if form.offset == "min" else None)


def _encode(w: torch.Tensor, form: WeightFormat, kp: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [n, kp], scales and minima fp16 [n, groups]."""
    rows = torch.nn.functional.pad(w, (0, kp - w.shape[1])).view(w.shape[0], -1, form.group)
    top = 2**form.bits - 1
    low, high = rows.amin(-1, keepdim=True), rows.amax(-1, keepdim=True)
    best: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    least_error = torch.empty(0)
    for shrink in _SHRINKS if form.bits < 8 else (1.0,):
        if form.offset == "min":
            scale = _half((high - low) * shrink / top)
            start = _half(low * shrink + (1 - shrink) * (low + high) / 2)
        else:
            scale = _half(torch.maximum(high, -low) * shrink / (top - form.zero))
            start = -form.zero * scale
        codes = torch.where(scale > 0, (rows - start) / scale, 0.0).round().clamp(0, top)
        if form.offset == "zero":
            codes = torch.where(scale > 0, codes, float(form.zero))
        error = (codes * scale + start - rows).square().sum(-1, keepdim=True)
        if best is None:
            best, least_error = (codes, scale, start), error
        else:
            better = error < least_error
            best = tuple(torch.where(better, new, old) for new, old in zip((codes, scale, start), best, strict=True))  # type: ignore[assignment]
            least_error = torch.minimum(error, least_error)
    assert best is not None
    codes, scale, start = best
    return codes.flatten(1).to(torch.uint8), scale.squeeze(-1).half(), start.squeeze(-1).half()


def _half(x: torch.Tensor) -> torch.Tensor:
    """What fp16 keeps of it."""
    return x.half().float()
