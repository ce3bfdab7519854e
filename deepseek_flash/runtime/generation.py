"""The generation tenant: requests in, steps, deltas out. Everything here runs on the engine thread."""

from __future__ import annotations

import copy
import itertools
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from deepseek_flash.errors import EngineClosed, FlashError, InternalError, MemoryBudgetError
from deepseek_flash.metrics import Metrics
from deepseek_flash.runtime.emit import Answer, Rules
from deepseek_flash.runtime.runner import StepOutput
from deepseek_flash.runtime.stream import Channel, without_traceback
from deepseek_flash.runtime.tiering import CacheTiers
from deepseek_flash.sampling.params import ResolvedSampling
from deepseek_flash.sampling.sampler import SampleRow
from deepseek_flash.scheduler.plan import StepPlan
from deepseek_flash.scheduler.scheduler import Scheduler
from deepseek_flash.scheduler.sequence import Sequence
from deepseek_flash.text.detokenize import Detokenizer
from deepseek_flash.types import CacheReport, Completion, Delta, Timings, TokenLogprobs, Usage

MEASURED_STEP = 64
"""Tokens from which a step tells how fast prompts are read."""


@dataclass(frozen=True, slots=True)
class Request:
    """A validated request on its way from a caller's thread to the engine thread."""

    id: int
    tokens: tuple[int, ...]
    sampling: ResolvedSampling
    rules: Rules
    n: int
    prompt_logprobs: int | None
    channel: Channel
    submitted: float
    """time.perf_counter() at submission."""


class StepRunner(Protocol):
    """What executes a plan (runtime.runner.Runner; a scripted one in tests)."""

    def run(self, plan: StepPlan, rows: Mapping[int, SampleRow]) -> StepOutput: ...


@dataclass(slots=True)
class _Live:
    """A request being served."""

    request: Request
    answers: list[Answer]
    sequences: list[Sequence] = field(default_factory=list)
    rows: list[SampleRow] = field(default_factory=list)
    began: float | None = None
    first_token: float | None = None
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        return all(a.finish_reason is not None for a in self.answers)


class GenerationTenant:
    """Serves requests by continuous batching over one model."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        detokenizer: Callable[[], Detokenizer],
        metrics: Metrics,
        *,
        tiers: CacheTiers | None = None,
        salt: bytes = b"",
        check_every_step: bool = False,
    ) -> None:
        self.scheduler, self._runner, self._detokenizer = scheduler, runner, detokenizer
        self._metrics, self._salt, self._tiers = metrics, salt, tiers
        self._check_every_step = check_every_step
        self._live: dict[int, _Live] = {}
        self._by_sequence: dict[int, tuple[_Live, int]] = {}
        self._sequence_ids = itertools.count()
        self._broken: FlashError | None = None
        self.asleep = False
        """Weights and cache are given back: requests are queued and wait."""
        self._unasked: list[Sequence] = []
        """Sequences that arrived asleep: the tiers have not been asked for their prefix."""

    # posted calls

    def add(self, request: Request) -> None:
        """Begin serving; a request that arrives after a fatal fault or close gets that error."""
        if self._broken is not None:
            request.channel.fail(self._broken)
            return
        self._metrics.count("requests")
        live = self._live[request.id] = _Live(request, [])
        try:
            self._begin(live, request)
        except Exception as e:  # a fault of ours is this request's alone: the thread has others to serve
            self._fail(live, step_error(e))

    def _begin(self, live: _Live, request: Request) -> None:
        live.answers += (Answer.begin(i, request.rules, self._detokenizer()) for i in range(request.n))
        for i in range(request.n):
            seq = Sequence(
                id=next(self._sequence_ids),
                tokens=list(request.tokens),
                prompt_len=len(request.tokens),
                max_tokens=len(request.tokens) + request.rules.max_new_tokens,
                salt=self._salt,
                all_logits=request.prompt_logprobs is not None and i == 0,
            )
            top = request.prompt_logprobs if seq.all_logits else None
            row = SampleRow(request.sampling, seq.tokens, seq.prompt_len, i, top)
            self.scheduler.add(seq)
            live.sequences.append(seq)
            live.rows.append(row)
            self._by_sequence[seq.id] = (live, i)
            self._look_below(seq)

    def _look_below(self, seq: Sequence) -> None:
        """Keep a sequence back while a lower tier brings what it has of it."""
        if self._tiers is None:
            return
        if self.asleep:
            self._unasked.append(seq)
        elif self._tiers.arrived(seq):
            self.scheduler.hold(seq)

    def sleep(self) -> None:
        """Make no step until ``wake``; what is asked for in the meantime waits in line. The cache's memory may go: so
        nothing is copied from it or into it."""
        self.asleep = True
        if self._tiers is not None:
            self._tiers.suspended = True

    def wake(self) -> None:
        """Go on; the cache's memory is what it was."""
        self.asleep = False
        if self._tiers is not None:
            self._tiers.suspended = False
        late, self._unasked = self._unasked, []
        for seq in late:
            if seq.id in self._by_sequence:
                self._look_below(seq)

    def cancel(self, request_id: int) -> None:
        """End a request now; its caller gets the partial Completion. Unknown or ended ids are fine."""
        live = self._live.get(request_id)
        if live is None:
            return
        self._metrics.count("requests_cancelled")
        try:
            deltas = []
            for answer, seq in zip(live.answers, live.sequences, strict=True):
                if answer.finish_reason is None:
                    deltas.append(answer.end("cancelled"))
                    self._end(seq)
            for delta in deltas[:-1]:
                live.request.channel.put(delta)
            self._complete(live, deltas[-1])
        except Exception as e:  # as in add()
            self._fail(live, step_error(e))

    # Tenant

    def ready(self) -> bool:
        if self._tiers is not None:
            self._tiers.expire()
        return self._broken is None and not self.asleep and self.scheduler.can_step

    def patience(self) -> float | None:
        return None if self._tiers is None else self._tiers.patience()

    def step(self) -> None:
        try:
            plan = self.scheduler.plan()
        except Exception as e:  # the bookkeeping contradicts itself: nothing can be trusted any more
            self._fatal(step_error(e))
            return
        if plan is None:
            self._fatal(InternalError("the scheduler has work but plans no step; please report this"))
            return
        try:
            rows, began = self._rows(plan), time.perf_counter()
            output = self._runner.run(plan, rows)
            if self._tiers is not None and plan.tokens >= MEASURED_STEP:
                self._tiers.rates.prefilled(plan.tokens, time.perf_counter() - began)
            self._commit(plan, output)
        except Exception as e:  # last line of defence: a fault in a step ends that step's requests only
            self._fail_step(plan, e)
        if self._check_every_step and self._broken is None:
            self._verify()

    def close(self) -> None:
        self._fatal(EngineClosed("the engine was closed while this request was running"))

    # inside a step

    def _rows(self, plan: StepPlan) -> dict[int, SampleRow]:
        now = time.perf_counter()
        rows = {}
        for item in plan.items:
            live, choice = self._by_sequence[item.seq.id]
            if live.began is None:
                live.began = now
            rows[item.seq.id] = live.rows[choice]
        return rows

    def _commit(self, plan: StepPlan, output: StepOutput) -> None:
        for seq_id, positions in output.prompt_logprobs.items():
            self._by_sequence[seq_id][0].prompt_logprobs.update(positions)
        tokens = {i: s.token for i, s in output.sampled.items() if not isinstance(s, InternalError)}
        wanted = {i: t for i, t in tokens.items() if self._by_sequence[i][0].request.rules.max_new_tokens}
        self.scheduler.commit(plan, wanted)
        if self._tiers is not None:
            for item in plan.items:
                if item.start < item.seq.prompt_len:
                    self._tiers.computed(item.seq)
        now = time.perf_counter()
        self._metrics.count("steps")
        self._metrics.count("tokens_computed", plan.tokens)
        self._metrics.count("tokens_generated", len(wanted))
        for seq_id, sampled in output.sampled.items():
            entry = self._by_sequence.get(seq_id)
            if entry is None:
                continue  # another choice of its request failed in this very step
            live, choice = entry
            if isinstance(sampled, InternalError):
                self._fail(live, sampled)
                continue
            answer = live.answers[choice]
            if seq_id in wanted:
                if live.first_token is None:
                    live.first_token = now
                delta = answer.push(sampled.token, sampled.logprobs)
            else:
                delta = answer.end("length")
            last = live.finished
            if delta.finish_reason is not None:
                self._end(live.sequences[choice])
            if last:
                self._complete(live, final=delta)
            else:
                live.request.channel.put(delta)

    # endings

    def _end(self, seq: Sequence) -> None:
        if self._by_sequence.pop(seq.id, None) is not None:
            if self._tiers is not None:
                self._tiers.leaving(seq)
            self.scheduler.finish(seq)

    def _complete(self, live: _Live, final: Delta) -> None:
        completion = self._completion(live)
        channel = live.request.channel
        channel.put(replace(final, usage=completion.usage))
        del self._live[live.request.id]
        self._metrics.add_seconds("requests", completion.timings.total)
        channel.finish(completion)

    def _completion(self, live: _Live) -> Completion:
        request, now = live.request, time.perf_counter()
        prompt = len(request.tokens)
        first = live.sequences[0] if live.sequences else None
        cached = first.cached_tokens if first else 0
        positions = None
        if request.prompt_logprobs is not None and len(live.prompt_logprobs) == prompt - 1:
            positions = (None, *(live.prompt_logprobs[i] for i in range(1, prompt)))
        return Completion.from_choices(
            tuple(a.choice() for a in live.answers),
            prompt_token_ids=request.tokens,
            prompt_logprobs=positions,
            usage=Usage(prompt, sum(len(a.token_ids) for a in live.answers), cached),
            timings=Timings(
                queue=(live.began or now) - request.submitted,
                first_token=None if live.first_token is None else live.first_token - request.submitted,
                total=now - request.submitted,
            ),
            cache=_cache_report(prompt, first, sum(s.preemptions for s in live.sequences)),
        )

    def _fail(self, live: _Live, error: FlashError) -> None:
        """End a request with an error that carries its partial result."""
        if self._live.pop(live.request.id, None) is None:
            return
        broken: FlashError | None = None
        try:
            for seq in live.sequences:
                self._end(seq)
            for answer in live.answers:
                if answer.finish_reason is None:
                    answer.end("cancelled")
            if live.answers:
                error.partial = self._completion(live)
        except Exception as e:  # whatever is wrong here, the caller must hear of the end
            broken = step_error(e)
        self._metrics.count("requests_failed")
        live.request.channel.fail(without_traceback(error))
        if broken is not None:
            self._fatal(broken)

    def _fail_step(self, plan: StepPlan, cause: Exception) -> None:
        found = (self._by_sequence.get(item.seq.id) for item in plan.items)
        for live in [entry[0] for entry in found if entry is not None]:
            self._fail(live, step_error(cause))
        self._verify()

    def _verify(self) -> None:
        try:
            self.scheduler.check()
        except Exception as e:
            self._fatal(step_error(e))

    def _fatal(self, error: FlashError) -> None:
        """End everything: the cache can no longer be trusted, or the engine closes."""
        if self._broken is None:
            self._broken = without_traceback(error)
        for live in list(self._live.values()):
            self._fail(live, copy.copy(self._broken))  # each carries its own partial result


def _cache_report(prompt: int, seq: Sequence | None, preemptions: int) -> CacheReport:
    """Of a request's first choice: what was found when it was first admitted, by the tier it came from."""
    if seq is None:
        return CacheReport(prompt, 0, prompt, preemptions)
    lower = min(seq.cached_tokens, seq.l2_tokens + seq.l3_tokens)
    disk = min(lower, seq.l3_tokens)
    return CacheReport(
        prompt_tokens=prompt,
        l1_tokens=seq.cached_tokens - lower,
        computed_tokens=prompt - seq.cached_tokens,
        preemptions=preemptions,
        l2_tokens=lower - disk,
        l3_tokens=disk,
        load_seconds=seq.load_seconds,
        miss_reason=seq.miss,
    )


def step_error(cause: Exception) -> FlashError:
    """What a caller sees of a fault inside a step; the traceback travels as text, not as frames."""
    if isinstance(cause, MemoryError) or "not enough memory" in str(cause) or "out of memory" in str(cause).lower():
        error: FlashError = MemoryBudgetError(
            f"the step ran out of memory ({cause}); lower max_batch_size, prefill_chunk_size or max_model_len"
        )
    elif isinstance(cause, FlashError):
        error = copy.copy(cause)
    else:
        error = InternalError(f"a step failed: {type(cause).__name__}: {cause}")
    error.add_note("".join(traceback.format_exception(cause)))
    return error
