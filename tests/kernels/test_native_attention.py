"""The C++ attention and cache kernels: every cache type against the reference; neighbours, chunks, threads, sets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from deepseek_flash.errors import InternalError
from deepseek_flash.kernels.cpu import lib
from deepseek_flash.kernels.cpu.native import Native
from deepseek_flash.kernels.ops.attention import paged_attention, paged_case
from deepseek_flash.kernels.ops.cache import rope_and_cache_write
from deepseek_flash.kernels.ops.rope import tables
from deepseek_flash.kernels.plan import AttentionPlan, Cache, QuantCache
from tests.kernels.paged import DTYPES, copied, lying, stored

LIBRARY = lib.load()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason=f"no native kernels: {lib.why_missing()}")

SHAPES = [(9, 3, 64, 16), (4, 4, 6, 5), (16, 1, 16, 32), (8, 8, 128, 100), (2, 1, 2, 1), (7, 1, 192, 17), (6, 2, 80, 3)]
"""heads, kv heads, dim, block size"""
TURNED = [(9, 3, 64, 16), (16, 1, 16, 32), (8, 8, 128, 48), (4, 2, 6, 16), (7, 1, 80, 16), (1, 1, 1, 16)]
"""Shapes whose keys can lie turned."""
LAYOUTS = [*((s, False) for s in SHAPES), *((s, True) for s in TURNED)]
LENS = [(1, 40), (5, 5), (1, 257), (65, 200), (2, 512), (4, 300), (120, 700), (1, 1)]


@pytest.fixture(autouse=True)
def best_isa() -> Iterator[None]:
    yield
    assert LIBRARY is not None
    LIBRARY.functions.flash_use_isa(None)


def _case(
    shape: tuple[int, int, int, int], dtype: str, lens: list[tuple[int, int]], turned: bool = False
) -> tuple[torch.Tensor, Cache, Cache, AttentionPlan, float]:
    heads, kv_heads, dim, block_size = shape
    gen = torch.Generator().manual_seed(7)
    q, k, v, plan, scale = paged_case(gen, lens, heads=heads, kv_heads=kv_heads, dim=dim, block_size=block_size)
    keys, values = stored(k, dtype), stored(v, dtype)
    if turned:
        keys, values = lying(keys, "turned"), lying(values, "heads")
    return q, keys, values, plan, scale


def _only(plan: AttentionPlan, s: int, first: int, last: int) -> AttentionPlan:
    """Positions first .. last of sequence s."""
    table = plan.block_table[s : s + 1]
    return AttentionPlan((0, last - first), (last,), table, torch.zeros(last - first, dtype=torch.int64))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "turned"), LAYOUTS)
def test_equals_reference_on_every_instruction_set(shape: tuple[int, int, int, int], turned: bool, dtype: str) -> None:
    q, k, v, plan, scale = _case(shape, dtype, LENS, turned)
    want = paged_attention(q, k, v, plan, scale)
    assert LIBRARY is not None
    outs = []
    for isa in LIBRARY.isas:
        assert LIBRARY.functions.flash_use_isa(isa.encode()) == 0
        outs.append(Native(2).paged_attention(q, k, v, plan, scale))
    assert (outs[0] - want).abs().max() <= 1e-5 * want.abs().max()
    for isa, out in zip(LIBRARY.isas, outs, strict=True):
        assert torch.equal(out, outs[0]), isa


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", TURNED)
def test_the_order_of_a_block_changes_no_bit(shape: tuple[int, int, int, int], dtype: str) -> None:
    q, k, v, plan, scale = _case(shape, dtype, LENS)
    turned = _case(shape, dtype, LENS, turned=True)
    assert torch.equal(Native(2).paged_attention(*turned), Native(2).paged_attention(q, k, v, plan, scale))


@pytest.mark.parametrize("dtype", ["float16", "int8"])
@pytest.mark.parametrize(("shape", "turned"), [*LAYOUTS[:4], *LAYOUTS[-6:-2]])
def test_same_bits_alone_in_chunks_and_with_other_threads(
    shape: tuple[int, int, int, int], turned: bool, dtype: str
) -> None:
    q, k, v, plan, scale = _case(shape, dtype, LENS, turned)
    full = Native(3).paged_attention(q, k, v, plan, scale)
    one = Native(1)
    for s, (new, context) in enumerate(LENS):
        a = plan.cu_q[s]
        for chunk in (1, 3, 33, new):
            for i in range(0, new, chunk):
                n = min(chunk, new - i)
                first = context - new + i
                out = one.paged_attention(q[a + i : a + i + n], k, v, _only(plan, s, first, first + n), scale)
                assert torch.equal(out, full[a + i : a + i + n]), (s, chunk, i)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("heads", [4, 6, 7, 24, 25, 32, 71, 130])
def test_many_heads_of_one_kv_head(heads: int, turned: bool) -> None:
    """A few tokens of one sequence may be more rows than an item holds; each gets what it would get alone."""
    lens = [(4, 300), (1, 257), (2, 70), (3, 600), (1, 1)]
    q, k, v, plan, scale = _case((heads, 1, 64, 16), "float16", lens, turned)
    want = paged_attention(q, k, v, plan, scale)
    full = Native(2).paged_attention(q, k, v, plan, scale)
    assert (full - want).abs().max() <= 1e-5 * want.abs().max()
    for s, (new, context) in enumerate(lens):
        for i in range(new):
            a, last = plan.cu_q[s] + i, context - new + i + 1
            alone = Native(1).paged_attention(q[a : a + 1], k, v, _only(plan, s, last - 1, last), scale)
            assert torch.equal(alone, full[a : a + 1]), (s, i)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_sequences_that_share_blocks_get_what_they_would_get_alone(dtype: str, turned: bool) -> None:
    """A prefix of 600 tokens shared by twelve, of which some see 300 more that they share, and their own ends."""
    gen = torch.Generator().manual_seed(8)
    bs, shared = 16, 38
    contexts = [600 + 16 * (i % 3) + i for i in range(12)]
    blocks = 400
    k, v = (stored(torch.randn(blocks, bs, 3, 64, generator=gen), dtype) for _ in range(2))
    if turned:
        k, v = lying(k, "turned"), lying(v, "heads")
    table = torch.zeros(12, 60, dtype=torch.int64)
    for i in range(12):
        own = shared + 10 + 20 * i + torch.arange(60 - shared)
        table[i] = torch.cat((torch.arange(shared), own))
    counts = [1, 1, 2, 1, 4, 1, 1, 30, 1, 1, 1, 1]
    cu = torch.tensor([0, *counts]).cumsum(0).tolist()
    plan = AttentionPlan(tuple(cu), tuple(contexts), table, torch.zeros(cu[-1], dtype=torch.int64))
    q = torch.randn(cu[-1], 9, 64, generator=gen)
    full = Native(2).paged_attention(q, k, v, plan, 0.125)
    want = paged_attention(q, k, v, plan, 0.125)
    assert (full - want).abs().max() <= 1e-5 * want.abs().max()
    for s in range(12):
        alone = Native(1).paged_attention(
            q[cu[s] : cu[s + 1]], k, v, _only(plan, s, contexts[s] - counts[s], contexts[s]), 0.125
        )
        assert torch.equal(alone, full[cu[s] : cu[s + 1]]), s


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rot"), [(9, 3, 64, 64), (2, 2, 6, 6), (4, 1, 80, 32), (1, 1, 2, 2)]
)
@pytest.mark.parametrize("bs", [5, 16])
def test_rotation_and_cache_write(heads: int, kv_heads: int, dim: int, rot: int, dtype: str, bs: int) -> None:
    """Blocks of 16 with their keys turned."""
    gen = torch.Generator().manual_seed(9)
    tokens, blocks = 37, 12
    qkv = torch.randn(tokens, heads + 2 * kv_heads, dim, generator=gen)
    cos, sin = tables(gen, tokens, rot)
    slots = torch.randperm(blocks * bs, generator=gen)[:tokens]
    plan = AttentionPlan((0, tokens), (tokens,), torch.zeros(1, 1, dtype=torch.int64), slots)
    blank = torch.zeros(blocks, bs, kv_heads, dim)
    args = (qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :], cos, sin)
    mine, theirs = ((stored(blank, dtype), stored(blank, dtype)) for _ in range(2))
    if bs == 16:
        mine = lying(mine[0], "turned"), lying(mine[1], "heads")
    q = Native(2).rope_and_cache_write(*args, *mine, plan)
    want = rope_and_cache_write(*args, *theirs, plan)
    assert torch.allclose(q, want, rtol=1e-6, atol=1e-6)
    for got, expected in zip(mine, theirs, strict=True):
        if isinstance(got, QuantCache) and isinstance(expected, QuantCache):
            assert (got.values.int() - expected.values.int()).abs().max() <= 1
            assert torch.allclose(got.scales.float(), expected.scales.float(), rtol=2e-3)
        else:
            assert isinstance(got, torch.Tensor)
            assert isinstance(expected, torch.Tensor)
            assert torch.allclose(got.float(), expected.float(), rtol=1e-2 if dtype == "bfloat16" else 2e-3, atol=1e-6)


def test_values_beyond_a_type_are_rounded_as_torch_rounds_them() -> None:
    """Halves to even, subnormals, the largest and infinity, on every instruction set."""
    x = torch.tensor(
        [
            0.0,
            -0.0,
            1e-8,
            6e-8,
            5.96e-8,
            6.1e-5,
            65504.0,
            65519.0,
            65520.0,
            1e10,
            2049.0,
            2051.0,
            1 / 3,
            -1.5,
            1e-3,
            3e38,
        ]
    )
    assert LIBRARY is not None
    for isa in LIBRARY.isas:
        LIBRARY.functions.flash_use_isa(isa.encode())
        for dtype in (torch.float16, torch.bfloat16):
            cache = torch.zeros(1, 1, 1, 16, dtype=dtype), torch.zeros(1, 1, 1, 16, dtype=dtype)
            plan = AttentionPlan((0, 1), (1,), torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
            qkv = x.view(1, 1, 16).repeat(1, 3, 1)
            one, none = torch.ones(1, 1, 16), torch.zeros(1, 1, 16)
            Native(1).rope_and_cache_write(qkv[:, :2], qkv[:, 2:], one, none, *cache, plan)
            assert torch.equal(cache[1].view(16), x.to(dtype)), (isa, dtype)


def test_a_value_that_is_no_number_reaches_no_other_sequence_and_no_finished_tile() -> None:
    """Within its tile of 64 it reaches earlier rows of the same call: zero times infinity."""
    lens = [(100, 100), (300, 300), (1, 40)]
    q, k, v, plan, scale = _case((2, 2, 16, 16), "float32", lens)
    assert isinstance(v, torch.Tensor)
    clean = Native(2).paged_attention(q, k, v, plan, scale)
    for bad in (float("inf"), float("nan")):
        broken = copied(v)
        assert isinstance(broken, torch.Tensor)
        broken[plan.block_table[1, 270 // 16], 270 % 16, 0, 3] = bad
        out = Native(2).paged_attention(q, k, broken, plan, scale)
        first = 100 + 256  # the tile of position 270 begins at 256
        assert torch.isnan(out[100 + 270 : 400, 0, 3]).all() or torch.isinf(out[100 + 270 : 400, 0, 3]).all()
        assert torch.equal(out[:first], clean[:first])
        assert torch.equal(out[400:], clean[400:])
        assert torch.equal(out[:, 1], clean[:, 1])


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_keys_and_values_of_other_shapes_or_types_are_refused(dtype: str) -> None:
    q, k, v, plan, scale = _case((2, 2, 16, 16), dtype, [(3, 20)])
    others: list[Cache] = []
    if isinstance(v, QuantCache):
        others = [QuantCache(v.values, v.scales[:, :8]), QuantCache(v.values[:, :8], v.scales), v.values]
    else:
        others = [v[:, :, :1], v.half()]
    for other in others:
        with pytest.raises(InternalError, match="cached alike"):
            Native(1).paged_attention(q, k, other, plan, scale)


def test_orders_that_the_kernels_do_not_know_are_refused() -> None:
    """Keys turned in blocks of five; values turned."""
    for bs, orders in ((5, ("turned", "rows")), (16, ("turned", "turned"))):
        q, k, v, plan, scale = _case((2, 2, 16, bs), "float16", [(3, 20)])
        with pytest.raises(InternalError):
            Native(1).paged_attention(q, lying(k, orders[0]), lying(v, orders[1]), plan, scale)
