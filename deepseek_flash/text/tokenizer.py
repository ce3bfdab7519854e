"""Characters to token ids and back, over the ``tokenizers`` library.

Two encoders share one byte-pair model: ``full`` also matches the added (control) tokens, ``plain`` does not know them.
Text from users goes through ``plain``, so it can never become a control token.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import AddedToken

from deepseek_flash.errors import FormatError, RequestError
from deepseek_flash.text.detokenize import (
    ByteDetokenizer,
    Detokenizer,
    DiffDetokenizer,
    byte_glyphs,
    byte_level_piece,
    decode_bytes,
    sentencepiece_piece,
)
from deepseek_flash.text.gguf_vocab import read_vocab
from deepseek_flash.text.markers import Marker, Markers, Segment, strip_beside
from deepseek_flash.text.tokenizer_files import library_errors, read_folder, state_of

if TYPE_CHECKING:
    from deepseek_flash.text.template import ChatTemplate

MAX_ID = 1 << 24
MAX_MARKER = 256
"""Characters of a control token."""
MAX_MARKERS = 1 << 20
"""Characters of all control tokens together; real vocabularies have up to six thousand short ones."""


@dataclass(frozen=True, slots=True)
class _Spelling:
    """How tokens spell bytes; ``kind`` is "bytes", "pieces" or "other" (only the library's own decoder knows)."""

    kind: str
    byte_fallback: bool = False
    strip_space: bool = False


class Tokenizer:
    """Immutable after construction: every method is safe from any thread."""

    def __init__(
        self,
        full: tokenizers.Tokenizer,
        *,
        markers: Sequence[Marker],
        bos_id: int | None,
        eos_id: int | None,
        eos_ids: Iterable[int],
        prefix: Sequence[int],
        suffix: Sequence[int],
        chat_template: str | None,
        size: int,
        written: int | None = None,
    ) -> None:
        full.no_truncation()
        full.no_padding()
        if getattr(full.model, "dropout", None):  # random merges are for training
            full.model.dropout = None
        _check_markers(markers)
        self._full = full
        self._plain, self._inner = _plain_encoders(full)
        control = [m for m in markers if not m.is_text]
        self._markers = Markers(control)
        self._text_markers = Markers([m for m in markers if m.is_text])
        self._control_ids = frozenset(m.id for m in control)
        self._literal = {m.id: m.text.encode("utf-8", "replace") for m in markers}
        self._prefix, self._suffix = list(prefix), list(suffix)
        self._spelling = _spelling_of(full)
        self._bytes: dict[int, bytes] = {}  # filled as needed; a race writes the same value twice
        self.vocab_size: int = size
        """Highest id plus one."""
        self.written_size: int = size if written is None else written
        """Highest id that can occur in text plus one; converted files pad their table beyond it."""
        self.bos_id: int | None = bos_id
        self.eos_ids: frozenset[int] = frozenset(eos_ids)
        """Ids that end an answer, as far as the tokenizer's files say."""
        self.special_ids: frozenset[int] = frozenset(m.id for m in markers if m.special)
        """Ids left out of decoded text by default."""
        self.adds_bos: bool = bos_id is not None and bos_id in self._prefix
        self.chat_template: str | None = chat_template
        self.bos_text: str = "" if bos_id is None else full.id_to_token(bos_id) or ""
        self.eos_text: str = "" if eos_id is None else full.id_to_token(eos_id) or ""
        self.control_texts: tuple[str, ...] = tuple(m.text for m in control)
        """Spellings that become control tokens where markup is allowed."""

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """From a Hugging Face folder. ``tokenizer.json`` alone says how text is split; class names are ignored."""
        files = read_folder(Path(path))
        full = files.full
        markers = _markers_of(full)
        vocab = full.get_vocab(with_added_tokens=True)
        size = max(vocab.values(), default=-1) + 1
        if not 0 < size <= MAX_ID:
            raise FormatError(f"{files.file}: token ids up to {size - 1:,}; 0 to {MAX_ID - 1:,} are possible")
        prefix, suffix = _frame_of(full)
        bos_id, eos_id = _named_id(files.bos, vocab), _named_id(files.eos, vocab)
        if bos_id is None and files.bos is None and len(prefix) == 1:
            bos_id = prefix[0]
        if stray := [i for i in (*prefix, *suffix) if i >= size]:
            raise FormatError(
                f"{files.file}: the post_processor adds the id {stray[0]}; the vocabulary ends at {size - 1}",
                file=files.file,
            )
        prefix = _said(files.add_bos, bos_id, prefix)
        suffix = _said(files.add_eos, eos_id, suffix)
        markers = _with_named(markers, full, (bos_id, eos_id))
        return cls(
            full,
            markers=markers,
            bos_id=bos_id,
            eos_id=eos_id,
            eos_ids=() if eos_id is None else (eos_id,),
            prefix=prefix,
            suffix=suffix,
            chat_template=files.chat_template,
            size=size,
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], file: str) -> Tokenizer:
        """From a GGUF file's key-values; ``file`` is for messages."""
        parts = read_vocab(metadata, file)
        full = tokenizers.Tokenizer(parts.model)
        if parts.normalizer is not None:
            full.normalizer = parts.normalizer
        if parts.pre_tokenizer is not None:
            full.pre_tokenizer = parts.pre_tokenizer
        full.decoder = parts.decoder
        full.add_tokens([AddedToken(m.text, special=m.special, normalized=False) for m in parts.markers])
        return cls(
            full,
            markers=parts.markers,
            bos_id=parts.bos_id,
            eos_id=parts.eos_id,
            eos_ids=parts.eos_ids,
            prefix=[parts.bos_id] if parts.adds_bos and parts.bos_id is not None else [],
            suffix=[parts.eos_id] if parts.adds_eos and parts.eos_id is not None else [],
            chat_template=parts.chat_template,
            size=len(parts.tokens),
            written=parts.written,
        )

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Ids of a text. With ``parse_special=False`` nothing in it can become a control token.

        The tokenizer's own beginning-of-text token is put in front unless the text already begins with it.
        """
        _check_text(text)
        if parse_special:
            ids: list[int] = _encoded(self._full, text).ids
        else:
            ids = self._encode_text(text, first=True)
        return self._framed(ids, self._suffix) if add_special_tokens else ids

    def encode_segments(self, segments: Sequence[Segment]) -> list[int]:
        """Ids of a rendered chat: control tokens come only from markup, text is joined before it is split.

        Begins with exactly one beginning-of-text token if the tokenizer adds one.
        """
        pieces: list[str | Marker] = []
        for segment in segments:
            _check_text(segment.text)
            for piece in self._markers.split(segment.text) if segment.markup else [segment.text]:
                if isinstance(piece, str) and pieces and isinstance(pieces[-1], str):
                    pieces[-1] += piece
                else:
                    pieces.append(piece)
        ids: list[int] = []
        for i, piece in enumerate(strip_beside(pieces)):
            if isinstance(piece, Marker):
                ids.append(piece.id)
            else:
                ids.extend(self._encode_text(piece, first=i == 0))
        return self._framed(ids, [])

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of these ids; bytes that are no valid UTF-8 become U+FFFD."""
        ids = list(ids)
        if self._spelling.kind == "other":
            for i in ids:
                self._check_id(i)
            with library_errors("the model's tokenizer failed to decode"):
                text: str = self._full.decode(ids, skip_special_tokens=skip_special_tokens)
            return text
        piece = self._shown if skip_special_tokens else self._piece
        return decode_bytes(map(piece, ids), self._spelling.strip_space)

    def incremental(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """A new detokenizer, for one answer."""
        if self._spelling.kind == "other":
            return DiffDetokenizer(lambda ids: self.decode(ids, skip_special_tokens=skip_special_tokens))
        return ByteDetokenizer(
            self._shown if skip_special_tokens else self._piece, strip_space=self._spelling.strip_space
        )

    def token_bytes(self, token_id: int) -> bytes | None:
        """The bytes this token adds to a text; None if only the whole text can be decoded, or the id is unused."""
        self._check_id(token_id)
        if self._spelling.kind == "other" or self._full.id_to_token(token_id) is None:
            return None
        return self._piece(token_id)

    def token_id(self, text: str) -> int | None:
        """The id of a token by its spelling in the vocabulary."""
        found: int | None = self._full.token_to_id(text)
        return found

    def template(self) -> ChatTemplate | None:
        """The chat template that came with the files, ready to render for this vocabulary; None if none did."""
        if self.chat_template is None:
            return None
        from deepseek_flash.text.template import ChatTemplate  # here, so that raw prompts never load Jinja

        return ChatTemplate(self.chat_template, bos=self.bos_text, eos=self.eos_text, specials=self.control_texts)

    def _framed(self, ids: list[int], suffix: list[int]) -> list[int]:
        start = 0
        if self.adds_bos:
            while start < len(ids) and ids[start] == self.bos_id:
                start += 1
        return [*self._prefix, *ids[start:], *suffix]

    def _encode_text(self, text: str, *, first: bool) -> list[int]:
        """Ids of text that must stay text. ``first``: it stands at the beginning of the prompt."""
        ids: list[int] = []
        for i, piece in enumerate(self._text_markers.split(text) if len(self._text_markers) else [text]):
            if isinstance(piece, Marker):
                ids.append(piece.id)
            else:
                ids.extend(self._plain_ids(piece, self._plain if first and i == 0 else self._inner))
        return ids

    def _plain_ids(self, text: str, encoder: tokenizers.Tokenizer) -> list[int]:
        encoding = _encoded(encoder, text)
        ids: list[int] = encoding.ids
        if self._control_ids.isdisjoint(ids):
            return ids
        # A vocabulary that holds control tokens as ordinary entries can produce one from text: cut through it.
        out: list[int] = []
        for i, (start, end) in zip(ids, encoding.offsets, strict=True):
            if i not in self._control_ids:
                out.append(i)
            elif end - start > 1:
                middle = (start + end) // 2
                out.extend(self._plain_ids(text[start:middle], self._inner))
                out.extend(self._plain_ids(text[middle:end], self._inner))
            else:
                out.extend(self._byte_ids(text[start:end]))
        return out

    def _byte_ids(self, text: str) -> list[int]:
        names = _GLYPH_OF if self._spelling.kind == "bytes" else [f"<0x{b:02X}>" for b in range(256)]
        found = [self._full.token_to_id(names[b]) for b in text.encode()]
        ids = [i for i in found if i is not None and i not in self._control_ids]
        if len(ids) != len(found):
            raise RequestError(
                f"{text!r} cannot be written with this vocabulary except as a control token", parameter="prompt"
            )
        return ids

    def _shown(self, token_id: int) -> bytes:
        return b"" if token_id in self.special_ids else self._piece(token_id)

    def _piece(self, token_id: int) -> bytes:
        piece = self._bytes.get(token_id)
        if piece is None:
            self._check_id(token_id)
            piece = self._bytes[token_id] = self._spell(token_id)
        return piece

    def _spell(self, token_id: int) -> bytes:
        if token_id in self._literal:
            return self._literal[token_id]
        token: str | None = self._full.id_to_token(token_id)
        if token is None:
            return b""
        if self._spelling.kind == "bytes":
            return byte_level_piece(token)
        return sentencepiece_piece(token, self._spelling.byte_fallback)

    def _check_id(self, token_id: int) -> None:
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise RequestError(f"token ids are integers, not {type(token_id).__name__}", parameter="ids")
        if not 0 <= token_id < self.vocab_size:
            raise RequestError(
                f"token id {token_id} is out of range: the tokenizer has ids 0 to {self.vocab_size - 1}",
                parameter="ids",
                value=token_id,
            )


_GLYPH_OF = [glyph for glyph, _ in sorted(byte_glyphs().items(), key=lambda item: item[1])]


def _check_text(text: str) -> None:
    if not isinstance(text, str):
        raise RequestError(f"text must be a string, not {type(text).__name__}", parameter="prompt")
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise RequestError(
            f"the text has a lone surrogate (U+{ord(text[e.start]):04X}) at position {e.start}: it is not valid "
            "Unicode; decode it with errors='replace' first",
            parameter="prompt",
        ) from None


def _encoded(encoder: tokenizers.Tokenizer, text: str, *, framed: bool = False) -> tokenizers.Encoding:
    with library_errors("the model's tokenizer cannot encode a text"):
        return encoder.encode(text, add_special_tokens=framed)


def _plain_encoders(full: tokenizers.Tokenizer) -> tuple[tokenizers.Tokenizer, tokenizers.Tokenizer]:
    """Encoders without added tokens, on the same model: for the start of a prompt, and for text further in.

    They differ only for vocabularies that put a space before the first word of a prompt and nowhere else.
    """
    plain = _without_added(full, full.pre_tokenizer)
    state = state_of(full.pre_tokenizer)
    if '"prepend_scheme":"first"' not in state:
        return plain, plain
    inner = json.loads(state.replace('"prepend_scheme":"first"', '"prepend_scheme":"never"'))
    probe = tokenizers.Tokenizer.from_str(
        json.dumps(
            {
                "version": "1.0",
                "added_tokens": [],
                "pre_tokenizer": inner,
                "model": {"type": "BPE", "vocab": {}, "merges": []},
            }
        )
    )
    return plain, _without_added(full, probe.pre_tokenizer)


def _without_added(full: tokenizers.Tokenizer, pre_tokenizer: Any) -> tokenizers.Tokenizer:
    plain = tokenizers.Tokenizer(full.model)
    if full.normalizer is not None:
        plain.normalizer = full.normalizer
    if pre_tokenizer is not None:
        plain.pre_tokenizer = pre_tokenizer
    return plain


def _spelling_of(full: tokenizers.Tokenizer) -> _Spelling:
    """Which bytes tokens stand for, read off the decoder."""
    spec = json.loads(state_of(full.decoder))
    steps = spec.get("decoders", [spec]) if isinstance(spec, dict) else []
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return _Spelling("bytes")
    known = {"Replace", "ByteFallback", "Fuse", "Strip"}
    if not kinds or not set(kinds) <= known or len(set(kinds)) != len(kinds) or "Replace" not in kinds:
        return _Spelling("other")
    by_kind = {step["type"]: step for step in steps}
    swap = by_kind["Replace"]
    if swap.get("pattern") != {"String": "\u2581"} or swap.get("content") != " " or "Fuse" not in kinds:
        return _Spelling("other")
    strip = by_kind.get("Strip")
    if strip is not None and (
        (strip.get("content"), strip.get("start"), strip.get("stop")) != (" ", 1, 0) or kinds[-1] != "Strip"
    ):
        return _Spelling("other")
    return _Spelling("pieces", byte_fallback="ByteFallback" in kinds, strip_space=strip is not None)


def _check_markers(markers: Sequence[Marker]) -> None:
    longest = max(markers, key=lambda m: len(m.text), default=None)
    if longest is not None and len(longest.text) > MAX_MARKER:
        raise FormatError(
            f"the tokenizer's added token {longest.id} has {len(longest.text):,} characters ({longest.text[:40]!r}…); "
            f"at most {MAX_MARKER} are possible"
        )
    if (total := sum(len(m.text) for m in markers)) > MAX_MARKERS:
        raise FormatError(
            f"the tokenizer's {len(markers):,} added tokens have {total:,} characters; at most {MAX_MARKERS:,} are "
            f"possible"
        )


def _markers_of(full: tokenizers.Tokenizer) -> list[Marker]:
    return [
        Marker(t.content, i, t.special, t.lstrip, t.rstrip, t.single_word, t.normalized)
        for i, t in sorted(full.get_added_tokens_decoder().items())
    ]


def _with_named(markers: list[Marker], full: tokenizers.Tokenizer, ids: Iterable[int | None]) -> list[Marker]:
    """The markers, with those that the configuration names as begin and end made special."""
    named = {i for i in ids if i is not None}
    known = {m.id for m in markers}
    extra = [Marker(text, i) for i in sorted(named - known) if (text := full.id_to_token(i))]
    return [replace(m, special=True) if m.id in named else m for m in markers] + [
        m for m in extra if not replace(m, special=False).is_text
    ]


def _frame_of(full: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """What the post-processor puts before and after a text, found by trying."""
    bare = _encoded(full, "a").ids
    framed = _encoded(full, "a", framed=True).ids
    for start in range(len(framed) - len(bare) + 1):
        if framed[start : start + len(bare)] == bare:
            return framed[:start], framed[start + len(bare) :]
    return [], []


def _named_id(name: str | None, vocab: Mapping[str, int]) -> int | None:
    return None if name is None else vocab.get(name)


def _said(add: bool | None, token_id: int | None, found: list[int]) -> list[int]:
    """The frame as the configuration says it (add_bos_token, add_eos_token), else as the post-processor does."""
    if add is None or token_id is None:
        return found
    others = [i for i in found if i != token_id]
    return [token_id, *others] if add else others
