"""GGUF metadata → the dialect of a Hugging Face ``config.json``, checked against the tensors that are there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from deepseek_flash.errors import FormatError, UnsupportedModel, near_miss
from deepseek_flash.loading.gguf import GGUFFile
from deepseek_flash.loading.gguf_names import ARCHITECTURES, ROPE_FREQS

_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_MOST = 1 << 30
"""No size in a config is larger."""

_FORBIDDEN: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.causal": (True,),
    "attention.scale": (),
    "logit_scale": (0, 1),
    "embedding_scale": (0, 1),
    "residual_scale": (0, 1),
    "rope.dimension_sections": (),
}
"""Keys that change the computation in a way that is not implemented, with the values that do not."""


def architecture_of(file: GGUFFile) -> str:
    """``general.architecture``; UnsupportedModel when it is none of ours (nothing of the data has been read)."""
    given = file.metadata.get("general.architecture")
    if not isinstance(given, str) or not given:
        raise file.file.error("the metadata has no general.architecture")
    split = file.metadata.get("split.count", 0)
    if isinstance(split, int) and split > 1:
        raise UnsupportedModel(
            f"{file.path} is one of {split} parts of a split GGUF; merge them into one file first "
            f"(llama.cpp's llama-gguf-split --merge)",
            architecture=given,
        )
    if given not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{file.path} has the architecture {given!r}{near_miss(given, ARCHITECTURES)}; "
            f"GGUF files of these load: {', '.join(ARCHITECTURES)}{_layout_note(given, file)}",
            architecture=given,
            supported=ARCHITECTURES,
        )
    return given


def _layout_note(given: str, file: GGUFFile) -> str:
    """Which of the two layouts a deepseek2 file has, so that a report about it says so."""
    if given != "deepseek2":
        return ""
    split = any(".attn_k_b." in name or ".attn_v_b." in name for name in file.tensors)
    return f" (this one stores kv_b {'split into attn_k_b and attn_v_b' if split else 'as one tensor, attn_kv_b'})"


class _Metadata:
    """Typed access to ``<architecture>.*`` keys; every error names file and key."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self.file, self.architecture = file, architecture

    def get(self, key: str) -> Any:
        return self.file.metadata.get(f"{self.architecture}.{key}")

    def error(self, key: str, value: Any, wanted: str) -> FormatError:
        return self.file.file.error(f"metadata {self.architecture}.{key} is {str(value)[:100]}; {wanted} is needed")

    def size(self, key: str, default: int | None = None) -> int:
        """A positive integer; a per-layer array is fine when all layers agree."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, list) and value:
            if any(v != value[0] for v in value):
                raise UnsupportedModel(
                    f"{self.file.path}: {self.architecture}.{key} differs by layer ({str(value)[:100]}); "
                    f"models whose layers all have one shape load",
                    architecture=self.architecture,
                )
            value = value[0]
        if type(value) is not int or not 1 <= value <= _MOST:
            raise self.error(key, value, f"an integer from 1 to {_MOST}")
        return value

    def number(self, key: str, default: float | None = None) -> float | None:
        value = self.get(key)
        if value is None:
            return default
        if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
            raise self.error(key, value, "a finite number")
        return float(value)


def config_from_gguf(file: GGUFFile) -> dict[str, Any]:
    """HF-style config of a file whose architecture is one of ours; sizes agree with the tensor table."""
    arch = architecture_of(file)
    meta = _Metadata(file, arch)
    _refuse_features(meta)
    layers = meta.size("block_count")
    if layers > len(file.tensors):
        raise meta.error("block_count", layers, f"at most {len(file.tensors)}, the number of tensors,")
    heads = meta.size("attention.head_count")
    kv_heads = meta.size("attention.head_count_kv", heads)
    hidden = meta.size("embedding_length")
    head_dim = meta.size("attention.key_length", max(hidden // heads, 1))
    if heads % kv_heads or head_dim % 2:
        raise file.file.error(f"{heads} heads of {head_dim} over {kv_heads} key-value heads: not a possible shape")
    _same(meta, "attention.value_length", head_dim)
    _same(meta, "rope.dimension_count", head_dim)
    eps = meta.number("attention.layer_norm_rms_epsilon")
    if eps is None or not 0 < eps < 1:
        raise meta.error("attention.layer_norm_rms_epsilon", eps, "a number between 0 and 1")
    context = meta.size("context_length")
    theta = meta.number("rope.freq_base", 10000.0)
    if not theta:
        raise meta.error("rope.freq_base", theta, "a positive number")
    config: dict[str, Any] = {
        "architectures": [_CLASSES[arch]],
        "model_type": arch,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": meta.size("feed_forward_length"),
        "vocab_size": _vocabulary(meta, hidden),
        "rms_norm_eps": eps,
        "max_position_embeddings": context,
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(meta, head_dim),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "attention_out_bias": "blk.0.attn_output.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
    }
    window = meta.get("attention.sliding_window")
    if window:
        config |= {"sliding_window": meta.size("attention.sliding_window"), "use_sliding_window": True}
    return config | _special_ids(file, int(config["vocab_size"]))


def _refuse_features(meta: _Metadata) -> None:
    for key, harmless in _FORBIDDEN.items():
        value = meta.get(key)
        if value is not None and value not in harmless:
            raise UnsupportedModel(
                f"{meta.file.path}: {meta.architecture}.{key} = {str(value)[:100]} is a feature of this model "
                f"that is not implemented",
                architecture=meta.architecture,
                supported=ARCHITECTURES,
            )


def _same(meta: _Metadata, key: str, head_dim: int) -> None:
    value = meta.size(key, head_dim)
    if value != head_dim:
        raise UnsupportedModel(
            f"{meta.file.path}: {meta.architecture}.{key} is {value} while heads have {head_dim} values; "
            f"models where both are equal load",
            architecture=meta.architecture,
        )


def _vocabulary(meta: _Metadata, hidden: int) -> int:
    """Rows of the embedding, which must be ``hidden`` wide and agree with the metadata."""
    info = meta.file.tensors.get("token_embd.weight")
    if info is None:
        raise meta.file.file.error("there is no token_embd.weight", tensor="token_embd.weight")
    if len(info.shape) != 2 or info.shape[1] != hidden:
        raise meta.file.file.error(
            f"shape {list(info.shape)} does not fit embedding_length {hidden}", tensor="token_embd.weight"
        )
    said = meta.size("vocab_size", info.shape[0])
    if said != info.shape[0]:
        raise meta.file.file.error(f"{info.shape[0]} rows, vocab_size is {said}", tensor="token_embd.weight")
    return said


def _rope_scaling(meta: _Metadata, head_dim: int) -> dict[str, Any] | None:
    """``rope_scaling`` as in config.json, or ``{"rope_type": "factors", "factors": [head_dim / 2 divisors]}``."""
    if ROPE_FREQS in meta.file.tensors:
        return {"rope_type": "factors", "factors": _factors(meta, head_dim)}
    kind = meta.get("rope.scaling.type")
    old = meta.number("rope.scale_linear")  # what files of 2023 say
    if kind is None and old:
        kind = "linear"
    if kind in (None, "", "none"):
        return None
    factor = meta.number("rope.scaling.factor", old or 1.0) or 1.0
    if kind == "linear":
        return None if factor == 1.0 else {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise UnsupportedModel(
            f"{meta.file.path}: rope scaling {str(kind)[:100]!r}; supported: none, linear, yarn, rope_freqs tensor",
            architecture=meta.architecture,
            supported=("none", "linear", "yarn"),
        )
    return _yarn(meta, factor)


def _yarn(meta: _Metadata, factor: float) -> dict[str, Any]:
    """YaRN keys. Without original_context_length it is the context length, as in llama.cpp and transformers.

    ``attn_factor`` multiplies the usual magnitude 0.1 ln(factor) + 1; ``yarn_attn_factor`` (1: not given) replaces it.
    """
    if meta.get("rope.scaling.yarn_ext_factor") not in (None, 1.0, -1.0):  # -1: decide by type
        raise UnsupportedModel(
            f"{meta.file.path}: rope.scaling.yarn_ext_factor other than 1", architecture=meta.architecture
        )
    if meta.number("rope.scaling.yarn_log_multiplier", 0.0):
        raise UnsupportedModel(
            f"{meta.file.path}: rope.scaling.yarn_log_multiplier (attention magnitude by mscale_all_dim) is not "
            f"implemented for {meta.architecture}",
            architecture=meta.architecture,
        )
    original = meta.size("rope.scaling.original_context_length", meta.size("context_length"))
    out: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
    }
    for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        value = meta.number(f"rope.scaling.{key}")
        if value:
            out[name] = value
    times = meta.number("rope.scaling.attn_factor", 1.0) or 1.0
    whole = meta.number("rope.scaling.yarn_attn_factor", 1.0) or 1.0
    usual = 0.1 * math.log(factor) + 1.0 if factor > 1.0 else 1.0
    if whole != 1.0:
        out["attention_factor"] = whole
    elif times != 1.0:
        out["attention_factor"] = usual * times
    return out


def _factors(meta: _Metadata, head_dim: int) -> list[float]:
    info = meta.file.tensors[ROPE_FREQS]
    if info.shape != (head_dim // 2,) or info.kind.name != "F32":
        raise meta.file.file.error(
            f"{info.kind.name} {list(info.shape)}; F32 [{head_dim // 2}] is needed", tensor=ROPE_FREQS
        )
    factors = [float(f) for f in meta.file.read(ROPE_FREQS).tolist()]
    if not all(math.isfinite(f) and f > 0 for f in factors):
        raise meta.file.file.error("a factor is not a positive number", tensor=ROPE_FREQS)
    return factors


def _special_ids(file: GGUFFile, vocab_size: int) -> dict[str, Any]:
    """``bos_token_id`` and ``eos_token_id``; end-of-turn ids join the end-of-text id as a list."""

    def get(key: str) -> int | None:
        value = file.metadata.get(f"tokenizer.ggml.{key}")
        if value is None:
            return None
        if type(value) is not int or value < 0:
            raise file.file.error(f"metadata tokenizer.ggml.{key} is {str(value)[:100]}; a token id is needed")
        if value >= vocab_size:
            # Converters write 0xFFFFFFFF for "none".
            if value == 0xFFFFFFFF:
                return None
            raise file.file.error(f"metadata tokenizer.ggml.{key} is {value}; the vocabulary has {vocab_size}")
        return value

    ends = [i for i in (get("eos_token_id"), get("eot_token_id"), get("eom_token_id")) if i is not None]
    ends = list(dict.fromkeys(ends))
    return {"bos_token_id": get("bos_token_id"), "eos_token_id": ends[0] if len(ends) == 1 else ends or None}


def generation_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a GGUF says about generation: the special ids."""
    return {k: config[k] for k in ("bos_token_id", "eos_token_id") if config.get(k) is not None}
