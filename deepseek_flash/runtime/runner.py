"""Carries out one StepPlan: batch, forward pass, sampling."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from deepseek_flash.errors import InternalError
from deepseek_flash.kv.store import KVStore
from deepseek_flash.layers.batch import ForwardBatch
from deepseek_flash.models.base import Model
from deepseek_flash.models.sizes import LOGITS_BYTES as _LOGITS_BYTES
from deepseek_flash.sampling.sampler import Sampled, Sampler, SampleRow, prompt_logprobs
from deepseek_flash.scheduler.plan import PlanItem, StepPlan


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step produced."""

    sampled: dict[int, Sampled | InternalError]
    """Sequence id → its next token, for items that sample; an InternalError where the numbers broke."""
    prompt_logprobs: dict[int, list[tuple[int, dict[int, float]]]] = field(default_factory=dict)
    """Sequence id → (position of a prompt token, log-probabilities there), for the positions this step reached.
    After a preemption positions come again, with the same numbers."""


class Runner:
    """Runs steps of one model over one store. Only the engine thread touches it."""

    def __init__(self, model: Model, store: KVStore, sampler: Sampler, device: str) -> None:
        self.model, self.store, self.sampler = model, store, sampler
        self.device = torch.device(device)

    @torch.inference_mode()
    def run(self, plan: StepPlan, rows: Mapping[int, SampleRow]) -> StepOutput:
        """``rows`` has an entry for every sequence that samples or wants all its logits."""
        self.store.apply(plan.zero, plan.copies)
        batch = build_batch(plan, self.store, self.device)
        hidden = self.model.hidden(batch, self.store)
        self.store.apply((), plan.after)
        output = StepOutput({})
        wanted = [item.seq.id for item in plan.items if item.sample]
        for a, b in self._slices(len(wanted)):
            every = b - a == len(hidden)  # as in a step that only decodes
            logits = self.model.logits(hidden if every else hidden.index_select(0, batch.logits_rows[a:b]))
            ids = wanted[a:b]
            results = self.sampler.sample(logits, [rows[i] for i in ids])
            output.sampled.update(zip(ids, results, strict=True))
        for item, at in zip(plan.items, batch.cu_q, strict=False):
            if item.seq.all_logits and item.start + 1 < item.seq.prompt_len:
                self._score_prompt(item, hidden[at : at + item.count], rows[item.seq.id], output)
        return output

    def _score_prompt(self, item: PlanItem, hidden: torch.Tensor, row: SampleRow, output: StepOutput) -> None:
        """Log-probabilities of the prompt tokens that follow this item's tokens."""
        seq, top = item.seq, row.prompt_logprobs
        if top is None:
            return
        first = item.start + 1
        following = seq.tokens[first : min(first + item.count, seq.prompt_len)]
        found: list[tuple[int, dict[int, float]]] = []
        try:
            for a, b in self._slices(len(following)):
                values = prompt_logprobs(self.model.logits(hidden[a:b]), following[a:b], top, self.sampler.vocab_limit)
                found += [(first + a + i, v) for i, v in enumerate(values)]
        except InternalError as e:  # this sequence's, not its neighbours'
            output.sampled[seq.id] = e
            return
        output.prompt_logprobs[seq.id] = found

    def _slices(self, count: int) -> Iterator[tuple[int, int]]:
        """Row ranges whose logits stay under the cap. Bits of a row do not depend on the slice it is in."""
        step = max(1, _LOGITS_BYTES // (4 * self.model.vocab_size))
        for a in range(0, count, step):
            yield a, min(a + step, count)


def build_batch(plan: StepPlan, store: KVStore, device: torch.device) -> ForwardBatch:
    """The plan's tokens as tensors, sequence after sequence in the plan's order."""
    items = plan.items
    tokens: list[int] = []
    positions: list[int] = []
    ends = [0]
    for item in items:
        tokens += item.seq.tokens[item.start : item.start + item.count]
        positions += range(item.start, item.start + item.count)
        ends.append(ends[-1] + item.count)
    if len(tokens) != ends[-1]:
        raise InternalError(f"the plan wants {ends[-1]} tokens, but its sequences hold {len(tokens)} of them")
    rows = [end - 1 for item, end in zip(items, ends[1:], strict=True) if item.sample]
    groups = range(len(store.spec.groups))
    tables = [_table(items, g) for g in groups]
    slots = [_slots(items, g, store) for g in groups]
    # One tensor, cut up: making a tensor costs a step of a small model more than what is in it.
    flat = [tokens, positions, rows, *tables, *slots]
    whole = torch.tensor([i for part in flat for i in part], dtype=torch.int64, device=device)
    ids, at, logits_rows, *rest = torch.split_with_sizes(whole, [len(part) for part in flat])
    return ForwardBatch(
        token_ids=ids,
        positions=at,
        cu_q=tuple(ends),
        context_lens=tuple(item.start + item.count for item in items),
        block_tables=tuple(t.view(len(items), -1) for t in rest[: len(groups)]),
        slots=tuple(rest[len(groups) :]),
        logits_rows=logits_rows,
    )


def _table(items: tuple[PlanItem, ...], group: int) -> list[int]:
    """[S, most blocks], row after row; freed window blocks (-1) and the padding are 0, which nothing reads."""
    tables = [item.seq.tables[group] for item in items]
    most = max(map(len, tables), default=0)
    return [max(b, 0) for t in tables for b in t + [0] * (most - len(t))]


def _slots(items: tuple[PlanItem, ...], group: int, store: KVStore) -> list[int]:
    """[T], block * block_size + row; empty for groups without one row a token."""
    g, size = store.spec.groups[group], store.spec.block_size
    if g.kind == "state" or g.ratio != 1:
        return []
    return [
        item.seq.tables[group][at // size] * size + at % size
        for item in items
        for at in range(item.start, item.start + item.count)
    ]
