"""AWQ and GPTQ checkpoints: Hugging Face folders whose linear layers are integers with a scale and a zero point.

A layer [n outputs, k inputs] with groups of G inputs is ``qweight``, ``qzeros`` (both int32) and ``scales`` [k/G, n];
w = scale (q - zero). With P = 32 / bits values in an int32, the lowest bits first:

- GPTQ: qweight [k/P, n], P inputs in a word; qzeros [k/G, n/P], P outputs in a word. ``gptq`` stores zero - 1,
  ``gptq_v2`` the zero. ``g_idx`` [k] names the group of each input; act-order makes it jump about.
- AWQ (4 bits, the ``gemm`` layout): qweight [k, n/8] and qzeros [k/G, n/8], eight outputs in a word, in the order
  0, 2, 4, 6, 1, 3, 5, 7.

They become GroupQuant without changing a value: 128 inputs a group, or 64 or 32, the scale repeated where G is larger.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepseek_flash.errors import CheckpointError, FormatError, UnsupportedModel
from deepseek_flash.kernels.weights import PlainWeight, WeightFormat, dequantize
from deepseek_flash.loading.safetensors import FLOATS, SafetensorsFolder

METHODS = ("awq", "gptq")
GROUPS = (128, 64, 32)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight outputs each nibble of a word holds, the lowest nibble first."""
_PARTS = ("qweight", "qzeros", "scales", "g_idx")


@dataclass(frozen=True, slots=True)
class QuantConfig:
    """What ``quantization_config`` says, checked."""

    method: str
    bits: int
    group: int
    """Inputs that share a scale; -1: all of a row."""
    symmetric: bool
    """The zero point is the middle of the range, everywhere."""
    one_less: bool
    """Zero points are stored minus one."""


def read_quant_config(config: dict[str, Any], where: str) -> QuantConfig:
    """The folder's ``quantization_config``; UnsupportedModel, by name, for what does not load."""
    given = config["quantization_config"]
    if not isinstance(given, dict):
        raise FormatError(f"{where}: quantization_config is no object", file=where)

    def refuse(key: str, value: Any, *allowed: object) -> UnsupportedModel:
        known = ", ".join(map(str, allowed))
        return UnsupportedModel(
            f"{where}: quantization_config with {key}={str(value)[:100]!r} does not load; of AWQ and GPTQ checkpoints "
            f"those with {known} do",
            architecture=str(config.get("architectures", ""))[:100],
            supported=tuple(map(str, allowed)),
        )

    method = str(given.get("quant_method", "?")).lower()
    if method not in METHODS:
        raise refuse("quant_method", method, *METHODS)
    bits = given.get("bits", given.get("w_bit"))
    allowed = (4,) if method == "awq" else (4, 8)
    if type(bits) is not int or bits not in allowed:
        raise refuse("bits", bits, *allowed)
    group = given.get("group_size", given.get("q_group_size", 128))
    if type(group) is not int or not (group == -1 or (group > 0 and group % 32 == 0)):
        raise refuse("group_size", group, -1, "multiples of 32")
    if method == "awq":
        layout = str(given.get("version", "gemm")).lower()
        if layout != "gemm":
            raise refuse("version", layout, "gemm")
        if given.get("zero_point", True) is not True:
            raise refuse("zero_point", given["zero_point"], True)
        return QuantConfig(method, bits, group, symmetric=False, one_less=False)
    layout = str(given.get("checkpoint_format", "gptq")).lower()
    if layout not in ("gptq", "gptq_v2"):
        raise refuse("checkpoint_format", layout, "gptq", "gptq_v2")
    if given.get("dynamic"):
        raise refuse("dynamic", given["dynamic"], "one setting for all layers")
    return QuantConfig(method, bits, group, given.get("sym", True) is True, layout == "gptq")


class QuantisedFolder:
    """An opened AWQ or GPTQ folder under the names of the unquantised model. Satisfies ``TensorSource``; safe from
    any thread. One layer is unpacked at a time and kept until the next."""

    kind = "safetensors"

    def __init__(self, folder: SafetensorsFolder) -> None:
        self._folder, self.path = folder, folder.path
        self.config, self.generation_config = folder.config, folder.generation_config
        self.metadata: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._last: tuple[str, PlainWeight] | None = None
        self._formats: dict[str, WeightFormat] = {}
        try:
            self.quantised = read_quant_config(folder.config, str(folder.path / "config.json"))
            stored = folder.names()
            self._layers = {n.removesuffix(".qweight") for n in stored if n.endswith(".qweight")}
            self._shapes = {f"{layer}.weight": self._check(layer, set(stored)) for layer in sorted(self._layers)}
            self._names = self._visible(stored)
        except BaseException:
            folder.close()
            raise

    def _visible(self, stored: Sequence[str]) -> list[str]:
        """The unquantised model's names, in the files' order."""
        out = []
        for name in stored:
            layer, _, last = name.rpartition(".")
            if layer not in self._layers or last not in (*_PARTS, "weight", "bias"):
                out.append(name)
            elif last == "weight":
                raise CheckpointError(f"{self.path}: {layer} has both weight and qweight")
            elif last == "qweight":
                out.append(f"{layer}.weight")
            elif last == "bias" and not self._is_filler(name):
                out.append(name)
        return out

    def _is_filler(self, name: str) -> bool:
        """Older GPTQ tools give every layer a bias, of zeros where the model has none."""
        kind = str(self.config.get("model_type"))
        attention = "self_attn." in name
        wanted = self.config.get("attention_bias") if attention else self.config.get("mlp_bias")
        if wanted or (kind == "qwen2" and attention and ".o_proj." not in name):
            return False
        return not bool(self._folder.tensor(name).any())

    def _check(self, layer: str, stored: set[str]) -> tuple[int, int]:
        """(n, k) of a layer whose tensors fit together."""
        q = self.quantised
        if missing := [p for p in ("qzeros", "scales") if f"{layer}.{p}" not in stored]:
            raise CheckpointError(f"{self.path}: {layer} is quantised", missing=[f"{layer}.{p}" for p in missing])
        shape, per = self._folder.shape(f"{layer}.qweight"), 32 // q.bits
        if len(shape) != 2 or 0 in shape:
            raise self._bad(f"{layer}.qweight", f"shape {list(shape)} is no matrix")
        n, k = (shape[1], shape[0] * per) if q.method == "gptq" else (shape[1] * per, shape[0])
        groups = -(-k // self._stored_group(k))
        want = {"qzeros": (groups, -(-n // per)), "scales": (groups, n)}
        for part, expected in want.items():
            if self._folder.shape(f"{layer}.{part}") != expected:
                found = list(self._folder.shape(f"{layer}.{part}"))
                raise self._bad(
                    f"{layer}.{part}", f"shape {found}; qweight {list(shape)} and group_size {q.group} need {expected}"
                )
        for part in ("qweight", "qzeros"):
            if self._folder.dtype(f"{layer}.{part}") not in ("I32", "U32"):
                raise self._bad(f"{layer}.{part}", f"dtype {self._folder.dtype(f'{layer}.{part}')}; I32 is needed")
        if self._folder.dtype(f"{layer}.scales") not in FLOATS:
            raise self._bad(f"{layer}.scales", f"dtype {self._folder.dtype(f'{layer}.scales')} is no float type")
        self._check_order(layer, k, f"{layer}.g_idx" in stored)
        self._group(layer, k)
        return n, k

    def _stored_group(self, k: int) -> int:
        return k if self.quantised.group == -1 else self.quantised.group

    def _group(self, layer: str, k: int) -> int:
        """Inputs of our groups: the most that divide those of the file."""
        common = math.gcd(self._stored_group(k), k)
        for group in GROUPS:
            if common % group == 0:
                return group
        raise UnsupportedModel(
            f"{self.path}: {layer} has {k} inputs in groups of {self._stored_group(k)}: no groups of 32, 64 or 128",
            supported=("groups that are multiples of 32",),
        )

    def _check_order(self, layer: str, k: int, has_index: bool) -> None:
        given = self.config["quantization_config"]
        ordered = not given.get("desc_act", False)
        if has_index:
            name = f"{layer}.g_idx"
            if self._folder.dtype(name) != "I32" or self._folder.shape(name) != (k,):
                raise self._bad(
                    name, f"{self._folder.dtype(name)} {list(self._folder.shape(name))}; I32 [{k}] is wanted"
                )
            index = self._folder.integers(name)
            ordered = torch.equal(index, (torch.arange(k) // self._stored_group(k)).to(torch.int32))
        if not ordered:
            raise UnsupportedModel(
                f"{self.path}: {layer} was quantised in activation order (desc_act, g_idx): its groups are not runs "
                f"of neighbouring inputs, which is what loads. Use a version with desc_act=false, or a GGUF file",
                architecture=str(self.config.get("architectures", ""))[:100],
                supported=("desc_act=false",),
            )

    def _bad(self, tensor: str, message: str) -> FormatError:
        return FormatError(f"{self.path}, tensor {tensor!r}: {message}", file=str(self.path), tensor=tensor)

    def names(self) -> list[str]:
        return list(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes.get(name) or self._folder.shape(name)

    def dtype(self, name: str) -> str:
        q = self.quantised
        return f"{q.method.upper()}-{q.bits}bit" if name in self._shapes else self._folder.dtype(name)

    def tensor(self, name: str) -> torch.Tensor:
        if name not in self._shapes:
            return self._folder.tensor(name)
        out = torch.empty(self.shape(name))
        self.read_into(name, out)
        return out

    def read_into(self, name: str, out: torch.Tensor) -> None:
        if name not in self._shapes:
            self._folder.read_into(name, out)
            return
        n, k = self._shapes[name]
        step = max((1 << 20) // k, 1)
        for first in range(0, n, step):
            count = min(step, n - first)
            out[first : first + count].copy_(self.float_rows(name, first, count))

    def weight_format(self, name: str) -> WeightFormat:
        if name not in self._shapes:
            return self._folder.weight_format(name)
        found = self._formats.get(name)
        if found is None:
            layer, q = name.removesuffix(".weight"), self.quantised
            group = self._group(layer, self._shapes[name][1])
            found = WeightFormat("group", bits=q.bits, group=group, offset="zeros")
            if q.symmetric and self._zeros_are_the_middle(layer):
                found = WeightFormat("group", bits=q.bits, group=group, zero=1 << (q.bits - 1))
            self._formats[name] = found
        return found

    def _zeros_are_the_middle(self, layer: str) -> bool:
        """Of a symmetric layer, as ``gptq`` or ``gptq_v2`` would store it: some tools write the one and name the
        other, and there is only one zero point that a symmetric layer can have."""
        stored = self._unpack(self._folder.integers(f"{layer}.qzeros"))
        middle, first = 1 << (self.quantised.bits - 1), int(stored.flatten()[0])
        return first in (middle, middle - 1) and bool((stored == first).all())

    def weight_rows(self, name: str, first: int, count: int) -> PlainWeight:
        if name not in self._shapes:
            return self._folder.weight_rows(name, first, count)
        with self._lock:
            if self._last is None or self._last[0] != name:
                self._last = None  # the old one goes before the new one comes
                self._last = name, self._plain(name)
            return self._last[1].rows(slice(first, first + count))

    def float_rows(self, name: str, first: int, count: int) -> torch.Tensor:
        if name not in self._shapes:
            return self._folder.float_rows(name, first, count)
        return dequantize(self.weight_rows(name, first, count))

    def _plain(self, name: str) -> PlainWeight:
        layer, (n, k), q, form = (
            name.removesuffix(".weight"),
            self._shapes[name],
            self.quantised,
            self.weight_format(name),
        )
        words = self._folder.integers(f"{layer}.qweight")
        codes = self._unpack(words.T).contiguous() if q.method == "gptq" else self._unpack(words).T.contiguous()
        times, groups = self._stored_group(k) // form.group, k // form.group

        def spread(per_group: torch.Tensor) -> torch.Tensor:
            """[stored groups, n] → [n, our groups]"""
            return per_group.T.repeat_interleave(max(times, 1), 1)[:, :groups].contiguous()

        scale = self._folder.tensor(f"{layer}.scales").float()
        half = scale.half()
        if not bool(torch.isfinite(half).all()):
            raise self._bad(f"{layer}.scales", "a scale is not finite or beyond fp16")
        plain = PlainWeight(form, n, k, codes, spread(half))
        if form.offset == "zeros":
            zeros = self._unpack(self._folder.integers(f"{layer}.qzeros"))[:, :n]
            # Zero points fit the bits, so one that was stored as -1 has wrapped around to the largest.
            plain.zeros = spread((zeros + int(q.one_less)) & ((1 << q.bits) - 1))
        return plain

    def _unpack(self, words: torch.Tensor) -> torch.Tensor:
        """int32 [a, b] → uint8 [a, b * P]: the values of each word in their own order."""
        bits = self.quantised.bits
        order = AWQ_ORDER if self.quantised.method == "awq" else range(32 // bits)
        out = torch.empty(*words.shape, 32 // bits, dtype=torch.uint8)
        for place, which in enumerate(order):
            out[..., which] = ((words >> (place * bits)) & ((1 << bits) - 1)).to(torch.uint8)
        return out.flatten(-2)

    def fingerprint(self) -> bytes:
        return self._folder.fingerprint()

    def close(self) -> None:
        self._last = None
        self._folder.close()

    def __enter__(self) -> QuantisedFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
