"""Chat templates: messages to the segments of a prompt, with user text kept inert.

The template comes with the model and is a stranger's code (see ``sandbox``); the messages come from users. A control
token may only be written by the template. So before rendering, every spelling of a control token in a message, and
every piece at a string's border that could join with its neighbours into one, is broken up with a private character
that occurs nowhere else; after rendering, what still spells a control token is the template's, and the private
character is taken out of the rest. Templates can trim, compare, join and split the strings as usual meanwhile.

A template may also assemble a spelling out of text that had none: by taking characters out, changing case, reversing.
So the messages are rendered a second time, with every character that occurs in a control token masked by a private
one, which no template can turn into a control token. If the two renderings differ in their control tokens, the second
one is the prompt. (Single words outside the contents, such as the type of a tool, are compared by templates and not
masked.)

One exception, because reasoning templates cut earlier answers at ``</think>``: in assistant messages ``<think>`` and
``</think>`` are left whole if the template's source mentions them.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Literal, Protocol

import jinja2

from deepseek_flash.errors import ChatTemplateError, RequestError
from deepseek_flash.text.markers import Segment, spelling_pattern
from deepseek_flash.text.sandbox import MAX_SOURCE, Refused, Sandbox, budget
from deepseek_flash.types import Message

__all__ = ["ChatTemplate", "Segment"]

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_INPUT = 16 * 1024 * 1024
"""Characters in all messages and variables together."""
MAX_NESTING = 64

_WORD = re.compile(r"[A-Za-z0-9_.-]{0,64}", re.ASCII)
_THINK = ("<think>", "</think>")
_PRIVATE = re.compile("[\ue000-\uf8ff\U000f0000-\U000ffffd\U00100000-\U0010fffd]")


class ChatTemplate:
    """One chat template. ``render`` is safe from any thread.

    ``bos`` and ``eos`` are what the template sees as ``bos_token`` and ``eos_token``; ``specials`` are the spellings
    that the tokenizer would turn into control tokens.
    """

    def __init__(self, source: str, *, bos: str, eos: str, specials: Sequence[str]) -> None:
        self.source, self.bos, self.eos = source, bos, eos
        self._inert = _Inert(specials)
        self._unprotected = tuple(tag for tag in _THINK if tag in source)
        self._compiled: jinja2.Template | None = None
        self._names: frozenset[str] = frozenset()

    @property
    def _template(self) -> jinja2.Template:
        """Compiled when first used, so that a template we cannot read takes away chat only."""
        if self._compiled is None:
            if len(self.source) > MAX_SOURCE:
                raise ChatTemplateError(
                    f"the chat template has {len(self.source):,} characters; at most {MAX_SOURCE:,} are read",
                    parameter="chat_template",
                )
            try:
                compiled, self._names = Sandbox().template(self.source)
                self._compiled = compiled
            except Exception as e:  # a stranger's code: Jinja, Python's compiler or its recursion limit may object
                line = f" (line {e.lineno})" if isinstance(e, jinja2.TemplateSyntaxError) else ""
                raise ChatTemplateError(
                    f"the model's chat template cannot be compiled: {_reason(e)}{line}", parameter="chat_template"
                ) from None
        return self._compiled

    @property
    def names(self) -> frozenset[str]:
        """The variables it may look up: its own options are among them, beside ``messages`` and the like."""
        assert self._template is not None
        return self._names

    def render(
        self,
        messages: Sequence[Mapping[str, Any] | Message],
        *,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        **variables: Any,
    ) -> list[Segment]:
        """The prompt, as segments in order; joined they are the text that the template wrote.

        ``continue_final`` leaves the last assistant message open for the model to go on with (and adds no generation
        prompt), as transformers' ``continue_final_message`` does. ``variables`` are seen by the template by name.
        """
        chat = [_message(m, i) for i, m in enumerate(_listed(messages))]
        variables = {"tools": None, "documents": None, **_plain(variables, "variable", 0)}
        strings = [*_strings(chat), *_strings(variables)]
        generate = add_generation_prompt and not continue_final
        if (size := sum(map(len, strings))) > MAX_INPUT:
            raise RequestError(
                f"the messages have {size:,} characters; at most {MAX_INPUT:,} can be rendered", parameter="messages"
            )
        private = _private_characters([self.source, *strings])
        cut, wall = next(private), next(private)
        segments = self._rendered(chat, variables, generate, _Walls(self._inert, wall), cut if continue_final else "")
        if not self._inert.alphabet.isdisjoint("".join(strings)):
            masks = _Masks({c: next(private) for c in sorted(self._inert.alphabet)}, _Walls(self._inert, wall))
            masked = self._rendered(chat, variables, generate, masks, cut if continue_final else "")
            if [s for s in masked if s.markup] != [s for s in segments if s.markup]:
                return masked
        return segments

    def _rendered(
        self, chat: list[dict[str, Any]], variables: dict[str, Any], generate: bool, guise: _Guise, cut: str
    ) -> list[Segment]:
        """What the template makes of the messages, shown to it in a guise. ``cut``: marks the end of the last message,
        after which the text is left out."""
        chat = [self._shown_message(m, guise) for m in chat]
        variables = {
            k: guise.show(v, "variable") if isinstance(v, str) else self._shown(v, guise) for k, v in variables.items()
        }
        final = _open_final(chat, cut) if cut else ""
        text = self._run(chat, variables, generate, guise, cut)
        return self._inert.segments(_cut_final(text, final, cut) if cut else text, guise)

    def _run(self, chat: list[Any], variables: dict[str, Any], generate: bool, guise: _Guise, cut: str) -> str:
        template = self._template
        try:
            with budget(kept=guise.private + cut):
                return template.render(
                    {"bos_token": self.bos, "eos_token": self.eos}
                    | variables
                    | {"messages": chat, "add_generation_prompt": generate}
                )
        except Refused as e:
            reason = f"the chat template refused the messages: {_reason(e)}"
        except Exception as e:  # a stranger's code can fail in any way; its caller gets one kind of error
            reason = f"the chat template failed on these messages: {_reason(e)}"
        reason = guise.undo(reason)
        raise ChatTemplateError(reason.replace(cut, "") if cut else reason, parameter="messages")

    def _shown_message(self, message: dict[str, Any], guise: _Guise) -> dict[str, Any]:
        keep = self._unprotected if message["role"] == "assistant" else ()
        shown = {}
        for key, value in message.items():
            if key == "content" and isinstance(value, str):
                pieces = re.split("(" + "|".join(map(re.escape, keep)) + ")", value) if keep else [value]
                shown[key] = "".join(p if p in keep else guise.show(p, "content") for p in pieces)
            else:
                shown[self._key(key, guise)] = value if key == "role" else self._shown(value, guise)
        return shown

    def _shown(self, value: Any, guise: _Guise) -> Any:
        if isinstance(value, str):
            return guise.show(value, "field")
        if isinstance(value, dict):
            return {self._key(k, guise): self._shown(v, guise) for k, v in value.items()}
        if isinstance(value, list):
            return [self._shown(v, guise) for v in value]
        return value

    def _key(self, key: str, guise: _Guise) -> str:
        """Names by which a template reads a value are left as they are."""
        return key if key.isidentifier() and not self._inert.spelled_in(key) else guise.show(key, "field")


Place = Literal["content", "field", "variable"]
"""Of a string: the content of a message, anywhere else in one (or deeper in a variable), a variable itself."""


class _Guise(Protocol):
    """How a user's strings look to the template, so that they are inert."""

    @property
    def private(self) -> str:
        """The private characters in use."""

    def show(self, text: str, place: Place) -> str:
        """The string as the template sees it."""

    def undo(self, text: str) -> str:
        """The user's characters again, in text that the template wrote."""


class _Walls:
    """Spellings are broken up; everything else stays as it is."""

    def __init__(self, inert: _Inert, wall: str) -> None:
        self._inert, self.private = inert, wall

    def show(self, text: str, place: Place) -> str:
        return self._inert.protect(text, self.private, whole=place != "variable")

    def undo(self, text: str) -> str:
        return text.replace(self.private, "")


class _Masks:
    """Every character that occurs in a control token is a private one; words outside the contents get walls."""

    def __init__(self, masks: Mapping[str, str], walls: _Walls) -> None:
        self._walls, self.private = walls, walls.private + "".join(masks.values())
        self._table, self._back = str.maketrans(dict(masks)), str.maketrans({m: c for c, m in masks.items()})

    def show(self, text: str, place: Place) -> str:
        if place != "content" and _WORD.fullmatch(text):
            return self._walls.show(text, place)
        return text.translate(self._table)

    def undo(self, text: str) -> str:
        return self._walls.undo(text.translate(self._back))


class _Inert:
    """Breaks control-token spellings in user strings, and finds those that a template wrote."""

    def __init__(self, specials: Sequence[str]) -> None:
        self._specials = tuple(dict.fromkeys(s for s in specials if s))
        self._pattern = spelling_pattern(self._specials)
        letters = "".join(self._specials)
        self.alphabet = frozenset(letters + letters.lower() + letters.upper()).difference(string.whitespace)
        """Characters that occur in a control token, in either case."""
        self._longest = max(map(len, self._specials), default=0)
        self._heads = {s[:i] for s in self._specials for i in range(1, len(s))}
        self._tails = {s[i:] for s in self._specials for i in range(1, len(s))}

    def protect(self, text: str, wall: str, *, whole: bool = True) -> str:
        """``text`` with ``wall`` put in so that no part of it can take part in a control token's spelling.

        White space at the ends is looked through, since templates trim. ``whole``: also when all of the text is the
        middle of a spelling.
        """
        if self._pattern is None or not text:
            return text
        text = self._break(text, wall)
        core = text.strip()
        if not core:
            return text
        near = core[: self._longest], core[-self._longest :]
        opens = any(near[0][:k] in self._tails for k in range(1, len(near[0]) + 1)) or (
            whole and len(core) < self._longest and any(core in s for s in self._specials)
        )
        closes = any(near[1][-k:] in self._heads for k in range(1, len(near[1]) + 1))
        if opens or closes:
            lead, trail = text[: len(text) - len(text.lstrip())], text[len(text.rstrip()) :]
            core = (wall if opens else "") + core + (wall if closes else "")
            text = lead + core + trail
        return text

    def _break(self, text: str, wall: str) -> str:
        # Breaking one spelling can leave another that overlaps it (`<<a>a>`), so look again behind its first character.
        assert self._pattern is not None
        out, start = [], 0
        while match := self._pattern.search(text, start):
            out.append(text[start : match.start() + 1] + wall)
            start = match.start() + 1
        return "".join(out) + text[start:] if out else text

    def spelled_in(self, text: str) -> bool:
        return self._pattern is not None and self._pattern.search(text) is not None

    def segments(self, text: str, guise: _Guise) -> list[Segment]:
        """Rendered text cut at the control tokens that are still whole."""
        out: list[Segment] = []

        def plain(piece: str) -> None:
            if piece := guise.undo(piece):
                out.append(Segment(piece, markup=False))

        start = 0
        for match in self._pattern.finditer(text) if self._pattern is not None else ():
            plain(text[start : match.start()])
            out.append(Segment(match.group(), markup=True))
            start = match.end()
        plain(text[start:])
        return out


def _listed(messages: Any) -> Sequence[Any]:
    if isinstance(messages, (str, bytes, Mapping, Message)) or not isinstance(messages, Sequence):
        raise RequestError(
            f'messages must be a list of messages, not {type(messages).__name__}: [{{"role": "user", "content": "…"}}]',
            parameter="messages",
        )
    if not messages:
        raise RequestError("messages is empty: at least one message is needed", parameter="messages")
    return messages


def _message(message: Any, index: int) -> dict[str, Any]:
    """One message as a plain dict that the template may see, or a RequestError that says which one is wrong."""
    where = f"messages[{index}]"
    if isinstance(message, Message):
        message = {"role": message.role, "content": message.content} | ({"name": message.name} if message.name else {})
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be a dict or a Message, not {type(message).__name__}", parameter="messages")
    plain: dict[str, Any] = _plain(message, where, 0)
    role = plain.get("role")
    if role not in ROLES:
        raise RequestError(
            f"{where} has the role {role!r}; allowed: {', '.join(ROLES)}", parameter="messages", value=role
        )
    plain["content"] = _content(plain, where)
    return plain


def _content(message: dict[str, Any], where: str) -> str | None:
    content = message.get("content")
    if isinstance(content, list):
        return "".join(_part(part, f"{where}.content[{i}]") for i, part in enumerate(content))
    if content is None and message["role"] == "assistant" and message.get("tool_calls"):
        return None
    if not isinstance(content, str):
        raise RequestError(
            f"{where}.content must be a string or a list of text parts, not {type(content).__name__} "
            "(only an assistant message with tool_calls may go without)",
            parameter="messages",
        )
    return content


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if kind != "text" or not isinstance(part.get("text"), str):
        raise RequestError(
            f'{where} is of type {kind!r}; only {{"type": "text", "text": "…"}} is understood', parameter="messages"
        )
    text: str = part["text"]
    return text


def _plain(value: Any, where: str, depth: int) -> Any:
    """A copy made of JSON's types only, so that the template can reach nothing else."""
    if depth > MAX_NESTING:
        raise RequestError(f"{where} is nested more than {MAX_NESTING} deep", parameter="messages")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # of an enum too, whose own __str__ is its name
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise RequestError(f"{where} has the key {key!r}; keys must be strings", parameter="messages")
        return {str(k): _plain(v, f"{where}.{k}", depth + 1) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v, f"{where}[{i}]", depth + 1) for i, v in enumerate(value)]
    raise RequestError(
        f"{where} is a {type(value).__name__}; messages may hold strings, numbers, lists and dicts",
        parameter="messages",
    )


def _strings(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for k, v in value.items():
            yield k
            yield from _strings(v)
    elif isinstance(value, list):
        for v in value:
            yield from _strings(v)


def _private_characters(texts: Iterable[str]) -> Iterator[str]:
    """Private-use characters that occur in none of the texts, in an order that no template can foresee."""
    used = set(chain.from_iterable(_PRIVATE.findall(t) for t in texts))
    for plane in (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE)):
        first = secrets.randbelow(len(plane))
        yield from (c for i in range(len(plane)) if (c := chr(plane[(first + i) % len(plane)])) not in used)
    raise RequestError("the messages use every private-use character of Unicode", parameter="messages")


def _open_final(chat: list[dict[str, Any]], cut: str) -> str:
    """Mark the end of the last message; its text as the template sees it without the mark."""
    last = chat[-1]
    if last["role"] != "assistant" or not isinstance(last["content"], str):
        raise ChatTemplateError(
            f"continue_final needs an assistant message with text at the end, not one of role {last['role']!r}",
            parameter="messages",
        )
    final = last["content"]
    last["content"] = final + cut + " "  # the space tells whether the template trims
    return str(final)


def _cut_final(text: str, final: str, cut: str) -> str:
    at = text.rfind(cut)
    if at < 0 or final.strip() not in text:
        raise ChatTemplateError(
            "continue_final: the chat template does not keep the last message as it is, so it cannot be continued",
            parameter="messages",
        )
    kept = text[at : at + 2] == cut + " "
    return text[:at] if kept else text[:at].rstrip()


def _reason(e: Exception) -> str:
    text = " ".join(str(e).split()) or "no reason given"
    text = text if len(text) <= 500 else text[:500] + "…"
    if isinstance(e, RecursionError):
        return "it is nested too deeply or calls itself without end"
    return text if isinstance(e, jinja2.TemplateError) else f"{type(e).__name__}: {text}"
