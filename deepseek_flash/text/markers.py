"""Control-token spellings: what they are, and cutting a text at them.

A vocabulary lists tokens that stand outside ordinary tokenisation: ``<|im_end|>``, ``<｜User｜>``, ``<think>``.
In a prompt they may come from the template or the engine, never from a user's text. A few files also list plain
letters or runs of spaces that way (deepseek-coder lists ``ü``); those are text and stay text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a rendered prompt. Only ``markup`` pieces may become control tokens."""

    text: str
    markup: bool


@dataclass(frozen=True, slots=True)
class Marker:
    """One token that the vocabulary matches whole. Flags as in the ``tokenizers`` library."""

    text: str
    id: int
    special: bool = True
    """Left out of decoded text."""
    lstrip: bool = False
    """Swallows white space before it."""
    rstrip: bool = False
    """Swallows white space after it."""
    single_word: bool = False
    normalized: bool = False

    @property
    def is_text(self) -> bool:
        """Plain text that the file happens to list as an added token: one character, or only letters and spaces."""
        return not self.special and (len(self.text) == 1 or all(c.isalnum() or c.isspace() for c in self.text))


def spelling_pattern(words: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern for the leftmost, then longest of these words; None when there are none."""
    groups: dict[str, list[str]] = {}
    for word in {w for w in words if w}:
        groups.setdefault(word[0], []).append(word[1:])
    if not groups:
        return None
    # Grouped by first character: the regex engine then skips ahead instead of trying every word everywhere.
    parts = [
        re.escape(first) + "(?:" + "|".join(re.escape(rest) for rest in sorted(rests, key=lambda r: (-len(r), r))) + ")"
        for first, rests in sorted(groups.items())
    ]
    return re.compile("|".join(parts), re.DOTALL)


class Markers:
    """Cuts texts at a set of markers. Immutable, so safe from any thread."""

    def __init__(self, markers: Iterable[Marker]) -> None:
        self.by_text = {m.text: m for m in markers if m.text}
        # As in `tokenizers`: those matched on the raw text come first, then those matched on normalised text.
        self._passes = [
            p
            for group in (False, True)
            if (p := spelling_pattern(m.text for m in self.by_text.values() if m.normalized is group)) is not None
        ]

    def __len__(self) -> int:
        return len(self.by_text)

    def split(self, text: str) -> list[str | Marker]:
        """Pieces of ``text`` in order: plain strings (none empty) and the markers between them."""
        pieces: list[str | Marker] = [text] if text else []
        for pattern in self._passes:
            cut: list[str | Marker] = []
            for piece in pieces:
                if isinstance(piece, Marker):
                    cut.append(piece)
                else:
                    cut.extend(self._cut(piece, pattern))
            pieces = cut
        return pieces

    def _cut(self, text: str, pattern: re.Pattern[str]) -> list[str | Marker]:
        out: list[str | Marker] = []
        start = 0
        for match in pattern.finditer(text):
            marker = self.by_text[match.group()]
            if marker.single_word and _inside_word(text, match.start(), match.end()):
                continue
            if match.start() > start:
                out.append(text[start : match.start()])
            out.append(marker)
            start = match.end()
        if start < len(text):
            out.append(text[start:])
        return out


def _inside_word(text: str, start: int, end: int) -> bool:
    before, after = text[start - 1 : start] if start else "", text[end : end + 1]
    return any(c.isalnum() or c == "_" for c in (before, after) if c)


def strip_beside(pieces: Sequence[str | Marker]) -> list[str | Marker]:
    """The pieces with the white space taken away that lstrip and rstrip markers swallow."""
    out: list[str | Marker] = []
    for piece in pieces:
        last = out[-1] if out else None
        if isinstance(piece, Marker):
            if piece.lstrip and isinstance(last, str):
                out[-1] = last.rstrip()
        elif isinstance(last, Marker) and last.rstrip:
            piece = piece.lstrip()
        out.append(piece)
    return [p for p in out if p != ""]
