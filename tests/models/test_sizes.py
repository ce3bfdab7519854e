"""Sizes known before loading: of weights, exactly those of the loaded model; of a step, close to what it takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from deepseek_flash.errors import FormatError, UnsupportedModel
from deepseek_flash.kernels.registry import Kernels, select
from deepseek_flash.loading.load import load_model_weights
from deepseek_flash.loading.source import open_source
from deepseek_flash.memory.plan import STORED, plan
from deepseek_flash.models.sizes import ConfigOnly, ModelSizes, StepLimits
from tests.support.checkpoints import tiny_gguf, tiny_llama, tiny_qwen2, tiny_qwen3

MAKERS = {"llama": tiny_llama, "qwen2": tiny_qwen2, "qwen3": tiny_qwen3}
ODD = {"hidden_size": 72, "intermediate_size": 104, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 24}
"""Heads of 24 rows: joined projections do not fall on whole panels of 16."""
QUANTIZE = (None, "int8", "int4")


@pytest.fixture(scope="module", params=["auto", "torch"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    made = select("cpu", request.param, 1)
    if request.param == "auto" and not made.packs:
        pytest.skip("no native kernels here")
    return made


def loaded_bytes(path: Path, kernels: Kernels, quantize: str | None) -> int:
    """Of the model, really loaded."""
    with open_source(path) as source:
        sizes = ModelSizes(source, kernels)
        model = sizes.info.build(kernels)
        load_model_weights(model, model.rules, source, torch.float32, packed=kernels.packs, quantize=quantize)
    return model.weight_bytes()


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


@pytest.mark.parametrize("shape", [{}, ODD, {"tie_word_embeddings": True}], ids=["even", "odd", "tied"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", MAKERS)
def test_weights_are_counted_exactly(name: str, dtype: torch.dtype, shape: dict, kernels: Kernels, tmp_path: Path):
    folder = MAKERS[name](tmp_path / "m", dtype=dtype, **shape)
    with open_source(folder) as source:
        opened = ModelSizes(source, kernels)
        promised = ModelSizes(ConfigOnly(config_of(folder), kernels), kernels)
        for quantize in QUANTIZE if kernels.packs else QUANTIZE[:1]:
            real = loaded_bytes(folder, kernels, quantize)
            assert opened.weight_bytes(quantize) == real
            assert promised.weight_bytes(quantize) == real
        assert opened.quantize_choices() == ((STORED, "int8", "int4") if kernels.packs else (STORED,))


@pytest.mark.parametrize("quant", ["Q4_0", "Q5_1", "Q8_0", "F16"])
@pytest.mark.parametrize("name", MAKERS)
def test_weights_of_gguf_files(name: str, quant: str, kernels: Kernels, tmp_path: Path):
    path = tiny_gguf(MAKERS[name](tmp_path / "m"), tmp_path / "m.gguf", quant)
    with open_source(path) as source:
        for quantize in QUANTIZE[: 3 if kernels.packs else 1]:
            assert ModelSizes(source, kernels).weight_bytes(quantize) == loaded_bytes(path, kernels, quantize)


def test_weights_of_flash_folders(kernels: Kernels, tmp_path: Path):
    from deepseek_flash.tools.convert import convert

    folder = convert(tiny_qwen3(tmp_path / "m"), tmp_path / "flash", quantize="int4", bar=False)
    with open_source(folder) as source:
        assert ModelSizes(source, kernels).weight_bytes() == loaded_bytes(folder, kernels, None)


@pytest.mark.parametrize("method", ["awq", "gptq", "gptq asymmetric", "fp8"])
def test_weights_of_quantised_checkpoints_from_their_config(method: str, kernels: Kernels, tmp_path: Path):
    from tests.loading import test_awq_gptq, test_fp8

    whole = tiny_llama(tmp_path / "m", hidden_size=128, intermediate_size=128)
    kind, _, asymmetric = method.partition(" ")
    if kind == "fp8":
        folder = test_fp8.make(whole, tmp_path / "q")
    else:
        folder = test_awq_gptq.make(whole, tmp_path / "q", kind, **({"sym": False} if asymmetric else {}))
    promised = ModelSizes(ConfigOnly(config_of(folder), kernels), kernels)
    for quantize in QUANTIZE[: 3 if kernels.packs else 1]:
        real = loaded_bytes(folder, kernels, quantize)
        assert promised.weight_bytes(quantize) == pytest.approx(real, rel=0.05)


def test_what_does_not_run_is_refused(kernels: Kernels, tmp_path: Path):
    config = config_of(tiny_llama(tmp_path / "m"))
    with pytest.raises(UnsupportedModel, match="nonsense"):
        ConfigOnly({**config, "quantization_config": {"quant_method": "nonsense"}}, kernels)
    with pytest.raises(UnsupportedModel, match="MambaForCausalLM"):
        ConfigOnly({**config, "architectures": ["MambaForCausalLM"]}, kernels)
    with pytest.raises(FormatError, match="hidden_size"):
        ConfigOnly({**config, "hidden_size": "many"}, kernels)


MEASURE = """
import gc, sys, torch
from pathlib import Path
from deepseek_flash.kernels.registry import select
from deepseek_flash.kv.store import KVStore
from deepseek_flash.layers.batch import ForwardBatch
from deepseek_flash.loading.load import load_model_weights
from deepseek_flash.loading.source import open_source
from deepseek_flash.memory.probe import trim_heap
from deepseek_flash.models.sizes import LOGITS_BYTES, ModelSizes, StepLimits

folder, chunk, batch, context, quantize = Path(sys.argv[1]), *map(int, sys.argv[2:5]), sys.argv[5]
limits = StepLimits(batch, chunk, threads=2)

def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))

with open_source(folder) as source:
    sizes = ModelSizes(source, select("cpu", "auto", 2))
    predicted = sizes.workspace(limits)(context, quantize, "float16")
    model = sizes.info.build(sizes.kernels)
    chosen = None if quantize == "stored" else quantize
    load_model_weights(model, model.rules, source, torch.float32, packed=True, quantize=chosen)
blocks = -(-context // 16)
store = KVStore(sizes.info.cache_spec(16, "float16", turned=True), (blocks,), "cpu")
for pool in store.pools:
    pool.fill_(0)

def step(new, length):
    ends = [0]
    for count in new:
        ends.append(ends[-1] + count)
    at = torch.cat([torch.arange(length - count, length) for count in new])
    table = torch.arange(blocks).repeat(len(new), 1)  # one prefix for all, at its full length
    rows = torch.tensor(ends[1:]) - 1
    with torch.inference_mode():
        hidden = model.hidden(ForwardBatch(at * 0, at, tuple(ends), (length,) * len(new), (table,), (at,), rows), store)
        most = max(1, LOGITS_BYTES // (4 * model.vocab_size))
        for first in range(0, len(hidden), most):
            model.logits(hidden[first : first + most])

step([8], 8)
gc.collect()
trim_heap()
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
tables = 2 * model.rotary.cos.numel() * 4  # made by the first step
step([1] * (batch - 1) + [limits.tokens(context) - batch + 1], context)
step([1] * batch, context)
print(predicted, status("VmHWM") - before + tables)
"""


@pytest.mark.parametrize(
    ("chunk", "batch", "context", "quantize"),
    [(512, 32, 4096, "int4"), (512, 8, 2048, STORED), (256, 48, 1024, "int8")],
)
def test_the_workspace_is_what_the_largest_step_takes(
    chunk: int, batch: int, context: int, quantize: str, tmp_path: Path
):
    """Sampled by the system: the most this process ever held during the steps, above what it held before."""
    if not Path("/proc/self/clear_refs").exists() or not select("cpu", "auto").packs:
        pytest.skip("needs Linux's procfs and the native kernels")
    folder = tiny_llama(
        tmp_path / "m",
        dtype=torch.bfloat16,
        hidden_size=512,
        intermediate_size=1536,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=32000,
        max_position_embeddings=32768,
    )
    arguments = [str(folder), str(chunk), str(batch), str(context), quantize]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *arguments], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr
    predicted, measured = map(int, done.stdout.split())
    assert 0.9 * measured <= predicted <= 1.1 * measured


@pytest.mark.parametrize(
    ("batch", "chunk", "context", "step"),
    [
        (3, 100, 1000, (98, 1, 1)),
        (3, 100, 40, (40, 40, 20)),
        (3, 100, 10, (10, 10, 10)),
        (3, 2, 10, (1, 1, 1)),
        (1, 512, 1, (1,)),
    ],
)
def test_the_largest_step(batch: int, chunk: int, context: int, step: tuple[int, ...]):
    limits = StepLimits(batch, chunk)
    assert limits.step(context) == step
    assert limits.tokens(context) == sum(step)


def test_needs_lead_to_a_plan(kernels: Kernels, tmp_path: Path):
    folder = tiny_qwen2(tmp_path / "m")
    sizes = ModelSizes(ConfigOnly(config_of(folder), kernels), kernels)
    dtype = "float16" if kernels.packs else "float32"
    needs = sizes.needs(StepLimits(4, 64), kv_cache_dtype=dtype, max_model_len=256)
    made = plan(needs, 1 << 30)
    assert made.holders()["weights"] == sizes.weight_bytes()
    spec = sizes.info.cache_spec(16, dtype, turned=kernels.packs)
    assert made.holders()["kv_cache"] == 4 * spec.bytes_for(256)
    assert (made.sequences, made.largest_context) == (4, sizes.info.max_position)
    assert needs.step(1024) >= needs.step(256)
    short = plan(needs, made.total - made.holders()["kv_cache"] + spec.bytes_for(128))
    assert not short.fits
    assert any("max_model_len" in a.options for a in short.alternatives)
