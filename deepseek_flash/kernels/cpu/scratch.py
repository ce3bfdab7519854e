"""Bytes of working memory that the native kernels will ask for, without weights, caches or a step."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deepseek_flash.errors import InternalError
from deepseek_flash.kernels.cpu import lib
from deepseek_flash.kernels.cpu.packer import describe
from deepseek_flash.kernels.weights import WeightFormat


@dataclass(frozen=True, slots=True)
class LinearShape:
    """A layer to be: (format, outputs, inputs) of each packed weight, and whether its activations are fine."""

    parts: tuple[tuple[WeightFormat, int, int], ...]
    fine: bool


@dataclass(frozen=True, slots=True)
class StackShape:
    """A decoder to be."""

    heads: int
    kv_heads: int
    dim: int
    hidden: int
    inner: int
    layers: tuple[tuple[LinearShape, LinearShape, LinearShape, LinearShape], ...]
    """qkv, out, gate_up, down of each."""


def _chain(shape: LinearShape) -> Any:
    """The ``flash_linear`` whose weights are not there: sizes are all that is looked at."""
    first: Any = None
    for form, n, k in reversed(shape.parts):
        made = describe(form, n, k)
        made.fine, made.data = shape.fine, 64  # not empty, and never read
        made.next = None if first is None else ctypes.pointer(first)
        first = made
    return first


def linear_scratch(shape: LinearShape, rows: int, threads: int) -> int:
    """Of ``packed_linear`` over so many rows."""
    return _sound(_library().flash_linear_scratch(ctypes.byref(_chain(shape)), rows, threads))


def sample_scratch(vocab: int, threads: int) -> int:
    """Of ``sample``."""
    return _sound(_library().flash_sample_scratch(vocab, threads))


def stack_scratch(
    stack: StackShape, new: Sequence[int], context: Sequence[int], block_size: int, dtype: int, threads: int
) -> int:
    """Of ``decoder_stack`` for sequences of ``new`` tokens each, ``context`` with those that came before."""
    cache = lib.FlashCache(dtype=dtype, block_size=block_size, kv_heads=stack.kv_heads, dim=stack.dim)
    layers = (lib.FlashLayer * len(stack.layers))()
    for place, linears in zip(layers, stack.layers, strict=True):
        for name, shape in zip(("qkv", "out", "gate_up", "down"), linears, strict=True):
            setattr(place, name, _chain(shape))
        place.cache = cache
    made = lib.FlashStack(
        layers=len(layers),
        heads=stack.heads,
        hidden=stack.hidden,
        inner=stack.inner,
        layer=ctypes.cast(layers, ctypes.POINTER(lib.FlashLayer)),
    )
    ends = [0]
    for count in new:
        ends.append(ends[-1] + count)
    cu_q, lengths = (ctypes.c_int32 * len(ends))(*ends), (ctypes.c_int32 * len(context))(*context)
    step = lib.FlashStep(
        tokens=ends[-1], sequences=len(new), cu_q=ctypes.addressof(cu_q), context=ctypes.addressof(lengths)
    )
    return _sound(_library().flash_stack_scratch(ctypes.byref(made), ctypes.byref(step), threads))


def _library() -> Any:
    loaded = lib.load()
    if loaded is None:
        raise InternalError(f"the native kernels are not there: {lib.why_missing()}")
    return loaded.functions


def _sound(size: int) -> int:
    if size < 0:
        raise InternalError(f"the native kernels refuse such shapes ({size})")
    return size
