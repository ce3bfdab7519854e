"""Model names: what each means, and what the error says when it means nothing. The Hub is a fake one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepseek_flash.errors import ModelNotFound
from deepseek_flash.loading import catalogue
from deepseek_flash.loading.hub import HubName
from deepseek_flash.loading.locate import locate, looks_like_path, parse_hub_name
from deepseek_flash.loading.source import open_source
from tests.support.fake_hub import FakeHub, serving


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("org/name", HubName("org/name")),
        ("org/name@main", HubName("org/name", "main")),
        ("org/name@refs/pr/3", HubName("org/name", "refs/pr/3")),
        ("org/name:f.Q4_K_M.gguf", HubName("org/name", None, "f.Q4_K_M.gguf")),
        ("org/name@v1.0:sub/f.gguf", HubName("org/name", "v1.0", "sub/f.gguf")),
        ("C:\\models\\x", None),
        ("C:/models/x.gguf", None),
        ("./org/name", None),
        ("../name", None),
        ("/org/name", None),
        ("~/name", None),
        ("a/b/c", None),
        ("models/x.gguf", None),
        ("name", None),
        ("org/name:../../etc/passwd", None),
        ("org/na me", None),
        ("org/", None),
        ("", None),
        ("org/name@a@b", None),
        ("\0/x", None),
    ],
)
def test_hub_names_are_told_from_paths(name: str, want: HubName | None) -> None:
    assert parse_hub_name(name) == want
    if want is not None:
        assert str(want) == name


def test_windows_paths_are_paths() -> None:
    for name in ("C:\\m\\x.gguf", "D:/m", "models\\x", "~", "x/y/z"):
        assert looks_like_path(name), name
    assert not looks_like_path("org/name:x.gguf")


def test_existing_paths_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "f.gguf").write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    assert locate("org/name") == Path("org/name")
    assert locate(str(tmp_path / "f.gguf")) == tmp_path / "f.gguf"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert locate("~/f.gguf") == tmp_path / "f.gguf"


def test_missing_paths_name_the_near_one(tmp_path: Path) -> None:
    (tmp_path / "smollm2.Q4_1.gguf").write_bytes(b"")
    with pytest.raises(ModelNotFound, match=r"did you mean 'smollm2\.Q4_1\.gguf'") as caught:
        locate(str(tmp_path / "smollm2.Q4_l.gguf"))
    assert "no such file or folder" in str(caught.value)
    assert isinstance(caught.value, FileNotFoundError)
    with pytest.raises(ModelNotFound, match="no such file or folder"):
        locate(str(tmp_path / "nowhere" / "deep" / "x.gguf"))
    with pytest.raises(ModelNotFound, match="no such file or folder"):
        locate("C:\\models\\x.gguf")


@pytest.mark.parametrize("name", ["", " ", "\0", "x" * 5000, "é" * 3000, "/" + "x" * 5000, "no such name"])
def test_impossible_names_are_not_found(name: str) -> None:
    with pytest.raises(ModelNotFound):
        locate(name)


def test_catalogue_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DEEPSEEK_FLASH_CACHE", str(tmp_path))
    monkeypatch.setattr(catalogue, "_installed", lambda entry: [])
    with pytest.raises(ModelNotFound, match="deepseek-flash pull smollm2-135m"):
        locate("smollm2-135m")
    with pytest.raises(ModelNotFound, match="did you mean 'smollm2-135m'"):
        locate("smolm2-135m")
    monkeypatch.setattr("deepseek_flash.loading.locate.pulled", lambda name: tmp_path / "it.gguf")
    assert locate("smollm2-135m") == tmp_path / "it.gguf"


@pytest.fixture
def hub(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    files = {p.name: p.read_bytes() for p in folders["qwen2"].iterdir()}
    strangers = {"onnx/model.safetensors": b"x", "pytorch_model.bin": b"x", "consolidated.safetensors": b"x"}
    fake = FakeHub(
        repos={
            "org/model": {**files, **strangers, "chat_template.jinja": b"{{ x }}", "README.md": b"#"},
            "org/quants": {"m.Q4_0.gguf": b"GGUF4", "m.Q8_0.gguf": b"GGUF8", "README.md": b"#"},
            "org/pickled": {"config.json": b"{}", "pytorch_model.bin": b"x"},
            "org/empty": {"README.md": b"#"},
            "org/gated": dict(files),
        },
        gated={"org/gated"},
    )
    with serving(fake):
        yield fake


def find(hub: FakeHub, name: str, cache: Path) -> Path:
    return locate(name, progress=False, endpoint=hub.endpoint, hub_cache=cache)


def test_a_repo_is_fetched_once_and_opens(hub: FakeHub, tmp_path: Path) -> None:
    folder = find(hub, "org/model", tmp_path)
    names = {p.name for p in folder.iterdir()}
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json", "chat_template.jinja"} <= names
    assert not names & {"pytorch_model.bin", "README.md", "onnx", "consolidated.safetensors"}
    with open_source(folder) as source:
        assert source.config["model_type"] == "qwen2"
        assert source.tensor("model.norm.weight").shape == (64,)
    hub.requests.clear()
    assert find(hub, "org/model@main", tmp_path) == folder
    assert find(hub, "org/model@v1", tmp_path) == folder
    assert not [r for r in hub.requests if r.startswith("GET /org/model/resolve")]


def test_the_cache_serves_while_the_hub_is_down_or_offline(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = find(hub, "org/model", tmp_path)
    file = find(hub, "org/quants:m.Q4_0.gguf", tmp_path)
    assert file.read_bytes() == b"GGUF4"
    hub.down = True
    assert find(hub, "org/model", tmp_path) == folder
    assert find(hub, "org/quants:m.Q4_0.gguf", tmp_path) == file
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    hub.requests.clear()
    assert find(hub, "org/model", tmp_path) == folder
    assert find(hub, "org/quants:m.Q4_0.gguf", tmp_path) == file
    assert hub.requests == []
    for name in ("org/other", "org/model@v2", "org/quants:m.Q8_0.gguf"):
        with pytest.raises(ModelNotFound, match="HF_HUB_OFFLINE is set"):
            find(hub, name, tmp_path)


def test_no_network(tmp_path: Path) -> None:
    nowhere = FakeHub(endpoint="http://127.0.0.1:9")
    for name in ("org/model", "org/model:x.gguf"):
        with pytest.raises(ModelNotFound, match="cannot be reached"):
            find(nowhere, name, tmp_path)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("org/modle", ["no repo 'org/modle'", "spelling", "hf auth login"]),
        ("org/modle:x.gguf", ["no repo 'org/modle'"]),
        ("org/gated", ["gated", "licence", "hf auth login", "HF_TOKEN"]),
        ("org/gated:x.gguf", ["gated"]),
        ("org/model@v9", ["no revision 'v9'"]),
        ("org/quants@v9:m.Q4_0.gguf", ["no revision 'v9'"]),
        ("org/quants", ["org/quants:m.Q4_0.gguf", "m.Q8_0.gguf"]),
        ("org/quants:m.Q4_O.gguf", ["no file 'm.Q4_O.gguf'", "did you mean 'm.Q4_0.gguf'"]),
        ("org/model:config.json", [".gguf"]),
        ("org/pickled", ["pickled", "never opened"]),
        ("org/empty", ["neither", "README.md"]),
        ("org/na--me..x", ["no model"]),
    ],
)
def test_what_the_hub_refuses_says_what_to_do(name: str, words: list[str], hub: FakeHub, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound) as caught:
        find(hub, name, tmp_path)
    for word in words:
        assert word in str(caught.value)
    assert os.linesep not in str(caught.value)
