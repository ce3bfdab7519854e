"""Stop strings: one definition, whatever the chunks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepseek_flash.errors import RequestError
from deepseek_flash.text.stops import StopChecker


def run(chunks: list[str], stops, include: bool = False) -> tuple[str, str | None, list[str]]:
    checker = StopChecker(stops, include)
    out = [checker.push(c) for c in chunks]
    out.append(checker.finish())
    return "".join(out), checker.matched, out


def defined(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The definition in the module, by looking at the whole text."""
    found = [(text.find(s), len(s), s) for s in stops if s in text]
    if not found:
        return text, None
    start, length, stop = min(found)
    return text[: start + (length if include else 0)], stop


few = st.text(alphabet="ab\n你", min_size=1, max_size=5)


@settings(max_examples=300, deadline=None)
@given(
    st.text(alphabet="ab\n你", max_size=40),
    st.lists(few, min_size=1, max_size=4),
    st.booleans(),
    st.lists(st.integers(1, 6), min_size=1, max_size=8),
)
def test_P03_P04_the_cut_never_depends_on_the_chunks(text, stops, include, sizes):
    """P03, P04, P01: streamed pieces joined are the definition's cut; each character comes once."""
    chunks, at, i = [], 0, 0
    while at < len(text):
        chunks.append(text[at : at + sizes[i % len(sizes)]])
        at += sizes[i % len(sizes)]
        i += 1
    want = defined(text, stops, include)
    assert run(chunks, stops, include)[:2] == want
    assert run([text], stops, include)[:2] == want
    assert run(list(text), stops, include)[:2] == want


def test_P01_no_piece_of_a_stop_leaks():
    checker = StopChecker(["Observation:"])
    given_back = [checker.push(c) for c in ["I think. Obs", "ervat", "ion: 42"]]
    assert given_back == ["I think. ", "", ""]
    assert checker.matched == "Observation:"
    assert checker.push("more") == ""
    assert checker.finish() == ""


def test_P02_text_that_can_be_no_stop_comes_at_once():
    checker = StopChecker(["\n\nHuman:", "</answer>"])
    assert checker.push("Plain words") == "Plain words"
    assert checker.push(" <b>") == " <b>"
    assert checker.push("a\n") == "a"
    assert checker.push("b") == "\nb"
    assert checker.push("</ans") == ""
    assert checker.push("wering") == "</answering"
    assert checker.finish() == ""


def test_P02_only_what_can_still_match_is_held_after_a_failed_start():
    checker = StopChecker(["aaab"])
    assert checker.push("aaaa") == "a"
    assert checker.push("a") == "a"
    assert checker.push("b") == ""
    assert checker.matched == "aaab"


def test_P05_stops_match_text_however_it_was_tokenised():
    for chunks in (["STOP"], ["S", "TOP"], ["ST", "OP"], list("STOP")):
        assert run(["x", *chunks, "y"], ["STOP"])[:2] == ("x", "STOP")


def test_G10_one_letter_stop_and_empty_stop():
    assert run(["abc", "d"], ["c"])[:2] == ("ab", "c")
    with pytest.raises(RequestError, match="at least one character"):
        StopChecker([""])
    with pytest.raises(RequestError):
        StopChecker([3])  # type: ignore[list-item]


def test_G11_a_plain_string_is_one_stop():
    assert run(["go END now"], "END")[:2] == ("go ", "END")


def test_G12_the_match_is_named_and_can_be_kept():
    assert run(["one two three"], ["three", "two"], True)[:2] == ("one two", "two")
    assert run(["one two three"], ["three", "two"])[:2] == ("one ", "two")


def test_a_stop_inside_the_start_of_a_longer_one_waits_for_it():
    assert run(["abcd", "ef", "g"], ["abcdef", "cd"])[:2] == ("", "abcdef")
    assert run(["abcd", "x"], ["abcdef", "cd"])[:2] == ("ab", "cd")
    assert run(["abcd"], ["abcdef", "cd"])[:2] == ("ab", "cd")


def test_no_stops_pass_everything():
    assert run(["a", "", "b"], [])[:2] == ("ab", None)


def test_cost_grows_with_the_text_only():
    """A stop of thousands of characters that almost matches again and again must not be compared each time."""
    checker = StopChecker(["a" * 5000 + "b"])
    text = "a" * 20000
    out = "".join(checker.push(text[i : i + 4]) for i in range(0, len(text), 4)) + checker.finish()
    assert out == text
    assert sum(map(len, checker._held)) == 0
