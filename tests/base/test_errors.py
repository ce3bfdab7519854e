from __future__ import annotations

import builtins
import copy
import inspect
import pickle
import re

import pytest

from deepseek_flash import errors
from deepseek_flash.types import Completion

ALL = [c for c in vars(errors).values() if inspect.isclass(c) and issubclass(c, errors.FlashError)]

MADE = [
    errors.ConfigError("top_q=1: unknown", field="top_q", value=1, allowed="top_p"),
    errors.ModelNotFound(
        "no such file",
    ),
    errors.UnsupportedModel("mamba is not supported", architecture="mamba", supported=["llama", "qwen2"]),
    errors.CheckpointError("model.safetensors", missing=["a"], unexpected=["b"], mismatched=["c: (1,) is not (2,)"]),
    errors.FormatError("tensor x ends after the file", file="a.gguf", tensor="x", offset=77),
    errors.MemoryBudgetError("does not fit", needed=10, available=5, holders={"weights": 3}, largest_context=64),
    errors.RequestError("temperature=-1", parameter="temperature", value=-1),
    errors.ContextLengthError("prompt of 9 tokens", tokens=9, limit=8),
    errors.ChatTemplateError("no template", parameter="messages"),
    errors.EngineForked("opened in another process"),
    errors.DeadlineExceeded("2 s"),
]


def test_the_drawing_at_the_top_is_the_tree():
    lines = [
        (m.start(1), m.group(1), m.group(2))
        for line in (errors.__doc__ or "").splitlines()
        if (m := re.match(r"^[ │├└─]*?(\w+)(?:\((\w+)\))?(?:\s{2,}|$)", line)) and hasattr(errors, m.group(1))
    ]
    assert sorted(name for _, name, _ in lines) == sorted(c.__name__ for c in ALL)
    path: list[tuple[int, type]] = []
    for indent, name, builtin in lines:
        cls = getattr(errors, name)
        while path and path[-1][0] >= indent:
            path.pop()
        assert cls.__bases__[0] is (path[-1][1] if path else Exception)
        assert [b.__name__ for b in cls.__bases__[1:]] == ([builtin] if builtin else [])
        path.append((indent, cls))


@pytest.mark.parametrize(
    ("cls", "builtin"),
    [
        ("ConfigError", "ValueError"),
        ("RequestError", "ValueError"),
        ("ContextLengthError", "ValueError"),
        ("ModelNotFound", "FileNotFoundError"),
        ("MemoryBudgetError", "MemoryError"),
        ("DeadlineExceeded", "TimeoutError"),
        ("StreamTimeoutError", "TimeoutError"),
        ("EngineForked", "RuntimeError"),
    ],
)
def test_python_users_can_catch_the_builtin(cls, builtin):
    assert issubclass(getattr(errors, cls), getattr(builtins, builtin))


@pytest.mark.parametrize("error", MADE, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("trip", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy, copy.deepcopy])
def test_X05_errors_cross_process_and_thread_borders_whole(error, trip):
    """X05: an error raised in a worker reaches the consumer, through a process pool too, with all it carries."""
    error.partial = Completion(text="so far")
    error.add_note("while decoding")
    back = trip(error)
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert vars(back) == vars(error)
    assert back.args == error.args


def test_checkpoint_error_shows_ten_names_and_counts_the_rest():
    e = errors.CheckpointError("model", missing=[f"t{i}" for i in range(13)])
    assert "t9" in str(e)
    assert "t10" not in str(e)
    assert "(+3 more)" in str(e)
    assert len(e.missing) == 13


def test_near_miss():
    assert errors.near_miss("temprature", ["temperature", "top_p"]) == "; did you mean 'temperature'?"
    assert errors.near_miss("zzz", ["temperature"]) == ""


def test_every_error_is_public():
    import deepseek_flash

    assert {c.__name__ for c in ALL} <= set(deepseek_flash.__all__)
