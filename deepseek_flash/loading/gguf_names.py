"""GGUF tensor names of the dense architectures ↔ the names Hugging Face checkpoints use."""

from __future__ import annotations

import re

import torch

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""GGUF ``general.architecture`` values that load."""

ROPE_FREQS = "rope_freqs.weight"
"""Divisors of the rotary frequencies (llama3 scaling worked out): part of the config, not a weight."""

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_PATTERN = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.([a-z_]+)\.(weight|bias)")


def to_hf(name: str) -> str:
    """The Hugging Face name; a name without one comes back as it is, so that loading reports it as unexpected."""
    if name in _TOP:
        return _TOP[name]
    found = _PATTERN.fullmatch(name)
    if found and found[2] in _LAYER:
        return f"model.layers.{found[1]}.{_LAYER[found[2]]}.{found[3]}"
    return name


def interleaved(architecture: str, hf_name: str) -> str | None:
    """``"q"`` or ``"k"`` when the rows of this tensor are stored in interleaved order (q and k of ``llama``)."""
    if architecture != "llama":
        return None
    for which in ("q", "k"):
        if hf_name.endswith((f".self_attn.{which}_proj.weight", f".self_attn.{which}_proj.bias")):
            return which
    return None


def half_split(w: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head from interleaved pairs (2i, 2i + 1) to half-split pairs (i, i + d/2): [heads * d, ...]."""
    half = w.shape[0] // heads // 2
    return w.reshape(heads, half, 2, -1).transpose(1, 2).reshape(w.shape)
