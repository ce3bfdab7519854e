"""DeepSeekFlashLLM: raw text in, text out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any, cast

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseLLM, LangSmithParams
from langchain_core.outputs import Generation, GenerationChunk, LLMResult

from deepseek_flash import Choice, Completion, Delta

from ._errors import adapted
from ._messages import finish_metadata, logprobs_content, token_usage
from ._requests import acomplete, adeltas, complete, deltas
from ._wrapper import FlashWrapper


class DeepSeekFlashLLM(FlashWrapper, BaseLLM):
    """A completion model on an engine in this process: the prompt goes to the model as it is.

    ``DeepSeekFlashLLM(model="…", temperature=0)`` opens an engine on first use;
    ``DeepSeekFlashLLM(engine=engine)`` shares one. For instruction-tuned models use ChatDeepSeekFlash,
    which applies the chat template.
    """

    @property
    def _llm_type(self) -> str:
        return "deepseek-flash"

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        return cast("LangSmithParams", self._tracing("llm", stop, kwargs))

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        with adapted():
            params, timeout = self._sampling(stop, kwargs)
        engine = self.get_engine()
        return self._result(engine, complete(engine, prompts, params, timeout))

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        with adapted():
            params, timeout = self._sampling(stop, kwargs)
        engine = await self.aget_engine()
        return self._result(engine, await acomplete(engine, prompts, params, timeout))

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        with adapted():
            params, timeout = self._one_answer(stop, kwargs)
        engine = self.get_engine()
        last = Delta()
        for last in deltas(engine, prompt, params, timeout):
            if last.text or last.logprobs:
                chunk = _chunk(engine, last)
                if run_manager:
                    run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk
        chunk = self._end(last)
        if run_manager:
            run_manager.on_llm_new_token("", chunk=chunk)
        yield chunk

    async def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[GenerationChunk]:
        with adapted():
            params, timeout = self._one_answer(stop, kwargs)
        engine = await self.aget_engine()
        last = Delta()
        async for last in adeltas(engine, prompt, params, timeout):
            if last.text or last.logprobs:
                chunk = _chunk(engine, last)
                if run_manager:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk
        chunk = self._end(last)
        if run_manager:
            await run_manager.on_llm_new_token("", chunk=chunk)
        yield chunk

    def _result(self, engine: Any, completions: list[Completion]) -> LLMResult:
        return LLMResult(
            generations=[[_generation(engine, choice) for choice in c.choices] for c in completions],
            llm_output={"token_usage": token_usage(c.usage for c in completions), "model_name": self.model_name},
        )

    def _end(self, last: Delta) -> GenerationChunk:
        """An empty chunk that carries the finish reason and the usage."""
        info = finish_metadata(last.finish_reason, last.stop_reason)
        if last.usage is not None:
            info["token_usage"] = token_usage([last.usage])
        return GenerationChunk(text="", generation_info={**info, "model_name": self.model_name})


def _generation(engine: Any, choice: Choice) -> Generation:
    info = finish_metadata(choice.finish_reason, choice.stop_reason)
    if choice.logprobs is not None:
        info["logprobs"] = logprobs_content(engine, choice.token_ids, choice.logprobs)
    return Generation(text=choice.text, generation_info=info)


def _chunk(engine: Any, delta: Delta) -> GenerationChunk:
    if delta.logprobs is None:
        return GenerationChunk(text=delta.text)
    return GenerationChunk(
        text=delta.text,
        generation_info={"logprobs": logprobs_content(engine, delta.token_ids, delta.logprobs)},
    )
