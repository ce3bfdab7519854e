"""FP8 checkpoints with scales of blocks, made here from the published definition, against their dequantised model.

Q04: they run where nothing computes in FP8, and it is said once. Q05: scales that are exponents are powers of two.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepseek_flash.errors import CheckpointError, FormatError, UnsupportedModel
from deepseek_flash.kernels.weights import dequantize, pack, unpack
from deepseek_flash.loading.fp8 import powers_of_two
from deepseek_flash.loading.source import open_source
from deepseek_flash.tools import cli
from deepseek_flash.tools.convert import convert
from tests.support.checkpoints import tiny_llama, tiny_qwen3
from tests.support.engines import open_engine

WIDE = {"hidden_size": 160, "intermediate_size": 200, "num_hidden_layers": 2, "head_dim": 40}
LAYER = "model.layers.1.self_attn.k_proj.weight"
SCALE = f"{LAYER}_scale_inv"
TEXT = "the cat in the hat and the other one"


def blocks(w: torch.Tensor, block: tuple[int, int]) -> list[tuple[int, int, slice, slice]]:
    rows, columns = block
    return [
        (i // rows, j // columns, slice(i, i + rows), slice(j, j + columns))
        for i in range(0, w.shape[0], rows)
        for j in range(0, w.shape[1], columns)
    ]


def quantise(w: torch.Tensor, block: tuple[int, int], powers: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 values and fp32 scales, block by block: the largest magnitude becomes 448 (or half of it to all of it)."""
    out = torch.empty(w.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-w.shape[0] // block[0]), -(-w.shape[1] // block[1]))
    for i, j, rows, columns in blocks(w, block):
        scale = w[rows, columns].abs().max() / 448
        if powers:
            scale = torch.exp2(torch.log2(scale).ceil())
        scales[i, j] = scale
        out[rows, columns] = (w[rows, columns] / scale).to(torch.float8_e4m3fn)
    return out, scales


def make(
    folder: Path,
    out: Path,
    *,
    block: tuple[int, int] = (128, 128),
    scales: str = "F32",
    powers: bool = False,
    **config: Any,
) -> Path:
    """The folder's linear layers in FP8, and beside it (``out``/plain) the same values as bf16."""
    stored, plain = {}, {}
    for name, w in load_file(folder / "model.safetensors").items():
        stored[name] = plain[name] = w
        if not name.endswith("_proj.weight"):
            continue
        stored[name], scale = quantise(w.float(), block, powers)
        scale = scale.bfloat16() if scales == "BF16" else scale
        plain[name] = torch.empty(w.shape, dtype=torch.bfloat16)
        for i, j, rows, columns in blocks(w, block):
            plain[name][rows, columns] = (stored[name][rows, columns].float() * scale[i, j].float()).bfloat16()
        if scales in ("F8_E8M0", "U8"):
            byte = (torch.log2(scale) + 127).to(torch.uint8)
            scale = byte.view(torch.float8_e8m0fnu) if scales == "F8_E8M0" else byte
        stored[f"{name}_scale_inv"] = scale
    said: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(block), **config}
    said.setdefault("activation_scheme", "dynamic")
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
    "F32": {},
    "BF16": {"scales": "BF16", "modules_to_not_convert": ["lm_head"]},
    "small blocks": {"block": (16, 48)},
    "one scale a matrix": {"block": (1000, 1000)},
    "powers of two in F32": {"powers": True, "scale_fmt": "ue8m0"},
    "E8M0": {"powers": True, "scale_fmt": "ue8m0", "scales": "F8_E8M0"},
    "E8M0 that is not announced": {"powers": True, "scales": "F8_E8M0"},
    "E8M0 as bytes": {"powers": True, "scale_fmt": "ue8m0", "scales": "U8"},
}


@pytest.mark.parametrize("case", CASES)
def test_values_are_those_of_the_published_dequantisation(case: str, llama: Path, tmp_path: Path) -> None:
    """Bit for bit, in pieces too; no size is a multiple of a block."""
    with open_source(make(llama, tmp_path / "q", **CASES[case])) as source, open_source(tmp_path / "q/plain") as plain:
        assert sorted(source.names()) == sorted(plain.names())
        for name in source.names():
            want = plain.tensor(name)
            assert source.shape(name) == plain.shape(name)
            assert source.weight_format(name) == plain.weight_format(name) if want.ndim == 2 else True
            assert torch.equal(source.tensor(name), want), name
            out = torch.empty(want.shape)
            source.read_into(name, out)
            assert torch.equal(out, want.float())
            if source.dtype(name) == "F8_E4M3":
                assert torch.equal(source.float_rows(name, 16, 20), want[16:36].float())
                assert torch.equal(dequantize(unpack(pack(source.weight_rows(name, 17, 20)))), want[17:37].float())


@pytest.mark.parametrize("case", ["F32", "E8M0"])
@pytest.mark.parametrize(("kernels", "quantize"), [("auto", None), ("auto", "int8"), ("torch", None)])
def test_Q04_Q05_a_model_says_what_the_dequantised_one_says(
    case: str, kernels: str, quantize: str | None, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPSEEK_FLASH_KERNELS", kernels)
    folder = make(llama, tmp_path / "q", **CASES[case])
    options = {"kv_cache_dtype": "fp32", "quantize": quantize}
    with open_engine(folder, **options) as small, open_engine(folder / "plain", **options) as plain:
        assert list(small.score(TEXT).logprobs)[1:] == list(plain.score(TEXT).logprobs)[1:]
        assert small.describe()["model"]["weight_bytes"] == plain.describe()["model"]["weight_bytes"]


def test_Q04_it_is_said_once(llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make(tiny_qwen3(tmp_path / "m", **WIDE, dtype=torch.bfloat16), tmp_path / "q")
    with caplog.at_level(logging.WARNING, "deepseek_flash"), open_engine(folder) as engine:
        engine.generate("hi", max_new_tokens=2)
    assert len([r for r in caplog.records if "FP8 weights are decoded to bf16" in r.getMessage()]) == 1


def test_it_is_inspected_and_converted(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make(llama, tmp_path / "q")
    assert cli.main(["inspect", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["runs"], found["quantisation"]) == (True, "fp8, blocks of [128, 128]")
    assert found["types"]["F8_E4M3"]["count"] == 14
    flash = convert(folder, tmp_path / "flash", bar=False)
    with open_engine(folder) as a, open_engine(flash) as b:
        assert list(a.score(TEXT).logprobs)[1:] == list(b.score(TEXT).logprobs)[1:]
        assert a.describe()["cache"] == b.describe()["cache"]


def test_Q05_every_exponent_is_a_power_of_two() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    want = every.view(torch.float8_e8m0fnu).float()
    assert torch.equal(powers_of_two(every)[:255], want[:255])
    assert powers_of_two(every)[[0, 1, 127, 254]].tolist() == [2.0**-127, 2.0**-126, 1.0, 2.0**127]
    assert torch.isnan(powers_of_two(every)[255])


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"fmt": "e5m2"}, "fmt='e5m2'"),
        ({"activation_scheme": "static"}, "activation_scheme='static'"),
        ({"scale_fmt": "ue5m3"}, "scale_fmt='ue5m3'"),
        ({"weight_block_size": None}, "weight_block_size='None'"),
        ({"weight_block_size": [128]}, r"weight_block_size='\[128\]'"),
        ({"weight_block_size": [0, 128]}, "weight_block_size"),
        ({"weight_block_size": [True, 128]}, "weight_block_size"),
    ],
)
def test_what_does_not_load_is_refused_by_name(config: dict[str, Any], said: str, llama: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=said):
        open_source(make(llama, tmp_path / "q", **config))


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    content = load_file(folder / "model.safetensors")
    for name, value in tensors.items():
        full = LAYER if name == "weight" else SCALE
        if value is None:
            del content[full]
        else:
            content[full] = value
    save_file(content, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("tensors", "error", "said"),
    [
        ({"scale": None}, CheckpointError, "k_proj.weight_scale_inv"),
        ({"scale": torch.ones(1, 1)}, FormatError, r"shape \[1, 1\].* needs \[1, 2\]"),
        ({"scale": torch.ones(1, 2, dtype=torch.uint8)}, FormatError, "dtype U8.*needed for scales"),
        ({"scale": torch.ones(1, 2, dtype=torch.int32)}, FormatError, "dtype I32"),
        ({"weight": torch.ones(80, dtype=torch.float8_e4m3fn)}, FormatError, "no matrix"),
        ({"weight": torch.ones(80, 160, dtype=torch.float8_e5m2)}, UnsupportedModel, "F8_E5M2"),
    ],
)
def test_damaged_layers_are_told(
    tensors: dict[str, Any], error: type[Exception], said: str, llama: Path, tmp_path: Path
) -> None:
    folder = make(llama, tmp_path / "q")
    change(folder, **tensors)
    with pytest.raises(error, match=said):
        open_source(folder)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_scales_that_cannot_be_are_told(bad: float, llama: Path, tmp_path: Path) -> None:
    folder = make(llama, tmp_path / "q")
    change(folder, scale=torch.tensor([[1.0, bad]]))
    with (
        open_source(folder) as source,
        pytest.raises(FormatError, match=r"weight_scale_inv.*negative, infinite or not"),
    ):
        source.tensor(LAYER)


def test_weights_that_are_no_numbers_are_told(llama: Path, tmp_path: Path) -> None:
    folder = make(llama, tmp_path / "q")
    odd = torch.ones(80, 160)
    odd[3, 7] = float("nan")
    change(folder, weight=odd.to(torch.float8_e4m3fn))
    with open_source(folder) as source, pytest.raises(FormatError, match="a weight is not a number"):
        source.tensor(LAYER)


def test_Q05_exponents_read_as_numbers_are_told(llama: Path, tmp_path: Path) -> None:
    """A tool that wrote the byte 115 as the number 115.0; and the byte for not-a-number."""
    folder = make(llama, tmp_path / "q", powers=True, scale_fmt="ue8m0")
    change(folder, scale=torch.tensor([[0.0, 115.0]]))
    with open_source(folder) as source, pytest.raises(FormatError, match="ue8m0, powers of two, but a scale is 115"):
        source.tensor(LAYER)
    change(folder, scale=torch.tensor([[127, 255]], dtype=torch.uint8).view(torch.float8_e8m0fnu))
    with open_source(folder) as source, pytest.raises(FormatError, match="not a number"):
        source.tensor(LAYER)


def test_scales_without_an_fp8_weight_are_unexpected(llama: Path, tmp_path: Path) -> None:
    folder = make(llama, tmp_path / "q")
    change(folder, weight=torch.zeros(80, 160, dtype=torch.bfloat16))
    with pytest.raises(CheckpointError, match=r"k_proj\.weight_scale_inv"):
        open_engine(folder)
