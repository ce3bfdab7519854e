"""DeepSeek-family language models inside your own Python process.

Importing this package imports neither torch nor pydantic; names resolve on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepseek_flash.engine import FlashEngine
    from deepseek_flash.errors import (
        Cancelled,
        ChatTemplateError,
        CheckpointError,
        ConfigError,
        ContextLengthError,
        DeadlineExceeded,
        EngineClosed,
        EngineForked,
        FlashError,
        FormatError,
        GrammarError,
        InternalError,
        MemoryBudgetError,
        ModelError,
        ModelNotFound,
        RequestError,
        StreamTimeoutError,
        UnsupportedModel,
    )
    from deepseek_flash.runtime.stream import Stream
    from deepseek_flash.types import (
        CacheReport,
        Choice,
        Completion,
        Delta,
        Message,
        SamplingParams,
        Score,
        Timings,
        Usage,
    )

__version__ = "0.1.0"

_HOME = {
    "FlashEngine": "engine",
    "Stream": "runtime.stream",
    **dict.fromkeys(
        (
            "Cancelled",
            "ChatTemplateError",
            "CheckpointError",
            "ConfigError",
            "ContextLengthError",
            "DeadlineExceeded",
            "EngineClosed",
            "EngineForked",
            "FlashError",
            "FormatError",
            "GrammarError",
            "InternalError",
            "MemoryBudgetError",
            "ModelError",
            "ModelNotFound",
            "RequestError",
            "StreamTimeoutError",
            "UnsupportedModel",
        ),
        "errors",
    ),
    **dict.fromkeys(
        ("CacheReport", "Choice", "Completion", "Delta", "Message", "SamplingParams", "Score", "Timings", "Usage"),
        "types",
    ),
}

__all__ = [
    "CacheReport",
    "Cancelled",
    "ChatTemplateError",
    "CheckpointError",
    "Choice",
    "Completion",
    "ConfigError",
    "ContextLengthError",
    "DeadlineExceeded",
    "Delta",
    "EngineClosed",
    "EngineForked",
    "FlashEngine",
    "FlashError",
    "FormatError",
    "GrammarError",
    "InternalError",
    "MemoryBudgetError",
    "Message",
    "ModelError",
    "ModelNotFound",
    "RequestError",
    "SamplingParams",
    "Score",
    "Stream",
    "StreamTimeoutError",
    "Timings",
    "UnsupportedModel",
    "Usage",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__all__", "__doc__", "__file__", "__name__", "__path__", "__version__"])
