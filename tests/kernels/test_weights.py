"""The packed layout, written down a second time: byte by byte, by the drawing in ``linear_layout.h``."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest
import torch

from deepseek_flash.errors import InternalError
from deepseek_flash.kernels import weights
from deepseek_flash.kernels.cpu import lib
from deepseek_flash.kernels.cpu.packer import best_packer, native_pack_rows
from deepseek_flash.kernels.weights import (
    FLOATS,
    PANEL,
    SPARE,
    SUPER,
    PackedWeight,
    PlainWeight,
    WeightFormat,
    alloc,
    pack,
    pack_rows,
    unpack,
)

GROUPED = [
    WeightFormat("group", bits=bits, group=group, offset=offset, zero=3 if offset == "zero" else 0, super=double)
    for bits, group, offset, double in product((4, 5, 6, 8), (16, 32, 64, 128), ("zero", "min", "zeros"), (False, True))
    if not (bits == 5 and group == 16) and not (double and offset == "zeros")
]
EVERY = [*GROUPED, *(WeightFormat(kind) for kind in ("float32", "float16", "bfloat16"))]
SHAPES = [(1, 1), (16, 256), (37, 200), (33, 520)]
PARTS = ("codes", "scale", "min", "zeros", "sub_scale", "sub_min")


def _label(form: WeightFormat) -> str:
    return form.kind if form.kind != "group" else f"{form.bits}b-g{form.group}-{form.offset}{'-super' * form.super}"


def any_bytes(form: WeightFormat, n: int, k: int) -> PlainWeight:
    """Every field full of whatever its type can hold."""
    gen = torch.Generator().manual_seed(n + k)

    def small(low: int, high: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randint(low, high, (n, count), generator=gen).to(dtype)

    if form.kind != "group":
        return PlainWeight(form, n, k, torch.randn(n, k, generator=gen).to(FLOATS[form.kind]))
    kp = form.padded(k)
    groups, scales = kp // form.group, kp // (SUPER if form.super else form.group)
    plain = PlainWeight(form, n, k, small(0, 1 << form.bits, kp, torch.uint8))
    plain.scale = torch.randn(n, scales, generator=gen).half()
    if form.offset == "min":
        plain.min = torch.randn(n, scales, generator=gen).half()
    if form.offset == "zeros":
        plain.zeros = small(0, 256, groups, torch.uint8)
    if form.super:
        plain.sub_scale = small(-128, 128, groups, torch.int8)
        if form.offset == "min":
            plain.sub_min = small(-128, 128, groups, torch.int8)
    return plain


def raw(t: torch.Tensor) -> np.ndarray:
    """uint8 [n, c, item]"""
    own = t.clone(memory_format=torch.contiguous_format)  # of one element, any stride is contiguous
    return own.view(-1).view(torch.uint8).view(*t.shape, t.element_size()).numpy()


def by_hand(plain: PlainWeight) -> bytes:
    """The stream, one byte after the other."""
    form, out = plain.format, bytearray()
    fields = {name: raw(t) for name in PARTS if (t := getattr(plain, name)) is not None}
    for panel in range(-(-plain.n // PANEL)):

        def column(name: str, at: int, panel: int = panel) -> bytes:
            """One element of each of the 16 outputs; outputs that are not there are zero."""
            mine = fields[name][PANEL * panel : PANEL * (panel + 1), at]
            return mine.tobytes() + bytes((PANEL - len(mine)) * mine.shape[1])

        if form.kind != "group":
            out += b"".join(column("codes", i) for i in range(plain.k))
            continue
        for g in range(form.padded(plain.k) // form.group):
            if form.super and g * form.group % SUPER == 0:
                out += column("scale", g * form.group // SUPER)
                out += column("min", g * form.group // SUPER) if form.offset == "min" else b""
            heads = ("sub_scale", "sub_min") if form.super else ("scale", "min")
            out += column(heads[0], g)
            out += column(heads[1], g) if form.offset == "min" else b""
            out += column("zeros", g) if form.offset == "zeros" else b""
            # One input of all outputs: inputs[i][o]
            out += codes([list(column("codes", g * form.group + i)) for i in range(form.group)], form.bits)
    return bytes(out)


def codes(inputs: list[list[int]], bits: int) -> bytes:
    """Codes of a group: four neighbouring inputs of an output stand together."""
    out = bytearray()
    size = len(inputs)

    def each(step: int, byte: object) -> None:
        for first in range(0, size, step):
            for o in range(PANEL):
                for b in range(4):
                    out.append(byte(first + b, o))  # type: ignore[operator]

    if bits == 8:
        each(4, lambda i, o: inputs[i][o])
        return bytes(out)
    each(8, lambda i, o: inputs[i][o] & 15 | (inputs[i + 4][o] & 15) << 4)
    if bits == 5:
        each(32, lambda i, o: sum((inputs[i + 4 * j][o] >> 4 & 1) << j for j in range(8)))
    if bits == 6:
        each(16, lambda i, o: sum((inputs[i + 4 * j][o] >> 4 & 3) << 2 * j for j in range(4)))
    return bytes(out)


def same(a: PlainWeight, b: PlainWeight) -> bool:
    """Equal bytes: not-a-number is equal to itself, zeros of either sign are not."""
    pairs = [(getattr(a, name), getattr(b, name)) for name in PARTS]
    return all(
        (x is None and y is None)
        or (x is not None and y is not None and x.dtype == y.dtype and np.array_equal(raw(x), raw(y)))
        for x, y in pairs
    )


@pytest.mark.parametrize("form", EVERY, ids=_label)
def test_bytes_are_those_of_the_drawing(form: WeightFormat) -> None:
    for n, k in SHAPES:
        plain = any_bytes(form, n, k)
        packed = pack(plain)
        assert packed.data.numpy().tobytes() == by_hand(plain), (n, k)
        assert packed.nbytes == form.packed_bytes(n, k)
        assert same(unpack(packed), plain)


@pytest.mark.parametrize("form", EVERY, ids=_label)
def test_every_packer_writes_every_byte_in_any_pieces(form: WeightFormat) -> None:
    packers = [pack_rows, best_packer()] if lib.load() is None else [pack_rows, best_packer(), native_pack_rows]
    for n, k in SHAPES:
        plain = any_bytes(form, n, k)
        want = pack(plain).data
        for packer in packers:
            for cuts in ((0, n), (0, *range(16, n, 16), n)):
                packed = alloc(form, n, k)
                packed.data.fill_(0xAA)
                for first, last in reversed(list(pairwise(cuts))):
                    packer(packed, first, plain.rows(slice(first, last)))
                assert torch.equal(packed.data, want), (n, k, cuts)


@pytest.mark.parametrize("form", EVERY, ids=_label)
def test_data_is_aligned_with_spare_bytes_behind(form: WeightFormat) -> None:
    for n, k in SHAPES:
        data = alloc(form, n, k).data
        assert data.data_ptr() % 64 == 0
        assert data.untyped_storage().nbytes() - data.storage_offset() - data.numel() >= SPARE


@pytest.mark.parametrize("form", EVERY, ids=_label)
def test_unpacked_parts_own_their_memory(form: WeightFormat) -> None:
    """Also where one panel with one group would let them be views: who writes to them must not change the weight."""
    for n, k in ((16, 16), (1, 1), (16, form.group or 1)):
        packed = pack(any_bytes(form, n, k))
        before = packed.data.clone()
        plain = unpack(packed)
        for name in PARTS:
            part = getattr(plain, name)
            if part is not None:
                part.view(-1).view(torch.uint8).fill_(0x55)
        assert torch.equal(packed.data, before)


def test_torch_packs_some_panels_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its temporaries are copies of what it packs, several of them."""
    form = WeightFormat("group", bits=6, group=16, offset="min", super=True)
    plain = any_bytes(form, 77, 300)
    want, sizes, piece = pack(plain).data, [], weights._pack_piece

    def noted(packed: PackedWeight, first: int, some: PlainWeight) -> None:
        sizes.append(some.n)
        piece(packed, first, some)

    monkeypatch.setattr(weights, "_pack_piece", noted)
    for most, expected in ((2 * PANEL * 300, [32, 32, 13]), (1, [16, 16, 16, 16, 13]), (1 << 18, [77])):
        sizes.clear()
        monkeypatch.setattr(weights, "_PIECE_VALUES", most)
        assert torch.equal(pack(plain).data, want)
        assert sizes == expected


@pytest.mark.parametrize(
    ("first", "rows"), [(8, 16), (0, 8), (16, 32), (32, 7)], ids=["odd start", "odd end", "past the end", "far past"]
)
def test_rows_that_are_no_whole_panels_are_refused(first: int, rows: int) -> None:
    form = WeightFormat("group", bits=4, group=32, offset="min")
    plain = any_bytes(form, 64, 64)
    packed = alloc(form, 37, 64)
    for packer in {pack_rows, best_packer()}:
        with pytest.raises(InternalError, match=f"rows {first} to {first + rows}"):
            packer(packed, first, plain.rows(slice(0, rows)))


@pytest.mark.parametrize(
    "fields",
    [
        {"bits": 3},
        {"bits": 5, "group": 16},
        {"group": 48},
        {"offset": "both"},
        {"zero": 256},
        {"offset": "zeros", "super": True},
        {"kind": "float64"},
    ],
)
def test_formats_that_do_not_exist_cannot_be_named(fields: dict[str, object]) -> None:
    with pytest.raises(InternalError, match="no weight format"):
        WeightFormat(**{"kind": "group", "bits": 4, "group": 32, **fields})  # type: ignore[arg-type]
