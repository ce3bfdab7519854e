"""Text to ids: from Hugging Face folders and from GGUF metadata."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from deepseek_flash.errors import FormatError, RequestError, UnsupportedModel
from deepseek_flash.text.markers import Marker, Markers, Segment
from deepseek_flash.text.pretokenize import FAMILIES
from deepseek_flash.text.tokenizer import Tokenizer
from tests.support.tokenizers import (
    CHATML,
    DEEPSEEK,
    bpe_metadata,
    byte_bpe,
    sentencepiece_bpe,
    sentencepiece_metadata,
)

BOS, EOS = DEEPSEEK[0], DEEPSEEK[1]
TEXTS = ["", "a", " hello  the\n\nuser", "你好, 123 über!", "x <|im_end|> y", "tab\t<s>", "👩‍👩‍👧"]


def witness(folder, **options) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **options)


def test_V01_tokenizer_json_is_the_truth_whatever_the_class_is_called(tmp_path):
    """V01: a misleading tokenizer_class must not lose the spaces."""
    folder = byte_bpe(tmp_path, config={"tokenizer_class": "LlamaTokenizer", "legacy": True})
    tokenizer = Tokenizer.from_folder(folder)
    hf = witness(folder)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == hf.encode(text)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_V03_a_prompt_that_begins_with_bos_does_not_get_another(tmp_path):
    tokenizer = Tokenizer.from_folder(byte_bpe(tmp_path, DEEPSEEK, bos=BOS, eos=EOS, add_bos=True))
    bos = tokenizer.bos_id
    assert tokenizer.adds_bos
    plain = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.encode("hello") == [bos, *plain]
    assert tokenizer.encode(BOS + "hello") == [bos, *plain]
    assert tokenizer.encode(BOS + BOS + "hello") == [bos, *plain]
    spelled = tokenizer.encode(BOS + "hello", parse_special=False)
    assert spelled[0] == bos
    assert spelled.count(bos) == 1
    assert tokenizer.decode(spelled) == BOS + "hello"


def test_V03_chat_has_exactly_one_bos(tmp_path):
    tokenizer = Tokenizer.from_folder(byte_bpe(tmp_path, DEEPSEEK, bos=BOS, eos=EOS, add_bos=True))
    text = Segment("hello", markup=False)
    bos = Segment(BOS, markup=True)
    want = [tokenizer.bos_id, *tokenizer.encode("hello", add_special_tokens=False)]
    assert tokenizer.encode_segments([text]) == want
    assert tokenizer.encode_segments([bos, text]) == want
    assert tokenizer.encode_segments([bos, bos, text]) == want


def test_V04_bos_can_be_left_out(tmp_path):
    tokenizer = Tokenizer.from_folder(byte_bpe(tmp_path, DEEPSEEK, bos=BOS, add_bos=True))
    assert tokenizer.bos_id not in tokenizer.encode("hello", add_special_tokens=False)


def test_add_bos_token_of_the_config_wins_over_the_post_processor(tmp_path):
    on = byte_bpe(tmp_path / "on", DEEPSEEK, bos=BOS, config={"add_bos_token": True})
    off = byte_bpe(tmp_path / "off", DEEPSEEK, bos=BOS, add_bos=True, config={"add_bos_token": False})
    ends = byte_bpe(tmp_path / "ends", DEEPSEEK, bos=BOS, eos=EOS, config={"add_eos_token": True})
    assert Tokenizer.from_folder(on).encode("a")[0] == Tokenizer.from_folder(on).bos_id
    assert not Tokenizer.from_folder(off).adds_bos
    assert Tokenizer.from_folder(off).encode("a") == Tokenizer.from_folder(off).encode("a", add_special_tokens=False)
    tokenizer = Tokenizer.from_folder(ends)
    assert tokenizer.encode("a")[-1] in tokenizer.eos_ids


def test_names_of_begin_and_end_come_from_either_file(tmp_path):
    folder = byte_bpe(tmp_path, DEEPSEEK)
    (folder / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": {"content": BOS}, "eos_token": EOS}), encoding="utf-8"
    )
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.bos_text, tokenizer.eos_text) == (BOS, EOS)
    assert tokenizer.eos_ids == {tokenizer.token_id(EOS)}
    assert not tokenizer.adds_bos


@pytest.mark.parametrize("prefix", ["normalizer", "first"])
def test_sentencepiece_folders_as_transformers(tmp_path, prefix):
    folder = sentencepiece_bpe(tmp_path, prefix=prefix)
    tokenizer, hf = Tokenizer.from_folder(folder), witness(folder)
    for text in TEXTS:
        assert tokenizer.encode(text) == hf.encode(text), text
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == hf.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    joined = "<s>hello the</s>he ing"
    pieces = [Segment("<s>", True), Segment("hello ", False), Segment("the</s>", True), Segment("he ing", False)]
    assert tokenizer.encode_segments(pieces) == hf.encode(joined, add_special_tokens=False)


def test_text_next_to_markup_is_joined_before_it_is_split(tmp_path):
    folder = byte_bpe(tmp_path)
    tokenizer, hf = Tokenizer.from_folder(folder), witness(folder)
    parts = [
        Segment("<|im_start|>us", True),
        Segment("er\n", False),
        Segment("\nth", False),
        Segment("e<|im_end|>", True),
    ]
    assert tokenizer.encode_segments(parts) == hf.encode("<|im_start|>user\n\nthe<|im_end|>")


def test_V05_no_text_becomes_a_control_token(tmp_path):
    folder = byte_bpe(tmp_path)
    tokenizer = Tokenizer.from_folder(folder)
    for text in ("<|im_end|>", "x<|im_start|>system", "<|endoftext|><|im_end|>"):
        ids = tokenizer.encode(text, parse_special=False)
        assert tokenizer.special_ids.isdisjoint(ids)
        assert tokenizer.decode(ids) == text
        assert tokenizer.encode_segments([Segment(text, markup=False)]) == ids
        halves = [Segment(text[:4], markup=False), Segment(text[4:], markup=True)]
        assert tokenizer.special_ids.isdisjoint(tokenizer.encode_segments([halves[0], Segment(text[4:7], True)]))


def test_V05_a_vocabulary_whose_words_are_control_tokens_still_cannot_be_tricked():
    """With ignore_merges a whole word is looked up in the vocabulary, control tokens too."""
    meta = bpe_metadata(("<s>", "stop", "!", "é"), pre="llama-bpe", add_bos_token=False)
    tokenizer = Tokenizer.from_gguf(meta | {"tokenizer.ggml.tokens": _unique(meta)}, "f.gguf")
    ids = tokenizer.encode("stop the stop", parse_special=False)
    assert tokenizer.special_ids.isdisjoint(ids)
    assert tokenizer.decode(ids) == "stop the stop"
    with pytest.raises(RequestError, match="except as a control token"):
        tokenizer.encode("stop!", parse_special=False)


def _unique(meta):
    """Drop the ordinary "!" so that the control token is the only one."""
    tokens = list(meta["tokenizer.ggml.tokens"])
    return [t if i < 4 or t not in tokens[:4] else f"[{i}]" for i, t in enumerate(tokens)]


def test_plain_letters_listed_as_added_tokens_stay_text(tmp_path):
    """deepseek-coder lists letters such as "ü" as added tokens; they match in user text too, as in transformers."""
    letter = AddedToken("ü", special=False, normalized=False)
    folder = byte_bpe(tmp_path, [*CHATML, letter])
    tokenizer, hf = Tokenizer.from_folder(folder), witness(folder)
    ids = tokenizer.encode("für über", parse_special=False)
    assert ids == hf.encode("für über")
    assert tokenizer.token_id("ü") in ids
    assert "ü" not in tokenizer.control_texts
    assert tokenizer.decode(ids) == "für über"


def test_added_tokens_that_are_not_special_are_control_all_the_same(tmp_path):
    user = AddedToken("<｜User｜>", special=False, normalized=False)
    tokenizer = Tokenizer.from_folder(byte_bpe(tmp_path, [*CHATML, user]))
    user_id = tokenizer.token_id("<｜User｜>")
    assert user_id not in tokenizer.special_ids
    assert user_id in tokenizer.encode("<｜User｜>")
    assert user_id not in tokenizer.encode("<｜User｜>", parse_special=False)
    assert tokenizer.decode([user_id]) == "<｜User｜>"


def test_markers_that_swallow_white_space_do_so_as_in_transformers(tmp_path):
    folder = byte_bpe(
        tmp_path,
        [
            AddedToken("<a>", rstrip=True, special=True, normalized=False),
            AddedToken("<b>", lstrip=True, special=True, normalized=False),
            AddedToken("<c>", single_word=True, special=True, normalized=False),
            AddedToken("<n>", special=True, normalized=True),
        ],
    )
    tokenizer, hf = Tokenizer.from_folder(folder), witness(folder)
    for text in ("x<a>  y", "x  <b>y", "x<c>y", "x <c> y", "<n><a>\n<b>", "<a> "):
        assert tokenizer.encode_segments([Segment(text, markup=True)]) == hf.encode(text), text


def test_the_longest_of_overlapping_markers_wins():
    markers = Markers([Marker("<a", 0), Marker("<a>", 1), Marker("<a>b", 2), Marker("\n", 3)])
    assert [p if isinstance(p, str) else p.id for p in markers.split("x<a>bc<a> <a\n<")] == [
        "x",
        2,
        "c",
        1,
        " ",
        0,
        3,
        "<",
    ]


def test_text_that_is_no_unicode_is_refused(tmp_path):
    tokenizer = Tokenizer.from_folder(byte_bpe(tmp_path))
    for options in ({}, {"parse_special": False}):
        with pytest.raises(RequestError, match=r"lone surrogate \(U\+D800\) at position 2"):
            tokenizer.encode("ab\ud800", **options)
    with pytest.raises(RequestError, match="surrogate"):
        tokenizer.encode_segments([Segment("\udfff", markup=False)])
    with pytest.raises(RequestError, match="must be a string"):
        tokenizer.encode(b"bytes")  # type: ignore[arg-type]


def test_T01_many_threads_get_the_sequential_answer(tmp_path):
    tokenizer = Tokenizer.from_folder(byte_bpe(tmp_path))
    texts = [f"the user {i} said 你好 <|im_end|> {'é' * i}" for i in range(40)]
    want = [(tokenizer.encode(t), tokenizer.encode(t, parse_special=False)) for t in texts]
    fresh = Tokenizer.from_folder(tmp_path)
    wrong: list[int] = []

    def work() -> None:
        for i, text in enumerate(texts):
            ids, plain = fresh.encode(text), fresh.encode(text, parse_special=False)
            if (ids, plain) != want[i] or fresh.decode(plain) != text:
                wrong.append(i)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []


def test_chat_template_is_found_where_transformers_finds_it(tmp_path):
    folder = byte_bpe(tmp_path, chat_template="config")
    assert Tokenizer.from_folder(folder).chat_template == "config"
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert Tokenizer.from_folder(folder).chat_template == "json"
    (folder / "chat_template.jinja").write_text("jinja")
    assert Tokenizer.from_folder(folder).chat_template == "jinja"
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    other = byte_bpe(tmp_path / "b", config={"chat_template": named})
    assert Tokenizer.from_folder(other).chat_template == "D"
    none = Tokenizer.from_folder(byte_bpe(tmp_path / "c"))
    assert none.chat_template is None
    assert none.template() is None


def test_missing_and_damaged_files_are_format_errors(tmp_path):
    with pytest.raises(FormatError, match=r"no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(FormatError, match=r"tokenizer\.model but no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    folder = byte_bpe(tmp_path / "t")
    good = (folder / "tokenizer.json").read_text(encoding="utf-8")
    for broken in ("", "{", good[: len(good) // 2], "[]", "null", '{"model": {"type": "BPE"}}'):
        (folder / "tokenizer.json").write_text(broken, encoding="utf-8")
        with pytest.raises(FormatError, match="not a usable tokenizer"):
            Tokenizer.from_folder(folder)
    (folder / "tokenizer.json").write_bytes(b"\xff\xfe")
    with pytest.raises(FormatError, match="not UTF-8"):
        Tokenizer.from_folder(folder)
    (folder / "tokenizer.json").write_text(good, encoding="utf-8")
    for broken in ("{", "[]", '{"bos_token": 3}', '{"add_bos_token": "yes"}', '{"chat_template": 1}', "[" * 100000):
        (folder / "tokenizer_config.json").write_text(broken, encoding="utf-8")
        with pytest.raises(FormatError, match="tokenizer_config"):
            Tokenizer.from_folder(folder)


def test_padding_and_truncation_settings_of_the_file_are_not_applied(tmp_path):
    folder = byte_bpe(tmp_path)
    data = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    data["truncation"] = {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    (folder / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    assert Tokenizer.from_folder(folder).decode(Tokenizer.from_folder(folder).encode("a long text")) == "a long text"


def test_gguf_equals_the_folder_it_would_be_made_from(tmp_path):
    """The same vocabulary, once as tokenizer.json (the library's own reading) and once as GGUF metadata."""
    tokenizer = Tokenizer.from_gguf(bpe_metadata(pre="gpt-2"), "f.gguf")
    folder = byte_bpe(tmp_path, [])
    hf = witness(folder)
    for text in TEXTS:
        ids = tokenizer.encode(text, parse_special=False)
        assert [i - len(CHATML) for i in ids] == hf.encode(text)
    assert tokenizer.vocab_size == len(bpe_metadata()["tokenizer.ggml.tokens"])
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.adds_bos) == (1, {2}, False)


@pytest.mark.parametrize("text", [*TEXTS, " two  spaces", "hello", "ab<0x41>c", "\n", "ü🙂"])
def test_gguf_sentencepiece_equals_transformers_with_the_same_pieces(tmp_path, text):
    tokenizer = Tokenizer.from_gguf(sentencepiece_metadata(), "f.gguf")
    hf = witness(sentencepiece_bpe(tmp_path))
    assert tokenizer.encode(text) == hf.encode(text)
    assert tokenizer.decode(tokenizer.encode(text, parse_special=False)) == text


def test_gguf_merges_follow_from_scores_as_transformers_derives_them():
    from transformers.tokenization_utils_sentencepiece import generate_merges

    from deepseek_flash.text.gguf_vocab import _merges_from_scores, _Metadata

    meta = sentencepiece_metadata()
    tokens = meta["tokenizer.ggml.tokens"]
    vocab = {t: i for i, t in enumerate(tokens)}
    ours = _merges_from_scores(_Metadata(meta, "f"), tokens, vocab, meta["tokenizer.ggml.token_type"])
    theirs = generate_merges(vocab, dict(zip(tokens, meta["tokenizer.ggml.scores"], strict=True)))
    special = {t for t, k in zip(tokens, meta["tokenizer.ggml.token_type"], strict=True) if k != 1}
    assert ours == [tuple(m) for m in theirs if special.isdisjoint((m[0], m[1], m[0] + m[1]))]


def test_gguf_sentencepiece_text_cannot_spell_a_control_token():
    tokenizer = Tokenizer.from_gguf(sentencepiece_metadata(add_space_prefix=False), "f.gguf")
    ids = tokenizer.encode("</s><s>", parse_special=False, add_special_tokens=False)
    assert tokenizer.special_ids.isdisjoint(ids)
    assert tokenizer.decode(ids) == "</s><s>"
    assert tokenizer.adds_bos
    assert tokenizer.decode(tokenizer.encode(" a")) == " a"


def test_gguf_eos_ids_are_those_the_file_names():
    meta = bpe_metadata(eot_token_id=0)
    assert Tokenizer.from_gguf(meta, "f").eos_ids == {0, 2}
    untyped = bpe_metadata()
    untyped["tokenizer.ggml.token_type"] = [1] * len(untyped["tokenizer.ggml.tokens"])
    tokenizer = Tokenizer.from_gguf(untyped, "f")
    assert {1, 2} <= tokenizer.special_ids, "named begin and end tokens are control tokens whatever their type"


@pytest.mark.parametrize("pre", sorted(FAMILIES))
def test_V06_every_family_reads_any_text(pre):
    tokenizer = Tokenizer.from_gguf(bpe_metadata(pre=pre), "f.gguf")
    for text in [*TEXTS, "It's 12345 o'clock\r\n  ok  ", "ΑΒΓ Жук Ωmega ｆｕｌｌ！。", "a  \n", "!!x?? $5.00"]:
        ids = tokenizer.encode(text, parse_special=False, add_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_V06_families_split_as_their_own_files_do():
    split = {name: FAMILIES[name].build() for name in ("deepseek-llm", "deepseek-coder", "deepseek-v3", "qwen2")}

    def words(name, text):
        return ["".join(w) for w, _ in split[name].pre_tokenize_str(text)]

    assert words("deepseek-llm", "Hi there 123\nok") == ["Hi", "Ġthere", "Ġ", "1", "2", "3", "Ċ", "ok"]
    assert words("deepseek-llm", "x=1+2; ok  ") == ["x", "=", "1", "+", "2", ";", "Ġok", "ĠĠ"]
    assert words("deepseek-coder", "def f(x):") == ["def", "Ġf", "(", "x", "):"]
    assert words("deepseek-v3", "2024 it's .foo") == ["202", "4", "Ġit", "'s", "Ġ.", "foo"]
    assert words("qwen2", "2024 it's") == ["2", "0", "2", "4", "Ġit", "'s"]
    assert words("deepseek-v3", "a你好b") == ["a", "ä½łå¥½", "b"]


def test_V06_an_unknown_family_is_derived_or_refused_by_name(caplog):
    with pytest.raises(UnsupportedModel, match=r"'qwen3'.*did you mean 'qwen2'.*supported: .*smollm"):
        Tokenizer.from_gguf(bpe_metadata(pre="qwen3"), "f.gguf")
    specials = ["<｜begin▁of▁sentence｜>", "<b>", "<c>"]
    tokenizer = Tokenizer.from_gguf(bpe_metadata(specials, pre="deepseek-v9"), "f.gguf")
    assert "deepseek-v3" in caplog.text
    assert tokenizer.encode("a")
    assert Tokenizer.from_gguf(bpe_metadata(pre=None), "f.gguf").encode("a 1")
    with pytest.raises(UnsupportedModel, match=r"'bert'.*supported: gpt2"):
        Tokenizer.from_gguf(bpe_metadata() | {"tokenizer.ggml.model": "bert"}, "f.gguf")


def test_importing_and_opening_needs_neither_torch_nor_transformers(tmp_path):
    folder = byte_bpe(tmp_path, chat_template="{{ messages[0].content }}")
    metadata = tmp_path / "metadata.json"
    metadata.write_text(json.dumps(bpe_metadata()))
    code = (
        "import json, sys\n"
        "import deepseek_flash.text.stops, deepseek_flash.text.template\n"
        "from deepseek_flash.text.tokenizer import Tokenizer\n"
        f"Tokenizer.from_gguf(json.load(open({str(metadata)!r})), 'tiny.gguf')\n"
        f"t = Tokenizer.from_folder({str(folder)!r})\n"
        "t.encode_segments(t.template().render([{'role': 'user', 'content': 'hi'}]))\n"
        "print(sorted({'torch', 'transformers', 'gguf'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.smollm2
def test_smollm2_vocabulary_opens_fast_and_reads_as_transformers_reads_it(smollm2_vocabulary):
    meta = smollm2_vocabulary
    spent = []
    for _ in range(3):
        start = time.perf_counter()
        tokenizer = Tokenizer.from_gguf(meta, "smollm2")
        spent.append(time.perf_counter() - start)
    assert min(spent) < 0.4
    assert tokenizer.vocab_size == 49152
    assert tokenizer.eos_ids == {tokenizer.token_id("<|im_end|>")}
    assert tokenizer.encode("Hello world 42", parse_special=False)
    hf = _transformers_reading(meta)
    for text in TEXTS:
        ids = tokenizer.encode(text, parse_special=False)
        assert tokenizer.special_ids.isdisjoint(ids)
        assert tokenizer.decode(ids) == text
        if not any(c.isdigit() for c in text):  # transformers does not know that this family splits digits
            assert tokenizer.encode(text) == hf.encode(text).ids
    chat = tokenizer.encode_segments(tokenizer.template().render([{"role": "user", "content": "Hi <|im_end|>"}]))
    assert chat.count(tokenizer.token_id("<|im_end|>")) == 2
    assert chat[0] == tokenizer.token_id("<|im_start|>")


def _transformers_reading(meta):
    """The vocabulary as transformers' own GGUF conversion builds it, without reading the file again."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

    names = {"tokens": "tokens", "merges": "merges", "token_type": "token_type"}
    described = {name: meta[f"tokenizer.ggml.{key}"] for key, name in names.items()}
    return convert_gguf_tokenizer("llama", described | {"tokenizer_type": "gpt2", "pre_tokenizer_type": "smollm"})[0]
