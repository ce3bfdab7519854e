"""Linear layers and embeddings whose weights stay as they are stored: GroupQuant, or floats of 16 or 32 bits.

The definition of what the native kernels compute, the quantisation of activations included (docs/kernels.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from deepseek_flash.kernels.op import Case, Cost, Op, nbytes, rand
from deepseek_flash.kernels.weights import SUPER, PackedWeight, PlainWeight, WeightFormat, dequantize, pack, unpack

FINE = 127 * 128
"""Largest whole number of fine activations: two signed bytes, the lower one of seven bits."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedLinear:
    """A layer made of one or several packed weights with the same inputs, their outputs one after the other."""

    parts: tuple[PackedWeight, ...]
    bias: torch.Tensor | None
    """fp32 [outputs]"""
    fine: bool = False
    """Whether GroupQuant parts take activations of 15 bits instead of 8."""
    native: Any = field(default=None, repr=False)
    """Belongs to the implementation that bound it."""

    @property
    def outputs(self) -> int:
        return sum(p.n for p in self.parts)

    @property
    def inputs(self) -> int:
        return self.parts[0].k

    @property
    def nbytes(self) -> int:
        """Bytes of weights and bias."""
        return sum(p.nbytes for p in self.parts) + nbytes(self.bias)


def bind_packed(parts: tuple[PackedWeight, ...], bias: torch.Tensor | None, fine: bool = False) -> PackedLinear:
    """What ``packed_linear`` takes: made once, when the weights are there."""
    return PackedLinear(parts, bias, fine)


def quantize_rows(x: torch.Tensor, group: int, levels: int = 127) -> tuple[torch.Tensor, torch.Tensor]:
    """``x`` fp32 [T, k], k padded with zeros to the group → (whole numbers up to ``levels`` [T, groups, group] fp32,
    scale [T, groups]): scale = max |x| / levels of the group, q = x * (levels / max |x|) rounded to even."""
    pad = -x.shape[1] % group
    rows = torch.nn.functional.pad(x, (0, pad)).view(x.shape[0], -1, group)
    top = rows.abs().amax(-1)
    # A number divided by a tensor is its reciprocal times the number in torch: rounded twice.
    inverse = torch.where(top > 0, torch.full_like(top, levels) / top, 0.0)
    return (rows * inverse.unsqueeze(-1)).round(), top / levels


def packed_linear(x: torch.Tensor, weight: PackedLinear) -> torch.Tensor:
    """``x [T, inputs]`` fp32 → fp32 [T, outputs], bias added.

    GroupQuant parts take x as int8, one scale a token and group (as whole numbers up to ``FINE`` where the layer is
    fine); sums over a group are exact, those over groups fp32.
    Float parts take x as it is.
    """
    y = torch.cat([_part(x, p, FINE if weight.fine else 127) for p in weight.parts], dim=-1)
    return y if weight.bias is None else y + weight.bias


def _part(x: torch.Tensor, packed: PackedWeight, levels: int) -> torch.Tensor:
    plain = unpack(packed)
    w = dequantize(plain)
    if packed.format.kind == "group":
        q, scale = quantize_rows(x, packed.format.group, levels)
        x = (q * scale.unsqueeze(-1)).flatten(1)[:, : packed.k]
    return x @ w.T


def packed_rows(weight: PackedLinear, ids: torch.Tensor) -> torch.Tensor:
    """Rows ``ids`` int64 [T] of the (dequantised) weight → fp32 [T, inputs]: a token embedding."""
    return torch.cat([dequantize(unpack(p)) for p in weight.parts])[ids]


def random_weight(gen: torch.Generator, form: WeightFormat, n: int, k: int) -> PackedWeight:
    """A valid weight with values near those of trained models."""
    if form.kind != "group":
        values = (rand(gen, n, k) / k**0.5).to(getattr(torch, form.kind))
        return pack(PlainWeight(format=form, n=n, k=k, codes=values))
    kp = form.padded(k)
    groups, scales = kp // form.group, kp // (SUPER if form.super else form.group)
    plain = PlainWeight(form, n, k, _bytes(gen, 1 << form.bits, n, kp), _halves(gen, 0.5, 1.5, n, scales))
    assert plain.scale is not None
    plain.scale /= 1 << form.bits
    if form.super:
        plain.sub_scale = _bytes(gen, 63, n, groups).view(torch.int8)
    if form.offset == "zeros":
        plain.zeros = _bytes(gen, 1 << form.bits, n, groups)
    elif form.offset == "min" and form.super:
        plain.min = _halves(gen, 0.001, 0.02, n, scales)
        plain.sub_min = _bytes(gen, 63, n, groups).view(torch.int8)
    elif form.offset == "min":
        plain.min = _halves(gen, -0.6, -0.4, n, scales)
    return pack(plain)


def _halves(gen: torch.Generator, low: float, high: float, n: int, count: int) -> torch.Tensor:
    return (low + (high - low) * torch.rand(n, count, generator=gen)).half()


def _bytes(gen: torch.Generator, top: int, n: int, count: int) -> torch.Tensor:
    return torch.randint(0, top, (n, count), generator=gen).to(torch.uint8)


FORMATS = (
    WeightFormat("group", bits=4, group=32, offset="min"),
    WeightFormat("group", bits=4, group=32, offset="zero", zero=8),
    WeightFormat("group", bits=4, group=128, offset="zeros"),
    WeightFormat("group", bits=4, group=32, offset="min", super=True),
    WeightFormat("group", bits=5, group=32, offset="zero", zero=16),
    WeightFormat("group", bits=6, group=16, offset="zero", zero=32, super=True),
    WeightFormat("group", bits=8, group=32, offset="zero", zero=128),
    WeightFormat("group", bits=8, group=64, offset="min"),
    WeightFormat("float32"),
    WeightFormat("float16"),
    WeightFormat("bfloat16"),
)
"""Formats that the inputs try."""


def _label(form: WeightFormat) -> str:
    return form.kind if form.kind != "group" else f"{form.bits}b g{form.group} {form.offset}{' super' * form.super}"


def _inputs(gen: torch.Generator) -> Iterator[Case]:
    for form in FORMATS:
        for tokens, k, n in ((1, 256, 40), (5, 512, 129), (40, 256, 16)):
            for fine in (False, True):
                layer = PackedLinear((random_weight(gen, form, n, k),), None, fine)
                yield Case(f"{_label(form)} t{tokens} k{k} n{n}{' fine' * fine}", (rand(gen, tokens, k), layer))
    parts = tuple(random_weight(gen, f, n, 256) for f, n in ((FORMATS[3], 32), (FORMATS[5], 17), (FORMATS[8], 3)))
    yield Case("three formats, bias", (rand(gen, 7, 256), PackedLinear(parts, rand(gen, 52))))
    yield Case("odd inputs", (rand(gen, 3, 75), PackedLinear((random_weight(gen, FORMATS[0], 21, 75),), rand(gen, 21))))


def _rows_inputs(gen: torch.Generator) -> Iterator[Case]:
    for form in FORMATS:
        layer = PackedLinear((random_weight(gen, form, 50, 256),), None)
        yield Case(_label(form), (layer, torch.randint(0, 50, (9,), generator=gen)))


def _bind_inputs(gen: torch.Generator) -> Iterator[Case]:
    yield Case("int4", ((random_weight(gen, FORMATS[0], 40, 64),), rand(gen, 40)))


def _cost(x: torch.Tensor, weight: PackedLinear) -> Cost:
    tokens = x.shape[0]
    return Cost(2 * tokens * weight.inputs * weight.outputs, nbytes(x) + weight.nbytes + 4 * tokens * weight.outputs)


def _rows_cost(weight: PackedLinear, ids: torch.Tensor) -> Cost:
    return Cost(0, nbytes(ids) + ids.numel() * (4 * weight.inputs + weight.nbytes // weight.outputs))


BIND_PACKED = Op("bind_packed", bind_packed, _bind_inputs, 0.0, lambda parts, bias, fine=False: Cost(0, 1))
PACKED_LINEAR = Op("packed_linear", packed_linear, _inputs, 1e-5, _cost)
PACKED_ROWS = Op("packed_rows", packed_rows, _rows_inputs, 1e-6, _rows_cost)
