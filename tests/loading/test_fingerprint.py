"""The digest of a model's files: every byte counts, files are read once, and what is remembered is never stale."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from deepseek_flash.loading import fingerprint
from deepseek_flash.loading.fingerprint import weights_fingerprint


class Source:
    """A source whose own fingerprint sees nothing of an edit, so that what differs is due to the files."""

    kind = "safetensors"

    def fingerprint(self) -> bytes:
        return b"sampled" * 4


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 64)
    (folder / "config.json").write_text("{}")
    (folder / "README.md").write_text("not part of it")
    return folder


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were read."""
    names: list[str] = []
    real = fingerprint._digest

    def counted(file: Path) -> str:
        names.append(file.name)
        return real(file)

    monkeypatch.setattr(fingerprint, "_digest", counted)
    return names


def digest(path: Path, memory: Path) -> bytes:
    return weights_fingerprint(path, Source(), memory)  # type: ignore[arg-type]


def test_the_same_bytes_have_the_same_digest_wherever_they_lie(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere"
    shutil.copytree(model, copy)
    first = digest(model, tmp_path / "a.json")
    assert len(first) == 32
    assert digest(copy, tmp_path / "b.json") == first


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
@pytest.mark.parametrize("at", [0, -1])
def test_one_changed_byte_changes_it(model: Path, tmp_path: Path, name: str, at: int) -> None:
    before = digest(model, tmp_path / "a.json")
    data = bytearray((model / name).read_bytes())
    data[at] ^= 1
    (model / name).write_bytes(data)
    assert digest(model, tmp_path / "b.json") != before


def test_files_that_are_no_part_of_the_model_do_not_count(model: Path, tmp_path: Path) -> None:
    before = digest(model, tmp_path / "a.json")
    (model / "README.md").write_text("changed")
    assert digest(model, tmp_path / "a.json") == before
    (model / "tokenizer.json").write_text("{}")
    assert digest(model, tmp_path / "a.json") != before


def test_a_second_call_reads_no_file(model: Path, tmp_path: Path, reads: list[str]) -> None:
    memory = tmp_path / "kept" / "fingerprints.json"
    first = digest(model, memory)
    assert sorted(reads) == ["config.json", "model.safetensors"]
    assert digest(model, memory) == first
    assert len(reads) == 2
    assert [p.name for p in memory.parent.iterdir()] == [memory.name]  # no temporary file is left


def test_a_changed_file_is_read_again_and_only_that_one(model: Path, tmp_path: Path, reads: list[str]) -> None:
    memory, file = tmp_path / "kept.json", model / "model.safetensors"
    before = digest(model, memory)
    reads.clear()
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    stat = file.stat()
    file.write_bytes(data)  # the same length and inode: only its time tells
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert digest(model, memory) != before
    assert reads == ["model.safetensors"]


def test_a_file_put_in_its_place_with_the_same_time_and_size_is_seen(
    model: Path, tmp_path: Path, reads: list[str]
) -> None:
    memory, file = tmp_path / "kept.json", model / "model.safetensors"
    before = digest(model, memory)
    stat, other = file.stat(), tmp_path / "other"
    other.write_bytes(bytes(len(file.read_bytes())))
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    os.replace(other, file)
    assert file.stat().st_mtime_ns == stat.st_mtime_ns
    assert file.stat().st_size == stat.st_size
    assert digest(model, memory) != before


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": 1}', "\xff"])
def test_a_damaged_memory_is_done_without(model: Path, tmp_path: Path, reads: list[str], text: str) -> None:
    memory = tmp_path / "kept.json"
    first = digest(model, memory)
    memory.write_bytes(text.encode("latin-1"))
    assert digest(model, memory) == first
    assert len(reads) == 4
    assert len(json.loads(memory.read_text())) == 2


def test_a_memory_that_cannot_be_written_is_done_without(model: Path, tmp_path: Path, reads: list[str]) -> None:
    (tmp_path / "file").write_text("")
    memory = tmp_path / "file" / "kept.json"
    assert digest(model, memory) == digest(model, memory)
    assert len(reads) == 4


def test_one_file_is_a_model_too(model: Path, tmp_path: Path) -> None:
    first = digest(model / "model.safetensors", tmp_path / "a.json")
    (model / "config.json").write_text('{"x": 1}')
    assert digest(model / "model.safetensors", tmp_path / "a.json") == first
