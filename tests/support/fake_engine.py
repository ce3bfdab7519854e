"""An engine without a model: FlashEngine's surface, scripted answers, real Streams, counters for tests."""

from __future__ import annotations

import asyncio
import itertools
import re
import threading
import time
from collections.abc import Callable
from typing import Any

from deepseek_flash.errors import ContextLengthError, EngineClosed, FlashError
from deepseek_flash.runtime.stream import Channel, Stream
from deepseek_flash.types import Choice, Completion, Delta, SamplingParams, Usage


def echo(prompt: Any) -> str:
    """What was said last, said back."""
    said = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    return f"you said: {said} – 你好 👋 and that is all."


class FakeEngine:
    """Answers with ``reply(prompt)``, one word a token, ``delay`` seconds a token.

    A reply that is an exception is raised by the request. Prompts of more than ``limit`` words are refused.
    """

    opened = 0

    def __init__(
        self,
        model: str = "fake",
        *,
        reply: Callable[[Any], str | FlashError] = echo,
        delay: float = 0.0,
        limit: int = 200,
        **options: Any,
    ) -> None:
        type(self).opened += 1
        self.model, self.options = model, options
        self.reply, self.delay, self.limit = reply, delay, limit
        self.requests: list[tuple[Any, SamplingParams]] = []
        self.running = self.peak = self.produced = self.cancelled = 0
        self.closed = False
        self._lock = threading.Lock()
        self._ids = itertools.count()
        self._words: list[str] = []

    def submit(self, prompt: Any, params: SamplingParams | None = None) -> Stream:
        if self.closed:
            raise EngineClosed("the engine was closed; open a new one")
        params = params or SamplingParams()
        size = self.count_tokens(prompt)
        if size > self.limit:
            raise ContextLengthError(f"{size} tokens, limit {self.limit}", tokens=size, limit=self.limit)
        channel, stop = Channel(), threading.Event()
        with self._lock:
            self.requests.append((prompt, params))
            self.running += 1
            self.peak = max(self.peak, self.running)
        threading.Thread(target=self._work, args=(channel, stop, prompt, params, size), daemon=True).start()
        return Stream(channel, stop.set, next(self._ids))

    async def asubmit(self, prompt: Any, params: SamplingParams | None = None) -> Stream:
        return await asyncio.to_thread(self.submit, prompt, params)

    def _work(self, channel: Channel, stop: threading.Event, prompt: Any, params: SamplingParams, size: int) -> None:
        reply = self.reply(prompt)
        try:
            if isinstance(reply, FlashError):
                channel.fail(reply)
                return
            choices = [self._choice(channel, stop, params, reply, index) for index in range(params.n)]
            usage = Usage(size, sum(len(c.token_ids) for c in choices))
            last = choices[-1]
            channel.put(Delta(last.index, finish_reason=last.finish_reason, stop_reason=last.stop_reason, usage=usage))
            channel.finish(Completion.from_choices(tuple(choices), usage=usage))
        finally:
            with self._lock:
                self.running -= 1
                self.cancelled += stop.is_set()

    def _choice(
        self, channel: Channel, stop: threading.Event, params: SamplingParams, reply: str, index: int
    ) -> Choice:
        reason: Any = "stop"
        stop_reason = None
        for text in params.stop:
            if text in reply:
                reply, stop_reason = reply[: reply.index(text)], text
        ids: list[int] = []
        tokens = self.tokenize(reply)
        for token in tokens:
            if len(ids) == (params.max_new_tokens or 10**6):
                reason, stop_reason = "length", None
                break
            if stop.wait(self.delay) if self.delay else stop.is_set():
                reason = "cancelled"
                break
            ids.append(token)
            with self._lock:
                self.produced += 1
            logprobs = ({token: -0.25, 0: -1.5},) if params.logprobs is not None else None
            channel.put(Delta(index, self.detokenize([token]), token_ids=(token,), logprobs=logprobs))
        every = None if params.logprobs is None else tuple({t: -0.25, 0: -1.5} for t in ids)
        return Choice(index, self.detokenize(ids), tuple(ids), reason, stop_reason, every)

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids = []
        with self._lock:
            for word in re.findall(r"\s*\S+|\s+$", text):
                if word not in self._words:
                    self._words.append(word)
                ids.append(self._words.index(word) + 1)
        return ids

    def detokenize(self, token_ids: Any, *, skip_special_tokens: bool = True) -> str:
        return "".join("<s>" if i == 0 else self._words[i - 1] for i in token_ids)

    def count_tokens(self, prompt: Any) -> int:
        if isinstance(prompt, str):
            return len(self.tokenize(prompt))
        return sum(len(self.tokenize(m["content"])) + 2 for m in prompt)

    def describe(self) -> dict[str, Any]:
        if self.closed:
            raise EngineClosed("the engine was closed; open a new one")
        return {"model": {"path": f"/models/{self.model}", "fingerprint": "00ff"}}

    def close(self) -> None:
        self.closed = True

    def settle(self, timeout: float = 5.0) -> None:
        """Wait until nothing runs any more."""
        end = time.monotonic() + timeout
        while self.running:
            assert time.monotonic() < end, f"{self.running} requests still run"
            time.sleep(0.002)
