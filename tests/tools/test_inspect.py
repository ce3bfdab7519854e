"""``deepseek-flash inspect``: every kind of model file, also those that do not run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from deepseek_flash.errors import FormatError, ModelError
from deepseek_flash.loading.flash import FlashFolder
from deepseek_flash.tools import cli
from deepseek_flash.tools.convert import convert
from deepseek_flash.tools.inspect import examine, verify
from tests.support.checkpoints import tiny_gguf

VALUES = 2 * 320 * 64 + 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96) + 5 * 64


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert cli.main(["inspect", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_folder(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, str(tiny))
    assert "tensors" not in found
    assert found["kind"] == "safetensors folder"
    assert found["runs"] is True
    assert (found["architecture"], found["layers"], found["context_length"]) == ("LlamaForCausalLM", 2, 1024)
    assert found["parameters"] == VALUES
    assert found["bytes"] == 4 * VALUES
    assert found["types"] == {"F32": {"count": 21, "bytes": 4 * VALUES, "share": 1.0}}
    assert (found["tokenizer"], found["chat_template"], found["quantisation"]) == ("BPE", True, "none (F32)")
    assert len(found["fingerprint"]) == 64
    listed = as_json(capsys, str(tiny), "--tensors")["tensors"]
    assert {"name": "model.norm.weight", "type": "F32", "shape": [64], "nbytes": 256} in listed


def test_gguf_and_flash(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tiny_gguf(tiny, tmp_path / "gguf" / "m.gguf", "Q4_0") if (tmp_path / "gguf").mkdir() is None else tiny
    for where in (path, path.parent):
        found = as_json(capsys, str(where))
        assert (found["kind"], found["quantisation"], found["runs"]) == ("GGUF file", "mostly Q4_0", True)
        assert found["parameters"] == VALUES
        assert found["tokenizer"] == "byte-level BPE"
        assert found["types"]["Q4_0"]["bytes"] == (VALUES - 5 * 64) * 18 // 32
    flash = convert(path, tmp_path / "flash", bar=False)
    found = as_json(capsys, str(flash))
    assert (found["kind"], found["parameters"], found["runs"]) == ("flash folder", VALUES, True)
    assert found["types"]["int4 g32 zero"]["bytes"] == (VALUES - 5 * 64) * 18 // 32
    assert found["chat_template"] is True


def test_the_table(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(tiny), "--tensors"]) == 0
    out = capsys.readouterr().out
    for word in ("LlamaForCausalLM", "chat template  yes", "Tensors by type", "100.0%", "lm_head.weight", "[320, 64]"):
        assert word in out


def test_what_does_not_run_is_shown_with_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"architectures": ["DeepseekV3ForCausalLM"], "num_hidden_layers": 1, "max_position_embeddings": 4096}
    config["quantization_config"] = {"quant_method": "fbgemm_fp8", "bits": 8, "group_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"w": torch.zeros(4, 4, dtype=torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    found = as_json(capsys, str(tmp_path))
    assert found["runs"] is False
    assert "fbgemm_fp8" in found["why_not"]
    assert (found["architecture"], found["context_length"]) == ("DeepseekV3ForCausalLM", 4096)
    assert (found["quantisation"], found["parameters"]) == ("fbgemm_fp8, 8 bits, groups of 128", 16)
    one = as_json(capsys, str(tmp_path / "model.safetensors"))
    assert (one["kind"], one["types"]["F8_E4M3"]["count"]) == ("safetensors file", 1)


def test_verify_reads_every_tensor_and_names_the_damaged(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One bit of each tensor in turn; opening sees none of them."""
    folder = convert(tiny, tmp_path / "flash", bar=False)
    found = as_json(capsys, str(folder), "--verify")
    assert found["verified"] == len(as_json(capsys, str(folder), "--tensors")["tensors"])
    assert as_json(capsys, str(folder))["verified"] is None
    assert cli.main(["inspect", str(folder), "--verify"]) == 0
    assert f"all {found['verified']} tensors are as they were written" in capsys.readouterr().out
    path = folder / "model.safetensors"
    good = path.read_bytes()
    with FlashFolder(folder) as flash:
        places = {name: (e.offset, e.nbytes) for name, e in flash._entries.items()}
    for name, (offset, nbytes) in places.items():
        data = bytearray(good)
        data[offset + nbytes // 3] ^= 4
        path.write_bytes(data)
        assert examine(folder).runs
        with pytest.raises(FormatError, match=f"1 of {len(places)} tensors are not as they were written: {name};"):
            verify(folder)
    data = bytearray(good)
    for offset, _ in places.values():
        data[offset] ^= 1
    path.write_bytes(data)
    assert cli.main(["inspect", str(folder), "--verify"]) == 2
    said = capsys.readouterr()
    assert f"{len(places)} of {len(places)} tensors" in said.err
    assert said.out == ""
    path.write_bytes(good[:-1])
    assert cli.main(["inspect", str(folder), "--verify"]) == 2


def test_digests_that_are_not_there_are_no_match(tiny: Path, tmp_path: Path) -> None:
    folder = convert(tiny, tmp_path / "flash", bar=False)
    manifest = json.loads((folder / "flash.json").read_text())
    del manifest["vectors"]["norm.weight"]["digest"]
    manifest["weights"]["head.weight.0"]["digest"] = 7
    (folder / "flash.json").write_text(json.dumps(manifest))
    with pytest.raises(FormatError, match=r"2 of .*(head\.weight\.0.*norm\.weight|norm\.weight.*head\.weight\.0)"):
        verify(folder)


def test_other_models_have_nothing_to_verify(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(tiny), "--verify"]) == 2
    assert "holds no digests to compare with" in capsys.readouterr().err


def test_what_holds_no_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="holds no model"):
        examine(tmp_path)
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + bytes(8))
    with pytest.raises(FormatError):
        examine(tmp_path / "m.gguf")
