"""Random numbers that depend on (seed, choice, position) only: not on the batch, the thread or the process."""

from __future__ import annotations

import secrets

import numpy as np

_MASK = 2**64 - 1
# A second key word that no choice index can take, so derived seeds never share a stream with draws.
_SEEDS = _MASK


def _raw(seed: int, stream: int, position: int) -> int:
    """64 random bits: the first word of Philox-4x64-10 with key (seed, stream) and counter ``position``."""
    key = np.array([seed & _MASK, stream & _MASK], dtype=np.uint64)
    counter = np.array([position & _MASK, 0, 0, 0], dtype=np.uint64)
    return int(np.random.Philox(key=key, counter=counter).random_raw())


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) for the token at ``position`` (index in the sequence) of answer ``choice``."""
    return (_raw(seed, choice, position) >> 11) * 2.0**-53


def derive_seed(seed: int, index: int) -> int:
    """Seed of the ``index``-th request of an engine that was opened with ``seed``."""
    return _raw(seed, _SEEDS, index)


def fresh_seed() -> int:
    """64 bits of entropy from the operating system, for a request that gives no seed."""
    return secrets.randbits(64)
