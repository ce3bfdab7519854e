"""The CPU kernels against the machine they run on, one and two threads in turns.

    python tests/benchmarks/kernels.py [MODEL.gguf] [--rounds 7]

Prints, as medians:

- decode: bytes a second at which the products of one token read int4 weights of SmolLM2's shapes (all layers, 66 MB,
  each read once), beside a loop that only reads as many bytes in the same run;
- prefill: operations a second of int4 products with 512 rows, beside the same mix of instructions (byte products,
  conversion, scales, moment) kept in registers and the first-level cache;
- with a MODEL: a decode step alone, its products, and what Python and dispatch add.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from deepseek_flash.kernels.cpu import build
from deepseek_flash.kernels.cpu.native import Native
from deepseek_flash.kernels.ops.packed import PackedLinear, random_weight
from deepseek_flash.kernels.weights import WeightFormat

INT4 = WeightFormat("group", bits=4, group=32, offset="min")
LAYERS = {"576 in": (30 * (960 + 576 + 3072), 576), "1536 in": (30 * 576, 1536)}
"""Outputs and inputs of all of SmolLM2's layers, those with equal inputs as one."""


def roof() -> ctypes.CDLL:
    compiler = build.compiler()
    if compiler is None:
        raise SystemExit("no C++ compiler")
    out = Path(tempfile.mkdtemp()) / "roof.so"
    source = Path(__file__).with_name("roof.cpp")
    flags = ["-std=c++17", "-O3", "-march=native", "-fPIC", "-shared", "-pthread"]
    subprocess.run([compiler, *flags, str(source), "-o", str(out)], check=True)
    library = ctypes.CDLL(str(out))
    library.roof_read.restype = library.roof_mix.restype = ctypes.c_double
    return library


def seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def read_rate(library: ctypes.CDLL, data: torch.Tensor, threads: int) -> float:
    """Bytes a second."""
    total = ctypes.c_int64()
    spent = library.roof_read(
        ctypes.c_void_p(data.data_ptr()), ctypes.c_int64(data.numel()), threads, ctypes.byref(total)
    )
    return data.numel() / spent


def mix_rate(library: ctypes.CDLL, threads: int) -> float:
    """Operations a second; two a product of bytes."""
    rounds = 100_000
    out = (ctypes.c_float * threads)()
    spent = library.roof_mix(ctypes.c_int64(rounds), threads, out)
    return threads * rounds * 12 * 16 * 32 * 2 / spent


def kernels(rounds: int) -> None:
    library, gen = roof(), torch.Generator().manual_seed(0)
    decode: dict[int, tuple[list[float], list[float]]] = {1: ([], []), 2: ([], [])}
    prefill: dict[int, tuple[list[float], list[float]]] = {1: ([], []), 2: ([], [])}
    natives = {threads: Native(threads) for threads in decode}
    weights = [random_weight(gen, INT4, n, k) for n, k in LAYERS.values()]
    nbytes = sum(w.nbytes for w in weights)
    other = torch.randint(0, 255, (nbytes // 8192 * 8192,), dtype=torch.uint8)
    small = {(n, k): random_weight(gen, INT4, n, k) for n, k in ((960, 576), (576, 576), (3072, 576), (576, 1536))}
    for _ in range(rounds):
        for threads, native in natives.items():
            layers = [native.bind_packed((w,), None) for w in weights]
            one = [torch.randn(1, w.k, generator=gen) for w in weights]

            def step(
                native: Native = native, layers: list[PackedLinear] = layers, one: list[torch.Tensor] = one
            ) -> None:
                for x, layer in zip(one, layers, strict=True):
                    native.packed_linear(x, layer)

            step()
            decode[threads][0].append(nbytes / seconds(step))
            decode[threads][1].append(read_rate(library, other, threads))
            ops = spent = 0.0
            for (n, k), w in small.items():
                layer, x = native.bind_packed((w,), None), torch.randn(512, k, generator=gen)
                native.packed_linear(x, layer)
                spent += min(
                    seconds(lambda native=native, x=x, layer=layer: native.packed_linear(x, layer)) for _ in range(3)
                )
                ops += 2 * 512 * n * k
            prefill[threads][0].append(ops / spent)
            prefill[threads][1].append(mix_rate(library, threads))
    print("| | threads | ours | the machine | share | two threads / one |\n|---|---|---|---|---|---|")
    for label, table, unit in (("decode, GB/s", decode, 1e9), ("prefill, GOP/s", prefill, 1e9)):
        for threads, (got, most) in table.items():
            share = statistics.median(g / m for g, m in zip(got, most, strict=True))
            gain = statistics.median(got) / statistics.median(table[1][0])
            print(
                f"| {label} | {threads} | {statistics.median(got) / unit:.1f} | {statistics.median(most) / unit:.1f} "
                f"| {100 * share:.0f} % | {gain:.2f} |"
            )


def step_of(model: str, rounds: int) -> None:
    """What a token of a lone request is spent on."""
    from deepseek_flash import FlashEngine

    spent: dict[str, float] = {}

    def timed(name: str) -> None:
        call = getattr(Native, name)

        def run(*arguments: object) -> object:
            begin = time.perf_counter()
            out = call(*arguments)
            spent[name] = spent.get(name, 0.0) + time.perf_counter() - begin
            return out

        setattr(Native, name, run)

    for name in ("decoder_stack", "packed_linear", "packed_rows", "argmax"):
        timed(name)
    new = 129
    steps: list[float] = []
    inside: list[float] = []
    products: list[float] = []
    with FlashEngine(model, max_model_len=1024) as engine:
        inner = engine._runtime.model
        native, chains = Native(), []
        parts = [p for w in inner._stack.layers for one in (w.qkv, w.out, w.gate_up, w.down) for p in one.parts]
        for k in sorted({p.k for p in parts}):
            layer = native.bind_packed(tuple(p for p in parts if p.k == k), None)
            chains.append((torch.randn(1, k), layer))
        chains.append((torch.randn(1, inner.embed.packed.inputs), native.bind_packed(inner.embed.packed.parts, None)))

        def all_products() -> None:
            for x, layer in chains:
                native.packed_linear(x, layer)

        all_products()
        for _ in range(rounds):
            engine.generate("Once upon a time", max_new_tokens=1, temperature=0.0)
            spent.clear()
            whole = seconds(
                lambda: engine.generate("Once upon a time", max_new_tokens=new, temperature=0.0, ignore_eos=True)
            )
            steps.append(whole / new)
            inside.append(sum(spent.values()) / new)
            products.append(min(seconds(all_products) for _ in range(20)))
    step, kernel, product = (1e3 * statistics.median(x) for x in (steps, inside, products))
    print(f"\na token alone: {step:.2f} ms; in kernels {kernel:.2f} ms; its products alone {product:.2f} ms")
    print(f"Python and dispatch: {100 * (1 - kernel / step):.1f} % of the step; step / products: {step / product:.2f}")


def main() -> None:
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("model", nargs="?")
    a.add_argument("--rounds", type=int, default=7)
    o = a.parse_args()
    kernels(o.rounds)
    if o.model:
        step_of(o.model, o.rounds)


if __name__ == "__main__":
    main()
