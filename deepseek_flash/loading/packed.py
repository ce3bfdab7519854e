"""Weights that go to memory as they are stored, or are quantised on the way; a piece of a tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from deepseek_flash.kernels.weights import PANEL, PackedWeight, PlainWeight, WeightFormat, alloc
from deepseek_flash.loading.flash import FlashFolder
from deepseek_flash.loading.source import TensorIndex, TensorSource
from deepseek_flash.quant.encode import encode, format_of

PIECE_VALUES = 1 << 20
"""Values unpacked at a time."""
EIGHT_BITS = ("embed.weight", "head.weight")
"""Targets that ``quantize="int4"`` keeps at 8 bits: errors of embeddings and of the head reach every token."""

Packer = Callable[[PackedWeight, int, PlainWeight], None]


@dataclass(frozen=True, slots=True)
class Part:
    """One packed weight to be: rows of some checkpoint tensors, one below the other."""

    format: WeightFormat
    sources: tuple[str, ...]
    rows: int
    k: int

    @property
    def nbytes(self) -> int:
        """Packed bytes."""
        return self.format.packed_bytes(self.rows, self.k)


def parts_of(
    target: str, sources: Sequence[str], source: TensorIndex, quantize: str | None, group: int = 32
) -> list[Part]:
    """How a weight will be kept: neighbours of one format become one part where panels of 16 rows allow it."""
    parts: list[Part] = []
    for name in sources:
        rows, k = source.shape(name)
        form = source.weight_format(name)
        if quantize is not None:
            form = format_of("int8" if target in EIGHT_BITS else quantize, group)
        before = parts[-1] if parts else None
        if before is not None and before.format == form and before.rows % PANEL == 0:
            parts[-1] = Part(form, (*before.sources, name), before.rows + rows, k)
        else:
            parts.append(Part(form, (name,), rows, k))
    return parts


def read_part(part: Part, source: TensorSource, pack: Packer) -> PackedWeight:
    """Allocate and fill; a weight that a flash folder holds as it is wanted is used where it lies."""
    name = part.sources[0]
    if isinstance(source, FlashFolder) and len(part.sources) == 1 and part.format == source.weight_format(name):
        return source.mapped(name)
    packed = alloc(part.format, part.rows, part.k)
    first = 0
    for plain in _pieces(part, source):
        pack(packed, first, plain)
        first += plain.n
    return packed


def _pieces(part: Part, source: TensorSource) -> Iterator[PlainWeight]:
    step = max(PIECE_VALUES // part.k // PANEL, 1) * PANEL
    for name in part.sources:
        rows = source.shape(name)[0]
        for first in range(0, rows, step):
            count = min(step, rows - first)
            if source.weight_format(name) == part.format:
                yield source.weight_rows(name, first, count)
            else:
                yield encode(source.float_rows(name, first, count), part.format, name)
