"""ChatDeepSeekFlash: messages in, a message out, through the checkpoint's chat template."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, cast

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LangSmithParams
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

from deepseek_flash import Choice, Completion, Delta

from ._errors import adapted
from ._messages import (
    finish_metadata,
    logprobs_content,
    to_dicts,
    token_usage,
    usage_metadata,
)
from ._requests import acomplete, adeltas, complete, deltas
from ._wrapper import PROVIDER, FlashWrapper, not_yet


class ChatDeepSeekFlash(FlashWrapper, BaseChatModel):
    """A chat model on an engine in this process.

    ``ChatDeepSeekFlash(model="…", temperature=0)`` opens an engine on first use;
    ``ChatDeepSeekFlash(engine=engine)`` shares one.
    """

    streaming: bool = False
    """If set, ``invoke`` and ``batch`` also go through streaming, so that token callbacks fire."""

    @property
    def _llm_type(self) -> str:
        return "chat-deepseek-flash"

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        return cast("LangSmithParams", self._tracing("chat", stop, kwargs))

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        with adapted():
            params, timeout = self._sampling(stop, kwargs)
            prompt = to_dicts(messages)
        engine = self.get_engine()
        return self._result(engine, complete(engine, [prompt], params, timeout)[0])

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        with adapted():
            params, timeout = self._sampling(stop, kwargs)
            prompt = to_dicts(messages)
        engine = await self.aget_engine()
        return self._result(engine, (await acomplete(engine, [prompt], params, timeout))[0])

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        with adapted():
            params, timeout = self._one_answer(stop, kwargs)
            prompt = to_dicts(messages)
        engine = self.get_engine()
        last = Delta()
        for last in deltas(engine, prompt, params, timeout):
            for chunk in _chunks(engine, last):
                if run_manager:  # langchain-core's own stream() calls back itself and passes none
                    run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk
        chunk = self._end(last)
        if run_manager:
            run_manager.on_llm_new_token("", chunk=chunk)
        yield chunk

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        with adapted():
            params, timeout = self._one_answer(stop, kwargs)
            prompt = to_dicts(messages)
        engine = await self.aget_engine()
        last = Delta()
        async for last in adeltas(engine, prompt, params, timeout):
            for chunk in _chunks(engine, last):
                if run_manager:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk
        chunk = self._end(last)
        if run_manager:
            await run_manager.on_llm_new_token("", chunk=chunk)
        yield chunk

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | Any],
        *,
        tool_choice: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Tool calling comes in a later version; binding an empty list is binding nothing."""
        if tools or tool_choice:
            raise not_yet("bind_tools", "tool calling")
        return self.bind(**kwargs)

    def with_structured_output(self, schema: Any, *, include_raw: bool = False, **kwargs: Any) -> Any:
        """Structured output comes in a later version."""
        raise not_yet("with_structured_output", "structured output")

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """Tokens of the prompt that these messages make, chat template included."""
        if tools:
            raise not_yet("get_num_tokens_from_messages(tools=...)", "tool calling")
        if self.custom_get_token_ids is not None:
            return super().get_num_tokens_from_messages(messages)
        if not messages:
            return 0
        with adapted():
            return int(self.get_engine().count_tokens(to_dicts(messages)))

    def _combine_llm_outputs(self, llm_outputs: list[dict[str, Any] | None]) -> dict[str, Any]:
        total: dict[str, int] = {}
        for output in llm_outputs:
            for name, count in ((output or {}).get("token_usage") or {}).items():
                total[name] = total.get(name, 0) + count
        return {"token_usage": total, "model_name": self.model_name}

    def _result(self, engine: Any, completion: Completion) -> ChatResult:
        generations = [self._generation(engine, choice, completion) for choice in completion.choices]
        usage = token_usage([completion.usage])
        return ChatResult(generations=generations, llm_output={"token_usage": usage, "model_name": self.model_name})

    def _generation(self, engine: Any, choice: Choice, completion: Completion) -> ChatGeneration:
        info = finish_metadata(choice.finish_reason, choice.stop_reason)
        if choice.logprobs is not None:
            info["logprobs"] = logprobs_content(engine, choice.token_ids, choice.logprobs)
        message = AIMessage(
            content=choice.text,
            additional_kwargs={"reasoning_content": choice.reasoning} if choice.reasoning else {},
            response_metadata={"model_name": self.model_name, "model_provider": PROVIDER, **info},
            # The usage is the whole request's, so only one of its messages carries it.
            usage_metadata=usage_metadata(completion.usage) if choice.index == 0 else None,
        )
        return ChatGeneration(message=message, generation_info=info)

    def _end(self, last: Delta) -> ChatGenerationChunk:
        """The last chunk: empty, with finish reason, model and usage, which must appear once only."""
        info = finish_metadata(last.finish_reason, last.stop_reason)
        if last.usage is not None:
            info["token_usage"] = token_usage([last.usage])
        message = AIMessageChunk(
            content="",
            response_metadata={"model_name": self.model_name, "model_provider": PROVIDER, **info},
            usage_metadata=None if last.usage is None else usage_metadata(last.usage),
            chunk_position="last",
        )
        return ChatGenerationChunk(message=message)


def _chunks(engine: Any, delta: Delta) -> Iterator[ChatGenerationChunk]:
    """One kind of content a chunk, as merging wants it."""
    if delta.reasoning:
        message = AIMessageChunk(content="", additional_kwargs={"reasoning_content": delta.reasoning})
        yield ChatGenerationChunk(message=message)
    if delta.text or delta.logprobs:
        message = AIMessageChunk(content=delta.text)
        if delta.logprobs is not None:
            message.response_metadata["logprobs"] = logprobs_content(engine, delta.token_ids, delta.logprobs)
        yield ChatGenerationChunk(message=message)
