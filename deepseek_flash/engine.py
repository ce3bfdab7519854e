"""FlashEngine: the product's face. Wiring only; the work is in runtime/."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, overload

from deepseek_flash.config import EngineConfig, parse_bytes
from deepseek_flash.errors import FlashError, RequestError, near_or_all
from deepseek_flash.memory.report import MemoryReport
from deepseek_flash.runtime.cache_control import CacheControl
from deepseek_flash.runtime.generation import Request
from deepseek_flash.runtime.preload import Preloaded, preload
from deepseek_flash.runtime.request import Messages
from deepseek_flash.runtime.runtime import FlashRuntime
from deepseek_flash.runtime.session import Session, read_session
from deepseek_flash.runtime.stream import Stream, without_traceback
from deepseek_flash.types import Completion, Message, SamplingParams, Score

Params = SamplingParams | Sequence[SamplingParams] | None

LATER_ARGUMENTS: dict[str, str] = {
    "tools": "tool calling",
    "tool_choice": "tool calling",
    "response_format": "structured output",
    "thinking": "reasoning control",
    "reasoning_effort": "reasoning control",
    "max_thinking_tokens": "reasoning control",
    "priority": "priority scheduling",
    "deadline_ms": "deadline scheduling",
    "max_wait_ms": "deadline scheduling",
    "tenant": "fair scheduling",
}
"""Call arguments of the planned surface whose part is not in this version: refused by name."""

_LONG_TEXT = 16_384
"""Characters above which async calls tokenise on a worker thread instead of the event loop."""


class _Maker:
    """A prompt with its options, ready to become a request; call it to queue at once."""

    def __init__(
        self, runtime: FlashRuntime, make: Callable[[Any, SamplingParams], Request], prompt: Any, params: SamplingParams
    ) -> None:
        self._runtime, self._make, self._prompt, self._params = runtime, make, prompt, params

    def prepared(self, return_errors: bool) -> Request | FlashError:
        """Validated and tokenised; what is wrong raises, or is returned if asked."""
        try:
            return self._make(self._prompt, self._params)
        except FlashError as e:
            if not return_errors:
                raise
            return without_traceback(e)

    def __call__(self) -> Stream:
        request = self._make(self._prompt, self._params)
        stream = self._runtime.stream(request)
        try:
            self._runtime.queue(request)
        except BaseException:  # Ctrl-C may have come after it was queued
            stream.cancel()
            raise
        return stream


def _each(params: Params, sampling: dict[str, Any], count: int) -> list[SamplingParams]:
    """One SamplingParams a prompt, keywords applied."""
    for name, value in sampling.items():
        if name in LATER_ARGUMENTS:
            raise RequestError(
                f"{name}={value!r}: this argument belongs to {LATER_ARGUMENTS[name]}, which this version does not "
                "have; remove it (docs/limits.md lists what is not there)",
                parameter=name,
                value=value,
            )
        if name not in SamplingParams.model_fields and name != "max_tokens":
            known = [*SamplingParams.model_fields, "max_tokens"]
            raise RequestError(f"unknown argument {name!r}{near_or_all(name, known)}", parameter=name, value=value)
    if params is None:
        return [SamplingParams(**sampling)] * count
    if isinstance(params, SamplingParams):
        return [params.updated(**sampling) if sampling else params] * count
    listed = list(params) if isinstance(params, Sequence) else [params]
    for p in listed:
        if not isinstance(p, SamplingParams):
            raise RequestError(
                f"params must be SamplingParams or a list of them, not {type(p).__name__}; "
                "sampling options may also be given as keywords",
                parameter="params",
                value=p,
            )
    if len(listed) != count:
        raise RequestError(f"{len(listed)} SamplingParams for {count} prompts", parameter="params")
    return [p.updated(**sampling) if sampling else p for p in listed]


def _listed(prompts: Any) -> list[Any]:
    if isinstance(prompts, (bytes, Mapping)) or not hasattr(prompts, "__iter__"):
        raise RequestError(
            f"a prompt must be a string or a list of strings, not {type(prompts).__name__}",
            parameter="prompts",
            value=prompts,
        )
    return list(prompts)


def _need_text(text: Any, parameter: str) -> None:
    if not isinstance(text, str):
        raise RequestError(f"{parameter} must be a string, not {type(text).__name__}", parameter=parameter, value=text)


def _outcome(stream: Stream) -> Completion | FlashError:
    try:
        return stream.result()
    except FlashError as e:
        return without_traceback(e)


async def _aoutcome(stream: Stream) -> Completion | FlashError:
    try:
        return await stream
    except FlashError as e:
        return without_traceback(e)


def _hand_over(results: list[Completion | FlashError], single: bool, return_errors: bool) -> Any:
    if not return_errors:
        for r in results:
            if isinstance(r, FlashError):
                r.results = results
                raise r
    return results[0] if single else results


def _score(completion: Completion) -> Score:
    ids, positions = completion.prompt_token_ids, completion.prompt_logprobs or ()
    return Score(ids, tuple(None if p is None else p[t] for p, t in zip(positions, ids, strict=True)))


class FlashEngine:
    """A language model inside this process.

    ``model`` is a folder, a GGUF file, a name that ``deepseek-flash pull`` knows, or a Hub repo
    ``org/name[@revision][:file.gguf]``. Options: see :class:`~deepseek_flash.config.EngineConfig`.

    Every method may be called from any thread and any event loop, at any time. Use it as a context manager or
    call :meth:`close`; afterwards, and in a forked child, every call raises :class:`EngineClosed`.
    Sampling options are given as :class:`SamplingParams`, as keywords, or both (keywords win).
    """

    def __init__(self, model: str | os.PathLike[str], **options: Any) -> None:
        self._open(FlashRuntime(EngineConfig.from_options(model, options)))

    def _open(self, runtime: FlashRuntime) -> None:
        self._runtime = runtime
        self._finalizer = weakref.finalize(self, runtime.close)
        self._finalizer.atexit = False  # the loop has its own, quieter, way out
        try:
            runtime.open()
        except BaseException:  # a fault or Ctrl-C; the traceback may be kept, and this object with it
            self.close()
            raise

    @classmethod
    def _from_runtime(cls, runtime: FlashRuntime) -> FlashEngine:
        """Open a runtime that was made in another way."""
        engine = cls.__new__(cls)
        engine._open(runtime)
        return engine

    # generating

    @overload
    def generate(
        self, prompts: str, params: SamplingParams | None = None, *, return_errors: bool = False, **sampling: Any
    ) -> Completion: ...
    @overload
    def generate(
        self, prompts: Sequence[str], params: Params = None, *, return_errors: bool = False, **sampling: Any
    ) -> list[Completion]: ...
    @overload
    def generate(
        self,
        prompts: None = None,
        params: Params = None,
        *,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]],
        return_errors: bool = False,
        **sampling: Any,
    ) -> Any: ...

    def generate(
        self,
        prompts: str | Sequence[str] | None = None,
        params: Params = None,
        *,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        return_errors: bool = False,
        **sampling: Any,
    ) -> Any:
        """Complete raw text or token ids: one in, one Completion out; a list in, a list out, in order.

        All prompts of a list run as one continuous batch. With ``return_errors`` an input that fails has its
        exception in the list instead of a Completion; without, wrong input raises before any work starts and a
        later fault raises after the others have finished (their results are in the error's ``results``).
        """
        makers, single = self._raw(prompts, prompt_token_ids, params, sampling)
        return self._run(makers, single, return_errors)

    async def agenerate(
        self,
        prompts: str | Sequence[str] | None = None,
        params: Params = None,
        *,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        return_errors: bool = False,
        **sampling: Any,
    ) -> Any:
        """:meth:`generate` for asyncio; cancelling the task cancels its requests."""
        makers, single = self._raw(prompts, prompt_token_ids, params, sampling)
        long = isinstance(prompts, str) and len(prompts) > _LONG_TEXT
        return await self._arun(makers, single, return_errors, long or (prompts is not None and not single))

    def stream(
        self,
        prompt: str | None = None,
        params: SamplingParams | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        **sampling: Any,
    ) -> Stream:
        """Complete one prompt piece by piece: ``for delta in engine.stream(…)`` or ``async for``."""
        makers, single = self._raw(prompt, prompt_token_ids, params, sampling)
        if not single:
            raise RequestError(
                "stream() takes one prompt; use generate() for a list, or submit() each", parameter="prompt"
            )
        return makers[0]()

    def chat(
        self, messages: Any, params: SamplingParams | None = None, *, stream: bool = False, **sampling: Any
    ) -> Any:
        """Answer a conversation (a list of ``{"role", "content"}``) through the checkpoint's chat template.

        Returns a Completion, or a :class:`Stream` with ``stream=True``.
        """
        maker = self._chat(messages, params, sampling)
        opened = maker()
        return opened if stream else opened.result()

    async def achat(
        self, messages: Any, params: SamplingParams | None = None, *, stream: bool = False, **sampling: Any
    ) -> Any:
        """:meth:`chat` for asyncio; with ``stream=True`` the awaited value is a Stream for ``async for``."""
        opened = await asyncio.to_thread(self._chat(messages, params, sampling))
        return opened if stream else await opened

    def submit(self, prompt: Any, params: SamplingParams | None = None, **sampling: Any) -> Stream:
        """Queue a prompt (string) or a conversation (list of messages) and return at once with its Stream."""
        if isinstance(prompt, str):
            return self.stream(prompt, params, **sampling)
        stream = self.chat(prompt, params, stream=True, **sampling)
        assert isinstance(stream, Stream)
        return stream

    async def asubmit(self, prompt: Any, params: SamplingParams | None = None, **sampling: Any) -> Stream:
        """:meth:`submit` without tokenising on the event loop."""
        return await asyncio.to_thread(lambda: self.submit(prompt, params, **sampling))

    async def astream(self, prompt: str, params: SamplingParams | None = None, **sampling: Any) -> Any:
        """An async iterator of deltas for one prompt: ``async for delta in engine.astream(…)``."""
        opened = await self.asubmit(prompt, params, **sampling)
        try:
            async for delta in opened:
                yield delta
        finally:  # at once, not when the event loop gets to closing the inner generator
            opened.cancel()

    # keeping prompts warm

    def preload(self, prompt: Any, *, pin: bool = False) -> Preloaded:
        """Read a prompt (text, messages or token ids) into the cache; returns when it is there.

        With ``pin`` it is not evicted, and kept on disk beyond this process where there is a disk tier.
        """
        self._guard()
        builder, params = self._runtime.builder, SamplingParams(max_new_tokens=0)
        if isinstance(prompt, str):
            return preload(self._runtime, lambda: builder.from_text(prompt, params), pin)
        listed = _listed(prompt)
        if any(isinstance(m, (Mapping, Message)) for m in listed):
            segments = builder.render(listed, add_generation_prompt=False)
            listed = self._runtime.tokenizer.encode_segments(segments)
        return preload(self._runtime, lambda: builder.from_ids(listed, params), pin)

    def session(self, system: str | None = None, **params: Any) -> Session:
        """A conversation that keeps its messages; ``params`` are sampling options of all its turns."""
        self._guard()
        if system is not None:
            _need_text(system, "system")
        first = () if system is None else (Message("system", system),)
        return Session(self, first, _each(None, params, 1)[0])

    def load_session(self, path: str | os.PathLike[str]) -> Session:
        """Go on with a conversation from the file that ``Session.save`` wrote."""
        self._guard()
        return Session(self, *read_session(path))

    # text and scores

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a raw prompt."""
        self._guard()
        _need_text(text, "text")
        return self._runtime.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids."""
        self._guard()
        if not hasattr(token_ids, "__iter__"):
            raise RequestError(
                f"token_ids must be a list of ints, not {type(token_ids).__name__}",
                parameter="token_ids",
                value=token_ids,
            )
        return self._runtime.tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def count_tokens(self, prompt: Any) -> int:
        """Tokens of a raw prompt (string) or of a conversation as chat() would send it."""
        self._guard()
        if isinstance(prompt, str):
            return len(self.tokenize(prompt))
        return len(self._runtime.tokenizer.encode_segments(self._runtime.builder.render(prompt)))

    def apply_chat_template(
        self, messages: Messages, *, tokenize: bool = False, add_generation_prompt: bool = True, **variables: Any
    ) -> Any:
        """The prompt that chat() would send: text, or token ids with ``tokenize``.

        The text is for reading: text in it that spells a control token is not one in the ids.
        """
        self._guard()
        segments = self._runtime.builder.render(messages, add_generation_prompt=add_generation_prompt, **variables)
        if tokenize:
            return self._runtime.tokenizer.encode_segments(segments)
        return "".join(s.text for s in segments)

    def score(self, text: str | Sequence[str]) -> Any:
        """Log-probability of each token of a text under the model: a :class:`Score`, or a list of them."""
        params = SamplingParams(max_new_tokens=0, prompt_logprobs=0)
        done = self.generate(text, params)
        return [_score(c) for c in done] if isinstance(done, list) else _score(done)

    # looking inside

    def describe(self) -> dict[str, Any]:
        """What runs and how: model, limits, kernels, cache and counters, as plain data."""
        self._guard()
        return self._runtime.describe()

    def memory_report(self) -> MemoryReport:
        """Measured bytes: weights, cache, process; ``print`` it for a table."""
        self._guard()
        return self._runtime.memory_report()

    # memory

    @property
    def cache(self) -> CacheControl:
        """The tiers of the cache, to look at and to clear: ``engine.cache.clear("l3")``."""
        self._guard()
        return CacheControl(self._runtime)

    def resize(self, *, kv_cache: int | str) -> int:
        """Shrink or grow the cache pool to at most ``kv_cache`` bytes (or ``"2GiB"``) while requests run; returns the
        bytes it has then. Cached blocks go down to the tiers below. MemoryBudgetError when one sequence of
        ``max_model_len`` tokens would not fit; it never has more than ``max_batch_size`` such sequences can use."""
        self._guard()
        return self._runtime.resize(parse_bytes(kv_cache, "kv_cache"))

    def sleep(self) -> None:
        """Give the memory of weights and cache back to the system until :meth:`wake`. The cache's contents wait in an
        unnamed file (in ``l3_cache_path``, else the system's folder for temporary files); running requests stop where
        they are and go on, with the same tokens, after wake(), and new ones wait in line. OSError when the
        file cannot be written; nothing has changed then."""
        self._guard()
        self._runtime.sleep()

    def wake(self) -> None:
        """Read weights and cache back in and go on. CheckpointError when the weights' file has changed."""
        self._guard()
        self._runtime.wake()

    # life

    @property
    def closed(self) -> bool:
        return self._runtime.loop.closed

    def close(self) -> None:
        """Stop, end running requests with EngineClosed, and give all memory back. Idempotent."""
        self._runtime.close()
        self._finalizer.detach()  # last, for an interrupted close() has yet to be made up for

    def __enter__(self) -> FlashEngine:
        self._guard()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<FlashEngine {self._runtime.path.name} {'closed' if self.closed else 'open'}>"

    def __copy__(self) -> FlashEngine:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> FlashEngine:
        return self

    def __reduce__(self) -> Any:
        raise TypeError("a FlashEngine holds a model and a thread and cannot be pickled; open one in each process")

    # inside

    def _guard(self) -> None:
        self._runtime.loop.guard()

    def _raw(self, prompts: Any, ids: Any, params: Params, sampling: dict[str, Any]) -> tuple[list[_Maker], bool]:
        """One function a prompt that validates, tokenises and queues it."""
        self._guard()
        if (prompts is None) == (ids is None):
            raise RequestError("give either a prompt or prompt_token_ids", parameter="prompts")
        builder = self._runtime.builder
        if prompts is not None:
            single = isinstance(prompts, str)
            items = [prompts] if single else _listed(prompts)
            make: Callable[[Any, SamplingParams], Any] = builder.from_text
        else:
            if isinstance(ids, (str, bytes, Mapping)) or not hasattr(ids, "__iter__"):
                raise RequestError(
                    f"prompt_token_ids must be a list of ints or a list of such lists, not {type(ids).__name__}",
                    parameter="prompt_token_ids",
                    value=ids,
                )
            ids = list(ids)
            single = not any(hasattr(i, "__len__") and not isinstance(i, str) for i in ids)
            items = [ids] if single else ids
            make = builder.from_ids
        each = _each(params, sampling, len(items))
        return [_Maker(self._runtime, make, item, p) for item, p in zip(items, each, strict=True)], single

    def _chat(self, messages: Any, params: SamplingParams | None, sampling: dict[str, Any]) -> _Maker:
        self._guard()
        return _Maker(self._runtime, self._runtime.builder.from_messages, messages, _each(params, sampling, 1)[0])

    def _streams(self, requests: list[Request | FlashError]) -> list[Stream | FlashError]:
        return [r if isinstance(r, FlashError) else self._runtime.stream(r) for r in requests]

    def _queue(self, requests: list[Request | FlashError]) -> None:
        for r in requests:
            if not isinstance(r, FlashError):
                self._runtime.queue(r)

    def _run(self, makers: list[_Maker], single: bool, return_errors: bool) -> Any:
        requests = [m.prepared(return_errors) for m in makers]
        opened = self._streams(requests)
        try:
            self._queue(requests)
            results = [s if isinstance(s, FlashError) else _outcome(s) for s in opened]
        except BaseException:  # Ctrl-C: nothing may go on running for a caller who has left
            for s in opened:
                if isinstance(s, Stream):
                    s.cancel()
            raise
        return _hand_over(results, single, return_errors)

    async def _arun(self, makers: list[_Maker], single: bool, return_errors: bool, off_loop: bool) -> Any:
        def prepare() -> list[Request | FlashError]:
            return [m.prepared(return_errors) for m in makers]

        requests = await asyncio.to_thread(prepare) if off_loop else prepare()
        opened = self._streams(requests)
        try:
            self._queue(requests)
            done = await asyncio.gather(*(_aoutcome(s) for s in opened if isinstance(s, Stream)))
        finally:
            for s in opened:
                if isinstance(s, Stream):
                    s.cancel()
        by_stream = iter(done)
        results = [s if isinstance(s, FlashError) else next(by_stream) for s in opened]
        return _hand_over(results, single, return_errors)
