"""GGUF files, version 2 and 3, little endian: header, metadata, tensor table, all checked before use.

Layout: ``GGUF``, u32 version, u64 tensor count, u64 key-value count, the key-values, the tensor infos (name, u32
dimension count, u64 dimensions with the innermost first, u32 type, u64 offset), padding to ``general.alignment``
(32 if not given), data. A string is a u64 length and UTF-8 bytes; an array a u32 type, a u64 count, the elements.

Nothing a file says is believed before it is compared with the file's size: a count needs at least its smallest
encoding in bytes, a tensor must lie inside the data and apart from the others.
"""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deepseek_flash.kernels.weights import PlainWeight
from deepseek_flash.loading.files import SCRATCH_BYTES, DataFile
from deepseek_flash.quant.formats import GGML_TYPES, GGMLType, dequantize, dequantize_into, ggml_type
from deepseek_flash.quant.repack import FORMATS, repack

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER = 128 << 20
"""Most bytes of metadata and tensor table; real files have under 50 MB."""
MAX_PAIRS = 1 << 16
MAX_TENSORS = 1 << 17
MAX_ELEMENTS = 1 << 23
"""Most elements of all arrays together: as Python objects they take up to 60 bytes each. Real files have 2 million."""
MAX_ARRAYS = 1 << 16
MAX_NAME = 1 << 16
"""Longest key, in bytes (the format's own limit). Tensor names are held to the same."""
MAX_DEPTH = 4
"""Deepest nesting of arrays."""
MAX_DIMS = 4
DEFAULT_ALIGNMENT = 32
_READ_AHEAD = 4 << 20
_BOOL, _STRING, _ARRAY = 7, 8, 9
_SCALARS: dict[int, str] = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8", 12: "<f8"
}  # fmt: skip
"""Value type number → numpy type."""
_TYPE_NAMES = {_BOOL: "bool", _STRING: "string", _ARRAY: "array"}
_SMALLEST = {**{k: int(v[2]) for k, v in _SCALARS.items()}, _BOOL: 1, _STRING: 8, _ARRAY: 12}
"""Fewest bytes that a value of a type can take."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. ``shape`` in torch's order (innermost last), ``offset`` and ``nbytes`` in the file."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLType
    offset: int
    nbytes: int


class _Cursor:
    """Reads forward through the header, fetching the file piece by piece."""

    def __init__(self, file: DataFile) -> None:
        self.file, self.pos = file, 0
        self.buffer = bytearray()
        self.limit = min(file.size, MAX_HEADER)
        self.elements = self.arrays = 0

    def need(self, count: int, what: str) -> None:
        """Make ``count`` more bytes available."""
        end = self.pos + count
        if end > self.limit:
            which = (
                f"the file has {self.file.size}"
                if self.limit == self.file.size
                else f"at most {MAX_HEADER} bytes of header are read"
            )
            raise self.file.error(f"{what} needs {count} bytes at offset {self.pos}, {which}", offset=self.pos)
        have = len(self.buffer)
        if end > have:
            more = min(max(end - have, _READ_AHEAD), self.limit - have)
            self.buffer += self.file.read(have, more)

    def integer(self, size: int, what: str) -> int:
        self.need(size, what)
        value = int.from_bytes(self.buffer[self.pos : self.pos + size], "little")
        self.pos += size
        return value

    def count(self, smallest: int, what: str, most: int) -> int:
        """A u64 count of up to ``most`` things that take at least ``smallest`` bytes each."""
        value = self.integer(8, what)
        room = (self.limit - self.pos) // smallest
        if value > room:
            raise self.file.error(
                f"{what} is {value}; the {self.limit - self.pos} bytes that follow hold at most {room}",
                offset=self.pos - 8,
            )
        if value > most:
            raise self.file.error(f"{what} is {value}; at most {most} are read", offset=self.pos - 8)
        return value

    def string(self, what: str, longest: int | None = None) -> str:
        length = self.integer(8, f"the length of {what}")
        if longest is not None and length > longest:
            raise self.file.error(f"{what} has {length} bytes, at most {longest} are allowed", offset=self.pos - 8)
        self.need(length, what)
        raw = self.buffer[self.pos : self.pos + length]
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as e:
            raise self.file.error(f"{what} is not UTF-8: {e.reason} at byte {e.start}", offset=self.pos) from None
        self.pos += length
        return text

    def strings(self, count: int, what: str) -> list[str]:
        """``count`` strings, fast: a vocabulary has a hundred thousand."""
        out: list[str] = []
        append = out.append
        buffer, pos, unpack = self.buffer, self.pos, struct.Struct("<Q").unpack_from
        have = len(buffer)
        for i in range(count):
            start = pos + 8
            end = start + unpack(buffer, pos)[0] if start <= have else have + 1
            if end > have:
                self.pos = pos
                append(self.string(f"element {i} of {what}"))
                pos, have = self.pos, len(buffer)
                continue
            try:
                append(buffer[start:end].decode())
            except UnicodeDecodeError as e:
                raise self.file.error(f"element {i} of {what} is not UTF-8: {e.reason}", offset=start) from None
            pos = end
        self.pos = pos
        return out

    def value(self, kind: int, what: str, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY:
            return self._array(what, depth)
        return self._numbers(kind, 1, what)[0]

    def _array(self, what: str, depth: int) -> list[Any]:
        if depth >= MAX_DEPTH:
            raise self.file.error(f"{what}: arrays nested deeper than {MAX_DEPTH}", offset=self.pos)
        kind = self.integer(4, f"the element type of {what}")
        if kind not in _SMALLEST:
            raise self.file.error(f"{what}: unknown element type {kind}", offset=self.pos - 4)
        self.arrays += 1
        if self.arrays > MAX_ARRAYS:
            raise self.file.error(f"{what} is array {self.arrays}; at most {MAX_ARRAYS} are read", offset=self.pos)
        count = self.count(_SMALLEST[kind], f"the length of array {what}", MAX_ELEMENTS)
        self.elements += count
        if self.elements > MAX_ELEMENTS:
            raise self.file.error(f"more than {MAX_ELEMENTS} array elements in all, with {what}", offset=self.pos)
        if kind == _STRING:
            return self.strings(count, what)
        if kind == _ARRAY:
            return [self._array(what, depth + 1) for _ in range(count)]
        return self._numbers(kind, count, what)

    def _numbers(self, kind: int, count: int, what: str) -> list[Any]:
        size = _SMALLEST[kind]
        self.need(size * count, what)
        dtype = np.dtype("<u1" if kind == _BOOL else _SCALARS[kind])
        values = np.frombuffer(bytes(self.buffer[self.pos : self.pos + size * count]), dtype=dtype)
        if kind == _BOOL:
            if count and int(values.max()) > 1:
                raise self.file.error(f"{what}: a bool with the value {int(values.max())}", offset=self.pos)
            values = values.astype(bool)
        self.pos += size * count
        return list(values.tolist())


class GGUFFile:
    """An opened GGUF file: ``metadata`` (key → Python value), ``tensors`` (name → TensorInfo), and their bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = DataFile(path)
        try:
            cursor = _Cursor(self.file)
            tensor_count, pair_count = self._start(cursor)
            self.metadata = _metadata(cursor, pair_count)
            raw = _tensor_infos(cursor, tensor_count)
            self.alignment = _alignment(self.file, self.metadata)
            start = -(-cursor.pos // self.alignment) * self.alignment
            self.tensors = _place(self.file, raw, start, self.alignment)
            self._header_digest = hashlib.sha256(cursor.buffer[: cursor.pos]).digest()
        except BaseException:
            self.file.close()
            raise

    def _start(self, cursor: _Cursor) -> tuple[int, int]:
        if self.file.size < 24:
            raise self.file.error(f"the file has {self.file.size} bytes; a GGUF header needs 24")
        cursor.need(24, "the header")
        magic = bytes(cursor.buffer[:4])
        if magic != MAGIC:
            raise self.file.error(f"not a GGUF file: it starts with {magic!r}, not {MAGIC!r}", offset=0)
        cursor.pos = 4
        version = cursor.integer(4, "the version")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            if swapped in (1, *VERSIONS):
                raise self.file.error(f"big-endian GGUF (version {swapped}); only little-endian files are read")
            raise self.file.error(f"GGUF version {version}; versions 2 and 3 are read", offset=4)
        # A tensor info takes at least 24 bytes (empty name, no dimensions), a pair 13 (empty key, one byte).
        tensor_count = cursor.count(24, "the tensor count", MAX_TENSORS)
        return tensor_count, cursor.count(13, "the key-value count", MAX_PAIRS)

    def require_decodable(self) -> None:
        """UnsupportedModel, naming type and tensor, unless every tensor can be read."""
        for info in self.tensors.values():
            ggml_type(info.kind.id, info.name)

    def read(self, name: str) -> torch.Tensor:
        """A tensor in torch's order: float types as stored, quantised ones decoded to fp32. Memory of its own."""
        info = self.tensors[name]
        out = torch.empty(info.shape, dtype=info.kind.native or torch.float32)
        self.read_into(name, out)
        return out

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Fill the contiguous ``out``, of the tensor's shape and any float type; packed bytes are read piecewise."""
        info = self.tensors[name]
        kind = info.kind
        if kind.native is not None:
            self.file.floats_into(info.offset, kind.native, out)
            return
        flat = out.view(-1)
        most = SCRATCH_BYTES // kind.nbytes * kind.nbytes
        for first, piece in self.file.pieces(info.offset, info.nbytes, most):
            at = first // kind.nbytes * kind.values
            part = flat[at : at + piece.numel() // kind.nbytes * kind.values]
            if out.dtype == torch.float32:
                dequantize_into(piece, kind, part)
            else:
                part.copy_(dequantize(piece, kind, (part.numel(),)))

    def rows(self, name: str, first: int, count: int) -> PlainWeight:
        """Rows of a matrix as they are stored."""
        info = self.tensors[name]
        kind, k = info.kind, info.shape[-1]
        row_bytes = k // kind.values * kind.nbytes
        data = torch.empty(count * row_bytes, dtype=torch.uint8)
        self.file.bytes_into(info.offset + first * row_bytes, data)
        if kind.native is not None:
            return PlainWeight(FORMATS[kind.name], count, k, data.view(kind.native).view(count, k))
        return repack(kind.name, data.view(count, -1, kind.nbytes), k)

    def fingerprint(self) -> bytes:
        """Digest of the header and of samples of every tensor: tells models apart, is no proof against forgery."""
        digest = hashlib.sha256(self._header_digest)
        digest.update(self.file.size.to_bytes(8, "little"))
        for info in self.tensors.values():
            digest.update(self.file.sample(info.offset, info.nbytes))
        return digest.digest()

    def close(self) -> None:
        self.file.close()


def _metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for i in range(count):
        key = cursor.string(f"key {i}", MAX_NAME)
        if key in out:
            raise cursor.file.error(f"the metadata key {key[:200]!r} occurs twice", offset=cursor.pos)
        what = f"metadata {key[:200]!r}"
        kind = cursor.integer(4, f"the type of {what}")
        if kind not in _SMALLEST:
            raise cursor.file.error(f"{what}: unknown value type {kind}", offset=cursor.pos - 4)
        out[key] = cursor.value(kind, what)
    return out


def _tensor_infos(cursor: _Cursor, count: int) -> list[tuple[str, tuple[int, ...], int, int]]:
    """(name, shape in torch's order, type number, offset in the data) of every tensor."""
    out = []
    seen: set[str] = set()
    for i in range(count):
        name = cursor.string(f"the name of tensor {i}", MAX_NAME)
        if not name or not name.isprintable():
            raise cursor.file.error(f"tensor {i} is named {name[:200]!r}", offset=cursor.pos)
        if name in seen:
            raise cursor.file.error("this name occurs twice", tensor=name, offset=cursor.pos)
        seen.add(name)
        what = f"the entry of tensor {name[:200]!r}"
        dims = cursor.integer(4, what)
        if not 1 <= dims <= MAX_DIMS:
            raise cursor.file.error(f"{dims} dimensions; 1 to {MAX_DIMS} are allowed", tensor=name, offset=cursor.pos)
        shape = tuple(cursor.integer(8, what) for _ in range(dims))
        out.append((name, shape[::-1], cursor.integer(4, what), cursor.integer(8, what)))
    return out


def _alignment(file: DataFile, metadata: dict[str, Any]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(value) is not int or value < 1 or value & (value - 1) or value > 1 << 20:
        raise file.error(f"general.alignment is {value!r}; a power of two up to {1 << 20} is needed")
    return value


def _place(
    file: DataFile, raw: list[tuple[str, tuple[int, ...], int, int]], start: int, alignment: int
) -> dict[str, TensorInfo]:
    """Tensor infos with absolute offsets, each inside the file and apart from the others."""
    out: dict[str, TensorInfo] = {}
    room = file.size - start
    for name, shape, type_id, offset in raw:
        # A type known by name only still has a size: its architecture may be the better reason to refuse the file.
        kind = GGML_TYPES.get(type_id) or ggml_type(type_id, name)
        if 0 in shape:
            raise file.error(f"shape {list(shape)} has a zero", tensor=name)
        if shape[-1] % kind.values:
            raise file.error(
                f"rows of {shape[-1]} values are no whole number of {kind.name} blocks of {kind.values}", tensor=name
            )
        nbytes = math.prod(shape) // kind.values * kind.nbytes
        if offset % alignment:
            raise file.error(f"data offset {offset} is not a multiple of the alignment {alignment}", tensor=name)
        if offset + nbytes > room:
            raise file.error(
                f"shape {list(shape)} of {kind.name} needs bytes {offset} to {offset + nbytes} of the data; "
                f"the file has {max(room, 0)} (truncated?)",
                tensor=name,
                offset=start + offset,
            )
        out[name] = TensorInfo(name, shape, kind, start + offset, nbytes)
    _apart(file, out)
    return out


def _apart(file: DataFile, tensors: dict[str, TensorInfo]) -> None:
    end, before = 0, ""
    for info in sorted(tensors.values(), key=lambda t: t.offset):
        if info.offset < end:
            raise file.error(
                f"its bytes start at {info.offset}, inside those of {before!r}, which end at {end}",
                tensor=info.name,
                offset=info.offset,
            )
        end, before = info.offset + info.nbytes, info.name
