"""What every model offers, and the typed reading of ``config.json``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from deepseek_flash.errors import FormatError, UnsupportedModel
from deepseek_flash.kernels.ops.packed import PackedLinear
from deepseek_flash.kernels.ops.stack import StackWeights
from deepseek_flash.kernels.registry import Kernels
from deepseek_flash.kv.spec import CacheSpec
from deepseek_flash.kv.store import KVStore
from deepseek_flash.layers.batch import ForwardBatch
from deepseek_flash.layers.embed import Embedding
from deepseek_flash.layers.linear import Linear
from deepseek_flash.loading.rules import Rule

_REQUIRED: Any = object()


class Model(nn.Module, ABC):
    """A decoder. Built without memory; ``rules`` say what fills it and ``after_load`` of its layers prepares it."""

    vocab_size: int
    rules: Sequence[Rule]
    ignore: Sequence[str]
    """Full-match patterns of checkpoint names that may be left out."""

    @abstractmethod
    def hidden(self, batch: ForwardBatch, store: KVStore) -> torch.Tensor:
        """Write the batch's cache rows; the last hidden state of each token, normalised, [T, hidden] fp32."""

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, hidden] → fp32 [R, vocab]."""

    def forward(self, batch: ForwardBatch, store: KVStore) -> torch.Tensor:
        """Logits fp32 [R, vocab] of ``batch.logits_rows``."""
        return self.logits(self.hidden(batch, store).index_select(0, batch.logits_rows))

    def weight_bytes(self) -> int:
        """Bytes of all weights, shared ones once."""
        linears = [m for m in self.modules() if isinstance(m, (Linear, Embedding))]
        inside = {id(p) for m in linears for p in m.parameters()}
        rest = sum(p.numel() * p.element_size() for p in self.parameters() if id(p) not in inside)
        return rest + sum(m.weight_bytes() for m in linears)

    def release(self) -> None:
        """Give the weights' memory back although somebody may still hold this object; it cannot run any more."""
        for module in self.modules():
            for name, value in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
                storage = value.untyped_storage()
                if storage.resizable():  # not so for pages of a mapped file, which go with the reference
                    storage.resize_(0)
                setattr(module, name, None)
            # Packed weights are values in plain attributes: dropping the references frees them.
            for name in [
                k for k, v in vars(module).items() if isinstance(v, (torch.Tensor, PackedLinear, StackWeights))
            ]:
                setattr(module, name, None)


class ModelInfo(ABC):
    """A checked configuration: everything known about a model before its weights are read."""

    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_position: int
    """Most tokens of a sequence."""

    @abstractmethod
    def cache_spec(self, block_size: int, dtype: str | Sequence[str] = "float32", *, turned: bool = False) -> CacheSpec:
        """What a sequence caches. ``turned``: keys in the order that the native kernels read fastest, where the block
        size allows it."""

    @abstractmethod
    def build(self, kernels: Kernels) -> Model:
        """The model on the meta device, to be filled by ``load_model_weights``."""


@dataclass(frozen=True, slots=True)
class ConfigReader:
    """Typed access to a ``config.json``. FormatError for impossible values, UnsupportedModel for unknown features."""

    config: Mapping[str, Any]
    architecture: str
    where: str = "config.json"

    def error(self, key: str, value: Any, wanted: str) -> FormatError:
        return FormatError(f"{self.where}: {key}={_short(value)}; {wanted} is needed", file=self.where)

    def unsupported(self, key: str, value: Any, supported: Sequence[str]) -> UnsupportedModel:
        return UnsupportedModel(
            f"{self.architecture} with {key}={_short(value)} is not supported; supported: {', '.join(supported)}",
            architecture=self.architecture,
            supported=supported,
        )

    def integer(self, key: str, default: int = _REQUIRED, *, low: int = 1, high: int = 1 << 30) -> int:
        value = self.config.get(key)
        if value is None and default is not _REQUIRED:
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if type(value) is not int or not low <= value <= high:
            raise self.error(key, value, f"an integer from {low} to {high}")
        return value

    def number(self, key: str, default: float = _REQUIRED, *, above: float = 0.0, most: float = 1e15) -> float:
        """A number above ``above`` and at most ``most`` (so never NaN or infinite)."""
        value = self.config.get(key)
        if value is None and default is not _REQUIRED:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not above < value <= most:
            raise self.error(key, value, f"a number above {above:g}, at most {most:g},")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self.config.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, value, "true or false")
        return value

    def only(self, key: str, *allowed: Any) -> None:
        """Refuse any value but these; absent is fine."""
        value = self.config.get(key)
        if value is not None and value not in allowed:
            raise self.unsupported(key, value, [str(a) for a in allowed])

    def absent(self, key: str, instead: str) -> None:
        """Refuse a feature by the presence of its key."""
        value = self.config.get(key)
        if value:
            raise self.unsupported(key, value, [instead])

    def inside(self, key: str) -> ConfigReader:
        """The dictionary under a key ({} when absent)."""
        value = self.config.get(key)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise self.error(key, value, "a dictionary")
        return ConfigReader(value, self.architecture, f"{self.where}: {key}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:100] + "…"
