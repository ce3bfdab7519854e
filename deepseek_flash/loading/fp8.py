"""FP8 checkpoints as DeepSeek publishes them: 8-bit floats with a scale for every block of a matrix, read as bf16.

A layer [n outputs, k inputs] is ``weight`` F8_E4M3 [n, k] and ``weight_scale_inv`` [ceil(n / N), ceil(k / K)] with
blocks of N x K values (``weight_block_size``, 128 x 128), those at the edges smaller:

                 K          K       rest
            +----------+----------+----+
          N |  s[0,0]  |  s[0,1]  |    |      w[i, j] = weight[i, j] * s[i / N, j / K]
            +----------+----------+----+
       rest |  s[1,0]  |  s[1,1]  |    |
            +----------+----------+----+

Despite its name the scale is what to multiply with. It is a float, or with ``scale_fmt: ue8m0`` a power of two: as
one (F32, V3.1), or as the byte of its exponent (F8_E8M0, U8), 2^(b - 127). No kernel here computes in FP8: values are
rounded to bf16, as DeepSeek's own conversion does, which is exact for scales that are powers of two.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import Any

import torch

from deepseek_flash.errors import CheckpointError, FormatError, UnsupportedModel
from deepseek_flash.kernels.weights import PlainWeight, WeightFormat
from deepseek_flash.loading.safetensors import FLOATS, SafetensorsFolder

_LOG = logging.getLogger("deepseek_flash.loading")

SCALE = "_scale_inv"
"""What a weight's name is followed by in the name of its scales."""
_PIECE_VALUES = 1 << 20


@dataclass(frozen=True, slots=True)
class Fp8Config:
    """What ``quantization_config`` says, checked."""

    block: tuple[int, int]
    """Outputs and inputs that share a scale."""
    powers: bool
    """Scales are powers of two (``ue8m0``)."""


def read_fp8_config(config: dict[str, Any], where: str) -> Fp8Config:
    """The folder's ``quantization_config``; UnsupportedModel, by name, for what does not load."""
    given = config["quantization_config"]

    def refuse(key: str, *allowed: object) -> UnsupportedModel:
        return UnsupportedModel(
            f"{where}: an fp8 quantization_config with {key}={str(given.get(key))[:100]!r} does not load; those with "
            f"{', '.join(map(str, allowed))} do",
            architecture=str(config.get("architectures", ""))[:100],
            supported=tuple(map(str, allowed)),
        )

    if str(given.get("fmt", "e4m3")).lower() not in ("e4m3", "float8_e4m3fn"):
        raise refuse("fmt", "e4m3")
    if str(given.get("activation_scheme", "dynamic")) != "dynamic":
        raise refuse("activation_scheme", "dynamic")
    scale_format = str(given.get("scale_fmt") or "float").lower()
    if scale_format not in ("float", "float32", "ue8m0"):
        raise refuse("scale_fmt", "none", "ue8m0")
    block = given.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or not all(type(b) is int and 0 < b < 1 << 31 for b in block):
        raise refuse("weight_block_size", "[outputs, inputs], such as [128, 128]")
    return Fp8Config((block[0], block[1]), scale_format == "ue8m0")


def powers_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """E8M0 bytes as fp32: 2^(b - 127); 255 is not a number."""
    bits = exponents.to(torch.int32) << 23  # an fp32 with nothing but its exponent
    bits[exponents == 0] = 1 << 22  # 2^-127 is subnormal
    bits[exponents == 255] = 0x7FC00000
    return bits.view(torch.float32)


class Fp8Folder:
    """An opened FP8 folder under the names of the unquantised model. Satisfies ``TensorSource``; safe from any
    thread."""

    kind = "safetensors"

    def __init__(self, folder: SafetensorsFolder) -> None:
        self._folder, self.path = folder, folder.path
        self.config, self.generation_config = folder.config, folder.generation_config
        self.metadata: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._said = False
        self._scales: dict[str, torch.Tensor] = {}
        try:
            self.quantised = read_fp8_config(folder.config, str(folder.path / "config.json"))
            stored = folder.names()
            present = set(stored)
            self._weights = [name for name in stored if folder.dtype(name) == "F8_E4M3"]
            missing = [f"{name}{SCALE}" for name in self._weights if f"{name}{SCALE}" not in present]
            if missing:
                raise CheckpointError(f"{folder.path}: FP8 weights have no scales", missing=missing)
            for name in self._weights:
                self._check(name)
            scales = {f"{name}{SCALE}" for name in self._weights}
            self._names = [name for name in stored if name not in scales]
        except BaseException:
            folder.close()
            raise

    def _check(self, name: str) -> None:
        """Types and shapes of a weight and its scales; their values are looked at when they are read."""
        shape, scale = self._folder.shape(name), f"{name}{SCALE}"
        if len(shape) != 2 or 0 in shape:
            raise self._bad(name, f"shape {list(shape)} is no matrix")
        want = tuple(-(-size // block) for size, block in zip(shape, self.quantised.block, strict=True))
        if self._folder.shape(scale) != want:
            raise self._bad(
                scale,
                f"shape {list(self._folder.shape(scale))}; {list(shape)} in blocks of "
                f"{list(self.quantised.block)} needs {list(want)}",
            )
        kind = self._folder.dtype(scale)
        if kind not in (*FLOATS, "F8_E8M0", *(("U8",) if self.quantised.powers else ())):
            raise self._bad(
                scale, f"dtype {kind}; {', '.join(FLOATS)}, F8_E8M0, or U8 with scale_fmt ue8m0, is needed for scales"
            )

    def _bad(self, tensor: str, message: str) -> FormatError:
        return FormatError(f"{self.path}, tensor {tensor!r}: {message}", file=str(self.path), tensor=tensor)

    def names(self) -> list[str]:
        return list(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._folder.shape(name)

    def dtype(self, name: str) -> str:
        return self._folder.dtype(name)

    def _is_fp8(self, name: str) -> bool:
        return self._folder.dtype(name) == "F8_E4M3"

    def tensor(self, name: str) -> torch.Tensor:
        if not self._is_fp8(name):
            return self._folder.tensor(name)
        return self._rows(name, 0, self.shape(name)[0])

    def read_into(self, name: str, out: torch.Tensor) -> None:
        if not self._is_fp8(name):
            self._folder.read_into(name, out)
            return
        n, k = self.shape(name)
        step = max(_PIECE_VALUES // k, 1)
        for first in range(0, n, step):
            count = min(step, n - first)
            out[first : first + count].copy_(self._rows(name, first, count))

    def weight_format(self, name: str) -> WeightFormat:
        return WeightFormat("bfloat16") if self._is_fp8(name) else self._folder.weight_format(name)

    def weight_rows(self, name: str, first: int, count: int) -> PlainWeight:
        if not self._is_fp8(name):
            return self._folder.weight_rows(name, first, count)
        return PlainWeight(self.weight_format(name), count, self.shape(name)[1], self._rows(name, first, count))

    def float_rows(self, name: str, first: int, count: int) -> torch.Tensor:
        if not self._is_fp8(name):
            return self._folder.float_rows(name, first, count)
        return self._rows(name, first, count).float()

    def _rows(self, name: str, first: int, count: int) -> torch.Tensor:
        """bf16 [count, k]."""
        k, (block_rows, block_columns) = self.shape(name)[1], self.quantised.block
        codes = self._folder.raw(name, first * k, count * k).view(count, k)
        if bool(((codes & 0x7F) == 0x7F).any()):
            raise self._bad(name, "a weight is not a number")
        scales = self._scale(name)[torch.arange(first, first + count) // block_rows]
        each = scales.repeat_interleave(min(block_columns, k), 1)[:, :k]
        return codes.view(torch.float8_e4m3fn).float().mul_(each).bfloat16()

    def _scale(self, name: str) -> torch.Tensor:
        """fp32 [blocks of outputs, blocks of inputs], checked; kept, as it is a ten-thousandth of the weight."""
        with self._lock:
            if not self._said:
                self._said = True
                _LOG.warning(
                    "%s: FP8 weights are decoded to bf16, twice the file's bytes (nothing computes in FP8 here); "
                    'quantize="int8" keeps them at one',
                    self.path,
                )
            found = self._scales.get(name)
            if found is None:
                found = self._scales[name] = self._read_scale(f"{name}{SCALE}")
            return found

    def _read_scale(self, name: str) -> torch.Tensor:
        kind, shape = self._folder.dtype(name), self._folder.shape(name)
        if kind in FLOATS:
            scale = self._folder.tensor(name).float()
        else:
            scale = powers_of_two(self._folder.raw(name, 0, shape[0] * shape[1])).view(shape)
        if not bool(torch.isfinite(scale).all()) or bool((scale < 0).any()):
            raise self._bad(name, "a scale is negative, infinite or not a number")
        if self.quantised.powers and kind in FLOATS:
            odd = scale[torch.frexp(scale).mantissa != 0.5]
            if bool((odd != 0).any()):
                raise self._bad(
                    name, f"scale_fmt says ue8m0, powers of two, but a scale is {odd[odd != 0][0].item():g}"
                )
        return scale

    def fingerprint(self) -> bytes:
        return self._folder.fingerprint()

    def close(self) -> None:
        self._scales = {}
        self._folder.close()

    def __enter__(self) -> Fp8Folder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
