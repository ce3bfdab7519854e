"""What a model takes in memory, counted before anything is loaded: from an opened checkpoint or its config alone.

Weights are counted by the code that loads them, working memory by asking the kernels. Bytes throughout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import nn

from deepseek_flash.errors import UnsupportedModel
from deepseek_flash.kernels.cpu.processors import processors
from deepseek_flash.kernels.cpu.scratch import LinearShape, StackShape, linear_scratch, sample_scratch, stack_scratch
from deepseek_flash.kernels.registry import Kernels
from deepseek_flash.kernels.weights import WeightFormat
from deepseek_flash.layers.linear import Linear
from deepseek_flash.loading.checkpoint_quant import GROUPS, QuantConfig, read_quant_config
from deepseek_flash.loading.load import storage_plan
from deepseek_flash.loading.packed import Part
from deepseek_flash.loading.safetensors import QUANTISED, normalise, quant_method
from deepseek_flash.loading.source import TensorIndex
from deepseek_flash.memory.plan import STORED, Needs
from deepseek_flash.models.base import Model, ModelInfo
from deepseek_flash.models.dense import DenseInfo
from deepseek_flash.models.registry import resolve

LOGITS_BYTES = 32 << 20
"""Most bytes of logits that a step holds at once (a row, where that is larger)."""
RUNTIME_BYTES = 16 << 20
"""Threads, buffers of reading, and slack of the allocator."""
RUNTIME_PER_TOKEN = 400
"""Of the vocabulary: the tokenizer's tables."""
_ROTARY_CHUNK = 2048
"""Positions by which the rotary tables grow (``layers.rope``)."""
_STORED = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_CACHE_CODES = {"float32": 0, "float16": 1, "bfloat16": 2, "int8": 3}
MIXED = "mixed"
"""Layers cached in types of their own."""
CACHE_TYPES = tuple(_CACHE_CODES)
_TORCH_SCORES = 32 << 20
"""Caps of the torch kernels' attention on scores, and on keys or values gathered at once."""


class ConfigOnly:
    """The checkpoint that a ``config.json`` promises: a TensorIndex without files.

    Floats have the config's ``dtype`` [bf16]; AWQ, GPTQ and FP8 checkpoints have their linear layers quantised, but
    for the head and ``modules_to_not_convert``. UnsupportedModel for what does not run.
    """

    def __init__(self, config: Mapping[str, Any], kernels: Kernels) -> None:
        self.config = normalise(dict(config))
        method = quant_method(self.config)
        if method is not None and method not in QUANTISED:
            raise UnsupportedModel(f"quant_method {method[:100]!r} does not load", supported=QUANTISED)
        self._method = method
        self._quantised: QuantConfig | None = None
        if method in ("awq", "gptq"):
            self._quantised = read_quant_config(self.config, "config.json")
        given = self.config.get("dtype") or self.config.get("torch_dtype")
        self._float = given if isinstance(given, str) and given in _STORED else "bfloat16"
        model = resolve(self.config).build(kernels)
        sizes = {name: tuple(value.shape) for name, value in model.named_parameters()}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for rule in model.rules:
            shape = sizes[rule.target]
            rows = rule.rows or (shape[0],)
            self._shapes |= {name: (n, *shape[1:]) for name, n in zip(rule.sources, rows, strict=True)}
        kept = self._kept()
        self._packed = {
            name
            for name, shape in self._shapes.items()
            if method is not None and len(shape) == 2 and not any(k in name for k in kept)
        }

    def _kept(self) -> list[str]:
        """Parts of names that quantisation leaves alone."""
        given = self.config.get("quantization_config")
        more = given.get("modules_to_not_convert") if isinstance(given, Mapping) else None
        return ["embed_tokens.", "lm_head.", *(str(m) for m in (more if isinstance(more, list) else ()))]

    def names(self) -> list[str]:
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def dtype(self, name: str) -> str:
        if name not in self._packed:
            return _STORED[self._float]
        q = self._quantised
        return "F8_E4M3" if q is None else f"{q.method.upper()}-{q.bits}bit"

    def weight_format(self, name: str) -> WeightFormat:
        q = self._quantised
        if name not in self._packed:
            return WeightFormat(self._float)  # type: ignore[arg-type]
        if q is None:
            return WeightFormat("bfloat16")
        k = self._shapes[name][1]
        common = math.gcd(k if q.group == -1 else q.group, k)
        group = next((g for g in GROUPS if common % g == 0), GROUPS[-1])
        if q.symmetric:
            return WeightFormat("group", bits=q.bits, group=group, zero=1 << (q.bits - 1))
        return WeightFormat("group", bits=q.bits, group=group, offset="zeros")


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What bounds a step."""

    max_batch_size: int = 32
    prefill_chunk_size: int = 512
    threads: int | None = None
    """Of the native kernels [the processors this process may use]."""
    block_size: int = 16

    def tokens(self, context: int) -> int:
        """Most new tokens of a step; decode rows all run, whatever the chunk."""
        return sum(self.step(context))

    def step(self, context: int) -> tuple[int, ...]:
        """New tokens of each sequence in the largest step: as many as may be decode, the others share the rest."""
        left = max(self.prefill_chunk_size - self.max_batch_size, 0)
        new = []
        for _ in range(self.max_batch_size):
            more = min(left, context - 1)
            left -= more
            new.append(1 + more)
        return tuple(new)


class ModelSizes:
    """The sizes of one model under one set of kernels."""

    def __init__(self, source: TensorIndex, kernels: Kernels) -> None:
        self.source, self.kernels = source, kernels
        self.info: ModelInfo = resolve(source.config)
        self._model: Model = self.info.build(kernels)
        self._plans: dict[str | None, dict[str, list[Part]]] = {}

    def quantize_choices(self) -> tuple[str, ...]:
        """``STORED`` and what else the kernels can hold."""
        return (STORED, "int8", "int4") if self.kernels.packs else (STORED,)

    def weight_bytes(self, quantize: str | None = None) -> int:
        """``Model.weight_bytes()`` of the model, once loaded with ``quantize``."""
        parts = self._parts(quantize)
        rest = sum(p.numel() for name, p in self._model.named_parameters() if name not in parts)
        return 4 * rest + sum(part.nbytes for each in parts.values() for part in each)

    def _parts(self, quantize: str | None) -> dict[str, list[Part]]:
        """Packed weights by target; none where the kernels hold fp32."""
        chosen = None if quantize == STORED else quantize
        if not self.kernels.packs:
            return {}
        if chosen not in self._plans:
            plan = storage_plan(self._model, self._model.rules, self.source, lambda target: chosen, 32)
            self._plans[chosen] = plan[0]
        return self._plans[chosen]

    def cache_bytes(self, block_size: int, dtype: str | Sequence[str]) -> Callable[[int], int]:
        """Tokens of a sequence → bytes of its cache."""
        return self.info.cache_spec(block_size, dtype, turned=self.kernels.packs).bytes_for

    def workspace(self, limits: StepLimits, mixed: Sequence[str] = ()) -> Callable[[int, str, str], int]:
        """Context, ``quantize``, type of the cache → most bytes that steps hold beside weights and cache, what they
        keep for the next step included.

        The largest step: ``max_batch_size`` sequences of full length, all but one adding a token, the last what the
        chunk leaves; then the logits.
        """

        @lru_cache(maxsize=256)  # a plan asks for the same contexts again
        def at(context: int, quantize: str, cache_dtype: str) -> int:
            kinds = mixed if cache_dtype == MIXED else (cache_dtype,)
            return max(self._workspace(limits, quantize, kind, context) for kind in kinds)

        return at

    def _workspace(self, limits: StepLimits, quantize: str | None, cache_dtype: str, context: int) -> int:
        info, tokens, batch = self.info, limits.tokens(context), limits.max_batch_size
        rows = max(1, LOGITS_BYTES // (4 * info.vocab_size))  # of logits at once
        scored, sampled = min(tokens, rows), min(batch, rows)
        row = 4 * info.vocab_size
        rot = info.rope.rot if isinstance(info, DenseInfo) else 0
        table = -(-context // _ROTARY_CHUNK) * _ROTARY_CHUNK * rot * 4  # cosines, or sines
        growing = table + 6 * _ROTARY_CHUNK * rot * 4
        hidden = 4 * tokens * info.hidden_size
        indices = 8 * (3 * tokens + 2 * batch * -(-context // limits.block_size))
        step = 3 * hidden + 2 * 4 * tokens * rot + indices
        # A mix of greedy and drawn rows is taken apart: their logits are there twice.
        choosing = hidden + 4 * sampled * info.hidden_size + max(scored * row, 2 * sampled * row)
        if self.kernels.chosen["decoder_stack"].bind is not None and isinstance(info, DenseInfo):
            kept = self._native_scratch(limits, quantize, cache_dtype, context, scored)
        else:
            kept, step = 0, step + self._torch_step(tokens, batch, context)
            choosing += scored * row  # products are padded, and cut to size
        return kept + 2 * table + max(growing, step, choosing)

    def _native_scratch(
        self, limits: StepLimits, quantize: str | None, cache_dtype: str, context: int, scored: int
    ) -> int:
        """The one piece of memory that native calls share: as large as the largest of them asks for."""
        stack = self._stack(quantize)
        threads = limits.threads or processors()
        batch, code = limits.max_batch_size, _CACHE_CODES[cache_dtype]
        steps = {limits.step(context), (1,) * batch}
        needed = [stack_scratch(stack, new, [context] * batch, limits.block_size, code, threads) for new in steps]
        needed.append(sample_scratch(self.info.vocab_size, threads))
        targets = self._parts(quantize)
        head = "head.weight" if "head.weight" in targets else "embed.weight"
        needed.append(linear_scratch(_shape(targets[head], True), scored, threads))
        return max(needed)

    def _stack(self, quantize: str | None) -> StackShape:
        info, parts = self.info, self._parts(quantize)
        assert isinstance(info, DenseInfo)

        def linear(layer: int, name: str) -> LinearShape:
            target = f"layers.{layer}.{name}"
            module: nn.Module = self._model.get_submodule(target)
            assert isinstance(module, Linear)
            return _shape(parts[f"{target}.weight"], module.fine)

        return StackShape(
            heads=info.heads,
            kv_heads=info.kv_heads,
            dim=info.head_dim,
            hidden=info.hidden_size,
            inner=info.inner,
            layers=tuple(
                (
                    linear(i, "attention.qkv"),
                    linear(i, "attention.out"),
                    linear(i, "mlp.gate_up"),
                    linear(i, "mlp.down"),
                )
                for i in range(info.num_layers)
            ),
        )

    def _torch_step(self, tokens: int, batch: int, context: int) -> int:
        """An estimate for the torch kernels: tensors of a layer alive together, scores, and keys and values gathered
        (and laid out anew) for all sequences that decode."""
        info = self.info
        assert isinstance(info, DenseInfo)
        q, kv = info.heads * info.head_dim, info.kv_heads * info.head_dim
        attention = 4 * tokens * (3 * q + 2 * kv)
        scores = min(_TORCH_SCORES, 4 * tokens * info.heads * context)
        gathered = min(_TORCH_SCORES, 4 * batch * context * kv)
        attending = max(2 * scores + 2 * min(gathered, 4 * context * kv), 4 * gathered)
        return max(attention + attending, 20 * tokens * info.inner)

    def needs(
        self,
        limits: StepLimits,
        *,
        kv_cache_dtype: str | Sequence[str],
        quantize: str | None = None,
        max_model_len: int | None = None,
    ) -> Needs:
        """Everything ``memory.plan.plan`` asks about the model. ``kv_cache_dtype``: a real type, not ``auto``, or one
        for each layer."""
        kinds = tuple({kv_cache_dtype} if isinstance(kv_cache_dtype, str) else set(kv_cache_dtype))
        name = kinds[0] if len(kinds) == 1 else MIXED
        dtypes: dict[str, str | Sequence[str]] = {"int8": "int8"} if self.kernels.packs else {}
        dtypes[name] = kv_cache_dtype
        chosen = quantize or STORED
        return Needs(
            weights={name: self.weight_bytes(name) for name in self.quantize_choices()},
            cache={key: self.cache_bytes(limits.block_size, types) for key, types in dtypes.items()},
            workspace=self.workspace(limits, kinds),
            runtime=RUNTIME_BYTES + RUNTIME_PER_TOKEN * self.info.vocab_size,
            max_model_len=max_model_len or self.info.max_position,
            max_batch_size=limits.max_batch_size,
            kv_cache_dtype=name,
            quantize=chosen,
            longest=self.info.max_position,
            block_size=limits.block_size,
        )


def _shape(parts: list[Part], fine: bool) -> LinearShape:
    return LinearShape(tuple((p.format, p.rows, p.k) for p in parts), fine)
