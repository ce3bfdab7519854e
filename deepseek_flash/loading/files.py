"""Reading untrusted files: bounded reads at an offset, and JSON with its size and nesting checked."""

from __future__ import annotations

import json
import os
import stat
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch

from deepseek_flash.errors import FormatError, ModelError, ModelNotFound

JSON_BYTES = 32 << 20
"""Most bytes of a JSON text that is read; the index of a hundred thousand tensors is about 15 MB."""
CONFIG_BYTES = 4 << 20
"""Most bytes of a config.json or generation_config.json."""
_BYTES_PER_CONTAINER = 8
"""A JSON text has at most one list or dict for so many bytes (a safetensors entry has three in fifty); each takes
about 64 bytes of memory, and millions of them keep the garbage collector busy for minutes."""
SCRATCH_BYTES = 4 << 20
"""Most bytes of a tensor in their stored form at a time, when they are converted while they are read."""


class Scratch:
    """One reused buffer for the bytes being converted, for all files of a checkpoint. Safe from any thread.

    A fresh one for each tensor often leaves a hole in the heap (glibc seldom reuses one for aligned memory), which
    for bf16 files adds up to half the weights again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @contextmanager
    def take(self, count: int) -> Iterator[torch.Tensor]:
        """uint8 [count] until the block ends."""
        with self._lock:
            if self._buffer.numel() < count:
                self._buffer = torch.empty(max(count, SCRATCH_BYTES), dtype=torch.uint8)
            yield self._buffer[:count]


class DataFile:
    """A file read by offset. Plain reads, not a memory map: a file that shrinks while open is an error here, where
    a map would end the process with SIGBUS. Safe from any thread."""

    def __init__(self, path: Path, scratch: Scratch | None = None) -> None:
        self.path = path
        self._scratch = scratch or Scratch()
        self._lock = threading.Lock()
        try:
            if not stat.S_ISREG(path.stat().st_mode):  # asked first: to open a pipe is to wait for its writer
                raise ModelError(f"{path} is not a regular file")
            self._file: BinaryIO = path.open("rb", buffering=0)
        except FileNotFoundError:
            raise ModelNotFound(f"no such file: {path}") from None
        except OSError as e:
            raise ModelError(f"cannot open {path}: {e.strerror or e}") from e
        self.size = os.fstat(self._file.fileno()).st_size

    def read_into(self, offset: int, out: memoryview) -> None:
        """Fill ``out`` with the bytes at ``offset``; FormatError when the file ends before."""
        if offset < 0 or offset + out.nbytes > self.size:
            raise self.error(f"{out.nbytes} bytes wanted at offset {offset}, the file has {self.size}", offset=offset)
        done = 0
        with self._lock:
            try:
                self._file.seek(offset)
                while done < out.nbytes:
                    got = self._file.readinto(out[done:])  # type: ignore[attr-defined]
                    if not got:
                        break
                    done += got
            except ValueError:
                raise ModelError(f"{self.path} is closed") from None
            except OSError as e:
                raise ModelError(f"cannot read {self.path}: {e.strerror or e}") from e
        if done < out.nbytes:
            raise self.error(
                f"the file shrank while it was read: {out.nbytes} bytes wanted at offset {offset}, got {done}",
                offset=offset,
            )

    def read(self, offset: int, count: int) -> bytes:
        if offset < 0 or count < 0 or offset + count > self.size:
            raise self.error(f"{count} bytes wanted at offset {offset}, the file has {self.size}", offset=offset)
        out = bytearray(count)
        self.read_into(offset, memoryview(out))
        return bytes(out)

    def floats_into(self, offset: int, stored: torch.dtype, out: torch.Tensor) -> None:
        """Fill the contiguous ``out`` with as many ``stored`` numbers, converting piece by piece when types differ."""
        flat = out.view(-1)
        if out.dtype == stored:
            self.bytes_into(offset, flat.view(torch.uint8))
            return
        size = stored.itemsize
        for first, piece in self.pieces(offset, flat.numel() * size, SCRATCH_BYTES // size * size):
            part = piece.view(stored)
            flat[first // size : first // size + part.numel()].copy_(part)

    def bytes_into(self, offset: int, out: torch.Tensor) -> None:
        """Fill the contiguous uint8 ``out``."""
        if out.numel():
            array: Any = out.numpy()
            self.read_into(offset, memoryview(array))

    def pieces(self, offset: int, count: int, most: int) -> Iterator[tuple[int, torch.Tensor]]:
        """The bytes of a range, ``most`` at a time: (position in the range, uint8 tensor valid until the next)."""
        with self._scratch.take(min(count, most)) as scratch:
            for first in range(0, count, most):
                piece = scratch[: min(most, count - first)]
                self.bytes_into(offset + first, piece)
                yield first, piece

    def sample(self, offset: int, count: int) -> bytes:
        """Up to 1 KiB each from the start, middle and end of a range."""
        if count <= 3072:
            return self.read(offset, count)
        middle = offset + count // 2
        return self.read(offset, 1024) + self.read(middle, 1024) + self.read(offset + count - 1024, 1024)

    def error(self, message: str, *, tensor: str = "", offset: int | None = None) -> FormatError:
        where = f", tensor {tensor!r}" if tensor else ""
        return FormatError(f"{self.path}{where}: {message}", file=str(self.path), tensor=tensor, offset=offset)

    def close(self) -> None:
        self._file.close()


def parse_json(data: bytes, what: str, *, unique: bool = False) -> dict[str, Any]:
    """A JSON object; FormatError naming ``what`` when it is none, nests too deep, or (``unique``) repeats a key."""

    def pairs(items: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(items)
        if unique and len(out) != len(items):
            seen: set[str] = set()
            twice = next(k for k, _ in items if k in seen or seen.add(k))  # type: ignore[func-returns-value]
            raise FormatError(f"{what}: the key {twice[:200]!r} occurs twice", file=what)
        return out

    def constant(text: str) -> Any:
        # Old configs do hold Infinity; it is no JSON, and a size or scale that is not finite is no use to us.
        raise ValueError(f"{text} is not a JSON number")

    containers = data.count(b"[") + data.count(b"{")
    if containers > 100_000 + len(data) // _BYTES_PER_CONTAINER:
        raise FormatError(f"{what}: {containers} lists and dicts in {len(data)} bytes of JSON", file=what)
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=pairs, parse_constant=constant)
    except RecursionError:
        raise FormatError(f"{what}: nested too deep", file=what) from None
    except ValueError as e:  # also UnicodeDecodeError and numbers of thousands of digits
        raise FormatError(f"{what}: not valid JSON ({str(e)[:200]})", file=what) from None
    if not isinstance(value, dict):
        raise FormatError(f"{what}: a JSON object is needed, found {type(value).__name__}", file=what)
    return value


def read_json(path: Path, *, unique: bool = False, most: int = CONFIG_BYTES) -> dict[str, Any]:
    """The JSON object in a file of at most ``most`` bytes."""
    file = DataFile(path)
    try:
        if file.size > most:
            raise file.error(f"{file.size} bytes of JSON; at most {most} are read")
        return parse_json(file.read(0, file.size), str(path), unique=unique)
    finally:
        file.close()
