"""``deepseek-flash inspect``: what a model's files hold, whether or not this version runs it.

Reads headers only, but for ``--verify``.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepseek_flash.errors import FlashError, FormatError, ModelError, UnsupportedModel
from deepseek_flash.memory.report import human

if TYPE_CHECKING:
    from deepseek_flash.kernels.weights import WeightFormat
    from deepseek_flash.loading.source import TensorSource


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor as it is stored."""

    name: str
    type: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(slots=True)
class Findings:
    """What was found. None: the files do not say."""

    path: str
    kind: str
    tensors: list[Tensor] = field(repr=False)
    runs: bool = False
    why_not: str = ""
    architecture: str | None = None
    layers: int | None = None
    parameters: int = 0
    bytes: int = 0
    quantisation: str = ""
    context_length: int | None = None
    tokenizer: str = "none"
    vocabulary: int | None = None
    chat_template: bool = False
    fingerprint: str | None = None
    verified: int | None = None
    """Tensors that were read and are as they were written, when that was asked for."""
    types: dict[str, dict[str, float]] = field(default_factory=dict)
    """By stored type: ``count``, ``bytes`` and ``share`` of all bytes."""

    def plain(self, tensors: bool) -> dict[str, Any]:
        """For JSON."""
        out = asdict(self)
        if not tensors:
            del out["tensors"]
        return out


def run(options: argparse.Namespace) -> int:
    """Print a table, or JSON."""
    from deepseek_flash.loading.locate import locate

    path = locate(options.model)
    found = examine(path)
    if options.verify:
        found.verified = verify(path)
    if options.json:
        print(json.dumps(found.plain(options.tensors), indent=1))
    else:
        _show(found, options.tensors)
    return 0


def examine(path: Path) -> Findings:
    """Everything there is to know about a model; ModelError when there is none, FormatError when it is damaged."""
    from deepseek_flash.loading.source import open_source

    if path.is_dir() and not any((path / name).exists() for name in ("flash.json", "config.json")):
        files = sorted(path.glob("*.gguf"))
        path = files[0] if len(files) == 1 else path
    kind, tensors, config = _stored(path)
    found = Findings(str(path), kind, tensors)
    found.bytes = sum(t.nbytes for t in tensors)
    found.parameters = sum(math.prod(t.shape) for t in tensors)
    found.types = _types(tensors, found.bytes)
    found.quantisation = _mostly(found)
    _config(found, config)
    if kind == "safetensors file":
        found.why_not = "it is one file of a folder"
        return found
    try:
        with open_source(path) as source:
            _opened(found, source, path)
    except UnsupportedModel as e:
        found.why_not = str(e)
    return found


def verify(path: Path) -> int:
    """How many tensors a flash folder has, all as they were written; FormatError names those that are not."""
    from deepseek_flash.loading.flash import MANIFEST, FlashFolder

    if not (path / MANIFEST).is_file():
        raise ModelError(f"{path} holds no digests to compare with: only flash folders do (deepseek-flash convert)")
    with FlashFolder(path) as flash:
        damaged = list(flash.damaged())
        if damaged:
            raise FormatError(
                f"{path}: {len(damaged)} of {len(flash.names())} tensors are not as they were written: "
                f"{', '.join(name[:200] for name in damaged[:8])}{' …' if len(damaged) > 8 else ''}; convert again",
                file=str(path),
                tensor=damaged[0],
            )
        return len(flash.names())


def _stored(path: Path) -> tuple[str, list[Tensor], Mapping[str, Any]]:
    """Kind, tensors and config of what is there, without asking whether it runs."""
    from deepseek_flash.loading.files import DataFile, read_json
    from deepseek_flash.loading.flash import MANIFEST, FlashFolder
    from deepseek_flash.loading.gguf import GGUFFile
    from deepseek_flash.loading.safetensors import read_header

    if path.is_dir() and (path / MANIFEST).exists():
        with FlashFolder(path) as flash:
            return "flash folder", [_flash_tensor(flash, name) for name in flash.names()], flash.config
    if path.is_file() and path.suffix != ".safetensors":
        gguf = GGUFFile(path)
        gguf.close()
        listed = [Tensor(t.name, t.kind.name, t.shape, t.nbytes) for t in gguf.tensors.values()]
        return "GGUF file", listed, _gguf_config(gguf.metadata)
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{path} holds no model: neither safetensors, a flash manifest nor one GGUF file")
    tensors = []
    for name in files:
        file = DataFile(name)
        try:
            tensors += [Tensor(n, e.dtype, e.shape, e.nbytes) for n, e in read_header(file)[0].items()]
        finally:
            file.close()
    if path.is_file():
        return "safetensors file", tensors, {}
    about = path / "config.json"
    return "safetensors folder", tensors, read_json(about) if about.is_file() else {}


def _flash_tensor(flash: Any, name: str) -> Tensor:
    if len(flash.parts(name)) == 1:  # a vector is its own part
        shape = flash.shape(name)
        return Tensor(name, "float32", shape, 4 * math.prod(shape))
    weight = flash.mapped(name)
    return Tensor(name, label(weight.format), (weight.n, weight.k), weight.nbytes)


def label(form: WeightFormat) -> str:
    """``int4 g32 min``: bits, group, offset; K-quants are marked."""
    if form.kind != "group":
        return form.kind
    return f"int{form.bits} g{form.group} {form.offset}{' super' if form.super else ''}"


def _gguf_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The little of a config that every GGUF file says under the same names."""
    architecture = metadata.get("general.architecture")
    return {
        "model_type": architecture,
        "num_hidden_layers": metadata.get(f"{architecture}.block_count"),
        "max_position_embeddings": metadata.get(f"{architecture}.context_length"),
    }


def _config(found: Findings, config: Mapping[str, Any]) -> None:
    named = config.get("architectures")
    first = named[0] if isinstance(named, list) and named else config.get("model_type")
    found.architecture = str(first)[:100] if first else None
    layers, longest = config.get("num_hidden_layers"), config.get("max_position_embeddings")
    found.layers = layers if type(layers) is int else None
    found.context_length = longest if type(longest) is int else None
    method = config.get("quantization_config")
    if isinstance(method, dict) and method.get("weight_block_size"):
        block = str(method["weight_block_size"])[:50]
        found.quantisation = f"{str(method.get('quant_method'))[:50]}, blocks of {block}"
    elif isinstance(method, dict):
        bits, group = method.get("bits", method.get("w_bit", "?")), method.get("group_size", "?")
        found.quantisation = f"{str(method.get('quant_method'))[:50]}, {bits} bits, groups of {group}"


def _opened(found: Findings, source: TensorSource, path: Path) -> None:
    """What only a supported model tells."""
    from deepseek_flash.models.registry import resolve

    found.fingerprint = source.fingerprint().hex()
    found.parameters = sum(math.prod(source.shape(name)) for name in source.names())
    _tokenizer(found, source, path)
    info = resolve(source.config)
    found.architecture, found.layers = info.architecture, info.num_layers
    found.context_length, found.runs = info.max_position, True


def _tokenizer(found: Findings, source: TensorSource, path: Path) -> None:
    from deepseek_flash.loading.files import read_json
    from deepseek_flash.text.tokenizer import Tokenizer
    from deepseek_flash.text.tokenizer_files import MAX_BYTES

    try:
        if source.metadata:
            kinds = {"gpt2": "byte-level BPE", "llama": "sentencepiece BPE"}
            kind = str(source.metadata.get("tokenizer.ggml.model"))
            found.tokenizer = kinds.get(kind, kind)
            opened = Tokenizer.from_gguf(source.metadata, str(path))
        else:
            opened = Tokenizer.from_folder(path)
            model = read_json(path / "tokenizer.json", most=MAX_BYTES).get("model")
            found.tokenizer = str(model.get("type", "?") if isinstance(model, dict) else "?")[:50]
        found.vocabulary, found.chat_template = opened.vocab_size, opened.chat_template is not None
    except FlashError as e:
        found.tokenizer = f"not usable: {e}"


def _types(tensors: Iterable[Tensor], total: int) -> dict[str, dict[str, float]]:
    out: dict[str, dict[str, float]] = {}
    for tensor in tensors:
        line = out.setdefault(tensor.type, {"count": 0, "bytes": 0, "share": 0.0})
        line["count"] += 1
        line["bytes"] += tensor.nbytes
    for line in out.values():
        line["share"] = round(line["bytes"] / total, 4) if total else 0.0
    return dict(sorted(out.items(), key=lambda item: -item[1]["bytes"]))


def _mostly(found: Findings) -> str:
    main = next(iter(found.types), "nothing")
    floats = {"F32", "F16", "BF16", "F64", "float32", "float16", "bfloat16"}
    return f"none ({main})" if main in floats else f"mostly {main}" if len(found.types) > 1 else main


def _show(found: Findings, tensors: bool) -> None:
    from rich.text import Text

    from deepseek_flash.tools.screen import Screen

    console = Screen(highlight=False, soft_wrap=True)

    def said(value: int | None) -> str:
        return "not said" if value is None else f"{value:,}"

    rows = {
        "kind": found.kind,
        "runs": "yes" if found.runs else f"no: {found.why_not}",
        "architecture": found.architecture or "not said",
        "layers": said(found.layers),
        "parameters": f"{found.parameters:,}",
        "weights": f"{human(found.bytes)} in {len(found.tensors)} tensors",
        "quantisation": found.quantisation,
        "context": said(found.context_length),
        "tokenizer": found.tokenizer + (f", {found.vocabulary:,} tokens" if found.vocabulary else ""),
        "chat template": "yes" if found.chat_template else "no",
        "fingerprint": found.fingerprint or "none",
    }
    if found.verified is not None:
        rows["verified"] = f"all {found.verified:,} tensors are as they were written"
    console.print(Text(found.path, style="bold"))
    for name, value in rows.items():
        console.print(Text(f"  {name:<13}  {value}"))
    console.print(Text("Tensors by type", style="bold"))
    width = max(map(len, found.types), default=0)
    for kind, line in found.types.items():
        shown = f"{line['count']:>6,}  {human(int(line['bytes'])):>10}  {line['share']:>6.1%}"
        console.print(Text(f"  {kind:<{width}}  {shown}"))
    if tensors:
        console.print(Text("Tensors", style="bold"))
        longest = max((len(t.name) for t in found.tensors), default=0)
        for t in found.tensors:
            console.print(Text(f"  {t.name:<{longest}}  {t.type:<{width}}  {list(t.shape)}  {human(t.nbytes)}"))
