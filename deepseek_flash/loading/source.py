"""One view of every kind of checkpoint: a config, named tensors, nothing in memory until it is asked for."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch

from deepseek_flash.errors import CheckpointError, FormatError, ModelError, ModelNotFound
from deepseek_flash.kernels.weights import PlainWeight, WeightFormat, dequantize
from deepseek_flash.loading.checkpoint_quant import QuantisedFolder
from deepseek_flash.loading.files import DataFile
from deepseek_flash.loading.flash import MANIFEST, FlashFolder
from deepseek_flash.loading.fp8 import Fp8Folder
from deepseek_flash.loading.gguf import MAGIC, GGUFFile
from deepseek_flash.loading.gguf_config import architecture_of, config_from_gguf, generation_config
from deepseek_flash.loading.gguf_names import ROPE_FREQS, half_split, interleaved, to_hf
from deepseek_flash.loading.safetensors import INDEX, SINGLE, SafetensorsFolder, quant_method
from deepseek_flash.quant.repack import FORMATS


class TensorIndex(Protocol):
    """What is known of a checkpoint before a value is read, or without one. Names are those of Hugging Face
    checkpoints, whatever the file calls them."""

    config: dict[str, Any]
    """As config.json, with ``rope_theta`` and ``rope_scaling`` (None or a dict with ``rope_type``)."""

    def names(self) -> list[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def dtype(self, name: str) -> str:
        """The stored type's name: ``"BF16"``, ``"Q4_K"``, …"""

    def weight_format(self, name: str) -> WeightFormat:
        """The format that holds a matrix's values as they are stored."""


class TensorSource(TensorIndex, Protocol):
    """An opened checkpoint."""

    kind: str
    """``"safetensors"``, ``"gguf"`` or ``"flash"``."""
    generation_config: dict[str, Any]
    metadata: dict[str, Any]
    """A GGUF file's key-values (those of its tokenizer in a flash folder); {} for Hugging Face folders."""

    def tensor(self, name: str) -> torch.Tensor:
        """Float types as stored, quantised ones decoded to fp32 (FP8 to bf16); the caller owns the memory."""

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """The same values into the contiguous ``out``, of that shape and any float type, in little memory beside."""

    def weight_rows(self, name: str, first: int, count: int) -> PlainWeight:
        """Some rows of a matrix in that format."""

    def float_rows(self, name: str, first: int, count: int) -> torch.Tensor:
        """The same rows as fp32 [count, k]."""

    def fingerprint(self) -> bytes:
        """32 bytes that tell this model from others (config, shapes, samples of every tensor)."""

    def close(self) -> None: ...
    def __enter__(self) -> TensorSource: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class GGUFSource:
    """A GGUF file under Hugging Face names. Safe from any thread."""

    kind = "gguf"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._gguf = GGUFFile(path)
        try:
            self.metadata = self._gguf.metadata
            architecture_of(self._gguf)
            self._gguf.require_decodable()
            self.config = config_from_gguf(self._gguf)
            self.generation_config = generation_config(self.config)
            self._stored: dict[str, str] = {}
            for stored in self._gguf.tensors:
                if stored == ROPE_FREQS:  # it is in the config
                    continue
                name = to_hf(stored)
                if name in self._stored:
                    raise CheckpointError(f"{path}: {stored!r} and {self._stored[name]!r} are both {name!r}")
                self._stored[name] = stored
            self._architecture = str(self.config["model_type"])
        except BaseException:
            self._gguf.close()
            raise

    def names(self) -> list[str]:
        return list(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._gguf.tensors[self._stored[name]].shape

    def dtype(self, name: str) -> str:
        return self._gguf.tensors[self._stored[name]].kind.name

    def tensor(self, name: str) -> torch.Tensor:
        native = self._gguf.tensors[self._stored[name]].kind.native
        out = torch.empty(self.shape(name), dtype=native or torch.float32)
        self.read_into(name, out)
        return out

    def read_into(self, name: str, out: torch.Tensor) -> None:
        stored = self._stored[name]
        which = interleaved(self._architecture, name)
        if which is None:
            self._gguf.read_into(stored, out)
            return
        heads = int(self.config["num_attention_heads" if which == "q" else "num_key_value_heads"])
        rows = self.shape(name)[0]
        if rows % (2 * heads):
            raise self._gguf.file.error(f"{rows} rows are no {heads} heads of even size", tensor=stored)
        out.copy_(half_split(self._gguf.read(stored), heads))

    def weight_format(self, name: str) -> WeightFormat:
        return FORMATS[self.dtype(name)]

    def weight_rows(self, name: str, first: int, count: int) -> PlainWeight:
        stored, which = self._stored[name], interleaved(self._architecture, name)
        if which is None:
            return self._gguf.rows(stored, first, count)
        # Rows are in the other rotary pairing: read the heads they are in, and take them in our order.
        heads = int(self.config["num_attention_heads" if which == "q" else "num_key_value_heads"])
        rows = self.shape(name)[0]
        if rows % (2 * heads):
            raise self._gguf.file.error(f"{rows} rows are no {heads} heads of even size", tensor=stored)
        each = rows // heads
        start = first // each
        some = -(-(first + count) // each) - start
        order = half_split(torch.arange(some * each).view(-1, 1), some).flatten()
        whole = self._gguf.rows(stored, start * each, some * each)
        return whole.rows(order[first - start * each :][:count])

    def float_rows(self, name: str, first: int, count: int) -> torch.Tensor:
        return dequantize(self.weight_rows(name, first, count))

    def fingerprint(self) -> bytes:
        return self._gguf.fingerprint()

    def close(self) -> None:
        self._gguf.close()

    def __enter__(self) -> GGUFSource:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_source(path: str | os.PathLike[str]) -> TensorSource:
    """Open a Hugging Face folder, a flash folder or a GGUF file. Reads headers only, and believes nothing unchecked."""
    where = Path(path)
    if where.is_dir():
        return _open_folder(where)
    if not where.exists():
        raise ModelNotFound(f"no such file or folder: {where}")
    if not where.is_file():
        raise ModelError(f"{where} is neither a file nor a folder")
    file = DataFile(where)
    magic = file.read(0, min(4, file.size))
    file.close()
    if magic == MAGIC or where.suffix.lower() == ".gguf":
        return GGUFSource(where)
    if where.suffix == ".safetensors":
        raise ModelError(f"{where} is one file of a Hugging Face folder: give the folder, {where.parent}")
    raise FormatError(
        f"{where} starts with {magic!r}: it is no GGUF file (a Hugging Face model is given as its folder)",
        file=str(where),
        offset=0,
    )


def _open_folder(folder: Path) -> TensorSource:
    if (folder / MANIFEST).exists():
        return FlashFolder(folder)
    if not (folder / SINGLE).exists() and not (folder / INDEX).exists():
        files = sorted(folder.glob("*.gguf"))
        if len(files) == 1:
            return GGUFSource(files[0])
        if files:
            raise ModelError(f"{folder} holds several GGUF files; give one: {', '.join(f.name for f in files[:20])}")
    opened = SafetensorsFolder(folder)
    method = quant_method(opened.config)
    if method is None:
        return opened
    return Fp8Folder(opened) if method == "fp8" else QuantisedFolder(opened)
