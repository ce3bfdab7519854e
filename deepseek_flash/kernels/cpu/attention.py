"""Paged attention by fixed tiles, so that a token's bits depend on its own context only.

Keys are cut into tiles of ``TILE`` positions at absolute multiples of ``TILE``. For every query row: the scores of a
tile (one small matrix product of fixed inner shape), the exact maximum over all tiles, exponentials, the sum and the
weighted values of each tile, and the tiles added one after the other in order. Positions of the future get weights of
exactly zero, so a tile of them changes nothing.
Decode computes the tiles of all sequences at once and prefill loops over them: the same numbers in the same order, so
chunking, batch mix, prefix hits and preemption leave the bits alone.

Positions past a sequence's end are read from its last row instead, so that whatever unused rows hold (NaN included)
never meets a multiplication; their scores are the last row's, which leaves the maximum alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepseek_flash.kernels.cpu.paged import flat_rows
from deepseek_flash.kernels.op import Impl
from deepseek_flash.kernels.plan import AttentionPlan

TILE = 128
"""Positions of a tile."""
_ROWS, _WIDE, _WIDE_ROWS = 8, 128, 16
"""Least rows of a matrix product, for heads up to ``_WIDE`` values and for wider ones: below, BLAS switches to kernels
with another order of summation (measured: from 192 values on with 8 rows, never with 16)."""
_QUERIES = 256
"""Most tokens of a prefill block."""
_SCORE_BYTES = 32 << 20
"""Cap on one score buffer (exceeded only by a single token whose own scores need more)."""
_GATHER_BYTES = 32 << 20
"""Cap on keys, or values, gathered at once."""
_HIDDEN = float("-inf")
_LEAST = -87.0
"""Scores below the maximum stop here: exp(-87) is the end of normal numbers, and beyond it (-inf included) the vector
exp is 10 to 50 times slower. Weights of 1e-38 and less are not told apart."""


@dataclass(frozen=True, slots=True)
class _Shape:
    """What indices depend on besides the plan; equal for all layers of a model."""

    heads: int
    kv_heads: int
    dim: int
    block_size: int
    per_block: int
    """Elements from one block to the next."""

    @classmethod
    def of(cls, q: torch.Tensor, cache: torch.Tensor) -> _Shape:
        return cls(q.shape[1], cache.shape[2], q.shape[2], cache.shape[1], cache.stride(0))

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def least_rows(self) -> int:
        """Of a matrix product."""
        return _ROWS if self.dim <= _WIDE else _WIDE_ROWS

    @property
    def flat(self) -> bool:
        return self.per_block % self.dim == 0

    @property
    def tile_bytes(self) -> int:
        """Keys of one tile, all kv heads, fp32."""
        return self.kv_heads * TILE * self.dim * 4


@dataclass(frozen=True, slots=True)
class _Rows:
    """Cache rows of ``tiles`` tiles: [tiles, kv heads, TILE] indices into the flat view, or (block, row, head)."""

    tiles: int
    index: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, shape: _Shape, blocks: torch.Tensor, row: torch.Tensor) -> _Rows:
        """From block ids and rows inside the block, both [tiles, TILE]."""
        head = torch.arange(shape.kv_heads).view(1, -1, 1)
        blocks, row = blocks[:, None], row[:, None]
        if shape.flat:
            where = blocks * (shape.per_block // shape.dim) + row * shape.kv_heads + head
            return cls(len(blocks), (where.flatten(),))
        return cls(len(blocks), (blocks, row, head))

    def pieces(self, shape: _Shape) -> list[tuple[int, int, _Rows]]:
        """Consecutive (from, to, rows) whose gathered keys stay under the cap."""
        step = max(1, _GATHER_BYTES // shape.tile_bytes)
        if self.tiles <= step:
            return [(0, self.tiles, self)]
        cuts = [(a, min(a + step, self.tiles)) for a in range(0, self.tiles, step)]
        if shape.flat:
            per_tile = shape.kv_heads * TILE
            return [(a, b, _Rows(b - a, (self.index[0][a * per_tile : b * per_tile],))) for a, b in cuts]
        block, row, head = self.index
        return [(a, b, _Rows(b - a, (block[a:b], row[a:b], head))) for a, b in cuts]


def _gather(cache: torch.Tensor, rows: _Rows) -> torch.Tensor:
    """Keys or values [tiles * kv heads, TILE, D], contiguous."""
    dim = cache.shape[3]
    if len(rows.index) == 1:
        flat = flat_rows(cache, dim)
        if flat is not None:
            return flat.index_select(0, rows.index[0]).view(-1, TILE, dim)
    return cache[rows.index].reshape(-1, TILE, dim)


@dataclass(frozen=True, slots=True)
class _Decode:
    """Sequences with one new token each, all their (sequence, tile) pairs side by side."""

    tokens: torch.Tensor
    """int64 [S], rows of q."""
    everything: bool
    """Whether these are all rows of q, in order."""
    queries: torch.Tensor
    """int64 [pairs * kv heads * M], rows of q seen as [T * heads, D]; M rows for each kv head, padded."""
    width: int
    """M."""
    pieces: list[tuple[int, int, _Rows]]
    visible: torch.Tensor
    """fp32 [pairs * kv heads, 1, TILE], 1 or 0."""
    owner: torch.Tensor
    """int64 [pairs], the sequence of each."""
    padded: torch.Tensor
    """int64 [S * most tiles], pairs of each sequence, its first one repeated at the end."""


@dataclass(frozen=True, slots=True)
class _Block:
    """Up to ``_QUERIES`` consecutive new tokens of one sequence."""

    start: int
    stop: int
    """Rows of q."""
    pick: torch.Tensor | None
    """Rows of the block with the last one repeated, when padding is needed."""
    tiles: int
    pieces: list[tuple[int, int, _Rows]]
    masks: dict[int, tuple[torch.Tensor, torch.Tensor]]
    """Tile → two fp32 [1, M, TILE]: 0 or -inf to add, 1 or 0 to multiply with; tiles not listed are visible to all."""


def paged_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, plan: AttentionPlan, scale: float
) -> torch.Tensor:
    shape = _Shape.of(q, k_cache)
    layout = plan.scratch.get(shape)
    if layout is None:
        layout = plan.scratch[shape] = _lay_out(shape, plan)
    decodes, blocks = layout
    q = q * scale  # here, not as the product's alpha, which BLAS applies differently from shape to shape
    if not blocks and len(decodes) == 1 and decodes[0].everything:
        return _decode(q, k_cache, v_cache, decodes[0], shape)
    out = torch.empty_like(q)
    for d in decodes:
        out.index_copy_(0, d.tokens, _decode(q, k_cache, v_cache, d, shape))
    for b in blocks:
        out[b.start : b.stop] = _prefill(q, k_cache, v_cache, b, shape)
    return out


def _decode(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, d: _Decode, shape: _Shape) -> torch.Tensor:
    kv, dim, m, s = shape.kv_heads, shape.dim, d.width, len(d.tokens)
    pairs = len(d.owner)
    rows = q.reshape(-1, dim).index_select(0, d.queries).view(pairs * kv, m, dim)
    if len(d.pieces) == 1:
        keys = _gather(k_cache, d.pieces[0][2])
        scores = torch.bmm(rows, keys.transpose(1, 2))
    else:
        scores = q.new_empty(pairs * kv, m, TILE)
        for a, b, where in d.pieces:
            keys = _gather(k_cache, where).transpose(1, 2)
            at = slice(a * kv, b * kv)
            torch.bmm(rows[at], keys, out=scores[at])
    top = scores.amax(-1)
    if pairs > s:
        top = top.view(pairs, -1)
        if s == 1:
            top = top.amax(0, keepdim=True).expand(pairs, -1)
        else:
            top = top.index_select(0, d.padded).view(s, -1, kv * m).amax(1).index_select(0, d.owner)
        top = top.reshape(pairs * kv, m)
    weights = scores.sub_(top.unsqueeze(-1)).clamp_(min=_LEAST).exp_().mul_(d.visible)
    total = weights.sum(-1)
    if pairs == s:
        values = torch.bmm(weights, _gather(v_cache, d.pieces[0][2])) if len(d.pieces) == 1 else None
    else:
        values = None
        total = q.new_zeros(s, kv * m).index_add_(0, d.owner, total.view(pairs, -1))
    if values is None:  # index_add_ adds row after row, in order
        values = q.new_zeros(s, kv * m * dim)
        for a, b, where in d.pieces:
            part = torch.bmm(weights[a * kv : b * kv], _gather(v_cache, where))
            values.index_add_(0, d.owner[a:b], part.view(b - a, -1))
    out = values.view(s, kv, m, dim).div_(total.view(s, kv, m, 1))
    return out[:, :, : shape.group].reshape(s, shape.heads, dim)


def _prefill(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, b: _Block, shape: _Shape) -> torch.Tensor:
    kv, dim, group, new = shape.kv_heads, shape.dim, shape.group, b.stop - b.start
    rows = q[b.start : b.stop]
    if b.pick is not None:
        rows = rows.index_select(0, b.pick)
    rows = rows.view(-1, kv, group, dim).transpose(0, 1).reshape(kv, -1, dim)
    scores = q.new_empty(b.tiles, kv, rows.shape[1], TILE)
    for first, last, where in b.pieces:
        keys = _gather(k_cache, where).view(-1, kv, TILE, dim).transpose(2, 3)
        for t in range(first, last):
            mask = b.masks.get(t)
            if mask is None:
                torch.bmm(rows, keys[t - first], out=scores[t])
            else:
                torch.baddbmm(mask[0], rows, keys[t - first], out=scores[t])
    top = scores.amax(-1).amax(0)
    weights = scores.sub_(top.unsqueeze(-1)).clamp_(min=_LEAST).exp_()
    for t, (_, seen) in b.masks.items():
        weights[t].mul_(seen)
    totals = weights.sum(-1)
    total, values = totals[0], None
    for t in range(1, b.tiles):
        total = total + totals[t]
    for first, last, where in b.pieces:
        gathered = _gather(v_cache, where).view(-1, kv, TILE, dim)
        for t in range(first, last):
            part = torch.bmm(weights[t], gathered[t - first])
            values = part if values is None else values.add_(part)
    assert values is not None
    out = values.div_(total.unsqueeze(-1)).view(kv, -1, group, dim).transpose(0, 1)
    return out[:new].reshape(new, shape.heads, dim)


def _lay_out(shape: _Shape, plan: AttentionPlan) -> tuple[list[_Decode], list[_Block]]:
    """Everything that depends on lengths and block tables; read by every layer of the step."""
    counts = [b - a for a, b in zip(plan.cu_q, plan.cu_q[1:], strict=False)]
    singles = [s for s, n in enumerate(counts) if n == 1]
    decodes = [_decode_layout(shape, plan, part) for part in _score_groups(shape, plan, singles)]
    blocks = [b for s, n in enumerate(counts) if n > 1 for b in _blocks(shape, plan, s)]
    return decodes, blocks


def _tiles(context: int) -> int:
    return -(-context // TILE)


def _score_groups(shape: _Shape, plan: AttentionPlan, singles: list[int]) -> list[list[int]]:
    """Cut the decoding sequences where their scores would outgrow the buffer."""
    per_tile = shape.kv_heads * max(shape.group, shape.least_rows) * TILE * 4
    out: list[list[int]] = []
    held = _SCORE_BYTES
    for s in singles:
        need = _tiles(plan.context_lens[s]) * per_tile
        if not out or held + need > _SCORE_BYTES:
            out.append([])
            held = 0
        out[-1].append(s)
        held += need
    return out


def _decode_layout(shape: _Shape, plan: AttentionPlan, which: list[int]) -> _Decode:
    kv, group = shape.kv_heads, shape.group
    m = max(group, shape.least_rows)
    lens = [plan.context_lens[s] for s in which]
    counts = [_tiles(n) for n in lens]
    pairs, most = sum(counts), max(counts)
    owner = torch.repeat_interleave(torch.arange(len(which)), torch.tensor(counts))
    first = torch.tensor([0, *counts]).cumsum(0)[:-1]
    tile = torch.arange(pairs) - first[owner]
    context = torch.tensor(lens)[owner, None]
    at = tile[:, None] * TILE + torch.arange(TILE)  # [pairs, TILE] absolute positions
    real = at.minimum(context - 1)
    sequence = torch.tensor(which)
    blocks = plan.block_table[sequence[owner][:, None], real // shape.block_size]
    rows = _Rows.of(shape, blocks, real % shape.block_size)
    visible = (at < context).to(torch.float32)[:, None]
    tokens = torch.tensor([plan.cu_q[s] for s in which])
    member = torch.arange(m).clamp(max=group - 1)
    head = torch.arange(kv)[:, None] * group + member  # [kv, M]
    queries = tokens[owner][:, None, None] * shape.heads + head
    steps = torch.arange(most)
    padded = first[:, None] + torch.where(steps < torch.tensor(counts)[:, None], steps, 0)
    return _Decode(
        tokens=tokens,
        everything=len(which) == plan.cu_q[-1],
        queries=queries.flatten(),
        width=m,
        pieces=rows.pieces(shape),
        visible=visible.expand(pairs, kv, TILE).reshape(pairs * kv, 1, TILE),
        owner=owner,
        padded=padded.flatten(),
    )


def _blocks(shape: _Shape, plan: AttentionPlan, s: int) -> list[_Block]:
    start, stop, context = plan.cu_q[s], plan.cu_q[s + 1], plan.context_lens[s]
    new = stop - start
    per_query = shape.heads * _tiles(context) * TILE * 4
    least = -(-shape.least_rows // shape.group)
    size = max(least, min(_QUERIES, _SCORE_BYTES // per_query))
    at = torch.arange(_tiles(context) * TILE).view(-1, TILE)
    real = at.clamp(max=context - 1)
    rows = _Rows.of(shape, plan.block_table[s, real // shape.block_size], real % shape.block_size)
    out = []
    for a in range(0, new, size):
        b = min(a + size, new)
        begin, end = context - new + a, context - new + b  # positions
        pick = torch.arange(least).clamp(max=b - a - 1) if b - a < least else None
        position = torch.arange(begin, end) if pick is None else begin + pick
        row = position.repeat_interleave(shape.group)[None, :, None]
        tiles = _tiles(end)
        masks = {t: _masks(at[t] <= row) for t in range(begin // TILE, tiles)}
        visible = _Rows(tiles, rows.index) if tiles == rows.tiles else _first(rows, tiles, shape)
        out.append(_Block(start + a, start + b, pick, tiles, visible.pieces(shape), masks))
    return out


def _masks(seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(seen.shape).masked_fill_(~seen, _HIDDEN), seen.to(torch.float32)


def _first(rows: _Rows, tiles: int, shape: _Shape) -> _Rows:
    """The first ``tiles`` tiles."""
    if shape.flat:
        return _Rows(tiles, (rows.index[0][: tiles * shape.kv_heads * TILE],))
    block, row, head = rows.index
    return _Rows(tiles, (block[:tiles], row[:tiles], head))


PAGED_ATTENTION = Impl("paged_attention", "torch-cpu", paged_attention)
