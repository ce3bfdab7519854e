"""The engine's errors as LangChain's too, so that retries, fallbacks and compaction recognise them.

An adapted error is both: ``except deepseek_flash.ContextLengthError`` and
``except langchain_core.exceptions.ContextOverflowError`` catch the same object.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from langchain_core import exceptions

from deepseek_flash import (
    ChatTemplateError,
    ContextLengthError,
    DeadlineExceeded,
    FlashError,
    GrammarError,
    InternalError,
    ModelNotFound,
    RequestError,
    StreamTimeoutError,
)


def _theirs(name: str) -> Any:
    # langchain-core before 1.7 has only some of them.
    return getattr(exceptions, name, exceptions.LangChainException)


class FlashContextOverflowError(ContextLengthError, _theirs("ContextOverflowError")):  # type: ignore[misc]
    """The prompt does not fit the context."""


class FlashChatTemplateError(ChatTemplateError, _theirs("ModelInvalidRequestError")):  # type: ignore[misc]
    """The chat template does not accept these messages, or there is none."""


class FlashGrammarError(GrammarError, _theirs("ModelInvalidRequestError")):  # type: ignore[misc]
    """A schema cannot be compiled."""


class FlashInvalidRequestError(RequestError, _theirs("ModelInvalidRequestError")):  # type: ignore[misc]
    """An argument of the call is wrong."""


class FlashModelNotFoundError(ModelNotFound, _theirs("ModelNotFoundError")):  # type: ignore[misc]
    """The model cannot be found or fetched."""


class FlashTimeoutError(DeadlineExceeded, _theirs("ModelTimeoutError")):  # type: ignore[misc]
    """The time limit of the call passed."""


class FlashStreamTimeoutError(StreamTimeoutError, _theirs("ModelTimeoutError")):  # type: ignore[misc]
    """No token arrived for the allowed time."""


class FlashAPIError(InternalError, _theirs("ModelAPIError")):  # type: ignore[misc]
    """A fault inside the engine."""


_PAIRS: tuple[tuple[type[FlashError], type[FlashError]], ...] = (
    (ContextLengthError, FlashContextOverflowError),
    (ChatTemplateError, FlashChatTemplateError),
    (GrammarError, FlashGrammarError),
    (RequestError, FlashInvalidRequestError),
    (ModelNotFound, FlashModelNotFoundError),
    (DeadlineExceeded, FlashTimeoutError),
    (StreamTimeoutError, FlashStreamTimeoutError),
    (InternalError, FlashAPIError),
)


def adapt(error: FlashError) -> FlashError:
    """The same error as one LangChain knows, or itself where LangChain has no word for it."""
    if isinstance(error, exceptions.LangChainException):
        return error
    for ours, both in _PAIRS:
        if isinstance(error, ours):
            adapted = both.__new__(both, *error.args)
            adapted.args = error.args
            adapted.__dict__.update(error.__dict__)
            return adapted
    return error


@contextmanager
def adapted() -> Iterator[None]:
    """Errors of the engine that leave this block are adapted."""
    try:
        yield
    except FlashError as error:
        other = adapt(error)
        if other is error:
            raise
        raise other from error
