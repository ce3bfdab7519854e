"""The vocabulary in a GGUF file's metadata, checked, as parts of a tokenizer.

Two kinds: ``gpt2`` (byte-level BPE: tokens and merges) and ``llama`` (sentencepiece BPE: tokens and scores, from
which the merges follow: of all neighbouring pieces that join to a known piece, the best-scored join comes first).
Metadata is untrusted: wrong types, lengths that disagree, duplicates and ids out of range are a FormatError.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokenizers import decoders, models, normalizers, pre_tokenizers

from deepseek_flash.errors import FormatError, UnsupportedModel
from deepseek_flash.text.markers import Marker
from deepseek_flash.text.pretokenize import family_of

_LOG = logging.getLogger("deepseek_flash.text")

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
MAX_TOKENS = 1 << 22
MAX_PIECE = 1024
"""Characters of a sentencepiece token; its possible splits are tried one by one."""
MAX_SPLITTING = 1 << 26
"""Characters that are looked at, and kept at most, for all splits of all sentencepiece tokens; real vocabularies need
up to 20 million."""
SPACE = "\u2581"

_KEY = "tokenizer.ggml."
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")


@dataclass(frozen=True, slots=True)
class VocabParts:
    """What a Tokenizer is made of."""

    model: models.Model
    normalizer: normalizers.Normalizer | None
    pre_tokenizer: pre_tokenizers.PreTokenizer | None
    decoder: decoders.Decoder
    markers: tuple[Marker, ...]
    tokens: Sequence[str]
    bos_id: int | None
    eos_ids: frozenset[int]
    eos_id: int | None
    adds_bos: bool
    adds_eos: bool
    chat_template: str | None
    written: int = 0
    """Ids below this can occur in text: without the unused entries that pad a table's end."""


class _Metadata:
    """Typed access to the tokenizer's key-values."""

    def __init__(self, values: Mapping[str, Any], file: str) -> None:
        self._values, self.file = values, file

    def bad(self, message: str) -> FormatError:
        return FormatError(f"{self.file}: {message}", file=self.file)

    def get(self, key: str, kind: type, name: str, *, prefix: str = _KEY) -> Any:
        value = self._values.get(prefix + key)
        if value is None:
            return None
        if hasattr(value, "item") and not isinstance(value, (str, bytes, list, tuple)):
            value = value.item()  # a numpy scalar
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.bad(f"{prefix}{key} must be {name}, not {type(value).__name__}")
        return value

    def array(self, key: str, kind: type | tuple[type, ...], name: str, length: int | None = None) -> list[Any] | None:
        value = self._values.get(_KEY + key)
        if value is None:
            return None
        if hasattr(value, "tolist"):
            value = value.tolist()
        if not isinstance(value, (list, tuple)):
            raise self.bad(f"{_KEY}{key} must be an array of {name}, not {type(value).__name__}")
        wrong = next((i for i, v in enumerate(value) if not isinstance(v, kind)), None)
        if wrong is not None:
            raise self.bad(f"{_KEY}{key}[{wrong}] must be {name}, not {type(value[wrong]).__name__}")
        if length is not None and len(value) != length:
            raise self.bad(f"{_KEY}{key} has {len(value):,} entries for {length:,} tokens")
        return list(value)

    def token_id(self, key: str, count: int) -> int | None:
        value: int | None = self.get(key, int, "an integer")
        if value is not None and not 0 <= value < count:
            raise self.bad(f"{_KEY}{key} is {value}, but the vocabulary has ids 0 to {count - 1}")
        return value


def read_vocab(metadata: Mapping[str, Any], file: str) -> VocabParts:
    """Check the metadata and build the parts. FormatError if it is damaged, UnsupportedModel if it is another kind."""
    meta = _Metadata(metadata, file)
    kind = meta.get("model", str, "a string")
    if kind is None:
        raise meta.bad("no tokenizer.ggml.model: the file carries no vocabulary")
    if kind not in ("gpt2", "llama"):
        raise UnsupportedModel(
            f"{file}: vocabulary of kind {kind!r} (tokenizer.ggml.model); supported: gpt2 (byte-level BPE), "
            "llama (sentencepiece BPE)",
            architecture=kind,
            supported=("gpt2", "llama"),
        )
    tokens, vocab = _tokens(meta)
    types = meta.array("token_type", int, "integers", len(tokens))
    if types is None:
        types = [NORMAL] * len(tokens)
    elif not set(types) <= set(range(7)):
        raise meta.bad(f"{_KEY}token_type holds values other than 0 to 6")
    build = _byte_level if kind == "gpt2" else _sentencepiece
    written = len(types)
    while written and types[written - 1] == UNUSED:
        written -= 1
    return replace(build(meta, tokens, vocab, types), written=written)


def _tokens(meta: _Metadata) -> tuple[list[str], dict[str, int]]:
    tokens = meta.array("tokens", str, "strings")
    if not tokens:
        raise meta.bad(f"{_KEY}tokens is missing or empty")
    if len(tokens) > MAX_TOKENS:
        raise meta.bad(f"{_KEY}tokens has {len(tokens):,} entries; at most {MAX_TOKENS:,} are read")
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        seen: dict[str, int] = {}
        for i, token in enumerate(tokens):
            if token and token in seen:
                raise meta.bad(f"tokens {seen[token]} and {i} are both spelled {token[:80]!r}")
            seen[token] = i
    vocab.pop("", None)  # empty entries are unused ids
    try:
        "".join(tokens).encode("utf-8")
    except UnicodeEncodeError:
        raise meta.bad(f"{_KEY}tokens holds text that is not valid Unicode") from None
    return tokens, vocab


def _byte_level(meta: _Metadata, tokens: list[str], vocab: dict[str, int], types: list[int]) -> VocabParts:
    said: str | None = meta.get("pre", str, "a string")
    name, family = family_of(said, vocab, meta.file)
    if name != said:
        _LOG.warning("%s: pre-tokenizer %r is not known; using the rules of %r", meta.file, said, name)
    merges = _merges(meta)
    if merges is None:
        raise meta.bad(f"{_KEY}merges is missing, and a byte-level vocabulary cannot work without")
    return VocabParts(
        model=_bpe(meta, vocab, merges, ignore_merges=family.ignore_merges),
        normalizer=family.normalizer(),
        pre_tokenizer=family.build(),
        decoder=decoders.ByteLevel(),
        **_common(meta, tokens, types, adds_bos=family.adds_bos),
    )


def _sentencepiece(meta: _Metadata, tokens: list[str], vocab: dict[str, int], types: list[int]) -> VocabParts:
    for i, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind == BYTE and not _BYTE_TOKEN.fullmatch(token):
            raise meta.bad(f"token {i} is marked as a byte but spelled {token[:80]!r}, not like <0x0A>")
    merges = _merges(meta)
    if merges is None:
        merges = _merges_from_scores(meta, tokens, vocab, types)
    unknown = meta.token_id("unknown_token_id", len(tokens))
    if unknown is None and UNKNOWN in types:
        unknown = types.index(UNKNOWN)
    prefix = meta.get("add_space_prefix", bool, "a boolean")
    prefix = True if prefix is None else prefix
    escape = [normalizers.Replace(" ", SPACE)]
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    return VocabParts(
        model=_bpe(
            meta,
            vocab,
            merges,
            byte_fallback=True,
            fuse_unk=True,
            **({} if unknown is None else {"unk_token": tokens[unknown]}),
        ),
        normalizer=normalizers.Sequence([normalizers.Prepend(SPACE), *escape] if prefix else escape),
        pre_tokenizer=None,
        decoder=decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]),
        **_common(meta, tokens, types, adds_bos=True),
    )


def _bpe(meta: _Metadata, vocab: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> models.BPE:
    try:
        return models.BPE(vocab, merges, **options)
    except Exception as e:  # the library raises plain Exception, e.g. for a merge of unknown tokens
        raise meta.bad(f"the merges do not fit the vocabulary: {e}") from None


def _merges(meta: _Metadata) -> list[tuple[str, str]] | None:
    lines = meta.array("merges", str, "strings")
    if lines is None:
        return None
    if len(lines) > 4 * MAX_TOKENS:
        raise meta.bad(f"{_KEY}merges has {len(lines):,} entries; at most {4 * MAX_TOKENS:,} are read")
    merges: list[Any] = [tuple(line.split(" ")) for line in lines]
    if set(map(len, merges)) - {2}:
        wrong = next(i for i, parts in enumerate(merges) if len(parts) != 2)
        raise meta.bad(f"{_KEY}merges[{wrong}] must be two tokens with a space between, not {lines[wrong][:80]!r}")
    return merges


def _merges_from_scores(
    meta: _Metadata, tokens: list[str], vocab: dict[str, int], types: list[int]
) -> list[tuple[str, str]]:
    """Every way to join two pieces into a third, best score first.

    Ties in transformers' order (longer parts first, then by id). Control, byte and unused tokens take no part, so
    no text can be merged into one.
    """
    scores = meta.array("scores", (int, float), "numbers", len(tokens))
    if scores is None:
        raise meta.bad(f"{_KEY}scores is missing, and there are no merges either")
    pieces = {t: i for t, i in vocab.items() if types[i] in (0, NORMAL)}
    found: list[tuple[float, str, str]] = []
    longest = max(pieces, key=len, default="")
    if len(longest) > MAX_PIECE:
        raise meta.bad(f"token {pieces[longest]} has {len(longest):,} characters; at most {MAX_PIECE:,} are read")
    if (work := sum(len(t) ** 2 for t in pieces)) > MAX_SPLITTING:
        raise meta.bad(f"the splits of all tokens have {work:,} characters; at most {MAX_SPLITTING:,} are tried")
    for token, i in pieces.items():
        if not math.isfinite(scores[i]):
            raise meta.bad(f"{_KEY}scores[{i}] is {scores[i]}")
        splits = [(token[:k], token[k:]) for k in range(1, len(token))]
        known = [(a, b) for a, b in splits if a in pieces and b in pieces]
        known.sort(key=lambda pair: (pieces[pair[0]], pieces[pair[1]]))
        found.extend((scores[i], a, b) for a, b in known)
    found.sort(key=lambda merge: (-merge[0], -len(merge[1]), -len(merge[2])))
    return [(a, b) for _, a, b in found]


def _common(meta: _Metadata, tokens: list[str], types: list[int], *, adds_bos: bool) -> dict[str, Any]:
    count = len(tokens)
    bos = meta.token_id("bos_token_id", count)
    eos = meta.token_id("eos_token_id", count)
    ends = [eos, meta.token_id("eot_token_id", count), meta.token_id("eom_token_id", count)]
    named = {i for i in (bos, *ends, meta.token_id("padding_token_id", count)) if i is not None}
    template = meta.get("chat_template", str, "a string", prefix="tokenizer.")
    says_bos = meta.get("add_bos_token", bool, "a boolean")
    says_eos = meta.get("add_eos_token", bool, "a boolean")
    markers = [
        Marker(tokens[i], i, special=kind != USER_DEFINED)
        for i, kind in enumerate(types)
        if kind in (UNKNOWN, CONTROL, USER_DEFINED) and tokens[i]
    ]
    listed = {m.id for m in markers}
    # Some converters leave end-of-turn tokens typed as ordinary ones.
    markers.extend(
        Marker(tokens[i], i)
        for i in sorted(named - listed)
        if tokens[i] and not Marker(tokens[i], i, special=False).is_text
    )
    return {
        "markers": tuple(markers),
        "tokens": tokens,
        "bos_id": bos,
        "eos_id": eos,
        "eos_ids": frozenset(i for i in ends if i is not None),
        "adds_bos": (adds_bos if says_bos is None else says_bos) and bos is not None,
        "adds_eos": bool(says_eos) and eos is not None,
        "chat_template": template or None,
    }
