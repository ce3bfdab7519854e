"""The config.json files of the models we name: they resolve as they are, and shrunk they give transformers' logits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from deepseek_flash.errors import CheckpointError
from deepseek_flash.layers.rope import frequencies
from deepseek_flash.loading.source import open_source
from deepseek_flash.models.dense import DenseInfo
from deepseek_flash.models.registry import resolve
from tests.models.harness import Harness, load, prompt
from tests.support import checkpoints

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "initializer_range": 0.02,
    "pretraining_tp": 1, "torch_dtype": "bfloat16", "use_cache": True, "tie_word_embeddings": False,
}  # fmt: skip
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "attention_dropout": 0.0,
    "initializer_range": 0.02, "rms_norm_eps": 1e-06, "torch_dtype": "bfloat16", "use_cache": True,
    "use_mrope": False, "use_sliding_window": False,
}  # fmt: skip
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "attention_dropout": 0.0,
    "head_dim": 128, "hidden_act": "silu", "initializer_range": 0.02, "rms_norm_eps": 1e-06, "sliding_window": None,
    "torch_dtype": "bfloat16", "use_cache": True, "use_sliding_window": False, "rope_theta": 1000000,
}  # fmt: skip
LLAMA3_ROPE = {
    "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}  # fmt: skip


def sizes(hidden: int, inner: int, layers: int, heads: int, kv: int, vocab: int, positions: int) -> dict[str, int]:
    return {
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv, "vocab_size": vocab, "max_position_embeddings": positions,
    }  # fmt: skip


REAL: dict[str, dict[str, Any]] = {
    "DeepSeek-R1-Distill-Qwen-1.5B": {
        **QWEN2, **sizes(1536, 8960, 28, 12, 2, 151936, 131072), "bos_token_id": 151643, "eos_token_id": 151643,
        "max_window_layers": 21, "rope_theta": 10000, "sliding_window": 4096, "tie_word_embeddings": False,
    },
    "DeepSeek-R1-Distill-Qwen-7B": {
        **QWEN2, **sizes(3584, 18944, 28, 28, 4, 152064, 131072), "bos_token_id": 151643, "eos_token_id": 151643,
        "max_window_layers": 28, "rope_theta": 10000, "sliding_window": 4096, "tie_word_embeddings": False,
    },
    "Qwen2.5-0.5B": {
        **QWEN2, **sizes(896, 4864, 24, 14, 2, 151936, 32768), "bos_token_id": 151643, "eos_token_id": 151643,
        "max_window_layers": 24, "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True,
    },
    "Qwen2-7B": {
        **QWEN2, **sizes(3584, 18944, 28, 28, 4, 152064, 131072), "bos_token_id": 151643, "eos_token_id": 151643,
        "max_window_layers": 28, "rope_theta": 1000000.0, "sliding_window": 131072, "tie_word_embeddings": False,
    },
    "DeepSeek-R1-Distill-Llama-8B": {
        **LLAMA, **sizes(4096, 14336, 32, 32, 8, 128256, 131072), "attention_bias": False, "mlp_bias": False,
        "rms_norm_eps": 1e-05, "rope_scaling": LLAMA3_ROPE, "rope_theta": 500000.0, "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
    "DeepSeek-R1-0528-Qwen3-8B": {
        **QWEN3, **sizes(4096, 12288, 36, 32, 8, 151936, 131072), "max_window_layers": 36, "tie_word_embeddings": False,
        "rope_scaling": {
            "attn_factor": 0.8782488562869419, "factor": 4.0, "original_max_position_embeddings": 32768,
            "rope_type": "yarn",
        },
    },
    "deepseek-llm-7b": {
        **LLAMA, **sizes(4096, 11008, 30, 32, 32, 102400, 4096), "rms_norm_eps": 1e-06, "rope_scaling": None,
        "rope_theta": 10000.0, "bos_token_id": 100000, "eos_token_id": 100001,
    },
    "deepseek-coder-1.3b": {
        **LLAMA, **sizes(2048, 5504, 24, 16, 16, 32256, 16384), "rms_norm_eps": 1e-06, "rope_theta": 100000,
        "rope_scaling": {"factor": 4.0, "type": "linear"}, "bos_token_id": 32013, "eos_token_id": 32014,
    },
    "Llama-3.2-1B": {
        **LLAMA, **sizes(2048, 8192, 16, 32, 8, 128256, 131072), "attention_bias": False, "mlp_bias": False,
        "head_dim": 64, "rms_norm_eps": 1e-05, "rope_scaling": {**LLAMA3_ROPE, "factor": 32.0},
        "rope_theta": 500000.0, "tie_word_embeddings": True, "eos_token_id": [128001, 128008, 128009],
    },
    "Qwen3-0.6B": {
        **QWEN3, **sizes(1024, 3072, 28, 16, 8, 151936, 40960), "max_window_layers": 28, "rope_scaling": None,
        "tie_word_embeddings": True, "bos_token_id": 151643, "eos_token_id": 151645,
    },
    "TinyLlama-1.1B": {
        **LLAMA, **sizes(2048, 5632, 22, 32, 4, 32000, 2048), "rms_norm_eps": 1e-05, "rope_scaling": None,
        "bos_token_id": 1, "eos_token_id": 2,
    },
    "SmolLM2-135M": {
        **LLAMA, **sizes(576, 1536, 30, 9, 3, 49152, 8192), "rms_norm_eps": 1e-05, "rope_scaling": None,
        "rope_theta": 100000, "rope_interleaved": False, "is_llama_config": True, "tie_word_embeddings": True,
        "attention_bias": False, "mlp_bias": False, "pad_token_id": 2,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
    },
    "of transformers 5": {
        **{k: v for k, v in LLAMA.items() if k != "torch_dtype"}, **sizes(2048, 8192, 16, 32, 8, 128256, 131072),
        "dtype": "bfloat16", "head_dim": 64, "rms_norm_eps": 1e-05, "attention_bias": True, "mlp_bias": True,
        "rope_parameters": {**LLAMA3_ROPE, "rope_theta": 500000.0},
    },
}  # fmt: skip


def reference_config(config: dict[str, Any]) -> Any:
    import transformers

    return transformers.AutoConfig.for_model(**config)


@pytest.mark.parametrize("name", REAL)
def test_the_file_as_it_is_resolves_with_transformers_frequencies(name: str) -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = REAL[name]
    info = resolve(config)
    assert isinstance(info, DenseInfo)
    heads = info.heads * info.head_dim
    assert info.num_layers == config["num_hidden_layers"]
    assert heads >= info.hidden_size
    assert info.max_position == config["max_position_embeddings"]
    ours, magnitude = frequencies(info.rope.rot, info.rope.theta, info.rope.scaling)
    theirs = LlamaRotaryEmbedding(reference_config(config))
    torch.testing.assert_close(ours, theirs.inv_freq, rtol=1e-6, atol=0)
    assert magnitude == pytest.approx(theirs.attention_scaling)


def shrunk(config: dict[str, Any]) -> dict[str, Any]:
    """The same model with two small layers; heads keep their proportion, everything else its value."""
    group = config["num_attention_heads"] // config["num_key_value_heads"]
    heads = 2 * group
    out = {**config, **sizes(16 * heads, 96, 2, heads, 2, 320, config["max_position_embeddings"])}
    out |= {k: 5 for k in ("bos_token_id", "eos_token_id", "pad_token_id") if k in config}
    return out | ({"head_dim": 24} if "head_dim" in config else {})


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("real")

    def make(name: str) -> Path:
        import transformers

        folder = root / name
        config = shrunk(REAL[name])
        model = transformers.AutoModelForCausalLM.from_config(reference_config(config)).float().eval()
        checkpoints.randomise(model, seed=3)
        model.save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps(config))  # as it was written then, not as it would be now
        return folder

    return make


@pytest.mark.parametrize("name", REAL)
def test_shrunk_it_gives_transformers_logits(name: str, folder_of: Callable[[str], Path]) -> None:
    folder = folder_of(name)
    info, model = load(folder)
    tokens = prompt(1, 70)
    (ours,) = Harness(info, model, chunk=32).serve([tokens], 1)
    reference = checkpoints.load_reference(folder)
    with torch.inference_mode():
        theirs = reference(torch.tensor([tokens])).logits[0]
    assert (ours.matrix()[: len(tokens)] - theirs).abs().max() < 1e-3


def test_old_checkpoints_with_stored_frequencies_load(folder_of: Callable[[str], Path]) -> None:
    """Files of 2023 hold ``rotary_emb.inv_freq`` in every layer, and tied ones a copy of the head."""
    from safetensors.torch import load_file, save_file

    folder = folder_of("SmolLM2-135M")
    file = folder / "model.safetensors"
    weights = load_file(file)
    old = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(8) for i in range(2)}
    old["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file({**weights, **old}, file)
    info, model = load(folder)
    (ours,) = Harness(info, model).serve([prompt(1, 9)], 1)
    with torch.inference_mode():
        theirs = checkpoints.load_reference(folder)(torch.tensor([prompt(1, 9)])).logits[0]
    assert (ours.matrix()[:9] - theirs).abs().max() < 1e-3


def test_a_head_that_differs_from_the_tied_embedding_gives_transformers_logits(
    folder_of: Callable[[str], Path],
) -> None:
    from safetensors.torch import load_file, save_file

    folder = folder_of("Qwen2.5-0.5B")
    file = folder / "model.safetensors"
    weights = load_file(file)
    save_file({**weights, "lm_head.weight": weights["model.embed_tokens.weight"].flip(0).contiguous()}, file)
    with open_source(folder) as source:
        assert source.config["tie_word_embeddings"] is False
    info, model = load(folder)
    (ours,) = Harness(info, model).serve([prompt(1, 9)], 1)
    with torch.inference_mode():
        theirs = checkpoints.load_reference(folder)(torch.tensor([prompt(1, 9)])).logits[0]
    assert (ours.matrix()[:9] - theirs).abs().max() < 1e-3


def test_a_bias_that_is_missing_somewhere_is_an_error(tmp_path: Path) -> None:
    """It is not taken for zero."""
    from safetensors.torch import load_file, save_file

    folder = checkpoints.tiny_llama(tmp_path, num_hidden_layers=2, attention_bias=True)
    file = folder / "model.safetensors"
    save_file({k: v for k, v in load_file(file).items() if k != "model.layers.1.self_attn.o_proj.bias"}, file)
    with pytest.raises(CheckpointError, match=r"missing: model\.layers\.1\.self_attn\.o_proj\.bias"):
        load(folder)


@pytest.mark.parametrize("out", [True, False])
def test_a_gguf_says_by_its_tensors_which_biases_there_are(out: bool, tmp_path: Path) -> None:
    """The converter's files have no key for them; a llama with q, k and v biases only is usual there."""
    from safetensors.torch import load_file, save_file

    folder = checkpoints.tiny_llama(tmp_path, num_hidden_layers=2, attention_bias=True)
    file = folder / "model.safetensors"
    weights = load_file(file)
    if not out:
        save_file({k: v for k, v in weights.items() if not k.endswith("o_proj.bias")}, file)
    info, model = load(checkpoints.tiny_gguf(folder, folder / "m.gguf"))
    save_file({k: v if out or not k.endswith("o_proj.bias") else 0 * v for k, v in weights.items()}, file)
    _, same = load(folder)
    plain, gguf = (Harness(info, m).serve([prompt(1, 9)], 1)[0].matrix() for m in (same, model))
    assert (plain - gguf).abs().max() < 1e-4
