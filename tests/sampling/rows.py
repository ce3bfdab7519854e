"""Makers of resolved parameters and rows for the sampling tests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from deepseek_flash.sampling.params import ResolvedSampling, resolve
from deepseek_flash.sampling.sampler import SampleRow
from deepseek_flash.types import SamplingParams

VOCAB = 64
EOS = 2


def resolved(
    *,
    generation_config: Mapping[str, Any] | None = None,
    eos_ids: Iterable[int] = (EOS,),
    vocab_size: int = VOCAB,
    fallback: int = 256,
    fresh_seed: int = 11,
    **options: Any,
) -> ResolvedSampling:
    return resolve(
        SamplingParams(**options),
        generation_config=generation_config or {},
        eos_ids=eos_ids,
        vocab_size=vocab_size,
        fallback_max_new_tokens=fallback,
        fresh_seed=fresh_seed,
    )


def row(tokens: Sequence[int] = (5, 6, 7), prompt_len: int = 3, choice: int = 0, **options: Any) -> SampleRow:
    return SampleRow(resolved(**options), tokens, prompt_len, choice)
