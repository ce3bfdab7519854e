"""The flash format: a folder whose weights are packed as the kernels read them, mapped into memory, never copied.

    flash.json               manifest: version, where it comes from, format and size of every weight
    model.safetensors        or model-00001-of-00003.safetensors …, each ending in 64 bytes of padding
    config.json              as the source gave it; generation_config.json too, when there was one
    tokenizer.json …         of a Hugging Face folder, or gguf_tokenizer.json: the tokenizer's key-values of a GGUF file

Tensors are named after the model's own (``layers.0.attention.qkv.weight.0``: part 0 of a fused weight). A weight is
uint8, its packed bytes (``kernels.weights``) rounded up to 64, and starts at a multiple of 64 in the file; everything
else (norms, biases) is fp32. The pages are mapped read-only and shared, so processes hold them once.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deepseek_flash.errors import FormatError, InternalError, ModelError, ModelNotFound, UnsupportedModel
from deepseek_flash.kernels.weights import PANEL, SPARE, PackedWeight, PlainWeight, WeightFormat, dequantize, unpack
from deepseek_flash.loading.files import JSON_BYTES, DataFile, parse_json, read_json
from deepseek_flash.loading.rules import Rule
from deepseek_flash.loading.safetensors import Entry, normalise, read_header

MANIFEST = "flash.json"
FORMAT = "deepseek-flash"
VERSION = 1
GGUF_TOKENIZER = "gguf_tokenizer.json"
PAD = "padding"
"""The tensor that ends every file: ``SPARE`` bytes that kernels may read behind the last weight."""
ALIGN = 64
PIECE_VALUES = 1 << 20
PIECE_BYTES = 16 << 20
_SHARD = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors", flags=re.ASCII)
_MAX_SIZE = 1 << 31


@dataclass(frozen=True, slots=True)
class Stored:
    """A packed weight in the folder."""

    format: WeightFormat
    n: int
    k: int
    file: str
    dtype: str
    """The stored type of the checkpoint it was made from: ``"BF16"``, ``"Q4_K"``, …"""

    @property
    def nbytes(self) -> int:
        """In the file."""
        return stored_bytes(self.format, self.n, self.k)


def stored_bytes(form: WeightFormat, n: int, k: int) -> int:
    """Packed bytes rounded up, so that the next weight is aligned."""
    return -(-form.packed_bytes(n, k) // ALIGN) * ALIGN


def digest_of(chunks: Iterable[bytes | memoryview]) -> str:
    """The manifest's digest of a tensor's bytes, as they are in the file."""
    digest = hashlib.blake2b(digest_size=16)
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()


def format_to_json(form: WeightFormat) -> dict[str, Any]:
    """The manifest's spelling of a format."""
    if form.kind != "group":
        return {"kind": form.kind}
    return {
        "kind": form.kind,
        "bits": form.bits,
        "group": form.group,
        "offset": form.offset,
        "zero": form.zero,
        "super": form.super,
    }


class FlashFolder:
    """An opened flash folder. Satisfies ``TensorSource``, its names being those of the model's parameters (weights:
    of their parts); safe from any thread. Weights handed out by :meth:`mapped` keep their file mapped."""

    kind = "flash"

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self._where = folder / MANIFEST
        raw = _read(self._where)
        self.manifest = _checked_head(parse_json(raw, str(self._where), unique=True), self._where)
        self.config: dict[str, Any] = normalise(read_json(folder / "config.json"))
        generation, vocabulary = folder / "generation_config.json", folder / GGUF_TOKENIZER
        self.generation_config: dict[str, Any] = read_json(generation) if generation.is_file() else {}
        self.metadata: dict[str, Any] = read_json(vocabulary, most=JSON_BYTES) if vocabulary.is_file() else {}
        self._digest = hashlib.sha256(raw)
        self._digest.update((folder / "config.json").read_bytes())
        self._weights = {name: self._weight(name, v) for name, v in self._section("weights").items()}
        self._vectors = {name: self._file_name(name, v) for name, v in self._section("vectors").items()}
        self._entries, self._maps = self._open_files()

    def _section(self, key: str) -> dict[str, Any]:
        found = self.manifest.get(key)
        if not isinstance(found, dict):
            raise self._bad(f"{key} must be an object of tensors")
        return found

    def _bad(self, message: str, tensor: str = "") -> FormatError:
        place = f", tensor {tensor[:200]!r}" if tensor else ""
        return FormatError(f"{self._where}{place}: {message}", file=str(self._where), tensor=tensor)

    def _file_name(self, name: str, value: Any) -> str:
        found = value.get("file") if isinstance(value, dict) else None
        if not isinstance(found, str) or not _SHARD.fullmatch(found):
            raise self._bad(f"file {str(found)[:100]!r} is no model.safetensors or numbered part of one", name)
        return found

    def _weight(self, name: str, value: Any) -> Stored:
        file = self._file_name(name, value)
        n, k, dtype = value.get("n"), value.get("k"), value.get("stored")
        for key, size in (("n", n), ("k", k)):
            if type(size) is not int or not 0 < size < _MAX_SIZE:
                raise self._bad(f"{key} is {str(size)[:50]}; a size from 1 to {_MAX_SIZE - 1} is needed", name)
        if not isinstance(dtype, str):
            raise self._bad("stored must name a type", name)
        return Stored(self._format(name, value.get("format")), n, k, file, dtype)

    def _format(self, name: str, value: Any) -> WeightFormat:
        kinds = {"kind": str, "bits": int, "group": int, "offset": str, "zero": int, "super": bool}
        fields = value if isinstance(value, dict) else {}
        if "kind" in fields and all(type(v) is kinds.get(key) for key, v in fields.items()):
            try:
                return WeightFormat(**fields)
            except InternalError:
                pass
        raise self._bad(f"format {str(value)[:200]} is none of this version's", name)

    def _open_files(self) -> tuple[dict[str, Entry], dict[str, torch.Tensor]]:
        """Every file's header checked against the manifest, then the files mapped."""
        wanted: dict[str, set[str]] = {}
        for name, stored in self._weights.items():
            wanted.setdefault(stored.file, set()).add(name)
        for name, file in self._vectors.items():
            if name in self._weights:
                raise self._bad("it is a weight and a vector", name)
            wanted.setdefault(file, set()).add(name)
        entries: dict[str, Entry] = {}
        maps: dict[str, torch.Tensor] = {}
        for file in sorted(wanted):
            data = _open_data(self.path / file)
            try:
                found, digest = read_header(data)
                self._digest.update(digest)
                self._check_file(file, found, wanted[file])
                entries |= {name: found[name] for name in wanted[file]}
                maps[file] = map_file(self.path / file, data.size)
                for name in sorted(wanted[file]):
                    self._digest.update(data.sample(found[name].offset, found[name].nbytes))
            finally:
                data.close()
        return entries, maps

    def _check_file(self, file: str, found: dict[str, Entry], wanted: set[str]) -> None:
        pad = found.get(PAD)
        if found.keys() != wanted | {PAD} or pad is None:
            odd = sorted(found.keys() ^ (wanted | {PAD}))[0]
            raise self._bad(f"manifest and {file} do not name the same tensors ({len(wanted)} wanted)", odd)
        if pad.nbytes < SPARE or any(e.offset > pad.offset for e in found.values()):
            raise self._bad(f"{file} does not end in {SPARE} bytes of padding")
        for name in wanted:
            entry, stored = found[name], self._weights.get(name)
            if stored is None:
                if entry.dtype != "F32" or not entry.shape or entry.offset % 4:
                    raise self._bad(f"{entry.dtype} {list(entry.shape)} at {entry.offset} of {file}: no fp32", name)
            elif entry.dtype != "U8" or entry.shape != (stored.nbytes,) or entry.offset % ALIGN:
                raise self._bad(
                    f"{entry.dtype} {list(entry.shape)} at {entry.offset} of {file}; U8 [{stored.nbytes}] at a "
                    f"multiple of {ALIGN} is needed for [{stored.n}, {stored.k}]",
                    name,
                )

    def names(self) -> list[str]:
        return [*self._weights, *self._vectors]

    def shape(self, name: str) -> tuple[int, ...]:
        stored = self._weights.get(name)
        return self._entries[name].shape if stored is None else (stored.n, stored.k)

    def dtype(self, name: str) -> str:
        stored = self._weights.get(name)
        return "F32" if stored is None else stored.dtype

    def parts(self, target: str) -> tuple[str, ...]:
        """Names of what a parameter is made of: its parts, itself, or nothing."""
        if target in self._vectors:
            return (target,)
        out: list[str] = []
        while f"{target}.{len(out)}" in self._weights:
            out.append(f"{target}.{len(out)}")
        return tuple(out)

    def mapped(self, name: str) -> PackedWeight:
        """A weight, its bytes the file's own."""
        stored = self._weights[name]
        return PackedWeight(stored.format, stored.n, stored.k, self._bytes(name)[: self._packed_bytes(name)])

    def _packed_bytes(self, name: str) -> int:
        stored = self._weights[name]
        return stored.format.packed_bytes(stored.n, stored.k)

    def _bytes(self, name: str) -> torch.Tensor:
        entry = self._entries[name]
        data = self._maps.get(entry.file.path.name)
        if data is None:
            raise ModelError(f"{self.path} is closed")
        return data[entry.offset : entry.offset + entry.nbytes]

    def tensor(self, name: str) -> torch.Tensor:
        out = torch.empty(self.shape(name))
        self.read_into(name, out)
        return out

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """The values, those of packed weights decoded piece by piece."""
        if name in self._vectors:
            out.copy_(self._bytes(name).view(torch.float32).view(out.shape))
            return
        stored = self._weights[name]
        step = max(PIECE_VALUES // stored.k // PANEL, 1) * PANEL
        for first in range(0, stored.n, step):
            count = min(step, stored.n - first)
            out[first : first + count].copy_(self.float_rows(name, first, count))

    def weight_format(self, name: str) -> WeightFormat:
        return self._weights[name].format

    def weight_rows(self, name: str, first: int, count: int) -> PlainWeight:
        stored = self._weights[name]
        each, start = stored.format.panel_bytes(stored.k), first // PANEL
        panels = -(-(first + count) // PANEL) - start
        data = self._bytes(name)[start * each : (start + panels) * each]
        rows = min(panels * PANEL, stored.n - start * PANEL)
        whole = unpack(PackedWeight(stored.format, rows, stored.k, data))
        return whole.rows(slice(first - start * PANEL, first - start * PANEL + count))

    def float_rows(self, name: str, first: int, count: int) -> torch.Tensor:
        return dequantize(self.weight_rows(name, first, count))

    def damaged(self) -> Iterator[str]:
        """Tensors whose bytes are not those that were written. Reads all of them, which opening does not."""
        digests = {
            name: value.get("digest") for key in ("weights", "vectors") for name, value in self._section(key).items()
        }
        files: dict[str, list[str]] = {}
        for name, entry in self._entries.items():
            files.setdefault(entry.file.path.name, []).append(name)
        for file, names in files.items():
            data = _open_data(self.path / file)
            try:
                for name in sorted(names, key=lambda n: self._entries[n].offset):
                    start, count = self._entries[name].offset, self._entries[name].nbytes
                    steps = range(0, count, PIECE_BYTES)
                    if digest_of(data.read(start + at, min(PIECE_BYTES, count - at)) for at in steps) != digests[name]:
                        yield name
            finally:
                data.close()

    def fingerprint(self) -> bytes:
        """Digest of manifest, config, headers and samples of every tensor."""
        return self._digest.digest()

    def close(self) -> None:
        self._maps = {}

    def __enter__(self) -> FlashFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def flash_rules(rules: Sequence[Rule], source: FlashFolder) -> list[Rule]:
    """A model's rules with what the folder holds as sources: the model's own names instead of the checkpoint's."""
    out = []
    for rule in rules:
        parts = source.parts(rule.target) or (rule.target,)
        out.append(Rule(rule.target, parts, "cat0" if len(parts) > 1 else "copy", rule.optional))
    return out


def map_file(path: Path, size: int) -> torch.Tensor:
    """A file's bytes, uint8 [size], read-only pages shared with whoever maps it. To write to it ends the process."""
    try:
        with path.open("rb") as file:
            pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as e:
        raise ModelError(f"cannot map {path}: {e}") from e
    view = np.frombuffer(pages, dtype=np.uint8)
    if len(view) != size:
        raise FormatError(f"{path} changed while it was opened: {size} bytes, then {len(view)}", file=str(path))
    if hasattr(mmap, "MADV_WILLNEED"):
        pages.madvise(mmap.MADV_WILLNEED)
    # torch takes only buffers that call themselves writable without a warning; this one refers to the same pages.
    buffer = (ctypes.c_uint8 * size).from_address(view.ctypes.data)
    buffer.pages = view  # type: ignore[attr-defined]  # keeps them mapped as long as a tensor refers to them
    return torch.frombuffer(buffer, dtype=torch.uint8)


def _open_data(path: Path) -> DataFile:
    try:
        return DataFile(path)
    except ModelNotFound:
        raise FormatError(f"{path} is missing, and {MANIFEST} names it", file=str(path)) from None


def _read(path: Path) -> bytes:
    file = DataFile(path)
    try:
        if file.size > JSON_BYTES:
            raise file.error(f"{file.size} bytes of JSON; at most {JSON_BYTES} are read")
        return file.read(0, file.size)
    finally:
        file.close()


def _checked_head(manifest: dict[str, Any], where: Path) -> dict[str, Any]:
    if manifest.get("format") != FORMAT:
        raise FormatError(f"{where}: format is {str(manifest.get('format'))[:100]!r}, not {FORMAT!r}", file=str(where))
    version = manifest.get("version")
    if type(version) is not int or version != VERSION:
        raise UnsupportedModel(
            f"{where}: version {str(version)[:50]} of the flash format (written by "
            f"{str(manifest.get('tool', 'an unknown tool'))[:100]}); this version reads {VERSION}: convert the "
            f"original again, or use the version that wrote it",
            supported=(f"flash format version {VERSION}",),
        )
    return manifest
