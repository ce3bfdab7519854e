"""Packing weights with the C++ library, when it is there."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from deepseek_flash.errors import InternalError
from deepseek_flash.kernels.cpu import lib
from deepseek_flash.kernels.weights import PackedWeight, PlainWeight, WeightFormat, pack_rows

KINDS = {"group": 0, "float32": 1, "float16": 2, "bfloat16": 3}
OFFSETS = {"zero": 0, "min": 1, "zeros": 2}


def describe(form: WeightFormat, n: int, k: int) -> lib.FlashLinear:
    """The ``flash_linear`` of a weight, its pointers empty."""
    return lib.FlashLinear(
        kind=KINDS[form.kind],
        bits=form.bits,
        group=form.group,
        offset=OFFSETS[form.offset],
        zero=form.zero,
        super=int(form.super),
        n=n,
        k=k,
    )


def best_packer() -> Callable[[PackedWeight, int, PlainWeight], None]:
    """``weights.pack_rows``, or the same in C++ where it is there: faster alone, but loading waits for other things."""
    return pack_rows if lib.load() is None else native_pack_rows


def native_pack_rows(packed: PackedWeight, first: int, plain: PlainWeight) -> None:
    """``weights.pack_rows`` in C++."""
    library = lib.load()
    if library is None:
        raise InternalError("the native kernels are not there")
    kept = [None if t is None else t.contiguous() for t in _parts(plain)]
    status = library.functions.flash_linear_pack(
        ctypes.byref(describe(packed.format, packed.n, packed.k)),
        first,
        plain.n,
        *(None if t is None else t.data_ptr() for t in kept),
        packed.data.data_ptr(),
    )
    if status:
        raise InternalError(f"rows {first} to {first + plain.n} of {packed.n} could not be packed ({status})")


def _parts(plain: PlainWeight) -> tuple[torch.Tensor | None, ...]:
    return plain.codes, plain.scale, plain.min, plain.zeros, plain.sub_scale, plain.sub_min
