"""The C++ linear kernels: random shapes and formats against the reference, instruction sets and rows bit for bit."""

from __future__ import annotations

import ctypes
import itertools
import random
from collections.abc import Iterator
from itertools import product

import pytest
import torch

from deepseek_flash.kernels.cpu import lib
from deepseek_flash.kernels.cpu.native import Native
from deepseek_flash.kernels.cpu.packer import describe, native_pack_rows
from deepseek_flash.kernels.ops.packed import FORMATS, PackedLinear, packed_linear, packed_rows, random_weight
from deepseek_flash.kernels.weights import WeightFormat, alloc, dequantize, pack, unpack

LIBRARY = lib.load()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason=f"no native kernels: {lib.why_missing()}")

GROUPED = [
    WeightFormat("group", bits=bits, group=group, offset=offset, zero=1 << (bits - 1), super=double)
    for bits, group, offset, double in product((4, 5, 6, 8), (16, 32, 64, 128), ("zero", "min", "zeros"), (False, True))
    if not (bits == 5 and group == 16) and not (double and offset == "zeros")
]
EVERY = [*GROUPED, *FORMATS[-3:]]


@pytest.fixture(autouse=True)
def best_isa() -> Iterator[None]:
    yield
    assert LIBRARY is not None
    LIBRARY.functions.flash_use_isa(None)


def _use(isa: str) -> None:
    assert LIBRARY is not None
    assert LIBRARY.functions.flash_use_isa(isa.encode()) == 0


def _label(form: WeightFormat) -> str:
    return form.kind if form.kind != "group" else f"{form.bits}b-g{form.group}-{form.offset}{'-super' * form.super}"


@pytest.mark.parametrize("form", EVERY, ids=_label)
def test_packing_is_exact_and_native_packing_the_same(form: WeightFormat) -> None:
    gen = torch.Generator().manual_seed(1)
    for n, k in ((1, 256), (16, 256), (37, 512), (50, 300 if form.kind == "group" else 77)):
        packed = random_weight(gen, form, n, k)
        plain = unpack(packed)
        assert torch.equal(pack(plain).data, packed.data)
        native = alloc(form, n, k)
        cut = n // 32 * 16
        if cut:
            native_pack_rows(native, 0, plain.rows(slice(0, cut)))
        native_pack_rows(native, cut, plain.rows(slice(cut, None)))
        assert torch.equal(native.data, packed.data)
        assert describe(form, n, k).n == n
        assert LIBRARY is not None
        assert LIBRARY.functions.flash_linear_bytes(ctypes.byref(describe(form, n, k))) == packed.nbytes


@pytest.mark.parametrize("form", EVERY, ids=_label)
def test_equals_reference_on_every_instruction_set(form: WeightFormat) -> None:
    """Random shapes, rows on both sides of every block size; all instruction sets give the same bits."""
    gen, rng = torch.Generator().manual_seed(2), random.Random(2)
    assert LIBRARY is not None
    for rows in (1, 3, 8, 9, 21):
        n, k = rng.randint(1, 90), rng.randint(1, 600)
        layer = PackedLinear((random_weight(gen, form, n, k),), torch.randn(n, generator=gen), fine=rows % 2 == 1)
        x = torch.randn(rows, k, generator=gen) * 3
        want = packed_linear(x, layer)
        outs = []
        for isa in LIBRARY.isas:
            _use(isa)
            outs.append(Native(2).packed_linear(x, layer))
        assert (outs[0] - want).abs().max() <= 2e-5 * want.abs().max(), (n, k)
        for isa, out in zip(LIBRARY.isas, outs, strict=True):
            assert torch.equal(out, outs[0]), isa


@pytest.mark.parametrize("fine", [False, True])
@pytest.mark.parametrize("form", EVERY, ids=_label)
def test_a_row_is_the_same_alone_and_in_a_crowd(form: WeightFormat, fine: bool) -> None:
    gen = torch.Generator().manual_seed(3)
    layer = PackedLinear((random_weight(gen, form, 70, 512),), None, fine)
    x = torch.randn(300, 512, generator=gen)
    one, three = Native(1), Native(3)
    full = three.packed_linear(x, layer)
    for rows in (1, 2, 5, 8, 17, 257):
        assert torch.equal(one.packed_linear(x[:rows], layer), full[:rows])
        assert torch.equal(three.packed_linear(x[-rows:], layer), full[-rows:])


def test_every_number_of_rows_gives_a_row_its_own_bits() -> None:
    """Tiles are cut by how many rows there are; 12, 16, 28, 36 and 40 end in other tiles than their neighbours."""
    gen = torch.Generator().manual_seed(21)
    for form in (FORMATS[0], next(f for f in FORMATS if f.super), next(f for f in FORMATS if f.group == 128)):
        layer = Native(1).bind_packed((random_weight(gen, form, 37, 288),), torch.randn(37, generator=gen))
        x = torch.randn(64, 288, generator=gen)
        alone = torch.cat([Native(1).packed_linear(row[None], layer) for row in x])
        for rows in range(1, 65):
            assert torch.equal(Native(2).packed_linear(x[-rows:], layer), alone[-rows:]), (form, rows)


@pytest.mark.parametrize("form", EVERY, ids=_label)
def test_rows_of_a_table_are_its_values(form: WeightFormat) -> None:
    gen = torch.Generator().manual_seed(4)
    layer = PackedLinear(tuple(random_weight(gen, f, 40, 256) for f in (form, FORMATS[0])), None)
    ids = torch.tensor([0, 39, 40, 79, 17])
    table = torch.cat([dequantize(unpack(p)) for p in layer.parts])
    assert torch.allclose(Native(1).packed_rows(layer, ids), table[ids], rtol=1e-6, atol=1e-7)
    assert torch.equal(packed_rows(layer, ids), table[ids])


def test_numbers_that_are_none_stay_visible() -> None:
    """NaN and infinity in a row make that row's outputs NaN, and no other row's."""
    gen = torch.Generator().manual_seed(5)
    layer = PackedLinear((random_weight(gen, FORMATS[0], 20, 64),), None)
    x = torch.randn(4, 64, generator=gen)
    clean = Native(1).packed_linear(x, layer)
    for bad in (float("nan"), float("inf"), float("-inf")):
        y = x.clone()
        y[1, 7] = bad
        out = Native(1).packed_linear(y, layer)
        assert torch.isnan(out[1]).all()
        assert torch.equal(out[[0, 2, 3]], clean[[0, 2, 3]])


def test_extreme_weights_do_not_overflow() -> None:
    """All codes at their top and activations at ±127: the largest integer sums there are."""
    assert LIBRARY is not None
    for form, fine in itertools.product(GROUPED, (False, True)):
        gen = torch.Generator().manual_seed(6)
        plain = unpack(random_weight(gen, form, 16, 512))
        plain.codes.fill_((1 << form.bits) - 1)
        layer = PackedLinear((pack(plain),), None, fine)
        x = torch.cat((torch.ones(1, 512), -torch.ones(1, 512), torch.ones(1, 512) * (1 - 2 * (torch.arange(512) % 2))))
        want = packed_linear(x, layer)
        for isa in LIBRARY.isas:
            _use(isa)
            got = Native(1).packed_linear(x, layer)
            assert (got - want).abs().max() <= 1e-4 * want.abs().max(), (form, isa)


@pytest.mark.parametrize(
    "over",
    [{"bits": 3}, {"group": 48}, {"n": 0}, {"k": -1}, {"offset": 7}, {"kind": 9}, {"super": 1, "offset": 2}],
)
def test_impossible_weights_are_refused(over: dict[str, int]) -> None:
    assert LIBRARY is not None
    w = describe(FORMATS[0], 16, 64)
    for name, value in over.items():
        setattr(w, name, value)
    assert LIBRARY.functions.flash_linear_bytes(ctypes.byref(w)) < 0
    w.data = 64
    assert LIBRARY.functions.flash_linear_scratch(ctypes.byref(w), 1, 1) < 0
