"""Building and finding the library: without a compiler, from several processes, over a damaged file, in a wheel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from deepseek_flash.kernels.cpu import build, lib

ROOT = Path(__file__).parents[2]
needs_compiler = pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")

PROBE = """
import warnings
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    from deepseek_flash.kernels.cpu import lib
    from deepseek_flash.kernels.registry import select
    kernels = select("cpu")
    lib.load(), lib.why_missing()
print(kernels.packs, kernels.chosen["paged_attention"].name, len(seen), *(str(w.message) for w in seen))
"""


def _run(code: str, cache: Path, *, path: str | None = None, cxx: str = "") -> str:
    env = {**os.environ, "DEEPSEEK_FLASH_CACHE": str(cache), "CXX": cxx}
    if path is not None:
        env["PATH"] = path
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=110, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_without_a_compiler_torch_stands_in_and_one_warning_says_what_is_lost(tmp_path: Path) -> None:
    out = _run(PROBE, tmp_path / "cache", path=str(tmp_path))
    assert out.startswith("False torch-cpu 1 "), out
    for word in ("no C++ compiler", "slower", "fp32", "g++"):
        assert word in out


@needs_compiler
def test_a_compiler_that_appears_later_is_used_once(tmp_path: Path) -> None:
    assert _run(PROBE, tmp_path, path=str(tmp_path)).startswith("False")
    assert _run(PROBE, tmp_path).startswith("True native 0")
    (library,) = (tmp_path / "kernels").glob("libflash_cpu-*")
    made = library.stat().st_mtime_ns
    assert _run(PROBE, tmp_path, path=str(tmp_path)).startswith("True native 0"), "found without a compiler now"
    assert library.stat().st_mtime_ns == made


@needs_compiler
@pytest.mark.slow
def test_a_damaged_library_is_made_anew_and_processes_that_start_together_agree(tmp_path: Path) -> None:
    place = tmp_path / "kernels" / build.library_name()
    place.parent.mkdir(parents=True)
    place.write_bytes(b"\x7fELF, or not")
    command = [sys.executable, "-c", PROBE]
    env = {**os.environ, "DEEPSEEK_FLASH_CACHE": str(tmp_path)}
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env, cwd=ROOT) for _ in range(3)]
    assert all(r.communicate(timeout=110)[0].startswith("True native 0") for r in runs)
    assert [p.name for p in place.parent.iterdir() if not p.name.startswith(".lock")] == [place.name]


def _broken(folder: Path) -> Path:
    """A compiler that fails."""
    broken = folder / "broken-c++"
    broken.write_text("#!/bin/sh\necho 'fatal: no such header' >&2\nexit 3\n")
    broken.chmod(0o755)
    return broken


def test_a_compiler_that_fails_says_what_it_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(_broken(tmp_path)))
    with pytest.raises(build.BuildError, match=r"(?s)broken-c\+\+ failed \(3\) on .*\.cpp:.*no such header"):
        build.build(tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_CXX_is_the_compiler_with_its_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    found = build.compiler()
    monkeypatch.setenv("CXX", f"'{_broken(tmp_path)}' --wrapped 'two words'")
    assert build.command() == [str(tmp_path / "broken-c++"), "--wrapped", "two words"]
    assert build.compiler() == str(tmp_path / "broken-c++")
    monkeypatch.setenv("CXX", "  ")
    assert build.compiler() == found


@pytest.mark.parametrize(
    ("cxx", "said"), [("no-such-c++ -O2", "a compiler that is not there"), ("'g++", "cannot be read")]
)
def test_a_CXX_that_is_not_there_is_not_replaced_by_another(tmp_path: Path, cxx: str, said: str) -> None:
    out = _run(PROBE, tmp_path / "cache", cxx=cxx)
    assert out.startswith("False torch-cpu 1 "), out
    assert said in out
    assert cxx.split()[0].strip("'") in out


def test_the_name_follows_the_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = build.digest()
    for source in build.SOURCES.iterdir():
        (tmp_path / source.name).write_bytes(source.read_bytes())
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    assert build.digest() == before
    (tmp_path / "simd.h").write_text("// changed")
    assert build.digest() != before


@needs_compiler
def test_instruction_sets_of_this_processor_are_used() -> None:
    library = lib.load()
    assert library is not None
    assert library.isa == library.isas[0]
    assert library.isas[-1] == "scalar"
    assert library.functions.flash_use_isa(b"sse17") < 0


@needs_compiler
@pytest.mark.slow
def test_a_wheel_holds_the_library_and_the_sources(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        ".",
        "--no-deps",
        "--no-build-isolation",
        "-q",
        "-w",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=115, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert "-py3-none-" in wheel.name
    assert not wheel.name.endswith("-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert f"deepseek_flash/kernels/cpu/lib/{build.library_name()}" in names
    assert "deepseek_flash/kernels/cpu/src/linear_isa.h" in names
    assert "deepseek_flash/integrations/langchain/__init__.py" in names


@pytest.mark.slow
def test_a_wheel_without_a_library_is_for_all_platforms(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for part in ("deepseek_flash", "integrations"):
        shutil.copytree(ROOT / part, source / part, ignore=shutil.ignore_patterns("__pycache__"))
    for part in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / part, source / part)
    old = source / "build" / "lib" / "deepseek_flash" / "kernels" / "cpu" / "lib" / "libflash_cpu-old.so"
    old.parent.mkdir(parents=True)
    old.write_bytes(b"of an earlier build")
    command = [sys.executable, "-m", "pip", "wheel", str(source), "--no-deps", "--no-build-isolation", "-q"]
    env = {**os.environ, "CXX": str(_broken(tmp_path))}
    done = subprocess.run(
        [*command, "-w", str(tmp_path)], capture_output=True, text=True, timeout=115, cwd=tmp_path, env=env
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "deepseek_flash/kernels/cpu/src/linear_isa.h" in names
    assert not [n for n in names if "libflash_cpu" in n or ".data/" in n]
