"""What a request asked for, joined with what the checkpoint says, as concrete values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from deepseek_flash.errors import FormatError, RequestError
from deepseek_flash.types import SamplingParams

# Largest amount logit_bias may add: far beyond any logit, far from the end of fp32.
MAX_BIAS = 1e30


@dataclass(frozen=True, slots=True)
class ResolvedSampling:
    """Concrete sampling values of one request; every ``None`` of SamplingParams is decided here."""

    temperature: float
    """0 is greedy."""
    top_k: int
    """0 is off."""
    top_p: float
    """1 is off."""
    min_p: float
    """0 is off."""
    repetition_penalty: float
    """1 is off."""
    frequency_penalty: float
    presence_penalty: float
    logit_bias: Mapping[int, float]
    """Token id → amount added to its logit; every id is in the vocabulary."""
    seed: int
    logprobs: int | None
    """Report the chosen token and so many likeliest; None reports nothing."""
    min_new_tokens: int
    max_new_tokens: int
    stop_ids: frozenset[int]
    """Ids that end the answer because the request said so."""
    eos_ids: frozenset[int]
    """Ids that end the answer unless ``ignore_eos``."""
    ignore_eos: bool

    @property
    def ending_ids(self) -> frozenset[int]:
        """Every id that ends the answer."""
        return self.stop_ids if self.ignore_eos else self.stop_ids | self.eos_ids

    @property
    def shapes_logits(self) -> bool:
        """Whether penalties or biases change logits before temperature."""
        return bool(
            self.repetition_penalty != 1.0 or self.frequency_penalty or self.presence_penalty or self.logit_bias
        )


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What a checkpoint's ``generation_config`` says about sampling; None where it is silent."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None


def _number(config: Mapping[str, Any], key: str, low: float, high: float, *, above: bool = False) -> float | None:
    value = config.get(key)
    if value is None:
        return None
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not good or not low <= value <= high or (above and value == low):  # NaN and numbers beyond floats are neither
        raise FormatError(
            f"generation_config: {key}={value!r} is not a number {'above' if above else 'from'} {low:g} "
            f"{'up ' if above else ''}to {high:g}; correct the file, or remove the key",
            file="generation_config.json",
        )
    return float(value)


def _count(config: Mapping[str, Any], key: str, low: int) -> int | None:
    value = _number(config, key, low, 2**62)
    if value is not None and not value.is_integer():
        raise FormatError(
            f"generation_config: {key}={config[key]!r} is not a whole number; correct the file, or remove the key",
            file="generation_config.json",
        )
    return None if value is None else int(value)


def read_generation_config(config: Mapping[str, Any]) -> GenerationDefaults:
    """The sampling defaults of a checkpoint; a malformed value is a FormatError that names its key."""
    sample = config.get("do_sample")
    if sample is not None and not isinstance(sample, bool):
        raise FormatError(
            f"generation_config: do_sample={sample!r} is neither true nor false; correct the file, or remove the key",
            file="generation_config.json",
        )
    temperature = _number(config, "temperature", 0.0, 100.0)
    return GenerationDefaults(
        temperature=0.0 if sample is False else temperature,
        top_k=_count(config, "top_k", 0),
        top_p=_number(config, "top_p", 0.0, 1.0, above=True),
        min_p=_number(config, "min_p", 0.0, 1.0),
        repetition_penalty=_number(config, "repetition_penalty", 0.01, 100.0),
        max_new_tokens=_count(config, "max_new_tokens", 1),
    )


def _known_ids(parameter: str, ids: Iterable[int], vocab_size: int) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"{parameter}: token id {token} is not in the vocabulary; ids are 0 to {vocab_size - 1}",
                parameter=parameter,
                value=token,
            )


def _bias(given: Mapping[int, float]) -> dict[int, float]:
    for token, amount in given.items():
        if not abs(amount) <= MAX_BIAS:
            raise RequestError(
                f"logit_bias: {amount!r} for token id {token} must be from {-MAX_BIAS:g} to {MAX_BIAS:g}",
                parameter="logit_bias",
                value=amount,
            )
    return {token: amount for token, amount in given.items() if amount != 0.0}


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def resolve(
    params: SamplingParams,
    *,
    generation_config: Mapping[str, Any],
    eos_ids: Iterable[int],
    vocab_size: int,
    fallback_max_new_tokens: int,
    fresh_seed: int,
) -> ResolvedSampling:
    """Decide every value: the request's own, else the checkpoint's, else the default.

    ``vocab_size`` is the number of ids that may be sampled. Raises RequestError for what the request
    got wrong and FormatError for a malformed ``generation_config``.
    """
    said = read_generation_config(generation_config)
    _known_ids("logit_bias", params.logit_bias, vocab_size)
    _known_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    most = _first(params.max_new_tokens, said.max_new_tokens, fallback_max_new_tokens)
    if params.min_new_tokens > most:
        raise RequestError(
            f"min_new_tokens={params.min_new_tokens} is more than the {most} tokens this request may produce; "
            "give a larger max_new_tokens or a smaller min_new_tokens",
            parameter="min_new_tokens",
            value=params.min_new_tokens,
        )
    return ResolvedSampling(
        temperature=_first(params.temperature, said.temperature, 1.0),
        top_k=_first(params.top_k, said.top_k, 0),
        top_p=_first(params.top_p, said.top_p, 1.0),
        min_p=_first(params.min_p, said.min_p, 0.0),
        repetition_penalty=_first(params.repetition_penalty, said.repetition_penalty, 1.0),
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        logit_bias=_bias(params.logit_bias),
        seed=_first(params.seed, fresh_seed),
        logprobs=params.logprobs,
        min_new_tokens=params.min_new_tokens,
        max_new_tokens=most,
        stop_ids=frozenset(params.stop_token_ids),
        eos_ids=frozenset(token for token in eos_ids if 0 <= token < vocab_size),
        ignore_eos=params.ignore_eos,
    )
