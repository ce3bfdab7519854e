"""Tiny random checkpoints: HF folders with a byte tokenizer, and the same model as GGUF.

Every parameter is random, norms and biases too: constants (ones, zeros) would hide a misplaced or forgotten tensor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = (
    *("Ġ t", "h e", "i n", "Ġt he", "r e", "o n", "Ġ a", "e r", "Ġ s", "a t", "e n", "Ġ o", "i s", "o r", "Ġ w"),
    *("Ġ c", "i t", "o u", "Ġ b", "e s", "a n", "Ġ f", "in g", "Ġa n", "Ġan d", "a l", "Ġ m", "Ġ p", "Ġo f", "l l"),
)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'"
    " }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BOS, EOS = "<|im_start|>", "<|im_end|>"
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
"""``rope_parameters`` of a context grown from 64 tokens."""
DEFAULTS: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def byte_alphabet() -> list[str]:
    """The 256 printable stand-ins of byte-level BPE, in byte order."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {b: chr(b) for b in plain}
    for extra, b in enumerate(b for b in range(256) if b not in table):
        table[b] = chr(256 + extra)
    return [table[b] for b in range(256)]


def vocabulary() -> list[str]:
    """Token texts by id: 256 bytes, one a merge, three specials."""
    return [*byte_alphabet(), *(m.replace(" ", "") for m in MERGES), *SPECIALS]


def token_id(text: str) -> int:
    return vocabulary().index(text)


def write_tokenizer(folder: Path) -> None:
    """tokenizer.json (byte-level BPE, digits split, any text round-trips) and tokenizer_config.json (ChatML)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    plain = vocabulary()[: -len(SPECIALS)]
    pairs = [(a, b) for a, b in (m.split(" ") for m in MERGES)]
    tok = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(plain)}, merges=pairs))
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tok.decoder = decoders.ByteLevel()
    tok.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIALS])
    tok.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Matrices N(0, 1) / sqrt(fan in), norms 1 + 0.1 N, biases 0.2 N; in name order, so a seed fixes the model."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in sorted(model.named_parameters()):
            noise = torch.randn(p.shape, generator=g)
            if p.ndim >= 2:
                p.copy_(noise / math.sqrt(p.shape[-1]))
            elif name.endswith("bias"):
                p.copy_(0.2 * noise)
            else:
                p.copy_(1 + 0.1 * noise)


def _save(
    config_class: str, model_class: str, path: Path | str, over: Mapping[str, Any], defaults: dict[str, Any]
) -> Path:
    import transformers

    options = {**DEFAULTS, **defaults, **over}
    seed, dtype = options.pop("seed", 0), options.pop("dtype", torch.float32)
    shard = options.pop("max_shard_size", "5GB")
    generation = options.pop("generation", {})
    bos, eos = token_id(BOS), token_id(EOS)
    config = getattr(transformers, config_class)(bos_token_id=bos, eos_token_id=eos, **options)
    model = getattr(transformers, model_class)(config).float().eval()
    randomise(model, seed)
    model.generation_config = transformers.GenerationConfig(bos_token_id=bos, eos_token_id=[eos], **generation)
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    write_tokenizer(folder)
    return folder


def tiny_llama(path: Path | str, **over: Any) -> Path:
    """A random Llama folder. ``over``: config fields, and ``seed``, ``dtype``, ``max_shard_size``, ``generation``.

    RoPE scaling: ``rope_parameters={"rope_type": "llama3", "rope_theta": 1e4, "factor": ..., ...}``.
    """
    return _save("LlamaConfig", "LlamaForCausalLM", path, over, {})


def tiny_qwen2(path: Path | str, **over: Any) -> Path:
    """A random Qwen2 folder (biases on q, k, v)."""
    return _save("Qwen2Config", "Qwen2ForCausalLM", path, over, {"tie_word_embeddings": True})


def tiny_qwen3(path: Path | str, **over: Any) -> Path:
    """A random Qwen3 folder (norms on q and k; heads times head_dim is not the hidden size)."""
    return _save("Qwen3Config", "Qwen3ForCausalLM", path, over, {"head_dim": 32})


def load_reference(folder: Path | str) -> Any:
    """transformers' model of a tiny folder, fp32, eval."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def llama3_factors(rope: Mapping[str, Any], theta: float, dim: int) -> np.ndarray:
    """Divisors of each rotary frequency, as converters store them in ``rope_freqs.weight``: float32 [dim / 2]."""
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    original = rope["original_max_position_embeddings"]
    out = []
    for i in range(0, dim, 2):
        wavelength = 2 * math.pi * theta ** (i / dim)
        if wavelength < original / high:
            out.append(1.0)
        elif wavelength > original / low:
            out.append(float(factor))
        else:
            smooth = (original / wavelength - low) / (high - low)
            out.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(out, dtype=np.float32)


def interleave_heads(w: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from half-split to interleaved order, as llama-architecture GGUF files hold q and k."""
    return w.reshape(heads, 2, w.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(w.shape)


def tiny_gguf(folder: Path | str, path: Path | str, quant: str = "F32") -> Path:
    """The folder's model as one GGUF file. ``quant``: F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0 or Q5_1 (matrices)."""
    import gguf
    from safetensors.torch import load_file

    folder, path = Path(folder), Path(path)
    config = json.loads((folder / "config.json").read_text())
    arch = config["model_type"]
    writer = gguf.GGUFWriter(path, arch)
    factors = _write_metadata(writer, config)
    _write_vocabulary(writer, config["vocab_size"])
    names = gguf.get_tensor_name_map(
        {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}[arch],
        config["num_hidden_layers"],
    )
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    kind = gguf.GGMLQuantizationType[quant]
    tensors = {k: v for shard in sorted(folder.glob("*.safetensors")) for k, v in load_file(shard).items()}
    for hf_name, value in tensors.items():
        name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        w = value.float().numpy()
        if arch == "llama" and (".q_proj." in hf_name or ".k_proj." in hf_name):
            key = "num_attention_heads" if ".q_proj." in hf_name else "num_key_value_heads"
            w = interleave_heads(w, config[key])
        if w.ndim >= 2 and kind != gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, gguf.quants.quantize(w, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, w)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_metadata(writer: Any, config: Mapping[str, Any]) -> np.ndarray | None:
    import gguf

    rope = config["rope_parameters"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_name("tiny")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    kind = rope.get("rope_type", "default")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        for key, add in (
            ("beta_fast", writer.add_rope_scaling_yarn_beta_fast),
            ("beta_slow", writer.add_rope_scaling_yarn_beta_slow),
        ):
            if key in rope:
                add(float(rope[key]))
    return llama3_factors(rope, rope["rope_theta"], head_dim) if kind == "llama3" else None


def _write_vocabulary(writer: Any, vocab_size: int) -> None:
    import gguf

    tokens = vocabulary()
    padded = tokens + [f"[PAD{i}]" for i in range(len(tokens), vocab_size)]
    kinds = [gguf.TokenType.NORMAL] * (len(tokens) - len(SPECIALS)) + [gguf.TokenType.CONTROL] * len(SPECIALS)
    kinds += [gguf.TokenType.UNUSED] * (len(padded) - len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(padded)
    writer.add_token_types([int(k) for k in kinds])
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(token_id(BOS))
    writer.add_eos_token_id(token_id(EOS))
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
