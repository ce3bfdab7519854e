"""Which published blocks hold which tokens: a digest chain from a block's key to its resources in every group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from struct import pack

from deepseek_flash.errors import InternalError
from deepseek_flash.kv.spec import CacheSpec

NONE = -1
"""No block."""
DIGEST_SIZE = 32


@dataclass(slots=True)
class Entry:
    """What is kept of one block of tokens."""

    key: bytes
    parent: bytes
    depth: int
    """Blocks before it."""
    blocks: list[int]
    """Per group: the block of rows, the block of window rows, or the state record at the block's end; or NONE."""


class PrefixIndex:
    """Key → entry. It owns no block: an entry lives exactly as long as pools keep a block it names.

    The key of a block is blake2b(parent's key, the block's token ids); the first parent is
    blake2b(root, salt). ``root`` says what else the bytes depend on: weights, layout, dtype. Keys are
    therefore the same in every process, and two prefixes share a key only if all of that is equal.
    """

    def __init__(self, spec: CacheSpec, root: bytes) -> None:
        self._size = spec.block_size
        self._root = blake2b(root, digest_size=DIGEST_SIZE).digest()
        self.rows = [i for i, g in enumerate(spec.groups) if g.kind == "rows"]
        """Groups of rows."""
        self._groups = len(spec.groups)
        self._entries: dict[bytes, Entry] = {}
        self._by_block: list[dict[int, Entry]] = [{} for _ in spec.groups]

    def __len__(self) -> int:
        return len(self._entries)

    def start(self, salt: bytes) -> bytes:
        """The parent of every first block under this salt."""
        return blake2b(self._root + salt, digest_size=DIGEST_SIZE).digest()

    def extend_keys(self, keys: list[bytes], tokens: Sequence[int], salt: bytes, count: int) -> None:
        """Append keys of full blocks until there are ``count``; those already there are not computed again."""
        parent = keys[-1] if keys else self.start(salt)
        for i in range(len(keys), count):
            ids = tokens[i * self._size : (i + 1) * self._size]
            parent = blake2b(parent + pack(f"<{self._size}I", *ids), digest_size=DIGEST_SIZE).digest()
            keys.append(parent)

    def get(self, key: bytes, group: int) -> int:
        """The group's block under this key, or NONE."""
        entry = self._entries.get(key)
        return NONE if entry is None else entry.blocks[group]

    def entry(self, group: int, block: int) -> Entry:
        """The entry that names a published block."""
        return self._by_block[group][block]

    def has_rows(self, key: bytes) -> bool:
        """Whether every ``rows`` group has this block."""
        entry = self._entries.get(key)
        return entry is not None and all(entry.blocks[g] != NONE for g in self.rows)

    def reach(self, keys: Sequence[bytes], limit: int) -> int:
        """How many leading blocks, at most ``limit``, have their rows.

        A block's rows never outlive its parent's (``check`` proves it), so bisection finds the end.
        """
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            if self.has_rows(keys[middle - 1]):
                low = middle
            else:
                high = middle - 1
        return low

    def put(self, keys: Sequence[bytes], depth: int, group: int, block: int) -> None:
        """Record that ``block`` of ``group`` holds what ``keys[depth]`` says; the slot must be empty."""
        key = keys[depth]
        entry = self._entries.get(key)
        if entry is None:
            parent = keys[depth - 1] if depth else b""
            entry = self._entries[key] = Entry(key, parent, depth, [NONE] * self._groups)
        if entry.blocks[group] != NONE or block in self._by_block[group]:
            raise InternalError(f"group {group}: block {block} or its key is published already")
        entry.blocks[group] = block
        self._by_block[group][block] = entry

    def drop(self, group: int, block: int) -> list[tuple[int, int]]:
        """Forget one block; returns the (group, block) pairs that are of no use without it, forgotten too.

        Without its rows nothing of an entry can be used. Window rows and state are missed only by resuming there.
        """
        entry = self._by_block[group].pop(block)
        entry.blocks[group] = NONE
        useless: list[tuple[int, int]] = []
        if group in self.rows:
            useless = [(g, b) for g, b in enumerate(entry.blocks) if b != NONE]
            for g, b in useless:
                del self._by_block[g][b]
                entry.blocks[g] = NONE
        if all(b == NONE for b in entry.blocks):
            del self._entries[entry.key]
        return useless

    def blocks(self, group: int) -> list[int]:
        """Every published block of a group."""
        return list(self._by_block[group])

    def check(self) -> None:
        """Prove that both directions agree, no entry is empty, and no rows outlive their parent's."""
        named = 0
        for key, entry in self._entries.items():
            used = [(g, b) for g, b in enumerate(entry.blocks) if b != NONE]
            named += len(used)
            if key != entry.key or not used or any(self._by_block[g].get(b) is not entry for g, b in used):
                raise InternalError("an index entry is empty or its blocks do not point back at it")
        if named != sum(map(len, self._by_block)):
            raise InternalError("a published block has no index entry")
        if self.rows and any(
            not self.has_rows(e.key) or (e.depth and not self.has_rows(e.parent)) for e in self._entries.values()
        ):
            raise InternalError("an index entry outlived its rows or those of its parent")
