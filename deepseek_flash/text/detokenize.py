"""Token ids to text, one at a time, without ever breaking a character.

Byte-level and sentencepiece vocabularies spell bytes, so text is decoded as UTF-8 from bytes: an incomplete
character is held back only while the bytes so far can still become one, and bytes that cannot are U+FFFD at once,
one for each maximal ill-formed piece (Unicode 3.9, the same as ``bytes.decode(errors="replace")``). A genuine U+FFFD
in the vocabulary is three ordinary bytes and stops nothing.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable
from typing import Protocol

REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """Joined results of ``push`` and ``finish`` equal ``decode`` of all the ids. One per answer; not thread-safe."""

    def push(self, token_id: int) -> str:
        """Whole characters that became certain with this token, or ``""``."""

    def finish(self) -> str:
        """What was still held back (an incomplete character becomes U+FFFD)."""


def byte_glyphs() -> dict[str, int]:
    """The GPT-2 alphabet: printable stand-in character → byte.

    Printable Latin-1 bytes stand for themselves; the other 68 get U+0100, U+0101, … in byte order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    glyphs = {chr(b): b for b in printable}
    others = [b for b in range(256) if chr(b) not in glyphs]
    glyphs.update({chr(0x100 + i): b for i, b in enumerate(others)})
    return glyphs


_GLYPHS = byte_glyphs()


def byte_level_piece(token: str) -> bytes:
    """The bytes of a byte-level token; one that uses other characters stands for its own UTF-8."""
    try:
        return bytes([_GLYPHS[c] for c in token])
    except KeyError:
        return token.encode("utf-8", "replace")


def sentencepiece_piece(token: str, byte_fallback: bool = True) -> bytes:
    """The bytes of a sentencepiece token: ``▁`` is a space, ``<0xE4>`` is one byte."""
    if byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace("\u2581", " ").encode("utf-8", "replace")


def decode_bytes(pieces: Iterable[bytes], strip_space: bool) -> str:
    """Text of these bytes; ``strip_space`` drops one space from its start (sentencepiece's dummy prefix)."""
    text = b"".join(pieces).decode("utf-8", "replace")
    return text[1:] if strip_space and text.startswith(" ") else text


class ByteDetokenizer:
    """For vocabularies that spell bytes. ``piece`` gives a token's bytes (empty for one to be left out)."""

    def __init__(self, piece: Callable[[int], bytes], *, strip_space: bool) -> None:
        self._piece = piece
        self._strip = strip_space  # until the first character has come
        # CPython's incremental decoder holds exactly the bytes that are a proper prefix of a valid character.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._out(self._decoder.decode(self._piece(token_id)))

    def finish(self) -> str:
        return self._out(self._decoder.decode(b"", final=True))

    def _out(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text[1:] if text.startswith(" ") else text
        return text


class DiffDetokenizer:
    """For any other decoder: decode everything again and give out what is new. Quadratic, and rarely needed."""

    _HOLD = 3  # an unfinished character shows as at most three U+FFFD

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._given = ""

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._decode(self._ids)
        end = len(text)
        while end > max(0, len(text) - self._HOLD) and text[end - 1] == REPLACEMENT:
            end -= 1
        return self._new(text[:end])

    def finish(self) -> str:
        return self._new(self._decode(self._ids)) if self._ids else ""

    def _new(self, text: str) -> str:
        if not text.startswith(self._given):  # the decoder rewrote what was given out: wait until it has passed that
            return ""
        new, self._given = text[len(self._given) :], text
        return new
