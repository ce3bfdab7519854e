"""What both LangChain classes share: fields, the engine behind them, sampling options, batching, counting."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import TracebackType
from typing import Any

from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import get_config_list
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError

from deepseek_flash import ConfigError, EngineClosed, FlashError, RequestError, SamplingParams

from ._engines import ENGINE_OPTIONS, ENGINES, Handle, key_of
from ._errors import adapted

PROVIDER = "deepseek_flash"
"""``model_provider`` and ``ls_provider`` in metadata and traces."""

SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_new_tokens",
    "min_new_tokens",
    "stop",
    "include_stop",
    "stop_token_ids",
    "ignore_eos",
    "seed",
    "n",
    "logprobs",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "logit_bias",
)
"""Fields, and call-time options, that go into SamplingParams."""

LATER = {
    "tools": "tool calling",
    "tool_choice": "tool calling",
    "functions": "tool calling",
    "function_call": "tool calling",
    "parallel_tool_calls": "tool calling",
    "response_format": "structured output",
}

# Enough waiting threads to keep any engine full; each only waits.
_MOST_WAITING = 256


def not_yet(name: str, what: str) -> NotImplementedError:
    return NotImplementedError(
        f"{name}: {what} is not in this version of deepseek-flash (docs/limits.md lists what is not there)"
    )


def near(name: str, known: Iterator[str] | list[str]) -> str:
    close = get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


class FlashWrapper(BaseModel):
    """Fields and behaviour of DeepSeekFlashLLM and ChatDeepSeekFlash."""

    model_config = ConfigDict(arbitrary_types_allowed=True, protected_namespaces=())

    engine: Any = Field(default=None, exclude=True, repr=False)
    """An open FlashEngine to use; closing it stays its owner's business."""
    model: str | None = None
    """Folder, GGUF file, catalogue name or Hub repo to open on first use (also ``model_path``, ``model_name``)."""
    engine_options: dict[str, Any] = Field(default_factory=dict)
    """Options for opening it; known ones may also be given as keywords of the wrapper."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_new_tokens: int | None = None
    """Also ``max_tokens``."""
    min_new_tokens: int | None = None
    stop: list[str] | None = None
    """Stop strings; ``stop`` given at call time replaces them."""
    include_stop: bool | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    n: int | None = None
    logprobs: int | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    timeout: float | None = Field(default=None, gt=0)
    """Seconds for one call; then it stops with an error that carries what was produced in ``partial``."""
    max_retries: int | None = None
    """Accepted because LangChain code passes it; a local engine has nothing to retry."""
    api_key: Any = Field(default=None, exclude=True, repr=False)
    """Accepted because LangChain code passes it; no key is needed."""

    _handle: Handle | None = PrivateAttr(default=None)
    _closed: bool = PrivateAttr(default=False)
    _identity: dict[str, Any] | None = PrivateAttr(default=None)

    def __init__(self, **options: Any) -> None:
        """Cheap: nothing is loaded before the first call. A wrong option is a ConfigError."""
        given = self._named(options)
        try:
            super().__init__(**given)
            self._sampling(None, {})
        except ValidationError as error:
            first = error.errors()[0]
            name = str(first["loc"][0]) if first["loc"] else ""
            raise ConfigError(
                f"{name}={given.get(name)!r}: {first['msg']}", field=name, value=given.get(name)
            ) from None
        except RequestError as error:
            raise ConfigError(str(error), field=error.parameter, value=error.value) from None
        if (self.engine is None) == (self.model is None):
            raise ConfigError(
                "give either engine= (an open FlashEngine to share) or model= (one to open on first use)",
                field="model",
                value=self.model,
            )
        if self.engine is not None and self.engine_options:
            raise ConfigError(
                f"{', '.join(self.engine_options)}: the engine is open already; give these options to it instead",
                field=next(iter(self.engine_options)),
            )
        if self.model is not None:
            self._held()  # from now on, so that equal wrappers share even if made for one call each

    @classmethod
    def _named(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Aliases resolved, engine options gathered, unknown names refused."""
        given: dict[str, Any] = {}
        opening = dict(options.get("engine_options") or {})
        for name, value in options.items():
            known = {"model_path": "model", "model_name": "model", "max_tokens": "max_new_tokens"}.get(name, name)
            if known in given:
                raise ConfigError(f"{name} and {known} are the same option: give one", field=name, value=value)
            if known in cls.model_fields:
                given[known] = value
            elif known in ENGINE_OPTIONS:
                opening[known] = value
            else:
                names = [*cls.model_fields, *ENGINE_OPTIONS, "model_path", "model_name", "max_tokens"]
                raise ConfigError(
                    f"unknown option {name!r}{near(name, names)}",
                    field=name,
                    value=value,
                    allowed=", ".join(sorted(names)),
                )
        if isinstance(given.get("model"), Path):
            given["model"] = str(given["model"])
        if isinstance(given.get("stop"), str):
            given["stop"] = [given["stop"]]
        return {**given, "engine_options": opening}

    # the engine

    def _held(self) -> Handle:
        if self._closed:
            raise EngineClosed("this wrapper was closed; make a new one")
        if self.model is None:
            raise ConfigError(
                "this wrapper has no engine: an open engine does not travel with copies to other processes; "
                "give it one (engine=...) or name a model (model=...)",
                field="engine",
            )
        key = key_of(self.model, self.engine_options)
        if self._handle is None or self._handle.key != key:
            self._handle = ENGINES.handle(key, self.model, self.engine_options)
        return self._handle

    def get_engine(self) -> Any:
        """The FlashEngine behind this wrapper, opened now if it was not."""
        with adapted():
            return self._held().open() if self.engine is None else self.engine

    async def aget_engine(self) -> Any:
        """``get_engine`` that never blocks the event loop while a model loads."""
        ready = self.engine if self.engine is not None else self._held().engine
        return ready if ready is not None else await asyncio.to_thread(self.get_engine)

    def close(self) -> None:
        """Stop using the engine. One that wrappers opened closes with its last user; a shared one stays open."""
        handle, self._handle = self._handle, None
        self._closed = self.engine is None
        if handle is not None:
            last, engine = weakref.ref(handle), handle.engine
            del handle
            if last() is None and engine is not None:
                engine.close()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __getstate__(self) -> dict[Any, Any]:
        state = super().__getstate__()
        private = {**(state.get("__pydantic_private__") or {}), "_handle": None}
        return {**state, "__dict__": {**state["__dict__"], "engine": None}, "__pydantic_private__": private}

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Any:
        memo = {} if memo is None else memo
        for shared in (self.engine, self._handle):
            memo[id(shared)] = shared
        return super().__deepcopy__(memo)

    # names

    @property
    def model_name(self) -> str:
        """What metadata and traces call the model."""
        return str(self._identify()["model_name"])

    def _identify(self) -> dict[str, Any]:
        """What distinguishes the model for caches and traces; opens nothing."""
        if self.engine is None:
            return {
                "model_name": self.model or "",
                "engine_options": {k: repr(v) for k, v in self.engine_options.items()},
            }
        if self._identity is None:
            try:
                model = self.engine.describe()["model"]
            except FlashError:  # closed: the next call says so
                return {"model_name": "closed engine"}
            self._identity = {"model_name": Path(model["path"]).name, "fingerprint": model["fingerprint"]}
        return self._identity

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """Everything that changes an answer; LangChain's caches and traces compare it."""
        said = {name: getattr(self, name) for name in SAMPLING if getattr(self, name) is not None}
        return {**self._identify(), **said}

    def _tracing(self, kind: str, stop: list[str] | None, options: Mapping[str, Any]) -> dict[str, Any]:
        said = {**{name: getattr(self, name) for name in SAMPLING}, **options}
        params: dict[str, Any] = {
            "ls_provider": PROVIDER,
            "ls_model_name": options.get("model") or self.model_name,
            "ls_model_type": kind,
        }
        most = options.get("max_tokens", said["max_new_tokens"])
        ends = stop if stop is not None else said["stop"]
        if said["temperature"] is not None:
            params["ls_temperature"] = said["temperature"]
        if most is not None:
            params["ls_max_tokens"] = most
        if ends and isinstance(ends, (str, list, tuple, set)):  # anything else is refused by the call itself
            params["ls_stop"] = [ends] if isinstance(ends, str) else list(ends)
        return params

    # sampling options

    def _sampling(self, stop: list[str] | None, options: Mapping[str, Any]) -> tuple[SamplingParams, float | None]:
        """This wrapper's options with those of the call on top, and the time limit."""
        said = {name: getattr(self, name) for name in SAMPLING if getattr(self, name) is not None}
        timeout = self.timeout
        for name, value in options.items():
            known = "max_new_tokens" if name == "max_tokens" else name
            if name in LATER and value is not None:
                raise not_yet(name, LATER[name])
            if value is None or name in LATER or name == "stream":
                continue
            if name == "timeout":
                if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                    raise RequestError(
                        f"timeout={value!r}: a number of seconds above 0 is needed", parameter="timeout", value=value
                    )
                timeout = value
            elif name == "model":
                if value not in (self.model, self.model_name):
                    raise RequestError(
                        f"model={value!r}: this wrapper runs {self.model_name!r}; make another one for another model",
                        parameter="model",
                        value=value,
                    )
            elif known in SAMPLING:
                said[known] = value
            else:
                names = [*SAMPLING, "max_tokens", "timeout"]
                raise RequestError(f"unknown option {name!r}{near(name, names)}", parameter=name, value=value)
        if stop is not None:
            said["stop"] = stop
        return SamplingParams(**said), timeout

    def _one_answer(self, stop: list[str] | None, options: Mapping[str, Any]) -> tuple[SamplingParams, float | None]:
        params, timeout = self._sampling(stop, options)
        if params.n != 1:
            raise RequestError(
                f"n={params.n}: a LangChain stream carries one answer; use generate() for several, or n=1",
                parameter="n",
                value=params.n,
            )
        return params, timeout

    # many at once

    def _together(self, config: Any, count: int) -> list[RunnableConfig]:
        """Configs that let the whole batch reach the engine at once, unless the caller set a limit."""
        configs = get_config_list(config, count)
        for each in configs:
            if each.get("max_concurrency") is None:
                each["max_concurrency"] = min(count, _MOST_WAITING)
        return configs

    def batch(self, inputs: list[Any], config: Any = None, *, return_exceptions: bool = False, **options: Any) -> Any:
        """All inputs run in the engine together; results in order, each with its own callbacks and error."""
        if not inputs:
            return []
        configs = self._together(config, len(inputs))
        return Runnable.batch(self, inputs, configs, return_exceptions=return_exceptions, **options)  # type: ignore[arg-type]

    async def abatch(
        self, inputs: list[Any], config: Any = None, *, return_exceptions: bool = False, **options: Any
    ) -> Any:
        """``batch`` for asyncio."""
        return await Runnable.abatch(self, inputs, config, return_exceptions=return_exceptions, **options)  # type: ignore[arg-type]

    def batch_as_completed(
        self, inputs: Any, config: Any = None, *, return_exceptions: bool = False, **options: Any
    ) -> Any:
        """``batch`` that yields (index, result) as results come."""
        configs = self._together(config, len(inputs)) if inputs else None
        return super().batch_as_completed(inputs, configs, return_exceptions=return_exceptions, **options)  # type: ignore[misc]

    # counting

    def get_token_ids(self, text: str) -> list[int]:
        """Ids by the model's own tokenizer, without a beginning-of-text token (``custom_get_token_ids`` goes first)."""
        custom = getattr(self, "custom_get_token_ids", None)
        if custom is not None:
            return list(custom(text))
        with adapted():
            return list(self.get_engine().tokenize(text, add_special_tokens=False))
