"""The kernels on 64-bit Arm, by emulation: every instruction set gives the bits of plain C++, and of this machine."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from deepseek_flash.kernels.cpu import build, lib

NATIVE = Path(__file__).parent / "native"
CROSS = "aarch64-linux-gnu-g++"
EMULATOR = "qemu-aarch64"
MISSING = [name for name in (CROSS, EMULATOR) if shutil.which(name) is None]
CASES = 100
PROCESSORS = {"max": "neon_dot,neon,scalar", "cortex-a53": "neon,scalar"}
"""What is emulated, with and without the dot-product extension, and the instruction sets it must offer."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler"),
]
needs_arm = pytest.mark.skipif(
    bool(MISSING), reason=f"{' and '.join(MISSING)} not installed (Debian: g++-aarch64-linux-gnu, qemu-user)"
)


def _run(*command: str | Path) -> list[str]:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The check program for this machine, on the library that engines load here."""
    library, program = lib.load(), tmp_path_factory.mktemp("native") / "check"
    assert library is not None
    _run(*build.command(), *build.COMMON, f"-I{build.SOURCES}", NATIVE / "check.cpp", library.path, "-o", program)
    return program


@pytest.fixture(scope="module")
def arm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The check program for Arm, compiled as users' libraries are."""
    folder = tmp_path_factory.mktemp("arm")
    return build.build(folder, program=NATIVE / "check.cpp", flags=("-static",), cross=("aarch64", CROSS))


@needs_arm
@pytest.mark.parametrize("processor", PROCESSORS)
def test_random_cases_have_the_same_bits_on_arm(processor: str, arm: Path, native: Path) -> None:
    """Between the instruction sets (the program compares them), with one and three threads, and with this machine."""
    ran, digest = _run(EMULATOR, "-cpu", processor, arm, "1", str(CASES))
    assert ran == f"{CASES} cases on {PROCESSORS[processor]}"
    assert digest == _run(native, "1", str(CASES))[1]
    assert digest != _run(native, "2", str(CASES))[1], "a digest of nothing"


def _primitives(folder: Path, machine: str, isa: str, compiler: list[str], *runner: str) -> dict[str, str]:
    program = folder / f"primitives-{machine}-{isa}"
    flags = [f"-DFLASH_ISA={isa}", *build.ISAS.get(machine, {"scalar": ""})[isa].split(), f"-I{build.SOURCES}"]
    _run(*compiler, *build.COMMON, "-O1", *flags, NATIVE / "primitives.cpp", "-o", program)
    return dict(line.rsplit(" ", 1) for line in _run(*runner, program))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Digests of the primitives in plain C++ on this machine."""
    found = _primitives(tmp_path_factory.mktemp("plain"), build.machine(), "scalar", build.command())
    assert len(found) > 20
    assert len(set(found.values())) == len(found), "two primitives with equal results"
    return found


def test_primitives_agree_on_numbers_that_are_rare(plain: dict[str, str], tmp_path: Path) -> None:
    library = lib.load()
    assert library is not None
    for isa in library.isas[:-1]:
        assert _primitives(tmp_path, build.machine(), isa, build.command()) == plain, isa


@needs_arm
@pytest.mark.parametrize(
    ("isa", "processor"), [("neon_dot", "max"), ("neon", "max"), ("neon", "cortex-a53"), ("scalar", "cortex-a53")]
)
def test_primitives_agree_on_arm(isa: str, processor: str, plain: dict[str, str], tmp_path: Path) -> None:
    assert _primitives(tmp_path, "aarch64", isa, [CROSS, "-static"], EMULATOR, "-cpu", processor) == plain


@pytest.mark.skipif(build.machine() != "x86_64", reason="needs a program for x86-64")
@pytest.mark.skipif(shutil.which("qemu-x86_64") is None, reason="qemu-x86_64 not installed (Debian: qemu-user)")
@pytest.mark.parametrize(
    ("processor", "sets"), [("max", "avx2,scalar"), ("max,-f16c", "scalar"), ("max,-fma", "scalar")]
)
def test_AVX2_kernels_need_all_that_they_were_compiled_for(processor: str, sets: str, native: Path) -> None:
    """Conversion of fp16 and fused multiply-add are extensions of their own, which a virtual machine can hide."""
    assert _run("qemu-x86_64", "-cpu", processor, native, "1", "0")[0] == f"0 cases on {sets}"
