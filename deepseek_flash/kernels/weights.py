"""Weights as they are kept in memory: GroupQuant (docs/kernels.md), or floats in panels.

A weight [n, k] has n outputs and k inputs. In its plain form codes, scales and offsets are tensors of their own;
packed, they are one stream of bytes in panels of 16 outputs, drawn in ``cpu/src/linear_layout.h``. Both forms hold the
same values: packing and unpacking are exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from deepseek_flash.errors import InternalError

PANEL = 16
"""Outputs of a panel."""
SUPER = 256
"""Inputs of a super-block."""
SPARE = 64
"""Readable bytes behind the packed data."""
_PIECE_VALUES = 1 << 18
"""Values that torch packs at a time."""
FLOATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

Kind = Literal["group", "float32", "float16", "bfloat16"]
Offset = Literal["zero", "min", "zeros"]


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How values are stored. ``group``: w = d q + m with q of ``bits`` bits and d, m of each ``group`` inputs."""

    kind: Kind
    bits: int = 0
    """4, 5, 6 or 8."""
    group: int = 0
    """16, 32, 64 or 128 inputs (5 bits: not 16)."""
    offset: Offset = "zero"
    """``zero``: m = -d ``zero``; ``min``: m fp16 a group; ``zeros``: m = -d z with z uint8 a group."""
    zero: int = 0
    super: bool = False
    """d = D sc and m = -M mn: D, M fp16 for 256 inputs, sc, mn int8 a group (not with ``zeros``)."""

    def __post_init__(self) -> None:
        if self.kind in FLOATS:
            return
        good = (
            self.kind == "group"
            and self.bits in (4, 5, 6, 8)
            and self.group in (16, 32, 64, 128)
            and not (self.bits == 5 and self.group == 16)
            and self.offset in ("zero", "min", "zeros")
            and 0 <= self.zero < 256
            and not (self.super and self.offset == "zeros")
        )
        if not good:
            raise InternalError(f"there is no weight format {self}")

    def padded(self, k: int) -> int:
        """Inputs rounded up to whole groups (super-blocks)."""
        unit = 1 if self.kind != "group" else SUPER if self.super else self.group
        return -(-k // unit) * unit

    @property
    def code_bytes(self) -> int:
        """Of one group of one panel."""
        return self.group * PANEL * self.bits // 8

    @property
    def head_bytes(self) -> int:
        """Before the codes of a group."""
        if self.super:
            return 32 if self.offset == "min" else 16
        return {"zero": 32, "min": 64, "zeros": 48}[self.offset]

    @property
    def super_bytes(self) -> int:
        """Before the groups of a super-block."""
        return 0 if not self.super else 64 if self.offset == "min" else 32

    def panel_bytes(self, k: int) -> int:
        """Of 16 outputs."""
        kp = self.padded(k)
        if self.kind != "group":
            return kp * PANEL * FLOATS[self.kind].itemsize
        return kp // self.group * (self.head_bytes + self.code_bytes) + (kp // SUPER * self.super_bytes)

    def packed_bytes(self, n: int, k: int) -> int:
        """Of a whole weight."""
        return -(-n // PANEL) * self.panel_bytes(k)


@dataclass(slots=True)
class PlainWeight:
    """A weight, or some rows of one, in parts. ``S`` is the number of groups, or of super-blocks, of a row."""

    format: WeightFormat
    n: int
    k: int
    codes: torch.Tensor
    """uint8 [n, padded k]; the values themselves [n, k] for float kinds"""
    scale: torch.Tensor | None = None
    """fp16 [n, S]"""
    min: torch.Tensor | None = None
    """fp16 [n, S] with offset ``min``"""
    zeros: torch.Tensor | None = None
    """uint8 [n, groups] with offset ``zeros``"""
    sub_scale: torch.Tensor | None = None
    """int8 [n, groups] with super-blocks"""
    sub_min: torch.Tensor | None = None
    """int8 [n, groups] with super-blocks and offset ``min``"""

    def rows(self, which: torch.Tensor | slice) -> PlainWeight:
        """Some of its rows."""

        def pick(t: torch.Tensor | None) -> torch.Tensor | None:
            return None if t is None else t[which]

        codes = self.codes[which]
        return PlainWeight(
            self.format,
            len(codes),
            self.k,
            codes,
            pick(self.scale),
            pick(self.min),
            pick(self.zeros),
            pick(self.sub_scale),
            pick(self.sub_min),
        )


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A weight as the kernels read it."""

    format: WeightFormat
    n: int
    k: int
    data: torch.Tensor
    """uint8 [packed bytes], 64-byte aligned, ``SPARE`` readable bytes behind it"""

    @property
    def nbytes(self) -> int:
        """Bytes of the packed data."""
        return self.data.numel()


def alloc(form: WeightFormat, n: int, k: int) -> PackedWeight:
    """A packed weight to be filled by ``pack_rows``."""
    size = form.packed_bytes(n, k)
    room = torch.empty(size + SPARE + 64, dtype=torch.uint8)
    first = -room.data_ptr() % 64
    room[first + size :].zero_()
    return PackedWeight(form, n, k, room[first : first + size])


def pack(plain: PlainWeight) -> PackedWeight:
    """The whole weight, packed."""
    out = alloc(plain.format, plain.n, plain.k)
    pack_rows(out, 0, plain)
    return out


def _panels(t: torch.Tensor) -> torch.Tensor:
    """[n, c] → [panels, c, 16], missing outputs zero, as bytes of each element: uint8 [panels, c, 16 * itemsize]."""
    n, c = t.shape
    full = torch.zeros(-(-n // PANEL) * PANEL, c, dtype=t.dtype)
    full[:n] = t
    turned = full.view(-1, PANEL, c).transpose(1, 2).contiguous()
    return turned.view(torch.uint8)


def pack_rows(packed: PackedWeight, first: int, plain: PlainWeight) -> None:
    """Fill whole panels: rows from ``first`` (a multiple of 16), as many as ``plain`` has (whole panels or the end).

    Needs room for a few copies of ``_PIECE_VALUES`` values, or of one panel.
    """
    if first % PANEL or (plain.n % PANEL and first + plain.n != packed.n) or first + plain.n > packed.n:
        raise InternalError(f"rows {first} to {first + plain.n} are no whole panels of {packed.n} outputs")
    step = max(_PIECE_VALUES // (packed.k * PANEL), 1) * PANEL
    for a in range(0, plain.n, step):
        _pack_piece(packed, first + a, plain.rows(slice(a, a + step)))


def _pack_piece(packed: PackedWeight, first: int, plain: PlainWeight) -> None:
    form, k = packed.format, packed.k
    at = first // PANEL * form.panel_bytes(k)
    count = -(-plain.n // PANEL)
    out = packed.data[at : at + count * form.panel_bytes(k)].view(count, form.panel_bytes(k))
    if form.kind != "group":
        out.copy_(_panels(plain.codes.to(FLOATS[form.kind])).reshape(count, -1))
        return
    groups, codes = form.padded(k) // form.group, _pack_codes(plain.codes, form)
    assert plain.scale is not None
    heads: list[torch.Tensor] = []
    if form.super:
        per = SUPER // form.group
        assert plain.sub_scale is not None
        heads = [_panels(plain.sub_scale)]
        if form.offset == "min":
            assert plain.sub_min is not None
            heads.append(_panels(plain.sub_min))
        records = torch.cat((*heads, codes), -1).view(count, groups // per, -1)
        tops = [_panels(plain.scale)]
        if form.offset == "min":
            assert plain.min is not None
            tops.append(_panels(plain.min))
        out.copy_(torch.cat((*tops, records), -1).reshape(count, -1))
        return
    heads = [_panels(plain.scale)]
    if form.offset != "zero":
        extra = plain.min if form.offset == "min" else plain.zeros
        assert extra is not None
        heads.append(_panels(extra))
    out.copy_(torch.cat((*heads, codes), -1).reshape(count, -1))


def _pack_codes(codes: torch.Tensor, form: WeightFormat) -> torch.Tensor:
    """uint8 [n, padded k] → [panels, groups, code bytes]."""
    n, kp = codes.shape
    full = torch.zeros(-(-n // PANEL) * PANEL, kp, dtype=torch.uint8)
    full[:n] = codes
    # [panels, 16, groups, quads, 4] → [panels, groups, quads, 64]: byte 4 o + b
    quads = full.view(-1, PANEL, kp // form.group, form.group // 4, 4).permute(0, 2, 3, 1, 4).flatten(3)
    if form.bits == 8:
        return quads.flatten(2)
    low = quads & 15
    parts = [(low[:, :, 0::2] | (low[:, :, 1::2] << 4)).flatten(2)]
    if form.bits > 4:
        each = 8 if form.bits == 5 else 4  # quads whose upper bits share 64 bytes
        width = form.bits - 4
        high = (quads >> 4).view(*quads.shape[:2], -1, each, 64)
        shifts = (torch.arange(each, dtype=torch.uint8) * width).view(1, 1, 1, each, 1)
        parts.append((high << shifts).sum(3, dtype=torch.uint8).flatten(2))
    return torch.cat(parts, -1)


def unpack(packed: PackedWeight) -> PlainWeight:
    """The parts again, in memory of their own."""
    plain = _views(packed)
    for name in ("codes", "scale", "min", "zeros", "sub_scale", "sub_min"):
        part = getattr(plain, name)
        # Of one panel with one group some need no copy to be in order, and are still the packed bytes.
        if part is not None and part.untyped_storage().data_ptr() == packed.data.untyped_storage().data_ptr():
            setattr(plain, name, part.clone(memory_format=torch.contiguous_format))
    return plain


def _views(packed: PackedWeight) -> PlainWeight:
    form, n, k = packed.format, packed.n, packed.k
    count = -(-n // PANEL)
    stream = packed.data.view(count, form.panel_bytes(k))
    if form.kind != "group":
        values = stream.view(FLOATS[form.kind]).view(count, k, PANEL).transpose(1, 2).reshape(-1, k)[:n]
        return PlainWeight(form, n, k, values.contiguous())
    groups = form.padded(k) // form.group
    plain = PlainWeight(form, n, k, torch.empty(0, dtype=torch.uint8))
    if form.super:
        blocks = stream.view(count, form.padded(k) // SUPER, -1)
        plain.scale = _column(blocks[..., :32], torch.float16, n)
        if form.offset == "min":
            plain.min = _column(blocks[..., 32:64], torch.float16, n)
        records = blocks[..., form.super_bytes :].reshape(count, groups, -1)
        plain.sub_scale = _column(records[..., :16], torch.int8, n)
        if form.offset == "min":
            plain.sub_min = _column(records[..., 16:32], torch.int8, n)
    else:
        records = stream.view(count, groups, -1)
        plain.scale = _column(records[..., :32], torch.float16, n)
        if form.offset == "min":
            plain.min = _column(records[..., 32:64], torch.float16, n)
        elif form.offset == "zeros":
            plain.zeros = _column(records[..., 32:48], torch.uint8, n)
    plain.codes = _unpack_codes(records[..., form.head_bytes :], form)[:n].contiguous()
    return plain


def _column(part: torch.Tensor, dtype: torch.dtype, n: int) -> torch.Tensor:
    """Bytes [panels, c, 16 * itemsize] → [n, c]."""
    values = part.contiguous().view(dtype)
    return values.transpose(1, 2).reshape(-1, values.shape[1])[:n].contiguous()


def _unpack_codes(part: torch.Tensor, form: WeightFormat) -> torch.Tensor:
    """[panels, groups, code bytes] → [panels * 16, padded k]."""
    count, groups = part.shape[:2]
    if form.bits == 8:
        quads = part.reshape(count, groups, form.group // 4, 64)
    else:
        two = part[..., : form.group * 8].reshape(count, groups, -1, 64)
        quads = torch.stack((two & 15, two >> 4), 3).flatten(2, 3)
        if form.bits > 4:
            each = 8 if form.bits == 5 else 4
            width = form.bits - 4
            high = part[..., form.group * 8 :].reshape(count, groups, -1, 1, 64)
            shifts = (torch.arange(each, dtype=torch.uint8) * width).view(1, 1, 1, each, 1)
            quads = quads | (((high >> shifts) & ((1 << width) - 1)).flatten(2, 3) << 4)
    by_output: torch.Tensor = quads.reshape(count, groups, -1, PANEL, 4)
    return by_output.permute(0, 3, 1, 2, 4).reshape(count * PANEL, -1)


def dequantize(plain: PlainWeight) -> torch.Tensor:
    """The values, fp32 [n, k]. d q is exact; the sum with m is rounded once."""
    form = plain.format
    if form.kind != "group":
        return plain.codes.float()
    assert plain.scale is not None
    q = plain.codes.view(plain.n, -1, form.group).float()
    scale = plain.scale.float()
    if form.super:
        assert plain.sub_scale is not None
        scale = scale.repeat_interleave(SUPER // form.group, 1) * plain.sub_scale.float()
    scale = scale.unsqueeze(-1)
    if form.offset == "min":
        assert plain.min is not None
        least = plain.min.float()
        if form.super:
            assert plain.sub_min is not None
            least = -(least.repeat_interleave(SUPER // form.group, 1) * plain.sub_min.float())
        w = q * scale + least.unsqueeze(-1)
    elif form.offset == "zeros":
        assert plain.zeros is not None
        w = (q - plain.zeros.float().unsqueeze(-1)) * scale
    else:
        w = (q - form.zero) * scale
    return w.view(plain.n, -1)[:, : plain.k]
