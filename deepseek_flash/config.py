"""User options and environment, validated once into one frozen value. The only reader of os.environ."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deepseek_flash.errors import ConfigError, bounds, near_miss, near_or_all

ENVIRONMENT: dict[str, str] = {
    "DEEPSEEK_FLASH_CACHE": "folder for pulled models and compiled kernels [~/.cache/deepseek-flash]",
    "DEEPSEEK_FLASH_KERNELS": "'torch' leaves out the native kernels, 'reference' forces every op's definition [auto]",
}
"""Every environment variable the package reads, with its meaning and [default]. docs/cli.md lists the same."""

LATER: dict[str, str] = {
    "target_itl_ms": "latency-targeted scheduling",
    "streaming_timeout_ms": "stream timeouts",
    "expert_offload": "expert offload",
    "enforce_eager": "CUDA graphs",
}
"""Options of the planned surface whose part is not in this version: refused by name, never ignored."""

CacheDtype: TypeAlias = Literal["auto", "float32", "fp32", "float16", "fp16", "bfloat16", "bf16", "int8"]
"""What keys and values may be cached in."""


class EngineConfig(BaseModel):
    """Options of a FlashEngine. Frozen; unknown or impossible values are a ConfigError."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    model: str = Field(min_length=1)
    """Folder, GGUF file, catalogue name, or Hub repo ``org/name[@revision][:file.gguf]``."""
    device: Literal["auto", "cpu"] = "auto"
    dtype: Literal["auto", "float32", "fp32"] = "auto"
    """Compute type. This version computes in fp32."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Most tokens of prompt and answer together [the checkpoint's limit, lowered if the cache cannot hold it]."""
    max_batch_size: int = Field(default=32, ge=1, le=4096)
    """Most sequences that run at once; others wait."""
    prefill_chunk_size: int = Field(default=512, ge=1)
    """Token budget of one step: decode rows first, the rest is prefill."""
    block_size: int | None = Field(default=None, ge=1, le=4096)
    """Tokens of a cache block [16]."""
    kv_cache_dtype: CacheDtype | dict[str, CacheDtype] = "auto"
    """Type of cached keys and values, for all layers or by pattern, as ``{"*": "int8", "0-1": "fp16"}``
    (docs/caching.md) [the checkpoint's float type; fp16 for quantised files]."""
    quantize: Literal["int4", "int8"] | None = None
    """Quantise the weights of linear layers while loading."""
    enable_prefix_caching: bool = True
    l2_cache_gb: float | None = Field(default=None, gt=0)
    """Gigabytes (1e9 bytes) of host memory for cache blocks that the device's pool evicts [no such tier]."""
    l3_cache_path: str | None = Field(default=None, min_length=1)
    """Folder of the disk tier, kept across restarts and shared by processes; its own, made if need be [none]."""
    l3_cache_gb: float | None = Field(default=None, gt=0)
    """Most gigabytes (1e9 bytes) of everything in that folder [20]."""
    l3_write_mb_per_s: float | None = Field(default=None, gt=0)
    """Mean rate (1e6 bytes a second) of writing to the disk tier, beyond a first gigabyte [no bound]."""
    verify_every: int | None = Field(default=None, ge=1)
    """Compute every n-th prefix found on disk instead of using it, and drop what differs [never]."""
    cache_salt: str = ""
    """Requests share cached prefixes only under the same salt."""
    threads: int | None = Field(default=None, ge=1, le=1024)
    """Threads of the native CPU kernels, the engine's own among them [the processors this process may use]."""
    memory_fraction: float | None = Field(default=None, gt=0, le=1)
    """Share of the device's memory (on CPU: of the RAM, or the cgroup's limit) that everything this process opens on
    it may hold together [0.5 on CPU]."""
    memory_budget: int | str | None = None
    """The same in bytes, or as text: ``"6GiB"``, ``"8 GB"``."""
    seed: int | None = Field(default=None, ge=0, lt=2**64)
    """Derives the seeds of requests that give none, in submission order [fresh entropy]."""

    @classmethod
    def from_options(cls, model: str | os.PathLike[str], options: dict[str, Any]) -> EngineConfig:
        """Validate; every mistake is a ConfigError that names the option, the value and what is allowed."""
        known = cls.model_fields
        for name, value in options.items():
            if name in LATER:
                raise ConfigError(
                    f"{name}={value!r}: this option belongs to {LATER[name]}, which this version does not have; "
                    f"remove it (docs/limits.md lists what is not there)",
                    field=name,
                    value=value,
                )
            if name not in known:
                raise ConfigError(
                    f"unknown option {name!r}{near_miss(name, LATER, 0.85) or near_or_all(name, known)}",
                    field=name,
                    value=value,
                    allowed=", ".join(sorted(known)),
                )
        if not isinstance(model, (str, os.PathLike)):
            raise ConfigError(
                f"model={model!r}: a path, catalogue name or Hub repo is needed", field="model", value=model
            )
        for name, value in options.items():
            if isinstance(value, bool) and name != "enable_prefix_caching":
                raise ConfigError(f"{name}={value!r}: not a bool", field=name, value=value)
        if isinstance(path := options.get("l3_cache_path"), os.PathLike):
            options = {**options, "l3_cache_path": os.fspath(path)}
        if isinstance(types := options.get("kv_cache_dtype"), Mapping):
            _check_types(types)
            options = {**options, "kv_cache_dtype": dict(types)}
        try:
            made = cls(model=os.fspath(model), **options)
        except ValidationError as e:
            raise _config_error(e, {"model": model, **options}) from None
        made._check_tiers()
        if made.memory_budget is not None:
            parse_bytes(made.memory_budget)
            if made.memory_fraction is not None:
                raise ConfigError(
                    f"memory_fraction={made.memory_fraction} and memory_budget={made.memory_budget!r}: give one of "
                    f"them",
                    field="memory_budget",
                    value=made.memory_budget,
                )
        return made

    @property
    def budget_bytes(self) -> int | None:
        """``memory_budget`` in bytes."""
        return None if self.memory_budget is None else parse_bytes(self.memory_budget)

    def _check_tiers(self) -> None:
        """ConfigError for tier options that mean nothing together."""
        tiers = {"l2_cache_gb": self.l2_cache_gb, "l3_cache_path": self.l3_cache_path}
        if not self.enable_prefix_caching:
            for name, value in tiers.items():
                if value is not None:
                    raise ConfigError(
                        f"{name}={value!r} with enable_prefix_caching=False: there would be nothing to keep; "
                        f"leave one of them out",
                        field=name,
                        value=value,
                    )
        if self.l3_cache_path is None:
            for name in ("l3_cache_gb", "l3_write_mb_per_s", "verify_every"):
                if (value := getattr(self, name)) is not None:
                    raise ConfigError(
                        f"{name}={value!r} without l3_cache_path: there is no disk tier; give it a folder",
                        field=name,
                        value=value,
                    )


_KNOWN_LATER = frozenset(("bfloat16", "bf16", "float16", "fp16", "half", "int8", "fp8", "cuda"))
"""Good values of other versions: a near miss would mislead."""


def _check_types(types: Mapping[Any, Any]) -> None:
    """ConfigError unless every value names a type; the patterns are read when the number of layers is known."""
    known = get_args(CacheDtype)
    for pattern, dtype in types.items():
        if not isinstance(pattern, str) or dtype not in known:
            hint = "" if str(dtype) in _KNOWN_LATER else near_miss(str(dtype), known)
            raise ConfigError(
                f"kv_cache_dtype={{{pattern!r}: {dtype!r}}}: must map a string (a pattern of layers) to one of "
                f"{', '.join(map(repr, known))}{hint}",
                field="kv_cache_dtype",
                value=dtype,
                allowed=", ".join(known),
            )
    if not types:
        raise ConfigError("kv_cache_dtype={}: name at least one layer", field="kv_cache_dtype", value={})


def _config_error(e: ValidationError, given: dict[str, Any]) -> ConfigError:
    first = e.errors()[0]
    name = str(first["loc"][0]) if first["loc"] else ""
    value = given.get(name)
    allowed = first["msg"]
    hint = ""
    if first["type"] == "literal_error":
        expected = str(first.get("ctx", {}).get("expected", ""))
        if str(value) not in _KNOWN_LATER:
            hint = near_miss(str(value), [w.strip("' ") for w in expected.replace(" or ", ", ").split(",")])
        later = {
            "device": "; CUDA kernels are not in this version",
            "dtype": "; half-precision compute is not in this version",
        }.get(name, "")
        hint += later
    elif name in EngineConfig.model_fields:
        hint = bounds(EngineConfig.model_fields[name].metadata)
    return ConfigError(f"{name}={value!r}: {allowed}{hint}", field=name, value=value, allowed=allowed)


_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?)b|b)?", flags=re.ASCII | re.IGNORECASE)


def parse_bytes(value: str | int, field: str = "memory_budget") -> int:
    """``"24GB"`` (1000³), ``"6GiB"`` (1024³), ``"512 MB"``, ``"1.5TiB"``, or a number of bytes, rounded down.
    ConfigError for anything else, zero and negative numbers included."""
    found = _BYTES.fullmatch(value.strip()) if isinstance(value, str) else None
    size = value if type(value) is int else 0
    if found is not None:
        number, unit, binary = found.groups()
        size = int(float(number) * (1024 if binary else 1000) ** ("kmgt".index(unit.lower()) + 1 if unit else 0))
    if not 0 < size < 1 << 60:
        allowed = "a size such as '24GB', '6GiB', '512MiB', or a number of bytes"
        raise ConfigError(
            f"{field}={value!r}: must be {allowed}, more than 0", field=field, value=value, allowed=allowed
        )
    return size


def cache_dir() -> Path:
    """Where pulled models live (DEEPSEEK_FLASH_CACHE)."""
    return Path(os.environ.get("DEEPSEEK_FLASH_CACHE") or "~/.cache/deepseek-flash").expanduser()


def kernels_preference() -> str:
    """``"auto"``, ``"torch"`` or ``"reference"`` (DEEPSEEK_FLASH_KERNELS)."""
    value = os.environ.get("DEEPSEEK_FLASH_KERNELS", "auto").strip().lower() or "auto"
    allowed = ("auto", "torch", "reference")
    if value not in allowed:
        raise ConfigError(
            f"DEEPSEEK_FLASH_KERNELS={value!r}: must be 'auto', 'torch' or 'reference'{near_miss(value, allowed)}",
            field="DEEPSEEK_FLASH_KERNELS",
            value=value,
            allowed=", ".join(allowed),
        )
    return value
