"""One record of the disk store: a header and the bytes of consecutive blocks. Bytes only, no files.

    0                    header (a multiple of 4,096)                                  payload, padded to 4,096
    ┌────────┬─────────────────┬────────────────────┬───────┬──────────────────┐┌─────────┬─────────┬────┬─────┐
    │ fixed  │ n keys, 32 each │ n checksums, 16 each│ zeros │ header's checksum ││ block 0 │ block 1 │ …  │ pad │
    └────────┴─────────────────┴────────────────────┴───────┴──────────────────┘└─────────┴─────────┴────┴─────┘

Checksums are XXH3-128. Whatever is read is untrusted: lengths are compared with what the reader expects before any
of them is used.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Literal

import xxhash

ALIGN = 4096
"""Offsets, headers and record lengths are multiples of it, as direct I/O asks for."""
KEY_BYTES, SUM_BYTES = 32, 16
MOST_BLOCKS = 4096
"""Of one record."""
MAGIC = b"DSFKVREC"
VERSION = 1
_FIXED = struct.Struct("<8sHBxIIIQQ32s32sdd")
Kind = Literal["rows", "snapshot"]
KINDS: tuple[Kind, ...] = ("rows", "snapshot")


def aligned(n: int) -> int:
    """``n`` rounded up to a multiple of ALIGN."""
    return -(-n // ALIGN) * ALIGN


def header_bytes(blocks: int) -> int:
    """Length of the header of a record of so many blocks: its payload starts there."""
    return aligned(_FIXED.size + blocks * (KEY_BYTES + SUM_BYTES) + SUM_BYTES)


def record_bytes(blocks: int, block_bytes: int) -> int:
    """Length of a whole record, padding included."""
    return header_bytes(blocks) + aligned(blocks * block_bytes)


@dataclass(frozen=True, slots=True)
class Header:
    """What a record says about itself."""

    kind: Kind
    identity: bytes
    """32 bytes: weights, layout, types, code. Another identity's record is of no use."""
    parent: bytes
    """Key of the block before the first; of the block itself for a snapshot; zeros at a chain's start."""
    depth: int
    """Blocks before the first."""
    keys: tuple[bytes, ...]
    sums: tuple[bytes, ...]
    block_bytes: int
    created: float
    """Seconds since the epoch."""
    cost: float
    """Seconds that computing it took."""

    @property
    def length(self) -> int:
        return record_bytes(len(self.keys), self.block_bytes)

    @property
    def payload_at(self) -> int:
        return header_bytes(len(self.keys))


def checksum(data: memoryview | bytes) -> bytes:
    """XXH3-128."""
    return xxhash.xxh3_128_digest(data)


def seal(header: Header, buffer: memoryview) -> None:
    """Write the header, its checksum last, in front of a payload that lies at ``header.payload_at``, and clear the
    padding behind."""
    end = header.payload_at
    head = _FIXED.pack(
        MAGIC,
        VERSION,
        KINDS.index(header.kind),
        end,
        len(header.keys),
        header.depth,
        header.block_bytes,
        len(header.keys) * header.block_bytes,
        header.identity,
        header.parent,
        header.created,
        header.cost,
    )
    head += b"".join(header.keys) + b"".join(header.sums)
    head = head.ljust(end - SUM_BYTES, b"\0")
    buffer[:end] = head + checksum(head)
    used = end + len(header.keys) * header.block_bytes
    buffer[used : header.length] = bytes(header.length - used)


def sums_of(payload: memoryview, blocks: int) -> tuple[bytes, ...]:
    """The checksum of each of ``blocks`` equal parts."""
    each = len(payload) // blocks
    return tuple(checksum(payload[i * each : (i + 1) * each]) for i in range(blocks))


def parse(data: memoryview, *, verify: bool = True) -> Header | None:
    """The header at the start of ``data``, or None if there is no whole, valid one.

    ``data`` must hold all of it; nothing is allocated that is larger than ``data``. ``verify=False`` leaves the
    checksum out, for a test that shows what it is good for.
    """
    if len(data) < ALIGN:
        return None
    magic, version, kind, end, blocks, depth, block_bytes, payload, identity, parent, created, cost = (
        _FIXED.unpack_from(data)
    )
    if magic != MAGIC or version != VERSION or kind >= len(KINDS) or not 1 <= blocks <= MOST_BLOCKS:
        return None
    if end != header_bytes(blocks) or end > len(data) or payload != blocks * block_bytes:
        return None
    if verify and checksum(data[: end - SUM_BYTES]) != bytes(data[end - SUM_BYTES : end]):
        return None
    at = _FIXED.size
    keys = _cut(data, at, blocks, KEY_BYTES)
    sums = _cut(data, at + blocks * KEY_BYTES, blocks, SUM_BYTES)
    return Header(KINDS[kind], identity, parent, depth, keys, sums, block_bytes, created, cost)


def good_blocks(header: Header, payload: memoryview, first: int, count: int) -> int:
    """How many of the blocks from ``first`` on, at most ``count``, are what was written. ``payload`` starts with
    the record's first block."""
    size = header.block_bytes
    for i in range(first, first + count):
        if checksum(payload[i * size : (i + 1) * size]) != header.sums[i]:
            return i - first
    return count


def _cut(data: memoryview, at: int, count: int, size: int) -> tuple[bytes, ...]:
    return tuple(bytes(data[at + i * size : at + (i + 1) * size]) for i in range(count))
