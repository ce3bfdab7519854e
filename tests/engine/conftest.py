"""Tiny real engines: random weights, real tokenizer, real cache, ownership checked after every step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from deepseek_flash.engine import FlashEngine
from tests.support.checkpoints import tiny_llama
from tests.support.engines import open_engine


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random-weight Llama folder with a byte-level tokenizer and a ChatML template."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    tiny_llama(folder)
    return folder


@pytest.fixture(scope="session")
def engine(tiny: Path) -> Iterator[FlashEngine]:
    """One engine shared by tests that leave it as it was."""
    with open_engine(tiny, max_model_len=512, max_batch_size=8, prefill_chunk_size=64) as engine:
        yield engine
