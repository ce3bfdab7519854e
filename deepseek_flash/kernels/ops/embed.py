"""Token embedding."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from deepseek_flash.kernels.op import Case, Cost, Op, nbytes, rand


def embedding(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Rows of ``table [vocab, dim]`` for ``ids`` int64 [T] → [T, dim]."""
    return table[ids]


def _inputs(gen: torch.Generator) -> Iterator[Case]:
    for vocab, dim, tokens in ((5, 1, 1), (63, 129, 7), (512, 64, 129)):
        ids = torch.randint(0, vocab, (tokens,), generator=gen)
        yield Case(f"v{vocab} d{dim} t{tokens}", (rand(gen, vocab, dim), ids))


def _cost(table: torch.Tensor, ids: torch.Tensor) -> Cost:
    return Cost(0, 2 * ids.numel() * table.shape[1] * table.element_size() + nbytes(ids))


EMBEDDING = Op("embedding", embedding, _inputs, 0.0, _cost)
