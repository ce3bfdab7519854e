"""``deepseek-flash plan``: does a model fit, with which context and how many sequences, and if not, what would."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from deepseek_flash.config import EngineConfig, kernels_preference, parse_bytes
from deepseek_flash.errors import ConfigError, ModelError
from deepseek_flash.memory.plan import Budget, MemoryPlan
from deepseek_flash.memory.plan import plan as make_plan
from deepseek_flash.memory.probe import host_memory
from deepseek_flash.memory.report import human

if TYPE_CHECKING:
    from deepseek_flash.kernels.registry import Kernels
    from deepseek_flash.loading.source import TensorIndex

DOES_NOT_FIT = 1


def run(options: argparse.Namespace) -> int:
    """Print the table, or JSON; 0 where a full sequence fits, else 1."""
    if options.plot:
        _require_matplotlib()
    path, made = predict(options)
    if options.plot:
        draw(made, path.parent.name if path.name == "config.json" else path.name, Path(options.plot))
    if options.json:
        print(json.dumps(plain(made, path), indent=1))
    else:
        _show(made, path)
    return 0 if made.fits else DOES_NOT_FIT


def predict(options: argparse.Namespace) -> tuple[Path, MemoryPlan]:
    """Where the model is, and its plan."""
    from deepseek_flash.kernels.registry import select
    from deepseek_flash.loading.source import TensorSource
    from deepseek_flash.models.sizes import ModelSizes, StepLimits
    from deepseek_flash.runtime.cache_types import cache_dtypes
    from deepseek_flash.runtime.runtime import DEFAULT_BLOCK_SIZE

    names = ("max_model_len", "max_batch_size", "kv_cache_dtype", "quantize")
    config = EngineConfig.from_options(options.model, {name: getattr(options, name) for name in names})
    memory = (
        host_memory().total if options.device_memory is None else parse_bytes(options.device_memory, "device_memory")
    )
    kernels = select("cpu", kernels_preference())
    path = find(options.model)
    with opened(path, kernels) as source:
        sizes = ModelSizes(source, kernels)
        longest = sizes.info.max_position
        if (config.max_model_len or 0) > longest:
            raise ConfigError(
                f"max_model_len={config.max_model_len}: this checkpoint's positions end at {longest}",
                field="max_model_len",
                value=config.max_model_len,
                allowed=f"2 to {longest}",
            )
        if config.quantize is not None and config.quantize not in sizes.quantize_choices():
            raise ConfigError(
                f"quantize={config.quantize!r} needs the native CPU kernels, which are not there "
                f"(deepseek-flash doctor says why)",
                field="quantize",
                value=config.quantize,
            )
        limits = StepLimits(config.max_batch_size, config.prefill_chunk_size, None, DEFAULT_BLOCK_SIZE)
        needs = sizes.needs(
            limits,
            # It looks at names, shapes and types only.
            kv_cache_dtype=cache_dtypes(config, cast(TensorSource, source), kernels, sizes.info.num_layers),
            quantize=config.quantize,
            max_model_len=config.max_model_len,
        )
        return path, make_plan(needs, Budget.share(memory, options.fraction))


def find(model: str) -> Path:
    """The folder or file that ``model`` means; of a Hub repo that is not here, its config alone."""
    from deepseek_flash.loading.catalogue import CATALOGUE
    from deepseek_flash.loading.hub import fetch_config
    from deepseek_flash.loading.locate import locate, parse_hub_name

    hub = parse_hub_name(model)
    if hub is None or hub.file is not None or model in CATALOGUE or Path(model).exists():
        return locate(model)
    return fetch_config(hub)


@contextmanager
def opened(path: Path, kernels: Kernels) -> Iterator[TensorIndex]:
    """What the files tell of the model's tensors, or what the config promises where it is alone."""
    from deepseek_flash.loading.files import read_json
    from deepseek_flash.loading.source import open_source
    from deepseek_flash.models.sizes import ConfigOnly

    if path.suffix == ".json":
        yield ConfigOnly(read_json(path), kernels)
    elif path.is_dir() and _holds_config_only(path):
        yield ConfigOnly(read_json(path / "config.json"), kernels)
    else:
        with open_source(path) as source:
            yield source


def _holds_config_only(folder: Path) -> bool:
    from deepseek_flash.loading.flash import MANIFEST
    from deepseek_flash.loading.safetensors import INDEX

    if not (folder / "config.json").is_file() or (folder / MANIFEST).exists():
        return False
    # An index without its shards is a download not begun or not finished: the config says as much.
    weights = [*folder.glob("*.safetensors"), *folder.glob("*.gguf"), *folder.glob("*.bin")]
    return not weights or (not (folder / INDEX).exists() and all(w.suffix == ".bin" for w in weights))


def plain(made: MemoryPlan, path: Path) -> dict[str, Any]:
    """For JSON."""
    return {
        "model": str(path),
        "fits": made.fits,
        "lines": {line.name: {"bytes": line.bytes, "what": line.what} for line in made.lines},
        "total": made.total,
        "budget": made.budget.bytes,
        "device_memory": made.budget.total,
        "memory_fraction": made.budget.fraction,
        "max_model_len": made.context,
        "sequences": made.sequences,
        "largest_context": made.largest_context,
        "alternatives": [
            {"text": str(a), "options": dict(a.options), "total": a.plan.total} for a in made.alternatives
        ],
    }


def _show(made: MemoryPlan, path: Path) -> None:
    from rich.text import Text

    from deepseek_flash.tools.screen import Screen

    console = Screen(highlight=False, soft_wrap=True)
    console.print(Text(str(path), style="bold"))
    for line in str(made).splitlines():
        console.print(Text(f"  {line}"))
    if made.fits:
        return
    console.print(Text("Any one of these fits" if made.alternatives else "No option makes it fit", style="bold"))
    for alternative in made.alternatives:
        console.print(Text(f"  {alternative}"))


def _require_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError(
            "--plot needs matplotlib, which is not installed: pip install 'deepseek-flash[plot]'", field="plot"
        ) from None


def draw(made: MemoryPlan, title: str, out: Path) -> None:
    """The four layers one on the other, against the budget, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.0, 5.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes, below = figure.add_subplot(), 0.0
    for line in made.lines:
        size = line.bytes / 2**30
        axes.bar([title], [size], bottom=below, width=0.5, label=f"{line.name}, {human(line.bytes)}")
        below += size
    axes.axhline(made.budget.bytes / 2**30, color="black", linestyle="--", label=f"budget, {human(made.budget.bytes)}")
    axes.set_xlim(-1.0, 1.0)
    axes.set_ylim(0.0, 1.15 * max(below, made.budget.bytes / 2**30))
    axes.set_ylabel("GiB")
    axes.set_title(
        f"{made.sequences} x {made.context:,} tokens" if made.fits else f"{made.context:,} tokens do not fit"
    )
    axes.legend(loc="upper right", fontsize="small")
    try:
        figure.savefig(out, format="png", dpi=120)
    except OSError as e:
        raise ModelError(f"cannot write {out}: {e}") from e
