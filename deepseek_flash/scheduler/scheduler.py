"""Decides the next step. Arithmetic on integers: no torch, no clock.

Sequences run in order of arrival, and every choice follows that order: the oldest gets its blocks first and
can take them from all younger ones, so it always proceeds; then the next oldest is that one. Nothing starves.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import pairwise

from deepseek_flash.errors import InternalError, RequestError
from deepseek_flash.kv.blocks import BlockCopy
from deepseek_flash.kv.manager import Admission, KVManager, Shortage
from deepseek_flash.scheduler.plan import PlanItem, StepPlan
from deepseek_flash.scheduler.sequence import Sequence, Status


def _arrival(seq: Sequence) -> int:
    return seq.arrival


@dataclass(slots=True)
class _Step:
    """A plan in the making."""

    left: int
    """Prefill tokens that may still be scheduled."""
    counts: dict[int, tuple[Sequence, int]] = field(default_factory=dict)
    """Sequence id → tokens of this step."""
    zero: list[tuple[int, int]] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)


class Scheduler:
    """Continuous batching over one KVManager. Only the engine thread calls it.

    Loop: ``plan()``, run it, ``commit(plan, sampled tokens)``, ``finish`` what is complete. When running a plan
    fails, ``abort`` its sequences instead of committing: nothing of the step was published.
    """

    def __init__(self, kv: KVManager, *, max_batch_size: int, token_budget: int) -> None:
        """``token_budget``: tokens of one step; decode rows come first, and all of them always run."""
        if max_batch_size < 1 or token_budget < 1:
            raise InternalError(f"max_batch_size {max_batch_size} and token_budget {token_budget} must be positive")
        self.kv = kv
        self.max_batch_size, self.token_budget = max_batch_size, token_budget
        self._size = kv.spec.block_size
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._parked: dict[bytes, list[Sequence]] = {}
        self._parked_on: dict[int, bytes] = {}
        self._fetching: dict[int, Sequence] = {}
        """Those whose prefix is on its way from a lower tier."""
        self._ids: set[int] = set()
        self._arrivals = 0
        self._open: StepPlan | None = None
        self._blocked: tuple[int, int] | None = None
        self._steps = self._scheduled = self._preemptions = 0

    # ---- what is there

    @property
    def has_work(self) -> bool:
        """Whether any sequence is waiting or running."""
        return bool(self._ids)

    @property
    def waiting(self) -> int:
        """Sequences that wait, those that wait for a shared prefix or a lower tier included."""
        return len(self._waiting) + len(self._parked_on) + len(self._fetching)

    @property
    def can_step(self) -> bool:
        """Whether there is work that does not wait for a lower tier."""
        return len(self._ids) > len(self._fetching)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def most_tokens(self) -> int:
        """The longest sequence the cache can hold, prompt and answer together."""
        return self.kv.most_tokens

    def can_ever_fit(self, total_tokens: int) -> bool:
        """Whether a sequence of so many tokens, prompt and answer, can run when it is alone."""
        return self.kv.can_ever_fit(total_tokens)

    def stats(self) -> dict[str, int]:
        """Counters since the start and numbers now, the cache's included. Any thread may ask."""
        return {
            "steps": self._steps,
            "scheduled_tokens": self._scheduled,
            "preemptions": self._preemptions,
            "waiting": self.waiting,
            "running": self.running,
            **self.kv.stats(),
        }

    # ---- joining and leaving

    def add(self, seq: Sequence) -> None:
        """Queue a sequence. The caller has asked ``can_ever_fit``; one that never fits is refused here too."""
        if not 1 <= seq.prompt_len == len(seq.tokens) <= seq.max_tokens:
            raise InternalError(
                f"sequence {seq.id}: prompt_len {seq.prompt_len}, {len(seq.tokens)} tokens, max_tokens "
                f"{seq.max_tokens}; needs 1 <= prompt_len == tokens <= max_tokens"
            )
        if not self.can_ever_fit(seq.max_tokens):
            raise RequestError(
                f"the request needs {seq.max_tokens} tokens (prompt {seq.prompt_len} + answer up to "
                f"{seq.max_tokens - seq.prompt_len}) but the cache can hold {self.most_tokens}; shorten the prompt, "
                f"lower max_new_tokens, or give the cache more memory",
                parameter="max_new_tokens",
                value=seq.max_tokens - seq.prompt_len,
            )
        if seq.id in self._ids or seq.status is not Status.WAITING:
            raise InternalError(f"sequence {seq.id} was added before")
        self._ids.add(seq.id)
        seq.arrival = self._arrivals
        self._arrivals += 1
        self._waiting.append(seq)

    def hold(self, seq: Sequence) -> None:
        """Keep a waiting sequence back until ``resume``: a lower tier is asked for its prefix. It keeps its place."""
        self._remove(self._waiting, seq)
        self._fetching[seq.id] = seq

    def resume(self, seq: Sequence) -> None:
        """Put it back in line. One that ended in the meantime is left alone."""
        if self._fetching.pop(seq.id, None) is not None:
            insort(self._waiting, seq, key=_arrival)
            self._blocked = None

    def finish(self, seq: Sequence) -> None:
        """End a sequence, complete or not, between steps: its blocks are released. Ending twice is fine."""
        if seq.status is Status.FINISHED:
            return
        if seq.id not in self._ids:
            raise InternalError(f"sequence {seq.id} is not scheduled here")
        if seq.status is Status.RUNNING:
            self._remove(self._running, seq)
            self.kv.release(seq)
        elif seq.id in self._fetching:
            del self._fetching[seq.id]
        elif seq.id in self._parked_on:
            key = self._parked_on.pop(seq.id)
            self._parked[key].remove(seq)
            if not self._parked[key]:
                del self._parked[key]
        else:
            self._remove(self._waiting, seq)
        if self.kv.restores is not None:
            self.kv.restores.end(seq.id)
        self._ids.discard(seq.id)
        seq.status = Status.FINISHED

    abort = finish

    @staticmethod
    def _remove(queue: list[Sequence], seq: Sequence) -> None:
        at = bisect_left(queue, seq.arrival, key=_arrival)
        if at == len(queue) or queue[at] is not seq:
            raise InternalError(f"sequence {seq.id} is not where its status says")
        del queue[at]

    # ---- planning

    def plan(self) -> StepPlan | None:
        """The next step; None if nothing can run, which with work left means that the caller has yet to finish
        complete sequences. The previous plan must have been committed or its sequences aborted."""
        if self._open is not None and any(i.seq.status is Status.RUNNING for i in self._open.items):
            raise InternalError("the previous plan was neither committed nor aborted")
        self._open = None
        self._wake()
        decoding = sum(len(s) - s.computed == 1 for s in self._running)
        left = self.token_budget - decoding
        if left <= 0:
            # Decode rows fill the step. One token keeps a half-read prompt moving; nobody is admitted.
            left = int(any(len(s) - s.computed > 1 for s in self._running))
        step = _Step(left)
        self._grow(step)
        if not step.preempted and decoding < self.token_budget:
            self._admit(step)
        if not step.counts:
            return None
        self._open = self._finalise(step)
        return self._open

    def _wake(self) -> None:
        """Put sequences whose awaited prefix is there, or will never be, back in line."""
        for key in self.kv.take_settled():
            for seq in self._parked.pop(key, ()):
                del self._parked_on[seq.id]
                insort(self._waiting, seq, key=_arrival)

    def _grow(self, step: _Step) -> None:
        """Schedule running sequences, oldest first: one token where one is left, a chunk of prompt elsewhere."""
        at = 0
        while at < len(self._running):  # preemption shortens the list from its end
            seq = self._running[at]
            at += 1
            remaining = len(seq) - seq.computed
            want = remaining if remaining <= 1 else min(remaining, step.left)
            if want:
                count = self._secure(seq, want, step)
                self._put(step, seq, count, remaining)

    def _secure(self, seq: Sequence, want: int, step: _Step) -> int:
        """Get blocks for up to ``want`` tokens, if need be from the youngest; 0 if it is itself the youngest.

        It then waits holding what it has: whoever is older may still take that.
        """
        end = self.kv.stop(seq, seq.computed + want)
        while True:
            count = self.kv.extend(seq, end) - seq.computed
            if count > 0:
                return count
            victim = self._running[-1]
            if victim is not seq:
                self._preempt(victim, step)
            elif len(self._running) > 1:
                return 0
            else:
                raise InternalError(f"sequence {seq.id} has the cache to itself and does not fit")

    def _preempt(self, seq: Sequence, step: _Step) -> None:
        """Take a sequence's blocks. It goes back in line where it came from and later computes its tokens again,
        prompt and output, as far as the prefix index does not still have them."""
        self._running.pop()
        self.kv.release(seq)
        seq.computed = 0
        seq.status = Status.WAITING
        seq.preemptions += 1
        self._preemptions += 1
        step.preempted.append(seq)
        insort(self._waiting, seq, key=_arrival)

    def resize(self, capacity: Seq[int]) -> None:
        """Have so many cache blocks per group from now on, between steps. Running sequences make room, the youngest
        first; the oldest stays, so there must be room for the longest sequence ever accepted."""
        self.kv.resize(capacity)
        step = _Step(0)
        while self.kv.owed and len(self._running) > 1:
            self._preempt(self._running[-1], step)
        while self.kv.owed and self.kv.take_a_pin():
            pass
        self._blocked = None

    def _put(self, step: _Step, seq: Sequence, count: int, remaining: int) -> None:
        if count > 0:
            step.counts[seq.id] = (seq, count)
            if remaining > 1:
                step.left -= count

    def _admit(self, step: _Step) -> None:
        """Start waiting sequences in order of arrival while slots, budget and blocks last.

        Blocks must suffice for all tokens the newcomer has, on top of what running sequences still need for
        theirs, and one block each to go on with: or admitting it would soon preempt it again.
        """
        if not self._waiting or len(self._running) >= self.max_batch_size:
            return
        if self._blocked == (self._waiting[0].id, self.kv.freed):
            return  # whoever is first did not fit, and no block was released since
        kinds = [g.kind for g in self.kv.spec.groups]
        claimed = [sum(c) for c in zip(*map(self.kv.claims, self._running), strict=True)] or [0] * len(kinds)
        while self._waiting and len(self._running) < self.max_batch_size:
            seq = self._waiting[0]
            hit = self.kv.match(seq)
            key = self.kv.awaited(seq, hit)
            if key is not None:
                self._waiting.pop(0)
                self._parked.setdefault(key, []).append(seq)
                self._parked_on[seq.id] = key
                continue
            if step.left <= 0:
                return
            reserve = len(self._running)
            spare = [c + (reserve if kind == "rows" else 0) for c, kind in zip(claimed, kinds, strict=True)]
            start = self.kv.admit(seq, hit, spare)
            if isinstance(start, Shortage) and not self._running:
                # Its own cached snapshot may be what stands in the way.
                hit = self.kv.no_hit
                start = self.kv.admit(seq, hit, spare)
            if isinstance(start, Shortage):
                self._blocked = (seq.id, self.kv.freed)
                return
            self._start(step, seq, start, hit.tokens)
            claimed = [a + b for a, b in zip(claimed, self.kv.claims(seq), strict=True)]

    def _start(self, step: _Step, seq: Sequence, start: Admission, cached: int) -> None:
        self._waiting.pop(0)
        insort(self._running, seq, key=_arrival)
        seq.status = Status.RUNNING
        if not seq.preemptions:
            seq.cached_tokens = cached
        step.zero += start.zero
        step.copies += start.copies
        remaining = len(seq) - seq.computed
        end = self.kv.extend(seq, self.kv.stop(seq, seq.computed + min(remaining, step.left)))
        if end <= seq.computed:
            raise InternalError(f"sequence {seq.id} was admitted without room for a token")
        step.counts[seq.id] = (seq, end - seq.computed)
        step.left -= end - seq.computed

    def _finalise(self, step: _Step) -> StepPlan:
        decode: list[PlanItem] = []
        prefill: list[PlanItem] = []
        after: list[BlockCopy] = []
        for seq, count in step.counts.values():
            # Somebody admitted later may have asked for a snapshot inside this chunk.
            end = self.kv.stop(seq, seq.computed + count)
            item = PlanItem(seq, seq.computed, end - seq.computed, end == len(seq))
            after += self.kv.snapshot(seq, end)
            (decode if item.count == 1 else prefill).append(item)
        return StepPlan(
            items=(*decode, *prefill),
            zero=tuple(step.zero),
            copies=tuple(step.copies),
            after=tuple(after),
            preempted=tuple(step.preempted),
        )

    def commit(self, plan: StepPlan, tokens: Mapping[int, int]) -> None:
        """The plan was run. ``tokens``: sequence id → sampled token, appended where the item samples.

        A sequence that was to sample and got no token stays as it is until the caller ends it. Sequences ended
        since the plan was made are left alone.
        """
        if plan is not self._open:
            raise InternalError("only the plan made last can be committed, once")
        self._open = None
        self._steps += 1
        for item in plan.items:
            seq = item.seq
            if seq.status is not Status.RUNNING:
                continue
            self.kv.advance(seq, item.count)
            self._scheduled += item.count
            if item.sample and seq.id in tokens:
                if len(seq) >= seq.max_tokens:
                    raise InternalError(f"sequence {seq.id} already has its {seq.max_tokens} tokens")
                seq.tokens.append(tokens[seq.id])

    # ---- proof

    def check(self) -> None:
        """Prove that every sequence is in exactly one place and every block has its owner (KVManager.check)."""
        for queue, status in ((self._waiting, Status.WAITING), (self._running, Status.RUNNING)):
            if any(s.status is not status for s in queue):
                raise InternalError(f"a sequence in the {status.value} queue has another status")
            if any(a.arrival >= b.arrival for a, b in pairwise(queue)):
                raise InternalError(f"the {status.value} queue is not in order of arrival")
        parked = [(s.id, key) for key, queue in self._parked.items() for s in queue]
        if dict(parked) != self._parked_on or len(parked) != len(self._parked_on):
            raise InternalError("the two records of parked sequences differ")
        ids = [s.id for s in (*self._waiting, *self._running, *self._fetching.values())]
        ids += [i for i, _ in parked]
        if len(ids) != len(self._ids) or set(ids) != self._ids:
            raise InternalError("a sequence is in two queues or in none")
        if any(s.computed or s.tables for s in (*self._waiting, *self._fetching.values())):
            raise InternalError("a waiting sequence has computed tokens or blocks")
        if len(self._running) > self.max_batch_size:
            raise InternalError(f"{len(self._running)} sequences run, {self.max_batch_size} may")
        if not self._running and not any(self.kv.pinned()) and self.kv.usage()[1]:
            raise InternalError("blocks are held although nothing runs")
        if any(not self.kv.holds(s) for s in self._running) or any(self.kv.holds(s) for s in self._waiting):
            raise InternalError("the cache holds other sequences than those that run")
        settled = set(self.kv.settled)
        if any(not self.kv.pending(key) and key not in settled for key in self._parked):
            raise InternalError("a sequence waits for a prefix that nobody is computing")
        self.kv.check()
