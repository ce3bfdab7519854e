"""Quantising weights ourselves: round to nearest with scales chosen to lose least.

For every group the range is shrunk in steps and the codes that follow are compared by squared error: a group whose
extremes are outliers is better off when they are clipped. Scales and minima are fp16: weights beyond its range are an
error, and differences below 6e-8, its smallest number, are lost.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from deepseek_flash.errors import ConfigError, FormatError
from deepseek_flash.kernels.weights import PlainWeight, WeightFormat

_SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
_SUBNORMAL = 2.0**-14
"""fp16 numbers below it have fewer bits the smaller they are."""
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


def encode(weight: torch.Tensor, form: WeightFormat, name: str = "") -> PlainWeight:
    """``weight`` of any float type [n, k] in ``form`` (offset ``min`` or ``zero``, no super-blocks). FormatError, with
    the tensor's ``name``, where a weight is no finite number or its group's scale is beyond fp16."""
    n, k = weight.shape
    kp = form.padded(k)
    step = max(1, _VALUES // kp)
    pieces = [_encode(weight[a : a + step].float(), form, kp, name) for a in range(0, n, step)]
    codes, scale, least = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    return PlainWeight(form, n, k, codes, scale, least if form.offset == "min" else None)


def _encode(w: torch.Tensor, form: WeightFormat, kp: int, name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [n, kp], scales and minima fp16 [n, groups]."""
    rows = torch.nn.functional.pad(w, (0, kp - w.shape[1])).view(w.shape[0], -1, form.group)
    top = 2**form.bits - 1
    low, high = rows.amin(-1, keepdim=True), rows.amax(-1, keepdim=True)
    if not bool((torch.isfinite(low) & torch.isfinite(high)).all()):  # NaN is both the least and the largest
        raise FormatError(f"tensor {name!r}: a weight is infinite or not a number", tensor=name)
    best: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    least_error = torch.empty(0)
    for scale, start in _candidates(low, high, form):
        if best is None and not bool((torch.isfinite(scale) & torch.isfinite(start)).all()):
            raise FormatError(
                f"tensor {name!r}: weights from {low.min().item():g} to {high.max().item():g} need a scale or minimum "
                f"beyond fp16 (65504) at {form.bits} bits",
                tensor=name,
            )
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


def _candidates(
    low: torch.Tensor, high: torch.Tensor, form: WeightFormat
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Scales and what code 0 stands for, as fp16 keeps them; the whole range first."""
    top = 2**form.bits - 1

    def start(shrink: float, scale: torch.Tensor) -> torch.Tensor:
        if form.offset == "zero":
            return -form.zero * scale
        return _half(low * shrink + (1 - shrink) * (low + high) / 2)

    whole = (high - low) / top if form.offset == "min" else torch.maximum(high, -low) / (top - form.zero)
    for shrink in _SHRINKS if form.bits < 8 else (1.0,):
        scale = _half(whole * shrink)
        yield scale, start(shrink, scale)
    if bool(((whole > 0) & (whole < _SUBNORMAL)).any()):
        # Few bits are left down there: a scale that was rounded down clips what it should reach, or is zero.
        scale = _half_up(whole)
        yield scale, start(1.0, scale)


def _half_up(x: torch.Tensor) -> torch.Tensor:
    """The next fp16 number that is not below the positive ``x``."""
    half = x.half()
    above = (half.view(torch.int16) + 1).view(torch.float16)
    return torch.where(half.float() < x, above, half).float()


def _half(x: torch.Tensor) -> torch.Tensor:
    """What fp16 keeps of it."""
    return x.half().float()
