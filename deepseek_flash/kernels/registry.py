"""Which implementation each op gets, decided once and handed to the layers as a value."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepseek_flash.errors import ConfigError
from deepseek_flash.kernels.op import Case, Cost, Impl, Op
from deepseek_flash.kernels.ops.packed import PackedLinear
from deepseek_flash.kernels.ops.sample import Choice
from deepseek_flash.kernels.ops.stack import LayerCache, StackWeights
from deepseek_flash.kernels.plan import AttentionPlan, Cache
from deepseek_flash.kernels.weights import PackedWeight

__all__ = ["IMPLS", "OPS", "AttentionPlan", "Case", "Cost", "Impl", "Kernels", "Op", "candidates", "op", "select"]

_PACKAGE = "deepseek_flash.kernels"

OPS: dict[str, str] = {
    "embedding": "ops.embed:EMBEDDING",
    "pack_linear": "ops.linear:PACK_LINEAR",
    "linear": "ops.linear:LINEAR",
    "rms_norm": "ops.norm:RMS_NORM",
    "add_rms_norm": "ops.norm:ADD_RMS_NORM",
    "rope": "ops.rope:ROPE",
    "silu_mul": "ops.mlp:SILU_MUL",
    "cache_write": "ops.cache:CACHE_WRITE",
    "rope_and_cache_write": "ops.cache:ROPE_AND_CACHE_WRITE",
    "paged_attention": "ops.attention:PAGED_ATTENTION",
    "argmax": "ops.sample:ARGMAX",
    "sample": "ops.sample:SAMPLE",
    "bind_packed": "ops.packed:BIND_PACKED",
    "packed_linear": "ops.packed:PACKED_LINEAR",
    "packed_rows": "ops.packed:PACKED_ROWS",
    "bind_stack": "ops.stack:BIND_STACK",
    "decoder_stack": "ops.stack:DECODER_STACK",
}
"""Every op, by name."""

IMPLS: dict[str, dict[str, tuple[str, ...]]] = {
    "cpu": {
        "embedding": ("cpu.pointwise:EMBEDDING",),
        "pack_linear": ("cpu.linear:PACK_LINEAR",),
        "linear": ("cpu.linear:LINEAR", "cpu.linear:BLAS_LINEAR"),
        "rms_norm": ("cpu.native:RMS_NORM", "cpu.pointwise:RMS_NORM"),
        "add_rms_norm": ("cpu.native:ADD_RMS_NORM", "cpu.pointwise:ADD_RMS_NORM"),
        "rope": ("cpu.pointwise:ROPE",),
        "silu_mul": ("cpu.native:SILU_MUL", "cpu.pointwise:SILU_MUL"),
        "cache_write": ("cpu.paged:CACHE_WRITE",),
        "rope_and_cache_write": ("cpu.native:ROPE_AND_CACHE_WRITE", "cpu.paged:ROPE_AND_CACHE_WRITE"),
        "paged_attention": ("cpu.native:PAGED_ATTENTION", "cpu.attention:PAGED_ATTENTION"),
        "argmax": ("cpu.native:ARGMAX",),
        "sample": ("cpu.native:SAMPLE",),
        "bind_packed": ("cpu.native:BIND_PACKED",),
        "packed_linear": ("cpu.native:PACKED_LINEAR",),
        "packed_rows": ("cpu.native:PACKED_ROWS",),
        "bind_stack": ("cpu.native:BIND_STACK",),
        "decoder_stack": ("cpu.native:DECODER_STACK",),
    },
}
"""Implementations by device and op, best first; the reference comes after them all."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """The ops of one engine. Signatures, shapes and meanings: the references in ``kernels/ops``."""

    device: str
    chosen: dict[str, Impl]
    why: dict[str, str]
    """Op → why it did not get a better implementation."""
    packs: bool
    """Whether weights are to stay as they are stored and caches may be smaller than fp32: with the native kernels and
    with the reference. The torch implementations between them work on fp32."""
    embedding: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    pack_linear: Callable[[torch.Tensor], torch.Tensor]
    linear: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    add_rms_norm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]
    rope: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    silu_mul: Callable[[torch.Tensor], torch.Tensor]
    cache_write: Callable[[torch.Tensor, torch.Tensor, AttentionPlan], None]
    rope_and_cache_write: Callable[..., torch.Tensor]
    paged_attention: Callable[[torch.Tensor, Cache, Cache, AttentionPlan, float], torch.Tensor]
    argmax: Callable[[torch.Tensor], torch.Tensor]
    sample: Callable[[torch.Tensor, Sequence[Choice]], torch.Tensor]
    bind_packed: Callable[[tuple[PackedWeight, ...], torch.Tensor | None, bool], PackedLinear]
    packed_linear: Callable[[torch.Tensor, PackedLinear], torch.Tensor]
    packed_rows: Callable[[PackedLinear, torch.Tensor], torch.Tensor]
    bind_stack: Callable[[StackWeights], StackWeights]
    decoder_stack: Callable[
        [torch.Tensor, StackWeights, tuple[LayerCache, ...], torch.Tensor, torch.Tensor, AttentionPlan], torch.Tensor
    ]

    def describe(self) -> dict[str, str]:
        """Op → name of its implementation, with what there is to know about it."""
        out = {}
        for name, impl in self.chosen.items():
            remarks = "; ".join(r for r in (impl.note, self.why.get(name, "")) if r)
            out[name] = f"{impl.name} ({remarks})" if remarks else impl.name
        return out


def _load(place: str) -> Any:
    module, name = place.split(":")
    return getattr(importlib.import_module(f"{_PACKAGE}.{module}"), name)


def op(name: str) -> Op:
    """The definition of an op."""
    found: Op = _load(OPS[name])
    return found


def candidates(device: str, name: str) -> list[Impl]:
    """All implementations of an op for a device, best first, the reference last."""
    listed = [_load(place) for place in IMPLS.get(device, {}).get(name, ())]
    return [*listed, Impl(name, "reference", op(name).reference)]


PREFERENCES = ("auto", "torch", "reference")


def select(device: str, prefer: str = "auto", threads: int | None = None) -> Kernels:
    """Resolve every op for ``device``.

    ``prefer``: ``"auto"`` takes the best there is, ``"torch"`` leaves out the native ones, ``"reference"`` takes the
    definition of each. ``threads`` of the native kernels [the processors this process may use].
    """
    if device not in IMPLS:
        raise ConfigError(
            f"device={device!r}: there are kernels for {', '.join(IMPLS)}",
            field="device",
            value=device,
            allowed=", ".join(IMPLS),
        )
    if prefer not in PREFERENCES:
        raise ConfigError(
            f"kernels={prefer!r}: must be {', '.join(map(repr, PREFERENCES[:-1]))} or {PREFERENCES[-1]!r}",
            field="kernels",
            value=prefer,
            allowed=", ".join(PREFERENCES),
        )
    chosen: dict[str, Impl] = {}
    why: dict[str, str] = {}
    for name in OPS:
        options = candidates(device, name)
        if prefer == "reference":
            options = options[-1:]
        elif prefer == "torch":
            options = [i for i in options if i.bind is None]
        for impl in options:
            reason = impl.unavailable()
            if reason is None:
                chosen[name] = impl
                break
            why[name] = reason
    native: Any = None
    functions: dict[str, Any] = {}
    for name, impl in chosen.items():
        if impl.bind is not None and native is None:
            native = importlib.import_module(f"{_PACKAGE}.cpu.native").Native(threads)
        functions[name] = impl.fn if impl.bind is None else impl.bind(native)
    packs = prefer == "reference" or chosen["packed_linear"].bind is not None
    return Kernels(device=device, chosen=chosen, why=why, packs=packs, **functions)
