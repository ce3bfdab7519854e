from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def smollm2_vocabulary(smollm2: Path) -> dict[str, Any]:
    """The tokenizer's key-values of the real model."""
    from deepseek_flash.loading.source import open_source

    with open_source(smollm2) as source:
        return {k: v for k, v in source.metadata.items() if k.startswith("tokenizer.")}
