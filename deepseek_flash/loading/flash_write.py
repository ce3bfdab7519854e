"""Writing the flash format: every tensor's place is known before the first is read, so writing is one pass.

What is unfinished lies in a hidden folder beside the target, with a journal of the tensors that are in place and their
digests. Running again checks those and goes on; at the end the folder gets its name in one step. Whoever looks at the
target sees a whole model or nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from deepseek_flash import __version__
from deepseek_flash.errors import FormatError, ModelError
from deepseek_flash.kernels.cpu.packer import best_packer
from deepseek_flash.kernels.weights import SPARE
from deepseek_flash.loading.flash import (
    ALIGN,
    FORMAT,
    MANIFEST,
    PAD,
    PIECE_BYTES,
    VERSION,
    digest_of,
    format_to_json,
    stored_bytes,
)
from deepseek_flash.loading.load import read_floats
from deepseek_flash.loading.packed import Part, read_part
from deepseek_flash.loading.rules import Rule
from deepseek_flash.loading.source import TensorSource

SHARD_BYTES = 4 << 30
"""Most bytes of a file, unless one tensor is larger."""
_PLAN, _JOURNAL, _LOCK = "plan.json", "journal.jsonl", "lock"

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor to be written: a packed part, or a rule's floats."""

    name: str
    what: Part | tuple[Rule, torch.Size]
    offset: int = 0
    """In its file."""

    @property
    def nbytes(self) -> int:
        if isinstance(self.what, Part):
            return stored_bytes(self.what.format, self.what.rows, self.what.k)
        return 4 * self.what[1].numel()

    def entry(self, data_start: int) -> dict[str, Any]:
        """For the safetensors header."""
        packed = isinstance(self.what, Part)
        shape = [self.nbytes] if isinstance(self.what, Part) else list(self.what[1])
        first = self.offset - data_start
        return {"dtype": "U8" if packed else "F32", "shape": shape, "data_offsets": [first, first + self.nbytes]}

    def data(self, source: TensorSource) -> torch.Tensor:
        """Its bytes, without what rounds them up."""
        if isinstance(self.what, Part):
            return read_part(self.what, source, best_packer()).data
        return read_floats(*self.what, source).flatten().view(torch.uint8)


@dataclass(frozen=True, slots=True)
class Shard:
    """One safetensors file."""

    name: str
    header: bytes
    """With the length in front, as long as a multiple of ``ALIGN``."""
    pieces: tuple[Piece, ...]
    size: int


@dataclass(frozen=True, slots=True)
class FlashPlan:
    """The whole folder."""

    shards: tuple[Shard, ...]
    manifest: dict[str, Any]
    """Without digests."""
    texts: dict[str, bytes]
    """The small files, by name."""

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(p.nbytes for s in self.shards for p in s.pieces)

    def identity(self) -> str:
        """Digest: the same plan writes the same folder."""
        digest = hashlib.sha256(_json(self.manifest))
        for shard in self.shards:
            digest.update(shard.header)
        for name, text in sorted(self.texts.items()):
            digest.update(name.encode() + b"\0" + text + b"\0")
        return digest.hexdigest()


def plan_flash(
    parts: Mapping[str, Sequence[Part]],
    floats: Sequence[tuple[Rule, torch.Size]],
    source: TensorSource,
    about: Mapping[str, Any],
    texts: Mapping[str, bytes],
    *,
    shard_bytes: int = SHARD_BYTES,
) -> FlashPlan:
    """Give every tensor its place. ``about`` goes into the manifest, ``texts`` become files."""
    pieces = [Piece(f"{target}.{i}", part) for target, some in parts.items() for i, part in enumerate(some)]
    pieces += [Piece(rule.target, (rule, shape)) for rule, shape in floats]
    groups: list[list[Piece]] = [[]]
    room = shard_bytes
    for piece in pieces:
        if groups[-1] and piece.nbytes > room:
            groups.append([])
            room = shard_bytes
        groups[-1].append(piece)
        room -= piece.nbytes
    shards = tuple(_shard(_shard_name(i, len(groups)), group) for i, group in enumerate(groups))
    where = {p.name: s.name for s in shards for p in s.pieces}
    weights = {
        p.name: {
            "n": p.what.rows,
            "k": p.what.k,
            "format": format_to_json(p.what.format),
            "stored": _stored(p.what, source),
            "file": where[p.name],
        }
        for p in pieces
        if isinstance(p.what, Part)
    }
    vectors = {p.name: {"file": where[p.name]} for p in pieces if not isinstance(p.what, Part)}
    head = {"format": FORMAT, "version": VERSION, "tool": f"deepseek-flash {__version__}", **about}
    return FlashPlan(shards, {**head, "weights": weights, "vectors": vectors}, dict(texts))


def _shard_name(index: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def _shard(name: str, pieces: Sequence[Piece]) -> Shard:
    """Offsets depend on the header's length, and that on the offsets: they are written relative to its end."""
    placed, at = [], 0
    for piece in pieces:
        placed.append(Piece(piece.name, piece.what, at))
        at += piece.nbytes
    header: dict[str, Any] = {"__metadata__": {"format": FORMAT, "version": str(VERSION)}}
    header |= {p.name: p.entry(0) for p in placed}
    header[PAD] = {"dtype": "U8", "shape": [SPARE], "data_offsets": [at, at + SPARE]}
    raw = _json(header)
    raw += b" " * (-(8 + len(raw)) % ALIGN)
    raw = len(raw).to_bytes(8, "little") + raw
    moved = tuple(Piece(p.name, p.what, p.offset + len(raw)) for p in placed)
    return Shard(name, raw, moved, len(raw) + at + SPARE)


def _stored(part: Part, source: TensorSource) -> str:
    """The type its sources have; of several the one that decides how keys and values are cached: any quantised type,
    else the widest."""
    rank = {"F16": 0, "BF16": 1, "F32": 2}
    return max((source.dtype(name) for name in part.sources), key=lambda kind: rank.get(kind, 3))


def write_flash(plan: FlashPlan, source: TensorSource, out: Path, progress: Progress = lambda nbytes: None) -> Path:
    """Write the folder ``out``, or what is missing of it; ``progress`` is told the bytes done.

    ModelError when ``out`` holds something else, when the disk is too small or refuses, and while another process
    writes the same folder.
    """
    try:
        if _is_done(plan, out):
            progress(plan.nbytes)
            return out
        work = out.parent / f".{out.name}.partial"
        out.parent.mkdir(parents=True, exist_ok=True)
        work.mkdir(exist_ok=True)
        with _alone(work):
            done = _resume(plan, work)
            _need_room(plan, work)
            with (work / _JOURNAL).open("a", encoding="utf-8") as journal:
                for shard in plan.shards:
                    _write_shard(shard, source, work, done, journal, progress)
            _write_texts(plan, work, done)
            for name in (_PLAN, _JOURNAL, _LOCK):
                (work / name).unlink(missing_ok=True)
            _sync(work)
            os.replace(work, out)
        _sync(out.parent)
        return out
    except OSError as e:
        if isinstance(e, ModelError):
            raise
        raise ModelError(f"cannot write {out}: {e.strerror or e} (running again goes on where this ended)") from e


def _is_done(plan: FlashPlan, out: Path) -> bool:
    """Whether ``out`` is this model already; ModelError if it is something else."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    try:
        if json.loads((out / MANIFEST).read_bytes()).get("plan") == plan.identity() and all(
            (out / s.name).stat().st_size == s.size for s in plan.shards
        ):
            return True
    except (OSError, ValueError, AttributeError):
        pass
    raise ModelError(f"{out} exists already and is not this model: give another name, or remove it first")


@contextmanager
def _alone(work: Path) -> Iterator[None]:
    """Keep a second process out; the system forgets the lock when the process ends, however it ends."""
    with (work / _LOCK).open("w") as file:
        try:
            import fcntl
        except ImportError:  # not on Windows, where two converters to one place are the user's to avoid
            fcntl = None  # type: ignore[assignment]
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ModelError(f"another process is writing to {work}") from None
        yield


def _resume(plan: FlashPlan, work: Path) -> dict[str, str]:
    """Name → digest of tensors that are in place already; begins anew when the plan is another one."""
    identity, done = plan.identity(), {}
    try:
        same = (work / _PLAN).read_text(encoding="utf-8") == identity
    except (OSError, UnicodeDecodeError):
        same = False
    if not same:
        for path in work.iterdir():
            if path.name != _LOCK:
                path.unlink()
        _write(work / _PLAN, identity.encode())
        return {}
    journal = work / _JOURNAL
    for line in journal.read_text(encoding="utf-8", errors="replace").splitlines() if journal.exists() else []:
        try:
            name, digest = json.loads(line)
        except (ValueError, TypeError):  # the line that was being written
            continue
        done[str(name)] = str(digest)
    return {name: digest for name, digest in done.items() if _holds(plan, work, name, digest)}


def _holds(plan: FlashPlan, work: Path, name: str, digest: str) -> bool:
    """Whether a tensor's bytes are those that were written."""
    for shard in plan.shards:
        for piece in shard.pieces:
            if piece.name == name:
                path = work / shard.name
                if not path.is_file() or path.stat().st_size != shard.size:
                    return False
                with path.open("rb") as file:
                    file.seek(piece.offset)
                    return digest_of(_chunks(file, piece.nbytes)) == digest
    return False


def _chunks(file: IO[bytes], count: int) -> Iterator[bytes | memoryview]:
    while count > 0 and (data := file.read(min(PIECE_BYTES, count))):
        count -= len(data)
        yield data


def _need_room(plan: FlashPlan, work: Path) -> None:
    total = sum(s.size for s in plan.shards) + sum(map(len, plan.texts.values()))
    there = sum(p.stat().st_blocks * 512 if hasattr(p.stat(), "st_blocks") else 0 for p in work.iterdir())
    free = shutil.disk_usage(work).free
    if total - there > free:
        raise ModelError(f"converting needs {(total - there) >> 20} MiB in {work.parent}, {free >> 20} MiB are free")


def _write_shard(
    shard: Shard, source: TensorSource, work: Path, done: dict[str, str], journal: IO[str], progress: Progress
) -> None:
    path = work / shard.name
    with path.open("r+b" if path.exists() else "w+b") as file:
        file.truncate(shard.size)  # holes read as zeros: the padding is there already
        file.write(shard.header)
        for piece in shard.pieces:
            if piece.name not in done:
                data: Any = piece.data(source).numpy()
                view = memoryview(data)
                file.seek(piece.offset)
                file.write(view)
                file.flush()
                done[piece.name] = digest_of((view, bytes(piece.nbytes - view.nbytes)))
                journal.write(json.dumps([piece.name, done[piece.name]]) + "\n")
                journal.flush()
            progress(piece.nbytes)
        file.flush()
        os.fsync(file.fileno())


def _write_texts(plan: FlashPlan, work: Path, done: Mapping[str, str]) -> None:
    for name, text in plan.texts.items():
        _write(work / name, text)
    tensors = {
        key: {name: {**value, "digest": done[name]} for name, value in plan.manifest[key].items()}
        for key in ("weights", "vectors")
    }
    _write(work / MANIFEST, _json({**plan.manifest, "plan": plan.identity(), **tensors}, indent=1))


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Make names last, where a folder can be opened for that."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError:
        pass
    finally:
        os.close(descriptor)


def _json(value: Any, indent: int | None = None) -> bytes:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent).encode()
    except (TypeError, ValueError) as e:  # lone surrogates too
        raise FormatError(f"the checkpoint's metadata cannot be written as JSON: {e}") from None


def json_text(value: Any) -> bytes:
    """JSON for one of a folder's small files."""
    return _json(value, indent=1) + b"\n"
