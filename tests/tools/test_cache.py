"""``deepseek-flash cache``: list, verify, clear a folder of the disk tier."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from deepseek_flash.kv.disk import DiskStore, StoreIdentity
from deepseek_flash.kv.files import aligned_buffer
from deepseek_flash.kv.records import record_bytes
from deepseek_flash.tools import cli

BLOCK = 4096
KEYS = [bytes([i]) * 32 for i in range(6)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three records of two blocks each."""
    store = DiskStore(tmp_path, StoreIdentity(b"i" * 32, BLOCK), limit_bytes=64 << 20)
    rng = random.Random(1)
    for i in range(0, 6, 2):
        buffer = aligned_buffer(record_bytes(2, BLOCK))
        at = store.payload_at(2)
        buffer[at : at + 2 * BLOCK] = rng.randbytes(2 * BLOCK)
        assert store.write("rows", KEYS[i - 1] if i else bytes(32), i, KEYS[i : i + 2], buffer, 0.5).ok
    assert store.pin("system prompt", KEYS[:2])
    store.close()
    return tmp_path


def as_json(capsys: pytest.CaptureFixture[str], action: str, folder: Path, code: int = 0) -> dict[str, Any]:
    assert cli.main(["cache", action, str(folder), "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_listing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "ls", folder)
    records = sorted(found["records"], key=lambda r: r["depth"])
    assert [(r["depth"], r["blocks"], r["pinned"]) for r in records] == [(0, 2, True), (2, 2, False), (4, 2, False)]
    assert {r["identity"] for r in records} == {(b"i" * 32).hex()}
    assert found["pins"] == {"system prompt": 2}
    assert found["bytes"] >= sum(r["bytes"] for r in records)
    assert cli.main(["cache", "ls", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "3 records" in out
    assert out.count("pinned") == 1


def test_verify_finds_and_removes_what_is_damaged(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert as_json(capsys, "verify", folder)["damaged"] == 0
    segment = next(folder.glob("seg-*"))
    data = bytearray(segment.read_bytes())
    data[record_bytes(2, BLOCK) + 5000] ^= 1  # in the second record's payload
    segment.write_bytes(data)
    assert cli.main(["cache", "verify", str(folder)]) == 1
    assert "3 records" in (said := capsys.readouterr().out)
    assert "1 damaged and removed" in said
    again = as_json(capsys, "verify", folder)
    assert (again["records"], again["damaged"]) == (2, 0)


def test_clear_frees_everything(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert as_json(capsys, "clear", folder)["freed"] == 3 * record_bytes(2, BLOCK)
    assert not list(folder.glob("seg-*"))
    assert as_json(capsys, "ls", folder)["records"] == []
    assert cli.main(["cache", "clear", str(folder)]) == 0
    assert "0.0 MB freed" in capsys.readouterr().out


def test_other_folders_are_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "letter.txt").write_text("dear")
    (mine / "seg-1").write_bytes(b"x")
    for action in ("ls", "verify", "clear"):
        for path, why in (("none", "not a folder"), ("empty", "no cache"), ("mine", "letter.txt")):
            assert cli.main(["cache", action, str(tmp_path / path)]) == 2
            assert why in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
    assert not list((tmp_path / "empty").iterdir())
    assert sorted(p.name for p in mine.iterdir()) == ["letter.txt", "seg-1"]
    with pytest.raises(SystemExit) as e:
        cli.main(["cache", "eat", str(tmp_path)])
    assert e.value.code == 2
