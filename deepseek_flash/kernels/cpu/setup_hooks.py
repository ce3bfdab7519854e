"""What ``pip install`` does beside copying files: compile the kernels, when there is a compiler.

Loaded by setuptools on its own, before the package can be imported.
"""

from __future__ import annotations

import importlib.util
import logging
import shutil
from pathlib import Path
from types import ModuleType

from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

_LOG = logging.getLogger(__name__)
_HERE = Path(__file__).resolve().parent


def _build() -> ModuleType:
    """``build.py`` beside this file."""
    spec = importlib.util.spec_from_file_location("deepseek_flash_cpu_build", _HERE / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _folder(build_lib: str) -> Path:
    """Where the library goes below setuptools' build folder."""
    return Path(build_lib) / "deepseek_flash" / "kernels" / "cpu" / "lib"


class BuildPy(build_py):  # type: ignore[misc]
    """Python files, then the library. An editable install compiles at first use, into the cache folder."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        build, folder = _build(), _folder(self.build_lib)
        shutil.rmtree(folder, ignore_errors=True)  # an earlier build's, of other sources
        try:
            build.build(folder)
        except build.BuildError as e:
            shutil.rmtree(folder, ignore_errors=True)
            _LOG.warning("the native CPU kernels were not built (torch will stand in): %s", e)


class BdistWheel(bdist_wheel):  # type: ignore[misc]
    """A wheel for one platform and every Python 3 when it holds a library, else one for all platforms."""

    def run(self) -> None:
        if not self.skip_build:
            self.run_command("build")  # super() will not do it again
        if (_folder(self.get_finalized_command("build_py").build_lib) / _build().library_name()).exists():
            # "platlib" is the wheel's root from here on, so the files are not shifted into .data/purelib.
            self.distribution.has_ext_modules = lambda: True
            self.root_is_pure = False
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = super().get_tag()
        return (python, abi, platform) if self.root_is_pure else ("py3", "none", platform)
