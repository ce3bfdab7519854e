"""One running or waiting sequence. Only the engine thread touches it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt and what was generated after it.

    Owner of each field: the scheduler and KVManager write everything but ``prompt``-side options;
    the runner only reads ``tokens``, ``tables`` and ``computed``.
    """

    id: int
    tokens: list[int]
    """Prompt followed by output."""
    prompt_len: int
    max_tokens: int
    """Most tokens it may ever hold: prompt + max_new_tokens."""
    salt: bytes = b""
    all_logits: bool = False
    """Logits of every prompt position are wanted, so no cached prefix may be used."""
    status: Status = Status.WAITING
    computed: int = 0
    """Tokens whose cache rows are written."""
    tables: list[list[int]] = field(default_factory=list)
    """Block ids, one list per group: rows/window index by token // block_size (freed window blocks are -1);
    state groups hold one id."""
    keys: list[bytes] = field(default_factory=list)
    """Prefix keys of its full blocks, extended lazily."""
    cached_tokens: int = 0
    """Prompt tokens found in the cache at first admission."""
    l2_tokens: int = 0
    """Prompt tokens brought back from the host tier before that, and from the disk tier:"""
    l3_tokens: int = 0
    load_seconds: float = 0.0
    """Spent waiting for lower tiers."""
    miss: str = ""
    """Why no more came from there."""
    preemptions: int = 0
    arrival: int = 0
    """Order of submission."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_len :]
