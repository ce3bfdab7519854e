from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.checkpoints import tiny_llama


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama with a chat template: nonsense answers, real everything else."""
    return tiny_llama(tmp_path_factory.mktemp("model") / "tiny", num_hidden_layers=2)
