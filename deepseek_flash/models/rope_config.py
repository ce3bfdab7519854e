"""Rotary settings of a ``config.json``, in its old spelling and that of transformers 5."""

from __future__ import annotations

from dataclasses import dataclass

from deepseek_flash.layers.rope import RopeScaling
from deepseek_flash.models.base import ConfigReader

LEAST = 1e-3
"""Scales and turns are larger: with less, angles leave the range of numbers."""
SUPPORTED = ("default", "linear", "llama3", "yarn", "factors")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """What ``Rotary`` needs."""

    rot: int
    """Dimensions of a head that turn."""
    theta: float
    scaling: RopeScaling


def read_rope(c: ConfigReader, head_dim: int, max_position: int) -> RopeConfig:
    """From ``rope_theta`` and ``rope_scaling``, or from ``rope_parameters``; the latter holds both."""
    new = c.inside("rope_parameters")
    r = new if new.config else c.inside("rope_scaling")
    theta = r.number("rope_theta", c.number("rope_theta", 10000.0, above=1.0), above=1.0)
    share = r.number("partial_rotary_factor", c.number("partial_rotary_factor", 1.0, most=1.0), most=1.0)
    rot = int(head_dim * share)
    if rot < 2 or rot % 2:
        raise c.error("head_dim", head_dim, f"an even number of turning dimensions (it gives {rot})")
    kind = r.config.get("rope_type", r.config.get("type", "default"))
    if kind not in SUPPORTED:
        raise c.unsupported(f"{'rope_parameters' if new.config else 'rope_scaling'} rope_type", kind, SUPPORTED)
    original = c.integer(
        "original_max_position_embeddings", r.integer("original_max_position_embeddings", max_position)
    )
    return RopeConfig(rot, theta, _scaling(kind, r, rot, original, max_position))


def _scaling(kind: str, r: ConfigReader, rot: int, original: int, max_position: int) -> RopeScaling:
    if kind == "linear":
        return RopeScaling(kind, factor=r.number("factor", above=LEAST))
    if kind == "llama3":
        low, high = r.number("low_freq_factor"), r.number("high_freq_factor")
        if high <= low:
            raise r.error("high_freq_factor", high, f"a number above low_freq_factor={low:g}")
        return RopeScaling(
            kind, factor=r.number("factor", above=LEAST), original=original, low_freq_factor=low, high_freq_factor=high
        )
    if kind == "yarn":
        return RopeScaling(
            kind,
            factor=r.number("factor", max_position / original, above=LEAST),
            original=original,
            beta_fast=_or_zero(r, "beta_fast", 32.0),
            beta_slow=_or_zero(r, "beta_slow", 1.0),
            truncate=r.boolean("truncate", True),
            magnitude=None if r.config.get("attention_factor") is None else r.number("attention_factor"),
            mscale=_or_zero(r, "mscale", 0.0),
            mscale_all_dim=_or_zero(r, "mscale_all_dim", 0.0),
        )
    if kind == "factors":
        given = r.config.get("factors")
        good = isinstance(given, (list, tuple)) and all(type(f) in (int, float) and LEAST < f <= 1e15 for f in given)
        if not good or len(given) != rot // 2:  # type: ignore[arg-type]
            raise r.error("factors", given, f"a list of {rot // 2} positive numbers (above {LEAST:g})")
        return RopeScaling(kind, divisors=tuple(float(f) for f in given))  # type: ignore[union-attr]
    return RopeScaling()


def _or_zero(r: ConfigReader, key: str, default: float) -> float:
    """A positive number; zero means the default, as in transformers."""
    value = r.config.get(key)
    return default if type(value) in (int, float) and value == 0 else r.number(key, default, above=LEAST)
