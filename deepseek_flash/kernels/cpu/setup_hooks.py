"""What ``pip install`` does beside copying files: compile the kernels, when there is a compiler.

Loaded by setuptools on its own, before the package can be imported.
"""

from __future__ import annotations

import importlib.util
import logging
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


class BuildPy(build_py):  # type: ignore[misc]
    """Python files, then the library. An editable install compiles at first use, into the cache folder."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        build = _build()
        try:
            build.build(Path(self.build_lib) / "deepseek_flash" / "kernels" / "cpu" / "lib")
        except build.BuildError as e:
            _LOG.warning("the native CPU kernels were not built (torch will stand in): %s", e)


class BdistWheel(bdist_wheel):  # type: ignore[misc]
    """A wheel for one platform and every Python 3, when it holds a library."""

    def finalize_options(self) -> None:
        if _build().compiler() is not None:
            # Before super() looks: "platlib" is then the wheel's root, so the files are not shifted into .data/purelib.
            self.distribution.has_ext_modules = lambda: True
        super().finalize_options()

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = super().get_tag()
        return (python, abi, platform) if self.root_is_pure else ("py3", "none", platform)
