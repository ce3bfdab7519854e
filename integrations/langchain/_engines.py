"""Engines that wrappers open for themselves: one a process for equal model and options, closed with its last user."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Mapping
from typing import Any

# Names that FlashEngine takes besides the model and its own seed; anything else a wrapper is given is a typo.
# Options whose part does not exist yet are in the list, so that the engine can refuse them by name.
ENGINE_OPTIONS = frozenset(
    {
        "block_size",
        "cache_salt",
        "device",
        "dtype",
        "enable_prefix_caching",
        "enforce_eager",
        "expert_offload",
        "kv_cache_dtype",
        "l2_cache_gb",
        "l3_cache_gb",
        "l3_write_mb_per_s",
        "l3_cache_path",
        "max_batch_size",
        "max_model_len",
        "memory_budget",
        "memory_fraction",
        "prefill_chunk_size",
        "quantize",
        "streaming_timeout_ms",
        "target_itl_ms",
        "threads",
        "verify_every",
    }
)

Key = tuple[int, str, tuple[tuple[str, str], ...]]


class Handle:
    """A lazily opened engine. Its users are those who hold a reference to it: the last one to go closes the engine."""

    def __init__(self, key: Key, model: str, options: Mapping[str, Any]) -> None:
        self.key = key
        self.engine: Any = None
        self._model, self._options = model, dict(options)
        self._lock = threading.Lock()

    def open(self) -> Any:
        """The engine, loaded by the first caller; others wait for it. A failure is raised to each caller."""
        with self._lock:
            if self.engine is None:
                from deepseek_flash import FlashEngine  # imports torch: not before a model is needed

                self.engine = FlashEngine(self._model, **self._options)
            return self.engine


class Registry:
    """Hands equal requests the same Handle while anybody holds it."""

    def __init__(self) -> None:
        self._handles: weakref.WeakValueDictionary[Key, Handle] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        # The lock may have been held by a thread that the child does not have.
        self._lock = threading.Lock()

    def handle(self, key: Key, model: str, options: Mapping[str, Any]) -> Handle:
        with self._lock:
            found = self._handles.get(key)
            if found is None:
                found = self._handles[key] = Handle(key, model, options)
            return found


def key_of(model: str, options: Mapping[str, Any]) -> Key:
    """Equal for what may share an engine; an engine is never shared across a fork."""
    place = os.path.realpath(os.path.expanduser(model)) if os.path.exists(os.path.expanduser(model)) else model
    return os.getpid(), place, tuple(sorted((name, repr(value)) for name, value in options.items()))


ENGINES = Registry()
