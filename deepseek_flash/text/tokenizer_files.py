"""The tokenizer files of a Hugging Face folder, read as untrusted input."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from deepseek_flash.errors import FormatError, ModelError

MAX_BYTES = 64 * 1024 * 1024
"""Of a tokenizer.json; the largest in use are about 33 MB."""
MAX_GROWTH = 64
"""Times that a tokenizer part may lengthen a text; sentencepiece vocabularies need 4."""
MAX_CONFIG_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What the files say. None: nothing."""

    file: str
    full: tokenizers.Tokenizer
    bos: str | None
    eos: str | None
    add_bos: bool | None
    add_eos: bool | None
    chat_template: str | None


def read_folder(folder: Path) -> TokenizerFiles:
    """Read ``folder``; FormatError if tokenizer.json is missing, or any of the files is damaged."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise FormatError(_missing(folder), file=str(file))
    config = _object(folder / "tokenizer_config.json")
    named = _object(folder / "special_tokens_map.json")
    where = str(folder / "tokenizer_config.json")
    return TokenizerFiles(
        file=str(file),
        full=_load(file),
        bos=_token(config, "bos_token", where) or _token(named, "bos_token", where),
        eos=_token(config, "eos_token", where) or _token(named, "eos_token", where),
        add_bos=_flag(config, "add_bos_token", where),
        add_eos=_flag(config, "add_eos_token", where),
        chat_template=_chat_template(folder, config),
    )


def _missing(folder: Path) -> str:
    if (folder / "tokenizer.model").is_file():
        return (
            f"{folder}: there is a sentencepiece tokenizer.model but no tokenizer.json, which is what is read. "
            "Make one with transformers, AutoTokenizer.from_pretrained(folder).save_pretrained(folder), or use GGUF"
        )
    return f"{folder}: no tokenizer.json; copy the one that came with the model into the folder"


def _load(file: Path) -> tokenizers.Tokenizer:
    text = _read(file, MAX_BYTES)
    with library_errors(f"{file}: not a usable tokenizer", str(file)):
        full = tokenizers.Tokenizer.from_str(text)
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        times = _growth(json.loads(state_of(getattr(full, name))))
        if times > MAX_GROWTH:
            raise FormatError(
                f"{file}: the {name} makes texts up to {times:,} times longer; at most {MAX_GROWTH} is allowed",
                file=str(file),
            )
    return full


@contextmanager
def library_errors(what: str, file: str = "") -> Iterator[None]:
    """A FormatError for whatever the ``tokenizers`` library raises inside the block.

    It raises plain Exception, and on some inputs a Rust panic, which derives from BaseException.
    """
    try:
        yield
    except BaseException as e:
        if isinstance(e, Exception) or type(e).__name__ == "PanicException":
            raise FormatError(f"{what}: {str(e)[:500]}", file=file) from None
        raise


def state_of(part: Any) -> str:
    """A tokenizer part as JSON."""
    return "null" if part is None else str(part.__getstate__().decode("utf-8"))


def _growth(part: Any) -> int:
    """How many times longer a part can make a text, about. The library ends the process when memory runs out, so a
    file that asks for such growth must not reach it."""
    if isinstance(part, list):
        return math.prod(_growth(p) for p in part)
    if not isinstance(part, dict):
        return 1
    kind = part.get("type")
    if kind == "TemplateProcessing":
        inserted = [len(token["ids"]) for token in part["special_tokens"].values()]
        return len(part["single"]) * max([1, *inserted])
    if kind in ("Replace", "Prepend"):
        return 1 + len(part["content" if kind == "Replace" else "prepend"])
    if kind in ("ByteLevel", "Metaspace"):
        return 2
    return math.prod(_growth(p) for p in part.values() if isinstance(p, list))


def _read(file: Path, limit: int) -> str:
    try:
        size = file.stat().st_size
        if size > limit:
            raise FormatError(f"{file}: {size:,} bytes; at most {limit:,} are read", file=str(file))
        return file.read_text(encoding="utf-8")
    except OSError as e:
        raise ModelError(f"cannot read {file}: {e.strerror or e}") from e
    except UnicodeDecodeError as e:
        raise FormatError(f"{file}: not UTF-8 at byte {e.start}", file=str(file), offset=e.start) from None


def _object(file: Path) -> dict[str, Any]:
    """A JSON object; ``{}`` if there is no such file."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(_read(file, MAX_CONFIG_BYTES))
    except (ValueError, RecursionError) as e:
        raise FormatError(f"{file}: not valid JSON: {str(e)[:200]}", file=str(file)) from None
    if not isinstance(value, dict):
        raise FormatError(f"{file}: must hold a JSON object, not {type(value).__name__}", file=str(file))
    return value


def _token(config: dict[str, Any], key: str, where: str) -> str | None:
    value = config.get(key)
    if isinstance(value, dict):
        value = value.get("content")
    if value is None or isinstance(value, str):
        return value or None
    raise FormatError(f"{where}: {key} must be a string, not {type(value).__name__}", file=where)


def _flag(config: dict[str, Any], key: str, where: str) -> bool | None:
    value = config.get(key)
    if value is None or isinstance(value, bool):
        return value
    raise FormatError(f"{where}: {key} must be true or false, not {value!r}", file=where)


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """chat_template.jinja wins over chat_template.json wins over tokenizer_config.json, as in transformers."""
    jinja = folder / "chat_template.jinja"
    if jinja.is_file():
        return _read(jinja, MAX_CONFIG_BYTES)
    own = _object(folder / "chat_template.json")
    for file, value in (
        (folder / "chat_template.json", own.get("chat_template")),
        (folder / "tokenizer_config.json", config.get("chat_template")),
    ):
        if isinstance(value, str):
            return value or None
        if isinstance(value, list):
            return _default_of(value, file)
        if value is not None:
            raise FormatError(f"{file}: chat_template must be a string or a list of named ones", file=str(file))
    return None


def _default_of(entries: list[Any], file: Path) -> str | None:
    """The template named "default" (the only one, if there is one)."""
    named: dict[str, str] = {}
    for entry in entries:
        if not (
            isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)
        ):
            raise FormatError(f"{file}: every chat_template in a list needs a name and a template", file=str(file))
        named[entry["name"]] = entry["template"]
    if "default" in named:
        return named["default"]
    return next(iter(named.values())) if len(named) == 1 else None
