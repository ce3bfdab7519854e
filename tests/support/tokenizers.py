"""Tiny tokenizers, made on the spot: no file of anyone's vocabulary is needed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from deepseek_flash.text.detokenize import byte_glyphs

CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>")
WORDS = ("the", "he", "ing", " the", " a", "user", "\n\n", "你", "好", "你好", "😀", "_end", "im", "é")


def _merges(words: Sequence[str]) -> list[tuple[str, str]]:
    """Merges that build these words byte by byte, left to right."""
    glyph = {byte: char for char, byte in byte_glyphs().items()}
    merges: dict[tuple[str, str], None] = {}
    for word in words:
        chars = [glyph[b] for b in word.encode()]
        have = chars[0]
        for c in chars[1:]:
            merges[(have, c)] = None
            have += c
    return list(merges)


def bpe_vocab(words: Sequence[str] = WORDS) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """All 256 bytes, then the pieces of ``words``."""
    merges = _merges(words)
    tokens = dict.fromkeys([*sorted(byte_glyphs()), *(a + b for a, b in merges)])
    return {t: i for i, t in enumerate(tokens)}, merges


def byte_bpe(
    path: Path,
    specials: Sequence[str | AddedToken] = CHATML,
    *,
    bos: str | None = None,
    eos: str | None = None,
    add_bos: bool = False,
    chat_template: str | None = None,
    words: Sequence[str] = WORDS,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """A folder with a byte-level tokenizer.json and a tokenizer_config.json. ``add_bos``: by the post-processor."""
    vocab, merges = bpe_vocab(words)
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    added = [s if isinstance(s, AddedToken) else AddedToken(s, special=True, normalized=False) for s in specials]
    tokenizer.add_tokens(added)
    if add_bos and bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return _write(path, tokenizer, bos, eos, chat_template, config)


def sentencepiece_bpe(path: Path, *, prefix: str = "normalizer", chat_template: str | None = None) -> Path:
    """A Llama-2-like tokenizer.json; the space before the first word by "normalizer" or "first" (Metaspace)."""
    meta = sentencepiece_metadata()
    tokens = meta["tokenizer.ggml.tokens"]
    vocab = {t: i for i, t in enumerate(tokens)}
    merges = [
        (t[:k], t[k:])
        for t in sorted(tokens[259:], key=lambda t: -meta["tokenizer.ggml.scores"][vocab[t]])
        for k in range(1, len(t))
        if t[:k] in vocab and t[k:] in vocab
    ]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if prefix == "normalizer":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_tokens([AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return _write(path, tokenizer, "<s>", "</s>", chat_template, None)


def _write(
    path: Path,
    tokenizer: Tokenizer,
    bos: str | None,
    eos: str | None,
    chat_template: str | None,
    config: Mapping[str, Any] | None,
) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    named = {"bos_token": bos, "eos_token": eos, "chat_template": chat_template}
    said = {k: v for k, v in named.items() if v is not None} | dict(config or {})
    (path / "tokenizer_config.json").write_text(json.dumps(said), encoding="utf-8")
    return path


def bpe_metadata(specials: Sequence[str] = CHATML, pre: str | None = "smollm", **more: Any) -> dict[str, Any]:
    """GGUF key-values of a byte-level vocabulary; control tokens come first. ``more``: without "tokenizer.ggml."."""
    vocab, merges = bpe_vocab()
    tokens = [*specials, *vocab]
    meta = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(specials) + [1] * len(vocab),
        "tokenizer.ggml.merges": [" ".join(m) for m in merges],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    if pre is not None:
        meta["tokenizer.ggml.pre"] = pre
    return meta | {"tokenizer.ggml." + k: v for k, v in more.items()}


def sentencepiece_metadata(**more: Any) -> dict[str, Any]:
    """GGUF key-values of a sentencepiece vocabulary in Llama 2's layout: three special tokens, 256 bytes, pieces."""
    pieces = ["▁t", "he", "▁the", "▁a", "in", "ing", "▁▁", "▁▁▁▁", "▁hello", "▁he", "ll", "llo", "▁w", "or", "你好"]
    chars = sorted({*"abcdefghijklmnopqrstuvwxyz<>/|_.,!0123456789▁你好é\n", *"HSUAR"})
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *pieces, *chars]
    types = [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)]
    scores = [0.0] * 259 + [-float(i) for i in range(len(tokens) - 259)]
    meta = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return meta | {"tokenizer.ggml." + k: v for k, v in more.items()}
