"""Examples, README and quickstart blocks, and the notebook run from top to bottom with a tiny model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.M | re.S)


def run(arguments: list[str], cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        encoding="utf-8",
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_examples(path, tiny, tmp_path):
    # Another working directory: an example must not lean on the checkout around it.
    out = run([str(path), str(tiny)], tmp_path)
    expected = {
        "many_callers": ["list ", "threads ", "asyncio "],
        "langchain_chain": ["invoke:", "stream:", "batch:"],
        "quickstart": ["generate:", "stream:", "from the cache", "kv_cache"],
        "score": ["The capital of France is Paris."],
    }[path.stem]
    assert all(part in out for part in expected)


def test_every_example_names_its_model_the_same_way():
    assert [p.stem for p in EXAMPLES] == ["langchain_chain", "many_callers", "quickstart", "score"]
    for path in EXAMPLES:
        # A script's folder comes first on its path: `concurrent.py` would stand in for the standard library's.
        assert path.stem not in sys.stdlib_module_names
        assert 'sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"' in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md", "docs/langchain.md"])
def test_python_blocks(page, tiny, tmp_path):
    """All blocks of a page, in order, as one program: what a reader would paste into one session."""
    code = "\n".join(blocks(page, "python")).replace('"smollm2-135m"', repr(str(tiny)))
    assert str(tiny) in code
    script = tmp_path / "page.py"
    script.write_text(code, encoding="utf-8")
    assert run([str(script)], tmp_path).strip()


def test_the_readme_has_its_two_commands():
    first, second = blocks("README.md", "bash")
    assert all(len(command.strip().splitlines()) == 1 for command in (first, second))
    assert "deepseek-flash pull smollm2-135m" in first
    assert first.strip().endswith("deepseek-flash demo smollm2-135m")
    assert second.strip().endswith("-m pytest -m 'not slow'")
    assert "https://download.pytorch.org/whl/cpu" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_N06_N07_the_notebook_runs_from_top_to_bottom(tiny, monkeypatch):
    """N06, N07 (and N01, N02, N05): repeated sync calls, streams and awaits in cells of a kernel whose event loop
    already runs and whose stdout is no file."""
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("MODEL", str(tiny))
    book = nbformat.read(ROOT / "notebooks" / "quickstart.ipynb", as_version=4)
    nbformat.validate(book)
    assert all(not cell.get("outputs") for cell in book.cells), "stored outputs go stale"
    NotebookClient(book, timeout=60, kernel_name="python3").execute()
    outputs = [o for cell in book.cells for o in cell.get("outputs", [])]
    assert not [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"]
    assert any("kv_cache" in o.get("text", "") for o in outputs)
    assert "closed" in outputs[-1]["text"]
