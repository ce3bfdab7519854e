"""A tokenizer.json made to crash, swamp or confuse: a FormatError, since the library ends the process out of memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepseek_flash.errors import FormatError, ModelError
from deepseek_flash.text import tokenizer_files
from deepseek_flash.text.tokenizer import Tokenizer
from tests.support.tokenizers import byte_bpe, sentencepiece_bpe, sentencepiece_metadata


@pytest.fixture
def changed(tmp_path: Path) -> Callable[..., Path]:
    """A byte-level folder with parts of its tokenizer.json replaced (``model__x``: inside the model)."""

    def change(**parts: Any) -> Path:
        folder = byte_bpe(tmp_path / "t")
        spec = json.loads((folder / "tokenizer.json").read_text())
        for key, value in parts.items():
            if key.startswith("model__"):
                spec["model"][key.removeprefix("model__")] = value
            else:
                spec[key] = value
        (folder / "tokenizer.json").write_text(json.dumps(spec))
        return folder

    return change


def replace(content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": "e"}, "content": content}


def added(content: str, token_id: int = 400) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": content, "special": True, **flags}


def framed(ids: list[int], times: int) -> dict[str, Any]:
    pieces = [{"SpecialToken": {"id": "X", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}] * times
    token = {"id": "X", "ids": ids, "tokens": ["X"] * len(ids)}
    return {"type": "TemplateProcessing", "single": pieces, "pair": [], "special_tokens": {"X": token}}


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
GROWING = {
    "three replacements": ("normalizer", {"type": "Sequence", "normalizers": [replace("e" * 1000)] * 3}),
    "prepending": ("normalizer", {"type": "Prepend", "prepend": "▁" * 1000}),
    "doubling bytes": ("pre_tokenizer", {"type": "Sequence", "pretokenizers": [BYTES] * 40}),
    "a large frame": ("post_processor", framed([5] * 100_000, 1)),
    "many frames": ("post_processor", framed([5], 1000)),
    "decoding": ("decoder", {"type": "Sequence", "decoders": [replace("e" * 1000), replace("e" * 1000)]}),
}


@pytest.mark.parametrize("name", GROWING)
def test_parts_that_blow_texts_up_are_refused(name: str, changed: Callable[..., Path]) -> None:
    part, value = GROWING[name]
    with pytest.raises(FormatError, match=f"the {part} makes texts up to .* times longer"):
        Tokenizer.from_folder(changed(**{part: value}))


def test_the_growth_of_real_vocabularies_is_allowed(tmp_path: Path) -> None:
    for prefix in ("normalizer", "first"):
        assert Tokenizer.from_folder(sentencepiece_bpe(tmp_path / prefix, prefix=prefix)).encode("hello")


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"model": {"type": "WordLevel", "vocab": {"x": 0}, "unk_token": "?"}}, "cannot encode a text: .*Missing"),
        ({"model": {"type": "Unigram", "vocab": [["x", 0.0]], "unk_id": None}}, "cannot encode a text: .*unknown"),
        ({"post_processor": framed([5000], 1)}, "adds the id 5000; the vocabulary ends at"),
        ({"added_tokens": [added("<" * 257)]}, "has 257 characters"),
        ({"added_tokens": [added(f"<{i:0200}>", 400 + i) for i in range(5300)]}, "5,300 added tokens have 1,070,600"),
    ],
    ids=["wordlevel", "unigram", "frame", "long token", "many tokens"],
)
def test_what_cannot_work_is_refused_when_opened(
    parts: dict[str, Any], words: str, changed: Callable[..., Path]
) -> None:
    with pytest.raises(FormatError, match=words):
        Tokenizer.from_folder(changed(**parts))


def test_a_library_that_fails_on_a_text_is_a_typed_error(changed: Callable[..., Path]) -> None:
    """It knows one letter, and has no token for others."""
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "?"}
    tokenizer = Tokenizer.from_folder(changed(model=model, pre_tokenizer=None, added_tokens=[]))
    assert tokenizer.encode("a") == [0]
    for special in (True, False):
        with pytest.raises(FormatError, match="cannot encode a text"):
            tokenizer.encode("b", parse_special=special)


def test_dropout_is_off(changed: Callable[..., Path]) -> None:
    """Merges left out by chance are for training; a prompt has one encoding."""
    sound = Tokenizer.from_folder(changed()).encode("the user the user")
    random = Tokenizer.from_folder(changed(model__dropout=0.9))
    assert all(random.encode("the user the user", parse_special=p) == sound for p in (True, False) for _ in range(20))


def test_a_file_that_cannot_be_read_is_a_model_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = byte_bpe(tmp_path / "t")

    def broken(*_: object, **__: object) -> str:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "read_text", broken)
    with pytest.raises(ModelError, match=r"cannot read .*tokenizer_config.json: Input/output error"):
        Tokenizer.from_folder(folder)


def test_a_tokenizer_json_is_bounded_in_bytes(tmp_path: Path) -> None:
    folder = byte_bpe(tmp_path / "t")
    with (folder / "tokenizer.json").open("r+b") as f:
        f.truncate(tokenizer_files.MAX_BYTES + 1)
    with pytest.raises(FormatError, match="at most 67,108,864 are read"):
        Tokenizer.from_folder(folder)


def test_sentencepiece_splits_are_bounded() -> None:
    """A hundred kilobytes of tokens, each a run of one letter, have merges of hundreds of megabytes."""
    meta = sentencepiece_metadata()
    runs = [c * n for c in "Zz" for n in range(2, 600)]
    meta["tokenizer.ggml.tokens"] += runs
    meta["tokenizer.ggml.scores"] += [-1.0] * len(runs)
    meta["tokenizer.ggml.token_type"] += [1] * len(runs)
    with pytest.raises(FormatError, match=r"the splits of all tokens have .* at most 67,108,864 are tried"):
        Tokenizer.from_gguf(meta, "f")
