"""Notebooks: replaced stdout, a running event loop, IPython."""

from __future__ import annotations

import asyncio
import io
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from deepseek_flash import FlashEngine


def test_replaced_stdout_without_fileno(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """N01: no OS-level stdout is needed, and nothing is printed."""
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    with FlashEngine(tiny, max_model_len=64) as engine:
        engine.generate("x", max_new_tokens=3)
    assert (out.getvalue(), err.getvalue()) == ("", "")


def test_stdout_is_none(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """N01: as under pythonw."""
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    with FlashEngine(tiny, max_model_len=64) as engine:
        assert engine.generate("x", max_new_tokens=3, ignore_eos=True).usage.completion_tokens == 3


async def test_open_and_call_inside_a_running_loop(tiny: Path) -> None:
    """N02, N07: sync calls work where a loop already runs, and the loop is the user's, untouched."""
    loop = asyncio.get_running_loop()
    with FlashEngine(tiny, max_model_len=64) as engine:
        many = engine.generate(["a", "b"], max_new_tokens=3, ignore_eos=True)
        assert [len(m.token_ids) for m in many] == [3, 3]
        assert len((await engine.agenerate("c", max_new_tokens=3, ignore_eos=True)).token_ids) == 3
    assert asyncio.get_running_loop() is loop


def test_cells_in_a_real_kernel(tiny: Path) -> None:
    """N02, N05, N07, N08: sync and async cells, results kept in Out[], close, and a second engine."""
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    cells = [
        f"from deepseek_flash import FlashEngine\nengine = FlashEngine({str(tiny)!r}, max_model_len=128)",
        "engine.generate('x', temperature=0.0, max_new_tokens=4, ignore_eos=True).token_ids",
        "(await engine.agenerate('x', temperature=0.0, max_new_tokens=4, ignore_eos=True)).token_ids",
        "import asyncio\n[d async for d in engine.stream('x', max_new_tokens=4, ignore_eos=True)][-1].finish_reason",
        "engine.close()\ntry:\n    engine.generate('x')\nexcept Exception as e:\n    print(type(e).__name__)",
        f"with FlashEngine({str(tiny)!r}, max_model_len=128) as second:\n    print(len(second.tokenize('hello')) > 0)",
    ]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    nbclient.NotebookClient(book, timeout=60, kernel_name="python3").execute()
    outputs = [
        "".join(o.get("text", "") or o.get("data", {}).get("text/plain", "") for o in c.outputs) for c in book.cells
    ]
    assert outputs[1] == outputs[2] != ""
    assert outputs[3] == "'length'"
    assert outputs[4].strip() == "EngineClosed"
    assert outputs[5].strip() == "True"


def test_logging_is_quiet_by_default(tiny: Path) -> None:
    """N01: silence is the logger's matter: nothing on stdout or stderr of a plain script."""
    code = """
        import sys
        from deepseek_flash import FlashEngine
        with FlashEngine(sys.argv[1], max_model_len=64) as e:
            e.chat([{"role": "user", "content": "x"}], max_new_tokens=3)
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code), str(tiny)],
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
