"""``deepseek-flash``: pull, demo, chat, generate, convert, inspect, plan, cache, doctor.

Only the standard library is imported here, so ``--help`` is instant; each command imports what it needs.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from deepseek_flash import __version__
from deepseek_flash.errors import FlashError, near_miss

DEFAULT_MODEL = "smollm2-135m"
MODEL_HELP = "folder, .gguf file, catalogue name, or Hub repo org/name[@revision][:file.gguf]"

USER_ERROR, INTERRUPTED = 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit code is 0, 1 from ``plan`` for a model that does not fit and from ``cache verify`` for
    damage, 2 for an error the user can act on, 130 after Ctrl-C."""
    _streams()
    options = _parse(sys.argv[1:] if argv is None else argv)
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
    except BrokenPipeError:  # the reader (head, less) has left
        _forget_stdout()
        return 0
    except OSError as e:
        if e.errno not in (errno.ENOSPC, errno.EIO):
            raise
        _forget_stdout()
        print(f"deepseek-flash: cannot go on: {e}", file=sys.stderr)
        return USER_ERROR


def _streams() -> None:
    """Standard streams that neither stop an answer half way nor are missing (``<&-``, ``pythonw``)."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  (for the whole process)
        elif hasattr(stream, "reconfigure"):
            # A character that the terminal cannot show, or bytes that are no text, become a substitute.
            stream.reconfigure(errors="replace")


def _forget_stdout() -> None:
    """Point stdout elsewhere, so that interpreter exit does not complain about what it cannot write."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options; wrong use exits with 2, an unknown option with the nearest known one."""
    top = parser()
    if not argv:
        top.print_help(sys.stderr)
        raise SystemExit(USER_ERROR)
    options, unknown = top.parse_known_args([a.encode(errors="surrogateescape").decode(errors="replace") for a in argv])
    if unknown:
        command: argparse.ArgumentParser = options.parser
        known = [o for action in command._actions for o in action.option_strings]
        command.error(f"unrecognized arguments: {' '.join(unknown)}{near_miss(unknown[0].partition('=')[0], known)}")
    return options


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
    generate.add_argument("prompt", help="the text to continue; '-' reads it from standard input")
    _sampling(generate)

    convert = _command(commands, "convert", "convert:run", "write a model in the flash format, quantised if asked")
    convert.add_argument("model", help=MODEL_HELP)
    convert.add_argument("out", help="the folder to write; beside it, a hidden one holds what is unfinished")
    convert.add_argument("--quantize", choices=["int4", "int8"], help="how; left out, weights stay as they are stored")
    convert.add_argument("--group", type=_count, default=32, metavar="N", help="inputs that share a scale [32]")
    convert.add_argument(
        "--keep", action="append", metavar="WHICH", help="leave these as stored: layers=0,1, head, mlp.down, a pattern"
    )
    convert.add_argument("--no-progress", action="store_true", help="no bar")

    inspect = _command(commands, "inspect", "inspect:run", "what a model's files hold")
    inspect.add_argument("model", help=f"{MODEL_HELP}, or one .safetensors file")
    inspect.add_argument("--json", action="store_true", help="for programs")
    inspect.add_argument("--tensors", action="store_true", help="list every tensor")
    inspect.add_argument("--verify", action="store_true", help="read a flash folder's tensors, compare their digests")

    plan = _command(commands, "plan", "plan:run", "whether a model fits in memory, before it is loaded or downloaded")
    plan.add_argument("model", help=f"{MODEL_HELP} (its config alone is fetched), or a config.json")
    plan.add_argument("--device-memory", metavar="SIZE", help="of the device, as 24GB or 6GiB [this machine's]")
    plan.add_argument("--fraction", type=_fraction, default=0.8, metavar="F", help="share of it that may be used [0.8]")
    plan.add_argument("--max-model-len", type=_count, metavar="N", help="context to fit [the checkpoint's limit]")
    plan.add_argument("--max-batch-size", type=_count, default=32, metavar="N", help="sequences at once [32]")
    plan.add_argument("--kv-cache-dtype", default="auto", metavar="T", help="auto, float32, float16, bfloat16, int8")
    plan.add_argument("--quantize", choices=["int4", "int8"], help="weights of linear layers, while loading")
    plan.add_argument("--plot", metavar="PNG", help="draw the layers against the budget (needs matplotlib)")
    plan.add_argument("--json", action="store_true", help="for programs")
    cache = _command(commands, "cache", "cache:run", "look at, check or empty a folder that was given as l3_cache_path")
    cache.add_argument("action", choices=["ls", "verify", "clear"], help="list its records, read them all, remove them")
    cache.add_argument("path", help="the folder")
    cache.add_argument("--json", action="store_true", help="for programs")

    _command(commands, "doctor", "doctor:run", "what this machine has, what is used, what is missing")
    return top


def _command(commands: Any, name: str, run: str, text: str) -> argparse.ArgumentParser:
    added: argparse.ArgumentParser = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    added.set_defaults(run=run, parser=added)
    return added


def _sampling(command: argparse.ArgumentParser) -> None:
    """Sampling options; those not given are left to the checkpoint and the library. Ranges are checked there."""
    group = command.add_argument_group("sampling")
    none = argparse.SUPPRESS
    group.add_argument("--max-new-tokens", type=int, default=none, metavar="N", help="most tokens to produce")
    group.add_argument("--temperature", type=float, default=none, metavar="T", help="0 is greedy")
    group.add_argument(
        "--top-p", type=float, default=none, metavar="P", help="only the likeliest, up to sum P; 1 is off"
    )
    group.add_argument("--top-k", type=int, default=none, metavar="K", help="only the K likeliest; 0 is off")
    group.add_argument("--seed", type=int, default=none, metavar="N", help="same seed, same answer")
    group.add_argument("--stop", action="append", default=none, metavar="TEXT", help="end there; may be repeated")
    command.add_argument("--max-model-len", type=int, default=None, metavar="N", help="longest context, in tokens")


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value <= 1.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0, at most 1")
    return value


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
