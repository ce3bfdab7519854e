"""A conversation that is kept: its messages, its options, and a file of both."""

from __future__ import annotations

import json
import os
import secrets
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, ValidationError

from deepseek_flash.errors import FormatError, RequestError
from deepseek_flash.types import Completion, Delta, Message, Role, SamplingParams

VERSION = 1
MOST_BYTES = 1 << 28
"""Of a file that is read."""


class Chatter(Protocol):
    """What a session needs of an engine."""

    def chat(
        self, messages: Any, params: SamplingParams | None = None, *, stream: bool = False, **sampling: Any
    ) -> Any: ...

    def count_tokens(self, prompt: Any) -> int: ...


class _Turn(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    role: Role
    content: str
    name: str | None = None


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    format: Literal["deepseek-flash-session"]
    version: Literal[1]
    params: dict[str, Any]
    messages: list[_Turn]


class Session:
    """A conversation with a model. Each turn sends all of it, and what earlier turns computed is in the cache.

    A turn that fails, is cancelled or is left early is not kept.
    """

    def __init__(self, engine: Chatter, messages: tuple[Message, ...], params: SamplingParams) -> None:
        self._engine, self._messages, self._params = engine, messages, params
        self._lock = threading.Lock()
        self._closed = False

    @property
    def messages(self) -> list[Message]:
        """All turns so far, the system message among them."""
        return list(self._messages)

    @property
    def tokens(self) -> int:
        """Tokens of the conversation as the next turn would send it; 0 before anything was said."""
        return self._engine.count_tokens(self.messages) if self._messages else 0

    def send(self, text: str, **sampling: Any) -> Completion:
        """Say something and wait for the answer. Options given here win over the session's."""
        before, user = self._begin(text)
        done: Completion = self._engine.chat([*before, user], self._params, **sampling)
        self._keep(before, user, done)
        return done

    def stream(self, text: str, **sampling: Any) -> Iterator[Delta]:
        """:meth:`send` piece by piece. The turn is kept when the last piece was taken."""
        before, user = self._begin(text)
        return self._pieces(before, user, self._engine.chat([*before, user], self._params, stream=True, **sampling))

    def _pieces(self, before: tuple[Message, ...], user: Message, opened: Any) -> Iterator[Delta]:
        yield from opened
        self._keep(before, user, opened.result())

    def _begin(self, text: str) -> tuple[tuple[Message, ...], Message]:
        if self._closed:
            raise RequestError("this session is closed; open a new one, or load it from its file")
        if not isinstance(text, str):
            raise RequestError(f"text must be a string, not {type(text).__name__}", parameter="text", value=text)
        return self._messages, Message("user", text)

    def _keep(self, before: tuple[Message, ...], user: Message, done: Completion) -> None:
        if done.finish_reason == "cancelled":
            return
        with self._lock:
            if self._messages is not before:
                raise RequestError("another turn of this session ended meanwhile, so this one was not kept")
            self._messages = (*before, user, Message("assistant", done.text))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write messages and options as JSON for its owner alone (0600); an older file is replaced as a whole."""
        target = Path(path).expanduser()
        turns = [
            {k: v for k in ("role", "content", "name") if (v := getattr(m, k)) is not None} for m in self._messages
        ]
        told = {
            "format": "deepseek-flash-session",
            "version": VERSION,
            "params": self._params.model_dump(mode="json", exclude_unset=True),
            "messages": turns,
        }
        data = json.dumps(told, indent=1).encode()
        partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
        fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, target)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise

    def close(self) -> None:
        """No more turns. What is cached stays until the room is needed. Idempotent."""
        self._closed = True

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Session of {len(self._messages)} messages{', closed' if self._closed else ''}>"


def read_session(path: str | os.PathLike[str]) -> tuple[tuple[Message, ...], SamplingParams]:
    """Messages and options of a file that :meth:`Session.save` wrote; FormatError for anything else."""
    name = os.fspath(path)
    try:
        with open(Path(path).expanduser(), "rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as e:
        raise FormatError(f"{name}: the session cannot be read: {e.strerror}", file=name) from e
    if len(data) > MOST_BYTES:
        raise FormatError(f"{name}: a session file has at most {MOST_BYTES} bytes", file=name)
    try:
        found = _File.model_validate_json(data)
        params = SamplingParams(**found.params)
    except ValidationError as e:
        first = e.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise FormatError(f"{name}: not a session file: {where}: {first['msg']}", file=name) from None
    except RequestError as e:
        raise FormatError(f"{name}: not a session file: params: {e}", file=name) from None
    return tuple(Message(t.role, t.content, t.name) for t in found.messages), params
