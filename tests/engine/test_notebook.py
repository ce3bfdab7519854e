"""Notebooks: replaced stdout, a running event loop, IPython."""

from __future__ import annotations

import asyncio
import io
import multiprocessing
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import psutil
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
    """N02, N07: sync calls work where a loop already runs, and the loop is the user's, untouched. N02, N03: the
    engine is one thread of this process, never another process."""
    loop, process = asyncio.get_running_loop(), psutil.Process()
    before = process.children(recursive=True)
    with FlashEngine(tiny, max_model_len=64) as engine:
        assert process.children(recursive=True) == before
        many = engine.generate(["a", "b"], max_new_tokens=3, ignore_eos=True)
        assert [len(m.token_ids) for m in many] == [3, 3]
        assert len((await engine.agenerate("c", max_new_tokens=3, ignore_eos=True)).token_ids) == 3
        assert process.children(recursive=True) == before
    assert asyncio.get_running_loop() is loop
    assert multiprocessing.active_children() == []


def test_N07_sync_calls_need_no_event_loop(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """N07: none is made, none is looked for."""

    def refuse(*args: Any, **options: Any) -> Any:
        pytest.fail("a sync call wants an event loop")

    for name in ("new_event_loop", "get_event_loop", "get_running_loop", "set_event_loop", "run", "create_task"):
        monkeypatch.setattr(asyncio, name, refuse)
    with FlashEngine(tiny, max_model_len=128) as engine:
        options: dict[str, Any] = {"max_new_tokens": 3, "ignore_eos": True}
        assert [len(c.token_ids) for c in engine.generate(["a", "b"], **options)] == [3, 3]
        assert len(engine.chat([{"role": "user", "content": "x"}], **options).token_ids) == 3
        assert len(list(engine.stream("x", **options))) == 3
        assert engine.submit("x", **options).result(timeout=30).finish_reason == "length"
        assert len(engine.score("x y").logprobs) == len(engine.tokenize("x y"))


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
