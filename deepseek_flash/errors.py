"""Every exception the package raises, one tree.

    FlashError
    ├── ConfigError(ValueError)            a constructor option: field, value, allowed
    ├── ModelError                         the model or its files
    │   ├── ModelNotFound(FileNotFoundError)   no such path, catalogue name, or Hub repo; gated; offline
    │   ├── UnsupportedModel               architecture or feature we cannot run
    │   ├── CheckpointError                tensors missing, unexpected or mismatched
    │   └── FormatError                    a damaged or hostile file
    ├── MemoryBudgetError(MemoryError)     needed, available, holders
    ├── RequestError(ValueError)           a call's argument: parameter, value
    │   ├── ContextLengthError             tokens, limit
    │   ├── ChatTemplateError              no template, or it refused the messages
    │   └── GrammarError
    ├── Cancelled
    ├── DeadlineExceeded(TimeoutError)
    ├── StreamTimeoutError(TimeoutError)
    ├── EngineClosed(RuntimeError)
    │   └── EngineForked                   used in a forked child
    └── InternalError(RuntimeError)        a broken invariant of ours

Each message says what was given, what is allowed, and what to do. Errors that end a running
request carry what was produced so far in ``.partial`` (a Completion or None).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any


class FlashError(Exception):
    """Root of every error of this package."""

    partial: Any = None
    """A ``Completion`` with what was produced before the error, when there is one."""
    results: Any = None
    """From a list call without ``return_errors``: every input's Completion or error, in order."""


class ConfigError(FlashError, ValueError):
    """An engine option is unknown, impossible, or belongs to a part that does not exist yet."""

    def __init__(self, message: str, *, field: str = "", value: Any = None, allowed: str = "") -> None:
        super().__init__(message)
        self.field, self.value, self.allowed = field, value, allowed


class ModelError(FlashError):
    """Something about the model or its files."""


class ModelNotFound(ModelError, FileNotFoundError):
    """The model cannot be found or fetched."""


class UnsupportedModel(ModelError):
    """The files are sound but describe something this package does not run."""

    def __init__(self, message: str, *, architecture: str = "", supported: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.architecture, self.supported = architecture, tuple(supported)


class CheckpointError(ModelError):
    """The checkpoint's tensors are not the ones the architecture needs."""

    def __init__(
        self,
        message: str,
        *,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        mismatched: Sequence[str] = (),
    ) -> None:
        parts = [message]
        for label, names in (("missing", missing), ("unexpected", unexpected), ("mismatched", mismatched)):
            if names:
                more = f" (+{len(names) - 10} more)" if len(names) > 10 else ""
                parts.append(f"{label}: {', '.join(names[:10])}{more}")
        super().__init__("; ".join(parts))
        self.missing, self.unexpected, self.mismatched = tuple(missing), tuple(unexpected), tuple(mismatched)


class FormatError(ModelError):
    """A file is truncated, inconsistent or hostile. Names the file, the place and the numbers."""

    def __init__(self, message: str, *, file: str = "", tensor: str = "", offset: int | None = None) -> None:
        super().__init__(message)
        self.file, self.tensor, self.offset = file, tensor, offset


class MemoryBudgetError(FlashError, MemoryError):
    """The memory asked for is not there. Bytes throughout."""

    def __init__(
        self,
        message: str,
        *,
        needed: int = 0,
        available: int = 0,
        holders: dict[str, int] | None = None,
        largest_context: int | None = None,
    ) -> None:
        super().__init__(message)
        self.needed, self.available = needed, available
        self.holders, self.largest_context = dict(holders or {}), largest_context


class RequestError(FlashError, ValueError):
    """A call's argument is wrong; raised before any work starts."""

    def __init__(self, message: str, *, parameter: str = "", value: Any = None) -> None:
        super().__init__(message)
        self.parameter, self.value = parameter, value


class ContextLengthError(RequestError):
    """The prompt (plus what was asked for) does not fit the context."""

    def __init__(self, message: str, *, tokens: int = 0, limit: int = 0) -> None:
        super().__init__(message, parameter="prompt", value=tokens)
        self.tokens, self.limit = tokens, limit


class ChatTemplateError(RequestError):
    """There is no chat template, or it does not accept these messages."""


class GrammarError(RequestError):
    """A schema or grammar cannot be compiled."""


class Cancelled(FlashError):
    """The request was cancelled before it produced anything a caller could use."""


class DeadlineExceeded(FlashError, TimeoutError):
    """The caller's time limit passed; the request was stopped."""


class StreamTimeoutError(FlashError, TimeoutError):
    """No token arrived for the allowed time."""


class EngineClosed(FlashError, RuntimeError):
    """The engine was closed; open a new one."""


class EngineForked(EngineClosed):
    """The engine was opened in another process; a forked child must open its own."""


class InternalError(FlashError, RuntimeError):
    """A broken invariant of ours: please report it."""


def bounds(metadata: Iterable[Any]) -> str:
    """``"; allowed: 0.0 < x <= 1.0"`` from a pydantic field's constraints, or ``""``."""
    low, high = "", ""
    for rule in metadata:
        if (least := getattr(rule, "ge", None)) is not None:
            low = f"{least} <= "
        elif (above := getattr(rule, "gt", None)) is not None:
            low = f"{above} < "
        if (most := getattr(rule, "le", None)) is not None:
            high = f" <= {most}"
        elif (below := getattr(rule, "lt", None)) is not None:
            high = f" < {below}"
    return f"; allowed: {low}x{high}" if low or high else ""


def near_or_all(name: str, known: Iterable[str]) -> str:
    """The nearest known name, or all of them when none is near."""
    names = sorted(known)
    return near_miss(name, names) or f"; there are {', '.join(names)}"


def near_miss(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """``"; did you mean 'x'?"`` for the nearest known name, or ``""``."""
    close = get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"; did you mean {close[0]!r}?" if close else ""
