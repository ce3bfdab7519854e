"""``deepseek-flash chat`` and ``deepseek-flash generate``."""

from __future__ import annotations

import argparse
import importlib
import sys
from contextlib import suppress
from typing import Any

from deepseek_flash import FlashEngine, FlashError, Stream
from deepseek_flash.types import SamplingParams

HELP = "/reset forgets the conversation, /memory shows the memory table, /exit (or Ctrl-D) leaves"


def generate(options: argparse.Namespace) -> int:
    """Complete one prompt; only the answer goes to stdout."""
    params = _params(options)
    # `echo text |` and files end with a newline that nobody means as part of the prompt.
    prompt = sys.stdin.read().removesuffix("\n") if options.prompt == "-" else options.prompt
    with _open(options) as engine:
        _show(engine.stream(prompt, params))
    return 0


def chat(options: argparse.Namespace) -> int:
    """Read a line, stream the answer, until the input ends. Ctrl-C stops an answer, at the prompt it leaves."""
    params = _params(options)
    start = [{"role": "system", "content": options.system}] if options.system else []
    with _open(options) as engine:
        print(HELP, file=sys.stderr)
        messages = list(start)
        while (line := _ask()) is not None:
            if line == "/exit":
                break
            if line == "/reset":
                messages = list(start)
            elif line == "/memory":
                print(engine.memory_report())
            elif line.startswith("/"):
                print(HELP, file=sys.stderr)
            elif line:
                messages.append({"role": "user", "content": line})
                _turn(engine, messages, params)
    return 0


def _turn(engine: FlashEngine, messages: list[dict[str, str]], params: SamplingParams) -> None:
    """One answer; a turn that fails or is interrupted is taken back, so the roles stay in order."""
    try:
        answer = _show(engine.chat(messages, params, stream=True))
    except KeyboardInterrupt:
        messages.pop()
        print("\n(stopped; this turn is forgotten)", file=sys.stderr)
    except FlashError as e:
        messages.pop()
        print(f"deepseek-flash: {e}", file=sys.stderr)
    else:
        messages.append({"role": "assistant", "content": answer})


def _ask() -> str | None:
    """The next line; None at the end of input."""
    if not sys.stdin.isatty():
        line = sys.stdin.readline()
        return line.strip() if line else None
    with suppress(ImportError):  # not on Windows, whose console edits lines by itself
        importlib.import_module("readline")  # gives input() arrow keys and history
    try:
        return input("> ").strip()
    except EOFError:
        print()
        return None


def _show(stream: Stream) -> str:
    """Print a stream as it comes; the whole text. Leaving early cancels it."""
    pieces = []
    for delta in stream:
        sys.stdout.write(delta.text)
        sys.stdout.flush()
        pieces.append(delta.text)
    sys.stdout.write("\n")
    return "".join(pieces)


def _open(options: argparse.Namespace) -> FlashEngine:
    more: dict[str, Any] = {} if options.max_model_len is None else {"max_model_len": options.max_model_len}
    return FlashEngine(options.model, **more)


def _params(options: argparse.Namespace) -> SamplingParams:
    """Validated before the model is opened."""
    said = vars(options)
    return SamplingParams(**{name: said[name] for name in SamplingParams.model_fields if name in said})
