"""Reading config.json: what is understood, what is refused and how."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepseek_flash.errors import FormatError, UnsupportedModel
from deepseek_flash.kernels.registry import select
from deepseek_flash.layers.rope import RopeScaling, Rotary, frequencies
from deepseek_flash.models.dense import DenseInfo
from deepseek_flash.models.registry import MODEL_TYPES, MODELS, resolve

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "vocab_size": 100,
    "rope_theta": 5000.0,
}


def _read(**over: Any) -> DenseInfo:
    info = resolve({**LLAMA, **over})
    assert isinstance(info, DenseInfo)
    return info


def test_a_plain_config() -> None:
    info = _read()
    assert (info.architecture, info.num_layers, info.hidden_size) == ("LlamaForCausalLM", 2, 64)
    assert (info.vocab_size, info.max_position, info.head_dim) == (100, 512, 16)
    assert info.rope.theta == 5000.0
    spec = info.cache_spec(16)
    assert [f.name for f in spec.groups[0].fields] == ["k", "v", "k", "v"]
    assert spec.groups[0].block_bytes(16) == 2 * 2 * 16 * 2 * 16 * 4


def test_every_architecture_and_model_type_resolves() -> None:
    for name in MODELS:
        assert resolve({**LLAMA, "architectures": [name]}).architecture == name
    for kind, name in MODEL_TYPES.items():
        assert resolve({**LLAMA, "architectures": None, "model_type": kind}).architecture == name


@pytest.mark.parametrize(
    ("over", "word"),
    [
        ({"architectures": ["LlamaForCasualLM"]}, "did you mean 'LlamaForCausalLM'"),
        ({"architectures": ["DeepseekV4ForCausalLM"]}, "supported: LlamaForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantization_config"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling rope_type='dynamic'"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "'longrope'"),
        ({"use_sliding_window": True, "sliding_window": 128}, "sliding_window=128"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
    ],
)
def test_features_that_are_not_there_are_named(over: dict[str, Any], word: str) -> None:
    """Q06: refused with the architecture before anything is allocated."""
    with pytest.raises(UnsupportedModel, match=word) as e:
        _read(**over)
    assert e.value.architecture
    assert e.value.supported


@pytest.mark.parametrize(
    ("over", "word"),
    [
        ({"hidden_size": None}, "hidden_size=None"),
        ({"hidden_size": "64"}, "hidden_size='64'"),
        ({"hidden_size": -1}, "hidden_size=-1"),
        ({"hidden_size": 66}, "a multiple of num_attention_heads=4"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_attention_heads": True}, "num_attention_heads=True"),
        ({"num_key_value_heads": 3}, "a divisor of num_attention_heads=4"),
        ({"head_dim": 15}, "even number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan"),
        ({"rms_norm_eps": 0}, "rms_norm_eps=0"),
        ({"rope_theta": float("inf")}, "rope_theta=inf"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes'"),
        ({"rope_scaling": [1, 2]}, r"rope_scaling=\[1, 2\]"),
        ({"rope_scaling": {"type": "linear"}}, "factor=None"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor=0"),
        ({"rope_scaling": {"rope_type": "factors", "factors": [1.0, -1.0]}}, "8 positive numbers"),
        ({"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}}, "high_freq"),
        ({"architectures": "LlamaForCausalLM"}, "not a list of names"),
        ({"architectures": None}, "neither architectures nor model_type"),
    ],
)
def test_impossible_values_are_named(over: dict[str, Any], word: str) -> None:
    with pytest.raises(FormatError, match=word):
        _read(**over)


@pytest.mark.parametrize(
    "over",
    [
        {"use_sliding_window": False, "sliding_window": 128},
        {"use_sliding_window": True, "sliding_window": None},
        {"use_sliding_window": True, "sliding_window": 4096},
        {"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 2},
        {"hidden_act": None, "rope_scaling": None, "quantization_config": None},
    ],
)
def test_windows_that_hide_nothing_are_fine(over: dict[str, Any]) -> None:
    assert _read(**over).num_layers == 2


def test_both_spellings_of_rope_are_one() -> None:
    extra = {"factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 16}
    old = _read(rope_theta=1e6, rope_scaling={"type": "yarn", **extra})
    new = _read(rope_theta=None, rope_parameters={"rope_type": "yarn", "rope_theta": 1e6, **extra})
    assert old.rope == new.rope
    assert old.rope.scaling.kind == "yarn"


def test_yarn_takes_missing_numbers_from_the_context() -> None:
    scaling = _read(rope_scaling={"type": "yarn", "original_max_position_embeddings": 128}).rope.scaling
    assert (scaling.factor, scaling.original) == (4.0, 128)


def test_yarn_magnitude_is_given_or_a_ratio_or_grows_with_the_factor() -> None:
    """Q01 and Q02: the ratio of both mscales where a config has both."""
    plain = RopeScaling("yarn", factor=8.0, original=64)
    assert frequencies(16, 1e4, plain)[1] == pytest.approx(0.1 * 2.0794415 + 1)
    both = RopeScaling("yarn", factor=8.0, original=64, mscale=0.7, mscale_all_dim=0.7)
    assert frequencies(16, 1e4, both)[1] == 1.0
    assert frequencies(16, 1e4, RopeScaling("yarn", factor=8.0, original=64, magnitude=1.3))[1] == 1.3


@pytest.mark.parametrize(
    "over",
    [
        {},
        {"mscale": 1.0, "mscale_all_dim": 0.7},
        {"mscale": 0.707, "mscale_all_dim": 1.0},
        {"mscale": 0.5},
        {"mscale_all_dim": 0.5},
        {"attention_factor": 1.3, "mscale": 1.0, "mscale_all_dim": 0.7},
        {"beta_fast": 20, "beta_slow": 2, "truncate": False},
    ],
    ids=str,
)
def test_Q01_Q02_yarn_equals_transformers_far_out(over: dict[str, Any]) -> None:
    """Q01, Q02: angles and magnitude at positions far beyond the old context, for every mix of the two factors."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    yarn = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 64, **over}
    config = LlamaConfig(**{**LLAMA, "rope_theta": None}, rope_parameters={**yarn, "rope_theta": 5000.0})
    inv_freq, magnitude = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    rope = _read(rope_scaling=yarn).rope
    at = torch.tensor([0, 63, 64, 2559])
    cos, sin = Rotary(rope.rot, rope.theta, rope.scaling).rows(at, 2560)
    angle = at[:, None] * inv_freq
    torch.testing.assert_close(cos[:, 0, :8], angle.cos() * magnitude, rtol=0, atol=1e-3)
    torch.testing.assert_close(sin[:, 0, 8:], angle.sin() * magnitude, rtol=0, atol=1e-3)


def test_part_of_a_head_may_turn() -> None:
    rope = _read(partial_rotary_factor=0.5).rope
    assert rope.rot == 8


def test_rotary_rows_do_not_depend_on_when_the_table_grew() -> None:
    """Q03: positions far out too."""
    late, early = Rotary(16, 1e4, RopeScaling()), Rotary(16, 1e4, RopeScaling())
    at = torch.tensor([0, 1, 2047, 2048, 5000])
    early.rows(at[:1], 1)
    early.rows(at[:3], 2048)
    for a, b in zip(late.rows(at, 5001), early.rows(at, 5001), strict=True):
        assert torch.equal(a, b)
    cos, sin = late.rows(at, 5001)
    angle = 5000 * 1e4 ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    assert torch.allclose(cos[4, 0, :8].double(), angle.cos(), atol=1e-3)
    assert torch.allclose(sin[4, 0, 8:].double(), angle.sin(), atol=1e-3)
    assert torch.equal(sin[..., :8], -sin[..., 8:])


def test_a_model_is_built_without_memory_and_says_what_it_weighs() -> None:
    model = _read(hidden_size=4096, intermediate_size=16384, vocab_size=100_000, num_attention_heads=32).build(
        select("cpu")
    )
    assert all(p.is_meta for p in model.parameters())
    layer = 4096 * (4096 + 2 * 2 * 128) + 4096 * 4096 + 3 * 4096 * 16384 + 2 * 4096
    assert model.weight_bytes() == 4 * (2 * 100_000 * 4096 + 2 * layer + 4096)
    targets = {r.target for r in model.rules}
    assert targets == set(dict(model.named_parameters()))
