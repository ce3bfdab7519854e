"""Hugging Face folders: config.json and safetensors files, sharded or not, all checked before use.

Layout of a safetensors file: u64 little-endian header length, a JSON header (tensor name → dtype, shape and
``data_offsets`` relative to the end of the header), the data, without gaps or overlaps.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deepseek_flash.errors import CheckpointError, ModelError, UnsupportedModel
from deepseek_flash.kernels.weights import PlainWeight, WeightFormat
from deepseek_flash.loading.files import JSON_BYTES, SCRATCH_BYTES, DataFile, Scratch, parse_json, read_json
from deepseek_flash.quant.repack import FORMATS

_LOG = logging.getLogger("deepseek_flash.loading")

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
FLOATS: dict[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types that weights may have."""
QUANTISED = ("awq", "gptq", "fp8")
"""Values of ``quant_method`` that ``checkpoint_quant`` and ``fp8`` read."""

_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64,
    "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
_LOW = ("F8_", "F4", "F6_")
_OF_FP8 = ("F8_E4M3", "F8_E8M0")
"""Types of weights and scales that ``quant_method: fp8`` is read with."""
MAX_DIMS = 16
MAX_NAME = 4096
MAX_FILE_NAME = 255
"""Bytes of a shard's file name; file systems allow no more."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor: its file, type, shape, and where its bytes are in the file."""

    file: DataFile
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def read_header(file: DataFile) -> tuple[dict[str, Entry], bytes]:
    """Tensors of one safetensors file and the header's digest; FormatError, with the numbers, if it is not sound."""
    if file.size < 8:
        raise file.error(f"the file has {file.size} bytes; a safetensors header needs 8")
    length = int.from_bytes(file.read(0, 8), "little")
    if length > file.size - 8:
        raise file.error(f"the header is said to have {length} bytes; {file.size - 8} follow (truncated?)", offset=0)
    if length > JSON_BYTES:
        raise file.error(f"the header is said to have {length} bytes; at most {JSON_BYTES} are read", offset=0)
    raw = file.read(8, length)
    header = parse_json(raw, f"{file.path} (header)", unique=True)
    header.pop("__metadata__", None)
    start = 8 + length
    entries = {name: _entry(file, name, value, start) for name, value in header.items()}
    end = start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if entry.offset != end:
            what = "overlaps the tensor before" if entry.offset < end else "leaves a gap"
            raise file.error(f"its bytes start at {entry.offset}, not at {end}: {what}", tensor=name)
        end += entry.nbytes
    if end != file.size:
        raise file.error(f"the tensors end at byte {end}, the file has {file.size} bytes")
    return entries, hashlib.sha256(raw).digest()


def _entry(file: DataFile, name: str, value: Any, start: int) -> Entry:
    if not name or len(name) > MAX_NAME or not name.isprintable():
        raise file.error(f"a tensor is named {name[:200]!r}")
    if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= value.keys():
        raise file.error("dtype, shape and data_offsets are needed", tensor=name)
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise file.error(f"unknown dtype {str(dtype)[:100]!r}", tensor=name)
    if not _sizes(shape) or len(shape) > MAX_DIMS:
        raise file.error(f"shape {str(shape)[:200]} is not a list of up to {MAX_DIMS} sizes", tensor=name)
    if not _sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise file.error(f"data_offsets {str(offsets)[:200]} are not two rising numbers", tensor=name)
    first, last = offsets
    if start + last > file.size:
        raise file.error(
            f"data_offsets {offsets} reach past the {file.size - start} bytes of data (truncated?)", tensor=name
        )
    needed, rest = divmod(math.prod(shape) * _BITS[dtype], 8)
    if rest or needed != last - first:
        raise file.error(f"{dtype} {shape} needs {needed} bytes, data_offsets give {last - first}", tensor=name)
    return Entry(file, dtype, tuple(shape), start + first, needed)


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 2**63 for v in value)


class SafetensorsFolder:
    """An opened Hugging Face folder. Satisfies ``TensorSource``; safe from any thread."""

    kind = "safetensors"

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self.metadata: dict[str, Any] = {}
        self.config = _config(folder)
        generation = folder / "generation_config.json"
        self.generation_config: dict[str, Any] = read_json(generation) if generation.is_file() else {}
        self._files: list[DataFile] = []
        self._scratch = Scratch()
        self._digest = hashlib.sha256((folder / "config.json").read_bytes())
        try:
            self._entries = self._open(folder)
            layers = self.config.get("num_hidden_layers")
            if isinstance(layers, int) and layers > len(self._entries):
                raise self._files[0].error(
                    f"config.json says num_hidden_layers {layers}, the files have {len(self._entries)} tensors"
                )
            _refuse_low_precision(folder, self._entries, _OF_FP8 if quant_method(self.config) == "fp8" else ())
            self._untie()
        except BaseException:
            self.close()
            raise

    def _open(self, folder: Path) -> dict[str, Entry]:
        index = folder / INDEX
        if not index.is_file():
            if not (folder / SINGLE).is_file():
                raise _no_weights(folder)
            return self._add(folder / SINGLE)
        placed = _read_index(index)
        entries: dict[str, Entry] = {}
        for shard in sorted(set(placed.values())):
            if not (folder / shard).is_file():
                raise CheckpointError(f"{index} names the shard {shard!r}, which is not in the folder")
            found = self._add(folder / shard)
            for name in found:
                if name in entries:
                    raise self._files[-1].error("this name is in another shard too", tensor=name)
            entries |= found
            # A tensor the index puts in this shard must be in it; one it does not mention stays visible, so that
            # loading reports it as unexpected instead of dropping it.
            missing = [n for n, s in placed.items() if s == shard and n not in found]
            if missing:
                raise CheckpointError(f"{folder / shard} lacks tensors that {INDEX} puts there", missing=missing)
        return entries

    def _untie(self) -> None:
        """A stored head that differs from the embedding is the head, though the config ties them (as transformers)."""
        head, embed = self._entries.get("lm_head.weight"), self._entries.get("model.embed_tokens.weight")
        if self.config.get("tie_word_embeddings") is True and head and embed and not _equal(head, embed):
            _LOG.warning(
                "%s: lm_head.weight differs from the embedding, so it is used; the config ties them", self.path
            )
            self.config["tie_word_embeddings"] = False

    def _add(self, path: Path) -> dict[str, Entry]:
        file = DataFile(path, self._scratch)
        self._files.append(file)
        entries, digest = read_header(file)
        self._digest.update(digest)
        return entries

    def names(self) -> list[str]:
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def dtype(self, name: str) -> str:
        return self._entries[name].dtype

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor in its stored type, in memory of its own."""
        out = torch.empty(self.shape(name), dtype=self._float_type(name))
        self.read_into(name, out)
        return out

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Fill the contiguous ``out``, of the tensor's shape and any float type."""
        entry = self._entries[name]
        entry.file.floats_into(entry.offset, self._float_type(name), out)

    def integers(self, name: str) -> torch.Tensor:
        """An int32 tensor (U32: the same bits)."""
        entry = self._entries[name]
        out = torch.empty(entry.shape, dtype=torch.int32)
        entry.file.bytes_into(entry.offset, out.view(-1).view(torch.uint8))
        return out

    def raw(self, name: str, first: int, count: int) -> torch.Tensor:
        """uint8 [count]: elements of a tensor of one-byte elements, from number ``first`` on."""
        entry = self._entries[name]
        if _BITS[entry.dtype] != 8 or first < 0 or count < 0 or first + count > entry.nbytes:
            raise entry.file.error(f"no {count} bytes at element {first} of {entry.dtype}", tensor=name)
        out = torch.empty(count, dtype=torch.uint8)
        entry.file.bytes_into(entry.offset + first, out)
        return out

    def _float_type(self, name: str) -> torch.dtype:
        entry = self._entries[name]
        if entry.dtype not in FLOATS:
            raise UnsupportedModel(
                f"{entry.file.path}, tensor {name!r}: dtype {entry.dtype}; weights of {', '.join(FLOATS)} load",
                supported=tuple(FLOATS),
            )
        return FLOATS[entry.dtype]

    def weight_format(self, name: str) -> WeightFormat:
        self._float_type(name)
        return FORMATS[self._entries[name].dtype]

    def weight_rows(self, name: str, first: int, count: int) -> PlainWeight:
        form, k = self.weight_format(name), self.shape(name)[1]
        entry, stored = self._entries[name], self._float_type(name)
        out = torch.empty(count, k, dtype=stored)
        entry.file.floats_into(entry.offset + first * k * stored.itemsize, stored, out)
        return PlainWeight(form, count, k, out)

    def float_rows(self, name: str, first: int, count: int) -> torch.Tensor:
        return self.weight_rows(name, first, count).codes.float()

    def fingerprint(self) -> bytes:
        """Digest of config, headers and samples of every tensor: tells models apart, no proof against forgery."""
        digest = self._digest.copy()
        for entry in self._entries.values():
            digest.update(entry.file.sample(entry.offset, entry.nbytes))
        return digest.digest()

    def close(self) -> None:
        for file in self._files:
            file.close()

    def __enter__(self) -> SafetensorsFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(f"{folder} has no config.json: it is no Hugging Face model folder{_what_is_there(folder)}")
    config = normalise(read_json(path))
    name = quant_method(config)
    if name is not None and name not in QUANTISED:
        raise UnsupportedModel(
            f"{folder} is quantised ({name[:100]}, quantization_config in config.json); folders with plain "
            f"{', '.join(FLOATS)} weights load, {', '.join(QUANTISED)} ones, and quantised models as GGUF",
            architecture=str(config.get("architectures", ""))[:100],
            supported=(*FLOATS, *QUANTISED),
        )
    return config


def quant_method(config: dict[str, Any]) -> str | None:
    """``quant_method`` of a config in small letters, ``"?"`` where it is not said; None for unquantised models."""
    given = config.get("quantization_config")
    if not given:
        return None
    return str(given.get("quant_method", "?")).lower() if isinstance(given, dict) else "?"


def normalise(config: dict[str, Any]) -> dict[str, Any]:
    """``rope_theta`` and ``rope_scaling`` as older configs have them, whichever way the file spells RoPE.

    transformers 5 writes one ``rope_parameters`` dict; ``type`` is the old spelling of ``rope_type``.
    """
    out = dict(config)
    given = config.get("rope_parameters")
    scaling = given if isinstance(given, dict) and given else config.get("rope_scaling")
    if isinstance(scaling, dict):
        scaling = dict(scaling)
        theta = scaling.pop("rope_theta", None)
        if theta is not None and (isinstance(given, dict) or "rope_theta" not in config):
            out["rope_theta"] = theta
        kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
        scaling.pop("type", None)
        out["rope_scaling"] = None if kind == "default" else {"rope_type": kind, **scaling}
    else:
        out["rope_scaling"] = scaling
    return out


def _read_index(path: Path) -> dict[str, str]:
    """Tensor name → shard; every shard a plain file name, so that an index cannot reach outside its folder."""
    placed = read_json(path, unique=True, most=JSON_BYTES).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise CheckpointError(f"{path} has no weight_map")
    for name, shard in placed.items():
        plain = isinstance(shard, str) and shard.endswith(".safetensors") and not set(shard) & set('/\\:\0"')
        if not plain or shard.startswith(".") or len(shard.encode("utf-8", "replace")) > MAX_FILE_NAME:
            raise CheckpointError(
                f"{path} puts {name[:200]!r} into {str(shard)[:200]!r}; a .safetensors file name of up to "
                f"{MAX_FILE_NAME} bytes, without folders, is needed"
            )
    return placed


def _equal(a: Entry, b: Entry) -> bool:
    """Whether two tensors have the same type, shape and bytes; reads no further than they are alike."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    pieces = ((at, min(SCRATCH_BYTES, a.nbytes - at)) for at in range(0, a.nbytes, SCRATCH_BYTES))
    return all(a.file.read(a.offset + at, n) == b.file.read(b.offset + at, n) for at, n in pieces)


def _refuse_low_precision(folder: Path, entries: dict[str, Entry], known: tuple[str, ...]) -> None:
    for name, entry in entries.items():
        if entry.dtype.startswith(_LOW) and entry.dtype not in known:
            raise UnsupportedModel(
                f"{folder}: tensor {name!r} has the type {entry.dtype}; weights of {', '.join(FLOATS)} load",
                supported=tuple(FLOATS),
            )


def _no_weights(folder: Path) -> ModelError:
    pickles = sorted(p.name for pattern in PICKLES for p in folder.glob(pattern))
    if pickles:
        return ModelError(
            f"{folder} has only pickled weights ({_some(pickles)}). A pickle can run any code, so it is never opened: "
            f"get the safetensors version, or convert it with transformers' save_pretrained on a machine you trust"
        )
    return ModelError(f"{folder} has neither {SINGLE} nor {INDEX}{_what_is_there(folder)}")


def _what_is_there(folder: Path) -> str:
    names = sorted(p.name for p in folder.iterdir())
    return f" (it holds {_some(names)})" if names else " (it is empty)"


def _some(names: Iterable[str]) -> str:
    every = list(names)
    return ", ".join(every[:8]) + (f" and {len(every) - 8} more" if len(every) > 8 else "")
