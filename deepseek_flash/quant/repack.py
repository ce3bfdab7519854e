"""Blocks of GGML tensor types as plain GroupQuant weights, without changing a value.

``kernels.weights.dequantize`` of the result equals ``quant.formats.dequantize`` of the same bytes, bit for bit. The
kernels compute d q + m with m = -d z where these compute d (q - z): their zeros may have the other sign. The layouts
are drawn in ``quant.formats``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from deepseek_flash.kernels.weights import PlainWeight, WeightFormat

FORMATS: dict[str, WeightFormat] = {
    "F32": WeightFormat("float32"),
    "F16": WeightFormat("float16"),
    "BF16": WeightFormat("bfloat16"),
    "Q4_0": WeightFormat("group", bits=4, group=32, zero=8),
    "Q4_1": WeightFormat("group", bits=4, group=32, offset="min"),
    "Q5_0": WeightFormat("group", bits=5, group=32, zero=16),
    "Q5_1": WeightFormat("group", bits=5, group=32, offset="min"),
    "Q8_0": WeightFormat("group", bits=8, group=32, zero=128),
    "Q4_K": WeightFormat("group", bits=4, group=32, offset="min", super=True),
    "Q5_K": WeightFormat("group", bits=5, group=32, offset="min", super=True),
    "Q6_K": WeightFormat("group", bits=6, group=16, zero=32, super=True),
}
"""GGML type → the format that holds it."""

Parts = dict[str, torch.Tensor]


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """fp16 at byte ``at`` of each block: [..., 1]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16)


def _cut(x: torch.Tensor, *sizes: int) -> torch.Tensor:
    """The last dimension as several."""
    return x.reshape(*x.shape[:-1], *sizes)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [..., n] → [..., 2 n]: low nibbles, then high ones."""
    return torch.cat((packed & 15, packed >> 4), -1)


def _q4(blocks: torch.Tensor) -> Parts:
    return {"codes": _nibbles(blocks[..., 2:]), "scale": _half(blocks, 0)}


def _q4_min(blocks: torch.Tensor) -> Parts:
    return {"codes": _nibbles(blocks[..., 4:]), "scale": _half(blocks, 0), "min": _half(blocks, 2)}


def _fifth(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [..., 4] → [..., 32] of 0 or 16."""
    bits = (packed.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)) & 1
    return bits.flatten(-2) << 4


def _q5(blocks: torch.Tensor) -> Parts:
    return {"codes": _nibbles(blocks[..., 6:]) | _fifth(blocks[..., 2:6]), "scale": _half(blocks, 0)}


def _q5_min(blocks: torch.Tensor) -> Parts:
    codes = _nibbles(blocks[..., 8:]) | _fifth(blocks[..., 4:8])
    return {"codes": codes, "scale": _half(blocks, 0), "min": _half(blocks, 2)}


def _q8(blocks: torch.Tensor) -> Parts:
    return {"codes": blocks[..., 2:] ^ 128, "scale": _half(blocks, 0)}


def _k_parts(blocks: torch.Tensor) -> Parts:
    """Scales and minima of Q4_K and Q5_K (see ``formats._k_scales``)."""
    first, second, third = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), -1)
    minima = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), -1)
    return {
        "scale": _half(blocks, 0),
        "min": _half(blocks, 2),
        "sub_scale": scales.view(torch.int8),
        "sub_min": minima.view(torch.int8),
    }


def _q4_k(blocks: torch.Tensor) -> Parts:
    return {"codes": _nibbles(_cut(blocks[..., 16:], 4, 32)).flatten(-2), **_k_parts(blocks)}


def _q5_k(blocks: torch.Tensor) -> Parts:
    low = _cut(_nibbles(_cut(blocks[..., 48:], 4, 32)), 2, 32).flatten(-3, -2)
    shifts = torch.arange(8, dtype=torch.uint8).view(8, 1)
    high = ((blocks[..., 16:48].unsqueeze(-2) >> shifts) & 1) << 4
    return {"codes": (low | high).flatten(-2), **_k_parts(blocks)}


def _q6_k(blocks: torch.Tensor) -> Parts:
    low = _cut(_nibbles(_cut(blocks[..., :128], 2, 64)), 4, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(4, 1)
    high = ((_cut(blocks[..., 128:192], 2, 1, 32) >> shifts) & 3) << 4
    return {
        "codes": (low | high).flatten(-3),
        "scale": _half(blocks, 208),
        "sub_scale": blocks[..., 192:208].contiguous().view(torch.int8),
    }


_DECODERS: dict[str, Callable[[torch.Tensor], Parts]] = {
    "Q4_0": _q4,
    "Q4_1": _q4_min,
    "Q5_0": _q5,
    "Q5_1": _q5_min,
    "Q8_0": _q8,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}


def repack(kind: str, blocks: torch.Tensor, k: int) -> PlainWeight:
    """Rows of a tensor of GGML type ``kind``, uint8 [rows, blocks, bytes a block] → the same values."""
    parts = {name: part.flatten(1) for name, part in _DECODERS[kind](blocks).items()}
    return PlainWeight(FORMATS[kind], blocks.shape[0], k, parts.pop("codes"), **parts)
