"""Dense decoders: Llama (deepseek-llm, deepseek-coder, R1-Distill-Llama), Qwen2 (R1-Distill-Qwen) and Qwen3.

One structure; they differ in biases and in the norm of query and key heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from deepseek_flash.kernels.ops.cache import TURNED_SLOTS
from deepseek_flash.kernels.ops.stack import LayerCache, LayerWeights, StackWeights
from deepseek_flash.kernels.registry import Kernels
from deepseek_flash.kv.spec import CacheSpec, Field, Group, Order
from deepseek_flash.kv.store import KVStore
from deepseek_flash.layers.attention import Attention, AttentionStep
from deepseek_flash.layers.batch import ForwardBatch
from deepseek_flash.layers.embed import Embedding
from deepseek_flash.layers.linear import Linear
from deepseek_flash.layers.mlp import GatedMLP
from deepseek_flash.layers.norm import RMSNorm
from deepseek_flash.layers.rope import Rotary
from deepseek_flash.loading.rules import Rule
from deepseek_flash.loading.safetensors import QUANTISED
from deepseek_flash.models.base import ConfigReader, Model, ModelInfo
from deepseek_flash.models.rope_config import RopeConfig, read_rope


@dataclass(frozen=True)
class DenseInfo(ModelInfo):
    """A checked dense configuration."""

    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_position: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    eps: float
    rope: RopeConfig
    tied: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool

    def cache_spec(self, block_size: int, dtype: str | Sequence[str] = "float32", *, turned: bool = False) -> CacheSpec:
        dtypes = [dtype] * self.num_layers if isinstance(dtype, str) else dtype
        orders: tuple[tuple[str, Order], ...] = (("k", "rows"), ("v", "rows"))
        if turned and block_size % TURNED_SLOTS == 0:
            orders = (("k", "turned"), ("v", "heads"))
        fields = [
            f for i in range(self.num_layers) for name, order in orders for f in self._fields(name, order, i, dtypes[i])
        ]
        return CacheSpec(block_size, (Group("kv", "rows", tuple(fields)),))

    def _fields(self, name: str, order: Order, layer: int, dtype: str) -> list[Field]:
        values = Field(name, layer, (self.kv_heads, self.head_dim), dtype, order)
        if dtype != "int8":
            return [values]
        scales = (self.kv_heads, self.head_dim // scale_group(self.head_dim))
        return [values, Field(f"{name}_scale", layer, scales, "float16", order)]

    def build(self, kernels: Kernels) -> DenseModel:
        return DenseModel(self, kernels)


def scale_group(head_dim: int) -> int:
    """Values of a head that share a scale in an int8 cache: the largest of 64, 32, 16 that divides it, else all."""
    return next((g for g in (64, 32, 16) if head_dim % g == 0), head_dim)


class DenseLayer(nn.Module):
    """Attention and feed-forward, each on the normalised residual stream."""

    def __init__(self, info: DenseInfo, kernels: Kernels, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(kernels, info.hidden_size, info.eps)
        self.attention = Attention(
            kernels,
            layer,
            hidden=info.hidden_size,
            heads=info.heads,
            kv_heads=info.kv_heads,
            head_dim=info.head_dim,
            qkv_bias=info.qkv_bias,
            out_bias=info.out_bias,
            norm_eps=info.eps if info.qk_norm else None,
        )
        last = max(
            1, info.num_layers // 5
        )  # layers whose feed-forward loses most to int8 activations (docs/kernels.md)
        self.mlp_norm = RMSNorm(kernels, info.hidden_size, info.eps)
        self.mlp = GatedMLP(
            kernels, info.hidden_size, info.inner, bias=info.mlp_bias, fine=layer >= info.num_layers - last
        )

    def packed(self) -> LayerWeights | None:
        """The layer's weights as the one-call kernel takes them, or None when some are not packed."""
        qkv, out = self.attention.qkv.packed, self.attention.out.packed
        gate_up, down = self.mlp.gate_up.packed, self.mlp.down.packed
        if qkv is None or out is None or gate_up is None or down is None:
            return None
        return LayerWeights(
            norm=self.attention_norm.weight.detach(),
            mlp_norm=self.mlp_norm.weight.detach(),
            head_norm=self.attention.head_norms,
            qkv=qkv,
            out=out,
            gate_up=gate_up,
            down=down,
        )

    def forward(
        self, stream: torch.Tensor, update: torch.Tensor | None, step: AttentionStep, store: KVStore
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Residual stream and what is still to be added to it, before and after; [T, hidden] each."""
        x, stream = self.attention_norm(stream, update)
        x, stream = self.mlp_norm(stream, self.attention(x, step, store))
        return stream, self.mlp(x)


class DenseModel(Model):
    """The decoder of a DenseInfo."""

    def __init__(self, info: DenseInfo, kernels: Kernels) -> None:
        super().__init__()
        self.vocab_size = info.vocab_size
        self.embed = Embedding(kernels, info.vocab_size, info.hidden_size)
        self.layers = nn.ModuleList(DenseLayer(info, kernels, i) for i in range(info.num_layers))
        self.norm = RMSNorm(kernels, info.hidden_size, info.eps)
        self.head = None if info.tied else Linear(kernels, info.hidden_size, info.vocab_size, fine=True)
        self._info, self._kernels = info, kernels
        self._stack: StackWeights | None = None
        self._caches: tuple[KVStore, tuple[LayerCache, ...]] | None = None
        self.rotary = Rotary(info.rope.rot, info.rope.theta, info.rope.scaling)
        self.rules = tuple(_rules(info))
        # Files of 2023 store the rotary frequencies; some store the tied head too.
        self.ignore = (r".*rotary_emb\.inv_freq", r"rope_freqs\.weight", *((r"lm_head\.weight",) if info.tied else ()))

    def after_load(self) -> None:
        """Hand all layers to the kernel that runs them in one call, when their weights are packed."""
        layers = [layer.packed() for layer in self.layers if isinstance(layer, DenseLayer)]
        if all(layer is not None for layer in layers):
            self._stack = self._kernels.bind_stack(
                StackWeights(
                    heads=self._info.heads,
                    eps=self._info.eps,
                    scale=self._info.head_dim**-0.5,
                    layers=tuple(layer for layer in layers if layer is not None),
                    norm=self.norm.weight.detach(),
                )
            )

    def hidden(self, batch: ForwardBatch, store: KVStore) -> torch.Tensor:
        step = AttentionStep.of(batch, self.rotary)
        if self._stack is not None:
            x = self.embed.forward(batch.token_ids)  # without what nn.Module's call adds
            return self._kernels.decoder_stack(x, self._stack, self._layer_caches(store), step.cos, step.sin, step.plan)
        stream, update = self.embed(batch.token_ids), None
        for layer in self.layers:
            stream, update = layer(stream, update, step, store)
        out: torch.Tensor = self.norm(stream, update)[0]
        return out

    def _layer_caches(self, store: KVStore) -> tuple[LayerCache, ...]:
        """Of all layers; the same object as long as the store is."""
        if self._caches is None or self._caches[0] is not store:
            caches = [(store.cache(0, i, "k"), store.cache(0, i, "v")) for i in range(len(self.layers))]
            self._caches = store, tuple(caches)
        return self._caches[1]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.embed.logits(hidden) if self.head is None else self.head(hidden)
        return out


def _rules(info: DenseInfo) -> list[Rule]:
    """Checkpoint names as transformers writes them."""
    rules = [
        Rule("embed.weight", ("model.embed_tokens.weight",)),
        Rule("norm.weight", ("model.norm.weight",)),
    ]
    if not info.tied:
        rules.append(Rule("head.weight", ("lm_head.weight",)))
    for i in range(info.num_layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        attention, mlp = f"{theirs}.self_attn", f"{theirs}.mlp"
        q, kv = info.heads * info.head_dim, info.kv_heads * info.head_dim
        rules += [
            Rule(f"{ours}.attention_norm.weight", (f"{theirs}.input_layernorm.weight",)),
            Rule(f"{ours}.mlp_norm.weight", (f"{theirs}.post_attention_layernorm.weight",)),
            *_linear(
                f"{ours}.attention.qkv",
                {f"{attention}.q_proj": q, f"{attention}.k_proj": kv, f"{attention}.v_proj": kv},
                info.qkv_bias,
            ),
            *_linear(f"{ours}.attention.out", {f"{attention}.o_proj": info.hidden_size}, info.out_bias),
            *_linear(
                f"{ours}.mlp.gate_up",
                {f"{mlp}.gate_proj": info.inner, f"{mlp}.up_proj": info.inner},
                info.mlp_bias,
            ),
            *_linear(f"{ours}.mlp.down", {f"{mlp}.down_proj": info.hidden_size}, info.mlp_bias),
        ]
        if info.qk_norm:
            rules += [Rule(f"{ours}.attention.{x}_norm", (f"{attention}.{x}_norm.weight",)) for x in "qk"]
    return rules


def _linear(target: str, sources: Mapping[str, int], bias: bool) -> list[Rule]:
    """Weight and bias of one Linear made of one or several, each with its number of outputs."""
    combine: Literal["copy", "cat0"] = "cat0" if len(sources) > 1 else "copy"
    rows = tuple(sources.values())
    kinds = ("weight", "bias") if bias else ("weight",)
    return [Rule(f"{target}.{kind}", tuple(f"{s}.{kind}" for s in sources), combine, rows=rows) for kind in kinds]


def llama(config: Mapping[str, Any]) -> DenseInfo:
    """Llama: biases where the config asks for them."""
    c = ConfigReader(config, "LlamaForCausalLM")
    bias, out_bias = _attention_biases(c)
    return _read(c, qkv_bias=bias, out_bias=out_bias, mlp_bias=c.boolean("mlp_bias", False), qk_norm=False)


def _attention_biases(c: ConfigReader) -> tuple[bool, bool]:
    """Of q, k and v, and of the output projection; only GGUF files speak of the latter on its own."""
    bias = c.boolean("attention_bias", False)
    return bias, c.boolean("attention_out_bias", bias)


def qwen2(config: Mapping[str, Any]) -> DenseInfo:
    """Qwen2: always biases on q, k and v, nowhere else."""
    return _read(ConfigReader(config, "Qwen2ForCausalLM"), qkv_bias=True, out_bias=False, mlp_bias=False, qk_norm=False)


def qwen3(config: Mapping[str, Any]) -> DenseInfo:
    """Qwen3: query and key heads are normalised; biases where the config asks for them."""
    c = ConfigReader(config, "Qwen3ForCausalLM")
    bias, out_bias = _attention_biases(c)
    return _read(c, qkv_bias=bias, out_bias=out_bias, mlp_bias=False, qk_norm=True)


def _read(c: ConfigReader, *, qkv_bias: bool, out_bias: bool, mlp_bias: bool, qk_norm: bool) -> DenseInfo:
    c.only("hidden_act", "silu", "swish")
    method = c.config.get("quantization_config")
    if method and str(c.inside("quantization_config").config.get("quant_method")).lower() not in QUANTISED:
        raise c.unsupported("quantization_config", method, [*QUANTISED, "unquantised safetensors", "GGUF files"])
    layers = c.integer("num_hidden_layers", high=4096)
    max_position = c.integer("max_position_embeddings", 2048, low=2)
    _refuse_windows(c, layers, max_position)
    hidden = c.integer("hidden_size", high=1 << 20)
    heads = c.integer("num_attention_heads", high=1 << 14)
    kv_heads = c.integer("num_key_value_heads", heads, high=1 << 14)
    if heads % kv_heads:
        raise c.error("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads={heads}")
    default_dim = 128 if qk_norm else max(hidden // heads, 1)  # transformers' Qwen3Config has its own default
    if c.config.get("head_dim") is None and not qk_norm and hidden % heads:
        raise c.error("hidden_size", hidden, f"a multiple of num_attention_heads={heads}")
    head_dim = c.integer("head_dim", default_dim, low=2, high=1 << 14)
    return DenseInfo(
        architecture=c.architecture,
        num_layers=layers,
        hidden_size=hidden,
        vocab_size=c.integer("vocab_size", high=1 << 24),
        max_position=max_position,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        inner=c.integer("intermediate_size", high=1 << 22),
        eps=c.number("rms_norm_eps", 1e-6, most=1.0),
        rope=read_rope(c, head_dim, max_position),
        tied=c.boolean("tie_word_embeddings", False),
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
    )


def _refuse_windows(c: ConfigReader, layers: int, max_position: int) -> None:
    """Qwen configs name a window that most do not use; one that would hide tokens is refused."""
    kinds = c.config.get("layer_types")
    if isinstance(kinds, list) and any(k != "full_attention" for k in kinds):
        raise c.unsupported("layer_types", next(k for k in kinds if k != "full_attention"), ["full_attention"])
    if not c.boolean("use_sliding_window", False) or c.config.get("sliding_window") is None:
        return
    window = c.integer("sliding_window")
    if window < max_position and c.integer("max_window_layers", 0, low=0) < layers:
        raise c.unsupported("sliding_window", window, ["full attention (use_sliding_window: false)"])
