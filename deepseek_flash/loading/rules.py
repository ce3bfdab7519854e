"""Where a checkpoint's tensors go: a model declares one Rule a parameter, and names it may leave out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Combine = Literal["copy", "cat0"]


@dataclass(frozen=True, slots=True)
class Rule:
    """``target`` (a parameter or buffer of the model, by its dotted name) is made of checkpoint tensors."""

    target: str
    sources: tuple[str, ...]
    combine: Combine = "copy"
    """``copy``: one source as it is. ``cat0``: the sources one below the other (along dimension 0)."""
    optional: bool = False
    """All sources may be absent: the target is then zeros (a bias that some checkpoints do not have), or nothing
    if the model does not have it either."""
    rows: tuple[int, ...] = ()
    """``cat0``: rows of each source, for plans that are made without the checkpoint. Empty: not said."""

    def __post_init__(self) -> None:
        if isinstance(self.sources, str) or not self.sources:
            raise ValueError(f"rule for {self.target!r}: sources must be a non-empty tuple")
        if self.combine == "copy" and len(self.sources) != 1:
            raise ValueError(f"rule for {self.target!r}: copy takes one source, not {len(self.sources)}")
