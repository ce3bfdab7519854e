"""The checkpoints that later model tests rely on are whole and say what their README says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open

DATA = Path(__file__).parents[1] / "data" / "checkpoints"
FOLDERS = ["v2", "v2lite", "v3", "v32", "v4", "v41", "v4_official", "v4_official_dq", "v4_official_q"]


def test_the_readme_names_every_folder():
    assert sorted(p.name for p in DATA.iterdir() if p.is_dir()) == FOLDERS
    text = (DATA / "README.md").read_text()
    assert all(f"`{name}`" in text for name in FOLDERS)


@pytest.mark.parametrize("name", FOLDERS)
def test_config_and_tensors_open(name):
    config = json.loads((DATA / name / "config.json").read_text())
    config = config.get("text_config", config)
    with safe_open(DATA / name / "model.safetensors", "pt") as f:
        shapes = {key: tuple(f.get_slice(key).get_shape()) for key in f.keys()}  # noqa: SIM118 (not a mapping)
    embeddings = [shape for key, shape in shapes.items() if key.endswith(("embed_tokens.weight", "embed.weight"))]
    hidden = config.get("hidden_size", config.get("dim"))
    assert (config["vocab_size"], hidden) in embeddings
    layers = config.get("num_hidden_layers", config.get("n_layers"))
    assert any(f"layers.{layers - 1}." in key for key in shapes)


def test_the_oracle_answers_are_there():
    with safe_open(DATA / "v41" / "ref.safetensors", "pt") as f:
        assert sorted(f.keys()) == ["engram_token_map", "ids", "logits", "multipliers", "primes"]
        assert f.get_slice("logits").get_shape() == [len(f.get_tensor("ids")), 512]
