"""Chat templates: messages to the segments of a prompt, with user text kept inert.

The template comes with the model and is a stranger's code (see ``sandbox``); the messages come from users. A control
token may only be written by the template. So before rendering, every spelling of a control token in a message, and
every piece at a string's border that could join with its neighbours into one, is broken up with a private character
that occurs nowhere else; after rendering, what still spells a control token is the template's, and the private
character is taken out of the rest. Templates can trim, compare, join and split the strings as usual meanwhile.

One exception, because reasoning templates cut earlier answers at ``</think>``: in assistant messages ``<think>`` and
``</think>`` are left whole if the template's source mentions them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

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

_THINK = ("<think>", "</think>")
_PRIVATE = re.compile("[\ue000-\uf8ff]")


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
                self._compiled = Sandbox().template(self.source)
            except Exception as e:  # a stranger's code: Jinja, Python's compiler or its recursion limit may object
                line = f" (line {e.lineno})" if isinstance(e, jinja2.TemplateSyntaxError) else ""
                raise ChatTemplateError(
                    f"the model's chat template cannot be compiled: {_reason(e)}{line}", parameter="chat_template"
                ) from None
        return self._compiled

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
        if (size := sum(map(len, strings))) > MAX_INPUT:
            raise RequestError(
                f"the messages have {size:,} characters; at most {MAX_INPUT:,} can be rendered", parameter="messages"
            )
        wall, cut = _private_characters([self.source, *strings])
        chat = [self._protected_message(m, wall) for m in chat]
        variables = {
            k: self._inert.protect(v, wall, whole=False) if isinstance(v, str) else self._protected(v, wall)
            for k, v in variables.items()
        }
        if continue_final:
            add_generation_prompt = False
            final = _open_final(chat, cut)
        text = self._run(chat, variables, add_generation_prompt, wall, cut)
        if continue_final:
            text = _cut_final(text, final, cut)
        return self._inert.segments(text, wall)

    def _run(self, chat: list[Any], variables: dict[str, Any], generate: bool, wall: str, cut: str) -> str:
        template = self._template
        try:
            with budget(kept=wall + cut):
                return template.render(
                    {"bos_token": self.bos, "eos_token": self.eos}
                    | variables
                    | {"messages": chat, "add_generation_prompt": generate}
                )
        except Refused as e:
            reason = f"the chat template refused the messages: {_reason(e)}"
        except Exception as e:  # a stranger's code can fail in any way; its caller gets one kind of error
            reason = f"the chat template failed on these messages: {_reason(e)}"
        raise ChatTemplateError(reason.replace(wall, "").replace(cut, ""), parameter="messages")

    def _protected_message(self, message: dict[str, Any], wall: str) -> dict[str, Any]:
        keep = self._unprotected if message["role"] == "assistant" else ()
        return {
            k: v if k == "role" else self._protected(v, wall, keep if k == "content" else ())
            for k, v in message.items()
        }

    def _protected(self, value: Any, wall: str, keep: tuple[str, ...] = ()) -> Any:
        if isinstance(value, str):
            if not keep:
                return self._inert.protect(value, wall)
            pieces = re.split("(" + "|".join(map(re.escape, keep)) + ")", value)
            return "".join(p if p in keep else self._inert.protect(p, wall) for p in pieces)
        if isinstance(value, dict):
            return {
                k if k.isidentifier() else self._inert.protect(k, wall): self._protected(v, wall)
                for k, v in value.items()
            }
        if isinstance(value, list):
            return [self._protected(v, wall) for v in value]
        return value


class _Inert:
    """Breaks control-token spellings in user strings, and finds those that a template wrote."""

    def __init__(self, specials: Sequence[str]) -> None:
        self._specials = tuple(dict.fromkeys(s for s in specials if s))
        self._pattern = spelling_pattern(self._specials)
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

    def segments(self, text: str, wall: str) -> list[Segment]:
        """Rendered text cut at the control tokens that are still whole."""
        out: list[Segment] = []

        def plain(piece: str) -> None:
            if piece := piece.replace(wall, ""):
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
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value) if type(value) is not kind else value
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


def _private_characters(texts: Iterable[str]) -> tuple[str, str]:
    """Two private-use characters that occur in none of the texts."""
    used = set(chain.from_iterable(_PRIVATE.findall(t) for t in texts))
    free = (chr(c) for c in range(0xE000, 0xF900) if chr(c) not in used)
    found = [c for c, _ in zip(free, range(2), strict=False)]
    if len(found) < 2:
        raise RequestError("the messages use every private-use character of Unicode", parameter="messages")
    return found[0], found[1]


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
