"""Quantising while loading: how far values move, what is kept, and that the model still says the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepseek_flash.errors import ConfigError, FormatError
from deepseek_flash.kernels.weights import WeightFormat, dequantize
from deepseek_flash.loading.packed import parts_of
from deepseek_flash.loading.source import open_source
from deepseek_flash.quant.encode import encode, format_of
from tests.support.checkpoints import tiny_gguf, tiny_llama
from tests.support.engines import open_engine


@pytest.mark.parametrize("name", ["int4", "int8"])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("k", [128, 200])
def test_values_move_less_than_half_a_step(name: str, group: int, k: int) -> None:
    """A step is the group's range over the number of codes; the search may clip outliers, but never loses by it."""
    w = torch.randn(70, k, generator=torch.Generator().manual_seed(1)) / 8
    form = format_of(name, group)
    got = dequantize(encode(w, form))
    padded = torch.nn.functional.pad(w, (0, -k % group)).view(70, -1, group)
    step = (padded.amax(-1) - padded.amin(-1)) / 15 if name == "int4" else 2 * padded.abs().amax(-1) / 254
    error = torch.nn.functional.pad(got - w, (0, -k % group)).view(70, -1, group)
    assert error.square().mean(-1).le(1.05 * step.square() / 12 + 1e-12).float().mean() > 0.5
    assert (error.square().mean(-1) <= step.square() / 4 * 1.01 + 1e-12).all()
    assert (got - w).norm() / w.norm() < (0.11 if name == "int4" else 0.008)


def test_odd_rows_survive() -> None:
    """Constant groups, zeros, one outlier, and groups of one sign."""
    w = torch.zeros(5, 64)
    w[1], w[2, 3], w[3] = 0.5, 100.0, -torch.arange(64) / 64
    w[4] = torch.linspace(1, 2, 64)
    for form in (format_of("int4"), format_of("int8"), WeightFormat("group", bits=6, group=32, offset="min")):
        got = dequantize(encode(w, form))
        assert torch.isfinite(got).all()
        assert torch.equal(got[0], w[0])
        assert torch.allclose(got[1], w[1], rtol=1e-2)
        assert abs(float(got[2, 3]) - 100) < 30
        assert torch.allclose(got[3:], w[3:], atol=0.05)


BOTH = [format_of("int4"), format_of("int8")]


@pytest.mark.parametrize("form", BOTH, ids=["int4", "int8"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_no_numbers_are_refused(form: WeightFormat, bad: float) -> None:
    w = torch.zeros(3, 64)
    w[2, 40] = bad
    with pytest.raises(FormatError, match=r"'some\.weight'.*infinite or not a number") as e:
        encode(w, form, "some.weight")
    assert e.value.tensor == "some.weight"


@pytest.mark.parametrize("form", BOTH, ids=["int4", "int8"])
def test_weights_beyond_fp16_scales_are_refused_and_those_below_are_kept(form: WeightFormat) -> None:
    edge = 6.5e4 if form.bits == 4 else 8.3e6  # minima and scales of 65504
    w = torch.linspace(-1, 1, 64).repeat(2, 1)
    for size in (1e5, 3e38) if form.bits == 4 else (1e7, 3e38):
        with pytest.raises(FormatError, match=f"beyond fp16 .65504. at {form.bits} bits"):
            encode(size * w, form, "some.weight")
    got = dequantize(encode(edge * w, form))
    assert (got - edge * w).norm() < (0.05 if form.bits == 4 else 0.004) * (edge * w).norm()


@pytest.mark.parametrize("form", BOTH, ids=["int4", "int8"])
@pytest.mark.parametrize("size", [1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 0.0])
def test_small_weights_lose_no_more_than_the_smallest_fp16_steps(form: WeightFormat, size: float) -> None:
    """The error of rounding to steps is at most half a step: the one wanted, or the next fp16 one above."""
    w = size * torch.randn(40, 128, generator=torch.Generator().manual_seed(3))
    got = dequantize(encode(w, form))
    rows = w.view(40, -1, 32)
    step = (rows.amax(-1) - rows.amin(-1)) / 15 if form.bits == 4 else rows.abs().amax(-1) / 127
    most = (step / 2 + 2.0**-24).unsqueeze(-1)  # and the minimum is rounded too
    error = (got.view(40, -1, 32) - rows).square().mean(-1)
    assert (error <= most.squeeze(-1).square()).all()
    if size >= 1e-7:
        assert (got - w).norm() < 0.4 * w.norm()


@pytest.mark.parametrize("name", ["int4", "int8"])
def test_loading_names_the_tensor_that_cannot_be_quantised(name: str, tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path)
    content = load_file(folder / "model.safetensors")
    content["model.layers.1.mlp.down_proj.weight"][3, 5] = float("nan")
    save_file(content, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(FormatError, match=r"layers\.1\.mlp\.down_proj\.weight.*not a number"):
        open_engine(folder, quantize=name)


def test_int4_keeps_embeddings_and_head_at_eight_bits(tmp_path: Path) -> None:
    with open_source(tiny_llama(tmp_path)) as source:
        for target, name, bits in (
            ("embed.weight", "model.embed_tokens.weight", 8),
            ("head.weight", "lm_head.weight", 8),
            ("layers.0.mlp.down.weight", "model.layers.0.mlp.down_proj.weight", 4),
        ):
            (part,) = parts_of(target, [name], source, "int4")
            assert part.format.bits == bits


def test_neighbours_of_one_format_become_one_part(tmp_path: Path) -> None:
    """q, k and v fused; a source whose rows are no whole panels ends a part."""
    with open_source(tiny_llama(tmp_path)) as source:
        names = [f"model.layers.0.self_attn.{x}_proj.weight" for x in "qkv"]
        (part,) = parts_of("layers.0.attention.qkv.weight", names, source, None)
        assert (part.rows, part.sources) == (64 + 32 + 32, tuple(names))
    folder = tiny_llama(tmp_path / "odd", num_attention_heads=6, num_key_value_heads=1, head_dim=10, hidden_size=60)
    with open_source(folder) as source:
        parts = parts_of("layers.0.attention.qkv.weight", names, source, None)
        assert [p.rows for p in parts] == [60, 10, 10]


@pytest.mark.parametrize("name", ["int4", "int8"])
def test_an_engine_quantises_and_answers(tmp_path: Path, name: str) -> None:
    folder = tiny_llama(tmp_path)
    text = "the cat in the hat"
    with open_engine(folder) as plain, open_engine(folder, quantize=name) as small:
        assert small.describe()["model"]["weight_bytes"] < 0.5 * plain.describe()["model"]["weight_bytes"]
        a, b = (e.generate(text, temperature=0.0, max_new_tokens=8, ignore_eos=True) for e in (plain, small))
        assert len(b.token_ids) == 8
        if name == "int8":
            assert a.token_ids[0] == b.token_ids[0]
        scores = [torch.tensor(list(e.score(text).logprobs)[1:]) for e in (plain, small)]
        assert (scores[0] - scores[1]).abs().mean() < (0.1 if name == "int8" else 1.0)


@pytest.mark.parametrize(("quant", "bytes_a_value"), [("Q4_1", 20 / 32), ("Q8_0", 34 / 32), ("F16", 2.0)])
def test_gguf_weights_take_the_files_bytes(tmp_path: Path, quant: str, bytes_a_value: float) -> None:
    wide = {"hidden_size": 128, "intermediate_size": 256}
    path = tiny_gguf(tiny_llama(tmp_path / "hf", **wide), tmp_path / "m.gguf", quant)
    with open_engine(path) as engine, open_source(path) as source:
        values = sum(source.shape(n)[0] * source.shape(n)[1] for n in source.names() if len(source.shape(n)) > 1)
        assert engine.describe()["model"]["weight_bytes"] == pytest.approx(values * bytes_a_value, rel=0.02)
        assert engine.describe()["cache"]["dtype"] == "float16"


def test_without_native_kernels_small_types_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPSEEK_FLASH_KERNELS", "torch")
    folder = tiny_llama(tmp_path)
    for option in ({"quantize": "int4"}, {"kv_cache_dtype": "int8"}):
        with pytest.raises(ConfigError, match="needs the native CPU kernels") as e:
            open_engine(folder, **option)
        assert e.value.field in option
