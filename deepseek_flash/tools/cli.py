"""``deepseek-flash``: pull, demo, chat, generate, doctor.

Only the standard library is imported here, so ``--help`` is instant; each command imports what it needs.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from deepseek_flash import __version__
from deepseek_flash.errors import FlashError

DEFAULT_MODEL = "smollm2-135m"
MODEL_HELP = "folder, .gguf file, catalogue name, or Hub repo org/name[@revision][:file.gguf]"

USER_ERROR, INTERRUPTED = 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit code is 0, 2 for an error the user can act on, 130 after Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character must not stop an answer half way.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    options = parser().parse_args(argv)
    module, _, function = options.run.partition(":")
    try:
        run: Callable[[Any], int] = getattr(import_module(f"deepseek_flash.tools.{module}"), function)
        code = run(options)
        sys.stdout.flush()
        return code
    except FlashError as e:
        print(f"deepseek-flash: {e}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has left; point stdout elsewhere so that interpreter exit does not complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = argparse.ArgumentParser(
        prog="deepseek-flash", description="DeepSeek-family language models inside your own Python process."
    )
    top.add_argument("--version", action="version", version=f"deepseek-flash {__version__}")
    commands = top.add_subparsers(metavar="COMMAND", required=True)

    pull = _command(commands, "pull", "models:pull", "fetch a model of the catalogue into the cache folder")
    pull.add_argument("name", nargs="?", help="which one (see --list)")
    pull.add_argument("--list", action="store_true", help="show the catalogue and what is already here")

    demo = _command(commands, "demo", "demo:run", "open a model, stream an answer, run requests side by side")
    demo.add_argument("model", nargs="?", default=DEFAULT_MODEL, help=f"{MODEL_HELP} [{DEFAULT_MODEL}]")
    demo.add_argument("--max-new-tokens", type=_count, default=64, metavar="N", help="length of the chat answer [64]")

    chat = _command(commands, "chat", "chat:chat", "talk to a model in the terminal")
    chat.add_argument("model", help=MODEL_HELP)
    chat.add_argument("--system", default="", metavar="TEXT", help="system message")
    _sampling(chat)

    generate = _command(commands, "generate", "chat:generate", "complete a raw prompt and print it as it comes")
    generate.add_argument("model", help=MODEL_HELP)
    generate.add_argument("prompt", help="the text to continue; '-' reads standard input")
    _sampling(generate)

    _command(commands, "doctor", "doctor:run", "what this machine has, what is used, what is missing")
    return top


def _command(commands: Any, name: str, run: str, text: str) -> argparse.ArgumentParser:
    added: argparse.ArgumentParser = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    added.set_defaults(run=run)
    return added


def _sampling(command: argparse.ArgumentParser) -> None:
    """Sampling options; those not given are left to the checkpoint and the library. Ranges are checked there."""
    group = command.add_argument_group("sampling")
    none = argparse.SUPPRESS
    group.add_argument("--max-new-tokens", type=int, default=none, metavar="N", help="most tokens to produce")
    group.add_argument("--temperature", type=float, default=none, metavar="T", help="0 is greedy")
    group.add_argument("--top-p", type=float, default=none, metavar="P")
    group.add_argument("--top-k", type=int, default=none, metavar="K")
    group.add_argument("--seed", type=int, default=none, metavar="N", help="same seed, same answer")
    group.add_argument("--stop", action="append", default=none, metavar="TEXT", help="end there; may be repeated")
    command.add_argument("--max-model-len", type=int, default=None, metavar="N", help="longest context, in tokens")


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


if __name__ == "__main__":
    sys.exit(main())
