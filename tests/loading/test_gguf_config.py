"""GGUF metadata as a Hugging Face config: equal to the folder's, and refused when it cannot be right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from deepseek_flash.errors import CheckpointError, FormatError, UnsupportedModel
from deepseek_flash.loading.source import open_source
from tests.support import checkpoints

SAME = (
    "architectures", "model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "intermediate_size", "vocab_size", "max_position_embeddings", "rope_theta", "tie_word_embeddings",
    "bos_token_id", "eos_token_id",
)  # fmt: skip


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_config_of_a_gguf_equals_the_folders(arch: str, folders: dict[str, Path], tmp_path: Path) -> None:
    path = checkpoints.tiny_gguf(folders[arch], tmp_path / "m.gguf")
    with open_source(folders[arch]) as a, open_source(path) as b:
        want = {"head_dim": a.config["hidden_size"] // a.config["num_attention_heads"], **a.config}
        for key in SAME:
            assert b.config[key] == want[key], key
        assert b.config["rms_norm_eps"] == pytest.approx(want["rms_norm_eps"], rel=1e-6)
        assert b.generation_config["eos_token_id"] == a.config["eos_token_id"]
        if arch == "qwen3":
            assert b.config["rope_scaling"] == a.config["rope_scaling"]
            assert b.config["rope_scaling"]["beta_fast"] == 24.0
        if arch == "llama":
            factors = b.config["rope_scaling"]["factors"]
            assert b.config["rope_scaling"]["rope_type"] == "factors"
            assert factors == pytest.approx(checkpoints.llama3_factors(checkpoints.LLAMA3, 10000.0, 16).tolist())
            assert factors[0] == 1.0
            assert factors[-1] == 8.0


def test_llama3_factors_give_transformers_frequencies(folders: dict[str, Path], tmp_path: Path) -> None:
    """Q03: theta ** (-2i/d) divided by the file's factors is transformers' own inv_freq."""
    import torch
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    want, _ = ROPE_INIT_FUNCTIONS["llama3"](AutoConfig.from_pretrained(folders["llama"]), torch.device("cpu"))
    with open_source(checkpoints.tiny_gguf(folders["llama"], tmp_path / "m.gguf")) as source:
        factors = torch.tensor(source.config["rope_scaling"]["factors"])
        inv_freq = 10000.0 ** (-torch.arange(0, 16, 2) / 16) / factors
    torch.testing.assert_close(inv_freq, want, rtol=1e-5, atol=0)


def write(path: Path, arch: str = "llama", tensors: dict[str, Any] | None = None, **over: Any) -> Path:
    """A GGUF of one layer with these metadata; a value of None leaves a key out."""
    meta: dict[str, Any] = {
        f"{arch}.block_count": 1, f"{arch}.context_length": 256, f"{arch}.embedding_length": 32,
        f"{arch}.feed_forward_length": 64, f"{arch}.attention.head_count": 4, f"{arch}.attention.head_count_kv": 2,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
    }  # fmt: skip
    meta |= {
        (k if "." in k and k.split(".")[0] in ("tokenizer", "split") else f"{arch}.{k}"): v for k, v in over.items()
    }
    writer = gguf.GGUFWriter(path, arch)
    for key, value in meta.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
            add[type(value)](key, value)
    for name, value in (tensors or {"token_embd.weight": np.zeros((8, 32), np.float32)}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def config(path: Path) -> dict[str, Any]:
    with open_source(path) as source:
        return source.config


@pytest.mark.parametrize(
    ("over", "scaling"),
    [
        ({}, None),
        ({"rope.scaling.type": "none"}, None),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        ),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.attn_factor": 0.5},
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 256,
                "attention_factor": pytest.approx(0.5 * (1 + 0.1 * np.log(4))),
            },
        ),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_attn_factor": 0.75},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "attention_factor": 0.75},
        ),
    ],
)
def test_rope_scaling(over: dict[str, Any], scaling: dict[str, Any] | None, tmp_path: Path) -> None:
    """Q02: YaRN's magnitude is handed on as one attention_factor, or left to its formula; never applied twice."""
    assert config(write(tmp_path / "x.gguf", **over))["rope_scaling"] == scaling


def test_defaults_and_end_tokens(tmp_path: Path) -> None:
    ends = {
        "tokenizer.ggml.eos_token_id": 3,
        "tokenizer.ggml.eot_token_id": 5,
        "tokenizer.ggml.bos_token_id": 0xFFFFFFFF,
    }
    got = config(write(tmp_path / "x.gguf", **ends))
    assert got["eos_token_id"] == [3, 5]
    assert got["bos_token_id"] is None
    assert got["rope_theta"] == 10000.0
    assert got["head_dim"] == 8
    assert got["vocab_size"] == 8
    assert got["tie_word_embeddings"] is True
    assert config(write(tmp_path / "y.gguf", **{"attention.head_count": [4, 4, 4]}))["num_attention_heads"] == 4


@pytest.mark.parametrize(
    ("over", "words"),
    [
        ({"block_count": None}, ["block_count", "None"]),
        ({"block_count": 0}, ["block_count", "0"]),
        ({"block_count": 4_000_000_000}, ["block_count", "4000000000"]),
        ({"block_count": 500}, ["block_count", "500"]),
        ({"embedding_length": 64}, ["token_embd.weight", "64"]),
        ({"embedding_length": "32"}, ["embedding_length", "32"]),
        ({"embedding_length": 32.0}, ["embedding_length"]),
        ({"attention.head_count": True}, ["head_count", "True"]),
        ({"attention.head_count_kv": 3}, ["4 heads", "3"]),
        ({"attention.key_length": 7}, ["7"]),
        ({"context_length": 0}, ["context_length"]),
        ({"vocab_size": 9}, ["vocab_size", "9"]),
        ({"attention.layer_norm_rms_epsilon": float("nan")}, ["epsilon", "nan"]),
        ({"attention.layer_norm_rms_epsilon": 2.0}, ["epsilon", "2"]),
        ({"rope.freq_base": float("inf")}, ["freq_base", "inf"]),
        ({"rope.freq_base": 0.0}, ["freq_base"]),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": -1.0}, ["factor", "-1"]),
        ({"tokenizer.ggml.eos_token_id": 8}, ["eos_token_id", "8"]),
    ],
)
def test_impossible_metadata_is_a_format_error(over: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    with pytest.raises(FormatError) as caught:
        config(write(tmp_path / "x.gguf", **over))
    for word in ("x.gguf", *words):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("over", "word"),
    [
        ({"expert_count": 8}, "expert_count"),
        ({"attention.causal": False}, "causal"),
        ({"attention.clamp_kqv": 8.0}, "clamp_kqv"),
        ({"logit_scale": 0.5}, "logit_scale"),
        ({"rope.dimension_count": 4}, "rope.dimension_count"),
        ({"attention.value_length": 16}, "value_length"),
        ({"attention.head_count_kv": [2, 4]}, "differs by layer"),
        ({"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0}, "longrope"),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0, "rope.scaling.yarn_ext_factor": 0.5}, "ext_factor"),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0, "rope.scaling.yarn_log_multiplier": 0.1}, "Q01"),
        ({"split.count": 3}, "parts of a split GGUF"),
    ],
)
def test_features_we_do_not_compute_are_refused_by_name(over: dict[str, Any], word: str, tmp_path: Path) -> None:
    """Q01: a YaRN magnitude by mscale_all_dim is never dropped silently."""
    word = "yarn_log_multiplier" if word == "Q01" else word
    with pytest.raises(UnsupportedModel, match=word):
        config(write(tmp_path / "x.gguf", **over))


@pytest.mark.parametrize(
    ("tensors", "layout"),
    [
        (["blk.0.attn_kv_b.weight"], "as one tensor"),
        (["blk.0.attn_k_b.weight", "blk.0.attn_v_b.weight"], "split into attn_k_b and attn_v_b"),
    ],
)
def test_Q06_Q07_deepseek2_is_refused_with_its_layout_before_any_tensor_is_read(
    tensors: list[str], layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Q06: an architecture that does not load is named, with those that do. Q07: both layouts are told apart."""
    from deepseek_flash.loading.files import DataFile

    monkeypatch.setattr(DataFile, "bytes_into", lambda *a: pytest.fail("tensor data was read"))
    path = write(tmp_path / "x.gguf", "deepseek2", {t: np.zeros((2, 32), np.float64) for t in tensors})
    with pytest.raises(UnsupportedModel, match="deepseek2") as caught:
        open_source(path)
    assert caught.value.architecture == "deepseek2"
    assert caught.value.supported == ("llama", "qwen2", "qwen3")
    assert "llama, qwen2, qwen3" in str(caught.value)
    assert layout in str(caught.value)


def test_V06_the_pre_tokenizer_name_does_not_decide_whether_a_file_opens(tmp_path: Path) -> None:
    """V06: loading hands the name on as metadata; only the tokenizer looks at it."""
    path = write(tmp_path / "x.gguf", **{"tokenizer.ggml.pre": "never-heard-of"})
    with open_source(path) as source:
        assert source.metadata["tokenizer.ggml.pre"] == "never-heard-of"


@pytest.mark.parametrize("factors", [np.array([1, 2, 3], np.float32), np.array([1, -2, 3, 4], np.float32)])
def test_bad_rope_factors(factors: np.ndarray, tmp_path: Path) -> None:
    tensors = {"token_embd.weight": np.zeros((8, 32), np.float32), "rope_freqs.weight": factors}
    with pytest.raises(FormatError, match="rope_freqs"):
        config(write(tmp_path / "x.gguf", tensors=tensors))


def test_q_rows_that_are_no_heads_are_an_error(tmp_path: Path) -> None:
    embedding = np.zeros((8, 32), np.float32)
    tensors = {"token_embd.weight": embedding, "blk.0.attn_q.weight": np.zeros((31, 32), np.float32)}
    with (
        open_source(write(tmp_path / "x.gguf", tensors=tensors)) as source,
        pytest.raises((FormatError, CheckpointError), match="31 rows"),
    ):
        source.tensor("model.layers.0.self_attn.q_proj.weight")


def test_transformers_reads_the_same_weights_from_our_test_file(folders: dict[str, Path], tmp_path: Path) -> None:
    """An outside witness for names, head order and dequantisation: transformers' own GGUF loader."""
    import torch
    from transformers import AutoModelForCausalLM

    path = checkpoints.tiny_gguf(checkpoints.tiny_llama(tmp_path / "f"), tmp_path / "m.gguf", "Q8_0")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32).state_dict()
    with open_source(path) as source:
        for name in source.names():
            torch.testing.assert_close(source.tensor(name), theirs[name], rtol=0, atol=0)
