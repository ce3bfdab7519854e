"""From a caller's words to a validated Request: prompts, messages, sampling options, context limits.

Runs on the caller's thread, so that a long prompt's tokenisation never holds up the engine and every
mistake is raised before any work is queued.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from deepseek_flash.errors import ChatTemplateError, ContextLengthError, RequestError, near_miss
from deepseek_flash.runtime.emit import Rules
from deepseek_flash.runtime.generation import Request
from deepseek_flash.runtime.stream import Channel
from deepseek_flash.sampling.params import ResolvedSampling, resolve
from deepseek_flash.sampling.rng import derive_seed, fresh_seed
from deepseek_flash.text.template import ChatTemplate, Segment
from deepseek_flash.text.tokenizer import Tokenizer
from deepseek_flash.types import Message, SamplingParams

RAW_DEFAULT_NEW_TOKENS = 256
"""Answer length of a raw prompt when nobody says; chat answers may fill the context."""

_OURS = frozenset(("messages", "add_generation_prompt", "bos_token", "eos_token"))
"""What every template is given."""

Messages = Sequence[Mapping[str, Any] | Message]


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request may ask for."""

    context: int
    """Most tokens of prompt and answer."""
    positions: int
    """Most tokens the checkpoint itself allows."""
    vocab_size: int
    """Ids below this may be sampled: both the model and the tokenizer know them."""
    prompt_ids: int
    """Ids below this may stand in a prompt: the model knows them (its table is often padded)."""


@dataclass
class RequestBuilder:
    """Makes Requests; safe to use from any thread."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    limits: Limits
    generation_config: Mapping[str, Any]
    eos_ids: frozenset[int]
    seed: int | None
    _ids: itertools.count[int] = field(default_factory=itertools.count)

    def from_text(self, prompt: str, params: SamplingParams) -> Request:
        if not isinstance(prompt, str):
            raise RequestError(
                f"a prompt must be a string, not {type(prompt).__name__}; "
                "token ids go into prompt_token_ids=, messages into chat()",
                parameter="prompt",
                value=prompt,
            )
        tokens = self.tokenizer.encode(prompt, add_special_tokens=params.add_special_tokens)
        return self._request(tokens, params, RAW_DEFAULT_NEW_TOKENS)

    def from_ids(self, ids: Sequence[int], params: SamplingParams) -> Request:
        if not hasattr(ids, "__iter__"):
            raise RequestError(
                f"prompt_token_ids must be one list of ints or a list of such lists, and {ids!r} is not a list",
                parameter="prompt_token_ids",
                value=ids,
            )
        tokens = []
        for i in ids:
            if isinstance(i, bool) or not hasattr(i, "__index__"):
                raise RequestError(
                    f"prompt_token_ids must be ints, not {type(i).__name__}", parameter="prompt_token_ids", value=i
                )
            tokens.append(int(i))
        return self._request(tokens, params, RAW_DEFAULT_NEW_TOKENS, "prompt_token_ids")

    def from_messages(self, messages: Messages, params: SamplingParams) -> Request:
        if not params.add_special_tokens:
            raise RequestError(
                "add_special_tokens=False is for raw prompts; a chat prompt has the tokens its template writes",
                parameter="add_special_tokens",
                value=False,
            )
        tokens = self.tokenizer.encode_segments(self.render(messages))
        return self._request(tokens, params, self.limits.context)

    def render(self, messages: Messages, *, add_generation_prompt: bool = True, **variables: Any) -> list[Segment]:
        """Messages through the checkpoint's chat template."""
        if self.template is None:
            raise ChatTemplateError(
                "this checkpoint has no chat template, and guessing one gives wrong prompts: "
                "use generate() with the prompt text the model was trained on",
                parameter="messages",
            )
        for name, value in variables.items():
            if name != "continue_final" and name not in self.template.names:
                raise RequestError(
                    f"{name}={value!r}: this checkpoint's chat template never looks at {name!r}"
                    f"{near_miss(name, self.template.names - _OURS)}",
                    parameter=name,
                    value=value,
                )
        return self.template.render(messages, add_generation_prompt=add_generation_prompt, **variables)

    def _request(self, tokens: list[int], params: SamplingParams, fallback: int, parameter: str = "prompt") -> Request:
        if not tokens:
            raise RequestError("the prompt is empty and this tokenizer adds no tokens of its own", parameter=parameter)
        for token in (min(tokens), max(tokens)):  # a tokenizer may know more ids than the model
            if not 0 <= token < self.limits.prompt_ids:
                raise RequestError(
                    f"{parameter}: token id {token} is outside the model's vocabulary [0, {self.limits.prompt_ids})",
                    parameter=parameter,
                    value=token,
                )
        sampling = resolve(
            params,
            generation_config=self.generation_config,
            eos_ids=self.eos_ids,
            vocab_size=self.limits.vocab_size,
            fallback_max_new_tokens=fallback,
            fresh_seed=0,  # until the request is known to be accepted
        )
        room = self._room(len(tokens), sampling)
        rules = Rules(
            max_new_tokens=min(sampling.max_new_tokens, room),
            min_new_tokens=sampling.min_new_tokens,
            end_ids=sampling.ending_ids,
            stops=params.stop,
            include_stop=params.include_stop,
            logprobs=params.logprobs is not None,
        )
        number = next(self._ids)  # only now: a refused request takes no number, and so no seed
        if params.seed is None:
            seed = fresh_seed() if self.seed is None else derive_seed(self.seed, number)
            sampling = replace(sampling, seed=seed)
        return Request(
            number,
            tuple(tokens),
            sampling,
            rules,
            params.n,
            params.prompt_logprobs,
            Channel(),
            time.perf_counter(),
        )

    def _room(self, prompt: int, sampling: ResolvedSampling) -> int:
        """Tokens the answer may have; refuses what can never fit, with the numbers."""
        limit, wanted = self.limits.context, sampling.max_new_tokens
        if prompt > limit or (prompt == limit and wanted > 0):
            longer = (
                f", or open the engine with a larger max_model_len (the checkpoint allows {self.limits.positions})"
                if limit < self.limits.positions
                else ", which is the checkpoint's own limit"
            )
            raise ContextLengthError(
                f"the prompt has {prompt} tokens and at least {min(wanted, 1)} new one is wanted, but the context "
                f"holds {limit} (max_model_len): shorten the prompt{longer}",
                tokens=prompt,
                limit=limit,
            )
        room = limit - prompt
        if sampling.min_new_tokens > room:
            raise ContextLengthError(
                f"min_new_tokens={sampling.min_new_tokens} after a prompt of {prompt} tokens "
                f"needs {prompt + sampling.min_new_tokens}, but the context holds {limit} (max_model_len)",
                tokens=prompt + sampling.min_new_tokens,
                limit=limit,
            )
        return room
