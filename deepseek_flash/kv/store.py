"""The bytes of the cache on a device: one block-major pool a group, and typed views of it for the layers."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import BinaryIO

import torch

from deepseek_flash.errors import InternalError, MemoryBudgetError
from deepseek_flash.kernels.plan import Cache, QuantCache
from deepseek_flash.kv.blocks import BlockCopy
from deepseek_flash.kv.spec import CacheSpec, Field

_NORESERVE = 0x4000 if sys.platform == "linux" else 0
"""MAP_NORESERVE: a pool maps what it may grow to, not what it uses."""


class KVStore:
    """Pools of ``capacity[g]`` blocks for each group of ``spec``.

    A pool's memory is taken as it is first written, and given back by ``close`` even while views are still held
    somewhere (they must not be used after it). Not thread-safe: only the engine thread touches it.
    """

    def __init__(self, spec: CacheSpec, capacity: Sequence[int], device: str) -> None:
        if len(capacity) != len(spec.groups):
            raise InternalError(f"{len(spec.groups)} cache groups, but capacities {tuple(capacity)}")
        if device != "cpu":
            raise InternalError(f"there is no KVStore for device {device!r}")
        self.spec, self.capacity = spec, tuple(capacity)
        self.nbytes = sum(n * g.block_bytes(spec.block_size) for n, g in zip(self.capacity, spec.groups, strict=True))
        """Bytes of all pools, touched or not."""
        self.pools: list[torch.Tensor] = []
        """Per group: uint8 [blocks, block_bytes]."""
        self._maps: list[mmap.mmap] = []
        self._views: dict[tuple[int, int, str], torch.Tensor] = {}
        self._bytes: list[memoryview] = []
        try:
            for n, g in zip(self.capacity, spec.groups, strict=True):
                block_bytes = g.block_bytes(spec.block_size)
                self.pools.append(self._zeros(n * block_bytes).view(n, block_bytes))
        except (OSError, MemoryError, RuntimeError) as e:  # torch reports a failed allocation as RuntimeError
            self.close()
            raise MemoryBudgetError(
                f"cannot reserve {self.nbytes} bytes of cache ({e}); lower max_model_len or max_batch_size",
                needed=self.nbytes,
            ) from e
        self._views = self._typed_views()

    def view(self, group: int, layer: int, field: str) -> torch.Tensor:
        """One field of one layer: [blocks, rows_per_block, *row shape], strides as the field's order says."""
        return self._views[group, layer, field]

    def cache(self, group: int, layer: int, field: str) -> Cache:
        """Keys or values of one layer as kernels take them: a view, or int8 values with their scales."""
        values = self._views[group, layer, field]
        scales = self._views.get((group, layer, f"{field}_scale"))
        return values if scales is None else QuantCache(values, scales)

    def bytes(self, group: int, block: int) -> memoryview:
        """A block's bytes, to be read or written in place. Not to be kept: ``close`` gives them back."""
        size = self.spec.groups[group].block_bytes(self.spec.block_size)
        if not self._maps:
            return self.pools[group][block].numpy().data
        return self._bytes[group][block * size : (block + 1) * size]

    def apply(self, zero: Iterable[tuple[int, int]] = (), copies: Iterable[BlockCopy] = ()) -> None:
        """Clear (group, block) pairs, then copy blocks one after the other."""
        for group, block in zero:
            self.pools[group][block].zero_()
        for c in copies:
            self.pools[c.group][c.dst].copy_(self.pools[c.group][c.src])

    def discard(self, group: int, blocks: Iterable[int]) -> None:
        """Give the memory of these blocks back to the system; their contents are lost. Pages that they share with
        other blocks stay, and so does everything where the system has no private mappings."""
        if not self._maps or sys.platform != "linux":
            return
        pages, size = self._maps[group], self.spec.groups[group].block_bytes(self.spec.block_size)
        for first, last in _runs(blocks):
            begin = -(-first * size // mmap.PAGESIZE) * mmap.PAGESIZE
            end = (last + 1) * size // mmap.PAGESIZE * mmap.PAGESIZE
            if last + 1 == self.capacity[group]:
                end = -(-(last + 1) * size // mmap.PAGESIZE) * mmap.PAGESIZE
            if end > begin:
                pages.madvise(mmap.MADV_DONTNEED, begin, min(end, len(pages)) - begin)

    def save(self, file: BinaryIO, blocks: Sequence[Sequence[int]]) -> None:
        """Write the bytes of these blocks per group, one after the other. OSError as the file raises it."""
        for group, listed in enumerate(blocks):
            for block in listed:
                file.write(self.bytes(group, block))

    def load(self, file: BinaryIO, blocks: Sequence[Sequence[int]]) -> None:
        """Read back what ``save`` wrote for the same blocks."""
        for group, listed in enumerate(blocks):
            for block in listed:
                into = self.bytes(group, block)
                if file.readinto(into) != len(into):  # type: ignore[attr-defined]
                    raise InternalError("the image of the cache ended early")

    def close(self) -> None:
        """Give the memory back now. Safe to call twice."""
        self._views, self._bytes = {}, []
        for pages in self._maps:
            # The mapping itself goes with its last view; its pages go here.
            pages.madvise(mmap.MADV_DONTNEED if sys.platform == "linux" else mmap.MADV_FREE)
        if not self._maps:
            for pool in self.pools:
                pool.untyped_storage().resize_(0)
        self._maps, self.pools = [], []

    def _zeros(self, n: int) -> torch.Tensor:
        """uint8 [n] zeros whose pages the system hands out when they are written; torch.zeros writes them all."""
        if n == 0 or not hasattr(mmap, "MAP_PRIVATE"):
            return torch.zeros(n, dtype=torch.uint8)
        pages = mmap.mmap(-1, n, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
        self._maps.append(pages)
        self._bytes.append(memoryview(pages))
        return torch.frombuffer(pages, dtype=torch.uint8)

    def _typed_views(self) -> dict[tuple[int, int, str], torch.Tensor]:
        size = self.spec.block_size
        views: dict[tuple[int, int, str], torch.Tensor] = {}
        for i, g in enumerate(self.spec.groups):
            rows = g.rows_per_block(size)
            for f, offset in zip(g.fields, g.field_offsets(size), strict=True):
                if (i, f.layer, f.name) in views:
                    raise InternalError(f"cache group {g.name!r} has field {f.name!r} of layer {f.layer} twice")
                span = self.pools[i][:, offset : offset + f.row_bytes * rows]
                views[i, f.layer, f.name] = _in_order(f, span.view(getattr(torch, f.dtype)), rows)
        return views


def _runs(blocks: Iterable[int]) -> Iterator[tuple[int, int]]:
    """First and last of each run of consecutive numbers."""
    first = last = None
    for block in sorted(blocks):
        if first is None or last is None:
            first = last = block
        elif block == last + 1:
            last = block
        else:
            yield first, last
            first = last = block
    if first is not None and last is not None:
        yield first, last


def _in_order(field: Field, span: torch.Tensor, rows: int) -> torch.Tensor:
    """``span [blocks, rows * items]`` seen as [blocks, rows, *row shape]."""
    if field.order == "rows":
        return span.view(len(span), rows, *field.shape)
    heads, dim = field.shape
    if field.order == "heads":
        return span.view(len(span), heads, rows, dim).transpose(1, 2)
    return span.view(len(span), heads, dim, rows).permute(0, 3, 1, 2)
