"""One table of the GGML tensor types, and their decoders to fp32.

A quantised tensor is a row of blocks; each block holds ``values`` numbers in ``nbytes`` bytes. Layouts follow the
GGML block structures (little endian); ``d`` and ``dmin`` are fp16 scales of the block:

    Q8_0  d, 32 int8                                                        w = d * q
    Q4_0  d, 16 bytes: low nibbles are values 0..15, high ones 16..31       w = d * (q - 8)
    Q4_1  d, m, 16 bytes as Q4_0                                            w = d * q + m
    Q5_0  d, 32 high bits (value i is bit i), 16 bytes as Q4_0              w = d * (q - 16)
    Q5_1  d, m, 32 high bits, 16 bytes                                      w = d * q + m
    Q4_K  d, dmin, 12 bytes of 6-bit scales and minima, 128 bytes           w = d * sc * q - dmin * mn
    Q5_K  d, dmin, 12 bytes, 32 bytes of high bits, 128 bytes               w = d * sc * q - dmin * mn
    Q6_K  128 bytes low nibbles, 64 bytes high bit pairs, 16 int8 sc, d     w = d * sc * (q - 32)

Every product before the last rounding is exact in fp32, so results are the same bits on every machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from deepseek_flash.errors import UnsupportedModel

Decoder = Callable[[torch.Tensor], torch.Tensor]
"""uint8 [blocks, nbytes] → fp32 [blocks, values]."""

_CHUNK_VALUES = 1 << 14
"""Values decoded at a time. Temporaries stay in the processor's cache, and every op stays below the 32,768 elements
from which torch splits it over threads: on a busy machine the threads' meetings, thousands of them, made opening a
model ten times slower than one thread alone."""


@dataclass(frozen=True, slots=True)
class GGMLType:
    """One tensor type of a GGUF file."""

    id: int
    name: str
    values: int
    """Numbers in a block; a tensor's row must be a whole number of blocks."""
    nbytes: int
    """Bytes of a block."""
    decode: Decoder | None = None
    """None: the type is known by name only."""
    native: torch.dtype | None = None
    """The torch type of the same bytes, for types that are plain floats."""


def _scale(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """fp16 at byte ``at`` of each block as fp32 [blocks, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [..., n] → uint8 [..., 2, n]: low nibbles, then high ones."""
    return torch.stack((packed & 15, packed >> 4), dim=-2)


def _as_floats(dtype: torch.dtype) -> Decoder:
    def decode(blocks: torch.Tensor) -> torch.Tensor:
        return blocks.contiguous().view(dtype).float()

    return decode


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[:, 2:].view(torch.int8).float().mul_(_scale(blocks, 0))


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    q = _nibbles(blocks[:, 2:]).reshape(-1, 32).float()
    return q.sub_(8.0).mul_(_scale(blocks, 0))


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    q = _nibbles(blocks[:, 4:]).reshape(-1, 32).float()
    return q.mul_(_scale(blocks, 0)).add_(_scale(blocks, 2))


def _fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [blocks, 4] → uint8 [blocks, 32] of 0 or 16: bit i of the little-endian word belongs to value i."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((packed.unsqueeze(-1) >> shifts) & 1).reshape(-1, 32) << 4


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    q = _nibbles(blocks[:, 6:]).reshape(-1, 32) | _fifth_bits(blocks[:, 2:6])
    return q.float().sub_(16.0).mul_(_scale(blocks, 0))


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    q = _nibbles(blocks[:, 8:]).reshape(-1, 32) | _fifth_bits(blocks[:, 4:8])
    return q.float().mul_(_scale(blocks, 0)).add_(_scale(blocks, 2))


def _k_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and minima of the 8 sub-blocks of Q4_K and Q5_K, multiplied out: fp32 [blocks, 8, 1] each.

    Twelve bytes hold sixteen 6-bit numbers: bytes 0-3 and 4-7 have the low six bits of scales and minima 0-3;
    bytes 8-11 the low four bits of scales (low nibble) and minima (high nibble) 4-7, whose top two bits are the
    top two bits of bytes 0-3 and 4-7.
    """
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), dim=1)
    minima = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), dim=1)
    return (
        (scales.float() * _scale(blocks, 0)).unsqueeze(-1),
        (minima.float() * _scale(blocks, 2)).unsqueeze(-1),
    )


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, minima = _k_scales(blocks)
    # 128 bytes are 4 runs of 32; the low nibbles of a run are one sub-block, the high ones the next.
    q = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32).float()
    return q.mul_(scales).sub_(minima).reshape(-1, 256)


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, minima = _k_scales(blocks)
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    # Bit s of high byte i belongs to value i of sub-block s.
    shifts = torch.arange(8, dtype=torch.uint8).view(1, 8, 1)
    high = ((blocks[:, 16:48].unsqueeze(1) >> shifts) & 1) << 4
    return (low | high).float().mul_(scales).sub_(minima).reshape(-1, 256)


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    # Two halves of 128 values. In each, 64 low bytes give nibbles for runs (0, 1) and (2, 3) of 32 values,
    # and 32 high bytes give two bits for each of the four runs.
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(1, 1, 4, 1)
    high = ((blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3) << 4
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float() * _scale(blocks, 208)
    q = (low | high).reshape(-1, 16, 16).float().sub_(32.0)
    return q.mul_(scales.unsqueeze(-1)).reshape(-1, 256)


_TABLE = (
    GGMLType(0, "F32", 1, 4, _as_floats(torch.float32), torch.float32),
    GGMLType(1, "F16", 1, 2, _as_floats(torch.float16), torch.float16),
    GGMLType(2, "Q4_0", 32, 18, _q4_0),
    GGMLType(3, "Q4_1", 32, 20, _q4_1),
    GGMLType(6, "Q5_0", 32, 22, _q5_0),
    GGMLType(7, "Q5_1", 32, 24, _q5_1),
    GGMLType(8, "Q8_0", 32, 34, _q8_0),
    GGMLType(9, "Q8_1", 32, 40),
    GGMLType(10, "Q2_K", 256, 84),
    GGMLType(11, "Q3_K", 256, 110),
    GGMLType(12, "Q4_K", 256, 144, _q4_k),
    GGMLType(13, "Q5_K", 256, 176, _q5_k),
    GGMLType(14, "Q6_K", 256, 210, _q6_k),
    GGMLType(15, "Q8_K", 256, 292),
    GGMLType(16, "IQ2_XXS", 256, 66),
    GGMLType(17, "IQ2_XS", 256, 74),
    GGMLType(18, "IQ3_XXS", 256, 98),
    GGMLType(19, "IQ1_S", 256, 50),
    GGMLType(20, "IQ4_NL", 32, 18),
    GGMLType(21, "IQ3_S", 256, 110),
    GGMLType(22, "IQ2_S", 256, 82),
    GGMLType(23, "IQ4_XS", 256, 136),
    GGMLType(24, "I8", 1, 1),
    GGMLType(25, "I16", 1, 2),
    GGMLType(26, "I32", 1, 4),
    GGMLType(27, "I64", 1, 8),
    GGMLType(28, "F64", 1, 8),
    GGMLType(29, "IQ1_M", 256, 56),
    GGMLType(30, "BF16", 1, 2, _as_floats(torch.bfloat16), torch.bfloat16),
    GGMLType(34, "TQ1_0", 256, 54),
    GGMLType(35, "TQ2_0", 256, 66),
    GGMLType(39, "MXFP4", 32, 17),
    GGMLType(40, "NVFP4", 64, 36),
)
GGML_TYPES: dict[int, GGMLType] = {t.id: t for t in _TABLE}
"""By the number a GGUF file stores."""
SUPPORTED: tuple[str, ...] = tuple(t.name for t in _TABLE if t.decode is not None)


def ggml_type(type_id: int, tensor: str) -> GGMLType:
    """The type's entry; UnsupportedModel, naming type and tensor, when it cannot be decoded."""
    found = GGML_TYPES.get(type_id)
    if found is None or found.decode is None:
        what = found.name if found else f"number {type_id}, unknown to this version"
        raise UnsupportedModel(
            f"tensor {tensor!r} has the GGML type {what}; supported: {', '.join(SUPPORTED)}. "
            f"Use a file of one of those (Q4_K_M, Q5_K_M, Q6_K and Q8_0 files are)",
            supported=SUPPORTED,
        )
    return found


def dequantize_into(data: torch.Tensor, kind: GGMLType, out: torch.Tensor) -> None:
    """Decode uint8 ``data`` (whole blocks) into the contiguous fp32 ``out``, which has as many values."""
    if kind.decode is None:
        raise UnsupportedModel(f"the GGML type {kind.name} has no decoder", supported=SUPPORTED)
    blocks, flat = data.view(-1, kind.nbytes), out.view(-1, kind.values)
    step = max(_CHUNK_VALUES // kind.values, 1)
    for start in range(0, blocks.shape[0], step):
        stop = start + step
        flat[start:stop].copy_(kind.decode(blocks[start:stop]))


def dequantize(data: torch.Tensor, kind: GGMLType, shape: tuple[int, ...]) -> torch.Tensor:
    """fp32 tensor of ``shape`` from the uint8 bytes of a tensor of type ``kind``."""
    out = torch.empty(shape, dtype=torch.float32)
    dequantize_into(data, kind, out)
    return out
