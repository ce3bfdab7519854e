"""BlockPool: one state per block, eviction order, and a check that fails when it should."""

from __future__ import annotations

import pytest

from deepseek_flash.errors import InternalError
from deepseek_flash.kv.blocks import BlockPool


def make(capacity: int = 4) -> tuple[BlockPool, list[int]]:
    evicted: list[int] = []
    return BlockPool(capacity, evicted.append), evicted


def test_every_block_is_handed_out_once_and_never_while_referenced() -> None:
    pool, evicted = make()
    taken = [pool.take() for _ in range(4)]
    assert sorted(taken) == [0, 1, 2, 3]
    assert pool.available == 0
    with pytest.raises(InternalError, match="all 4 blocks are referenced"):
        pool.take()
    pool.release(taken[2])
    assert pool.take() == taken[2]
    assert evicted == []


def test_published_blocks_stay_until_their_room_is_needed() -> None:
    pool, evicted = make(3)
    a, b, c = (pool.take() for _ in range(3))
    pool.keep(a)
    pool.keep(b)
    for block in (b, a, c):
        pool.release(block)
    assert (pool.free, pool.cached, pool.available) == (1, 2, 3)
    assert pool.take() == c, "free blocks go before cached ones"
    assert evicted == []
    assert pool.oldest_cached() == b
    assert pool.take() == b
    assert evicted == [b]
    pool.share(a)
    with pytest.raises(InternalError):
        pool.take()
    assert pool.evictions == 1


def test_sharing_moves_a_block_to_the_recent_end() -> None:
    pool, evicted = make(2)
    a, b = pool.take(), pool.take()
    for block in (a, b):
        pool.keep(block)
        pool.release(block)
    pool.share(a)
    pool.release(a)
    pool.take()
    assert evicted == [b]


def test_forgetting_frees_a_cached_block_and_leaves_a_referenced_one_to_its_holder() -> None:
    pool, _ = make(2)
    a, b = pool.take(), pool.take()
    pool.keep(a)
    pool.keep(b)
    pool.release(a)
    pool.forget(a)
    pool.forget(b)
    assert (pool.free, pool.cached) == (1, 0)
    pool.release(b)
    assert pool.free == 2
    pool.check({})


def test_misuse_is_an_internal_error() -> None:
    pool, _ = make(2)
    a = pool.take()
    pool.release(a)
    for wrong in (
        lambda: pool.release(a),
        lambda: pool.share(a),
        lambda: pool.keep(a),
        lambda: pool.forget(a),
        lambda: BlockPool(0, print),
    ):
        with pytest.raises(InternalError):
            wrong()


def test_check_notices_wrong_counts_and_lost_blocks() -> None:
    pool, _ = make(3)
    a = pool.take()
    pool.check({a: 1})
    for holders in ({}, {a: 2}, {a: 1, a + 1: 1}):
        with pytest.raises(InternalError):
            pool.check(holders)
    pool.release(a)
    pool._free.pop()
    with pytest.raises(InternalError, match="exactly one"):
        pool.check({})


def test_freed_grows_only_when_a_last_holder_lets_go() -> None:
    pool, _ = make(2)
    a = pool.take()
    pool.share(a)
    pool.release(a)
    assert pool.freed == 0
    pool.release(a)
    assert pool.freed == 1


def test_a_pool_shrinks_free_blocks_first_then_cached_ones_then_as_holders_let_go() -> None:
    pool, evicted = make(6)
    taken = [pool.take() for _ in range(5)]
    for block in taken[:2]:
        pool.keep(block)
        pool.release(block)
    assert pool.resize(4) == [5, taken[0]]
    assert evicted == [taken[0]]
    assert pool.resize(2) == [taken[1]]
    assert (pool.owed, pool.available, pool.capacity) == (1, 0, 2)
    pool.release(taken[2])
    assert pool.available == 0  # it is owed
    assert pool.settle() == [taken[2]]
    pool.check({taken[3]: 1, taken[4]: 1})
    assert pool.resize(5) == []
    assert pool.available == 3
    pool.check({taken[3]: 1, taken[4]: 1})


def test_growing_takes_back_what_is_owed_first() -> None:
    pool, _ = make(4)
    taken = [pool.take() for _ in range(4)]
    assert pool.resize(1) == []
    assert pool.owed == 3
    assert pool.resize(3) == []
    assert (pool.owed, pool.available) == (1, 0)
    assert pool.resize(4) == []
    assert (pool.owed, pool.available) == (0, 0)
    pool.check(dict.fromkeys(taken, 1))


def test_a_pool_grows_to_its_bound_and_not_beyond() -> None:
    pool = BlockPool(2, lambda block: None, 5)
    assert pool.available == 2
    pool.resize(5)
    assert sorted(pool.take() for _ in range(5)) == [0, 1, 2, 3, 4]
    for wrong in (0, 6):
        with pytest.raises(InternalError, match="1 to 5 blocks"):
            pool.resize(wrong)
    with pytest.raises(InternalError, match="needs 1 to 5 blocks"):
        BlockPool(6, lambda block: None, 5)
