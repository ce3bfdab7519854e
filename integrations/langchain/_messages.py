"""LangChain messages → the engine's, and the engine's results → LangChain's metadata."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, ChatMessage
from langchain_core.messages.ai import InputTokenDetails, OutputTokenDetails, UsageMetadata

from deepseek_flash import RequestError, Usage

_ROLES = {"human": "user", "ai": "assistant", "system": "system", "tool": "tool", "function": "tool"}
# Parts of earlier answers that are no text for the model: templates leave earlier reasoning out.
_NOT_SENT = frozenset({"reasoning", "thinking", "redacted_thinking"})


def to_dicts(messages: Iterable[BaseMessage]) -> list[dict[str, str]]:
    """Messages as the engine takes them; what this version cannot send is a RequestError, never dropped."""
    return [_to_dict(message) for message in messages]


def _to_dict(message: BaseMessage) -> dict[str, str]:
    if isinstance(message, AIMessage) and (message.tool_calls or message.invalid_tool_calls):
        raise RequestError(
            "a message with tool calls cannot be sent: tool calling is not in this version of deepseek-flash",
            parameter="messages",
            value=message,
        )
    role = message.role if isinstance(message, ChatMessage) else message.type.removesuffix("MessageChunk").lower()
    role = _ROLES.get(role, role)
    converted = {"role": role, "content": _text(message.content)}
    if message.name:
        converted["name"] = message.name
    return converted


def _text(content: str | Sequence[Any]) -> str:
    if isinstance(content, str):
        return content
    parts = []
    for block in content:
        if isinstance(block, str):
            parts.append(block)
            continue
        kind = block.get("type")
        if kind == "text":
            parts.append(block["text"])
        elif kind not in _NOT_SENT:
            raise RequestError(
                f"a content block of type {kind!r} cannot be sent: this version takes text only "
                "(docs/limits.md lists what is not there)",
                parameter="messages",
                value=block,
            )
    return "".join(parts)


def usage_metadata(usage: Usage) -> UsageMetadata:
    return UsageMetadata(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
        input_token_details=InputTokenDetails(cache_read=usage.cached_tokens),
        output_token_details=OutputTokenDetails(reasoning=usage.reasoning_tokens),
    )


def token_usage(usages: Iterable[Usage]) -> dict[str, int]:
    """Sums, under the names that LangChain's ``llm_output`` uses."""
    listed = list(usages)
    return {
        "prompt_tokens": sum(u.prompt_tokens for u in listed),
        "completion_tokens": sum(u.completion_tokens for u in listed),
        "total_tokens": sum(u.total_tokens for u in listed),
        "cached_tokens": sum(u.cached_tokens for u in listed),
    }


def finish_metadata(reason: str | None, stop_reason: str | int | None) -> dict[str, Any]:
    """``finish_reason``, and under ``stop_reason`` the stop string or token id that ended the answer, if one did."""
    found: dict[str, Any] = {"finish_reason": reason}
    if stop_reason is not None:
        found["stop_reason"] = stop_reason
    return found


def logprobs_content(engine: Any, token_ids: Sequence[int], logprobs: Sequence[dict[int, float]]) -> dict[str, Any]:
    """Log-probabilities in OpenAI's shape, with the token ids added; the likeliest first."""

    def named(token: int, value: float) -> dict[str, Any]:
        text = engine.detokenize([token], skip_special_tokens=False)
        return {"token": text, "token_id": token, "logprob": value, "bytes": list(text.encode())}

    content = []
    for token, at in zip(token_ids, logprobs, strict=True):
        ranked = sorted(at.items(), key=lambda item: -item[1])
        content.append({**named(token, at[token]), "top_logprobs": [named(t, v) for t, v in ranked]})
    return {"content": content}
