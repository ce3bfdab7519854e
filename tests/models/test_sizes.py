"""Sizes known before loading: of weights, exactly those of the loaded model; of a step, close to what it takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from deepseek_flash.errors import FormatError, UnsupportedModel
from deepseek_flash.kernels.registry import Kernels, select
from deepseek_flash.loading.load import load_model_weights
from deepseek_flash.loading.source import open_source
from deepseek_flash.memory.plan import STORED
from deepseek_flash.models.sizes import ConfigOnly, ModelSizes
from tests.support.checkpoints import tiny_gguf, tiny_llama, tiny_qwen2, tiny_qwen3

MAKERS = {"llama": tiny_llama, "qwen2": tiny_qwen2, "qwen3": tiny_qwen3}
ODD = {"hidden_size": 72, "intermediate_size": 104, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 24}
"""Heads of 24 rows: joined projections do not fall on whole panels of 16."""
QUANTIZE = (None, "int8", "int4")


@pytest.fixture(scope="module", params=["auto", "torch"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    made = select("cpu", request.param, 1)
    if request.param == "auto" and not made.packs:
        pytest.skip("no native kernels here")
    return made


def loaded_bytes(path: Path, kernels: Kernels, quantize: str | None) -> int:
    """Of the model, really loaded."""
    with open_source(path) as source:
        sizes = ModelSizes(source, kernels)
        model = sizes.info.build(kernels)
        load_model_weights(model, model.rules, source, torch.float32, packed=kernels.packs, quantize=quantize)
    return model.weight_bytes()


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


@pytest.mark.parametrize("shape", [{}, ODD, {"tie_word_embeddings": True}], ids=["even", "odd", "tied"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", MAKERS)
def test_weights_are_counted_exactly(name: str, dtype: torch.dtype, shape: dict, kernels: Kernels, tmp_path: Path):
    folder = MAKERS[name](tmp_path / "m", dtype=dtype, **shape)
    with open_source(folder) as source:
        opened = ModelSizes(source, kernels)
        promised = ModelSizes(ConfigOnly(config_of(folder), kernels), kernels)
        for quantize in QUANTIZE if kernels.packs else QUANTIZE[:1]:
            real = loaded_bytes(folder, kernels, quantize)
            assert opened.weight_bytes(quantize) == real
            assert promised.weight_bytes(quantize) == real
        assert opened.quantize_choices() == ((STORED, "int8", "int4") if kernels.packs else (STORED,))


@pytest.mark.parametrize("quant", ["Q4_0", "Q5_1", "Q8_0", "F16"])
@pytest.mark.parametrize("name", MAKERS)
def test_weights_of_gguf_files(name: str, quant: str, kernels: Kernels, tmp_path: Path):
    path = tiny_gguf(MAKERS[name](tmp_path / "m"), tmp_path / "m.gguf", quant)
    with open_source(path) as source:
        for quantize in QUANTIZE[: 3 if kernels.packs else 1]:
            assert ModelSizes(source, kernels).weight_bytes(quantize) == loaded_bytes(path, kernels, quantize)


def test_weights_of_flash_folders(kernels: Kernels, tmp_path: Path):
    from deepseek_flash.tools.convert import convert

    folder = convert(tiny_qwen3(tmp_path / "m"), tmp_path / "flash", quantize="int4", bar=False)
    with open_source(folder) as source:
        assert ModelSizes(source, kernels).weight_bytes() == loaded_bytes(folder, kernels, None)


@pytest.mark.parametrize("method", ["awq", "gptq", "gptq asymmetric", "fp8"])
def test_weights_of_quantised_checkpoints_from_their_config(method: str, kernels: Kernels, tmp_path: Path):
    from tests.loading import test_awq_gptq, test_fp8

    whole = tiny_llama(tmp_path / "m", hidden_size=128, intermediate_size=128)
    kind, _, asymmetric = method.partition(" ")
    if kind == "fp8":
        folder = test_fp8.make(whole, tmp_path / "q")
    else:
        folder = test_awq_gptq.make(whole, tmp_path / "q", kind, **({"sym": False} if asymmetric else {}))
    promised = ModelSizes(ConfigOnly(config_of(folder), kernels), kernels)
    for quantize in QUANTIZE[: 3 if kernels.packs else 1]:
        real = loaded_bytes(folder, kernels, quantize)
        assert promised.weight_bytes(quantize) == pytest.approx(real, rel=0.05)


def test_what_does_not_run_is_refused(kernels: Kernels, tmp_path: Path):
    config = config_of(tiny_llama(tmp_path / "m"))
    with pytest.raises(UnsupportedModel, match="nonsense"):
        ConfigOnly({**config, "quantization_config": {"quant_method": "nonsense"}}, kernels)
    with pytest.raises(UnsupportedModel, match="MambaForCausalLM"):
        ConfigOnly({**config, "architectures": ["MambaForCausalLM"]}, kernels)
    with pytest.raises(FormatError, match="hidden_size"):
        ConfigOnly({**config, "hidden_size": "many"}, kernels)
