"""``deepseek-flash demo``: the main job on one screen."""

from __future__ import annotations

import argparse
import time
from typing import Any

from rich.markup import escape
from rich.text import Text

from deepseek_flash.tools import STARTED
from deepseek_flash.tools.screen import Screen

QUESTION = "What is the capital of France, and what is it known for?"
DOCUMENT = (
    "The lighthouse on Gull Island was built in 1871 by the engineer Mary Oakes. It is 41 metres tall, painted white "
    "with two red bands, and its lamp can be seen for 22 kilometres. Until 1988 a keeper and his family lived beside "
    "it; today it works by itself, and the old house is a small museum that opens from May to September. The island "
    "has no cars. A boat crosses from the harbour of Saint Brice four times a day, and the crossing takes 25 minutes."
)
QUESTIONS = (
    "Who built the lighthouse?",
    "How tall is the lighthouse?",
    "When was the lighthouse built?",
    "How long does the crossing take?",
    "What is the name of the island?",
    "What is the old house today?",
)
ANSWER_TOKENS = 32


def run(options: argparse.Namespace) -> int:
    """Open the model, stream one answer, run several requests at once, show the memory."""
    console = Screen(highlight=False, soft_wrap=True)
    console.print(f"[bold]Opening[/] {escape(options.model)} …")
    begin = time.monotonic()
    from deepseek_flash import FlashEngine

    with FlashEngine(options.model) as engine:
        _opened(console, engine, time.monotonic() - begin)
        _answer(console, engine, options.max_new_tokens)
        _side_by_side(console, engine)
        console.print("\n[bold]Memory[/]")
        console.print(Text(str(engine.memory_report())))
    return 0


def _opened(console: Screen, engine: Any, seconds: float) -> None:
    about = engine.describe()
    model, limits, cache = about["model"], about["limits"], about["cache"]
    console.print(
        f"open after {seconds:.2f} s (importing torch included): {model['architecture']}, {model['layers']} layers, "
        f"context {limits['max_model_len']} tokens, cache {sum(cache['blocks'])} blocks of {cache['block_size']} tokens"
    )


def _conversation(engine: Any, text: str) -> Any:
    """The text as a chat message, or as it is where the checkpoint has no chat template."""
    return [{"role": "user", "content": text}] if engine.describe()["model"]["chat_template"] else text


def _answer(console: Screen, engine: Any, length: int) -> None:
    console.print(f"\n[bold]Streaming[/]  {QUESTION}")
    stream = engine.submit(_conversation(engine, QUESTION), temperature=0.0, max_new_tokens=length)
    first = None
    for delta in stream:
        first = first or time.monotonic() - STARTED
        console.print(Text(delta.text), end="")
    done = stream.result()
    timings, usage = done.timings, done.usage
    decoding = timings.total - (timings.first_token or 0.0)
    rate = f", then {(usage.completion_tokens - 1) / decoding:.1f} tokens/s" if decoding > 0 else ""
    console.print(
        f"\n[dim]{usage.prompt_tokens} tokens in, {usage.completion_tokens} out ({done.finish_reason}); "
        f"first token after {1000 * (timings.first_token or 0.0):.0f} ms{rate}; "
        f"{first or 0.0:.2f} s after the command started[/]"
    )


def _side_by_side(console: Screen, engine: Any) -> None:
    console.print(f"\n[bold]{len(QUESTIONS)} requests at once[/] about one shared document")
    room = engine.describe()["limits"]["max_model_len"] // 2
    document = engine.detokenize(engine.tokenize(DOCUMENT, add_special_tokens=False)[:room])
    begin = time.monotonic()
    streams = [
        engine.submit(_conversation(engine, f"{document}\n\n{question}"), temperature=0.0, max_new_tokens=ANSWER_TOKENS)
        for question in QUESTIONS
    ]
    results = [stream.result() for stream in streams]
    seconds = time.monotonic() - begin
    for question, done in zip(QUESTIONS, results, strict=True):
        usage = done.usage
        console.print(f"  {question:<34}[dim]{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens shared[/]")
        console.print(Text(f"    {' '.join(done.text.split())}"))
    prompt = sum(r.usage.prompt_tokens for r in results)
    cached = sum(r.usage.cached_tokens for r in results)
    out = sum(r.usage.completion_tokens for r in results)
    console.print(
        f"[dim]{prompt} prompt tokens, {cached} of them shared, not computed; {out} tokens out in {seconds:.2f} s "
        f"({out / seconds:.1f} tokens/s together)[/]"
    )
