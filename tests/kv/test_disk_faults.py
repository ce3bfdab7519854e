"""A seeded part of the disk store's fault campaigns; ``python -m tests.kv.disk_faults`` runs them whole."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from deepseek_flash.kv.disk import DiskStore
from tests.kv.disk_faults import BAD, CAMPAIGNS, EXTENT, chain, damage, get, opened, put

FAULTS = {"1 SIGKILL": 15, "2 power loss": 30, "3 failing calls": 30, "4 damaged files": 30, "11 soak": 6}


@pytest.mark.parametrize("row", CAMPAIGNS)
def test_K01_no_fault_makes_the_store_wrong(row: str, tmp_path: Path) -> None:
    """Whatever happens to the process, the disk or the files: the bytes that were written, or a miss."""
    found = CAMPAIGNS[row](tmp_path, FAULTS[row], random.Random(5))
    assert found["injected"] == FAULTS[row]
    assert found["hit"] > 0, "the oracle looked at nothing"
    assert not any(found[kind] for kind in BAD if kind != "useless"), found


def test_without_the_checksum_the_same_campaign_finds_wrong_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = DiskStore.__init__

    def trusting(self: DiskStore, *args: Any, **options: Any) -> None:
        make(self, *args, **{**options, "verify": False})

    monkeypatch.setattr(DiskStore, "__init__", trusting)
    found = damage(tmp_path, 60, random.Random(5))
    assert found["wrong"] > 0, "nothing but the checksum told right from wrong, or the campaign is blind"


def test_truncation_at_every_byte_of_a_small_record(tmp_path: Path) -> None:
    """A segment that ends anywhere inside its only record is a miss or its whole blocks; all of it is a hit."""
    keys, good = chain("short", EXTENT), tmp_path / "good"
    with opened(good) as store:
        put(store, keys)
        store.flush()
    name = max((p for p in good.iterdir() if "index" not in p.name), key=lambda p: p.stat().st_size).name
    whole = (good / name).read_bytes()
    most = []
    for size in (*range(0, len(whole), 131), *range(200), len(whole) - 1, len(whole)):
        folder, outcome = tmp_path / f"cut{size}", Counter[str]()
        shutil.copytree(good, folder, dirs_exist_ok=True)
        (folder / name).write_bytes(whole[:size])
        with opened(folder) as store:
            blocks = sum(get(store, piece, outcome) for piece in store.find(keys))
        shutil.rmtree(folder)
        assert outcome["wrong"] == 0, size
        most.append(blocks)
    assert most[-1] == EXTENT
    assert min(most) == 0
