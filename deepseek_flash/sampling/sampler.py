"""Logits rows → tokens. Every row is computed alone, so neighbours never change a result.

Requests' parameters become the choices of the ``sample`` op; rows that are plainly greedy share one ``argmax``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deepseek_flash.errors import InternalError
from deepseek_flash.kernels.ops.sample import ARGMAX, SAMPLE, Choice, largest
from deepseek_flash.sampling.params import ResolvedSampling
from deepseek_flash.sampling.rng import uniform

# json.dumps(allow_nan=False) must accept every reported log-probability.
LOWEST_LOGPROB = float(torch.finfo(torch.float32).min)


class History:
    """How often each id occurs in a token list that only grows. Kept up to date, because counting anew for every
    token would make long answers cost the square of their length."""

    def __init__(self) -> None:
        self._at = 0
        self._seen: set[int] = set()
        self._seen_ids: Tensor | None = None
        self._output: dict[int, int] = {}

    def read(self, tokens: Sequence[int], prompt_len: int) -> None:
        """Take in what was appended since the last call."""
        for at, token in enumerate(tokens[self._at :], self._at):
            if token not in self._seen:
                self._seen.add(token)
                self._seen_ids = None
            if at >= prompt_len:
                self._output[token] = self._output.get(token, 0) + 1
        self._at = len(tokens)

    def seen(self, n: int) -> Tensor:
        """int64: the ids in prompt and output that are below ``n``."""
        if self._seen_ids is None:
            self._seen_ids = _inside(self._seen, n)
        return self._seen_ids

    def output(self) -> tuple[Tensor, Tensor]:
        """The ids in the output, int64, and how often each occurs, fp64. They were sampled, so all have a logit."""
        ids = torch.tensor(list(self._output), dtype=torch.int64)
        return ids, torch.tensor(list(self._output.values()), dtype=torch.float64)


@dataclass(frozen=True, slots=True)
class SampleRow:
    """What belongs to one row of logits. May be kept from token to token while ``tokens`` grows."""

    params: ResolvedSampling
    tokens: Sequence[int]
    """Prompt and output so far; the logits are for the token that follows."""
    prompt_len: int
    """Tokens of the prompt, the first ones of ``tokens``."""
    choice: int = 0
    """Index of the answer among the ``n`` of its request."""
    prompt_logprobs: int | None = None
    """Report the prompt's own tokens and so many likeliest; the sampler leaves it to ``prompt_logprobs``."""
    history: History = field(default_factory=History, repr=False, compare=False)
    """What ``tokens`` hold, for the penalties."""

    @property
    def produced(self) -> int:
        """Output tokens so far."""
        return len(self.tokens) - self.prompt_len

    @property
    def may_not_end(self) -> bool:
        """Whether ids that end the answer are forbidden for this token."""
        return self.produced < self.params.min_new_tokens

    @property
    def plainly_greedy(self) -> bool:
        """Whether the answer is the argmax of the untouched row."""
        return self.params.temperature == 0.0 and not self.params.shapes_logits and not self.may_not_end


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token chosen for a row."""

    token: int
    logprobs: dict[int, float] | None = None
    """Natural log-probability before any sampling change: the chosen token first, then the likeliest."""


class Sampler:
    """Chooses tokens with ids below ``vocab_limit``; holds no state between calls. ``argmax``, ``sample``: the ops,
    implemented."""

    def __init__(
        self,
        vocab_limit: int,
        argmax: Callable[[Tensor], Tensor] = ARGMAX.reference,
        sample: Callable[[Tensor, Sequence[Choice]], Tensor] = SAMPLE.reference,
    ) -> None:
        self.vocab_limit, self._argmax, self._sample = vocab_limit, argmax, sample

    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[Sampled | InternalError]:
        """One result a row, in order; ``logits`` [rows, vocab] fp32 are not changed.

        A row whose logits are not numbers gives an InternalError in its place; the others are unaffected.
        """
        if logits.ndim != 2 or logits.shape[0] != len(rows):
            raise InternalError(f"{len(rows)} rows to sample, but logits of shape {tuple(logits.shape)}")
        allowed = logits if logits.shape[1] <= self.vocab_limit else logits[:, : self.vocab_limit]
        plain = [row.plainly_greedy for row in rows]
        if all(plain):  # as in most steps of a greedy request: no dicts for it
            chosen: Sequence[int] = self._argmax(allowed).tolist()
        else:
            greedy = [i for i, is_plain in enumerate(plain) if is_plain]
            others = [i for i, is_plain in enumerate(plain) if not is_plain]
            tokens = dict(zip(greedy, self._argmax(_some(allowed, greedy)).tolist(), strict=True)) if greedy else {}
            choices = [choice_of(rows[i], allowed.shape[1]) for i in others]
            tokens |= zip(others, self._sample(_some(allowed, others), choices).tolist(), strict=True)
            chosen = [tokens[i] for i in range(len(rows))]
        out: list[Sampled | InternalError] = []
        for i, (row, token) in enumerate(zip(rows, chosen, strict=True)):
            if token < 0:
                out.append(InternalError(f"the model's logits for token {len(row.tokens)} hold no usable number"))
                continue
            try:
                top = row.params.logprobs
                out.append(Sampled(token, None if top is None else self._logprobs(logits[i], token, top)))
            except InternalError as error:  # this row's, not its neighbours'
                out.append(error)
        return out

    def _logprobs(self, logits: Tensor, token: int, top: int) -> dict[int, float]:
        return raw_logprobs(logits, token, top, self.vocab_limit)


def _some(logits: Tensor, rows: list[int]) -> Tensor:
    return logits if len(rows) == logits.shape[0] else logits[rows]


def choice_of(row: SampleRow, n: int) -> Choice:
    """What the sample op is to do with a row of ``n`` logits."""
    params = row.params
    repeats, counts = params.repetition_penalty != 1.0, bool(params.frequency_penalty or params.presence_penalty)
    if repeats or counts:
        row.history.read(row.tokens, row.prompt_len)
    used, times = row.history.output() if counts and row.produced else (None, None)
    return Choice(
        params.temperature,
        params.top_k,
        params.top_p,
        params.min_p,
        draw=uniform(params.seed, row.choice, len(row.tokens)) if params.temperature else 0.0,
        repetition=params.repetition_penalty,
        seen=row.history.seen(n) if repeats else None,
        frequency=params.frequency_penalty,
        presence=params.presence_penalty,
        used=used,
        times=times,
        bias_ids=torch.tensor(list(params.logit_bias), dtype=torch.int64) if params.logit_bias else None,
        bias=torch.tensor(list(params.logit_bias.values()), dtype=torch.float32) if params.logit_bias else None,
        forbidden=_inside(params.ending_ids, n) if row.may_not_end else None,
    )


def _inside(ids: Iterable[int], n: int) -> Tensor:
    return torch.tensor([i for i in ids if 0 <= i < n], dtype=torch.int64)


def raw_logprobs(logits: Tensor, token: int, top: int, vocab_limit: int) -> dict[int, float]:
    """log softmax of one row [vocab] at ``token`` and at the ``top`` likeliest ids below ``vocab_limit``."""
    norm = logits.logsumexp(0)
    if not torch.isfinite(norm):
        raise InternalError(f"the model's logits before token id {token} hold NaN or infinity")
    at = [token]
    if top:
        at += [i for i in largest(logits[:vocab_limit], top)[:top].tolist() if i != token]
    values = (logits[at] - norm).clamp(LOWEST_LOGPROB, 0.0)
    return dict(zip(at, values.tolist(), strict=True))


def prompt_logprobs(
    logits: Tensor, next_ids: Sequence[int], top: int, vocab_limit: int | None = None
) -> list[dict[int, float]]:
    """For each row of logits [rows, vocab]: log-probabilities of the token that follows and of the ``top`` likeliest.

    Equal, bit for bit, to what ``Sampler.sample`` reports for the same logits.
    """
    if logits.shape[0] != len(next_ids):
        raise InternalError(f"{len(next_ids)} following tokens for logits of shape {tuple(logits.shape)}")
    limit = logits.shape[1] if vocab_limit is None else vocab_limit
    return [raw_logprobs(row, token, top, limit) for row, token in zip(logits, next_ids, strict=True)]
