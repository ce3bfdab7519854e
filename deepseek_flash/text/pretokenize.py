"""How each vocabulary family splits text into words before byte-pair merging.

A GGUF file names its family in ``tokenizer.ggml.pre``; the rules are facts of the families' own ``tokenizer.json``
files (the names are llama.cpp's). Where llama.cpp splits otherwise than the family's own file, the file is followed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

from deepseek_flash.errors import UnsupportedModel, near_miss

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_V3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Cased letters as of the Unicode version that deepseek-llm was made with, in hexadecimal ranges.
_CASED = (
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A 38C 38E-3A1 "
    "3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A "
    "1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 "
    "1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 "
    "212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D "
    "A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3 "
    "104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943"
)
_CJK_LLM = "4E00-9FA5 800-4E00 AC00-D7FF"
_CJK_V3 = "4E00-9FA5 3040-309F 30A0-30FF"
_MARKS_LLM = "21-2F 3A-7E FF01-FF0F FF1A-FF5E 2018-201F 3000-3002"


def _one_of(ranges: str) -> str:
    parts = []
    for part in ranges.split():
        ends = [int(end, 16) for end in part.split("-")]
        parts.append("-".join(rf"\x{{{end:X}}}" for end in ends))
    return "[" + "".join(parts) + "]"


def _split(*patterns: str, digits: bool = False) -> pre_tokenizers.PreTokenizer:
    steps: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns
    ]
    if digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    return pre_tokenizers.Sequence(steps)


def _digits_then_gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


@dataclass(frozen=True, slots=True)
class Family:
    """How a family of byte-level vocabularies treats text."""

    build: Callable[[], pre_tokenizers.PreTokenizer]
    nfc: bool = False
    ignore_merges: bool = False
    """A whole word that is in the vocabulary is one token, whatever the merges say."""
    adds_bos: bool = False
    """When the file does not say."""

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.nfc else None


_LLAMA3_FAMILY = Family(lambda: _split(_LLAMA3), ignore_merges=True, adds_bos=True)
_GPT2_FAMILY = Family(lambda: pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True))
_QWEN2_FAMILY = Family(lambda: _split(_QWEN2), nfc=True)
_DIGITS_FAMILY = Family(_digits_then_gpt2)

FAMILIES: Mapping[str, Family] = {
    "llama-bpe": _LLAMA3_FAMILY,
    "llama3": _LLAMA3_FAMILY,
    "llama-v3": _LLAMA3_FAMILY,
    "smaug-bpe": Family(lambda: _split(_LLAMA3)),
    "dbrx": Family(lambda: _split(_LLAMA3)),
    "qwen2": _QWEN2_FAMILY,
    "deepseek-r1-qwen": _QWEN2_FAMILY,
    "megrez": _QWEN2_FAMILY,
    "deepseek-llm": Family(
        lambda: _split(
            r"[\r\n]",
            r"\s?" + _one_of(_CASED) + "+",
            r"\s?" + _one_of(_MARKS_LLM) + "+",
            r"\s+$",
            _one_of(_CJK_LLM) + "+",
            digits=True,
        )
    ),
    "deepseek-coder": Family(
        lambda: _split(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _one_of(_CJK_LLM) + "+", digits=True)
    ),
    "deepseek-v3": Family(lambda: _split(r"\p{N}{1,3}", _one_of(_CJK_V3) + "+", _DEEPSEEK_V3)),
    "smollm": _DIGITS_FAMILY,
    "starcoder": _DIGITS_FAMILY,
    "refact": _DIGITS_FAMILY,
    "command-r": Family(_digits_then_gpt2, nfc=True),
    "gpt-2": _GPT2_FAMILY,
    "phi-2": _GPT2_FAMILY,
    "olmo": _GPT2_FAMILY,
    "mpt": _GPT2_FAMILY,
    "tekken": Family(lambda: _split(_TEKKEN), ignore_merges=True, adds_bos=True),
    "default": Family(lambda: _split(r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
}

# A token that a family is known by, and its id there: how to tell the family of a file that does not name it.
_KNOWN_BY: tuple[tuple[str, int, str], ...] = (
    ("<|begin_of_text|>", 128000, "llama-bpe"),
    ("<｜begin▁of▁sentence｜>", 128000, "llama-bpe"),
    ("<｜begin▁of▁sentence｜>", 151646, "deepseek-r1-qwen"),
    ("<｜begin▁of▁sentence｜>", 100000, "deepseek-llm"),
    ("<｜begin▁of▁sentence｜>", 32013, "deepseek-coder"),
    ("<｜begin▁of▁sentence｜>", 0, "deepseek-v3"),
    ("<|im_start|>", 151644, "qwen2"),
    ("<jupyter_script>", 15, "smollm"),
)


def family_of(name: str | None, vocab: Mapping[str, int], file: str) -> tuple[str, Family]:
    """The family a file names, or the one its vocabulary gives away; UnsupportedModel when neither helps.

    A file that names none and gives nothing away is split by the "default" rules, as llama.cpp does.
    """
    if name is not None and name in FAMILIES:
        return name, FAMILIES[name]
    for token, place, known in _KNOWN_BY:
        if vocab.get(token) == place:
            return known, FAMILIES[known]
    if name is None:
        return "default", FAMILIES["default"]
    raise UnsupportedModel(
        f"{file}: unknown pre-tokenizer {name!r} (tokenizer.ggml.pre){near_miss(name, FAMILIES)}, and the "
        f"vocabulary is none we know; supported: {', '.join(sorted(FAMILIES))}",
        architecture=name,
        supported=sorted(FAMILIES),
    )
