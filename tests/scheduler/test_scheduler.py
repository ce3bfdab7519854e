"""Scheduler: order, budget, sharing inside a batch, preemption, endings at any time."""

from __future__ import annotations

import time

import pytest

from deepseek_flash.errors import InternalError, RequestError
from deepseek_flash.scheduler.plan import StepPlan
from deepseek_flash.scheduler.sequence import Sequence, Status
from tests.kv.toys import SPECS, Driver, finished, rows_spec, toy_spec, undisturbed

PREFIX = [i % 7 for i in range(200)]


def ids(plan: StepPlan) -> dict[int, int]:
    return {i.seq.id: i.count for i in plan.items}


def wide(**options: int) -> Driver:
    """The toy spec with room for everything."""
    return Driver(toy_spec(), (400, 400, 200, 60), **options)  # type: ignore[arg-type]


# order and budget


def test_requests_run_together_and_join_and_leave_between_steps() -> None:
    d = Driver(batch=2)
    a, b, c = (d.add([i] * 5, n) for i, n in ((1, 2), (2, 6), (3, 3)))
    assert ids(d.step()) == {a.id: 5, b.id: 5}
    assert ids(d.step()) == {a.id: 1, b.id: 1}
    assert finished(a)
    assert (d.scheduler.running, d.scheduler.waiting) == (1, 1)
    assert ids(d.step()) == {b.id: 1, c.id: 5}, "the free slot is used in the very next step"
    d.drain()
    assert [s.output for s in (a, b, c)] == [undisturbed(s.tokens[:5], s.max_tokens - 5) for s in (a, b, c)]


def test_running_requests_produce_in_every_step_while_a_long_prompt_is_read() -> None:
    d = Driver(budget=10, capacity=(100,))
    short = [d.add([i] * 3, 40) for i in range(3)]
    d.step()
    long = d.add(PREFIX, 2)
    chunks = []
    while long.computed < long.prompt_len:
        before = [len(s) for s in short]
        plan = d.step()
        assert [len(s) for s in short] == [n + 1 for n in before]
        assert plan.tokens <= 10
        assert [i.count for i in plan.items[:3]] == [1, 1, 1], "decode rows come first"
        chunks.append(ids(plan)[long.id])
    assert sum(chunks) == 200
    assert set(chunks[:-1]) == {7}


def test_only_the_last_chunk_samples() -> None:
    d = Driver(budget=6)
    d.add(PREFIX[:15], 1)
    plans = [d.step() for _ in range(3)]
    assert [(i.start, i.count, i.sample) for p in plans for i in p.items] == [
        (0, 6, False),
        (6, 6, False),
        (12, 3, True),
    ]


def test_decode_rows_may_exceed_the_budget_and_a_half_read_prompt_still_moves() -> None:
    d = Driver(budget=4, batch=8)
    short = [d.add([i], 60) for i in range(4)]
    d.step()
    long = d.add([5] * 40, 1)
    assert d.step().tokens == 4
    assert long.status is Status.WAITING, "decode rows fill the step"
    d.scheduler.token_budget = 6
    assert ids(d.step())[long.id] == 2
    d.scheduler.token_budget = 1
    for computed in range(3, 41):
        assert d.step().tokens == 5
        assert long.computed == computed
    assert finished(long)
    assert not any(finished(s) for s in short)
    d.drain()


def test_first_come_first_served_when_blocks_are_short() -> None:
    """A small request does not overtake a large one that waits for room."""
    d = Driver(rows_spec(), (10,), batch=8, budget=100)
    first, large, small = d.add([1] * 20, 4), d.add([2] * 36, 1), d.add([3] * 2, 1)
    order = []
    while d.scheduler.has_work:
        for item in d.step().items:
            if item.seq not in order:
                order.append(item.seq)
    assert order == [first, large, small]


def test_scoring_needs_no_room_for_an_answer() -> None:
    """D03: a prompt as long as the cache, and nothing to generate."""
    d = Driver(rows_spec(), (5,))
    seq = d.add(PREFIX[:20], 0, all_logits=True)
    d.drain()
    assert finished(seq)
    assert seq.computed == 20


# one long prefix, many requests


@pytest.mark.parametrize("budget", [16, 64, 1000])
@pytest.mark.parametrize("spec", ["rows", "toy"])
def test_sixteen_requests_with_one_prefix_read_it_once(spec: str, budget: int) -> None:
    """With state too, though no regular snapshot falls on the prefix's end: those that wait ask for one there."""
    d = Driver(capacity=(400,), batch=16, budget=budget)
    if spec == "toy":
        d = wide(batch=16, budget=budget, every=1000)
    seqs = [d.add([*PREFIX, *[10 + i, 3, i] * 3], 2) for i in range(16)]
    d.drain()
    assert d.scheduled() == 200 + 16 * (9 + 1)
    assert [s.cached_tokens for s in seqs] == [0] + [200] * 15
    assert all(s.output == undisturbed(s.tokens[:209], 2) for s in seqs)


def test_others_are_admitted_around_those_that_wait_for_a_prefix() -> None:
    d = Driver(budget=300, batch=4, capacity=(200,))
    d.add([*PREFIX, 1], 1)
    d.add([*PREFIX, 2], 1)
    stranger = d.add([9] * 6, 1)
    plan = d.step()
    assert stranger.id in ids(plan)
    assert d.scheduler.waiting == 1
    d.drain()


@pytest.mark.parametrize("spec", ["rows", "toy"])
def test_when_the_owner_of_a_prefix_is_aborted_another_takes_over(spec: str) -> None:
    d = wide(budget=16, batch=4) if spec == "toy" else Driver(budget=16, batch=4, capacity=(200,))
    owner, second, third = (d.add([*PREFIX, i], 2) for i in range(3))
    for _ in range(3):
        d.step()
    assert d.scheduler.waiting == 2
    done = owner.computed
    d.end(owner)
    d.drain()
    assert finished(third)
    assert second.cached_tokens >= done // 4 * 4 - (12 if spec == "toy" else 0), "what was published is not lost"
    assert third.cached_tokens == 200


def test_a_parked_request_can_be_aborted() -> None:
    d = Driver(budget=16, capacity=(200,))
    d.add([*PREFIX, 1], 1)
    parked = [d.add([*PREFIX, 2], 1), d.add([*PREFIX, 3], 1)]
    d.step()
    for seq in parked:
        d.end(seq)
    assert not d.scheduler._parked
    assert d.scheduler.waiting == 0
    d.drain()


def test_a_shared_part_is_awaited_only_as_far_as_it_is_shared() -> None:
    d = Driver(budget=8, batch=4, capacity=(200,))
    d.add(PREFIX, 1)
    short = d.add([*PREFIX[:8], 9, 9], 1)
    d.step()
    assert d.scheduler._parked
    d.step()
    assert not d.scheduler._parked, "back in line although the owner is still reading"
    d.drain()
    assert short.cached_tokens == 8


def test_salted_requests_do_not_wait_for_one_another() -> None:
    d = Driver(budget=500, capacity=(400,))
    a, b = d.add(PREFIX, 1, salt=b"a"), d.add(PREFIX, 1, salt=b"b")
    assert ids(d.step()) == {a.id: 200, b.id: 200}


# preemption


def tight(spec: str = "rows", *, caching: bool = True) -> tuple[Driver, list[Sequence]]:
    layout, _ = SPECS[spec]
    d = Driver(layout, (14,) if spec == "rows" else (14, 14, 16, 8), batch=4, budget=32, caching=caching)
    return d, [d.add([i, *PREFIX[:7]], 28) for i in range(4)]


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("spec", ["rows", "toy"])
def test_D07_the_youngest_is_preempted_and_resumes_with_the_same_tokens(spec: str, caching: bool) -> None:
    """D07: four requests outgrow the pool; nobody's answer changes, the oldest is never touched."""
    d, seqs = tight(spec, caching=caching)
    d.drain()
    assert d.scheduler.stats()["preemptions"] == sum(s.preemptions for s in seqs) > 0
    assert seqs[0].preemptions == 0
    assert all(s.output == undisturbed(s.tokens[:8], 28) for s in seqs)
    assert all(s.cached_tokens == 0 for s in seqs), "reuse after preemption is not a hit of the prompt"
    for plan in d.plans:
        assert not set(plan.preempted) & {i.seq for i in plan.items}
        oldest = min((i.seq for i in plan.items), key=lambda s: s.arrival)
        assert all(v.arrival > oldest.arrival for v in plan.preempted)


def test_the_victim_is_the_youngest_and_its_published_blocks_are_reused() -> None:
    d, seqs = tight()
    while not any(s.preemptions for s in seqs):
        d.step()
    (victim,) = [s for s in seqs if s.preemptions]
    running = [s for s in seqs if s.status is Status.RUNNING]
    assert all(s.arrival < victim.arrival for s in running)
    had = len(victim)
    d.end(running[0])
    plan = d.step()
    resumed = next(i for i in plan.items if i.seq is victim)
    assert 0 < resumed.start <= had - 1
    assert resumed.start % 4 == 0
    d.drain()


def test_the_oldest_proceeds_in_every_step() -> None:
    d, seqs = tight(caching=False)
    while not finished(seqs[0]):
        plan = d.step()
        assert seqs[0].id in ids(plan)
    d.drain()


def test_D08_newcomers_do_not_starve_a_preempted_request() -> None:
    """D08: a steady stream of small requests; the preempted one is resumed before any that came after it."""
    d, seqs = tight()
    while not any(s.preemptions for s in seqs):
        d.step()
    victim = next(s for s in seqs if s.preemptions)
    late = []
    for i in range(60):
        late.append(d.add([50 + i, 1, 2], 2))
        d.step()
        if victim.status is not Status.WAITING:
            break
        assert all(s.status is Status.WAITING for s in late)
    assert victim.status is Status.RUNNING
    d.drain()


def test_a_stalled_youngest_keeps_its_blocks() -> None:
    """When the youngest itself needs a block it waits: only an older one may take what is held."""
    d = Driver(rows_spec(), (6,), batch=2, budget=32, caching=False)
    a, b = d.add([1] * 4, 12), d.add([2] * 7, 9)
    stalled = 0
    while not finished(a):
        plan = d.step()
        if b.status is Status.RUNNING and b.id not in ids(plan):
            stalled += 1
    assert stalled or b.preemptions
    d.drain()
    assert b.output == undisturbed([2] * 7, 9)


def test_admission_leaves_room_for_those_that_run() -> None:
    """A newcomer is not admitted into the last free blocks only to be preempted in the next steps."""
    d = Driver(rows_spec(), (9,), batch=4, budget=64)
    a = d.add([1] * 15, 17)
    d.step()
    b = d.add([2] * 19, 1)
    for _ in range(5):
        d.step()
    assert b.status is Status.WAITING
    d.drain()
    assert a.preemptions == b.preemptions == 0


def test_admission_counts_what_half_read_prompts_still_need() -> None:
    """Two prompts that fit one after the other do not start together and fight over blocks."""
    d = Driver(rows_spec(), (20,), batch=4, budget=8)
    seqs = [d.add([1] * 57, 2), d.add([2] * 41, 2)]
    for _ in range(4):
        d.step()
    assert d.scheduler.running == 1
    d.drain()
    # Chunks end at every block here, so both could start in the first step.
    d = Driver(toy_spec(), (14, 14, 20, 20), batch=4, budget=64, every=1)
    seqs += [d.add([1] * 37, 2), d.add([2] * 29, 2)]
    d.step()
    assert d.scheduler.running == 1
    d.drain()
    assert not any(s.preemptions for s in seqs)


# refusal, faults, misuse


def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    d = Driver(rows_spec(), (5,))
    assert d.scheduler.most_tokens == 20
    assert d.scheduler.can_ever_fit(20)
    assert not d.scheduler.can_ever_fit(21)
    with pytest.raises(RequestError, match=r"needs 21 tokens \(prompt 15 \+ answer up to 6\).*can hold 20"):
        d.add([1] * 15, 6)
    assert not d.scheduler.has_work
    exact = d.add([1] * 15, 5)
    d.drain()
    assert len(exact.output) == 5


def test_X06_a_failed_step_ends_its_sequences_publishes_nothing_and_lets_others_go_on() -> None:
    """X06: the step's blocks hold garbage (the store sees to it); nobody may ever hit them."""
    for spec, (layout, capacity) in SPECS.items():
        if layout.groups[0].kind != "rows":
            continue
        d = Driver(layout, capacity, budget=40)
        d.add(PREFIX[:30], 2)
        waiting = d.add([*PREFIX[:28], 5, 5], 2)
        d.fail()
        assert d.kv.stats()["index_entries"] == 0, spec
        assert waiting.status is Status.WAITING
        d.drain()
        assert waiting.output == undisturbed([*PREFIX[:28], 5, 5], 2)


def test_sequences_ended_between_plan_and_commit_are_left_alone() -> None:
    d = Driver()
    a, b = d.add(PREFIX[:8], 3), d.add([8] * 7, 3)
    plan = d.plan()
    assert plan is not None
    d.store.run(plan)
    d.end(a)
    d.scheduler.commit(plan, {a.id: 1, b.id: 1})
    assert a.output == []
    assert b.output == [1]
    d.end(b)
    assert d.kv.usage()[1] == 0


def test_a_sampling_sequence_without_a_token_stays_until_it_is_ended() -> None:
    d = Driver()
    a = d.add([1, 2, 3], 5)
    plan = d.plan()
    assert plan is not None
    d.scheduler.commit(plan, {})
    assert d.scheduler.plan() is None
    assert d.scheduler.has_work
    d.end(a)
    assert not d.scheduler.has_work


def test_ending_is_possible_in_every_state_and_twice() -> None:
    d = wide(batch=1)
    running, waiting = d.add(PREFIX[:9], 3), d.add([8] * 9, 3)
    d.step()
    d.scheduler.abort(waiting)
    d.scheduler.abort(waiting)
    d.scheduler.finish(running)
    d.scheduler.finish(running)
    assert not d.scheduler.has_work
    d.scheduler.check()
    assert d.scheduler.plan() is None


def test_misuse_is_an_internal_error() -> None:
    d = Driver()
    a = d.add([1, 2, 3], 5)
    for wrong in (
        Sequence(id=9, tokens=[], prompt_len=0, max_tokens=4),
        Sequence(id=9, tokens=[1, 2], prompt_len=2, max_tokens=1),
        Sequence(id=9, tokens=[1, 2], prompt_len=1, max_tokens=4),
        Sequence(id=a.id, tokens=[1], prompt_len=1, max_tokens=4),
    ):
        with pytest.raises(InternalError):
            d.scheduler.add(wrong)
    with pytest.raises(InternalError, match="not scheduled here"):
        d.scheduler.finish(Sequence(id=77, tokens=[1], prompt_len=1, max_tokens=4))
    plan = d.plan()
    assert plan is not None
    with pytest.raises(InternalError, match="neither committed nor aborted"):
        d.scheduler.plan()
    d.scheduler.commit(plan, {a.id: 1})
    with pytest.raises(InternalError, match="only the plan made last"):
        d.scheduler.commit(plan, {a.id: 1})
    assert a.output == [1]


def test_check_notices_sequences_in_the_wrong_place() -> None:
    d = Driver(batch=1)
    a, b = d.add([1, 2, 3], 5), d.add([2, 2, 3], 5)
    d.step()
    for change, undo in (
        (lambda: d.scheduler._waiting.append(a), lambda: d.scheduler._waiting.pop()),
        (lambda: setattr(b, "status", Status.RUNNING), lambda: setattr(b, "status", Status.WAITING)),
        (lambda: d.scheduler._parked.update({b"k": [b]}), lambda: d.scheduler._parked.clear()),
        (lambda: d.scheduler._ids.add(5), lambda: d.scheduler._ids.discard(5)),
    ):
        d.scheduler.check()
        change()
        with pytest.raises(InternalError):
            d.scheduler.check()
        undo()
    d.scheduler.check()


# cost


def test_planning_does_not_look_at_the_whole_queue() -> None:
    """Keys of a blocked prompt are computed once, and ten thousand waiting requests cost no more than ten."""
    d = Driver(rows_spec(), (60,), batch=4, budget=64)
    d.add([1] * 200, 30)
    d.step()
    d.step()
    for i in range(10_000):
        d.scheduler.add(Sequence(id=1000 + i, tokens=[i % 91] * 60, prompt_len=60, max_tokens=70))
    matched = []
    match = d.kv.match
    d.kv.match = lambda seq: matched.append(seq.id) or match(seq)  # type: ignore[method-assign]
    began = time.perf_counter()
    for _ in range(30):
        plan = d.scheduler.plan()
        assert plan is not None
        d.scheduler.commit(plan, {i.seq.id: 1 for i in plan.items if i.sample and len(i.seq) < i.seq.max_tokens})
    assert time.perf_counter() - began < 1.0
    assert len(matched) <= 2
    assert sum(bool(s.keys) for s in d.scheduler._waiting) <= 1


def test_stats_count_what_happened() -> None:
    d, _ = tight()
    d.drain()
    stats = d.scheduler.stats()
    assert stats["steps"] == len(d.plans)
    assert stats["scheduled_tokens"] == d.scheduled()
    assert stats["preemptions"] > 0
    assert stats["hit_tokens"] > 0
    assert stats["evictions"] > 0
    assert (stats["waiting"], stats["running"], stats["blocks_used"]) == (0, 0, 0)
