"""The side-by-side harness itself: same requests every time, and it runs end to end with our engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PEERS = Path(__file__).with_name("peers")


@pytest.fixture
def workloads(monkeypatch):
    monkeypatch.syspath_prepend(str(PEERS))
    import workloads

    return workloads


def test_the_same_seed_gives_the_same_requests(workloads):
    assert workloads.build(3) == workloads.build(3)
    assert workloads.build(3) != workloads.build(4)
    sets = workloads.build(0)
    assert sorted(sets) == ["batch32", "chat8", "prefill", "rag16", "single"]
    assert len(sets["batch32"]) == 32
    assert len({prompt.split("\n\n")[0] for prompt, _ in sets["rag16"]}) == 1  # one shared document


def test_figures_are_read_from_among_other_output(monkeypatch):
    monkeypatch.syspath_prepend(str(PEERS))
    import run

    assert run.figures('loading…\n{"workload": "single", "seconds": 1.5}\nbye\n') == [
        {"workload": "single", "seconds": 1.5}
    ]


@pytest.mark.slow
def test_our_adapter_measures_the_real_model(smollm2, tmp_path):
    out = tmp_path / "out.json"
    options = ["--only", "ours", "--workloads", "single", "--rounds", "1", "--json", str(out)]
    done = subprocess.run(
        [sys.executable, str(PEERS / "run.py"), "--ours", sys.executable, *options],
        env={**os.environ, "OURS_MODEL": str(smollm2)},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    got = json.loads(out.read_text())
    assert set(got) == {"cold_start", "single"}, done.stderr
    assert "| single |" in done.stdout
