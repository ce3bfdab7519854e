"""Architectures and where they are built."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from deepseek_flash.errors import FormatError, UnsupportedModel, near_miss
from deepseek_flash.models.base import ModelInfo

MODELS: dict[str, str] = {
    "LlamaForCausalLM": "deepseek_flash.models.dense:llama",
    "Qwen2ForCausalLM": "deepseek_flash.models.dense:qwen2",
    "Qwen3ForCausalLM": "deepseek_flash.models.dense:qwen3",
}
"""``architectures`` entry of a config → the reader of such configs."""

MODEL_TYPES: dict[str, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""``model_type``, for configs that name no architecture."""


def resolve(config: Mapping[str, Any]) -> ModelInfo:
    """Check a config (the dialect of ``config.json``) and return what it describes; reads no weights."""
    architecture = _architecture(config)
    if architecture not in MODELS:
        raise UnsupportedModel(
            f"the architecture {str(architecture)[:100]!r} is not supported"
            f"{near_miss(str(architecture)[:100], MODELS)}; supported: {', '.join(MODELS)}",
            architecture=str(architecture)[:100],
            supported=tuple(MODELS),
        )
    module, name = MODELS[architecture].split(":")
    read: Callable[[Mapping[str, Any]], ModelInfo] = getattr(importlib.import_module(module), name)
    return read(config)


def _architecture(config: Mapping[str, Any]) -> str:
    named = config.get("architectures")
    if isinstance(named, (list, tuple)) and named:
        known = [a for a in named if isinstance(a, str) and a in MODELS]
        return known[0] if known else str(named[0])
    if named:
        raise FormatError(f"config.json: architectures={str(named)[:100]!r} is not a list of names", file="config.json")
    kind = config.get("model_type")
    if not isinstance(kind, str) or not kind:
        raise FormatError(
            "config.json: neither architectures nor model_type says what the model is", file="config.json"
        )
    return MODEL_TYPES.get(kind, kind)
