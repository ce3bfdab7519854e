"""``deepseek-flash plan``: every kind of model, the answer as table, JSON and picture, and what it refuses."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from deepseek_flash.loading import hub
from deepseek_flash.tools import cli
from deepseek_flash.tools import plan as plan_tool
from deepseek_flash.tools.convert import convert
from tests.support.checkpoints import tiny_gguf, tiny_llama


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    assert cli.main(["plan", *arguments, "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def layers(found: dict[str, Any]) -> dict[str, int]:
    return {name: line["bytes"] for name, line in found["lines"].items()}


def test_the_table(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", str(tiny), "--device-memory", "4GiB", "--fraction", "0.5"]) == 0
    shown = capsys.readouterr().out
    for text in (str(tiny), "weights", "kv_cache", "32 x 1,024 tokens", "workspace", "runtime", "fits:", "2.0 GiB"):
        assert text in shown
    assert "memory_fraction 0.5 of 4.0 GiB" in shown


def test_json_adds_up(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, str(tiny), "--device-memory", "24GB", "--max-model-len", "512", "--max-batch-size", "3")
    assert found["fits"]
    assert found["total"] == sum(layers(found).values()) <= found["budget"] == 19_200_000_000
    assert (found["sequences"], found["max_model_len"], found["largest_context"]) == (3, 512, 1024)
    assert found["alternatives"] == []


def test_a_config_alone_says_the_same_as_the_files(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(tiny / "config.json", tmp_path)
    whole = as_json(capsys, str(tiny))
    assert layers(as_json(capsys, str(tmp_path))) == layers(whole)
    assert layers(as_json(capsys, str(tmp_path / "config.json"))) == layers(whole)
    assert layers(as_json(capsys, str(tiny / "config.json"))) == layers(whole)
    (tmp_path / "model.safetensors.index.json").write_text("{}")  # of a download that has yet to bring the shards
    assert layers(as_json(capsys, str(tmp_path))) == layers(whole)


def test_gguf_and_flash(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tiny_gguf(tiny, tmp_path / "m.gguf", "Q8_0")
    packed, floats = as_json(capsys, str(path)), as_json(capsys, str(tiny))
    flash = as_json(capsys, str(convert(path, tmp_path / "flash", bar=False)))
    assert flash["lines"]["weights"] == packed["lines"]["weights"]
    if as_json(capsys, str(tiny))["lines"]["kv_cache"]["what"].endswith("float32"):
        assert layers(packed)["weights"] <= layers(floats)["weights"]


def test_what_does_not_fit_is_exit_code_1_with_what_would(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny_llama(tmp_path / "m", max_position_embeddings=131072)
    memory = ["--device-memory", "100MiB"]
    found = as_json(capsys, str(folder), *memory, code=1)
    assert not found["fits"]
    assert found["sequences"] == 0
    tried = 0
    for alternative in found["alternatives"]:
        options = alternative["options"]
        if set(options) <= {"max_model_len", "kv_cache_dtype", "quantize"}:
            again = [x for k, v in options.items() for x in (f"--{k.replace('_', '-')}", str(v))]
        else:
            again = ["--fraction", str(options["memory_fraction"])]
        assert as_json(capsys, str(folder), *memory, *again)["total"] == alternative["total"]
        tried += 1
    assert tried >= 1
    assert cli.main(["plan", str(folder), *memory]) == 1
    shown = capsys.readouterr().out
    assert "Any one of these fits" in shown
    assert all(a["text"] in shown for a in found["alternatives"])
    assert cli.main(["plan", str(folder), "--device-memory", "1MiB"]) == 1
    assert "No option makes it fit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device-memory", "24 gigs"], "device_memory='24 gigs'"),
        (["--max-model-len", "4096"], "positions end at 1024"),
        (["--kv-cache-dtype", "int7"], "kv_cache_dtype='int7'"),
        (["--max-batch-size", "9999"], "max_batch_size=9999"),
    ],
)
def test_user_errors_are_exit_code_2(
    arguments: list[str], said: str, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", str(tiny), *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("fraction", ["0", "1.1", "half", "nan"])
def test_a_fraction_is_between_0_and_1(fraction: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as info:
        cli.main(["plan", "m", "--fraction", fraction])
    assert info.value.code == 2
    assert "not a number above 0, at most 1" in capsys.readouterr().err


def test_no_model_and_a_broken_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", str(tmp_path / "missing")]) == 2
    (tmp_path / "config.json").write_text('{"architectures": ["MambaForCausalLM"]}')
    assert cli.main(["plan", str(tmp_path)]) == 2
    assert "MambaForCausalLM" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{")
    assert cli.main(["plan", str(tmp_path)]) == 2


def test_of_a_hub_repo_only_the_config_is_fetched(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def fetch_config(name: hub.HubName) -> Path:
        asked.append(str(name))
        return tiny / "config.json"

    monkeypatch.setattr(hub, "fetch_config", fetch_config)
    found = as_json(capsys, "some/model@main")
    assert asked == ["some/model@main"]
    assert layers(found) == layers(as_json(capsys, str(tiny)))


def test_the_plot(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "out.png"
    for memory, code in (("4GiB", 0), ("1MiB", 1)):
        assert cli.main(["plan", str(tiny), "--device-memory", memory, "--plot", str(out)]) == code
        assert out.read_bytes().startswith(b"\x89PNG")
        out.unlink()
    assert cli.main(["plan", str(tiny), "--plot", str(tmp_path / "no" / "folder.png")]) == 2
    assert "cannot write" in capsys.readouterr().err


def test_a_plot_without_matplotlib_says_what_to_install(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(plan_tool, "predict", lambda options: pytest.fail("it counts before it looks"))
    assert cli.main(["plan", str(tiny), "--plot", "out.png"]) == 2
    assert "pip install 'deepseek-flash[plot]'" in capsys.readouterr().err
