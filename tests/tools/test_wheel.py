"""What a built wheel carries, and that it works without the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from deepseek_flash.kernels.cpu.build import compiler

ROOT = Path(__file__).resolve().parents[2]
PARTS = ["pyproject.toml", "README.md", "LICENSE", "deepseek_flash", "integrations"]


def run(*arguments: str | Path, **options) -> str:
    options.setdefault("env", {**os.environ, "PYTHONPATH": ""})
    done = subprocess.run(
        [str(a) for a in arguments], capture_output=True, text=True, timeout=110, check=False, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    # From a copy: a build leaves folders behind, and old ones would find their way into the wheel.
    source = tmp_path_factory.mktemp("source")
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, source / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / part, source / part)
    out = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", out, source)
    (built,) = out.glob("*.whl")
    return built


@pytest.mark.slow
def test_the_wheel_holds_every_module_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as z:
        names = set(z.namelist())
        metadata = z.read(next(n for n in names if n.endswith("/METADATA"))).decode()
    expected = {str(p.relative_to(ROOT).as_posix()) for p in (ROOT / "deepseek_flash").rglob("*.py")}
    expected |= {f"deepseek_flash/{p.relative_to(ROOT).as_posix()}" for p in (ROOT / "integrations").rglob("*.py")}
    expected |= {"deepseek_flash/py.typed"}
    expected |= {str(p.relative_to(ROOT).as_posix()) for p in (ROOT / "deepseek_flash/kernels/cpu/src").iterdir()}
    libraries = {n for n in names if "/libflash_cpu-" in n}
    assert len(libraries) == (1 if compiler() else 0)
    assert {n for n in names if ".dist-info/" not in n} - libraries == expected
    assert "deepseek_flash/integrations/langchain/__init__.py" in names
    assert any(n.endswith("licenses/LICENSE") for n in names)
    assert "Requires-Python: >=3.11" in metadata
    (triton,) = [line for line in metadata.splitlines() if line.startswith("Requires-Dist: triton")]
    assert "platform_system" in triton  # macOS and Windows have no triton


@pytest.mark.slow
def test_the_wheel_imports_in_a_clean_environment(wheel, tmp_path):
    home = tmp_path / "venv"
    venv.create(home, with_pip=False)
    folder = home / ("Scripts" if os.name == "nt" else "bin")
    python = folder / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    # Nothing is installed beside it: the package, its errors and the help need nothing.
    where = run(python, "-c", "import deepseek_flash, deepseek_flash.errors as e; print(e.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(home)
    assert "doctor" in run(folder / "deepseek-flash", "--help", cwd=tmp_path)
    # With the dependencies of this environment on the path, everything in it imports, without triton too.
    libraries = {**os.environ, "PYTHONPATH": sysconfig.get_path("purelib")}
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import deepseek_flash as d\n"
        "import deepseek_flash.integrations.langchain as l\n"
        "print([getattr(d, name) for name in d.__all__][0], d.__file__, l.__file__, sep='\\n')"
    )
    files = run(python, "-c", code, cwd=tmp_path, env=libraries).splitlines()[1:]
    assert all(Path(f).is_relative_to(home) for f in files)
