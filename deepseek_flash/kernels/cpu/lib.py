"""Finding, building and loading the C++ kernels."""

from __future__ import annotations

import ctypes
import os
import threading
import warnings
from ctypes import POINTER, c_char_p, c_double, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from deepseek_flash.config import cache_dir
from deepseek_flash.kernels.cpu import build

ABI = 1
PACKAGED = Path(__file__).with_name("lib")
"""Where installing puts the library, when a compiler was there."""


class FlashLinear(ctypes.Structure):
    """``flash_linear`` of flash.h."""


FlashLinear._fields_ = [
    *((name, c_int32) for name in ("kind", "bits", "group", "offset", "zero", "super", "fine")),
    ("n", c_int64),
    ("k", c_int64),
    ("data", c_void_p),
    ("bias", c_void_p),
    ("next", POINTER(FlashLinear)),
]


class FlashStrides(ctypes.Structure):
    """``flash_strides`` of flash.h."""

    _fields_ = (("block", c_int64), ("slot", c_int64), ("head", c_int64), ("item", c_int64))


class FlashCache(ctypes.Structure):
    """``flash_cache`` of flash.h."""

    _fields_ = (
        ("k", c_void_p),
        ("v", c_void_p),
        ("k_scale", c_void_p),
        ("v_scale", c_void_p),
        ("k_at", FlashStrides),
        ("v_at", FlashStrides),
        ("k_scale_at", FlashStrides),
        ("v_scale_at", FlashStrides),
        ("dtype", c_int32),
        ("block_size", c_int32),
        ("kv_heads", c_int32),
        ("dim", c_int32),
        ("kv_group", c_int32),
    )


class FlashStep(ctypes.Structure):
    """``flash_step`` of flash.h."""

    _fields_ = (
        ("tokens", c_int64),
        ("sequences", c_int64),
        ("cu_q", c_void_p),
        ("context", c_void_p),
        ("block_table", c_void_p),
        ("table_stride", c_int64),
        ("slots", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("rot", c_int32),
    )


class FlashLayer(ctypes.Structure):
    """``flash_layer`` of flash.h."""

    _fields_ = (
        ("norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("head_norm", c_void_p),
        ("qkv", FlashLinear),
        ("out", FlashLinear),
        ("gate_up", FlashLinear),
        ("down", FlashLinear),
        ("cache", FlashCache),
    )


class FlashStack(ctypes.Structure):
    """``flash_stack`` of flash.h."""

    _fields_ = (
        ("layers", c_int32),
        ("heads", c_int32),
        ("hidden", c_int32),
        ("inner", c_int32),
        ("eps", c_float),
        ("scale", c_float),
        ("layer", POINTER(FlashLayer)),
        ("norm", c_void_p),
    )


class FlashChoice(ctypes.Structure):
    """``flash_choice`` of flash.h."""

    _fields_ = (
        ("temperature", c_float),
        ("top_k", c_int32),
        ("top_p", c_double),
        ("min_p", c_double),
        ("repetition", c_double),
        ("frequency", c_double),
        ("presence", c_double),
        ("seen", c_void_p),
        ("used", c_void_p),
        ("times", c_void_p),
        ("bias_ids", c_void_p),
        ("bias", c_void_p),
        ("forbidden", c_void_p),
        ("seen_count", c_int64),
        ("used_count", c_int64),
        ("bias_count", c_int64),
        ("forbidden_count", c_int64),
        ("allowed", c_void_p),
        ("u", c_double),
    )


_P = c_void_p
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "flash_isas": (c_char_p, ()),
    "flash_isa": (c_char_p, ()),
    "flash_use_isa": (c_int32, (c_char_p,)),
    "flash_pool_create": (c_void_p, (c_int32,)),
    "flash_pool_destroy": (None, (_P,)),
    "flash_pool_threads": (c_int32, (_P,)),
    "flash_pool_processors": (c_int32, (_P, c_int32)),
    "flash_linear_bytes": (c_int64, (_P,)),
    "flash_linear_scratch": (c_int64, (_P, c_int64, c_int32)),
    "flash_linear_run": (c_int32, (_P, _P, _P, c_int64, c_int64, _P, c_int64, _P)),
    "flash_linear_pack": (c_int32, (_P, c_int64, c_int64, _P, _P, _P, _P, _P, _P, _P)),
    "flash_linear_rows": (c_int32, (_P, _P, c_int64, _P)),
    "flash_rms_norm": (c_int32, (_P, _P, c_int64, _P, c_float, c_int64, c_int64, _P)),
    "flash_add_rms_norm": (c_int32, (_P, _P, _P, _P, c_float, c_int64, c_int64, _P, _P)),
    "flash_sample_scratch": (c_int64, (c_int64, c_int32)),
    "flash_sample": (c_int32, (_P, _P, c_int64, c_int64, c_int64, _P, _P, _P)),
    "flash_argmax": (c_int32, (_P, _P, c_int64, c_int64, c_int64, _P)),
    "flash_silu_mul": (c_int32, (_P, _P, c_int64, c_int64, _P)),
    "flash_rope_and_cache_write": (c_int32, (_P, _P, c_int64, c_int32, _P, _P, _P)),
    "flash_attention_scratch": (c_int64, (_P, _P, c_int32, c_int32)),
    "flash_attention": (c_int32, (_P, _P, c_int32, _P, _P, c_float, _P, _P)),
    "flash_stack_scratch": (c_int64, (_P, _P, c_int32)),
    "flash_stack_run": (c_int32, (_P, _P, _P, _P, _P, _P)),
}
"""Function → result and arguments. Pointers are addresses (``c_void_p`` takes integers and ``byref``)."""


@dataclass(frozen=True, slots=True)
class Library:
    """The loaded kernels."""

    path: Path
    functions: Any
    """ctypes, signatures set; calls release the GIL."""

    @property
    def isas(self) -> list[str]:
        """Instruction sets this processor can use, best first."""
        names: bytes = self.functions.flash_isas()
        return names.decode().split(",")

    @property
    def isa(self) -> str:
        """The one in use."""
        name: bytes = self.functions.flash_isa()
        return name.decode()


class _Loader:
    """The one library of the process. Loading twice would start two sets of threads a pool."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tried = False
        self._library: Library | None = None
        self.reason: str | None = None

    def load(self) -> Library | None:
        with self._lock:
            if not self._tried:
                self._tried = True
                try:
                    self._library = _find_or_build()
                except (build.BuildError, OSError, AttributeError) as e:
                    self.reason = str(e)
                    warnings.warn(
                        f"deepseek-flash: the native CPU kernels are not there ({self.reason.splitlines()[0]}); torch "
                        f"stands in: decoding is several times slower, weights take fp32's memory, and quantize and "
                        f"small KV types are refused. Install a C++ compiler (Debian: g++) and start again",
                        RuntimeWarning,
                        stacklevel=3,
                    )
            return self._library


_loader = _Loader()


def load() -> Library | None:
    """The kernels, built first if need be, or None (``why_missing`` says why; one warning a process does too)."""
    return _loader.load()


def why_missing() -> str | None:
    """Why the native kernels cannot be used here, or None when they can."""
    return None if load() is not None else _loader.reason


def _find_or_build() -> Library:
    name = build.library_name()
    cache = cache_dir() / "kernels"
    for place in (PACKAGED / name, cache / name):
        if place.exists():
            try:
                return _open(place)
            except (OSError, AttributeError):  # damaged, or of another machine: a new one replaces it
                if place.parent != cache:
                    continue
    cache.mkdir(parents=True, exist_ok=True)
    with _locked(cache / ".lock"):
        place = cache / name
        if place.exists():
            try:
                return _open(place)
            except (OSError, AttributeError):
                place.unlink()
        return _open(build.build(cache))


def _check_whole(path: Path) -> None:
    """Refuse a library that was cut short: opening one ends the process with SIGBUS instead of an error.

    An ELF file ends with its table of sections, so its header says how long the file must be.
    """
    with path.open("rb") as file:
        head = file.read(64)
        if head[:5] != b"\x7fELF\x02":  # not 64-bit ELF: the loader's own checks must do
            return
        order: Literal["little", "big"] = "little" if head[5:6] == b"\x01" else "big"
        start, size, count = (int.from_bytes(head[a:b], order) for a, b in ((40, 48), (58, 60), (60, 62)))
        if len(head) < 64 or os.fstat(file.fileno()).st_size < start + size * count:
            raise OSError(f"{path} was cut short")


def _open(path: Path) -> Library:
    _check_whole(path)
    functions = ctypes.CDLL(str(path))
    functions.flash_abi.restype, functions.flash_abi.argtypes = c_int32, ()
    if functions.flash_abi() != ABI:
        raise OSError(f"{path} has interface {functions.flash_abi()}; {ABI} is needed")
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(functions, name)
        function.restype, function.argtypes = result, arguments
    return Library(path, functions)


class _locked:
    """Hold a lock file, so that processes started together do not compile together."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None

    def __enter__(self) -> None:
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            import fcntl
        except ImportError:  # no such locks here: building twice is waste, not harm
            return
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            os.close(self._file)
