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


PACED = ("test_edges", "test_leaving", "test_reentry", "test_streams")
"""Tests that do something while an answer is on its way. The native kernels finish this tiny model's longest answers
before anybody can, so torch computes here."""


@pytest.fixture(scope="module", autouse=True)
def pace(request: pytest.FixtureRequest) -> Iterator[None]:
    """Set the kernels of engines that such tests open themselves."""
    with pytest.MonkeyPatch.context() as patch:
        if request.module.__name__.rpartition(".")[2] in PACED:
            patch.setenv("DEEPSEEK_FLASH_KERNELS", "torch")
        yield


def _shared(tiny: Path, kernels: str) -> Iterator[FlashEngine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DEEPSEEK_FLASH_KERNELS", kernels)
        engine = open_engine(tiny, max_model_len=512, max_batch_size=8, prefill_chunk_size=64)
    with engine:
        yield engine


@pytest.fixture(scope="session")
def fast_engine(tiny: Path) -> Iterator[FlashEngine]:
    """One engine shared by tests that leave it as it was."""
    yield from _shared(tiny, "auto")


@pytest.fixture(scope="session")
def slow_engine(tiny: Path) -> Iterator[FlashEngine]:
    """The same at torch's pace."""
    yield from _shared(tiny, "torch")


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> FlashEngine:
    """The shared engine for this module's tests."""
    paced = request.module.__name__.rpartition(".")[2] in PACED
    found: FlashEngine = request.getfixturevalue("slow_engine" if paced else "fast_engine")
    return found
