"""Engines for the LangChain tests: a scripted one for behaviour, a tiny real one for the contract."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import deepseek_flash
from tests.support.fake_engine import FakeEngine


@pytest.fixture
def fake() -> Iterator[FakeEngine]:
    engine = FakeEngine()
    yield engine
    engine.settle()


@pytest.fixture
def opens(monkeypatch: pytest.MonkeyPatch) -> type[FakeEngine]:
    """Wrappers with ``model=`` open this class; ``opens.made`` lists what they opened."""

    class Opened(FakeEngine):
        made: list[FakeEngine] = []  # noqa: RUF012  (a new class for every test)

        def __init__(self, model: str, **options: Any) -> None:
            super().__init__(model, **options)
            self.made.append(self)

    monkeypatch.setitem(vars(deepseek_flash), "FlashEngine", Opened)
    return Opened


@pytest.fixture(scope="session")
def tiny_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from tests.support.checkpoints import tiny_llama
    from tests.support.engines import open_engine

    folder: Path = tmp_path_factory.mktemp("tiny-llama")
    tiny_llama(folder)
    with open_engine(folder, max_model_len=256, max_batch_size=8) as engine:
        yield engine


@pytest.fixture(params=["fake", "real"])
def engine(request: pytest.FixtureRequest) -> Any:
    """What must hold for the scripted engine and for a real one alike."""
    return request.getfixturevalue("fake" if request.param == "fake" else "tiny_engine")
