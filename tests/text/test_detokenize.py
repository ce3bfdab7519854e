"""Ids to text, one at a time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from deepseek_flash.errors import RequestError
from deepseek_flash.text.detokenize import DiffDetokenizer, byte_glyphs, byte_level_piece, sentencepiece_piece
from deepseek_flash.text.tokenizer import Tokenizer
from tests.support.tokenizers import CHATML, bpe_metadata, byte_bpe, sentencepiece_metadata

HARD = [
    "Grüße, 世界! 👩‍👩‍👧‍👦 family",
    "🇩🇪🏳️‍🌈 ok",
    "e\u0301 a\u0308 \u0e01\u0e33 नि",
    "你好你好，再见。",
    "tab\tnl\r\n\x00 nul",
    "\ufffd genuine \ufffd\ufffd replacement",
    " leading and trailing ",
    "   ",
    "",
]


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    return Tokenizer.from_gguf(bpe_metadata(), "tiny.gguf")


@pytest.fixture(scope="module")
def pieces() -> Tokenizer:
    return Tokenizer.from_gguf(sentencepiece_metadata(), "tiny.gguf")


def stream(tokenizer: Tokenizer, ids: list[int], **options) -> list[str]:
    detokenizer = tokenizer.incremental(**options)
    return [*(detokenizer.push(i) for i in ids), detokenizer.finish()]


def test_the_byte_alphabet_is_the_library_s():
    glyph_of = {b: c for c, b in byte_glyphs().items()}
    assert sorted(glyph_of) == list(range(256))
    for text in HARD:
        spelled = "".join(glyph_of[b] for b in text.encode())
        assert decoders.ByteLevel().decode([spelled]) == text
        assert byte_level_piece(spelled) == text.encode()


@pytest.mark.parametrize("text", HARD)
@pytest.mark.parametrize("kind", ["byte_level", "pieces"])
def test_S01_S02_streaming_equals_decoding(text, kind, request):
    """S01, S02: whole characters only, nothing lost, and it is the text that was encoded."""
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    ids = tokenizer.encode(text, add_special_tokens=False)
    out = stream(tokenizer, ids)
    assert len(out) == len(ids) + 1
    assert "".join(out) == tokenizer.decode(ids) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in out)


@settings(max_examples=300, deadline=None)
@given(st.data())
@pytest.mark.parametrize("kind", ["byte_level", "pieces"])
def test_S01_any_ids_stream_to_their_decode(kind, byte_level, pieces, data):
    """S01: joined pieces == decode(ids) for every id sequence, invalid bytes and specials included."""
    tokenizer = byte_level if kind == "byte_level" else pieces
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    skip = data.draw(st.booleans())
    out = stream(tokenizer, ids, skip_special_tokens=skip)
    assert "".join(out) == tokenizer.decode(ids, skip_special_tokens=skip)
    assert all(piece.encode() is not None for piece in out)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=24))
def test_invalid_bytes_become_what_python_makes_of_them(byte_level, raw):
    glyph_of = {b: c for c, b in byte_glyphs().items()}
    ids = [byte_level.token_id(glyph_of[b]) for b in raw]
    assert byte_level.decode(ids) == raw.decode("utf-8", "replace")
    assert "".join(stream(byte_level, ids)) == raw.decode("utf-8", "replace")


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=30))
def test_valid_text_decodes_as_the_library_does(byte_level, pieces, text):
    for tokenizer in (byte_level, pieces):
        ids = tokenizer.encode(text, add_special_tokens=False)
        want = tokenizer._full.decode(ids)
        assert tokenizer.decode(ids) == want


def test_S01_incomplete_bytes_are_held_only_while_they_can_complete(byte_level):
    glyph_of = {b: c for c, b in byte_glyphs().items()}
    one = byte_level.incremental()
    assert [one.push(byte_level.token_id(glyph_of[b])) for b in "😀".encode()] == ["", "", "", "😀"]
    two = byte_level.incremental()
    assert two.push(byte_level.token_id(glyph_of[0xF0])) == ""
    assert two.push(byte_level.token_id("A")) == "\ufffdA"
    three = byte_level.incremental()
    assert three.push(byte_level.token_id(glyph_of[0xE4])) == ""
    assert three.finish() == "\ufffd"


def test_S03_a_genuine_replacement_character_does_not_stop_the_stream(byte_level):
    ids = byte_level.encode("a\ufffdb", add_special_tokens=False)
    out = stream(byte_level, ids)
    assert "".join(out) == "a\ufffdb"
    assert out[-1] == ""
    assert out[-2] == "b"
    assert "".join(out[:-2]) == "a\ufffd"


def test_sentencepiece_drops_one_leading_space_of_the_whole(pieces):
    ids = pieces.encode("hello the", add_special_tokens=False)
    assert pieces.decode(ids) == "hello the"
    assert pieces.decode([1, *ids]) == "hello the"
    assert pieces.decode([1, *ids], skip_special_tokens=False) == "<s> hello the"
    assert pieces.token_bytes(ids[0]) == b" hello"
    assert stream(pieces, [1, *ids])[:2] == ["", "hello"]


def test_S03_other_decoders_stream_too(tmp_path):
    """S03 for a decoder that only the library knows (here: WordPiece)."""
    folder = byte_bpe(tmp_path / "t")
    tokenizer = Tokenizer.from_folder(folder)
    tokenizer._full.decoder = decoders.WordPiece(prefix="##")
    other = Tokenizer(
        tokenizer._full,
        markers=[],
        bos_id=None,
        eos_id=None,
        eos_ids=(),
        prefix=[],
        suffix=[],
        chat_template=None,
        size=tokenizer.vocab_size,
    )
    ids = [other.token_id(t) for t in ("the", "a", "!", "b")]
    assert "".join(stream(other, ids)) == other.decode(ids) == tokenizer._full.decode(ids)
    assert other.token_bytes(ids[0]) is None
    with pytest.raises(RequestError):
        other.decode([10**6])


def test_S03_where_only_the_whole_decodes_a_genuine_replacement_character_waits_for_what_follows():
    """S03: an unfinished character looks the same there, so up to three are held, and streaming goes on after them."""

    def out(text: str) -> list[str]:
        detokenizer = DiffDetokenizer(lambda ids: "".join(map(chr, ids)))
        return [*(detokenizer.push(ord(c)) for c in text), detokenizer.finish()]

    assert out("a\ufffdbc") == ["a", "", "\ufffdb", "c", ""]
    assert out("\ufffd" * 5 + "x") == ["", "", "", "\ufffd", "\ufffd", "\ufffd" * 3 + "x", ""]
    assert out("a\ufffd") == ["a", "", "\ufffd"]


def test_S01_where_only_the_whole_decodes_an_unfinished_character_is_held():
    raw = "é世😀!".encode()
    detokenizer = DiffDetokenizer(lambda ids: bytes(ids).decode("utf-8", "replace"))
    assert [detokenizer.push(b) for b in raw] == ["", "é", "", "", "世", "", "", "", "😀", "!"]
    assert detokenizer.finish() == ""


def test_special_tokens_are_left_out_unless_asked_for(byte_level):
    ids = [1, byte_level.token_id("a"), 2]
    assert byte_level.decode(ids) == "a"
    assert byte_level.decode(ids, skip_special_tokens=False) == f"{CHATML[1]}a{CHATML[2]}"
    assert byte_level.token_bytes(2) == CHATML[2].encode()


def test_ids_out_of_range_are_named(byte_level):
    limit = byte_level.vocab_size
    for bad in (limit, -1, 10**12):
        with pytest.raises(RequestError, match=f"{bad} is out of range.*0 to {limit - 1}"):
            byte_level.decode([bad])
        with pytest.raises(RequestError):
            byte_level.incremental().push(bad)
    with pytest.raises(RequestError, match="integers"):
        byte_level.decode(["a"])  # type: ignore[list-item]


def test_V02_no_marker_glyphs_in_text(byte_level):
    ids = byte_level.encode(" the user\n\nsaid é", add_special_tokens=False)
    assert byte_level.decode(ids) == " the user\n\nsaid é"


def test_byte_tokens_and_lookalikes():
    assert sentencepiece_piece("<0xE4>") == b"\xe4"
    assert sentencepiece_piece("<0xZZ>") == b"<0xZZ>"
    assert sentencepiece_piece("<0xE4>", byte_fallback=False) == b"<0xE4>"
    assert sentencepiece_piece("▁a▁b") == b" a b"
    assert byte_level_piece("<｜User｜>") == "<｜User｜>".encode()
