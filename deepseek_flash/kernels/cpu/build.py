"""Compile the C++ kernels into one shared library. Only the standard library is needed: pip runs this file on its own.

The library's name carries a digest of sources, flags and compiler, so a stale one is never loaded.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).with_name("src")
COMMON = (
    *("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-exceptions", "-fno-rtti"),
    *("-pthread", "-Wall", "-Wextra"),
    *("-Wno-uninitialized", "-Wno-maybe-uninitialized"),  # GCC 12 warns about its own AVX-512 headers
)
ISAS: dict[str, dict[str, str]] = {
    "x86_64": {
        "avx512": "-mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni "
        "-mprefer-vector-width=512",
        "avx2": "-mavx2 -mfma -mf16c",
        "scalar": "",
    },
    "aarch64": {"scalar": ""},
}
"""Machine → instruction set → flags of ``isa.cpp``; best first."""
PER_ISA = "isa.cpp"
THROWING = ("pool.cpp",)
"""Sources compiled with exceptions: std::thread has no other way to say that it cannot start."""
_COMPILERS = ("c++", "g++", "clang++")
_LONGEST = 600
"""Seconds a compiler may take."""


class BuildError(RuntimeError):
    """No compiler, or one that failed; the message has what it printed."""


def compiler() -> str | None:
    """Path of a C++ compiler, or None."""
    return next((found for name in _COMPILERS if (found := shutil.which(name))), None)


def machine() -> str:
    """``x86_64``, ``aarch64``, or what else the platform says."""
    name = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(name, name)


def suffix() -> str:
    """Of shared libraries here."""
    return {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")


def digest() -> str:
    """Of everything that makes the library: sources, flags, machine."""
    h = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        if path.suffix in (".h", ".cpp"):
            h.update(path.name.encode() + b"\0" + path.read_bytes())
    h.update(repr((COMMON, THROWING, ISAS.get(machine()), machine(), sys.platform)).encode())
    return h.hexdigest()[:16]


def library_name() -> str:
    """File name of the library these sources give."""
    return f"libflash_cpu-{digest()}{suffix()}"


def build(folder: Path, *, flags: tuple[str, ...] = (), program: Path | None = None) -> Path:
    """Compile into ``folder`` and return the library's path; atomic, so others see it whole or not at all.

    ``program``: a C++ file with ``main``, to make an executable of it and the kernels instead. ``flags`` are added.
    """
    cxx = compiler()
    if cxx is None:
        raise BuildError(f"no C++ compiler found (looked for {', '.join(_COMPILERS)})")
    isas = ISAS.get(machine(), {"scalar": ""})
    target = folder / (library_name() if program is None else program.stem)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".build-", dir=folder) as scratch:
        work = Path(scratch)
        jobs: list[tuple[list[str], Path]] = []
        for source in [*sorted(SOURCES.glob("*.cpp")), *([program] if program else [])]:
            if source.name == PER_ISA:
                for isa, extra in isas.items():
                    out = work / f"isa_{isa}.o"
                    jobs.append(
                        ([f"-DFLASH_ISA={isa}", *extra.split(), *flags, "-c", str(source), "-o", str(out)], out)
                    )
            else:
                out = work / f"{source.stem}.o"
                throwing = ["-fexceptions"] if source.name in THROWING else []
                jobs.append(([f"-I{SOURCES}", *throwing, *flags, "-c", str(source), "-o", str(out)], out))
        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
            list(pool.map(lambda job: _run([cxx, *COMMON, *job[0]]), jobs))
        made = work / target.name
        _run(
            [
                cxx,
                *(["-shared"] if program is None else []),
                "-pthread",
                *flags,
                *(str(out) for _, out in jobs),
                "-o",
                str(made),
            ]
        )
        with made.open("rb+") as file:
            os.fsync(file.fileno())  # before the rename: a power cut must not leave a short file of the right name
        os.replace(made, target)
    return target


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LONGEST, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as e:
        raise BuildError(f"{command[0]}: {e}") from e
    if done.returncode:
        shown = (done.stderr or done.stdout).strip()
        raise BuildError(f"{' '.join(command[:1])} failed ({done.returncode}) on {command[-3]}:\n{shown[:4000]}")


if __name__ == "__main__":
    sys.stdout.write(f"{build(Path(sys.argv[1] if len(sys.argv) > 1 else 'build'))}\n")
