"""Hugging Face folders: what opens, equal to the safetensors library, and what is refused with the numbers."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from deepseek_flash.errors import CheckpointError, FormatError, ModelError, ModelNotFound, UnsupportedModel
from deepseek_flash.loading.safetensors import normalise
from deepseek_flash.loading.source import open_source

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1}


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_folders_of_transformers_open_with_every_tensor(arch: str, folders: dict[str, Path], state: Any) -> None:
    want = state(folders[arch])
    with open_source(folders[arch]) as source:
        assert source.kind == "safetensors"
        assert source.metadata == {}
        assert sorted(source.names()) == sorted(want)
        for name in source.names():
            got = source.tensor(name)
            assert source.shape(name) == tuple(want[name].shape)
            assert got.dtype == {"F32": torch.float32, "BF16": torch.bfloat16}[source.dtype(name)]
            assert torch.equal(got.float(), want[name])
        assert source.dtype("model.norm.weight") == ("BF16" if arch == "qwen3" else "F32")
        assert source.config["model_type"] == arch
        assert source.config["rope_theta"] == 10000.0
        assert source.generation_config["eos_token_id"] == [288]


def test_rope_parameters_of_either_spelling_become_one() -> None:
    new = {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}}
    old = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}}
    for config in (new, old):
        out = normalise(config)
        assert out["rope_theta"] == 5e5
        assert out["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    assert normalise({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}})["rope_scaling"] is None
    assert normalise({"rope_theta": 1e4, "rope_scaling": None})["rope_scaling"] is None
    assert normalise({})["rope_scaling"] is None


def folder(tmp_path: Path, **tensors: torch.Tensor) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors or {"w": torch.ones(2, 3)}, tmp_path / "model.safetensors")
    return tmp_path


def raw(tmp_path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if length is None else length
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", size) + text + data)
    return tmp_path


def entry(dtype: Any = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> dict[str, Any]:
    listed = [list(v) if isinstance(v, tuple) else v for v in (shape, offsets)]
    return {"dtype": dtype, "shape": listed[0], "data_offsets": listed[1]}


@pytest.mark.parametrize(
    ("header", "data", "length", "words"),
    [
        (b"", b"", 2**63, [str(2**63)]),
        (b"{}", b"", 3, ["3 bytes", "2 follow"]),
        (b"{}", b"x", None, ["the file has 11"]),
        (b"[1]", b"", None, ["list"]),
        (b"nope", b"", None, ["not valid JSON"]),
        (b"\xff\xfe", b"", None, ["not valid JSON"]),
        (b'{"a":' * 50000, b"", None, ["nested too deep"]),
        (b'{"w": ' + b"9" * 5000 + b"}", b"", None, ["not valid JSON"]),
        (b'{"w": NaN}', b"", None, ["not valid JSON"]),
        (b'{"w": 1, "w": 2}', b"", None, ["'w'", "twice"]),
        ({"w": 3}, b"", None, ["'w'", "dtype, shape"]),
        ({"w": {"dtype": "F32"}}, b"", None, ["'w'", "data_offsets"]),
        ({"w": entry(dtype="F31")}, b"\0" * 4, None, ["'w'", "F31"]),
        ({"w": entry(dtype=7)}, b"\0" * 4, None, ["'w'", "7"]),
        ({"w": entry(shape="4")}, b"\0" * 4, None, ["'w'", "shape"]),
        ({"w": entry(shape=(-1,))}, b"\0" * 4, None, ["'w'", "-1"]),
        ({"w": entry(shape=(1.0,))}, b"\0" * 4, None, ["'w'", "1.0"]),
        ({"w": entry(shape=(True,))}, b"\0" * 4, None, ["'w'", "True"]),
        ({"w": entry(shape=(2**62, 2**62))}, b"\0" * 4, None, ["'w'", str(2**62)]),
        ({"w": entry(shape=(2**64,))}, b"\0" * 4, None, ["'w'"]),
        ({"w": entry(shape=(1,) * 17)}, b"\0" * 4, None, ["'w'", "16"]),
        ({"w": entry(offsets=(4, 0))}, b"\0" * 4, None, ["'w'", "[4, 0]"]),
        ({"w": entry(offsets=(0, 4, 8))}, b"\0" * 8, None, ["'w'"]),
        ({"w": entry(shape=(2,), offsets=(0, 8))}, b"\0" * 4, None, ["'w'", "[0, 8]", "truncated"]),
        ({"w": entry(shape=(2,))}, b"\0" * 4, None, ["'w'", "8 bytes", "give 4"]),
        ({"w": entry(dtype="F4", shape=(1,), offsets=(0, 1))}, b"\0", None, ["'w'"]),
        ({"w": entry(offsets=(4, 8))}, b"\0" * 8, None, ["'w'", "gap"]),
        ({"a": entry(), "w": entry(offsets=(2, 6))}, b"\0" * 6, None, ["'w'", "overlaps"]),
        ({"w": entry()}, b"\0" * 5, None, ["end at byte"]),
        ({"": entry()}, b"\0" * 4, None, ["named ''"]),
        ({"a\u0000b": entry()}, b"\0" * 4, None, ["named"]),
    ],
)
def test_a_damaged_file_is_a_format_error_with_the_numbers(
    header: Any, data: bytes, length: int | None, words: list[str], tmp_path: Path
) -> None:
    with pytest.raises(FormatError) as caught:
        open_source(raw(tmp_path, header, data, length))
    for word in ("model.safetensors", *words):
        assert word in str(caught.value)


def test_every_truncation_is_a_format_error(tmp_path: Path) -> None:
    whole = (folder(tmp_path, w=torch.ones(4), v=torch.zeros(2)) / "model.safetensors").read_bytes()
    for cut in range(len(whole)):
        (tmp_path / "model.safetensors").write_bytes(whole[:cut])
        with pytest.raises(FormatError):
            open_source(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_is_refused_by_name(dtype: torch.dtype, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="F8_E") as caught:
        open_source(folder(tmp_path, w=torch.ones(4).to(dtype)))
    assert "F32, F16, BF16" in str(caught.value)
    assert "'w'" in str(caught.value)


def test_other_types_are_refused_when_a_weight_has_them(tmp_path: Path) -> None:
    """A forgotten integer buffer must not stop a model that ignores it."""
    with open_source(folder(tmp_path, w=torch.ones(4), ids=torch.arange(3))) as source:
        assert source.dtype("ids") == "I64"
        with pytest.raises(UnsupportedModel, match=r"'ids'.*I64"):
            source.tensor("ids")


def test_quantised_folders_are_refused_by_method(tmp_path: Path) -> None:
    folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": {"quant_method": "eetq"}}))
    with pytest.raises(UnsupportedModel, match="eetq"):
        open_source(tmp_path)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (b"[]", ["list"]),
        (b"{", ["JSON"]),
        (b'{"a":' * 100000, ["nested too deep"]),
        (b'{"x": Infinity}', ["Infinity"]),
        (b'{"num_hidden_layers": 1000000000}', ["1000000000", "1 tensors"]),
    ],
)
def test_a_bad_config_is_a_format_error(config: bytes, words: list[str], tmp_path: Path) -> None:
    folder(tmp_path)
    (tmp_path / "config.json").write_bytes(config)
    with pytest.raises(FormatError) as caught:
        open_source(tmp_path)
    for word in words:
        assert word in str(caught.value)


def test_odd_config_types_do_not_crash(tmp_path: Path) -> None:
    folder(tmp_path)
    odd = {"architectures": {"a": 1}, "quantization_config": [1], "rope_parameters": 3, "rope_scaling": "x"}
    (tmp_path / "config.json").write_text(json.dumps(odd))
    with pytest.raises(UnsupportedModel):
        open_source(tmp_path)


def sharded(tmp_path: Path, change: Callable[[dict[str, Any]], None] = lambda m: None) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file({"a": torch.ones(2)}, tmp_path / "model-1.safetensors")
    save_file({"b": torch.zeros(3)}, tmp_path / "model-2.safetensors")
    placed: dict[str, Any] = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    change(placed)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return tmp_path


def test_shards_are_joined_and_strangers_stay_visible(tmp_path: Path) -> None:
    with open_source(sharded(tmp_path)) as source:
        assert sorted(source.names()) == ["a", "b"]
        assert source.tensor("b").tolist() == [0.0, 0.0, 0.0]
    save_file({"b": torch.zeros(3), "stranger": torch.zeros(1)}, tmp_path / "model-2.safetensors")
    with open_source(tmp_path) as source:
        assert "stranger" in source.names()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.update(c="model-2.safetensors"), ["model-2.safetensors", "missing: c"]),
        (lambda m: m.update(c="model-3.safetensors"), ["'model-3.safetensors'", "not in the folder"]),
        (lambda m: m.update(c="../x.safetensors"), ["'../x.safetensors'", "without folders"]),
        (lambda m: m.update(c="/etc/x.safetensors"), ["'/etc/x.safetensors'"]),
        (lambda m: m.update(c="C:\\x.safetensors"), ["without folders"]),
        (lambda m: m.update(c="..safetensors"), ["without folders"]),
        (lambda m: m.update(c="weights.bin"), ["'weights.bin'"]),
        (lambda m: m.update(c=3), ["'3'"]),
        (lambda m: m.clear(), ["weight_map"]),
    ],
)
def test_a_bad_index_is_refused(change: Any, words: list[str], tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "x.safetensors").write_bytes(b"outside")
    with pytest.raises(CheckpointError) as caught:
        open_source(sharded(tmp_path / "m", change))
    for word in words:
        assert word in str(caught.value)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    sharded(tmp_path)
    save_file({"a": torch.ones(2), "b": torch.zeros(3)}, tmp_path / "model-2.safetensors")
    with pytest.raises(FormatError, match=r"'a'.*another shard"):
        open_source(tmp_path)


def test_pickles_are_never_opened(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(ModelError, match="never opened") as caught:
        open_source(tmp_path)
    assert "pytorch_model.bin" in str(caught.value)
    assert "safetensors" in str(caught.value)


def test_what_is_no_model_says_what_it_is(tmp_path: Path, folders: dict[str, Path]) -> None:
    with pytest.raises(ModelNotFound):
        open_source(tmp_path / "nothing")
    with pytest.raises(ModelError, match=r"no config\.json"):
        open_source(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="neither"):
        open_source(tmp_path)
    with pytest.raises(ModelError, match="give the folder"):
        open_source(folders["llama"] / "model.safetensors")
    with pytest.raises(FormatError, match="no GGUF file"):
        open_source(tmp_path / "config.json")
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(FormatError, match=r"a\.gguf"):
        open_source(tmp_path)
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"several.*a\.gguf, b\.gguf"):
        open_source(tmp_path)


def test_reading_after_close_is_a_clear_error(tmp_path: Path) -> None:
    source = open_source(folder(tmp_path))
    source.close()
    source.close()
    with pytest.raises(ModelError, match="closed"):
        source.tensor("w")


def test_fingerprint_follows_config_and_weights(tmp_path: Path) -> None:
    def fingerprint() -> bytes:
        with open_source(tmp_path) as source:
            return source.fingerprint()

    folder(tmp_path, w=torch.ones(5000))
    first = fingerprint()
    assert fingerprint() == first
    changed = torch.ones(5000)
    changed[-1] = 2
    folder(tmp_path, w=changed)
    second = fingerprint()
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "rope_theta": 1}))
    assert len({first, second, fingerprint()}) == 3
