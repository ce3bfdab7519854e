"""Filling a model: everything placed, nothing left over, and in no more memory than it takes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deepseek_flash.errors import CheckpointError
from deepseek_flash.loading.load import load_model_weights
from deepseek_flash.loading.rules import Rule
from deepseek_flash.loading.source import open_source
from tests.support import checkpoints


class MemorySource:
    """A checkpoint in memory."""

    kind, config, generation_config, metadata = "safetensors", {}, {}, {}

    def __init__(self, **tensors: torch.Tensor) -> None:
        self.tensors = {k.replace("__", "."): v for k, v in tensors.items()}
        self.read: list[str] = []

    def names(self) -> list[str]:
        return list(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def dtype(self, name: str) -> str:
        return "F32"

    def read_into(self, name: str, out: torch.Tensor) -> None:
        self.read.append(name)
        assert out.is_contiguous()
        assert out.shape == self.tensors[name].shape
        out.copy_(self.tensors[name])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 6)
        self.log: list[str] = []

    def after_load(self) -> None:
        assert not self.qkv.weight.is_meta
        self.log.append("packed")


class Net(nn.Module):
    ignore = (r"layers\.\d+\.rotary\.inv_freq", r"lm_head\.weight")

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.layers = nn.ModuleList([Attention()])
        self.head = nn.Linear(4, 5, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.zeros(1), persistent=True)


RULES = (
    Rule("embed.weight", ("embed.weight",)),
    Rule("layers.0.qkv.weight", ("q.weight", "k.weight", "v.weight"), combine="cat0"),
    Rule("layers.0.qkv.bias", ("q.bias", "k.bias", "v.bias"), combine="cat0", optional=True),
    Rule("scale", ("scale",)),
)


def tensors(**over: torch.Tensor | None) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    out: dict[str, torch.Tensor | None] = {
        "embed__weight": torch.randn(5, 4, generator=g),
        **{f"{p}__weight": torch.randn(2, 4, generator=g) for p in "qkv"},
        **{f"{p}__bias": torch.randn(2, generator=g) for p in "qkv"},
        "scale": torch.randn(1, generator=g),
        **over,
    }
    return {k: v for k, v in out.items() if v is not None}


def net(meta: bool, **options: Any) -> Net:
    with torch.device("meta" if meta else "cpu"):
        return Net(**options)


@pytest.mark.parametrize("meta", [True, False])
@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
def test_every_parameter_is_placed(meta: bool, stored: torch.dtype) -> None:
    given = {k: v.to(stored) for k, v in tensors().items()}
    model = net(meta)
    load_model_weights(model, RULES, MemorySource(**given), torch.float32)
    assert torch.equal(model.embed.weight, given["embed__weight"].float())
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.layers[0].qkv.weight, torch.cat([given[f"{p}__weight"] for p in "qkv"]).float())
    assert torch.equal(model.layers[0].qkv.bias, torch.cat([given[f"{p}__bias"] for p in "qkv"]).float())
    assert torch.equal(model.scale, given["scale"].float())
    assert model.layers[0].log == ["packed"]
    assert all(p.dtype == torch.float32 and not p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("meta", [True, False])
def test_optional_rules_give_zeros_when_the_checkpoint_has_none(meta: bool) -> None:
    model = net(meta)
    source = MemorySource(**tensors(q__bias=None, k__bias=None, v__bias=None))
    load_model_weights(model, RULES, source, torch.float32)
    assert torch.equal(model.layers[0].qkv.bias, torch.zeros(6))


def test_ignored_names_are_not_read() -> None:
    source = MemorySource(**tensors(lm_head__weight=torch.ones(9)), layers__0__rotary__inv_freq=torch.ones(2))
    load_model_weights(net(True), RULES, source, torch.float32)
    assert "lm_head.weight" not in source.read


@pytest.mark.parametrize(
    ("over", "kind", "words"),
    [
        ({"embed__weight": None}, "missing", ["embed.weight"]),
        ({"k__bias": None}, "missing", ["k.bias"]),
        ({"extra__weight": torch.ones(1)}, "unexpected", ["extra.weight"]),
        ({"layers__x__rotary__inv_freq": torch.ones(1)}, "unexpected", ["layers.x.rotary.inv_freq"]),
        ({"embed__weight": torch.ones(4, 5)}, "mismatched", ["embed.weight [4, 5]", "[5, 4]"]),
        ({"embed__weight": torch.ones(20)}, "mismatched", ["[20]"]),
        ({"k__weight": torch.ones(3, 4)}, "mismatched", ["k.weight [3, 4]", "layers.0.qkv.weight [6, 4]"]),
        ({"k__weight": torch.ones(2, 5)}, "mismatched", ["k.weight [2, 5]"]),
        ({"k__weight": torch.ones(8)}, "mismatched", ["k.weight [8]"]),
        ({"q__weight": torch.ones(())}, "mismatched", ["q.weight []"]),
    ],
)
def test_what_does_not_fit_is_listed_before_anything_is_read(over: dict[str, Any], kind: str, words: list[str]) -> None:
    source = MemorySource(**tensors(**over))
    model = net(True)
    with pytest.raises(CheckpointError) as caught:
        load_model_weights(model, RULES, source, torch.float32)
    for word in words:
        assert any(word in item for item in getattr(caught.value, kind)), caught.value
        assert word in str(caught.value)
    assert source.read == []
    assert all(p.is_meta for p in model.parameters())
    assert model.layers[0].log == []


def test_rules_and_model_must_agree() -> None:
    with pytest.raises(CheckpointError, match=r"missing: head\.weight \(no rule\)"):
        load_model_weights(net(True, tied=False), RULES, MemorySource(**tensors()), torch.float32)
    stray = (*RULES, Rule("nowhere", ("stray",)))
    with pytest.raises(CheckpointError, match="no nowhere"):
        load_model_weights(net(True), stray, MemorySource(**tensors(), stray=torch.ones(1)), torch.float32)
    with pytest.raises(CheckpointError, match="two rules"):
        load_model_weights(net(True), (*RULES, RULES[0]), MemorySource(**tensors()), torch.float32)
    for bad in ({"sources": ()}, {"sources": "abc"}, {"sources": ("a", "b")}):
        with pytest.raises(ValueError, match="rule for 'x'"):
            Rule("x", **bad)  # type: ignore[arg-type]


def test_a_value_without_a_rule_is_noticed() -> None:
    model = net(True)
    model.register_buffer("table", torch.zeros(2, device="meta"), persistent=False)
    with pytest.raises(CheckpointError, match="table"):
        load_model_weights(model, RULES, MemorySource(**tensors()), torch.float32)


@pytest.mark.parametrize("quant", ["F32", "F16", "Q8_0"])
def test_a_transformers_model_takes_the_weights_of_a_gguf(quant: str, tmp_path: Path, state: Any) -> None:
    """Our loader fills transformers' own module: same names, and in F32 the same logits as the folder."""
    folder = checkpoints.tiny_llama(tmp_path / "f")
    reference = checkpoints.load_reference(folder)
    other = type(reference)(reference.config).eval()
    path = checkpoints.tiny_gguf(folder, tmp_path / "m.gguf", quant)
    with open_source(path) as source:
        rules = [Rule(name, (name,)) for name in source.names()]
        load_model_weights(other, rules, source, torch.float32)
    ids = torch.arange(1, 60)[None]
    with torch.no_grad():
        a, b = reference(ids).logits, other(ids).logits
    limit = {"F32": 1e-5, "F16": 0.02, "Q8_0": 0.2}[quant]
    assert (a - b).abs().max() < limit


Q08 = """
import sys, torch
from torch import nn
from deepseek_flash.loading.load import load_model_weights
from deepseek_flash.loading.rules import Rule
from deepseek_flash.loading.source import open_source

def status(key):
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) for line in f if line.startswith(key)) / 1024

with open_source(sys.argv[1]) as source:
    shapes = {n: source.shape(n) for n in source.names()}
    with torch.device("meta"):
        model = nn.ParameterDict({n.replace(".", "_"): nn.Parameter(torch.empty(s)) for n, s in shapes.items()})
    rules = [Rule(n.replace(".", "_"), (n,)) for n in shapes]
    before = status("VmRSS")
    load_model_weights(model, rules, source, torch.float32)
mib = [torch.Size(s).numel() * 4 / 2**20 for s in shapes.values()]
print(status("VmHWM") - before, sum(mib), max(mib))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc to measure a process's peak memory")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_Q08_peak_memory_is_the_weights_and_one_tensor(dtype: str, tmp_path: Path) -> None:
    """Q08: 12 tensors of 8 MiB (fp32), measured in a process of its own."""
    import json

    from safetensors.torch import save_file

    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 12}))
    save_file(
        {f"w.{i}": torch.full((2048, 1024), float(i), dtype=getattr(torch, dtype)) for i in range(12)},
        tmp_path / "model.safetensors",
    )
    done = subprocess.run([sys.executable, "-c", Q08, str(tmp_path)], capture_output=True, text=True, check=True)
    peak, weights, largest = map(float, done.stdout.split())
    assert weights == pytest.approx(96)
    assert weights - 2 < peak < weights + largest
