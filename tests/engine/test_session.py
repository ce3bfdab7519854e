"""engine.session: a conversation that is kept, in the cache and in a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deepseek_flash.engine import FlashEngine
from deepseek_flash.errors import FormatError, RequestError
from deepseek_flash.types import Message

SYSTEM = "you answer in one short sentence, and you never repeat the question"


def test_each_turn_computes_only_what_is_new(engine: FlashEngine) -> None:
    """Five turns: all whole blocks of the turn before are found in the cache."""
    block = engine.describe()["cache"]["block_size"]
    with engine.session(SYSTEM, temperature=0, max_new_tokens=5) as session:
        before, cached = 0, []
        for i in range(5):
            done = session.send(f"question {i}: what is on the hill")
            usage = done.usage
            if before:
                assert usage.prompt_tokens - usage.cached_tokens <= usage.prompt_tokens - before + block
                cached.append(usage.cached_tokens)
            before = usage.prompt_tokens
        assert cached == sorted(set(cached))
        assert [m.role for m in session.messages] == ["system", *["user", "assistant"] * 5]
        assert session.messages[-1] == Message("assistant", done.text)
        assert session.tokens >= before


def test_a_turn_is_what_chat_would_answer(engine: FlashEngine) -> None:
    session = engine.session(temperature=0, max_new_tokens=4)
    assert session.tokens == 0
    first = session.send("one")
    pieces = "".join(d.text for d in session.stream("two", max_new_tokens=6))
    talk = [{"role": "user", "content": "one"}, {"role": "assistant", "content": first.text}]
    want = engine.chat([*talk, {"role": "user", "content": "two"}], temperature=0, max_new_tokens=6)
    assert pieces == want.text == session.messages[-1].content


def test_what_fails_or_is_left_is_not_kept(engine: FlashEngine) -> None:
    session = engine.session(temperature=0, max_new_tokens=8)
    for bad in (5, None, "x " * 2000):
        with pytest.raises(RequestError):
            session.send(bad)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="unknown"):
        session.send("a", temperatur=1)
    left = session.stream("a")
    next(left)
    left.close()  # type: ignore[attr-defined]
    assert session.messages == []
    late = session.stream("a")
    session.send("b")
    with pytest.raises(RequestError, match="meanwhile"):
        list(late)
    assert len(session.messages) == 2
    session.close()
    with pytest.raises(RequestError, match="closed"):
        session.send("c")
    with pytest.raises(RequestError):
        engine.session(5)  # type: ignore[arg-type]
    with pytest.raises(RequestError):
        engine.session(temperatur=1)


def test_saved_and_loaded(engine: FlashEngine, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    session = engine.session(SYSTEM, temperature=0, max_new_tokens=5, stop=["zz"])
    session.send("first ü\u2028")
    session.save(path)
    session.save(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert [p.name for p in tmp_path.iterdir()] == ["talk.json"]
    again = engine.load_session(path)
    assert again.messages == session.messages
    assert again.send("second").token_ids == session.send("second").token_ids


GOOD: dict[str, Any] = {"format": "deepseek-flash-session", "version": 1, "params": {}, "messages": []}


@pytest.mark.parametrize(
    "data",
    [
        "",
        "[]",
        "{",
        "\x80\x04",
        json.dumps({**GOOD, "version": 2}),
        json.dumps({**GOOD, "format": "x"}),
        json.dumps({**GOOD, "more": 1}),
        json.dumps({**GOOD, "params": {"temperature": -1}}),
        json.dumps({**GOOD, "params": {"temperatur": 1}}),
        json.dumps({**GOOD, "messages": [{"role": "user"}]}),
        json.dumps({**GOOD, "messages": [{"role": "root", "content": "x"}]}),
        json.dumps({**GOOD, "messages": [{"role": "user", "content": 5}]}),
        json.dumps(GOOD)[:-1],
    ],
)
def test_files_that_are_no_sessions(data: str, engine: FlashEngine, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(data)
    with pytest.raises(FormatError, match=r"bad\.json"):
        engine.load_session(path)


def test_a_missing_file(engine: FlashEngine, tmp_path: Path) -> None:
    path = tmp_path / "none.json"
    with pytest.raises(FormatError, match="cannot be read"):
        engine.load_session(path)
    path.write_text(json.dumps(GOOD))
    assert engine.load_session(path).messages == []


def test_a_failed_save_leaves_the_old_file(
    engine: FlashEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "talk.json"
    engine.session(SYSTEM).save(path)
    old = path.read_bytes()

    def fail(*args: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="no space"):
        engine.session("other").save(path)
    assert path.read_bytes() == old
    assert len(list(tmp_path.iterdir())) == 1
