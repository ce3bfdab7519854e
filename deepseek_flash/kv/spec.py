"""What a model caches, as data. No torch here.

A model declares groups of three kinds:

- ``rows``: one row per ``ratio`` tokens, kept for the whole sequence (GQA K and V, MLA latent, index keys).
- ``window``: one row a token, but only the last ``window`` tokens matter.
- ``state``: one fixed-size record a sequence (pending compressor rows and the like).

Every group has its own block id space. ``rows`` and ``window`` groups are cut into blocks of ``block_size``
token positions; a ``state`` block is one whole record. A block is ``block_bytes`` contiguous bytes holding
all fields of all layers of that group, one field after the other (block-major), so moving a block is one copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from math import prod
from typing import Literal

from deepseek_flash.errors import InternalError

ITEM_SIZE = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "uint8": 1, "int32": 4, "int64": 8}
ALIGN = 64
"""Every field of a block starts at a multiple of this many bytes."""
Order = Literal["rows", "heads", "turned"]


@dataclass(frozen=True, slots=True)
class Field:
    """One cached tensor of one layer: ``shape`` and ``dtype`` of a row (of the record, in a state group)."""

    name: str
    layer: int
    shape: tuple[int, ...]
    dtype: str
    order: Order = "rows"
    """How the rows of a block lie: one after the other; for ``shape`` (heads, dim), all rows of a head together; or
    [heads, dim, rows], so that one value of consecutive rows lies side by side."""

    @property
    def row_bytes(self) -> int:
        return prod(self.shape) * ITEM_SIZE[self.dtype]


@dataclass(frozen=True)
class Group:
    """Cached things that live and die together and share one block table a sequence."""

    name: str
    kind: Literal["rows", "window", "state"]
    fields: tuple[Field, ...]
    ratio: int = 1
    """Tokens per row (``rows`` only)."""
    window: int = 0
    """Tokens that stay visible (``window`` only)."""

    def rows_per_block(self, block_size: int) -> int:
        return 1 if self.kind == "state" else block_size // self.ratio

    def field_offsets(self, block_size: int) -> tuple[int, ...]:
        """Byte offset of each field inside a block."""
        offsets, at = [], 0
        for f in self.fields:
            offsets.append(at)
            at += -(-f.row_bytes * self.rows_per_block(block_size) // ALIGN) * ALIGN
        return tuple(offsets)

    def block_bytes(self, block_size: int) -> int:
        rows = self.rows_per_block(block_size)
        return sum(-(-f.row_bytes * rows // ALIGN) * ALIGN for f in self.fields)


@dataclass(frozen=True)
class CacheSpec:
    """A model's groups and the block size they share (a multiple of every ratio)."""

    block_size: int
    groups: tuple[Group, ...]

    def __post_init__(self) -> None:
        if not self.groups:
            raise InternalError("a CacheSpec needs at least one group")
        for g in self.groups:
            if self.block_size % g.ratio:
                raise InternalError(f"block_size {self.block_size} is not a multiple of ratio {g.ratio} of {g.name!r}")
            if g.kind == "window" and g.window < 1:
                raise InternalError(f"window group {g.name!r} needs window >= 1")

    @cached_property
    def needs_snapshots(self) -> bool:
        """Whether resuming at a boundary needs window rows or state kept there."""
        return any(g.kind != "rows" for g in self.groups)

    def first_block(self, group: int, tokens: int) -> int:
        """Index of the first block of a group that a sequence of so many tokens still reads."""
        g = self.groups[group]
        return max(0, tokens - g.window) // self.block_size if g.kind == "window" else 0

    def snapshot_blocks(self, boundary: int) -> list[tuple[int, int]]:
        """(group, block index) of everything beside rows that resuming after ``boundary`` blocks needs: window rows
        still visible and the state record, which is kept with the block it ends. In the order in which tiers store
        it."""
        wanted = []
        for i, g in enumerate(self.groups):
            if g.kind == "window":
                wanted += [(i, n) for n in range(self.first_block(i, boundary * self.block_size), boundary)]
            elif g.kind == "state":
                wanted.append((i, boundary - 1))
        return wanted

    def blocks_for(self, group: int, tokens: int) -> int:
        """Blocks of a group that a sequence of so many tokens holds at once."""
        g = self.groups[group]
        if g.kind == "state":
            return 1
        whole = -(-tokens // self.block_size)
        if g.kind == "window":
            return min(whole, -(-g.window // self.block_size) + 1)
        return whole

    def bytes_for(self, tokens: int) -> int:
        """Bytes one sequence of so many tokens holds."""
        return sum(self.blocks_for(i, tokens) * g.block_bytes(self.block_size) for i, g in enumerate(self.groups))

    def digest(self) -> bytes:
        """Identity of the layout, part of every prefix key."""
        return blake2b(repr((self.block_size, self.groups)).encode(), digest_size=16).digest()
