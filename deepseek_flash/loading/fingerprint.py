"""A digest of a model's files, whole: computed once, remembered by path, size, time and inode.

What the disk cache keeps must never meet other weights. A source's own fingerprint samples tensors, which tells
models apart but not every edit; this one reads everything, at first use of a file.
"""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from deepseek_flash.config import cache_dir
from deepseek_flash.loading.source import TensorSource

_FILES = (".safetensors", ".gguf", ".json", ".model", ".txt", ".jinja")
_CHUNK = 8 << 20
_MOST = 4096
"""Remembered files."""


def weights_fingerprint(path: Path, source: TensorSource, memory: Path | None = None) -> bytes:
    """32 bytes over weights, config and tokenizer files. A flash folder's manifest holds digests of all it has, so
    its own fingerprint will do. ``memory``: the file that remembers; one that cannot be written is done without."""
    if source.kind == "flash":
        return source.fingerprint()
    files = [path] if path.is_file() else sorted(p for p in path.iterdir() if p.suffix in _FILES and p.is_file())
    memory = memory or cache_dir() / "fingerprints.json"
    known = _read(memory)
    digest, changed = blake2b(source.fingerprint(), digest_size=32), False
    for file in files:
        key = _identity(file)
        if key not in known:
            known[key], changed = _digest(file), True
        digest.update(f"{file.name}\0{known[key]}\0".encode())
    if changed:
        _write(memory, known)
    return digest.digest()


def _identity(file: Path) -> str:
    s = file.stat()
    return f"{file.resolve()}|{s.st_size}|{s.st_mtime_ns}|{s.st_ino}|{s.st_dev}"


def _digest(file: Path) -> str:
    digest = blake2b(digest_size=32)
    with file.open("rb", buffering=0) as f:
        while chunk := f.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _read(memory: Path) -> dict[str, str]:
    try:
        found = json.loads(memory.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {k: v for k, v in found.items() if isinstance(k, str) and isinstance(v, str) and len(v) == 64}


def _write(memory: Path, known: dict[str, str]) -> None:
    kept = dict(list(known.items())[-_MOST:])
    with suppress(OSError):
        memory.parent.mkdir(parents=True, exist_ok=True)
        fd, name = tempfile.mkstemp(dir=memory.parent, prefix=".fingerprints-")
        try:
            with os.fdopen(fd, "w", encoding="utf-8") as f:
                json.dump(kept, f)
            os.replace(name, memory)
        except BaseException:
            with suppress(OSError):
                os.unlink(name)
            raise
