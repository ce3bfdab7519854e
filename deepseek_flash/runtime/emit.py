"""From sampled tokens to text, stops, finish reasons and deltas: one Answer per choice."""

from __future__ import annotations

from dataclasses import dataclass, field

from deepseek_flash.text.detokenize import Detokenizer
from deepseek_flash.text.stops import StopChecker
from deepseek_flash.types import Choice, Delta, FinishReason, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Rules:
    """What ends an answer; shared by all choices of a request."""

    max_new_tokens: int
    min_new_tokens: int
    end_ids: frozenset[int]
    """End-of-text and stop token ids that count for this request."""
    stops: tuple[str, ...]
    include_stop: bool
    logprobs: bool


@dataclass(slots=True)
class Answer:
    """The growing answer of one choice."""

    index: int
    rules: Rules
    detokenizer: Detokenizer
    checker: StopChecker
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    @classmethod
    def begin(cls, index: int, rules: Rules, detokenizer: Detokenizer) -> Answer:
        return cls(index, rules, detokenizer, StopChecker(rules.stops, rules.include_stop))

    def push(self, token: int, logprobs: TokenLogprobs | None) -> Delta:
        """Take one sampled token; the delta may have empty text while a character or stop is undecided."""
        rules = self.rules
        self.token_ids.append(token)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        piece = ""
        if token in rules.end_ids:
            if rules.include_stop:
                piece = self._release(self.detokenizer.push(token))
            if self.finish_reason is None:  # else a stop string stands in this token's own text
                self.finish_reason, self.stop_reason = "stop", token
            piece += self._flush()
        else:
            piece = self._release(self.detokenizer.push(token))
            if self.finish_reason is None and len(self.token_ids) >= rules.max_new_tokens:
                self.finish_reason = "length"
                piece += self._flush()
        return self._delta(piece, (token,), (logprobs,) if logprobs is not None else None)

    def end(self, reason: FinishReason) -> Delta:
        """End without a further token (cancelled, or nothing was asked for)."""
        self.finish_reason = reason
        return self._delta(self._flush(), (), None)

    def _release(self, piece: str, *, last: bool = False) -> str:
        """What of the text so far can be shown; all of it if this is the ``last`` piece."""
        if len(self.token_ids) <= self.rules.min_new_tokens:
            return piece  # text of the first min_new_tokens is not searched for stops
        out = self.checker.push(piece)
        if last and self.checker.matched is None:
            out += self.checker.finish()
        if self.checker.matched is not None:
            self.finish_reason, self.stop_reason = "stop", self.checker.matched
        return out

    def _flush(self) -> str:
        """Text still held back; a stop completed by it counts."""
        return self._release(self.detokenizer.finish(), last=True) if self.checker.matched is None else ""

    def _delta(self, piece: str, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...] | None) -> Delta:
        if piece:
            self.text.append(piece)
        return Delta(
            index=self.index,
            text=piece,
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def choice(self) -> Choice:
        return Choice(
            index=self.index,
            text="".join(self.text),
            token_ids=tuple(self.token_ids),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=tuple(self.logprobs) if self.rules.logprobs else None,
        )
