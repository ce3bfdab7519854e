"""Files made to hang, crash or swamp the process: each is a typed error at once, before anything large is taken."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepseek_flash.engine import FlashEngine
from deepseek_flash.errors import (
    CheckpointError,
    FlashError,
    FormatError,
    MemoryBudgetError,
    ModelError,
)
from deepseek_flash.kernels.registry import select
from deepseek_flash.loading import gguf
from deepseek_flash.loading.load import load_model_weights
from deepseek_flash.loading.source import open_source
from deepseek_flash.models.registry import resolve
from tests.support import checkpoints

CONFIG: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile") / "tiny"
    return checkpoints.tiny_llama(folder, num_hidden_layers=1, hidden_size=32, intermediate_size=48)


def refused(where: Path, kind: type[FlashError], *words: str) -> None:
    """Opening gives this error, with these words, within seconds; a thread, since what is tested may hang."""
    caught: list[BaseException] = []

    def attempt() -> None:
        try:
            open_source(where).close()
        except BaseException as e:
            caught.append(e)

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive(), "it hangs"
    assert caught, "it opened"
    assert isinstance(caught[0], kind), caught[0]
    for word in words:
        assert word in str(caught[0])


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_pipes_and_devices_are_never_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.gguf")
    refused(tmp_path, ModelError, "m.gguf", "not a regular file")
    refused(tmp_path / "m.gguf", ModelError, "neither a file nor a folder")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    os.mkfifo(folder / "model.safetensors")
    refused(folder, ModelError, "neither model.safetensors nor")
    (tmp_path / "zero").mkdir()
    (tmp_path / "zero" / "m.gguf").symlink_to("/dev/zero")
    refused(tmp_path / "zero", ModelError, "not a regular file")


@pytest.mark.parametrize("shard", ["a" * 300 + ".safetensors", "é" * 140 + ".safetensors"])
def test_names_no_file_system_has_are_refused(shard: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": shard}}))
    refused(tmp_path, CheckpointError, "255 bytes")


def test_json_of_millions_of_lists_is_refused_unparsed(tmp_path: Path) -> None:
    """Three bytes in the file, 64 in memory each, and minutes of garbage collection."""
    swamp = b'{"a":[' + b"[]," * (3 << 20) + b"1]}"
    (tmp_path / "config.json").write_bytes(swamp)
    start = time.perf_counter()
    refused(tmp_path, FormatError, "config.json", str(len(swamp)))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(swamp)) + swamp)
    refused(tmp_path, FormatError, "model.safetensors", "lists and dicts")
    assert time.perf_counter() - start < 2


def header(tensors: int, pairs: int, body: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, pairs) + body


ARRAY = struct.pack("<Q", 1) + b"k" + struct.pack("<I", 9)


@pytest.mark.parametrize(
    ("content", "limit"),
    [
        (header(0, gguf.MAX_PAIRS + 1, b"\0" * 13 * (gguf.MAX_PAIRS + 1)), gguf.MAX_PAIRS),
        (header(gguf.MAX_TENSORS + 1, 0, b"\0" * 24 * (gguf.MAX_TENSORS + 1)), gguf.MAX_TENSORS),
        (header(0, 1, ARRAY + struct.pack("<IQ", 0, 9 << 20) + b"\0" * (9 << 20)), gguf.MAX_ELEMENTS),
        (header(0, 1, ARRAY + struct.pack("<IQ", 9, 1 << 17) + struct.pack("<IQ", 0, 0) * (1 << 17)), gguf.MAX_ARRAYS),
    ],
    ids=["pairs", "tensors", "elements", "arrays"],
)
def test_a_gguf_header_is_bounded_in_objects(content: bytes, limit: int, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    refused(tmp_path / "m.gguf", FormatError, f"at most {limit} are read")


def sparse(folder: Path, config: dict[str, Any], tensors: dict[str, tuple[int, ...]]) -> Path:
    """A sound bf16 checkpoint of zeros that takes no room on the disk."""
    table, at = {}, 0
    for name, shape in tensors.items():
        size = 2 * math.prod(shape)
        table[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(table).encode()
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    with (folder / "model.safetensors").open("wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        f.truncate(8 + len(text) + at)
    return folder


def huge(folder: Path, hidden: int = 1 << 15) -> Path:
    config = {
        **CONFIG, "hidden_size": hidden, "intermediate_size": 64, "num_attention_heads": hidden // 64, "head_dim": 64,
        "vocab_size": 320, "max_position_embeddings": 64, "tie_word_embeddings": True,
    }  # fmt: skip
    layer = "model.layers.0."
    return sparse(
        folder,
        config,
        {
            "model.embed_tokens.weight": (320, hidden),
            "model.norm.weight": (hidden,),
            **{f"{layer}self_attn.{x}_proj.weight": (hidden, hidden) for x in "qkvo"},
            **{f"{layer}mlp.{x}_proj.weight": (64, hidden) for x in ("gate", "up")},
            f"{layer}mlp.down_proj.weight": (hidden, 64),
            **{f"{layer}{x}_layernorm.weight": (hidden,) for x in ("input", "post_attention")},
        },
    )


def test_weights_beyond_the_memory_are_refused_before_any_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sparse file may be as long as it likes; its weights must still fit."""

    def never(*_: object, **__: object) -> None:
        raise AssertionError("memory was taken")

    with open_source(huge(tmp_path / "m", 1 << 20)) as source:
        model = resolve(source.config).build(select("cpu"))
        monkeypatch.setattr("deepseek_flash.loading.load._room", never)
        monkeypatch.setattr("deepseek_flash.loading.packed.alloc", never)
        with pytest.raises(MemoryBudgetError, match="the weights need") as caught:
            load_model_weights(model, model.rules, source, torch.float32)
    assert caught.value.needed > 2 * 4 * 2**40 > caught.value.available


@pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_AS")
def test_memory_that_the_system_refuses_is_a_budget_error(tmp_path: Path, tiny: Path) -> None:
    """A process with a limit of its own is given less than is free; none of it ends the process."""
    folder = huge(tmp_path / "m")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tiny / name).read_bytes())
    code = f"""
import resource
from deepseek_flash import FlashEngine
from deepseek_flash.errors import MemoryBudgetError
import torch, deepseek_flash.engine, deepseek_flash.loading.load as load
from deepseek_flash.memory.probe import HostMemory
load.host_memory = lambda: HostMemory(1 << 50, 1 << 50, "machine")
now = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (now + (2 << 30),) * 2)
try:
    FlashEngine({str(folder)!r})
except MemoryBudgetError as e:
    print("refused:", e)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "refused: the system refused memory for 8.03 GiB of weights" in done.stdout


def test_a_stored_head_that_differs_is_used_though_the_config_ties_it(tiny: Path, tmp_path: Path) -> None:
    """As transformers does. One that is the same stays tied, and its copy is left out."""
    weights = load_file(tiny / "model.safetensors")
    config = json.loads((tiny / "config.json").read_text()) | {"tie_word_embeddings": True}
    for name, same in (("same", True), ("other", False)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        head = weights["model.embed_tokens.weight"] if same else weights["lm_head.weight"]
        save_file({**weights, "lm_head.weight": head.clone()}, folder / "model.safetensors")
        with open_source(folder) as source:
            assert source.config["tie_word_embeddings"] is same
            model = resolve(source.config).build(select("cpu"))
            load_model_weights(model, model.rules, source, torch.float32)


VALUES: tuple[Any, ...] = (
    *(10**12, -1, 0, 1, 3, 7, 2**63, 10**400, 1e308, 1e-320, 0.5, 2.5, 4096, 1 << 30, None, True, False),
    *("", "64", "yarn", "\ud800", [], [64], [[]], {}, {"a": 1}, {"rope_type": "yarn"}, {"type": "linear", "factor": 0}),
    *({"rope_type": "yarn", "factor": 1e-320}, {"rope_type": "yarn", "beta_fast": -0.5}, {"rope_type": []}),
    {"rope_type": "factors", "factors": [10**400] * 4},
)
KEYS = (
    *("architectures", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "intermediate_size", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"),
    *("hidden_act", "attention_bias", "mlp_bias", "rope_parameters", "rope_scaling", "rope_theta", "eos_token_id"),
    *("quantization_config", "use_sliding_window", "partial_rotary_factor"),
)


def outcome(folder: Path, config: Any, note: str) -> bool:
    """Whether an engine opens with this config and answers; anything but a typed refusal fails the test."""
    (folder / "config.json").write_text(json.dumps(config))
    start = time.perf_counter()
    opened = False
    try:
        with FlashEngine(folder) as engine:
            opened = True
            engine.generate("the", max_new_tokens=2, temperature=0.0)
    except FlashError:
        pass
    except BaseException as e:
        pytest.fail(f"{note}: {type(e).__name__}: {e}")
    assert time.perf_counter() - start < 10, note
    return opened


@pytest.mark.parametrize("key", KEYS)
def test_every_absurd_config_value_opens_or_is_refused(key: str, tiny: Path, tmp_path: Path) -> None:
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tiny / name).read_bytes())
    config = json.loads((tiny / "config.json").read_text())
    if key in ("rope_scaling", "rope_theta"):
        config.pop("rope_parameters")
    assert outcome(tmp_path, config, "the sound config")
    count = sum(not outcome(tmp_path, config | {key: v}, f"{key}={str(v)[:60]}") for v in VALUES)
    assert count >= 12, f"only {count} values of {key} were refused"
