"""``deepseek-flash convert``: a model in the flash format, quantised if asked."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepseek_flash.config import kernels_preference
from deepseek_flash.errors import ConfigError, ModelError, near_or_all
from deepseek_flash.memory.report import human

if TYPE_CHECKING:
    from deepseek_flash.loading.source import TensorSource

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("chat_template.jinja", "chat_template.json"),
)
"""Of a Hugging Face folder, copied where they are."""
_RANGE = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?", flags=re.ASCII)


@dataclass(frozen=True, slots=True)
class Keep:
    """Weights that stay in their stored type: ``layers=0,1`` or ``layers=0-3``, a part of a name (``head``,
    ``mlp.down``), or a pattern for the whole name (``layers.*.attention.*``)."""

    patterns: tuple[str, ...]

    def matches(self, pattern: str, target: str) -> bool:
        """Whether one pattern means a parameter."""
        name = target.removesuffix(".weight")
        key, equals, numbers = pattern.partition("=")
        if equals:
            return any(_under(name, key, i) for i in _numbers(pattern, numbers))
        return f".{pattern}." in f".{name}." or fnmatchcase(name, pattern) or fnmatchcase(target, pattern)

    def __call__(self, target: str) -> bool:
        return any(self.matches(p, target) for p in self.patterns)

    def check(self, targets: Sequence[str]) -> None:
        """ConfigError for a pattern that means nothing in this model."""
        for pattern in self.patterns:
            key, equals, numbers = pattern.partition("=")
            if equals and any(_under(t, key, 0) for t in targets):
                for i in _numbers(pattern, numbers):
                    if not any(_under(t, key, i) for t in targets):
                        raise ConfigError(f"--keep {pattern}: there is no {key}.{i}", field="keep", value=pattern)
            elif not any(self.matches(pattern, t) for t in targets):
                words = {w for t in targets for w in t.removesuffix(".weight").split(".") if not w.isdecimal()}
                near = near_or_all(key, words)
                raise ConfigError(
                    f"--keep {pattern}: no weight of this model is meant{near}",
                    field="keep",
                    value=pattern,
                )


def _under(target: str, key: str, number: int) -> bool:
    return target.startswith(f"{key}.{number}.")


def _numbers(pattern: str, text: str) -> list[int]:
    out: list[int] = []
    for word in text.split(","):
        found = _RANGE.fullmatch(word.strip())
        if found is None:
            raise ConfigError(f"--keep {pattern}: numbers like 0,1 or 0-3 are needed", field="keep", value=pattern)
        out += range(int(found[1]), int(found[2] or found[1]) + 1)
    return out


def run(options: argparse.Namespace) -> int:
    """Convert, with a bar on standard error; the folder's name goes to standard output."""
    from deepseek_flash.loading.locate import locate

    out = convert(
        locate(options.model),
        Path(options.out),
        quantize=options.quantize,
        group=options.group,
        keep=tuple(options.keep or ()),
        bar=not options.no_progress,
    )
    print(out)
    return 0


def convert(
    path: Path, out: Path, *, quantize: str | None = None, group: int = 32, keep: tuple[str, ...] = (), bar: bool = True
) -> Path:
    """Write the model at ``path`` to the flash folder ``out``."""
    from tqdm import tqdm

    from deepseek_flash.kernels.registry import select
    from deepseek_flash.loading.flash_write import plan_flash, write_flash
    from deepseek_flash.loading.load import storage_plan
    from deepseek_flash.loading.source import open_source
    from deepseek_flash.models.registry import resolve
    from deepseek_flash.quant.encode import format_of

    format_of(quantize or "int4", group)  # refuses what it does not know, before anything is read
    if not quantize and (keep or group != 32):
        raise ConfigError("--keep and --group say how to quantise: give --quantize too", field="quantize")
    out = out.expanduser().absolute()
    kept = Keep(keep)
    with open_source(path) as source:
        texts = small_files(source, path)
        model = resolve(source.config).build(select("cpu", kernels_preference()))
        parts, floats = storage_plan(model, model.rules, source, lambda t: None if kept(t) else quantize, group)
        kept.check(list(parts))
        about = {
            "source": {"kind": source.kind, "name": path.name, "fingerprint": source.fingerprint().hex()},
            "quantize": quantize,
            "group": group if quantize else None,
            "keep": list(keep),
        }
        plan = plan_flash(parts, floats, source, about, texts)
        with tqdm(
            total=plan.nbytes, unit="B", unit_scale=True, unit_divisor=1024, desc=out.name, disable=not bar
        ) as shown:
            write_flash(plan, source, out, shown.update)
    if bar:
        print(f"{human(plan.nbytes)} of weights", file=sys.stderr)
    return out


def small_files(source: TensorSource, path: Path) -> dict[str, bytes]:
    """Config, generation config and tokenizer, by file name. Read and checked first: a folder that could not be
    opened afterwards is not worth an hour of writing."""
    from deepseek_flash.loading.flash import GGUF_TOKENIZER
    from deepseek_flash.loading.flash_write import json_text
    from deepseek_flash.text.tokenizer import Tokenizer

    config = {key: value for key, value in source.config.items() if key != "quantization_config"}
    texts = {"config.json": json_text(config)}
    if source.generation_config:
        texts["generation_config.json"] = json_text(source.generation_config)
    if source.metadata:
        Tokenizer.from_gguf(source.metadata, str(path))
        texts[GGUF_TOKENIZER] = json_text(_vocabulary(source.metadata))
        return texts
    Tokenizer.from_folder(path)
    for name in TOKENIZER_FILES:
        try:
            if (path / name).is_file():
                texts[name] = (path / name).read_bytes()
        except OSError as e:
            raise ModelError(f"cannot read {path / name}: {e.strerror or e}") from e
    return texts


def _vocabulary(metadata: dict[str, Any]) -> dict[str, Any]:
    """The key-values that a tokenizer is made of; byte-level ones have no use for scores."""
    unused = {"tokenizer.ggml.scores"} if metadata.get("tokenizer.ggml.model") == "gpt2" else set()
    return {key: value for key, value in metadata.items() if key.startswith("tokenizer.") and key not in unused}
