"""Which type each layer's keys and values are cached in: the option, by pattern or for all, and the defaults."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import groupby

from deepseek_flash.config import EngineConfig
from deepseek_flash.errors import ConfigError
from deepseek_flash.kernels.registry import Kernels
from deepseek_flash.loading.source import TensorSource

_SHORT = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_PATTERN = re.compile(r"(-?[0-9]{1,6})(?:-(-?[0-9]{1,6}))?")


def cache_dtypes(config: EngineConfig, source: TensorSource, kernels: Kernels, layers: int) -> tuple[str, ...]:
    """Type of cached keys and values of every layer: the one asked for, or the default where none is."""
    asked = config.kv_cache_dtype
    named = [asked] * layers if isinstance(asked, str) else by_layer(asked, layers)
    types = [_SHORT.get(name, name) for name in named]
    if not kernels.packs and not {"auto", "float32"}.issuperset(types):
        raise needs_native("kv_cache_dtype", asked)
    default = _default(source, kernels) if "auto" in types else ""
    return tuple(default if name == "auto" else name for name in types)


def _default(source: TensorSource, kernels: Kernels) -> str:
    """The float type of the checkpoint's matrices, fp16 when they are quantised; fp32 where only the torch kernels
    are there, which know no other."""
    if not kernels.packs:
        return "float32"
    kinds = {source.dtype(name) for name in source.names() if len(source.shape(name)) > 1}
    if kinds <= _FLOATS.keys():
        return max((_FLOATS[kind] for kind in kinds), key=("float16", "bfloat16", "float32").index, default="float32")
    return "float16"


def by_layer(patterns: Mapping[str, str], layers: int) -> list[str]:
    """What the patterns say of each layer; ``"auto"`` where they say nothing.

    A pattern is ``"*"``, a range ``"a-b"`` (both ends included) or one layer ``"a"``; -1 is the last layer. One layer
    beats a range and a range beats ``"*"``, wherever they stand; of the same kind, the later one wins.
    """
    out = ["auto"] * layers
    spans = [(_span(pattern, layers), dtype) for pattern, dtype in patterns.items()]
    for (_, span), dtype in sorted(spans, key=lambda s: s[0][0]):  # stable: the later of a kind stays later
        for i in span:
            out[i] = dtype
    return out


def _span(pattern: str, layers: int) -> tuple[int, range]:
    """How specific a pattern is (larger: more) and the layers it names; ConfigError when there are none."""
    if pattern == "*":
        return 0, range(layers)
    found = _PATTERN.fullmatch(pattern)
    if found is None:
        raise _bad(pattern, 'not a pattern; write "*", one layer ("3", "-1") or a range ("0-3")')
    ends = [int(end) for end in found.groups() if end is not None]
    for end in ends:
        if not -layers <= end < layers:
            raise _bad(pattern, f"this model's layers are 0 to {layers - 1} (or -{layers} to -1)")
    first, last = ends[0] % layers, ends[-1] % layers
    if first > last:
        raise _bad(pattern, f"matches no layer: layer {first} comes after layer {last}")
    return (2 if len(ends) == 1 else 1), range(first, last + 1)


def _bad(pattern: str, why: str) -> ConfigError:
    return ConfigError(f"kv_cache_dtype: {pattern!r}: {why}", field="kv_cache_dtype", value=pattern)


def told(dtypes: Sequence[str]) -> str | dict[str, str]:
    """One name where all layers have it, else range of layers → name."""
    runs, at = {}, 0
    for dtype, group in groupby(dtypes):
        n = len(list(group))
        runs[str(at) if n == 1 else f"{at}-{at + n - 1}"] = dtype
        at += n
    return dtypes[0] if len(runs) == 1 else runs


def needs_native(option: str, value: object) -> ConfigError:
    return ConfigError(
        f"{option}={value!r} needs the native CPU kernels, which are not there (deepseek-flash doctor says why); "
        f"install a C++ compiler, or leave the option out",
        field=option,
        value=value,
    )
