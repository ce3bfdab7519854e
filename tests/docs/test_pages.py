"""The pages say what the code does: refused options, links, the list of pains."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from deepseek_flash.config import LATER, EngineConfig
from deepseek_flash.engine import LATER_ARGUMENTS

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def rows(page: str, columns: int) -> list[list[str]]:
    """Cells of every table row of a page that has so many columns, heads and rules left out."""
    found = []
    for line in (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines():
        cells = [c.strip() for c in line.strip().strip("|").split(" | ")] if line.startswith("|") else []
        if len(cells) == columns and not set(line) <= set("|- "):
            found.append(cells)
    return found[1:]


def test_limits_lists_every_refused_option_and_argument():
    told = {cells[0].strip("`"): cells[1] for cells in rows("limits.md", 2)}
    assert told == LATER
    text = (ROOT / "docs" / "limits.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in text for name in LATER_ARGUMENTS)
    assert not [name for name in EngineConfig.model_fields if name in told]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    anchors = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
    missing = [a for a in anchors if "://" not in a and not (page.parent / a).exists()]
    assert not missing


def test_the_index_names_every_page():
    linked = set(re.findall(r"\]\((\w+\.md)\)", (ROOT / "docs" / "index.md").read_text(encoding="utf-8")))
    assert linked == {p.name for p in (ROOT / "docs").glob("*.md")} - {"index.md"}


def test_the_module_table_names_every_module():
    told = {cells[0].strip("`") for cells in rows("architecture.md", 2)}
    package = ROOT / "deepseek_flash"
    modules = {p.stem for p in package.glob("*.py")} | {p.parent.name for p in package.glob("*/__init__.py")}
    assert told == (modules - {"__init__"}) | {"integrations"}


def test_every_pain_has_a_test_or_a_sentence():
    pains = rows("pains.md", 4)
    assert len(pains) == len({cells[0] for cells in pains}) == 90
    tests = {p: p.read_text(encoding="utf-8") for p in (ROOT / "tests").rglob("test_*.py") if p != Path(__file__)}
    wrong = []
    for identity, area, _, shown in pains:
        assert area in {
            "streaming",
            "sampling",
            "tokenizer",
            "loading",
            "lifecycle",
            "concurrency",
            "notebook",
            "quantization",
            "memory",
            "kv-tier",
        }
        folders = re.findall(r"`(tests/[\w.]+)`", shown)
        for folder in folders:
            texts = [text for path, text in tests.items() if (ROOT / folder) in (path, *path.parents)]
            if not any(re.search(rf"(?<![A-Za-z0-9]){identity}(?![0-9])", text) for text in texts):
                wrong.append(f"{identity}: nothing in {folder} carries it")
        if not folders and len(shown.split()) < 6:
            wrong.append(f"{identity}: neither a test nor a sentence")
    assert not wrong
