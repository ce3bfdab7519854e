"""Values that users create or receive. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from deepseek_flash.errors import RequestError, bounds, near_or_all

FinishReason: TypeAlias = Literal["stop", "length", "tool_calls", "cancelled"]
Role: TypeAlias = Literal["system", "developer", "user", "assistant", "tool"]
TokenLogprobs: TypeAlias = dict[int, float]
"""Token id → natural-log probability, for one position; the chosen token is always in it."""


class SamplingParams(BaseModel):
    """How to choose tokens. ``None`` means "not said": the checkpoint's ``generation_config``
    decides where it speaks, else the default in brackets.

    Order of application: repetition, frequency and presence penalties, ``logit_bias``, forbidden ids
    (``min_new_tokens``), temperature, top_k, top_p, min_p. See docs/sampling.md for formulas.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=False)

    max_new_tokens: int | None = Field(default=None, ge=0)
    """Most tokens to produce [256 for raw prompts, up to the context's end for chat]. 0: score only."""
    min_new_tokens: int = Field(default=0, ge=0)
    """No end-of-text or stop id before so many tokens; stop strings are looked for in the text after them."""
    temperature: float | None = Field(default=None, ge=0.0, le=100.0)
    """0 is greedy [1.0]."""
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    """Smallest set of tokens whose probability reaches this [1.0 = off]."""
    top_k: int | None = Field(default=None, ge=0)
    """Only the k likeliest [0 = off]."""
    min_p: float | None = Field(default=None, ge=0.0, le=1.0)
    """Only tokens with at least this share of the likeliest one's probability [0 = off]."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer; a plain string is one stop."""
    include_stop: bool = False
    """Keep the stop string that matched at the end of the text."""
    stop_token_ids: tuple[int, ...] = ()
    """Further token ids that end the answer (end-of-text ids always do, unless ``ignore_eos``)."""
    ignore_eos: bool = False
    seed: int | None = Field(default=None, ge=0, lt=2**64)
    """Same seed, same tokens. None: fresh entropy for every request."""
    n: int = Field(default=1, ge=1, le=1024)
    """Number of independent answers."""
    logprobs: int | None = Field(default=None, ge=0, le=1000)
    """Report the chosen token's log-probability and that of so many likeliest, before any sampling change."""
    prompt_logprobs: int | None = Field(default=None, ge=0, le=1000)
    """The same for every prompt token but the first."""
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100.0)
    """Divides (or multiplies, if negative) logits of tokens seen in prompt or output [1.0 = off]."""
    frequency_penalty: float = Field(default=0.0, ge=-100.0, le=100.0)
    """Subtracted once per earlier occurrence in the output."""
    presence_penalty: float = Field(default=0.0, ge=-100.0, le=100.0)
    """Subtracted once if the token occurs in the output."""
    logit_bias: dict[int, float] = Field(default_factory=dict)
    """Token id → amount added to its logit."""
    add_special_tokens: bool = True
    """Let the tokenizer add its own beginning-of-text token to raw text prompts."""

    @field_validator("stop", mode="before")
    @classmethod
    def _stop(cls, v: Any) -> Any:
        if v is None:
            return ()
        if isinstance(v, str):
            v = (v,)
        if isinstance(v, (list, tuple, set, frozenset)):
            if any(isinstance(s, str) and s == "" for s in v):
                raise ValueError("a stop string cannot be empty")
            return tuple(v)
        raise ValueError("a string, or a list of strings, is needed")

    @field_validator("stop_token_ids", mode="before")
    @classmethod
    def _stop_ids(cls, v: Any) -> Any:
        if v is None:
            return ()
        return (v,) if isinstance(v, int) and not isinstance(v, bool) else v

    @field_validator("*", mode="before")
    @classmethod
    def _no_bool_as_number(cls, v: Any, info: Any) -> Any:
        if isinstance(v, bool) and info.field_name not in ("include_stop", "ignore_eos", "add_special_tokens"):
            raise ValueError("a number is needed, not a bool")
        return v

    def __init__(self, **options: Any) -> None:
        if "max_tokens" in options:
            if "max_new_tokens" in options:
                raise RequestError(
                    "max_tokens and max_new_tokens are the same option: give one", parameter="max_tokens"
                )
            options["max_new_tokens"] = options.pop("max_tokens")
        known = type(self).model_fields
        for name, value in options.items():
            if name not in known:
                raise RequestError(
                    f"unknown sampling option {name!r}{near_or_all(name, [*known, 'max_tokens'])}",
                    parameter=name,
                    value=value,
                )
        try:
            super().__init__(**options)
        except ValidationError as e:
            first = e.errors()[0]
            name = str(first["loc"][0]) if first["loc"] else ""
            what = first["msg"].removeprefix("Value error, ")
            allowed = bounds(known[name].metadata) if name in known else ""
            raise RequestError(
                f"{name}={options.get(name)!r}: {what}{allowed}", parameter=name, value=options.get(name)
            ) from None
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise RequestError(
                f"min_new_tokens={self.min_new_tokens} is more than max_new_tokens={self.max_new_tokens}",
                parameter="min_new_tokens",
                value=self.min_new_tokens,
            )

    def updated(self, **options: Any) -> SamplingParams:
        """A copy with these options changed, validated again."""
        if "max_tokens" in options:
            options["max_new_tokens"] = options.pop("max_tokens")
        said = {k: getattr(self, k) for k in self.model_fields_set}
        return SamplingParams(**{**said, **options})


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation. Plain dicts with the same keys are accepted everywhere."""

    role: str
    content: str
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts. ``cached_tokens`` of the prompt were found in the cache, not computed."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds since submission."""

    queue: float = 0.0
    """Until the first step that worked on the request."""
    first_token: float | None = None
    """Until the first token (TTFT)."""
    total: float = 0.0


@dataclass(frozen=True, slots=True)
class CacheReport:
    """Where the prompt's tokens came from."""

    prompt_tokens: int = 0
    l1_tokens: int = 0
    """Found on the device."""
    computed_tokens: int = 0
    preemptions: int = 0
    l2_tokens: int = 0
    """Brought back from the host tier."""
    l3_tokens: int = 0
    """Brought back from the disk tier."""
    load_seconds: float = 0.0
    """Time that the request waited for lower tiers."""
    miss_reason: str = ""
    """Why the lower tiers gave no more: ``absent``, ``not in memory`` (there is no disk tier), ``damaged``,
    ``slower than computing``, ``too slow``, ``disk stalled``, ``verifying``, ``prompt_logprobs``, or empty."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer to a prompt."""

    index: int = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or token id that ended it, when one did."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    reasoning: str = ""
    tool_calls: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """The result of a request. The flat fields are those of the first choice."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    prompt_token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """One entry a prompt token; the first is None (nothing precedes it)."""
    reasoning: str = ""
    tool_calls: tuple[Any, ...] = ()
    usage: Usage = field(default_factory=Usage)
    timings: Timings = field(default_factory=Timings)
    cache: CacheReport = field(default_factory=CacheReport)
    choices: tuple[Choice, ...] = field(default=(), repr=False)

    @classmethod
    def from_choices(cls, choices: tuple[Choice, ...], **shared: Any) -> Completion:
        """Build from choices in index order; the first gives the flat fields."""
        first = choices[0]
        return cls(
            text=first.text,
            token_ids=first.token_ids,
            finish_reason=first.finish_reason,
            stop_reason=first.stop_reason,
            logprobs=first.logprobs,
            reasoning=first.reasoning,
            tool_calls=first.tool_calls,
            choices=choices,
            **shared,
        )

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Score:
    """How likely a text is: one natural-log probability a token; None for the first (nothing precedes it)."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float | None, ...] = ()

    @property
    def total(self) -> float:
        """Sum of the known log-probabilities."""
        return sum(p for p in self.logprobs if p is not None)


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of a streamed answer. Joined ``text`` of one index equals the final text."""

    index: int = 0
    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[Any, ...] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    usage: Usage | None = None
    """On the last delta of the whole request only."""

    def merged(self, *later: Delta) -> Delta:
        """This delta followed by later ones of the same index."""
        parts = (self, *later)
        logprobs = [p.logprobs for p in parts if p.logprobs is not None]
        return replace(
            parts[-1],
            text="".join(p.text for p in parts),
            reasoning="".join(p.reasoning for p in parts),
            tool_calls=tuple(c for p in parts for c in p.tool_calls),
            token_ids=tuple(t for p in parts for t in p.token_ids),
            logprobs=tuple(at for given in logprobs for at in given) if logprobs else None,
        )
