"""Whether this machine keeps the promise that a row's bits do not depend on the rows beside it."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from deepseek_flash.kernels.cpu.attention import TILE
from deepseek_flash.kernels.cpu.linear import linear, onednn_missing, pack_linear


class Invariance(NamedTuple):
    """``holds``, and if not, why."""

    holds: bool
    reason: str = ""


@lru_cache(maxsize=1)
def rows_are_invariant() -> Invariance:
    """Try the matrix products of the CPU kernels on this machine: some milliseconds, once a process."""
    reason = onednn_missing()
    if reason is not None:
        return Invariance(False, f"{reason}, and BLAS chooses the order of summation by the number of rows")
    gen = torch.Generator().manual_seed(0)
    for k, n in ((64, 96), (100, 37), (576, 192), (1536, 64)):
        weight = torch.randn(n, k, generator=gen)
        x = torch.randn(300, k, generator=gen)
        packed = pack_linear(weight)
        full = linear(x, packed)
        for rows in (1, 2, 3, 8, 17, 64, 129, 300):
            for form in (packed, weight):
                if not torch.equal(linear(x[:rows], form), full[:rows]):
                    return Invariance(False, f"oneDNN linear {k} to {n} differs between {rows} and 300 rows")
    for dim, least in ((8, 8), (16, 8), (64, 8), (80, 8), (128, 8), (192, 16), (256, 16)):
        keys = torch.randn(3, TILE, dim, generator=gen)
        q = torch.randn(3, 768, dim, generator=gen)
        scores = torch.bmm(q, keys.transpose(1, 2))
        values = torch.bmm(scores, keys)
        none = torch.zeros(1, 1, TILE)
        for rows in (least, least + 1, 24, 129, 767):
            some = torch.baddbmm(none, q[1:2, :rows], keys[1:2].transpose(1, 2))
            if not torch.equal(some, scores[1:2, :rows]):
                return Invariance(False, f"batched product q k^T, {dim} wide, differs between {rows} and 768 rows")
            if not torch.equal(torch.bmm(some, keys[1:2]), values[1:2, :rows]):
                return Invariance(False, f"batched product w v, {dim} wide, differs between {rows} and 768 rows")
    return Invariance(True)
