"""Logits rows → tokens. Every row is computed alone, so neighbours never change a result.

Order (docs/sampling.md has the formulas): repetition, frequency and presence penalties, logit_bias,
forbidden ids, temperature, top_k, top_p, min_p, draw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deepseek_flash.errors import InternalError
from deepseek_flash.kernels.ops.sample import ARGMAX
from deepseek_flash.sampling.params import ResolvedSampling
from deepseek_flash.sampling.rng import uniform

# json.dumps(allow_nan=False) must accept every reported log-probability.
LOWEST_LOGPROB = float(torch.finfo(torch.float32).min)
# Below this a division in fp32 would meet zero; the distribution is one-hot long before.
_LOWEST_TEMPERATURE = 1e-30
# Candidates looked at before top_p sorts a whole vocabulary: nearly always enough, and 20 times cheaper.
_NUCLEUS_GUESSES = (256, 4096)
_NOTHING = float("-inf")


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

    def seen(self, x: Tensor) -> Tensor:
        """int64: the ids in prompt and output that have a logit in ``x``."""
        if self._seen_ids is None:
            self._seen_ids = _inside(self._seen, x)
        return self._seen_ids

    def output(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The ids in the output, int64, and how often each occurs, fp64. They were sampled, so all have a logit."""
        ids = torch.tensor(list(self._output), dtype=torch.int64, device=x.device)
        return ids, torch.tensor(list(self._output.values()), dtype=torch.float64, device=x.device)


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
    """Chooses tokens with ids below ``vocab_limit``; holds no state between calls. ``argmax``: the op, implemented."""

    def __init__(self, vocab_limit: int, argmax: Callable[[Tensor], Tensor] = ARGMAX.reference) -> None:
        self.vocab_limit, self._argmax = vocab_limit, argmax

    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[Sampled | InternalError]:
        """One result a row, in order; ``logits`` [rows, vocab] fp32 are not changed.

        A row whose logits are not numbers gives an InternalError in its place; the others are unaffected.
        """
        if logits.ndim != 2 or logits.shape[0] != len(rows):
            raise InternalError(f"{len(rows)} rows to sample, but logits of shape {tuple(logits.shape)}")
        allowed = logits[:, : self.vocab_limit]
        greedy = [i for i, row in enumerate(rows) if row.plainly_greedy]
        best: dict[int, int | None] = {}
        if greedy:
            block = allowed if len(greedy) == len(rows) else allowed[greedy]
            ids = self._argmax(block).tolist()
            best = {i: None if t < 0 else t for i, t in zip(greedy, ids, strict=True)}
        out: list[Sampled | InternalError] = []
        for i, row in enumerate(rows):
            token = best[i] if i in best else choose(allowed[i], row)
            if token is None:
                out.append(InternalError(f"the model's logits for token {len(row.tokens)} hold no usable number"))
                continue
            try:
                out.append(Sampled(token, self._logprobs(logits[i], token, row.params.logprobs)))
            except InternalError as error:  # this row's, not its neighbours'
                out.append(error)
        return out

    def _logprobs(self, logits: Tensor, token: int, top: int | None) -> dict[int, float] | None:
        return None if top is None else raw_logprobs(logits, token, top, self.vocab_limit)


def choose(logits: Tensor, row: SampleRow) -> int | None:
    """The token for one row of logits [vocab] fp32, or None if no id has a usable number."""
    params = row.params
    x = shape(logits, row)
    best = int(x.argmax())
    if not torch.isfinite(x[best]):
        return None
    if params.temperature == 0.0:
        return best
    ids, weights = candidates(x, params)
    cumulative = weights.cumsum(0, dtype=torch.float64)
    u = uniform(params.seed, row.choice, len(row.tokens))
    at = int(torch.searchsorted(cumulative, u * cumulative[-1], right=True))
    if at == len(cumulative):  # u * total rounded up to total
        at = int(weights.nonzero()[-1])
    return at if ids is None else int(ids[at])


def shape(logits: Tensor, row: SampleRow) -> Tensor:
    """Logits [vocab] after penalties, biases and forbidden ids: a new tensor, unless nothing changes.

    Repetition as in arXiv 1909.05858: seen in prompt or output, x / r if x > 0 else x * r.
    Frequency and presence as OpenAI publishes them: x - count * frequency - (count > 0) * presence,
    counted over the output only.
    """
    params = row.params
    if not params.shapes_logits and not row.may_not_end:
        return logits
    x = logits.clone()
    penalised = bool(params.frequency_penalty or params.presence_penalty)
    if params.repetition_penalty != 1.0 or penalised:
        row.history.read(row.tokens, row.prompt_len)
    if params.repetition_penalty != 1.0:
        seen = row.history.seen(x)
        at = x[seen]
        x[seen] = torch.where(at < 0, at * params.repetition_penalty, at / params.repetition_penalty)
    if penalised and row.produced:
        used, counts = row.history.output(x)
        x[used] -= (counts * params.frequency_penalty + params.presence_penalty).to(x.dtype)
    if params.logit_bias:
        biases = torch.tensor(list(params.logit_bias.values()), dtype=x.dtype, device=x.device)
        x[list(params.logit_bias)] += biases
    if row.may_not_end:
        x[_inside(params.ending_ids, x)] = _NOTHING
    return x


def _inside(ids: Iterable[int], x: Tensor) -> Tensor:
    return torch.tensor([i for i in ids if 0 <= i < x.numel()], dtype=torch.int64, device=x.device)


def candidates(x: Tensor, params: ResolvedSampling) -> tuple[Tensor | None, Tensor]:
    """Kept ids, ascending, and their weights (the likeliest has 1; not normalised).

    ids None stands for every id. ``x`` [vocab] has a finite largest element; temperature is above 0.
    """
    z = (x - x.max()) / max(params.temperature, _LOWEST_TEMPERATURE)
    ids: Tensor | None = None
    if 0 < params.top_k < z.numel():
        # Everything that ties with the k-th stays, as in transformers.
        ids = (z >= z.topk(params.top_k, sorted=False).values.min()).nonzero().squeeze(1)
        z = z[ids]
    if params.top_p < 1.0:
        kept = _nucleus(z, params.top_p)
        ids = kept if ids is None else ids[kept]
        z = z[kept]
    weights = z.exp()
    if params.min_p > 0.0:
        kept = (weights >= params.min_p).nonzero().squeeze(1)
        ids = kept if ids is None else ids[kept]
        weights = weights[kept]
    return ids, weights


def _nucleus(z: Tensor, top_p: float) -> Tensor:
    """Positions, ascending, of the smallest set of likeliest tokens whose probability reaches ``top_p``.

    Equals rank by position, so the set does not depend on the sort.
    """
    total = z.exp().sum(dtype=torch.float64)
    for size in (*_NUCLEUS_GUESSES, z.numel()):
        order = largest(z, size)
        mass = (z[order].exp().double() / total).cumsum(0)
        if bool(mass[-1] >= top_p) or size >= z.numel():
            break
    before = torch.cat([mass.new_zeros(1), mass[:-1]])
    return order[before < top_p].sort().values


def largest(x: Tensor, size: int) -> Tensor:
    """Positions of the ``size`` largest of ``x``, largest first, equals by position; more when equals end the list."""
    if size < x.numel():
        at = (x >= x.topk(size, sorted=False).values.min()).nonzero().squeeze(1)
    else:
        at = torch.arange(x.numel(), device=x.device)
    return at[x[at].sort(descending=True, stable=True).indices]


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
