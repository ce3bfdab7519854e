"""Scheduler: sequences that are kept back while a lower tier is asked for their prefix."""

from __future__ import annotations

import pytest

from deepseek_flash.errors import InternalError
from deepseek_flash.scheduler.sequence import Status
from tests.kv.toys import Driver, finished, undisturbed


def test_a_held_sequence_is_not_planned_and_others_run() -> None:
    d = Driver()
    held, other = d.add([1] * 5, 2), d.add([2] * 5, 2)
    d.scheduler.hold(held)
    d.scheduler.check()
    assert (d.scheduler.waiting, d.scheduler.running) == (2, 0)
    while not finished(other):
        assert [i.seq.id for i in d.step().items] == [other.id]
    assert held.status is Status.WAITING
    assert d.scheduler.has_work
    assert not d.scheduler.can_step, "all there is waits for a lower tier"
    assert d.plan() is None
    d.scheduler.resume(held)
    assert d.scheduler.can_step
    d.drain()
    assert held.output == undisturbed([1] * 5, 2)
    assert not d.scheduler.has_work


def test_it_keeps_its_place_in_the_line() -> None:
    d = Driver(batch=1)
    a, b, c = (d.add([i] * 5, 1) for i in (1, 2, 3))
    d.scheduler.hold(b)
    d.scheduler.hold(a)
    d.scheduler.resume(b)
    d.scheduler.resume(a)
    d.scheduler.check()
    assert [next(i.seq for i in d.step().items) for _ in range(3)] == [a, b, c]


def test_holding_the_head_of_a_line_without_room_lets_the_next_in() -> None:
    """Whoever was found not to fit is out of the way while it is held, and is tried again when it is back."""
    d = Driver(capacity=(10,))
    first = d.add([1] * 20, 8)
    d.step()
    large, small = d.add([2] * 30, 1), d.add([3] * 3, 1)
    d.step()
    assert (large.status, small.status) == (Status.WAITING, Status.WAITING)
    d.scheduler.hold(large)
    d.step()
    assert finished(small)
    assert not finished(first)
    d.scheduler.resume(large)
    d.drain()
    assert large.output == undisturbed([2] * 30, 1)


def test_finishing_while_held() -> None:
    d = Driver()
    held, other = d.add([1] * 5, 2), d.add([1] * 5, 2)
    d.scheduler.hold(held)
    d.end(held)
    assert held.status is Status.FINISHED
    d.scheduler.resume(held)
    d.scheduler.check()
    assert (d.scheduler.waiting, len(d.live)) == (1, 1)
    d.drain()
    assert other.output == undisturbed([1] * 5, 2)
    d.scheduler.resume(other)
    d.scheduler.check()
    assert not d.scheduler.has_work


def test_only_who_waits_can_be_held() -> None:
    d = Driver()
    running = d.add([1] * 5, 4)
    d.step()
    with pytest.raises(InternalError):
        d.scheduler.hold(running)
    d.scheduler.resume(running)
    d.scheduler.check()
    waiting = d.add([2] * 5, 4)
    d.scheduler.hold(waiting)
    with pytest.raises(InternalError):
        d.scheduler.hold(waiting)
    d.scheduler.check()


def test_the_check_sees_a_sequence_that_is_held_and_waits() -> None:
    d = Driver()
    seq = d.add([1] * 5, 4)
    d.scheduler._fetching[seq.id] = seq
    with pytest.raises(InternalError, match="two queues"):
        d.scheduler.check()
