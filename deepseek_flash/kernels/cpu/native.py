"""The C++ kernels as ops: pointers out of tensors, one call each."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from deepseek_flash.errors import InternalError
from deepseek_flash.kernels.cpu import lib
from deepseek_flash.kernels.cpu.packer import describe
from deepseek_flash.kernels.cpu.processors import processors
from deepseek_flash.kernels.op import Impl
from deepseek_flash.kernels.ops.packed import PackedLinear
from deepseek_flash.kernels.ops.sample import LOWEST_TEMPERATURE, Choice
from deepseek_flash.kernels.ops.stack import LayerCache, StackWeights
from deepseek_flash.kernels.plan import AttentionPlan, Cache, QuantCache
from deepseek_flash.kernels.weights import PackedWeight

_CACHE_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int8: 3}


class Native:
    """The library with the threads and the working memory of one engine. For one thread at a time."""

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads or processors()
        self._library: Any = None
        self._pool: int | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def library(self) -> Any:
        """The C functions; threads start with the first call."""
        if self._library is None:
            loaded = lib.load()
            if loaded is None:
                raise InternalError(f"native kernels were chosen, but are not there: {lib.why_missing()}")
            self._library = loaded.functions
            if self.threads > 1:
                self._pool = self._library.flash_pool_create(self.threads)
                if self._pool is None:
                    self.threads = 1
                else:
                    weakref.finalize(self, self._library.flash_pool_destroy, self._pool)
                    self._library.flash_pool_processors(self._pool, processors())
        return self._library

    def scratch(self, size: int) -> int:
        """Address of at least so many bytes, kept for the next call."""
        if size < 0:
            raise InternalError(f"a native kernel refused its arguments ({size})")
        if self._memory.numel() < size:
            self._memory = torch.empty(0, dtype=torch.uint8)  # let go before taking more
            self._memory = torch.empty(size, dtype=torch.uint8)
        return self._memory.data_ptr()

    # -- small ones

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        c = self.library
        if weight.ndim == 2:  # heads side by side: every head is a row with a weight of its own
            y = torch.empty(x.shape, dtype=torch.float32)
            for h in range(x.shape[1]):
                y[:, h] = self.rms_norm(x[:, h], weight[h], eps)
            return y
        x = _rows(x)
        y = torch.empty(x.shape, dtype=torch.float32)
        rows, dim = x.shape
        _check(c.flash_rms_norm(self._pool, x.data_ptr(), x.stride(0), weight.data_ptr(), eps, rows, dim, y.data_ptr()))
        return y

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        c = self.library
        x, residual = x.contiguous(), residual.contiguous()
        y, total = torch.empty_like(x), torch.empty_like(x)
        rows, dim = x.shape
        _check(
            c.flash_add_rms_norm(
                self._pool,
                x.data_ptr(),
                residual.data_ptr(),
                weight.data_ptr(),
                eps,
                rows,
                dim,
                y.data_ptr(),
                total.data_ptr(),
            )
        )
        return y, total

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        c = self.library
        gate_up = gate_up.contiguous()
        rows, n = gate_up.shape[0], gate_up.shape[1] // 2
        y = torch.empty(rows, n)
        _check(c.flash_silu_mul(self._pool, gate_up.data_ptr(), rows, n, y.data_ptr()))
        return y

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        c = self.library
        logits = _rows(logits)
        rows, n = logits.shape
        ids = torch.empty(rows, dtype=torch.int64)
        _check(c.flash_argmax(self._pool, logits.data_ptr(), logits.stride(0), rows, n, ids.data_ptr()))
        return ids

    def sample(self, logits: torch.Tensor, choices: Sequence[Choice]) -> torch.Tensor:
        c = self.library
        logits = _rows(logits)
        rows, n = logits.shape
        ids = torch.empty(rows, dtype=torch.int64)
        if len(choices) != rows:
            raise InternalError(f"{rows} rows of logits, {len(choices)} choices")
        if rows:
            held: list[torch.Tensor] = []
            made = (lib.FlashChoice * rows)(*(_choice(choice, n, held) for choice in choices))
            memory = self.scratch(c.flash_sample_scratch(n, self.threads))
            at = logits.data_ptr(), logits.stride(0)
            _check(c.flash_sample(self._pool, *at, rows, n, ctypes.byref(made), memory, ids.data_ptr()))
        return ids

    # -- packed weights

    def bind_packed(
        self, parts: tuple[PackedWeight, ...], bias: torch.Tensor | None, fine: bool = False
    ) -> PackedLinear:
        first: Any = None
        at = sum(p.n for p in parts)
        for part in reversed(parts):  # a chain: each knows the next
            at -= part.n
            made = describe(part.format, part.n, part.k)
            made.fine = fine
            made.data = part.data.data_ptr()
            made.bias = None if bias is None else bias.data_ptr() + 4 * at
            made.next = None if first is None else ctypes.pointer(first)
            first = made
        return PackedLinear(parts, bias, fine, native=first)

    def packed_linear(self, x: torch.Tensor, weight: PackedLinear) -> torch.Tensor:
        c = self.library
        x, w = _rows(x), ctypes.byref(self._bound(weight))
        rows, outputs = x.shape[0], weight.outputs
        y = torch.empty(rows, outputs)
        if rows:
            memory = self.scratch(c.flash_linear_scratch(w, rows, self.threads))
            _check(c.flash_linear_run(self._pool, w, x.data_ptr(), x.stride(0), rows, y.data_ptr(), outputs, memory))
        return y

    def packed_rows(self, weight: PackedLinear, ids: torch.Tensor) -> torch.Tensor:
        c = self.library
        out = torch.empty(ids.numel(), weight.inputs)
        ids = ids.contiguous()
        _check(c.flash_linear_rows(ctypes.byref(self._bound(weight)), ids.data_ptr(), ids.numel(), out.data_ptr()))
        return out

    def _bound(self, weight: PackedLinear) -> Any:
        return (
            weight.native
            if weight.native is not None
            else self.bind_packed(weight.parts, weight.bias, weight.fine).native
        )

    # -- cache and attention

    def rope_and_cache_write(
        self,
        qk: torch.Tensor,
        v: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        k_cache: Cache,
        v_cache: Cache,
        plan: AttentionPlan,
    ) -> torch.Tensor:
        c = self.library
        tokens, kv_heads, dim = v.shape
        heads = qk.shape[1] - kv_heads
        qkv = _joined(qk, v)
        q = torch.empty(tokens, heads, dim)
        step = _step(plan, cos, sin)
        cache = _cache(k_cache, v_cache)
        _check(
            c.flash_rope_and_cache_write(
                self._pool, qkv.data_ptr(), qkv.stride(0), heads, ctypes.byref(cache), ctypes.byref(step), q.data_ptr()
            )
        )
        return q

    def paged_attention(
        self, q: torch.Tensor, k_cache: Cache, v_cache: Cache, plan: AttentionPlan, scale: float
    ) -> torch.Tensor:
        c = self.library
        q = q.contiguous()
        out = torch.empty_like(q)
        cache, step = _cache(k_cache, v_cache), _step(plan, None, None)
        heads = q.shape[1]
        memory = self.scratch(c.flash_attention_scratch(ctypes.byref(cache), ctypes.byref(step), heads, self.threads))
        _check(
            c.flash_attention(
                self._pool, q.data_ptr(), heads, ctypes.byref(cache), ctypes.byref(step), scale, out.data_ptr(), memory
            )
        )
        return out

    # -- the whole stack

    def bind_stack(self, weights: StackWeights) -> StackWeights:
        return replace(weights, native=_Stack(self, weights))

    def decoder_stack(
        self,
        x: torch.Tensor,
        weights: StackWeights,
        caches: tuple[LayerCache, ...],
        cos: torch.Tensor,
        sin: torch.Tensor,
        plan: AttentionPlan,
    ) -> torch.Tensor:
        c = self.library
        bound = weights.native if weights.native is not None else _Stack(self, weights)
        stack = bound.over(caches)
        step = ctypes.byref(_step(plan, cos, sin))
        x = x.clone()  # becomes the residual stream
        out = torch.empty_like(x)
        memory = self.scratch(c.flash_stack_scratch(stack, step, self.threads))
        _check(c.flash_stack_run(self._pool, stack, step, x.data_ptr(), out.data_ptr(), memory))
        return out


class _Stack:
    """A ``flash_stack`` and the addresses inside it; caches are filled in when they change."""

    def __init__(self, native: Native, weights: StackWeights) -> None:
        self._layers = (lib.FlashLayer * len(weights.layers))()
        self._caches: tuple[LayerCache, ...] | None = None
        self._keep = weights
        for place, layer in zip(self._layers, weights.layers, strict=True):
            place.norm = layer.norm.data_ptr()
            place.mlp_norm = layer.mlp_norm.data_ptr()
            place.head_norm = None if layer.head_norm is None else layer.head_norm.data_ptr()
            for name in ("qkv", "out", "gate_up", "down"):
                setattr(place, name, native._bound(getattr(layer, name)))
        first = weights.layers[0]
        self._stack = lib.FlashStack(
            layers=len(weights.layers),
            heads=weights.heads,
            hidden=first.norm.numel(),
            inner=first.down.inputs,
            eps=weights.eps,
            scale=weights.scale,
            layer=ctypes.cast(self._layers, ctypes.POINTER(lib.FlashLayer)),
            norm=weights.norm.data_ptr(),
        )
        self._address = ctypes.byref(self._stack)

    def over(self, caches: tuple[LayerCache, ...]) -> Any:
        """A pointer to the struct, over these caches."""
        if caches is not self._caches:
            for place, (k, v) in zip(self._layers, caches, strict=True):
                place.cache = _cache(k, v)
            self._caches = caches
        return self._address


def _check(status: int) -> None:
    if status:
        raise InternalError(f"a native kernel refused its arguments ({status})")


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[T, k] with contiguous rows that may lie apart."""
    return x if x.stride(-1) == 1 and x.stride(0) >= x.shape[1] else x.contiguous()


def _joined(qk: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """[T, heads + 2 kv heads, D]: the tensor that both are views of, when they are, else a new one."""
    size = qk.element_size()
    same_rows = qk.stride() == v.stride() and qk.stride()[1:] == (qk.shape[2], 1)
    if same_rows and v.data_ptr() == qk.data_ptr() + size * qk.shape[1] * qk.shape[2]:
        return qk
    return torch.cat((qk, v), dim=1)


def _choice(c: Choice, n: int, held: list[torch.Tensor]) -> Any:
    """The ``flash_choice`` of one row; ``held`` keeps what it points to."""

    def at(values: torch.Tensor, dtype: torch.dtype = torch.int64) -> int:
        held.append(values.to(dtype).contiguous())
        return held[-1].data_ptr()

    out = lib.FlashChoice(
        temperature=max(c.temperature, LOWEST_TEMPERATURE) if c.temperature > 0.0 else c.temperature,
        top_k=min(c.top_k, n),
        top_p=c.top_p,
        min_p=c.min_p,
        repetition=c.repetition,
        frequency=c.frequency,
        presence=c.presence,
        u=c.draw,
    )
    if c.seen is not None:
        out.seen, out.seen_count = at(c.seen), len(c.seen)
    if c.used is not None and c.times is not None:
        out.used, out.times, out.used_count = at(c.used), at(c.times, torch.float64), len(c.used)
    if c.bias_ids is not None and c.bias is not None:
        out.bias_ids, out.bias, out.bias_count = at(c.bias_ids), at(c.bias, torch.float32), len(c.bias_ids)
    if c.forbidden is not None:
        out.forbidden, out.forbidden_count = at(c.forbidden), len(c.forbidden)
    if c.allowed is not None:
        if len(c.allowed) * 32 < n:
            raise InternalError(f"a mask of {len(c.allowed)} words for {n} ids")
        out.allowed = at(c.allowed, torch.int32)
    return out


def _cache(k: Cache, v: Cache) -> Any:
    """The ``flash_cache`` of one layer."""
    if isinstance(k, QuantCache) and isinstance(v, QuantCache):
        out = _cache(k.values, v.values)
        if k.scales.shape != v.scales.shape:
            raise InternalError("scales of keys and values must be cached alike")
        out.k_scale, out.v_scale, out.kv_group = k.scales.data_ptr(), v.scales.data_ptr(), k.group
        out.k_scale_at, out.v_scale_at = _strides(k.scales), _strides(v.scales)
        return out
    if not isinstance(k, torch.Tensor) or not isinstance(v, torch.Tensor) or (k.dtype, k.shape) != (v.dtype, v.shape):
        raise InternalError("keys and values must be cached alike")
    return lib.FlashCache(
        k=k.data_ptr(),
        v=v.data_ptr(),
        k_at=_strides(k),
        v_at=_strides(v),
        dtype=_CACHE_TYPES[k.dtype],
        block_size=k.shape[1],
        kv_heads=k.shape[2],
        dim=k.shape[3],
    )


def _strides(rows: torch.Tensor) -> Any:
    """``flash_strides`` of [blocks, block_size, kv heads, items]."""
    block, slot, head, item = rows.stride()
    if rows.shape[3] == 1 and slot != 1:  # of one item nobody asks where the next is
        item = 1
    return lib.FlashStrides(block, slot, head, item)


def _step(plan: AttentionPlan, cos: torch.Tensor | None, sin: torch.Tensor | None) -> Any:
    """The ``flash_step`` of a plan; made once a step."""
    made = plan.scratch.get("native")
    if made is None:
        sequences = len(plan.context_lens)
        cu_q = (ctypes.c_int32 * (sequences + 1))(*plan.cu_q)
        context = (ctypes.c_int32 * max(sequences, 1))(*plan.context_lens)
        table, slots = plan.block_table.contiguous(), plan.slots.contiguous()
        step = lib.FlashStep(
            tokens=plan.cu_q[-1],
            sequences=sequences,
            cu_q=ctypes.addressof(cu_q),
            context=ctypes.addressof(context),
            block_table=table.data_ptr(),
            table_stride=table.stride(0),
            slots=slots.data_ptr(),
        )
        made = plan.scratch["native"] = [step, (cu_q, context, table, slots), None]
    step = made[0]
    if cos is not None and sin is not None:
        cos, sin = cos.contiguous(), sin.contiguous()
        made[2] = (cos, sin)
        step.cos, step.sin, step.rot = cos.data_ptr(), sin.data_ptr(), cos.shape[-1]
    return step


_serial = Native(1)


def _impl(name: str) -> Impl:
    fn: Callable[..., Any] = getattr(_serial, name)
    return Impl(name, "native", fn, lib.why_missing, bind=lambda native: getattr(native, name))


RMS_NORM = _impl("rms_norm")
ADD_RMS_NORM = _impl("add_rms_norm")
SILU_MUL = _impl("silu_mul")
ARGMAX = _impl("argmax")
SAMPLE = _impl("sample")
BIND_PACKED = _impl("bind_packed")
PACKED_LINEAR = _impl("packed_linear")
PACKED_ROWS = _impl("packed_rows")
ROPE_AND_CACHE_WRITE = _impl("rope_and_cache_write")
PAGED_ATTENTION = _impl("paged_attention")
BIND_STACK = _impl("bind_stack")
DECODER_STACK = _impl("decoder_stack")
