"""Rotary frequencies by recipe, and the tables of cosines and sines that kernels read.

Formulas: default, Su et al. 2021; linear, Chen et al. 2023 (positions divided by a factor); llama3, Meta's reference
code for Llama 3.1; yarn, Peng et al. 2023, with the magnitude rules of transformers. ``factors`` are divisors of each
frequency, as GGUF files carry them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

_CHUNK = 2048
"""Positions computed at a time: a table's values never depend on when it grew."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How the frequencies of a longer context are made. Which fields count depends on ``kind``."""

    kind: str = "default"
    """``default``, ``linear``, ``llama3``, ``yarn`` or ``factors``."""
    factor: float = 1.0
    original: int = 0
    """Tokens of the context trained at first (llama3, yarn)."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    """llama3."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    magnitude: float | None = None
    """yarn: what cosines and sines are multiplied with; None: from the factor and ``mscale``."""
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    divisors: tuple[float, ...] = ()
    """factors: one a frequency."""


def frequencies(rot: int, theta: float, scaling: RopeScaling) -> tuple[torch.Tensor, float]:
    """Angle per position of each of the ``rot / 2`` pairs, fp32, and the magnitude of cosines and sines."""
    base = 1.0 / (theta ** (torch.arange(0, rot, 2, dtype=torch.float32) / rot))
    if scaling.kind == "linear":
        return base / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _llama3(base, scaling), 1.0
    if scaling.kind == "yarn":
        return _yarn(base, rot, theta, scaling), _yarn_magnitude(scaling)
    if scaling.kind == "factors":
        return base / torch.tensor(scaling.divisors, dtype=torch.float32), 1.0
    return base, 1.0


def _llama3(base: torch.Tensor, s: RopeScaling) -> torch.Tensor:
    """Long waves are slowed by the factor, short ones kept, those between blended by their turns in the old context."""
    turns = s.original * base / (2 * math.pi)
    share = ((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)).clamp(0.0, 1.0)
    return (1 - share) * base / s.factor + share * base


def _yarn(base: torch.Tensor, rot: int, theta: float, s: RopeScaling) -> torch.Tensor:
    """Pairs with more than ``beta_fast`` turns in the old context are kept, those below ``beta_slow`` slowed."""

    def pair_with(turns: float) -> float:
        return rot * math.log(s.original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_with(s.beta_fast), pair_with(s.beta_slow)
    if s.truncate:
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, rot - 1.0)
    if low == high:
        high += 0.001
    slowed = ((torch.arange(rot // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    return base / s.factor * slowed + base * (1 - slowed)


def _yarn_magnitude(s: RopeScaling) -> float:
    """The given one; the ratio of two mscales; else 0.1 ln(factor) + 1."""

    def grown(mscale: float) -> float:
        return 0.1 * mscale * math.log(s.factor) + 1.0 if s.factor > 1.0 else 1.0

    if s.magnitude is not None:
        return s.magnitude
    if s.mscale and s.mscale_all_dim:
        return grown(s.mscale) / grown(s.mscale_all_dim)
    return grown(1.0)


class Rotary:
    """Cosines and sines of the positions seen so far. One a model; not thread-safe."""

    def __init__(self, rot: int, theta: float, scaling: RopeScaling) -> None:
        self.frequencies, self.magnitude = frequencies(rot, theta, scaling)
        self.cos = torch.empty(0, 1, rot)
        self.sin = torch.empty(0, 1, rot)
        """[positions, 1, rot], laid out as the ``rope`` op takes them."""

    def rows(self, positions: torch.Tensor, context: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``cos``, ``sin`` [T, 1, rot] of ``positions`` int64 [T]; the last of them all is ``context - 1``."""
        while len(self.cos) < context:
            self._grow()
        if len(positions) == 1:  # the last of its sequence; views cost a lone step less than copies
            return self.cos.narrow(0, context - 1, 1), self.sin.narrow(0, context - 1, 1)
        return self.cos.index_select(0, positions), self.sin.index_select(0, positions)

    def _grow(self) -> None:
        at = torch.arange(len(self.cos), len(self.cos) + _CHUNK, dtype=torch.float32)
        angle = at[:, None] * self.frequencies
        cos, sin = angle.cos() * self.magnitude, angle.sin() * self.magnitude
        self.cos = torch.cat((self.cos, torch.cat((cos, cos), dim=-1).unsqueeze(1)))
        self.sin = torch.cat((self.sin, torch.cat((-sin, sin), dim=-1).unsqueeze(1)))
