"""GGML decoders against the gguf package, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from deepseek_flash.errors import UnsupportedModel
from deepseek_flash.kernels.weights import dequantize as values_of
from deepseek_flash.kernels.weights import pack, unpack
from deepseek_flash.quant.formats import GGML_TYPES, SUPPORTED, dequantize, ggml_type
from deepseek_flash.quant.repack import repack

SCALES = {
    "Q8_0": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]
}  # fmt: skip
"""Where each block holds fp16 numbers, which random bytes would make NaN."""
BY_NAME = {t.name: t for t in GGML_TYPES.values()}


def _blocks(name: str, count: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    kind = BY_NAME[name]
    if kind.native is not None:
        values = rng.normal(size=count).astype(np.float32)
        raw = {"F32": values, "F16": values.astype(np.float16)}.get(name)
        if raw is None:
            raw = (values.view(np.uint32) >> 16).astype(np.uint16)
        return raw.view(np.uint8).reshape(count, kind.nbytes)
    data = rng.integers(0, 256, size=(count, kind.nbytes), dtype=np.uint8)
    for at in SCALES[name]:
        data[:, at : at + 2] = rng.normal(size=count).astype(np.float16).view(np.uint8).reshape(count, 2)
    return data


@pytest.mark.parametrize("name", SUPPORTED)
@pytest.mark.parametrize("count", [1, 7, 64])
def test_decoders_match_gguf_on_random_bytes(name: str, count: int) -> None:
    kind = BY_NAME[name]
    data = _blocks(name, count, seed=count)
    want = gguf.quants.dequantize(data, gguf.GGMLQuantizationType(kind.id)).reshape(-1)
    got = dequantize(torch.from_numpy(data.reshape(-1)), kind, (count, kind.values))
    assert got.shape == (count, kind.values)
    np.testing.assert_array_equal(got.numpy().reshape(-1), want)


@pytest.mark.parametrize("name", SCALES)
@pytest.mark.parametrize("rows", [1, 16, 37])
def test_repacked_blocks_hold_the_same_values(name: str, rows: int) -> None:
    """K-quants too, through the packed form and back: equal to the gguf package, and to our decoder bit for bit."""
    kind = BY_NAME[name]
    per_row = 512 // kind.values
    data = _blocks(name, rows * per_row, seed=rows)
    want = gguf.quants.dequantize(data, gguf.GGMLQuantizationType(kind.id)).reshape(rows, 512)
    plain = repack(name, torch.from_numpy(data).view(rows, per_row, kind.nbytes), 512)
    np.testing.assert_array_equal(values_of(plain).numpy(), want)
    decoded = dequantize(torch.from_numpy(data.reshape(-1)), kind, (rows, 512))
    assert torch.equal(values_of(plain).view(torch.int32), decoded.view(torch.int32))
    np.testing.assert_array_equal(values_of(unpack(pack(plain))).numpy(), want)


@pytest.mark.parametrize("name", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_decoders_undo_ggufs_encoder(name: str) -> None:
    w = np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)
    packed = gguf.quants.quantize(w, gguf.GGMLQuantizationType[name])
    got = dequantize(torch.from_numpy(packed.view(np.uint8).reshape(-1).copy()), BY_NAME[name], (16, 64)).numpy()
    limit = {"F16": 2e-3, "BF16": 2e-2, "Q8_0": 0.02}.get(name, 0.4)
    assert 0 < np.abs(got - w).max() < limit


def test_a_tensor_longer_than_one_piece_is_decoded_whole() -> None:
    data = _blocks("Q4_0", 40_000, seed=1)  # 1.28 million values
    want = gguf.quants.dequantize(data, gguf.GGMLQuantizationType.Q4_0).reshape(-1)
    got = dequantize(torch.from_numpy(data.reshape(-1)), BY_NAME["Q4_0"], (40_000, 32))
    np.testing.assert_array_equal(got.numpy().reshape(-1), want)


def test_the_table_agrees_with_ggufs_sizes() -> None:
    for kind in GGML_TYPES.values():
        assert (kind.values, kind.nbytes) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind.id)], kind.name


@pytest.mark.parametrize(
    ("type_id", "shown"), [(10, "Q2_K"), (16, "IQ2_XXS"), (26, "I32"), (5, "number 5"), (999, "999")]
)
def test_other_types_are_refused_by_name(type_id: int, shown: str) -> None:
    with pytest.raises(UnsupportedModel, match="Q4_K") as caught:
        ggml_type(type_id, "blk.0.attn_q.weight")
    assert shown in str(caught.value)
    assert "blk.0.attn_q.weight" in str(caught.value)
    assert caught.value.supported == SUPPORTED
