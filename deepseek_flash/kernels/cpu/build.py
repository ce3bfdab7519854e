"""Compile the C++ kernels into one shared library. Only the standard library is needed: pip runs this file on its own.

The library's name carries a digest of sources, flags and machine, so a stale one is never loaded. The compiler is not
in it: a library that came in a wheel must be found where there is another compiler, or none, and every compiler gives
the same results. After a change of compiler, deleting the cache folder's ``kernels`` makes a new one.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
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
    "aarch64": {
        "neon_dot": "-DFLASH_NEON -march=armv8.2-a+dotprod",
        "neon": "-DFLASH_NEON",
        "scalar": "",
    },
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


def command() -> list[str]:
    """How the C++ compiler is called: ``$CXX``, wrappers and options included, or the first one there is."""
    wanted = os.environ.get("CXX", "").strip()
    if wanted:
        try:
            words = shlex.split(wanted)
        except ValueError as e:
            raise BuildError(f"the environment's CXX cannot be read: {wanted!r} ({e})") from e
        if shutil.which(words[0]) is None:
            raise BuildError(f"the environment's CXX names a compiler that is not there: {wanted!r}")
        return words
    found = next((path for name in _COMPILERS if (path := shutil.which(name))), None)
    if found is None:
        raise BuildError(f"no C++ compiler found (looked for {', '.join(_COMPILERS)}; CXX is not set)")
    return [found]


def compiler() -> str | None:
    """The program of ``command()``, or None."""
    try:
        return command()[0]
    except BuildError:
        return None


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


def build(
    folder: Path,
    *,
    flags: tuple[str, ...] = (),
    program: Path | None = None,
    cross: tuple[str, str] | None = None,
) -> Path:
    """Compile into ``folder`` and return the library's path; atomic, so others see it whole or not at all.

    ``program``: a C++ file with ``main``, to make an executable of it and the kernels instead. ``flags`` are added.
    ``cross``: another machine and a compiler for it.
    """
    cxx = [cross[1]] if cross else command()
    target = folder / (library_name() if program is None else program.stem)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".build-", dir=folder) as scratch:
        jobs = _jobs(Path(scratch), cross[0] if cross else machine(), program)
        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
            list(pool.map(lambda job: _run([*cxx, *COMMON, *job[0], *flags, "-c", job[1], "-o", job[2]]), jobs))
        made = Path(scratch) / target.name
        shared = ["-shared"] if program is None else []
        _run([*cxx, *shared, "-pthread", *flags, *(out for _, _, out in jobs), "-o", str(made)])
        with made.open("rb+") as file:
            os.fsync(file.fileno())  # before the rename: a power cut must not leave a short file of the right name
        os.replace(made, target)
    return target


def _jobs(work: Path, target: str, program: Path | None) -> list[tuple[list[str], str, str]]:
    """What to compile: options of its own, source, object file in ``work``."""
    jobs: list[tuple[list[str], str, str]] = []
    for source in [*sorted(SOURCES.glob("*.cpp")), *([program] if program else [])]:
        if source.name == PER_ISA:
            for isa, extra in ISAS.get(target, {"scalar": ""}).items():
                jobs.append(([f"-DFLASH_ISA={isa}", *extra.split()], str(source), str(work / f"isa_{isa}.o")))
        else:
            throwing = ["-fexceptions"] if source.name in THROWING else []
            jobs.append(([f"-I{SOURCES}", *throwing], str(source), str(work / f"{source.stem}.o")))
    return jobs


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
