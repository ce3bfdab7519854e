"""``deepseek-flash convert``: what is kept, what is refused, what is printed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deepseek_flash.errors import ConfigError
from deepseek_flash.tools import cli
from deepseek_flash.tools.convert import Keep, convert


def formats(folder: Path) -> dict[str, str]:
    weights = json.loads((folder / "flash.json").read_text())["weights"]
    return {n: f"{w['format'].get('bits', w['format']['kind'])}/{w['format'].get('group')}" for n, w in weights.items()}


def test_the_command_writes_a_folder_and_prints_its_name(tiny: Path, tmp_path: Path, capfd) -> None:
    out = tmp_path / "sub" / "out"
    arguments = ["convert", str(tiny), str(out), "--quantize", "int4", "--group", "64", "--keep", "layers=1"]
    assert cli.main(arguments) == 0
    said = capfd.readouterr()
    assert said.out == f"{out}\n"
    assert "100%" in said.err
    found = formats(out)
    assert found["layers.0.mlp.down.weight.0"] == "4/64"
    assert found["layers.1.mlp.down.weight.0"] == "float32/None"
    assert found["embed.weight.0"] == found["head.weight.0"] == "8/64"
    manifest = json.loads((out / "flash.json").read_text())
    assert (manifest["quantize"], manifest["group"], manifest["keep"]) == ("int4", 64, ["layers=1"])
    assert manifest["source"]["kind"] == "safetensors"
    assert cli.main([*arguments, "--no-progress"]) == 0
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("pattern", "kept"),
    [
        ("head", {"head"}),
        ("layers=0-1", {"layers.0.mlp.down", "layers.1.mlp.down", "layers.1.attention.qkv"}),
        ("layers=1,12", {"layers.1.mlp.down", "layers.1.attention.qkv", "layers.12.mlp.down"}),
        ("mlp.down", {"layers.0.mlp.down", "layers.1.mlp.down", "layers.12.mlp.down"}),
        ("layers.*.attention.*", {"layers.1.attention.qkv"}),
        ("embed.weight", {"embed"}),
    ],
)
def test_what_keep_means(pattern: str, kept: set[str]) -> None:
    names = ["embed", "head", "layers.0.mlp.down", "layers.1.mlp.down", "layers.1.attention.qkv", "layers.12.mlp.down"]
    keep = Keep((pattern,))
    assert {n for n in names if keep(f"{n}.weight")} == kept
    keep.check([f"{n}.weight" for n in names])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--quantize", "int4", "--keep", "layers=1,7"], "there is no layers.7"),
        (["--quantize", "int4", "--keep", "layres=0"], "did you mean 'layers'"),
        (["--quantize", "int4", "--keep", "layers=x"], "numbers like 0,1 or 0-3"),
        (["--keep", "head"], "give --quantize too"),
        (["--quantize", "int8", "--group", "48"], "must be 32, 64 or 128"),
    ],
)
def test_wrong_wishes_are_told_before_anything_is_written(
    arguments: list[str], said: str, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["convert", str(tiny), str(tmp_path / "out"), *arguments]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_folder_without_tokenizer_is_refused_first(tiny: Path, tmp_path: Path) -> None:
    from deepseek_flash.errors import FormatError

    source = tmp_path / "in"
    source.mkdir()
    for name in ("config.json", "model.safetensors"):
        (source / name).write_bytes((tiny / name).read_bytes())
    with pytest.raises(FormatError, match=r"tokenizer\.json"):
        convert(source, tmp_path / "out", bar=False)
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_unknown_quantisation_in_python(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="int4"):
        convert(tiny, tmp_path / "out", quantize="int3", bar=False)
