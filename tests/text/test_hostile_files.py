"""Damaged and hostile vocabularies end in a FormatError: never a crash, a hang or another exception."""

from __future__ import annotations

import contextlib
import json
import random

import numpy as np
import pytest

from deepseek_flash.errors import FormatError, ModelError, RequestError
from deepseek_flash.text.tokenizer import Tokenizer
from tests.support.tokenizers import bpe_metadata, byte_bpe, sentencepiece_metadata

KEY = "tokenizer.ggml."


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model", None, "no tokenizer.ggml.model"),
        ("model", 3, "must be a string"),
        ("tokens", None, "missing or empty"),
        ("tokens", [], "missing or empty"),
        ("tokens", "abc", "must be an array"),
        ("tokens", [1, 2], r"tokens\[0\] must be strings, not int"),
        ("tokens", ["a", "b", "a"], "tokens 0 and 2 are both spelled 'a'"),
        ("tokens", ["a\ud800"], "not valid Unicode"),
        ("token_type", [1, 1], "has 2 entries"),
        ("token_type", [9] * 279, "other than 0 to 6|entries"),
        ("merges", None, "merges is missing"),
        ("merges", ["a b", "abc"], r"merges\[1\] must be two tokens"),
        ("merges", ["zz yy"], "do not fit the vocabulary"),
        ("merges", [3], "must be strings"),
        ("pre", 7, "must be a string"),
        ("bos_token_id", -1, "is -1"),
        ("eos_token_id", 10**9, "is 1000000000"),
        ("eos_token_id", "2", "must be an integer"),
        ("bos_token_id", True, "must be an integer"),
        ("add_bos_token", 1, "must be a boolean"),
    ],
)
def test_wrong_metadata_is_named(key, value, message):
    meta = bpe_metadata()
    if value is None:
        del meta[KEY + key]
    else:
        meta[KEY + key] = value
    with pytest.raises(FormatError, match=message) as info:
        Tokenizer.from_gguf(meta, "some.gguf")
    assert "some.gguf" in str(info.value)
    assert info.value.file == "some.gguf"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("scores", None, "scores is missing"),
        ("scores", [0.0], "has 1 entries"),
        ("scores", "x", "must be an array"),
        ("add_space_prefix", "yes", "must be a boolean"),
    ],
)
def test_wrong_sentencepiece_metadata_is_named(key, value, message):
    meta = sentencepiece_metadata()
    if value is None:
        del meta[KEY + key]
    else:
        meta[KEY + key] = value
    with pytest.raises(FormatError, match=message):
        Tokenizer.from_gguf(meta, "f")


def test_more_sentencepiece_damage():
    scores = sentencepiece_metadata()
    scores[KEY + "scores"][260] = float("nan")
    with pytest.raises(FormatError, match=r"scores\[260\] is nan"):
        Tokenizer.from_gguf(scores, "f")
    byte = sentencepiece_metadata()
    byte[KEY + "tokens"][10] = "<0xQQ>"
    with pytest.raises(FormatError, match="marked as a byte"):
        Tokenizer.from_gguf(byte, "f")
    long = sentencepiece_metadata()
    long[KEY + "tokens"][260] = "a" * 100_000
    with pytest.raises(FormatError, match="at most 1,024"):
        Tokenizer.from_gguf(long, "f")


def test_arrays_may_be_numpy_arrays():
    meta = bpe_metadata()
    meta[KEY + "token_type"] = np.array(meta[KEY + "token_type"], dtype=np.int32)
    meta[KEY + "eos_token_id"] = np.uint32(2)
    assert Tokenizer.from_gguf(meta, "f").eos_ids == {2}


def test_empty_entries_are_unused_ids():
    meta = bpe_metadata()
    meta[KEY + "tokens"] += ["", ""]
    meta[KEY + "token_type"] += [5, 5]
    tokenizer = Tokenizer.from_gguf(meta, "f")
    assert tokenizer.vocab_size == len(meta[KEY + "tokens"])
    assert tokenizer.decode([tokenizer.vocab_size - 1]) == ""
    assert tokenizer.token_bytes(tokenizer.vocab_size - 1) is None


JUNK = [None, True, -1, 0, 3, 2**40, 1.5, float("inf"), "", "x", "Ġ Ġ", [], ["a"], [1], [None], {}, {"a": 1}, b"\xff"]


@pytest.mark.parametrize("seed", range(6))
def test_fuzz_metadata(seed):
    rng = random.Random(seed)
    for _ in range(25):
        meta = rng.choice([bpe_metadata, sentencepiece_metadata])()
        for _ in range(rng.randint(1, 4)):
            key = rng.choice([*meta, KEY + "chat_template", "tokenizer.chat_template", KEY + "add_eos_token"])
            value = meta.get(key)
            if isinstance(value, list) and value and rng.random() < 0.7:
                at = rng.randrange(len(value))
                change = rng.randrange(3)
                if change == 0:
                    value[at] = rng.choice(JUNK)
                elif change == 1:
                    del value[at:]
                else:
                    value.insert(at, value[rng.randrange(len(value))])
            else:
                meta[key] = rng.choice(JUNK)
        try:
            tokenizer = Tokenizer.from_gguf(meta, "fuzz.gguf")
        except ModelError:
            continue
        _use(tokenizer)


@pytest.mark.parametrize("seed", range(4))
def test_fuzz_tokenizer_json(tmp_path, seed):
    rng = random.Random(seed)
    folder = byte_bpe(tmp_path)
    file = folder / "tokenizer.json"
    good = file.read_text(encoding="utf-8")
    for _ in range(25):
        if rng.random() < 0.4:
            raw = bytearray(good.encode())
            for _ in range(rng.randint(1, 5)):
                raw[rng.randrange(len(raw))] = rng.randrange(256)
            file.write_bytes(bytes(raw[: rng.randint(1, len(raw))] if rng.random() < 0.3 else raw))
        else:
            data = json.loads(good)
            for _ in range(rng.randint(1, 3)):
                _mutate(data, rng)
            file.write_text(json.dumps(data), encoding="utf-8")
        try:
            tokenizer = Tokenizer.from_folder(folder)
        except ModelError:
            continue
        _use(tokenizer)


def _mutate(node, rng):
    """Change something at a random place of a JSON tree."""
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            return
        key = rng.choice(keys)
        if isinstance(node[key], (dict, list)) and node[key] and rng.random() < 0.8:
            node = node[key]
            continue
        node[key] = rng.choice([j for j in JUNK if not isinstance(j, bytes) and j != float("inf")])
        return


def _use(tokenizer: Tokenizer) -> None:
    """Whatever was accepted works, or refuses a request."""
    with contextlib.suppress(RequestError):
        ids = tokenizer.encode("the <|im_end|> user 12 é你")
        plain = tokenizer.encode("the <|im_end|> é", parse_special=False)
        stream = tokenizer.incremental()
        assert "".join([*map(stream.push, ids), stream.finish()]) == tokenizer.decode(ids)
        assert all(0 <= i < tokenizer.vocab_size for i in [*ids, *plain])
