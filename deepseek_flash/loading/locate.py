"""What a model name means: a folder, a GGUF file, a catalogue name, or a Hub repo. In this order."""

from __future__ import annotations

import os
import re
from pathlib import Path

from deepseek_flash.errors import ModelNotFound, near_miss
from deepseek_flash.loading.catalogue import CATALOGUE, pulled
from deepseek_flash.loading.hub import HubName, fetch

_HUB = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[\w.-]+)(?:@(?P<revision>[^:@\s]+))?(?::(?P<file>[^:]+))?", flags=re.ASCII
)
_DRIVE = re.compile(r"[A-Za-z]:[\\/]")


def locate(name: str, *, progress: bool = True, endpoint: str | None = None, hub_cache: Path | None = None) -> Path:
    """The folder or GGUF file that ``name`` means, downloaded if it is a Hub repo.

    A path that exists comes first, so a local folder ``org/name`` hides the Hub repo of that name. ModelNotFound
    says which of the four readings was tried. ``endpoint`` and ``hub_cache``: another Hub, another cache folder.
    """
    path = _existing(name)
    if path is not None:
        return path
    if name in CATALOGUE:
        found = pulled(name)
        if found is None:
            raise ModelNotFound(f"{name} is not here yet: run `deepseek-flash pull {name}`")
        return found
    hub = parse_hub_name(name)
    if hub is None:
        raise _not_found(name)
    return fetch(hub, progress=progress, endpoint=endpoint, cache=hub_cache)


def parse_hub_name(name: str) -> HubName | None:
    """``org/name[@revision][:file.gguf]`` taken apart; None for what can only be a path or a misspelling."""
    if looks_like_path(name):
        return None
    found = _HUB.fullmatch(name)
    if found is None or ".." in name:
        return None
    return HubName(found["repo"], found["revision"], found["file"])


def looks_like_path(name: str) -> bool:
    """True for what no Hub repo is called: ``./x``, ``/x``, ``~/x``, ``C:\\x``, ``a/b/c``, ``a/b.gguf``."""
    if name.startswith((".", "/", "~", os.sep)) or "\\" in name or _DRIVE.match(name):
        return True
    repo, colon, _ = name.partition(":")
    repo = repo.partition("@")[0]
    return repo.count("/") > 1 or repo.endswith("/") or (not colon and repo.lower().endswith((".gguf", ".safetensors")))


def _existing(name: str) -> Path | None:
    if not name.strip() or "\0" in name:
        return None
    try:
        path = Path(name).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError):  # a name too long for a file; no home folder
        return None


def _not_found(name: str) -> ModelNotFound:
    shown = repr(name[:300])
    if looks_like_path(name):
        return ModelNotFound(f"no such file or folder: {shown}{_near_path(name)}")
    return ModelNotFound(
        f"no model {shown}: it is no existing folder or file, no catalogue name ({', '.join(CATALOGUE)}), "
        f"and no Hub repo (org/name[@revision][:file.gguf]){near_miss(name, CATALOGUE)}"
    )


def _near_path(name: str) -> str:
    """Names beside the one that is missing, from the last folder of the path that exists."""
    try:
        path = Path(name).expanduser().absolute()
        while not path.parent.is_dir() and path != path.parent:
            path = path.parent
        beside = sorted(p.name for p in path.parent.iterdir())[:1000]
    except (OSError, RuntimeError, ValueError):
        return ""
    near = near_miss(path.name, beside)
    if near:
        return f"{near} (in {path.parent})"
    return f" ({path.parent} has no {path.name!r})"
