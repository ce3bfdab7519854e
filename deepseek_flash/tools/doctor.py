"""``deepseek-flash doctor``: what this machine has, what is used, what is missing."""

from __future__ import annotations

import argparse
import importlib.util
import platform
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version

from rich.text import Text

from deepseek_flash import __version__
from deepseek_flash.config import ENVIRONMENT, cache_dir, kernels_preference
from deepseek_flash.errors import ConfigError
from deepseek_flash.loading import catalogue
from deepseek_flash.memory.probe import host_memory
from deepseek_flash.memory.report import human
from deepseek_flash.tools.screen import Screen

OPTIONAL = {
    "langchain-core": ("langchain_core", "the LangChain classes"),
    "triton": ("triton", "GPU kernels, which are not in this version"),
}


def run(options: argparse.Namespace) -> int:
    """Print the tables; 0 also when something optional is missing."""
    console = Screen(highlight=False, soft_wrap=True)
    _show(console, "Machine", machine())
    _show(console, "Kernels", kernels())
    _show(console, "Optional packages", optional())
    _show(console, "Models", models())
    _show(console, "Environment", environment())
    return 0


def _show(console: Screen, title: str, rows: Iterable[tuple[str, str]]) -> None:
    """Two columns; long values are left to the terminal to wrap, so that paths can be copied."""
    console.print(f"[bold]{title}[/]")
    listed = list(rows)
    width = max(len(name) for name, _ in listed)
    for name, value in listed:
        for label, line in zip([name, *[""] * value.count("\n")], value.split("\n"), strict=True):
            console.print(Text(f"  {label:<{width}}  {line}"))


def machine() -> Iterator[tuple[str, str]]:
    """Versions, cores, threads, memory."""
    import torch

    from deepseek_flash.kernels.cpu.processors import processors

    memory = host_memory()
    usable = processors()
    yield "deepseek-flash", __version__
    yield "platform", platform.platform()
    yield "processor", platform.processor() or platform.machine()
    yield "python", platform.python_version()
    yield "torch", f"{torch.__version__}, {torch.get_num_threads()} threads on {usable} usable cores"
    yield "memory", f"{human(memory.available)} free of {human(memory.total)} ({memory.limited_by})"
    cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    yield "GPU", f"{cuda} found, not used: CUDA kernels are not in this version" if cuda else "none found (none needed)"


def kernels() -> Iterator[tuple[str, str]]:
    """Which implementation each op got here, and what is lost against the best there is."""
    from deepseek_flash.kernels.cpu import lib
    from deepseek_flash.kernels.cpu.processors import processors
    from deepseek_flash.kernels.registry import select

    try:
        preference = kernels_preference()
        chosen = select("cpu", preference)
    except ConfigError as e:
        yield "not selected", str(e)
        return
    yield from chosen.describe().items()
    if preference == "reference":
        yield "lost", "DEEPSEEK_FLASH_KERNELS=reference forces the definitions: several times slower, same tokens"
    for op, reason in chosen.why.items():
        yield "lost", f"{op}: {reason}"
    library = lib.load()
    if library is None:
        yield "lost", f"native kernels: {lib.why_missing()}"
    else:
        yield "native library", f"{library.path}, {library.isa} in use, of {', '.join(library.isas)}"
        yield "native threads", f"{processors()} (the engine option threads sets another number)"
    yield "not there", "GPU kernels: docs/limits.md"


def optional() -> Iterator[tuple[str, str]]:
    """Packages that add something when they are there."""
    for distribution, (module, use) in OPTIONAL.items():
        try:
            found = version(distribution) if importlib.util.find_spec(module) else "not installed"
        except PackageNotFoundError:
            found = "installed, version unknown"
        yield distribution, f"{found}; for {use}"


def models() -> Iterator[tuple[str, str]]:
    """The cache folder and what was pulled into it."""
    yield "cache folder", str(cache_dir())
    for name in sorted(catalogue.CATALOGUE):
        path = catalogue.pulled(name)
        yield name, f"{path} ({human(path.stat().st_size)})" if path else f"not pulled: deepseek-flash pull {name}"


def environment() -> Iterator[tuple[str, str]]:
    """Every variable the package reads: value in force, meaning, [default]."""
    try:
        preference = kernels_preference()
    except ConfigError as e:
        preference = f"wrong ({e})"
    values = {"DEEPSEEK_FLASH_CACHE": str(cache_dir()), "DEEPSEEK_FLASH_KERNELS": preference}
    for name, meaning in ENVIRONMENT.items():
        yield name, f"{values[name]}\n{meaning}"
