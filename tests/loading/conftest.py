"""Tiny checkpoints, made once a session."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import checkpoints

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
    "beta_fast": 24.0,
}


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One folder an architecture: llama (llama3 RoPE), qwen2 (tied, sharded), qwen3 (bf16, yarn)."""
    root = tmp_path_factory.mktemp("checkpoints")
    import torch

    return {
        "llama": checkpoints.tiny_llama(root / "llama", rope_parameters=checkpoints.LLAMA3),
        "qwen2": checkpoints.tiny_qwen2(
            root / "qwen2", max_shard_size="100KB", generation={"do_sample": True, "temperature": 0.6}
        ),
        "qwen3": checkpoints.tiny_qwen3(root / "qwen3", rope_parameters=YARN, dtype=torch.bfloat16),
    }


@pytest.fixture(scope="session")
def state() -> Any:
    """Tensors of a folder by name, fp32, read by the safetensors library."""

    def read(folder: Path) -> dict[str, Any]:
        from safetensors.torch import load_file

        return {k: v.float() for f in sorted(folder.glob("*.safetensors")) for k, v in load_file(f).items()}

    return read
