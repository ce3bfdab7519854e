"""AWQ and GPTQ checkpoints, packed here by hand from the published definition, against their dequantised model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepseek_flash.errors import CheckpointError, FormatError, UnsupportedModel
from deepseek_flash.kernels.weights import dequantize, pack, unpack
from deepseek_flash.loading.source import open_source
from tests.support.checkpoints import tiny_llama, tiny_qwen2
from tests.support.engines import open_engine

WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)


def words(values: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Whole numbers [a, b] → int32 [a, b * bits / 32], the first in the lowest bits (or in ``order``)."""
    per = 32 // bits
    each = values.reshape(values.shape[0], -1, per)[..., list(order or range(per))]
    out = (each << (torch.arange(per) * bits)).sum(-1)
    return torch.where(out >= 1 << 31, out - (1 << 32), out).to(torch.int32)


def quantise(w: torch.Tensor, bits: int, group: int, symmetric: bool) -> tuple[torch.Tensor, ...]:
    """q [n, k], zero points and fp16 scales [n, groups]."""
    n, k = w.shape
    group = k if group == -1 else group
    rows = w.view(n, -1, group)
    top = 2**bits - 1
    if symmetric:
        scale = (rows.abs().amax(-1) * 2 / top).half()
        zero = torch.full_like(scale, 2 ** (bits - 1))
    else:
        low, high = rows.amin(-1).clamp(max=0), rows.amax(-1).clamp(min=0)
        scale = ((high - low) / top).half()
        zero = (-low / scale.float()).round().clamp(1, top)
    q = (rows / scale.float().unsqueeze(-1)).round() + zero.float().unsqueeze(-1)
    return q.clamp(0, top).view(n, k).long(), zero.long(), scale


def make(folder: Path, out: Path, method: str, *, bits: int = 4, group: int = 32, **config: Any) -> Path:
    """The folder's linear layers quantised, and beside it (``out``/plain) the same values as floats."""
    symmetric = method == "gptq" and config.get("sym", True)
    tensors, plain = load_file(folder / "model.safetensors"), {}
    stored = {}
    for name, w in tensors.items():
        layer = name.removesuffix(".weight")
        if not layer.endswith("_proj"):
            stored[name] = plain[name] = w
            continue
        q, zero, scale = quantise(w.float(), bits, group, symmetric)
        each = w.shape[1] // zero.shape[1]
        # The published definition, one value at a time in effect: scale (q - zero), in fp32 here.
        plain[name] = scale.float().repeat_interleave(each, 1) * (q - zero.repeat_interleave(each, 1)).float()
        if method == "awq":
            stored[f"{layer}.qweight"] = words(q.T, 4, NIBBLES)
            stored[f"{layer}.qzeros"] = words(zero.T, 4, NIBBLES)
        else:
            less = 0 if config.get("checkpoint_format") == "gptq_v2" else 1
            stored[f"{layer}.qweight"] = words(q, bits).T.contiguous()
            stored[f"{layer}.qzeros"] = words(zero.T - less, bits)
            stored[f"{layer}.g_idx"] = (torch.arange(w.shape[1]) // each).to(torch.int32)
        stored[f"{layer}.scales"] = scale.T.contiguous()
    said = {"quant_method": method, "bits": bits, "group_size": group, **config}
    for target, content, extra in ((out, stored, {"quantization_config": said}), (out / "plain", plain, {})):
        target.mkdir(parents=True)
        for file in folder.glob("*.json"):
            (target / file.name).write_text(file.read_text())
        about = json.loads((folder / "config.json").read_text())
        (target / "config.json").write_text(json.dumps({**about, **extra}))
        save_file(content, target / "model.safetensors", {"format": "pt"})
    return out


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("wide") / "llama", **WIDE)


CASES: dict[str, dict[str, Any]] = {
    "awq": {"method": "awq", "version": "gemm", "zero_point": True},
    "awq group 128": {"method": "awq", "group": 128},
    "gptq": {"method": "gptq", "sym": True, "desc_act": False},
    "gptq asymmetric": {"method": "gptq", "sym": False, "group": 64},
    "gptq v2": {"method": "gptq", "sym": False, "checkpoint_format": "gptq_v2"},
    "gptq one group a row": {"method": "gptq", "sym": False, "group": -1},
    "gptq 8 bits": {"method": "gptq", "bits": 8, "group": 128},
    "gptq 8 bits asymmetric": {"method": "gptq", "bits": 8, "sym": False},
}


@pytest.mark.parametrize("case", CASES)
def test_values_are_those_of_the_published_dequantisation(case: str, llama: Path, tmp_path: Path) -> None:
    """Bit for bit, and packed and unpacked again."""
    with open_source(make(llama, tmp_path / "q", **CASES[case])) as source, open_source(tmp_path / "q/plain") as plain:
        assert sorted(source.names()) == sorted(plain.names())
        for name in source.names():
            assert source.shape(name) == plain.shape(name)
            assert torch.equal(source.tensor(name).float(), plain.tensor(name).float()), name
            if source.dtype(name).endswith("bit"):
                rows = source.weight_rows(name, 16, 24)
                assert torch.equal(dequantize(unpack(pack(rows))), plain.tensor(name)[16:40].float())
                assert (rows.format.offset == "zero") == (case in ("gptq", "gptq 8 bits"))


@pytest.mark.parametrize("case", ["awq", "gptq", "gptq asymmetric", "gptq one group a row", "gptq 8 bits"])
def test_a_loaded_model_says_what_the_dequantised_one_says(case: str, llama: Path, tmp_path: Path) -> None:
    folder = make(llama, tmp_path / "q", **CASES[case])
    text = "the cat in the hat and the other one"
    with open_engine(folder, kv_cache_dtype="fp32") as small, open_engine(folder / "plain") as plain:
        a, b = (torch.tensor(list(e.score(text).logprobs)[1:]) for e in (small, plain))
        assert (a - b).abs().mean() < 0.05  # activations have eight bits
        assert small.describe()["model"]["weight_bytes"] < 0.7 * plain.describe()["model"]["weight_bytes"]


def test_without_native_kernels_the_values_are_the_same(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPSEEK_FLASH_KERNELS", "torch")
    folder = make(llama, tmp_path / "q", "awq")
    with open_engine(folder) as small, open_engine(folder / "plain") as plain:
        assert list(small.score("hello there").logprobs)[1:] == list(plain.score("hello there").logprobs)[1:]


def test_symmetric_zero_points_are_known_whichever_way_they_are_stored(llama: Path, tmp_path: Path) -> None:
    """Some tools store 8 and name the format that stores 7."""
    folder = make(llama, tmp_path / "q", "gptq", checkpoint_format="gptq_v2")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["checkpoint_format"] = "gptq"
    (folder / "config.json").write_text(json.dumps(config))
    with open_source(folder) as source, open_source(folder / "plain") as plain:
        name = "model.layers.0.mlp.down_proj.weight"
        assert torch.equal(source.tensor(name), plain.tensor(name))


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    content = load_file(folder / "model.safetensors")
    for name, value in tensors.items():
        full = f"model.layers.1.self_attn.k_proj.{name}"
        if value is None:
            del content[full]
        else:
            content[full] = value
    save_file(content, folder / "model.safetensors", {"format": "pt"})


def test_act_order_is_refused_by_name(llama: Path, tmp_path: Path) -> None:
    folder = make(llama, tmp_path / "q", "gptq", desc_act=True)
    with open_source(folder):  # said, but g_idx says that it was not so
        pass
    change(folder, g_idx=torch.randperm(128).to(torch.int32) // 32)
    with pytest.raises(UnsupportedModel, match=r"k_proj was quantised in activation order \(desc_act, g_idx\)"):
        open_source(folder)
    change(folder, g_idx=None)
    with pytest.raises(UnsupportedModel, match="activation order"):
        open_source(folder)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "gptq", "bits": 3}, "bits='3'"),
        ({"quant_method": "gptq"}, "bits='None'"),
        ({"quant_method": "awq", "bits": 8}, "bits='8'"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version='gemv'"),
        ({"quant_method": "awq", "bits": 4, "zero_point": False}, "zero_point='False'"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 24}, "group_size='24'"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "marlin"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:head": {}}}, "dynamic"),
    ],
)
def test_what_does_not_load_is_refused_by_name(config: dict[str, Any], said: str, llama: Path, tmp_path: Path) -> None:
    folder = make(llama, tmp_path / "q", "awq", group=128)
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**about, "quantization_config": config}))
    with pytest.raises(UnsupportedModel, match=said):
        open_source(folder)


@pytest.mark.parametrize(
    ("tensors", "error", "said"),
    [
        ({"scales": None}, CheckpointError, "k_proj.scales"),
        ({"qzeros": torch.zeros(4, 7, dtype=torch.int32)}, FormatError, "qzeros"),
        ({"scales": torch.zeros(3, 64)}, FormatError, "scales"),
        ({"qweight": torch.zeros(0, 64, dtype=torch.int32)}, FormatError, "no matrix"),
        ({"qweight": torch.zeros(16, 64)}, FormatError, "I32 is needed"),
        ({"g_idx": torch.zeros(5, dtype=torch.int32)}, FormatError, "g_idx"),
        ({"weight": torch.zeros(64, 128)}, CheckpointError, "both weight and qweight"),
    ],
)
def test_damaged_layers_are_told(
    tensors: dict[str, Any], error: type[Exception], said: str, llama: Path, tmp_path: Path
) -> None:
    folder = make(llama, tmp_path / "q", "gptq")
    change(folder, **tensors)
    with pytest.raises(error, match=said):
        open_source(folder)


def test_scales_beyond_fp16_are_refused(llama: Path, tmp_path: Path) -> None:
    folder = make(llama, tmp_path / "q", "gptq")
    change(folder, scales=torch.full((4, 64), 1e6))
    with open_source(folder) as source, pytest.raises(FormatError, match="beyond fp16"):
        source.tensor("model.layers.1.self_attn.k_proj.weight")


def test_biases_that_only_fill_a_place_are_left_out(llama: Path, tmp_path: Path) -> None:
    folder = make(llama, tmp_path / "q", "gptq")
    change(folder, bias=torch.zeros(64))
    with open_engine(folder) as engine:
        assert len(engine.generate("hi", max_new_tokens=2, ignore_eos=True).token_ids) == 2
    change(folder, bias=torch.ones(64))
    with pytest.raises(CheckpointError, match=r"k_proj\.bias"):
        open_engine(folder)


def test_real_biases_stay(tmp_path: Path) -> None:
    folder = make(tiny_qwen2(tmp_path / "qwen", **WIDE), tmp_path / "q", "awq")
    with open_engine(folder, kv_cache_dtype="fp32") as small, open_engine(folder / "plain") as plain:
        a, b = (torch.tensor(list(e.score("the cat in the hat").logprobs)[1:]) for e in (small, plain))
        assert (a - b).abs().mean() < 0.05
