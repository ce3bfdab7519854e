from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from pydantic import ValidationError

from deepseek_flash import ConfigError
from deepseek_flash.config import ENVIRONMENT, LATER, EngineConfig, cache_dir, kernels_preference, parse_bytes


def refused(**options) -> ConfigError:
    with pytest.raises(ConfigError) as info:
        EngineConfig.from_options("m", options)
    return info.value


def test_defaults_are_valid_and_frozen():
    c = EngineConfig.from_options(Path("some") / "folder", {})
    assert c.model == str(Path("some") / "folder")
    assert (c.device, c.max_batch_size, c.enable_prefix_caching, c.seed) == ("auto", 32, True, None)
    with pytest.raises(ValidationError):
        c.seed = 1  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(c)) == c


def test_a_path_is_taken_as_it_is(tmp_path):
    assert EngineConfig.from_options(tmp_path, {}).model == str(tmp_path)


@pytest.mark.parametrize(
    ("wrong", "near"),
    [("max_model_length", "max_model_len"), ("blocksize", "block_size"), ("memory_fractoin", "memory_fraction")],
)
def test_an_unknown_option_names_the_near_one(wrong, near):
    e = refused(**{wrong: 1})
    assert f"unknown option '{wrong}'" in str(e)
    assert near in str(e)
    assert (e.field, e.value) == (wrong, 1)
    assert "prefill_chunk_size" in e.allowed


@pytest.mark.parametrize("name", sorted(LATER))
def test_A03_an_option_of_a_later_part_is_refused_by_name(name):
    """A03: no option is accepted and ignored."""
    e = refused(**{name: 1})
    assert name in str(e)
    assert LATER[name] in str(e)
    assert "limits.md" in str(e)
    assert e.field == name


def test_no_option_is_both_there_and_later():
    assert not set(LATER) & set(EngineConfig.model_fields)


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({"max_model_len": 1}, "greater than or equal to 2"),
        ({"max_batch_size": 0}, "greater than or equal to 1"),
        ({"max_batch_size": 5000}, "less than or equal to 4096"),
        ({"prefill_chunk_size": -1}, "greater than or equal to 1"),
        ({"block_size": 0}, "greater than or equal to 1"),
        ({"seed": -1}, "greater than or equal to 0"),
        ({"seed": 2**64}, "less than 18446744073709551616"),
        ({"max_batch_size": 1.5}, "integer"),
        ({"max_batch_size": float("nan")}, "finite"),
        ({"max_batch_size": "many"}, "integer"),
        ({"max_batch_size": None}, "integer"),
        ({"cache_salt": 5}, "string"),
        ({"enable_prefix_caching": "perhaps"}, "boolean"),
        ({"device": "tpu"}, "'auto' or 'cpu'"),
    ],
)
def test_an_impossible_value_says_what_is_allowed(options, allowed):
    e = refused(**options)
    (name, value), *_ = options.items()
    assert e.field == name
    assert f"{name}={value!r}" in str(e)
    assert allowed in str(e)


@pytest.mark.parametrize("name", ["max_batch_size", "seed", "block_size", "max_model_len", "device", "cache_salt"])
def test_a_bool_is_not_a_number(name):
    assert "bool" in str(refused(**{name: True}))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"device": "cuda"}, "CUDA"),
        ({"dtype": "bfloat16"}, "half-precision"),
        ({"kv_cache_dtype": "int9"}, "'int8'"),
        ({"dtype": "flaot32"}, "did you mean 'float32'"),
    ],
)
def test_values_of_later_parts_are_named(options, says):
    assert says in str(refused(**options))


@pytest.mark.parametrize("model", [None, 5, True, "", ["a"], b"x"])
def test_a_model_that_is_no_name(model):
    with pytest.raises(ConfigError) as info:
        EngineConfig.from_options(model, {})
    assert info.value.field == "model"


def test_environment(monkeypatch, tmp_path):
    assert set(ENVIRONMENT) == {"DEEPSEEK_FLASH_CACHE", "DEEPSEEK_FLASH_KERNELS"}
    monkeypatch.setenv("DEEPSEEK_FLASH_CACHE", str(tmp_path))
    assert cache_dir() == tmp_path
    monkeypatch.setenv("DEEPSEEK_FLASH_CACHE", "")
    assert cache_dir() == Path("~/.cache/deepseek-flash").expanduser()
    monkeypatch.setenv("DEEPSEEK_FLASH_CACHE", "~/elsewhere")
    assert cache_dir() == Path.home() / "elsewhere"
    monkeypatch.delenv("DEEPSEEK_FLASH_KERNELS", raising=False)
    assert kernels_preference() == "auto"
    monkeypatch.setenv("DEEPSEEK_FLASH_KERNELS", " Reference ")
    assert kernels_preference() == "reference"
    monkeypatch.setenv("DEEPSEEK_FLASH_KERNELS", "referense")
    with pytest.raises(ConfigError, match="did you mean 'reference'"):
        kernels_preference()


@pytest.mark.parametrize(
    ("given", "size"),
    [
        ("24GB", 24 * 10**9),
        ("6GiB", 6 << 30),
        ("512 MB", 512 * 10**6),
        ("1.5gib", 3 << 29),
        ("2TiB", 2 << 40),
        ("1kB", 1000),
        ("1KiB", 1024),
        (" 77 B ", 77),
        ("4096", 4096),
        (4096, 4096),
    ],
)
def test_sizes_are_read_in_both_kinds_of_units(given, size):
    assert parse_bytes(given) == size


@pytest.mark.parametrize(
    "given",
    [
        "",
        "GB",
        "0",
        "0GB",
        "-1GB",
        "24G",
        "24 gigs",
        "1e9",
        "1,5GB",
        "٣GB",
        "nan",
        "9999999TiB",
        0,
        -5,
        1.5,
        True,
        None,
    ],
)
def test_nonsense_is_no_size(given):
    with pytest.raises(ConfigError, match="memory_budget=") as info:
        parse_bytes(given)
    assert "24GB" in info.value.allowed
