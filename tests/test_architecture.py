"""The house rules as code: who may import whom, what stays torch-free, sizes, names, no outside paths."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "deepseek_flash"
SOURCES = sorted(PACKAGE.rglob("*.py"))
INTEGRATIONS = sorted((ROOT / "integrations").rglob("*.py"))

LAYERS = [
    {"errors", "types", "config", "metrics"},
    {"memory", "kernels"},
    {"quant", "kv.spec", "kv.blocks", "kv.prefix", "kv.pins", "kv.restore", "kv.manager", "text"},
    {
        "loading",
        "kv.store",
        "sampling",
        *(f"kv.{n}" for n in ("records", "files", "disk_index", "folder", "disk", "tiers")),
    },
    {"layers"},
    {"models", "scheduler"},
    {"runtime"},
    {"retrieval"},
    {"engine"},
    {"tools"},
]
"""A module imports only from lower layers, or from its own room."""

WITHOUT_TORCH = ("errors", "types", "config", "metrics", "memory", "text", "scheduler", "tools", "kv.spec")
WITHOUT_TORCH += ("kv.blocks", "kv.prefix", "kv.pins", "kv.restore", "kv.manager")
WITHOUT_TORCH += ("kv.records", "kv.files", "kv.disk_index", "kv.folder", "kv.disk", "kv.tiers")
DYNAMIC_CODE = {"eval", "exec", "compile", "__import__"}
UNSAFE_READERS = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def module_name(path: Path) -> str:
    """``kv.store`` for deepseek_flash/kv/store.py; ``""`` for the package itself."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room(module: str) -> str:
    """The key of LAYERS a module belongs to."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "kv" and len(parts) > 1 else parts[0]


def layer(module: str) -> int:
    found = [i for i, rooms in enumerate(LAYERS) if room(module) in rooms]
    assert found, f"{module} has no place in LAYERS"
    return found[0]


def type_checking_blocks(node: ast.AST) -> set[ast.AST]:
    """Everything under ``if TYPE_CHECKING:``: never runs."""
    blocks = (n for n in ast.walk(node) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n.test))
    return {inner for block in blocks for statement in block.body for inner in ast.walk(statement)}


def imports(path: Path, *, everywhere: bool = True) -> Iterator[str]:
    """Absolute names of what a file imports; without ``everywhere`` only what runs at import time."""
    package = ["deepseek_flash", *module_name(path).split(".")] if PACKAGE in path.parents else []
    if path.name != "__init__.py":
        package = package[:-1]
    top = tree(path)
    skipped = type_checking_blocks(top)
    functions = (n for n in ast.walk(top) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)))
    if not everywhere:
        skipped |= {inner for f in functions for inner in ast.walk(f)}
    for node in ast.walk(top):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1], *([node.module] if node.module else [])]
            origin = ".".join(base) if node.level else str(node.module)
            yield origin
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def own_modules(names: Iterator[str]) -> set[str]:
    known = {module_name(p) for p in SOURCES} - {""}
    inner = {n.removeprefix("deepseek_flash.") for n in names if n.startswith("deepseek_flash.")}
    return inner & known


def calls(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every call."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call):
            yield node.lineno, ast.unparse(node.func)


@pytest.mark.parametrize("path", [p for p in SOURCES if module_name(p)], ids=module_name)
def test_imports_point_downwards(path):
    me = module_name(path)
    if me == "kv":
        assert not own_modules(imports(path))
        return
    for other in own_modules(imports(path)):
        if other == "kv":
            continue
        same = room(other).split(".")[0] == room(me).split(".")[0]
        allowed = layer(other) <= layer(me) if same else layer(other) < layer(me) or layer(me) == layer(other) == 0
        assert allowed, f"{me} (layer {layer(me)}) imports {other} (layer {layer(other)})"


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_rooms_without_torch(name):
    paths = [p for p in SOURCES if module_name(p) == name or module_name(p).startswith(f"{name}.")]
    assert paths, name
    for path in paths:
        heavy = {n.split(".")[0] for n in imports(path, everywhere=name != "tools")} & {"torch", "transformers"}
        assert not heavy, f"{module_name(path)} imports {heavy}"


def modules_after(statement: str) -> set[str]:
    code = f"import sys, json; {statement}; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return {name.split(".")[0] for name in json.loads(done.stdout.splitlines()[-1])}


def test_importing_the_package_and_asking_for_help_is_light():
    loaded = modules_after("import deepseek_flash")
    assert not loaded & {"torch", "pydantic", "numpy", "tokenizers", "jinja2", "rich", "triton"}
    loaded = modules_after("from deepseek_flash.tools.cli import parser; parser().format_help()")
    assert not loaded & {"torch", "pydantic", "numpy", "rich"}


def test_N08_importing_everything_patches_nothing_global():
    """N08: no event-loop patching, signal handlers, start methods or torch defaults on import."""
    modules = ", ".join(f"deepseek_flash.{module_name(p)}" for p in SOURCES if module_name(p))
    code = (
        "import asyncio, json, signal, multiprocessing, torch\n"
        "def state():\n"
        "    handlers = [str(signal.getsignal(s)) for s in sorted(signal.valid_signals())]\n"
        "    loop = [str(asyncio.run), str(type(asyncio.get_event_loop_policy())), str(asyncio.new_event_loop)]\n"
        "    torches = [str(torch.get_default_dtype()), torch.get_num_threads(), torch.is_grad_enabled()]\n"
        "    return json.dumps([handlers, loop, torches, multiprocessing.get_start_method(allow_none=True)])\n"
        f"before = state()\nimport {modules}\nassert state() == before, (before, state())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=90)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", [*SOURCES, *INTEGRATIONS], ids=lambda p: str(p.relative_to(ROOT)))
def test_habits(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 600, "more than 600 lines"
    name = module_name(path) if path in SOURCES else "integrations"
    found = []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Global):
            found.append(f"line {node.lineno}: global")
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno - node.lineno >= 100:
            found.append(f"line {node.lineno}: {node.name} has more than 100 lines")
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv", "os.putenv"):
            # build reads CXX: pip runs it on its own, before the package can be imported
            found += [] if name in ("config", "kernels.cpu.build") else [f"line {node.lineno}: environment"]
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            found.append(f"line {node.lineno}: bare except")
    for line, called in calls(path):
        if called == "print" and not name.startswith("tools"):
            found.append(f"line {line}: print")
        # models' .eval() and re.compile are other things
        if called in DYNAMIC_CODE or called in ("torch.load", "numpy.load", "np.load", "builtins.eval"):
            found.append(f"line {line}: {called}")
    found += [f"imports {n}" for n in imports(path) if n.split(".")[0] in UNSAFE_READERS]
    if name != "config":
        found += [f"imports {n}" for n in imports(path) if n in ("os.environ", "os.getenv")]
    assert not found


def test_integrations_use_public_names_only():
    import deepseek_flash

    public = {f"deepseek_flash.{name}" for name in deepseek_flash.__all__} | {"deepseek_flash"}
    assert INTEGRATIONS
    for path in INTEGRATIONS:
        used = {n for n in imports(path) if n.split(".")[0] == "deepseek_flash"}
        inside = {n for n in used if n.startswith("deepseek_flash.integrations")}
        assert used - inside <= public, path


def test_nothing_imports_the_bare_name_integrations():
    """It would work from the repository root by accident and make a second copy of every class."""
    for path in sorted(ROOT.rglob("*.py")):
        if not set(path.relative_to(ROOT).parts) & {".venv", "build"}:
            assert not [n for n in imports(path) if n.split(".")[0] == "integrations"], path


@pytest.mark.parametrize("path", [p for p in SOURCES if "__all__" in p.read_text()], ids=module_name)
def test_all_is_sorted_and_resolves(path):
    module = import_module(f"deepseek_flash.{module_name(path)}".rstrip("."))
    # Constants, then classes, then functions, each by name: ruff's order (RUF022).
    rank = {name: (not name.isupper(), name[0].islower(), name) for name in module.__all__}
    assert module.__all__ == sorted(rank, key=rank.__getitem__)
    for name in module.__all__:
        assert getattr(module, name) is not None
    if module.__name__ == "deepseek_flash":
        assert set(module.__all__) <= set(dir(module))


def test_environment_names_are_documented_and_read_in_one_place():
    from deepseek_flash.config import ENVIRONMENT

    told = set(re.findall(r"`(DEEPSEEK_FLASH_[A-Z_]+)`", (ROOT / "docs" / "cli.md").read_text()))
    assert told == set(ENVIRONMENT)
    for path in SOURCES:
        names = set(re.findall(r"DEEPSEEK_FLASH_[A-Z_]+", path.read_text()))
        assert names <= set(ENVIRONMENT), path


def test_pyproject_lists_every_package():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {".".join(p.parent.relative_to(ROOT).parts) for p in SOURCES}
    folders |= {f"deepseek_flash.{'.'.join(p.parent.relative_to(ROOT).parts)}" for p in INTEGRATIONS}
    assert sorted(folders) == listed


def tracked_text() -> Iterator[tuple[Path, str]]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("not a git checkout: the list of tracked files is unknown")
    for name in done.stdout.split("\0"):
        path = ROOT / name
        if name and path.is_file() and path.suffix not in (".safetensors", ".gguf", ".png"):
            yield path, path.read_text(encoding="utf-8")


def test_no_path_points_outside_the_repository():
    # Assembled, so that this file does not match itself.
    outside = re.compile(
        "|".join(["\\.\\./" + "shared", "/ho" + "me/\\w", "/ro" + "ot/", "/wo" + "rk/", "/Us" + "ers/\\w"])
    )
    found = [f"{path.relative_to(ROOT)}: {m.group()}" for path, text in tracked_text() for m in outside.finditer(text)]
    assert not found


def test_the_top_level_holds_what_it_should():
    names = {path.relative_to(ROOT).parts[0] for path, _ in tracked_text()}
    expected = {"pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "constraints.txt", "deepseek_flash"}
    expected |= {"integrations", "notebooks", "examples", "tests", "docs"}
    assert {n for n in names if not n.startswith(".")} <= expected
