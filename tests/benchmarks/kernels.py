"""The CPU kernels against the machine they run on, one thread and all threads in turns.

    python tests/benchmarks/kernels.py [MODEL.gguf] [--rounds 7]

Prints, as medians over rounds in which ours and the machine's figures alternate:

- decode: bytes a second at which a single token's products read int4 weights of SmolLM2's shapes (120 matrices, 66 MB),
  beside a loop that only reads as many bytes. Twice: the same weights every time, which a large cache keeps, and eight
  copies in turn, which come from memory;
- prefill: operations a second of int4 products with 512 rows, beside the same mix of instructions (byte products,
  conversion, scales, moment) on registers;
- with a MODEL: a decode step of a lone request, its products, and what Python and dispatch add.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from machine import Machine, Watch, about, machine

from deepseek_flash.kernels.cpu import lib
from deepseek_flash.kernels.cpu.native import Native, processors
from deepseek_flash.kernels.ops.packed import PackedLinear, random_weight
from deepseek_flash.kernels.weights import PackedWeight, WeightFormat, alloc

INT4 = WeightFormat("group", bits=4, group=32, offset="min")
LAYERS = 30
SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))
"""Outputs and inputs of one of SmolLM2's layers: qkv, out, gate and up, down."""
COPIES = 8
"""Together half a gigabyte: more than the caches of most processors."""
ROWS = 512
Layers = list[tuple[torch.Tensor, PackedLinear]]


def seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def median(values: Iterable[float]) -> float:
    return statistics.median(values)


@dataclass
class Measured:
    """Rates of every round."""

    ours: list[float] = field(default_factory=list)
    roof: list[float] = field(default_factory=list)

    def share(self) -> float:
        """Median over rounds: the machine's speed may change between them."""
        return median(x / y for x, y in zip(self.ours, self.roof, strict=True))


def chains(native: Native, parts: Iterable[PackedWeight], rows: int = 1) -> Layers:
    """Matrices with equal inputs as one call each, still one product after the other."""
    by_inputs: dict[int, list[PackedWeight]] = {}
    for p in parts:
        by_inputs.setdefault(p.k, []).append(p)
    return [(torch.randn(rows, k), native.bind_packed(tuple(same), None)) for k, same in by_inputs.items()]


def products(native: Native, layers: Layers) -> Callable[[], None]:
    def run() -> None:
        for x, layer in layers:
            native.packed_linear(x, layer)

    return run


def in_one_call(layers: list[PackedLinear]) -> PackedLinear:
    """Bound layers with equal inputs, one product after the other; each is computed as its model computes it."""
    chain: Any = None
    for layer in reversed(layers):
        links = [layer.native]
        while links[-1].next:
            links.append(links[-1].next.contents)
        for link in reversed(links):
            copy = lib.FlashLinear.from_buffer_copy(link)
            copy.next = chain
            chain = ctypes.pointer(copy)
    return PackedLinear(tuple(p for layer in layers for p in layer.parts), None, native=chain.contents)


def another(weight: PackedWeight) -> PackedWeight:
    """The same values elsewhere in memory."""
    out = alloc(weight.format, weight.n, weight.k)
    out.data.copy_(weight.data)
    return out


def against_the_machine(roof: Machine, rounds: int) -> None:
    gen = torch.Generator().manual_seed(0)
    threads = sorted({1, processors()})
    natives = {t: Native(t) for t in threads}
    shapes = [random_weight(gen, INT4, n, k) for n, k in SHAPES]
    models = [[another(w) for _ in range(LAYERS) for w in shapes] for _ in range(COPIES)]
    nbytes = sum(w.nbytes for w in models[0])
    steps = {t: [products(natives[t], chains(natives[t], model)) for model in models] for t in threads}
    wide = {t: products(natives[t], [c for w in shapes for c in chains(natives[t], [w], ROWS)]) for t in threads}
    operations = sum(2 * ROWS * n * k for n, k in SHAPES)
    memory = torch.randint(0, 255, (COPIES * nbytes // 4096 * 4096 + 64,), dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % 64 :][: COPIES * nbytes // 4096 * 4096]
    kept, cold, prefill = ({t: Measured() for t in threads} for _ in range(3))
    for _ in range(rounds):
        for t in threads:
            for _ in range(3):  # the caches fill
                steps[t][0]()
            kept[t].ours.append(nbytes / median(seconds(steps[t][0]) for _ in range(15)))
            kept[t].roof.append(roof.read_rate(memory[:nbytes], t, passes=12))
            cold[t].ours.append(nbytes / median(seconds(step) for step in steps[t]))
            cold[t].roof.append(roof.read_rate(memory, t, copies=COPIES, passes=COPIES + 1))
            wide[t]()
            prefill[t].ours.append(operations / median(seconds(wide[t]) for _ in range(5)))
            prefill[t].roof.append(roof.mix_rate(t) or float("nan"))
    print("| what | threads | ours | the machine | share | goal | ours, all threads / one | the machine's |")
    print("|---|---|---|---|---|---|---|---|")
    for label, table, goal in (
        (f"decode, the same {nbytes / 1e6:.0f} MB, GB/s", kept, 80),
        (f"decode, {COPIES} copies in turn, GB/s", cold, 80),
        (f"prefill, {ROWS} rows, GOP/s", prefill, 50),
    ):
        for t, got in table.items():
            ours, most = median(got.ours), median(got.roof)
            rates = f"{ours / 1e9:.1f} | {most / 1e9:.1f} | {100 * got.share():.0f} %"
            gains = f"{ours / median(table[1].ours):.2f} | {most / median(table[1].roof):.2f}"
            print(f"| {label} | {t} | {rates} | {goal} % | {gains} |")


class Spent:
    """Seconds inside each C function, from now on and for all engines of this process."""

    def __init__(self) -> None:
        self.by_name: dict[str, float] = {}
        library = lib.load()
        if library is None:
            raise SystemExit("the native kernels are not there")
        for name in lib._SIGNATURES:
            if not name.endswith(("_scratch", "_bytes", "_isas", "_isa")):
                setattr(library.functions, name, self._timed(name, getattr(library.functions, name)))

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            begin = time.perf_counter()
            out = call(*arguments)
            self.by_name[name] = self.by_name.get(name, 0.0) + time.perf_counter() - begin
            return out

        return run

    def taken(self) -> dict[str, float]:
        """What has come together since the last call."""
        out, self.by_name = self.by_name, {}
        return out


def lone_step(model: str, rounds: int) -> None:
    """What a token of a lone request is spent on."""
    from deepseek_flash import FlashEngine

    spent, new = Spent(), 128
    steps: list[float] = []
    alone: list[float] = []
    inside: list[dict[str, float]] = []
    with FlashEngine(model, max_model_len=1024, enable_prefix_caching=False) as engine:
        net: Any = engine._runtime.model
        native = Native()
        kinds = [[getattr(w, name) for w in net._stack.layers] for name in ("qkv", "out", "gate_up", "down")]
        kinds.append([(net.embed if net.head is None else net.head).packed])
        run_products = products(native, [(torch.randn(1, kind[0].inputs), in_one_call(kind)) for kind in kinds])

        def generate(count: int) -> tuple[float, dict[str, float]]:
            spent.taken()
            whole = seconds(
                lambda: engine.generate("Once upon a time", max_new_tokens=count, temperature=0.0, ignore_eos=True)
            )
            return whole, spent.taken()

        generate(8)
        for _ in range(rounds):
            (one, one_by), (many, many_by) = generate(1), generate(1 + new)  # their difference is decoding alone
            steps.append((many - one) / new)
            inside.append({name: (s - one_by.get(name, 0.0)) / new for name, s in many_by.items()})
            run_products()
            alone.append(median(seconds(run_products) for _ in range(15)))
    print(f"\nA token alone, ms (median of {rounds} rounds, {new} tokens each):\n\n| what | ms |\n|---|---|")
    print(f"| the whole step | {1e3 * median(steps):.3f} |")
    for name in inside[0]:
        print(f"| in {name} | {1e3 * median(by[name] for by in inside):.3f} |")
    print(f"| its products alone | {1e3 * median(alone):.3f} |\n")
    rest = median(1 - sum(by.values()) / step for by, step in zip(inside, steps, strict=True))
    ratio = median(step / product for step, product in zip(steps, alone, strict=True))
    print(f"Python and dispatch: {100 * rest:.1f} % of the step (goal: below 10 %)")
    print(f"step / products: {ratio:.2f} (goal: at most 1.5)")


def main() -> None:
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("model", nargs="?")
    a.add_argument("--rounds", type=int, default=7)
    o = a.parse_args()
    print(about() + "\n")
    roof = machine()
    watch = Watch()
    against_the_machine(roof, o.rounds)
    if o.model:
        lone_step(o.model, o.rounds)
    print(f"\n{watch.report()}")


if __name__ == "__main__":
    main()
