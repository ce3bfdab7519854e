"""A type of cached keys and values for each layer, by pattern."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from deepseek_flash.errors import ConfigError
from deepseek_flash.kernels.cpu import lib
from deepseek_flash.models.registry import resolve
from deepseek_flash.runtime.cache_types import by_layer, told
from tests.models.harness import Harness, load, prompt
from tests.support.checkpoints import tiny_llama
from tests.support.engines import open_engine

native = pytest.mark.skipif(lib.load() is None, reason=f"no native kernels: {lib.why_missing()}")
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
}


@pytest.mark.parametrize(
    ("patterns", "want"),
    [
        ({"*": "int8"}, "iiiii"),
        ({"*": "int8", "0-1": "fp16"}, "ffiii"),
        ({"0-1": "fp16", "*": "int8"}, "ffiii"),
        ({"-1": "fp16", "*": "int8", "0-4": "fp32"}, "3333f"),
        ({"-2--1": "fp16"}, "aaaff"),
        ({"1-3": "int8", "3-4": "fp16"}, "aiiff"),
        ({"3": "int8", "-2": "fp16"}, "aaafa"),
        ({"2-2": "int8"}, "aaiaa"),
    ],
)
def test_patterns(patterns: dict[str, str], want: str) -> None:
    """One layer beats a range beats all; of a kind the later wins; what nothing names is left to the default."""
    names = {"i": "int8", "f": "fp16", "3": "fp32", "a": "auto"}
    assert by_layer(patterns, 5) == [names[c] for c in want]


@pytest.mark.parametrize("pattern", ["", "a", "1-", "1 - 2", "**", "last", "5", "-6", "3-7", "3-1", "-1-0", "٣", "1.0"])
def test_patterns_that_match_nothing_are_refused(pattern: str) -> None:
    with pytest.raises(ConfigError) as e:
        by_layer({"*": "int8", pattern: "fp16"}, 5)
    assert e.value.field == "kv_cache_dtype"
    assert repr(pattern) in str(e.value)


@pytest.mark.parametrize(
    ("value", "says"),
    [({"*": "int9"}, "'int8'"), ({}, "at least one"), ({0: "int8"}, "a string"), ({"*": None}, "None"), ([], "kv_")],
)
def test_mappings_that_are_none(value: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says) as e:
        open_engine(tmp_path, kv_cache_dtype=value)
    assert e.value.field == "kv_cache_dtype"


def test_told() -> None:
    assert told(["int8"] * 3) == "int8"
    assert told(["fp16", "int8", "int8", "fp16"]) == {"0": "fp16", "1-2": "int8", "3": "fp16"}


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("turned", [False, True])
def test_bytes(head_dim: int, turned: bool) -> None:
    """int8 takes at most 0.56 of fp16; a mix takes what its layers take."""
    info = resolve({**CONFIG, "head_dim": head_dim})
    half = info.cache_spec(16, "float16", turned=turned).bytes_for(16)
    small = info.cache_spec(16, "int8", turned=turned).bytes_for(16)
    assert small <= 0.56 * half
    mixed = info.cache_spec(16, ("float16", "int8", "int8", "float16"), turned=turned)
    assert mixed.bytes_for(16) == (half + small) // 2
    assert mixed.digest() != info.cache_spec(16, ("int8", "float16", "int8", "float16"), turned=turned).digest()


@native
@pytest.mark.parametrize("dtypes", [("float32", "int8", "float16"), ("int8", "float32", "bfloat16")])
@pytest.mark.parametrize("block_size", [5, 16])
def test_layers_of_different_types_run_in_one_call(dtypes: tuple[str, ...], block_size: int, tmp_path: Path) -> None:
    """The one-call kernel gives what the layers give one by one, and stays near the exact cache."""
    info, model = load(tiny_llama(tmp_path), threads=2)
    prompts, new = [prompt(1, 70), prompt(2, 9)], 8

    def serve(dtype: Any) -> Any:
        return Harness(info, model, dtype=dtype, block_size=block_size).serve(prompts, new)

    exact, smallest, mixed = serve("float32"), serve("int8"), serve(dtypes)
    stack, model._stack = model._stack, None  # type: ignore[attr-defined]
    assert stack is not None
    apart = serve(dtypes)
    for want, low, got, single in zip(exact, smallest, mixed, apart, strict=True):
        assert got.tokens == single.tokens
        assert torch.allclose(got.matrix(), single.matrix(), atol=1e-4, rtol=0)
        at = sorted(want.logits)[: len(want.tokens) - new]  # where all read the same tokens
        far = max(float((low.logits[i] - want.logits[i]).abs().max()) for i in at)
        off = max(float((got.logits[i] - want.logits[i]).abs().max()) for i in at)
        assert 0 < off < 2 * far


@native
def test_an_engine_tells_its_types(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path)
    with open_engine(folder, kv_cache_dtype={"*": "int8", "0": "fp16"}) as mixed:
        assert mixed.describe()["cache"]["dtype"] == {"0": "float16", "1-2": "int8"}
        assert mixed.generate("over the hill", max_new_tokens=6).usage.completion_tokens > 0
    with pytest.raises(ConfigError, match="0 to 2"):
        open_engine(folder, kv_cache_dtype={"3": "int8"})


def test_without_native_kernels_a_small_type_anywhere_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPSEEK_FLASH_KERNELS", "torch")
    folder = tiny_llama(tmp_path)
    with pytest.raises(ConfigError, match="needs the native CPU kernels"):
        open_engine(folder, kv_cache_dtype={"1": "int8"})
    with open_engine(folder, kv_cache_dtype={"*": "fp32"}) as engine:
        assert engine.describe()["cache"]["dtype"] == "float32"
