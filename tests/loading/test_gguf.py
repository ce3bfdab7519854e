"""GGUF files: round trips against the gguf package, names, configs, and what is refused."""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from deepseek_flash.errors import FormatError, UnsupportedModel
from deepseek_flash.loading.gguf import GGUFFile
from deepseek_flash.loading.gguf_names import half_split, to_hf
from deepseek_flash.loading.source import open_source
from tests.support import checkpoints


def pair(key: str, kind: int, payload: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + payload


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def tensor(name: str, dims: list[int], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def container(
    pairs: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    version: int = 3,
    align: int = 32,
) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(pairs)) + b"".join(pairs) + b"".join(tensors)
    return head + b"\0" * (-len(head) % align) + data


def opened(tmp_path: Path, content: bytes) -> GGUFFile:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    return GGUFFile(path)


def refused(tmp_path: Path, content: bytes, *words: str, error: type[Exception] = FormatError) -> None:
    with pytest.raises(error) as caught:
        opened(tmp_path, content).require_decodable()
    for word in ("x.gguf", *words):
        if error is FormatError or word != "x.gguf":
            assert word in str(caught.value)


def test_metadata_of_every_type_matches_the_gguf_package(tmp_path: Path) -> None:
    path = tmp_path / "meta.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    kinds = gguf.GGUFValueType
    values: dict[str, tuple[Any, Any]] = {
        "u8": (200, kinds.UINT8), "i8": (-3, kinds.INT8), "u16": (60000, kinds.UINT16), "i16": (-30000, kinds.INT16),
        "u32": (4_000_000_000, kinds.UINT32), "i32": (-2_000_000_000, kinds.INT32), "u64": (2**63, kinds.UINT64),
        "i64": (-(2**62), kinds.INT64), "f32": (0.5, kinds.FLOAT32), "f64": (1e300, kinds.FLOAT64),
        "yes": (True, kinds.BOOL), "no": (False, kinds.BOOL), "text": ("naïve 你好 🙂", kinds.STRING),
    }  # fmt: skip
    for key, (value, kind) in values.items():
        writer.add_key_value(f"t.{key}", value, kind)
    writer.add_array("t.ints", [1, -2, 3])
    writer.add_array("t.floats", [0.5, 0.25])
    writer.add_array("t.bools", [True, False])
    writer.add_array("t.texts", ["a", "", "déjà"])
    writer.add_array("t.nested", [[1, 2], [3]])
    writer.add_tensor("w", np.ones((2, 3), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours = GGUFFile(path)
    for key, (value, _) in values.items():
        assert ours.metadata[f"t.{key}"] == value
        assert type(ours.metadata[f"t.{key}"]) is type(value)
    assert ours.metadata["t.ints"] == [1, -2, 3]
    assert ours.metadata["t.floats"] == [0.5, 0.25]
    assert ours.metadata["t.bools"] == [True, False]
    assert ours.metadata["t.texts"] == ["a", "", "déjà"]
    assert ours.metadata["t.nested"] == [[1, 2], [3]]
    assert ours.tensors["w"].shape == (2, 3)
    assert ours.read("w").tolist() == [[1.0] * 3] * 2


@pytest.mark.parametrize("quant", ["F32", "F16", "BF16", "Q8_0", "Q4_1", "Q5_0"])
def test_every_tensor_of_a_llama_file_comes_back(
    quant: str, folders: dict[str, Path], state: Any, tmp_path: Path
) -> None:
    """Names, shapes, head order and values: what the gguf package wrote is what Hugging Face calls by that name.
    Q03: interleaved q and k rows of llama files are half-split after loading."""
    path = checkpoints.tiny_gguf(folders["llama"], tmp_path / "m.gguf", quant)
    want = state(folders["llama"])
    with open_source(path) as source:
        assert source.kind == "gguf"
        assert set(source.names()) == set(want)
        for name, w in want.items():
            assert source.shape(name) == tuple(w.shape)
            got = source.tensor(name)
            kind = gguf.GGMLQuantizationType[source.dtype(name)]
            expected = gguf.quants.dequantize(gguf.quants.quantize(_rows(w, name, True), kind), kind)
            expected = _rows(torch.from_numpy(expected.reshape(w.shape).copy()), name, False)
            np.testing.assert_array_equal(got.float().numpy(), expected)


def _rows(w: torch.Tensor, name: str, to_gguf: bool) -> np.ndarray:
    heads = 4 if ".q_proj." in name else 2 if ".k_proj." in name else 0
    if not heads:
        return w.numpy()
    return checkpoints.interleave_heads(w.numpy(), heads) if to_gguf else half_split(w, heads).numpy()


@pytest.mark.parametrize("arch", ["qwen2", "qwen3"])
def test_qwen_files_are_not_reordered(arch: str, folders: dict[str, Path], state: Any, tmp_path: Path) -> None:
    path = checkpoints.tiny_gguf(folders[arch], tmp_path / "m.gguf")
    want = state(folders[arch])
    with open_source(path) as source:
        assert set(source.names()) == set(want)
        for name, w in want.items():
            assert torch.equal(source.tensor(name), w), name


def test_half_split_undoes_the_converters_order() -> None:
    w = torch.arange(24.0).reshape(12, 2)  # 2 heads of 6
    mixed = torch.from_numpy(checkpoints.interleave_heads(w.numpy(), 2))
    assert mixed[:6, 0].tolist() == [0.0, 6.0, 2.0, 8.0, 4.0, 10.0]
    assert torch.equal(half_split(mixed, 2), w)
    assert torch.equal(half_split(mixed[:, 0].contiguous(), 2), w[:, 0])


def test_names_of_all_tensors_agree_with_the_gguf_package() -> None:
    archs = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}
    for arch in archs.values():
        names = gguf.get_tensor_name_map(arch, 12)
        for hf in (
            "model.embed_tokens", "model.norm", "lm_head", "model.layers.11.self_attn.q_proj",
            "model.layers.0.self_attn.k_proj", "model.layers.0.self_attn.v_proj", "model.layers.0.self_attn.o_proj",
            "model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj",
            "model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm",
        ):  # fmt: skip
            assert to_hf(names.get_name(hf) + ".weight") == hf + ".weight"
    qwen3 = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, 2)
    assert (
        to_hf(qwen3.get_name("model.layers.1.self_attn.q_norm") + ".weight") == "model.layers.1.self_attn.q_norm.weight"
    )
    assert to_hf("blk.3.attn_q.bias") == "model.layers.3.self_attn.q_proj.bias"
    for strange in ("blk.03.attn_q.weight", "blk.1.attn_sinks.weight", "blk.-1.attn_q.weight", "v.patch.weight"):
        assert to_hf(strange) == strange


def test_the_real_file_opens_fast(smollm2: Path) -> None:
    spent = []
    for _ in range(3):
        start = time.perf_counter()
        open_source(smollm2).close()
        spent.append(time.perf_counter() - start)
    assert min(spent) < 0.6  # 0.07 s on an idle core
    with open_source(smollm2) as source:
        assert source.config["num_hidden_layers"] == 30
        assert source.config["tie_word_embeddings"] is True
        assert source.config["rope_theta"] == 100000.0
        assert len(source.metadata["tokenizer.ggml.tokens"]) == 49152
        assert len(source.names()) == 272


@pytest.mark.slow
def test_the_real_file_reads_like_the_gguf_package(smollm2: Path) -> None:
    """Slow because of the gguf package's reader: several seconds to open the file."""
    stored = {to_hf(t.name): t for t in gguf.GGUFReader(smollm2).tensors}
    with open_source(smollm2) as source:
        assert set(stored) == set(source.names())
        for name in ("embed_tokens", "layers.3.self_attn.v_proj", "layers.29.mlp.down_proj", "norm"):
            t = stored[f"model.{name}.weight"]
            want = gguf.quants.dequantize(t.data, t.tensor_type).reshape(source.shape(f"model.{name}.weight"))
            np.testing.assert_array_equal(source.tensor(f"model.{name}.weight").numpy(), want)


def test_version_2_is_read(tmp_path: Path) -> None:
    content = container([], [tensor("w", [2], 0, 0)], np.float32([1, 2]).tobytes(), version=2)
    assert opened(tmp_path, content).read("w").tolist() == [1.0, 2.0]


def test_alignment_of_the_file_is_followed(tmp_path: Path) -> None:
    align = pair("general.alignment", 4, struct.pack("<I", 64))
    infos = [tensor("a", [1], 0, 0), tensor("b", [1], 0, 64)]
    data = struct.pack("<f", 1.0) + b"\xff" * 60 + struct.pack("<f", 2.0)
    ours = opened(tmp_path, container([align], infos, data, align=64))
    assert (ours.read("a").item(), ours.read("b").item()) == (1.0, 2.0)


U32 = struct.Struct("<I").pack
U64 = struct.Struct("<Q").pack


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["0 bytes"]),
        (b"GGUF", ["4 bytes"]),
        (b"PK\x03\x04" + b"\0" * 40, ["not a GGUF file"]),
        (container(version=1), ["version 1"]),
        (container(version=4), ["version 4"]),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), ["big-endian"]),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), ["tensor count", str(2**60)]),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63), ["key-value count", str(2**63)]),
        (container([pair("k", 9, U32(0) + U64(2**60))]), ["'k'", str(2**60)]),
        (container([pair("k", 9, U32(8) + U64(2**61))]), ["'k'", str(2**61)]),
        (container([pair("k", 8, U64(2**62))]), ["'k'", str(2**62)]),
        (container([pair("k", 9, U32(8) + U64(2) + text("a") + U64(2**40))]), ["element 1", str(2**40)]),
        (container([pair("k", 9, (U32(9) + U64(1)) * 9 + U32(0) + U64(0))]), ["'k'", "nested deeper"]),
        (container([pair("k", 13, b"\0" * 8)]), ["value type 13"]),
        (container([pair("k", 9, U32(77) + U64(0))]), ["element type 77"]),
        (container([pair("k", 7, b"\2")]), ["bool"]),
        (container([pair("k", 8, text(b"\xff\xfe"))]), ["UTF-8"]),
        (container([pair("k", 9, U32(8) + U64(1) + text(b"\xff\xfe"))]), ["element 0", "UTF-8"]),
        (container([pair("k", 0, b"\1"), pair("k", 0, b"\1")]), ["'k'", "twice"]),
        (container([text(b"x" * 70000) + U32(0) + b"\0"]), ["70000"]),
        (container([pair("general.alignment", 4, U32(48))]), ["48", "power of two"]),
        (container([pair("general.alignment", 4, U32(0))]), ["alignment is 0"]),
        (container([pair("general.alignment", 8, text("32"))]), ["'32'"]),
        (container([], [tensor("w", [2], 0, 0)], b"\0" * 4), ["'w'", "8", "truncated"]),
        (container([], [tensor("w", [2**62, 2**62], 0, 0)], b"\0" * 8), ["'w'", str(2**62)]),
        (container([], [tensor("w", [2**63, 2, 1], 0, 0)], b"\0" * 8), ["'w'"]),
        (container([], [tensor("w", [2], 0, 2**63)], b"\0" * 8), ["'w'", str(2**63)]),
        (container([], [tensor("w", [2], 0, 2**64 - 32)], b"\0" * 64), ["'w'"]),
        (container([], [tensor("w", [2], 0, 8)], b"\0" * 64), ["'w'", "alignment"]),
        (container([], [tensor("w", [0, 4], 0, 0)], b"\0" * 8), ["'w'", "zero"]),
        (container([], [tensor("w", [33], 8, 0)], b"\0" * 68), ["'w'", "33", "Q8_0"]),
        (container([], [tensor("w", [1] * 5, 0, 0)], b"\0" * 8), ["'w'", "5 dimensions"]),
        (container([], [tensor("w", [], 0, 0)], b"\0" * 8), ["'w'", "0 dimensions"]),
        (container([], [text("w") + U32(2**31)], b"\0" * 8), [str(2**31)]),
        (container([], [tensor("", [1], 0, 0)], b"\0" * 8), ["named ''"]),
        (container([], [tensor("a\nb", [1], 0, 0)], b"\0" * 8), ["named"]),
        (container([], [tensor("w", [1], 0, 0)] * 2, b"\0" * 8), ["'w'", "twice"]),
        (container([], [tensor("a", [16], 0, 0), tensor("b", [4], 0, 32)], b"\0" * 64), ["'b'", "'a'"]),
    ],
)
def test_a_damaged_file_is_a_format_error_with_the_numbers(tmp_path: Path, content: bytes, words: list[str]) -> None:
    refused(tmp_path, content, *words)


def test_an_unsupported_tensor_type_is_named_before_anything_is_read(tmp_path: Path) -> None:
    content = container([], [tensor("blk.0.attn_q.weight", [256], 16, 0)], b"\0" * 66)
    refused(tmp_path, content, "IQ2_XXS", "blk.0.attn_q.weight", "Q4_K", error=UnsupportedModel)


def test_a_file_that_shrinks_while_open_is_an_error_not_a_crash(tmp_path: Path) -> None:
    content = container([], [tensor("w", [4096], 0, 0)], b"\0" * 16384)
    ours = opened(tmp_path, content)
    (tmp_path / "x.gguf").write_bytes(content[:200])
    with pytest.raises(FormatError, match="shrank"):
        ours.read("w")


def test_fingerprints_tell_models_apart(folders: dict[str, Path], tmp_path: Path) -> None:
    a = checkpoints.tiny_gguf(folders["llama"], tmp_path / "a.gguf")
    b = checkpoints.tiny_gguf(folders["llama"], tmp_path / "b.gguf")
    raw = bytearray(b.read_bytes())
    raw[-1] ^= 1
    c = tmp_path / "c.gguf"
    c.write_bytes(raw)
    prints = []
    for path in (a, b, c):
        with open_source(path) as source:
            prints.append(source.fingerprint())
    assert prints[0] == prints[1] != prints[2]
    assert len(prints[0]) == 32
