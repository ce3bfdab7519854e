"""What the machine can do at most: ``roof.cpp`` compiled and called. For the benchmarks beside it."""

from __future__ import annotations

import ctypes
import os
import platform
import statistics
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from deepseek_flash.kernels.cpu import build

FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-shared", "-pthread", "-w")
MIX_OPERATIONS = 12 * 16 * 32 * 2
"""Of one round of ``roof_mix``: a product and a sum for 12 rows, 16 outputs, 32 inputs."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The compiled loops."""

    library: ctypes.CDLL

    def read_rate(self, data: torch.Tensor, threads: int, *, copies: int = 1, passes: int = 8) -> float:
        """Bytes a second at which a loop reads a ``copies``-th of the data a pass, one part after the other.

        The median pass, with software prefetching or without, whichever is faster here.
        """
        seconds = (ctypes.c_double * passes)()
        total = ctypes.c_uint64()
        best = 0.0
        for ahead in (0, 1):
            size = self.library.roof_read(
                ctypes.c_void_p(data.data_ptr()),
                ctypes.c_int64(data.numel() // copies),
                copies,
                threads,
                ahead,
                passes,
                seconds,
                ctypes.byref(total),
            )
            best = max(best, size / statistics.median(seconds[1:]))
        return best

    def mix_rate(self, threads: int, *, passes: int = 6) -> float | None:
        """Operations a second of the int4 product's instructions on registers; None where nobody wrote them down."""
        rounds = 20_000
        seconds = (ctypes.c_double * passes)()
        out = (ctypes.c_float * threads)()
        if not self.library.roof_mix(ctypes.c_int64(rounds), threads, passes, seconds, out):
            return None
        return threads * rounds * MIX_OPERATIONS / statistics.median(seconds[1:])


def machine() -> Machine:
    """Compile and load."""
    compiler = build.compiler()
    if compiler is None:
        raise SystemExit("no C++ compiler found")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "roof.so"
        subprocess.run([compiler, *FLAGS, str(Path(__file__).with_name("roof.cpp")), "-o", str(out)], check=True)
        library = ctypes.CDLL(str(out))
    library.roof_read.restype = ctypes.c_int64
    library.roof_mix.restype = ctypes.c_bool
    return Machine(library)


class Watch:
    """Who else used the processors since it was made: a figure counts only when that is near nothing."""

    def __init__(self) -> None:
        self._begin = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float, float]:
        """Seconds: of the clock, of all processors at work, of those taken by the host, of this process and its ended
        children."""
        used = sum(os.times()[:4])
        stat = Path("/proc/stat")
        if not stat.exists():
            return time.monotonic(), used, 0.0, used
        ticks = os.sysconf("SC_CLK_TCK")
        user, nice, system, _, _, irq, soft, stolen = (int(x) / ticks for x in stat.read_text().split()[1:9])
        return time.monotonic(), user + nice + system + irq + soft, stolen, used

    def report(self) -> str:
        """One line."""
        clock, busy, stolen, own = (b - a for a, b in zip(self._begin, self._now(), strict=True))
        room = clock * (os.cpu_count() or 1) / 100
        others = max(busy - own, 0.0)
        verdict = "quiet enough" if others + stolen < 2 * room else "not quiet: these figures do not count"
        return f"others used {others / room:.1f} % of the processors, the host took {stolen / room:.1f} %: {verdict}"


def about() -> str:
    """One line: processor, how many of them, how busy they are."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        name = names[0] if names else name
    load = f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"
    return f"{name}, {os.cpu_count()} processors, load {load}, torch {torch.__version__}"
