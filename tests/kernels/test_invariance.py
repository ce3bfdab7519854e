"""A row's bits depend on that row only: not on how many rows, sequences or chunks come with it."""

from __future__ import annotations

import pytest
import torch

from deepseek_flash.kernels.cpu import attention
from deepseek_flash.kernels.cpu.probe import rows_are_invariant
from deepseek_flash.kernels.ops.attention import paged_case
from deepseek_flash.kernels.plan import AttentionPlan
from deepseek_flash.kernels.registry import select

needs_invariance = pytest.mark.skipif(
    not rows_are_invariant().holds, reason=f"not on this machine: {rows_are_invariant().reason}"
)
K = select("cpu")
COUNTS = (1, 2, 3, 7, 8, 17, 64, 129, 700)


def _gen() -> torch.Generator:
    return torch.Generator().manual_seed(3)


@needs_invariance
@pytest.mark.parametrize("shape", [(64, 96), (100, 37), (33, 1), (576, 960)])
@pytest.mark.parametrize("packed", [True, False])
def test_linear(shape: tuple[int, int], packed: bool) -> None:
    gen = _gen()
    weight, bias, x = torch.randn(shape[1], shape[0], generator=gen), torch.randn(shape[1]), torch.randn(700, shape[0])
    w = K.pack_linear(weight) if packed else weight
    full = K.linear(x, w, bias)
    for n in COUNTS:
        assert torch.equal(K.linear(x[:n], w, bias), full[:n])
        assert torch.equal(K.linear(x[-n:], w, bias), full[-n:])


@pytest.mark.parametrize("dim", [33, 64, 100, 576])
def test_norms_and_gate(dim: int) -> None:
    x, r = torch.randn(700, dim, generator=_gen()), torch.randn(700, dim, generator=_gen())
    w = torch.randn(dim)
    norm, (added, total), gate = K.rms_norm(x, w, 1e-5), K.add_rms_norm(x, r, w, 1e-5), K.silu_mul(torch.cat((x, r), 1))
    for n in COUNTS:
        assert torch.equal(K.rms_norm(x[:n], w, 1e-5), norm[:n])
        some, sums = K.add_rms_norm(x[-n:], r[-n:], w, 1e-5)
        assert torch.equal(some, added[-n:])
        assert torch.equal(sums, total[-n:])
        assert torch.equal(K.silu_mul(torch.cat((x[-n:], r[-n:]), 1)), gate[-n:])


@pytest.mark.parametrize("dim", [6, 64])
def test_rope_and_head_norms(dim: int) -> None:
    x, cos, sin = torch.randn(700, 5, dim, generator=_gen()), torch.randn(700, 1, dim), torch.randn(700, 1, dim)
    w = torch.randn(5, dim)
    full, normed = K.rope(x, cos, sin), K.rms_norm(x, w, 1e-6)
    for n in COUNTS:
        assert torch.equal(K.rope(x[-n:], cos[-n:], sin[-n:]), full[-n:])
        assert torch.equal(K.rms_norm(x[-n:], w, 1e-6), normed[-n:])


def _chunk(plan: AttentionPlan, s: int, first: int, last: int) -> AttentionPlan:
    """Only tokens ``first..last`` of sequence s."""
    return AttentionPlan((0, last - first), (last,), plan.block_table[s : s + 1], torch.empty(0, dtype=torch.int64))


SHAPES = [
    (9, 3, 64, 16),
    (4, 4, 6, 5),
    (16, 1, 16, 32),
    (8, 8, 128, 100),
    (2, 1, 8, 1),
    (7, 1, 192, 17),
    (3, 3, 256, 64),
    (6, 2, 20, 3),
]


@needs_invariance
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block_size"), SHAPES)
def test_attention_ignores_chunks_and_neighbours(heads: int, kv_heads: int, dim: int, block_size: int) -> None:
    lens = [(n, n) for n in (1, 2, 127, 128, 129, 300, 513)]
    q, k, v, plan, scale = paged_case(
        _gen(), lens, heads=heads, kv_heads=kv_heads, dim=dim, block_size=block_size, pad=dim
    )
    full = K.paged_attention(q, k, v, plan, scale)
    for s, (_, context) in enumerate(lens):
        a = plan.cu_q[s]
        for last in range(2, min(context, 20)):  # few rows: BLAS likes to treat them specially
            some = K.paged_attention(q[a : a + last], k, v, _chunk(plan, s, 0, last), scale)
            assert torch.equal(some, full[a : a + last]), (context, last)
        for first, last in {(0, context), (context - 1, context), (context // 2, context), (0, (context + 1) // 2)}:
            some = K.paged_attention(q[a + first : a + last], k, v, _chunk(plan, s, first, last), scale)
            assert torch.equal(some, full[a + first : a + last]), (context, first, last)
    ends = torch.tensor(plan.cu_q[1:]) - 1
    table = plan.block_table
    decode = AttentionPlan(tuple(range(len(lens) + 1)), plan.context_lens, table, torch.empty(0, dtype=torch.int64))
    assert torch.equal(K.paged_attention(q[ends], k, v, decode, scale), full[ends])


@needs_invariance
def test_attention_ignores_its_memory_caps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of queries, groups of sequences and pieces of keys are cut for memory; bits stay, and so does the sum."""
    for block_size in (16, 5):
        lens = [(300, 700), (1, 500), (1, 40), (1, 900), (33, 40)]
        q, k, v, plan, scale = paged_case(_gen(), lens, heads=6, kv_heads=2, dim=16, block_size=block_size, pad=3)
        full = K.paged_attention(q, k, v, plan, scale)
        for scores, gathered, queries in ((1, 1, 256), (1 << 17, 1 << 15, 256), (1 << 30, 1 << 30, 100)):
            monkeypatch.setattr(attention, "_SCORE_BYTES", scores)
            monkeypatch.setattr(attention, "_GATHER_BYTES", gathered)
            monkeypatch.setattr(attention, "_QUERIES", queries)
            again = AttentionPlan(plan.cu_q, plan.context_lens, plan.block_table, plan.slots)
            assert torch.equal(K.paged_attention(q, k, v, again, scale), full)


def test_probe_gives_a_reason_when_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    rows_are_invariant.cache_clear()
    try:
        monkeypatch.setattr("deepseek_flash.kernels.cpu.probe.linear", lambda x, w: x.new_full((len(x), 1), len(x)))
        found = rows_are_invariant()
        assert not found.holds
        assert "oneDNN linear" in found.reason
    finally:
        rows_are_invariant.cache_clear()
