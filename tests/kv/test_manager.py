"""KVManager: hits over several groups, snapshots, eviction, ownership."""

from __future__ import annotations

import sys

import pytest

from deepseek_flash.errors import InternalError
from deepseek_flash.kv.manager import KVManager, Shortage
from deepseek_flash.kv.prefix import NONE
from deepseek_flash.kv.spec import CacheSpec, Group
from tests.kv.toys import FIELDS, Driver, rows_spec, toy_spec

PREFIX = list(range(100, 140))


def run(driver: Driver, prompt: list[int], new: int = 1, **options: object) -> int:
    """Serve one request alone; returns how many of its tokens came from the cache."""
    seq = driver.add(prompt, new, **options)  # type: ignore[arg-type]
    driver.drain()
    return seq.cached_tokens


@pytest.mark.parametrize(("length", "cached"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (40, 36), (41, 40)])
def test_K04_a_hit_leaves_at_least_the_last_token_to_compute(length: int, cached: int) -> None:
    """K04, K02: the same prompt again reuses every full block below its last token, never all of it."""
    d = Driver(budget=100)
    prompt = [*PREFIX, 7][:length]
    assert run(d, prompt) == 0
    assert run(d, prompt) == cached
    assert run(d, [*prompt, 1, 2]) == len(prompt) // 4 * 4


def test_K14_a_mismatch_costs_only_what_lies_behind_it() -> None:
    """K14: the longest common prefix in blocks is reused, and both branches stay."""
    d = Driver()
    run(d, PREFIX)
    branch = [*PREFIX[:30], 1, 2, 3, 4, 5, 6]
    assert run(d, branch) == 28
    assert run(d, branch) == 32
    assert run(d, PREFIX) == 36


def test_K15_blocks_computed_after_a_partial_hit_are_kept_too() -> None:
    """K15: a longer conversation is cached up to its own end, the answer included."""
    d = Driver()
    run(d, PREFIX[:10])
    first = d.add(PREFIX, 9)
    d.drain()
    assert first.cached_tokens == 8
    assert run(d, [*first.tokens, 1]) == 48


def test_K16_admission_never_evicts_what_it_matched() -> None:
    """K16: the pool is full, the matched prefix is the next to be evicted, and its tail needs all other room."""
    d = Driver(rows_spec(), (10,))
    run(d, PREFIX[:17])
    run(d, [1] * 20)
    assert d.kv.stats()["blocks_cached"] == 9
    assert run(d, [*PREFIX[:16], *range(23)]) == 16
    assert d.kv.stats()["evictions"] > 0


def test_tails_are_evicted_first_so_the_longest_prefix_survives() -> None:
    d = Driver(rows_spec(), (12,))
    run(d, PREFIX[:29])
    run(d, [1] * 17)
    for room, left in ((8, 28), (16, 24), (20, 20)):
        run(d, [2] * room)
        seq = d.add([*PREFIX[:29]], 0)
        hit = d.kv.match(seq)
        assert hit.tokens <= left
        assert hit.tokens == hit.reach * 4
        d.end(seq)
    kept = [d.kv.index is not None and d.kv.index.has_rows(k) for k in seq.keys]
    assert kept == sorted(kept, reverse=True), "what is left is a prefix"
    assert kept[0]
    assert not kept[-1]


def test_T05_salts_do_not_share() -> None:
    d = Driver()
    run(d, PREFIX, salt=b"alice")
    assert run(d, PREFIX, salt=b"bob") == 0
    assert run(d, PREFIX, salt=b"alice") == 36


def test_G03_requests_for_all_logits_use_no_hit_but_leave_one() -> None:
    """G03: prompt logprobs are computed, never skipped."""
    d = Driver()
    run(d, PREFIX)
    assert run(d, PREFIX, all_logits=True) == 0
    assert d.scheduled() == 80
    assert run(d, [*PREFIX, 1]) == 40


def test_without_prefix_caching_nothing_is_kept() -> None:
    d = Driver(caching=False)
    run(d, PREFIX)
    assert run(d, PREFIX) == 0
    assert d.kv.index is None
    assert d.kv.usage() == (64, 0, 0)


def test_K03_reuse_does_not_wear_out() -> None:
    """K03: the thirtieth identical request reads what the first wrote (the store verifies each row)."""
    d = Driver(toy_spec(), (20, 20, 10, 6))
    answers = set()
    for _ in range(30):
        seq = d.add(PREFIX, 6)
        d.drain()
        answers.add(tuple(seq.output))
    assert len(answers) == 1


# groups with windows and state


def test_the_longest_boundary_is_valid_for_every_group() -> None:
    """Rows reach further than the last snapshot: the hit ends at the snapshot."""
    d = Driver(toy_spec(), (40, 40, 20, 12), every=100, budget=100)
    run(d, PREFIX[:22], new=15)
    seq = d.add([*PREFIX[:20], 1, 1, 1], 0)
    hit = d.kv.match(seq)
    assert (hit.tokens, hit.reach) == (20, 5)
    assert [len(blocks) for blocks in hit.shared] == [5, 5, 5, 0]
    # A window of 6 before token 20 begins in block 3.
    assert [b != NONE for b in hit.shared[2]] == [False, False, False, True, True]
    d.drain()
    longer = d.add([*PREFIX[:18], 9, 9, 9, 9], 0)
    hit = d.kv.match(longer)
    assert hit.reach == 4
    assert hit.tokens == 0, "no snapshot at 16 or before"
    d.drain()


@pytest.mark.parametrize("lost", [2, 3])
def test_a_lost_window_or_state_shortens_the_hit_to_an_earlier_snapshot(lost: int) -> None:
    d = Driver(toy_spec(), (40, 40, 20, 12), every=2, budget=100)
    run(d, PREFIX)
    index = d.kv.index
    assert index is not None
    seq = d.add([*PREFIX, 1], 0)
    assert d.kv.match(seq).tokens == 40
    for depth in (9, 8):
        block = index.get(seq.keys[depth], lost)
        if block != NONE:
            d.kv.pools[lost].forget(block)
            d.kv._evicted(lost, block)
    hit = d.kv.match(seq)
    assert hit.tokens == 32
    assert hit.reach == 10
    d.drain()
    assert seq.cached_tokens == 32


def test_snapshots_are_taken_at_the_prompts_end_and_every_so_many_blocks() -> None:
    d = Driver(toy_spec(), (40, 40, 20, 12), every=4, budget=100)
    seq = d.add(PREFIX[:27], 10)
    ends = []
    while d.scheduler.has_work:
        plan = d.step()
        ends += [plan.items[0].start + plan.items[0].count] if plan.after else []
    assert ends == [16, 24, 32]
    assert d.kv.stats()["snapshots"] == 3
    again = d.add([*seq.tokens[:33]], 0)
    assert d.kv.match(again).tokens == 32
    d.drain()


def test_a_prompt_of_whole_blocks_can_be_repeated_and_extended() -> None:
    """K04 with snapshots: one block before the end for the same prompt, at the end for longer ones."""
    d = Driver(toy_spec(), (40, 40, 20, 12), every=100)
    assert [run(d, PREFIX), run(d, PREFIX), run(d, [*PREFIX, 1])] == [0, 36, 40]


def test_a_restored_state_is_a_copy_and_a_fresh_one_is_cleared() -> None:
    d = Driver(toy_spec(), (40, 40, 20, 12))
    d.add(PREFIX, 0)
    plan = d.step()
    assert len(plan.zero) == 1
    assert not plan.copies
    d.drain()
    seq = d.add([*PREFIX, 5, 5], 0)
    plan = d.plan()
    assert plan is not None
    assert not plan.zero
    (copy,) = plan.copies
    assert copy.dst == seq.tables[3][0] != copy.src
    assert d.kv.pools[3].refs(copy.src) == 1, "pinned until the copy is made"
    d.store.run(plan)
    d.scheduler.commit(plan, {})
    assert d.kv.pools[3].refs(copy.src) == 0
    d.end(seq)


def test_window_blocks_are_released_as_the_sequence_advances() -> None:
    d = Driver(toy_spec(), (40, 40, 20, 12), caching=False, budget=8)
    seq = d.add(PREFIX, 30)
    most = 0
    while d.scheduler.has_work:
        d.step()
        if seq.tables:
            held = sum(b != NONE for b in seq.tables[2])
            most = max(most, held)
            assert held <= d.kv.spec.blocks_for(2, seq.computed)
    assert most == 3


def test_a_snapshot_never_takes_room_from_a_sequence() -> None:
    """One state record: it serves the sequence, no snapshot is taken, a hit is impossible, all complete."""
    d = Driver(toy_spec(), (40, 40, 20, 1))
    assert [run(d, PREFIX), run(d, PREFIX)] == [0, 0]
    d = Driver(toy_spec(), (40, 40, 20, 2))
    assert [run(d, PREFIX[:39]), run(d, PREFIX[:39])] == [0, 36]


def test_a_hit_that_does_not_fit_beside_its_own_snapshot_is_given_up() -> None:
    d = Driver(toy_spec(), (40, 40, 20, 2))
    run(d, PREFIX[:39])
    hog = d.kv.pools[3].take()
    seq = d.add(PREFIX[:39], 0)
    assert d.kv.match(seq).tokens == 36
    plan = d.scheduler.plan()
    assert plan is not None
    d.plans.append(plan)
    assert seq.cached_tokens == 0
    d.store.run(plan)
    d.scheduler.commit(plan, {})
    d.kv.pools[3].release(hog)
    d.drain()
    assert d.scheduled() == 39 + 39


# bounds


def test_Z04_Z05_the_index_is_bounded_by_the_pool() -> None:
    """Z04, Z05: ten thousand tokens in one-token requests and long ones leave no more entries than blocks."""
    d = Driver(rows_spec(), (12,), budget=64)
    for i in range(150):
        run(d, [i, i + 1, i + 2, i + 3, i] * (1 + i % 6), new=i % 2)
    stats = d.kv.stats()
    assert stats["index_entries"] <= 12
    assert stats["blocks_cached"] == stats["index_entries"]
    assert not d.kv._pending
    assert not d.kv._held
    assert len(d.kv.settled) < 12
    assert not d.scheduler._parked
    assert not d.scheduler._ids


def test_K19_clearing_drops_blocks_and_entries_together() -> None:
    """K19: after ``clear`` there is nothing to hit, except what running sequences hold."""
    d = Driver()
    run(d, PREFIX)
    other = d.add([1] * 9, 20)
    d.step()
    d.kv.clear()
    d.scheduler.check()
    assert d.kv.stats()["index_entries"] == 2
    late = d.add([1] * 9, 1)
    again = d.add(PREFIX, 1)
    d.drain()
    assert (late.cached_tokens, again.cached_tokens) == (8, 0)
    assert other.output


def test_most_tokens_counts_what_grows() -> None:
    def most(spec: CacheSpec, capacity: tuple[int, ...]) -> int:
        return KVManager(spec, capacity, root=b"", prefix_caching=True).most_tokens

    assert most(rows_spec(), (7,)) == 28
    assert most(toy_spec(), (7, 6, 3, 1)) == 24
    assert most(toy_spec(), (7, 6, 2, 1)) == 8, "a window of 6 may touch 3 blocks of 4"
    state = CacheSpec(4, (Group("carry", "state", FIELDS),))
    assert most(state, (1,)) == sys.maxsize


def test_shortage_says_what_is_missing_and_changes_nothing() -> None:
    d = Driver(rows_spec(), (4,))
    seq = d.add(PREFIX[:16], 0)
    hit = d.kv.match(seq)
    assert d.kv.admit(seq, hit, [3]) == Shortage((3,))
    assert d.kv.usage() == (4, 0, 0)
    assert not d.kv.holds(seq)
    d.drain()


def test_check_notices_stolen_shared_and_lost_blocks() -> None:
    def broken(change: str) -> None:
        d = Driver(toy_spec(), (20, 20, 10, 6))
        a, b = d.add(PREFIX[:10], 9), d.add([1] * 10, 9)
        d.step()
        d.kv.check()
        if change == "lost":
            a.tables[0].pop()
        elif change == "stolen":
            a.tables[0][-1] = b.tables[0][-1]
        elif change == "shared":
            d.kv.pools[0].share(b.tables[0][-1])
            a.tables[0].append(b.tables[0][-1])
        elif change == "window":
            d.kv.pools[2].release(a.tables[2][-1])
            a.tables[2][-1] = NONE
        elif change == "swapped":
            a.tables[0][0], a.tables[0][1] = a.tables[0][1], a.tables[0][0]
        elif change == "state":
            a.tables[3][0], b.tables[3][0] = b.tables[3][0], b.tables[3][0]
        elif change == "pending":
            d.kv._pending[b"k"] = d.kv._held[a.id]
        with pytest.raises(InternalError):
            d.kv.check()

    for change in ("lost", "stolen", "shared", "window", "swapped", "state", "pending"):
        broken(change)


def test_capacity_must_name_every_group() -> None:
    with pytest.raises(InternalError, match=r"1 capacities .* for 4 groups"):
        KVManager(toy_spec(), [5], root=b"", prefix_caching=True)
