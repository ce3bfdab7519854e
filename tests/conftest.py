"""Shared fixtures. Tests that need the real model skip, with the reason, until it has been pulled."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The SmolLM2-135M-Instruct GGUF: DEEPSEEK_FLASH_TEST_SMOLLM2, or what `deepseek-flash pull` unpacked."""
    given = os.environ.get("DEEPSEEK_FLASH_TEST_SMOLLM2")
    if given:
        return Path(given)
    from deepseek_flash.loading.catalogue import pulled

    path = pulled("smollm2-135m")
    if path is None:
        pytest.skip("smollm2-135m is not pulled: run `deepseek-flash pull smollm2-135m`")
    return path
