"""``deepseek-flash cache``: a folder of the disk tier, without the model that filled it."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deepseek_flash.errors import ConfigError

DAMAGED = 1
"""Exit code of ``verify`` when something was."""
_ANY = 1 << 62
"""No bound: nothing is written here."""


def run(options: argparse.Namespace) -> int:
    """List, verify or clear; the exit code."""
    action = {"ls": _ls, "verify": _verify, "clear": _clear}[options.action]
    with _opened(Path(options.path).expanduser()) as store:
        found, text, code = action(store)
    print(json.dumps(found) if options.json else text)
    return code


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    from deepseek_flash.kv.disk import DiskStore
    from deepseek_flash.kv.folder import INDEX_FILES

    if not path.is_dir():
        raise ConfigError(f"{str(path)!r} is not a folder", field="path", value=str(path))
    if not (path / INDEX_FILES[0]).exists() and not any(path.glob("seg-*")):  # opening would make a cache of it
        raise ConfigError(f"{str(path)!r} holds no cache", field="path", value=str(path))
    store = DiskStore(path, None, limit_bytes=_ANY)
    try:
        yield store
    finally:
        store.close()


def _ls(store: Any) -> tuple[dict[str, Any], str, int]:
    records, stats = store.records(), store.stats()
    found = {"records": [asdict(r) for r in records], "bytes": stats["bytes"], "pins": store.pins()}
    lines = [f"{'identity':<12} {'kind':<8} {'depth':>7} {'blocks':>6} {'KiB':>8} {'hits':>5}  last used"]
    for r in sorted(records, key=lambda r: (r.identity, r.depth)):
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(r.used))
        pinned = "  pinned" if r.pinned else ""
        lines.append(
            f"{r.identity[:12]:<12} {r.kind:<8} {r.depth:>7} {r.blocks:>6} {r.bytes / 1024:>8.0f} {r.hits:>5}  "
            f"{used}{pinned}"
        )
    lines.append(f"{len(records)} records, {stats['bytes'] / 1e6:.1f} MB")
    return found, "\n".join(lines), 0


def _verify(store: Any) -> tuple[dict[str, Any], str, int]:
    report = store.verify()
    text = f"{report.records} records, {report.bytes / 1e6:.1f} MB read, {report.damaged} damaged"
    if report.damaged:
        text += " and removed: they will be computed again"
    return asdict(report), text, DAMAGED if report.damaged else 0


def _clear(store: Any) -> tuple[dict[str, Any], str, int]:
    freed = store.clear()
    return {"freed": freed}, f"{freed / 1e6:.1f} MB freed", 0
