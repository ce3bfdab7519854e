"""The disk store under faults: a read is right or a miss, nothing is raised, the bound holds, the store goes on."""

from __future__ import annotations

import random
import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest

from deepseek_flash.kv.records import record_bytes
from tests.kv import disk_faults as faults
from tests.kv.disk_faults import BAD, CAMPAIGNS, EXTENT, ROWS, chain, check, opened, put, sound

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the disk store needs a POSIX system")
EACH = 18
"""Faults of every row of the campaign."""


@pytest.mark.parametrize("row", CAMPAIGNS)
def test_a_sample_of_the_campaign(row: str, tmp_path: Path) -> None:
    outcome = CAMPAIGNS[row](tmp_path, EACH, random.Random(f"sample {row}"))
    assert outcome["injected"] == EACH
    assert outcome["hit"] > EACH  # the faults leave something to be found, else nothing was tested
    assert {name: outcome[name] for name in BAD} == dict.fromkeys(BAD, 0), outcome


def damaged_reads(base: Path, n: int, *, verify: bool) -> Counter[str]:
    """Flip one bit of the only segment, ``n`` times, and read everything."""
    rng, keys, outcome = random.Random(5), chain("flipped", EXTENT), Counter[str]()
    with opened(base / "good") as store:
        assert put(store, keys).ok
    (name,) = (p.name for p in (base / "good").glob("seg-*"))
    for i in range(n):
        folder = base / f"f{i}"
        shutil.copytree(base / "good", folder)
        data = bytearray((folder / name).read_bytes())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        (folder / name).write_bytes(data)
        with opened(folder, verify=verify) as store:
            check(store, [keys], outcome)
        shutil.rmtree(folder)
    return outcome


def test_without_checksums_the_oracle_finds_wrong_data(tmp_path: Path) -> None:
    """So the tests above would fail if the store did not verify."""
    assert damaged_reads(tmp_path / "trusting", 20, verify=False)["wrong"] > 0
    checked = damaged_reads(tmp_path / "checking", 20, verify=True)
    assert checked["wrong"] == 0
    assert checked["hit"] + checked["miss"] == 20


def test_the_campaign_finds_a_store_that_does_not_verify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = faults.DiskStore
    monkeypatch.setattr(faults, "DiskStore", lambda *args, **kw: real(*args, **{**kw, "verify": False}))
    found = CAMPAIGNS["4 damaged files"](tmp_path, 40, random.Random(3))
    assert found["wrong"] > 0


@pytest.mark.parametrize("with_index", [True, False], ids=["index", "no index"])
def test_truncation_at_every_page_and_around_each(tmp_path: Path, with_index: bool) -> None:
    keys, good = chain("cut", 2 * EXTENT), tmp_path / "good"
    with opened(good) as store:
        assert put(store, keys, 0).ok
        assert put(store, keys, EXTENT).ok
    if not with_index:
        (good / "index.sqlite3").unlink()
    (name,) = (p.name for p in good.glob("seg-*"))
    whole = (good / name).read_bytes()
    assert len(whole) == 2 * record_bytes(EXTENT, ROWS)
    outcome = Counter[str]()
    for size in sorted({max(0, at + d) for at in range(0, len(whole), 4096) for d in (-1, 0, 1)}):
        folder = tmp_path / "cut"
        shutil.copytree(good, folder)
        (folder / name).write_bytes(whole[:size])
        sound(folder, outcome, [keys])
        shutil.rmtree(folder)
    assert {name: outcome[name] for name in BAD} == dict.fromkeys(BAD, 0), outcome
    assert outcome["hit"]


def test_reads_of_a_segment_cut_at_every_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One open store while its file becomes shorter, byte by byte: a short read is a miss, not an error."""
    keys = chain("bytes", 1)
    with opened(tmp_path) as store:
        assert put(store, keys, 0, 1).ok
        (piece,) = store.find(keys)
        (path,) = tmp_path.glob("seg-*")
        buffer = faults.aligned_buffer(piece.read_bytes)
        assert len(store.read(piece, buffer)) == ROWS
        monkeypatch.setattr(store, "drop_records", lambda records, why: None)  # else the first cut would be the last
        with path.open("r+b") as f:
            for at in range(path.stat().st_size - 1, -1, -1):
                f.truncate(at)
                assert not len(store.read(piece, buffer))
        monkeypatch.undo()
        store.read(piece, buffer)
        assert store.find(keys) == []
