"""The command line, mostly in process: what it prints, how it fails, what it leaves alone."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deepseek_flash import __version__
from deepseek_flash.config import ENVIRONMENT
from deepseek_flash.errors import FlashError, ModelNotFound
from deepseek_flash.kernels.cpu import lib
from deepseek_flash.tools import cli

COMMANDS = ["pull", "demo", "chat", "generate", "convert", "inspect", "plan", "cache", "doctor"]


def run(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "deepseek_flash.tools.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **options)


def raising(monkeypatch, module, function, error):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(f"deepseek_flash.tools.{module}.{function}", fail)


def test_version_and_help(capsys):
    for arguments, expected in ((["--version"], __version__), (["--help"], "doctor"), (["chat", "--help"], "--seed")):
        with pytest.raises(SystemExit) as info:
            cli.main(arguments)
        assert info.value.code == 0
        assert expected in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["generate"], ["dance"], ["demo", "--max-new-tokens", "0"]])
def test_wrong_use_is_exit_code_2(arguments, capsys):
    with pytest.raises(SystemExit) as info:
        cli.main(arguments)
    assert info.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_nothing_given_shows_the_commands(capsys):
    with pytest.raises(SystemExit):
        cli.main([])
    shown = capsys.readouterr().err
    assert all(name in shown for name in COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["generate", "m", "hi", "--temprature", "1"], "did you mean '--temperature'?"),
        (["chat", "m", "--sede=1"], "did you mean '--seed'?"),
        (["demo", "--max-new-tokens", "many"], "'many' is not a whole number from 1 on"),
    ],
)
def test_a_mistyped_option_is_told_with_the_command_s_usage(arguments, said, capsys):
    with pytest.raises(SystemExit) as info:
        cli.main(arguments)
    error = capsys.readouterr().err
    assert info.value.code == 2
    assert said in error
    assert f"usage: deepseek-flash {arguments[0]}" in error


def test_the_docs_list_every_command_and_option():
    text = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    subcommands = next(a for a in cli.parser()._actions if isinstance(a.choices, dict)).choices
    assert list(subcommands) == COMMANDS
    for name, command in subcommands.items():
        assert f"| `{name}" in text
        for action in command._actions:
            for option in action.option_strings:
                known = option in ("-h", "--help") or f"`{option}`" in text or f"`{name} {option}`" in text
                assert known, option


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "no-such-model", "hello"],
        ["chat", "no-such-model"],
        ["demo", "no-such-model"],
        ["pull", "no-such-model"],
        ["pull"],
        ["generate", "no-such-model", "hello", "--temperature", "-1"],
        ["generate", "no-such-model", "hello", "--max-model-len", "0"],
    ],
)
def test_errors_are_one_line_and_exit_code_2(arguments, capsys):
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("deepseek-flash: ")
    assert len(captured.err.strip().splitlines()) == 1
    assert "Traceback" not in captured.err


def test_a_pull_of_an_unknown_name_suggests_the_near_one(capsys):
    assert cli.main(["pull", "smolm2-135m"]) == 2
    assert "smollm2-135m" in capsys.readouterr().err


def test_ctrl_c_is_130(monkeypatch, capsys):
    raising(monkeypatch, "doctor", "run", KeyboardInterrupt())
    assert cli.main(["doctor"]) == 130
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.skipif(os.name == "nt", reason="Windows sends console events, not signals")
def test_X03_ctrl_c_in_an_answer_stops_it_without_a_traceback(tiny):
    """X03: the interrupt ends the request and the process, and the interpreter exits cleanly."""
    command = [sys.executable, "-m", "deepseek_flash.tools.cli", "generate", str(tiny), "Hello", "--seed", "1"]
    with subprocess.Popen(
        [*command, "--max-new-tokens", "900"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Whoever runs the tests in the background may have told their children to ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        assert process.stdout.read(1)  # the answer has begun
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert error.decode().strip() == "interrupted"


def test_bugs_are_not_hidden(monkeypatch):
    raising(monkeypatch, "doctor", "run", ZeroDivisionError("a bug of ours"))
    with pytest.raises(ZeroDivisionError):
        cli.main(["doctor"])


def test_a_reader_that_leaves_is_no_error():
    read, write = os.pipe()
    os.close(read)
    code = "import sys; from deepseek_flash.tools.cli import main; sys.exit(main(['pull', '--list']))"
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, text=True, timeout=60, check=False
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(os.name == "nt", reason="pipes that end early are signalled otherwise there")
def test_a_reader_that_leaves_doctor_is_no_error():
    """rich would exit with 1."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "deepseek_flash.tools.cli", "doctor"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_one_line():
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "deepseek_flash.tools.cli", "pull", "--list"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("deepseek-flash: cannot go on: ")
    assert len(done.stderr.splitlines()) == 1


def test_other_failures_of_the_system_are_not_hidden(monkeypatch):
    raising(monkeypatch, "doctor", "run", PermissionError(13, "a bug of ours"))
    with pytest.raises(PermissionError):
        cli.main(["doctor"])


def test_missing_standard_streams(tiny, monkeypatch):
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    assert cli.main(["chat", str(tiny)]) == 0
    assert cli.main(["generate", str(tiny), "Hello", "--max-new-tokens", "2"]) == 0


def test_pull_prints_the_path(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("deepseek_flash.loading.catalogue.pull", lambda name: tmp_path / f"{name}.gguf")
    assert cli.main(["pull", "smollm2-135m"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "smollm2-135m.gguf")


def test_pull_list_says_what_is_here(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("DEEPSEEK_FLASH_CACHE", str(tmp_path))
    assert cli.main(["pull", "--list"]) == 0
    assert "smollm2-135m" in capsys.readouterr().out
    monkeypatch.setattr("deepseek_flash.loading.catalogue.pulled", lambda name: None)
    assert cli.main(["pull", "--list"]) == 0
    assert "not pulled" in capsys.readouterr().out


def test_generate_prints_the_answer_and_nothing_else(tiny, capsys, monkeypatch):
    from deepseek_flash import FlashEngine

    options = ["--max-new-tokens", "8", "--temperature", "0", "--stop", "@@", "--max-model-len", "64"]
    assert cli.main(["generate", str(tiny), "Hello there", *options]) == 0
    out = capsys.readouterr()
    with FlashEngine(tiny, max_model_len=64) as engine:
        expected = engine.generate("Hello there", max_new_tokens=8, temperature=0.0, stop="@@").text
    assert out.out == expected.encode(errors="replace").decode() + "\n"
    for given in ("Hello there", "Hello there\n"):  # `echo` ends its text with a newline that is not meant
        monkeypatch.setattr("sys.stdin", io.StringIO(given))
        assert cli.main(["generate", str(tiny), "-", *options]) == 0
        assert capsys.readouterr().out == out.out


@pytest.mark.skipif(os.name == "nt", reason="arguments are text there")
def test_bytes_that_are_no_text_become_substitutes(tiny):
    options = ["--max-new-tokens", "4", "--temperature", "0"]
    environment = {**os.environ, "PYTHONUTF8": "1"}
    command = [sys.executable, "-m", "deepseek_flash.tools.cli", "generate", str(tiny)]
    piped = subprocess.run(
        [*command, "-", *options], input=b"caf\xe9", capture_output=True, timeout=60, check=False, env=environment
    )
    given = subprocess.run(
        [*command, b"caf\xe9", *options], capture_output=True, timeout=60, check=False, env=environment
    )
    assert (piped.returncode, piped.stderr) == (given.returncode, given.stderr) == (0, b"")
    assert piped.stdout == given.stdout


def test_a_stdout_that_cannot_show_a_character_shows_a_substitute(tiny):
    done = run(
        "generate",
        str(tiny),
        "é中🙂",
        "--max-new-tokens",
        "12",
        "--seed",
        "1",
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()


def test_chat_keeps_the_conversation_and_survives_errors(tiny, capsys, monkeypatch):
    import deepseek_flash

    asked: list[list[dict[str, str]]] = []
    original = deepseek_flash.FlashEngine.chat

    def spy(self, messages, *args, **kwargs):
        asked.append([dict(m) for m in messages])
        if messages[-1]["content"] == "boom":
            raise FlashError("refused")
        if messages[-1]["content"] == "stop":
            raise KeyboardInterrupt
        return original(self, messages, *args, **kwargs)

    monkeypatch.setattr(deepseek_flash.FlashEngine, "chat", spy)
    lines = ["one", "boom", "stop", "two", "/what", "/memory", "", "/reset", "three", "/exit", "never"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
    assert cli.main(["chat", str(tiny), "--system", "Be brief.", "--max-new-tokens", "4", "--seed", "3"]) == 0
    captured = capsys.readouterr()
    roles = [[m["role"] for m in conversation] for conversation in asked]
    assert [c[-1]["content"] for c in asked] == ["one", "boom", "stop", "two", "three"]
    assert roles[3] == ["system", "user", "assistant", "user"]  # "boom" and "stop" are taken back
    assert roles[4] == ["system", "user"]
    assert "refused" in captured.err
    assert "forgotten" in captured.err
    assert "kv_cache" in captured.out


def test_chat_at_a_terminal_asks_with_line_editing(tiny, capsys, monkeypatch):
    lines = iter(["  hello  ", "/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    monkeypatch.setattr("sys.stdin", type("Terminal", (io.StringIO,), {"isatty": lambda self: True})())
    assert cli.main(["chat", str(tiny), "--max-new-tokens", "2"]) == 0
    assert next(lines, "all read") == "all read"

    def end(prompt):
        raise EOFError

    monkeypatch.setattr("builtins.input", end)
    capsys.readouterr()
    assert cli.main(["chat", str(tiny)]) == 0
    assert capsys.readouterr().out == "\n"  # the shell's prompt begins on a line of its own


def test_demo_shows_every_part(tiny, capsys):
    assert cli.main(["demo", str(tiny), "--max-new-tokens", "8"]) == 0
    out = capsys.readouterr().out
    for part in (
        "Opening",
        "Streaming",
        "6 requests at once",
        "prompt tokens shared",
        "Memory",
        "kv_cache",
        "first token after",
    ):
        assert part in out
    shared = [int(line.split("prompt tokens, ")[1].split()[0]) for line in out.splitlines() if "not computed" in line]
    assert shared
    assert shared[0] > 0


def test_doctor_tells_what_there_is(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("DEEPSEEK_FLASH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "20")  # long values are not cut: paths are there to be copied
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    for part in (
        __version__,
        "torch",
        "threads",
        "paged_attention",
        str(tmp_path / "cache"),
        "smollm2-135m",
        "not there",
    ):
        assert part in out
    monkeypatch.setenv("DEEPSEEK_FLASH_KERNELS", "reference")
    assert cli.main(["doctor"]) == 0
    assert "forces the definitions" in capsys.readouterr().out
    for name, meaning in ENVIRONMENT.items():
        assert name in out
        assert meaning in out


@pytest.mark.skipif(lib.load() is None, reason="no native kernels")
def test_doctor_tells_the_kernels_threads_apart_from_torchs(monkeypatch, capsys):
    monkeypatch.setattr("deepseek_flash.kernels.cpu.processors.processors", lambda: 77)
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert f"{torch.get_num_threads()} threads on 77 usable cores" in out
    assert re.search(r"native threads +77 ", out)


def test_doctor_reports_a_wrong_setting_instead_of_failing(monkeypatch, capsys):
    monkeypatch.setenv("DEEPSEEK_FLASH_KERNELS", "fastest")
    assert cli.main(["doctor"]) == 0
    assert "must be 'auto', 'torch' or 'reference'" in capsys.readouterr().out


def test_the_model_not_found_error_says_how_to_pull(monkeypatch, capsys):
    monkeypatch.setattr("deepseek_flash.loading.locate.pulled", lambda name: None)
    assert cli.main(["demo"]) == 2
    assert "deepseek-flash pull smollm2-135m" in capsys.readouterr().err
    assert issubclass(ModelNotFound, FileNotFoundError)
