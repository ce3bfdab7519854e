"""What ends an answer and what text it has, on scripted tokens."""

from __future__ import annotations

from typing import Any

import pytest

from deepseek_flash.runtime.emit import Answer, Rules


class Letters:
    """A detokenizer whose token ids are code points; 0 begins a two-token character."""

    def __init__(self) -> None:
        self.held = False

    def push(self, token_id: int) -> str:
        if token_id == 0:
            self.held = True
            return ""
        piece, self.held = ("é" if self.held else chr(token_id)), False
        return piece

    def finish(self) -> str:
        piece, self.held = ("\ufffd" if self.held else ""), False
        return piece


def run(tokens: str | list[int], **rules: Any) -> tuple[Answer, list[str]]:
    given = {
        "max_new_tokens": 100,
        "min_new_tokens": 0,
        "end_ids": frozenset({1}),
        "stops": (),
        "include_stop": False,
        "logprobs": False,
    }
    answer = Answer.begin(0, Rules(**{**given, **rules}), Letters())
    pieces = []
    for token in [ord(c) for c in tokens] if isinstance(tokens, str) else tokens:
        pieces.append(answer.push(token, None).text)
        if answer.finish_reason:
            break
    return answer, pieces


def told(answer: Answer) -> tuple[str, Any, Any]:
    choice = answer.choice()
    return choice.text, choice.finish_reason, choice.stop_reason


def test_end_of_text_flushes_what_is_held() -> None:
    """P02, S03: text held for a possible stop, and an unfinished character, come out at the end."""
    answer, pieces = run([*map(ord, "ab<"), 0, 1], stops=("<stop>",))
    assert told(answer) == ("ab<\ufffd", "stop", 1)
    assert pieces == ["a", "b", "", "", "<\ufffd"]


def test_a_stop_across_tokens_never_leaks() -> None:
    answer, pieces = run("ab<stop>cd", stops=("<stop>",))
    assert told(answer) == ("ab", "stop", "<stop>")
    assert "".join(pieces) == "ab"
    assert told(run("ab<stop>cd", stops=("<stop>",), include_stop=True)[0]) == ("ab<stop>", "stop", "<stop>")


def test_a_stop_settled_by_the_end_counts() -> None:
    """P04: 'abcdef' can no longer come, so 'cd' has matched."""
    answer, _ = run("abcd", stops=("abcdef", "cd"), max_new_tokens=4)
    assert told(answer) == ("ab", "stop", "cd")


def test_stops_wait_for_min_new_tokens() -> None:
    assert told(run("xxyx", stops=("x",), min_new_tokens=2)[0]) == ("xxy", "stop", "x")
    assert told(run("xxyx", stops=("x",))[0]) == ("", "stop", "x")


@pytest.mark.parametrize("include", [True, False])
def test_a_stop_id_with_text(include: bool) -> None:
    answer, _ = run("abz", end_ids=frozenset({ord("z")}), include_stop=include)
    assert told(answer) == ("abz" if include else "ab", "stop", ord("z"))


def test_length_and_cancel() -> None:
    assert told(run("abcdef", max_new_tokens=3)[0]) == ("abc", "length", None)
    answer, _ = run("ab", stops=("bc",))
    assert answer.end("cancelled").text == "b"
    assert told(answer) == ("ab", "cancelled", None)


def test_a_stop_string_inside_the_text_of_a_stop_token() -> None:
    """P04: where the text was cut is what is told."""
    answer, _ = run("abz", end_ids=frozenset({ord("z")}), include_stop=True, stops=("z",))
    assert told(answer) == ("abz", "stop", "z")
