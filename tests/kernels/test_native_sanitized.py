"""The kernels under AddressSanitizer and UndefinedBehaviorSanitizer, on shapes that are multiples of nothing."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from deepseek_flash.kernels.cpu import build

FLAGS = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")
CASES = 60


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")
def test_random_cases_touch_nothing_that_is_not_theirs(tmp_path: Path) -> None:
    """All instruction sets of this processor, one and three threads, the same bits everywhere."""
    program = build.build(tmp_path, flags=FLAGS, program=Path(__file__).parent / "native" / "check.cpp")
    done = subprocess.run([program, "1", str(CASES)], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.startswith(f"{CASES} cases on")
