"""Random cases of every native kernel against the definition of its op.

    python -m tests.kernels.campaign --cases 10000 --seed 1

Each case has a number, and number and seed fix it: kernel, shape, types, layout, threads and instruction sets. It runs
on two instruction sets, which must give the same bits, and the first result is compared with the reference.
``test_campaign.py`` runs every tenth of the ten thousand.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

import torch

from deepseek_flash.kernels.cpu import lib
from deepseek_flash.kernels.cpu.native import Native
from deepseek_flash.kernels.ops.attention import paged_attention
from deepseek_flash.kernels.ops.cache import rope_and_cache_write
from deepseek_flash.kernels.ops.mlp import silu_mul
from deepseek_flash.kernels.ops.norm import add_rms_norm, rms_norm
from deepseek_flash.kernels.ops.packed import PackedLinear, packed_linear, packed_rows, random_weight
from deepseek_flash.kernels.ops.rope import tables
from deepseek_flash.kernels.ops.sample import argmax
from deepseek_flash.kernels.ops.stack import LayerWeights, StackWeights, decoder_stack
from deepseek_flash.kernels.plan import AttentionPlan, Cache
from deepseek_flash.kernels.weights import PackedWeight, WeightFormat, dequantize, unpack
from tests.kernels.paged import DTYPES, copied, pair, random_cache, random_plan, stored, tensors_of

Run = Callable[[Native], list[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Trial:
    """One case: ``native`` on some threads gives new tensors, ``want`` is what the reference gives."""

    label: str
    native: Run
    want: Callable[[], list[torch.Tensor]]
    wrong: Callable[[torch.Tensor, torch.Tensor], bool]
    """Whether (got, wanted) are too far apart."""


def relative(tolerance: float, least: float = 0.0) -> Callable[[torch.Tensor, torch.Tensor], bool]:
    """Too far apart by a share of the largest wanted number, and by more than ``least``."""

    def wrong(got: torch.Tensor, want: torch.Tensor) -> bool:
        if got.shape != want.shape or not bool(torch.isfinite(got).all()):
            return True
        return bool((got - want).abs().amax() > max(tolerance * float(want.abs().amax()), least))

    return wrong


def mostly_apart(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Whether half of the rows have more than a tenth of error."""
    return bool(((got - want).norm(dim=-1) > 0.1 * want.norm(dim=-1)).float().mean() >= 0.5)


def different(got: torch.Tensor, want: torch.Tensor) -> bool:
    return not torch.equal(got, want)


def any_format(rng: random.Random) -> WeightFormat:
    """All of GroupQuant, zero points that are not in the middle included, and the three float types."""
    if rng.random() < 0.2:
        return WeightFormat(rng.choice(("float32", "float16", "bfloat16")))
    bits, group = rng.choice((4, 5, 6, 8)), rng.choice((16, 32, 64, 128))
    offset, double = rng.choice(("zero", "min", "zeros")), rng.random() < 0.3
    zero = rng.choice((0, 1 << (bits - 1), rng.randrange(1 << bits))) if offset == "zero" else 0
    group = 32 if bits == 5 and group == 16 else group
    return WeightFormat("group", bits=bits, group=group, offset=offset, zero=zero, super=double and offset != "zeros")


def _size(rng: random.Random, most: int) -> int:
    """Small ones, neighbours of multiples of 16, anything."""
    near = 16 * rng.randint(1, max(most // 16, 1)) + rng.choice((-1, 0, 0, 1))
    return max(1, min(most, rng.choice((rng.randint(1, 9), near, rng.randint(1, most)))))


def _layer(rng: random.Random, gen: torch.Generator, *, n: int, k: int) -> PackedLinear:
    """One to three formats below each other."""
    count = rng.choice((1, 1, 1, 2, 3))
    parts = tuple(random_weight(gen, any_format(rng), n if i == 0 else rng.randint(1, 40), k) for i in range(count))
    bias = torch.randn(sum(p.n for p in parts), generator=gen) if rng.random() < 0.4 else None
    return PackedLinear(parts, bias, rng.random() < 0.3)


def _largest(weight: PackedWeight) -> float:
    """Magnitude of what a weight's values are made of: d q + m, d and m with signs of their own."""
    plain = unpack(weight)
    largest = float(dequantize(plain).abs().amax())
    return (
        largest
        if plain.min is None
        else largest + float(dequantize(replace(plain, codes=plain.codes * 0)).abs().amax())
    )


def _linear(rng: random.Random, gen: torch.Generator) -> Trial:
    rows = rng.choice((1, 1, rng.randint(2, 12), rng.randint(13, 70), rng.choice((255, 256, 257, 300))))
    most = 400 if rows < 100 else 96
    layer = _layer(rng, gen, n=_size(rng, most), k=_size(rng, most * 2))
    x = torch.randn(rows, layer.inputs + rng.choice((0, 0, 5)), generator=gen)[:, : layer.inputs]
    x *= rng.choice((1.0, 1e-3, 100.0))
    label = f"linear rows {rows} k {layer.inputs} {[(p.n, p.format) for p in layer.parts]}"
    # Sums may cancel: then the last bits of what was added count, not of what is left.
    least = 2e-7 * float(x.abs().sum(-1).amax()) * max(_largest(p) for p in layer.parts)
    return Trial(label, lambda c: [c.packed_linear(x, layer)], lambda: [packed_linear(x, layer)], relative(2e-5, least))


def _rows(rng: random.Random, gen: torch.Generator) -> Trial:
    layer = _layer(rng, gen, n=_size(rng, 200), k=_size(rng, 500))
    ids = torch.randint(0, layer.outputs, (rng.randint(1, 40),), generator=gen)
    label = f"rows {len(ids)} k {layer.inputs} {[(p.n, p.format) for p in layer.parts]}"
    return Trial(label, lambda c: [c.packed_rows(layer, ids)], lambda: [packed_rows(layer, ids)], relative(1e-6))


def _heads(rng: random.Random) -> tuple[int, int]:
    """(query heads, kv heads), up to 130 of the one for one of the other."""
    kv_heads = rng.choice((1, 1, 2, 3, 4, 8))
    each = rng.choice((1, 2, 3, 4, 7, 8, 16, rng.randint(17, 130) if kv_heads == 1 else 5))
    return kv_heads * each, kv_heads


def _attention(rng: random.Random, gen: torch.Generator) -> Trial:
    heads, kv_heads = _heads(rng)
    dim = rng.choice((16, 32, 64, 64, 80, 128, rng.randint(1, 40), rng.randint(1, 200)))
    block_size, dtype = rng.choice((1, 3, 4, 8, 16, 16, 32, 64, 100, 128)), rng.choice(DTYPES)
    lens = []
    for _ in range(rng.choice((1, 1, 2, 3, 5, 9))):
        context = rng.choice(
            (rng.randint(1, 20), rng.randint(1, 300), rng.choice((63, 64, 65, 255, 256, 257, 512, 700)))
        )
        new = rng.choice((1, 1, rng.randint(1, min(context, 5)), rng.randint(1, min(context, 90))))
        lens.append((new, context))
    plan, used = random_plan(rng, lens, block_size, share=rng.random() < 0.5)
    turned = block_size % 16 == 0 and rng.random() < 0.6
    k, v = pair(*(random_cache(gen, used, kv_heads, dim, dtype) for _ in range(2)), turned)
    q = torch.randn(plan.cu_q[-1], heads, dim, generator=gen) * rng.choice((1.0, 1.0, 5.0))
    scale = dim**-0.5
    label = f"attention {dtype} heads {heads}/{kv_heads} dim {dim} block {block_size}{' turned' * turned} {lens}"
    return Trial(
        label,
        lambda c: [c.paged_attention(q, k, v, _again(plan), scale)],
        lambda: [paged_attention(q, k, v, plan, scale)],
        relative(1e-5),
    )


def _again(plan: AttentionPlan) -> AttentionPlan:
    """Without what an implementation left in it."""
    return AttentionPlan(plan.cu_q, plan.context_lens, plan.block_table, plan.slots)


def _rope(rng: random.Random, gen: torch.Generator) -> Trial:
    heads, kv_heads = _heads(rng)
    dim = rng.choice((16, 32, 64, 80, 128, rng.randint(2, 100)))
    rot = min(dim - dim % 2, rng.choice((dim - dim % 2, 2, 2 * rng.randint(1, dim // 2))))
    tokens, block_size, dtype = rng.choice((1, 1, rng.randint(2, 60))), rng.choice((1, 5, 16, 32)), rng.choice(DTYPES)
    blocks = -(-tokens // block_size) + 2
    slots = torch.randperm(blocks * block_size, generator=gen)[:tokens]
    plan = AttentionPlan((0, tokens), (tokens,), torch.zeros(1, 1, dtype=torch.int64), slots)
    qkv = torch.randn(tokens, heads + 2 * kv_heads, dim, generator=gen)
    turned = heads + kv_heads
    qk, v = qkv[:, :turned], qkv[:, turned:]
    if rng.random() < 0.3:
        v = v.clone()
    cos, sin = tables(gen, tokens, rot)
    zeros = stored(torch.zeros(blocks, block_size, kv_heads, dim), dtype)
    turned = block_size % 16 == 0 and rng.random() < 0.6
    blank = pair(zeros, zeros, turned)

    def run(fn: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        caches = copied(blank[0]), copied(blank[1])
        q = fn(qk, v, cos, sin, *caches, _again(plan))
        return [q, *tensors_of(caches[0]), *tensors_of(caches[1])]

    def wrong(got: torch.Tensor, want: torch.Tensor) -> bool:
        """One unit of the cache's type where the product before rounding may differ in its last bit."""
        if got.dtype == torch.int8:
            return bool((got.int() - want.int()).abs().amax() > 1)
        loose = {torch.float32: 2e-6, torch.float16: 1.1e-3, torch.bfloat16: 9e-3}[got.dtype]
        return not torch.allclose(got.float(), want.float(), rtol=loose, atol=1e-6)

    where = f"block {block_size}{' turned' * turned}"
    label = f"rope {dtype} heads {heads}/{kv_heads} dim {dim} rot {rot} {where} tokens {tokens}"
    return Trial(label, lambda c: run(c.rope_and_cache_write), lambda: run(rope_and_cache_write), wrong)


def _norm(rng: random.Random, gen: torch.Generator) -> Trial:
    rows, dim, eps = rng.randint(1, 40), _size(rng, 900), rng.choice((1e-5, 1e-6))
    weight = 1 + 0.1 * torch.randn(dim, generator=gen)
    x = torch.randn(rows, dim + rng.choice((0, 0, 7)), generator=gen)[:, :dim] * rng.choice((1.0, 1e-3, 300.0))
    if rng.random() < 0.5:
        other = torch.randn(rows, dim, generator=gen)
        return Trial(
            f"add_rms_norm [{rows}, {dim}]",
            lambda c: list(c.add_rms_norm(x, other, weight, eps)),
            lambda: list(add_rms_norm(x, other, weight, eps)),
            relative(1e-5),
        )
    return Trial(
        f"rms_norm [{rows}, {dim}]",
        lambda c: [c.rms_norm(x, weight, eps)],
        lambda: [rms_norm(x, weight, eps)],
        relative(1e-5),
    )


def _silu(rng: random.Random, gen: torch.Generator) -> Trial:
    rows, n = rng.randint(1, 40), _size(rng, 700)
    x = torch.randn(rows, 2 * n, generator=gen) * rng.choice((1.0, 3.0, 60.0))
    return Trial(f"silu_mul [{rows}, {n}]", lambda c: [c.silu_mul(x)], lambda: [silu_mul(x)], relative(1e-5))


def _argmax(rng: random.Random, gen: torch.Generator) -> Trial:
    rows, n = rng.randint(1, 9), _size(rng, 6000)
    x = torch.randn(rows, n, generator=gen)
    kind = rng.choice(("plain", "equals", "holes", "broken"))
    if kind == "equals":
        x = x.round()
    elif kind == "holes":
        x[:, torch.rand(n, generator=gen) < 0.9] = -float("inf")
    elif kind == "broken":
        x[rng.randrange(rows), rng.randrange(n)] = rng.choice((float("nan"), float("inf")))
    return Trial(f"argmax {kind} [{rows}, {n}]", lambda c: [c.argmax(x)], lambda: [argmax(x)], different)


def _stack(rng: random.Random, gen: torch.Generator) -> Trial:
    kv_heads, dim = rng.choice((1, 2, 3)), rng.choice((8, 16, 20, 32))
    heads, hidden, inner = kv_heads * rng.choice((1, 2, 3)), _size(rng, 120), _size(rng, 160)
    form, dtype, block_size = any_format(rng), rng.choice(DTYPES), rng.choice((4, 16, 32))
    if rng.random() < 0.5:
        form, dtype = WeightFormat(rng.choice(("float32", "float16", "bfloat16"))), "float32"

    def linear(n: int, k: int) -> PackedLinear:
        bias = 0.1 * torch.randn(n, generator=gen) if rng.random() < 0.5 else None
        return PackedLinear((random_weight(gen, form, n, k),), bias)

    def norm(*shape: int) -> torch.Tensor:
        return 1 + 0.1 * torch.randn(*shape, generator=gen)

    head_norm = rng.random() < 0.5
    layers = tuple(
        LayerWeights(
            norm=norm(hidden),
            mlp_norm=norm(hidden),
            head_norm=norm(heads + kv_heads, dim) if head_norm else None,
            qkv=linear((heads + 2 * kv_heads) * dim, hidden),
            out=linear(hidden, heads * dim),
            gate_up=linear(2 * inner, hidden),
            down=linear(hidden, inner),
        )
        for _ in range(rng.randint(1, 3))
    )
    weights = StackWeights(heads, 1e-5, dim**-0.5, layers, norm(hidden))
    contexts = [rng.choice((rng.randint(1, 30), rng.randint(1, 300))) for _ in range(rng.choice((1, 2, 4)))]
    lens = [(rng.choice((1, rng.randint(1, min(c, 40)))), c) for c in contexts]
    plan, used = random_plan(rng, lens, block_size, share=False)
    turned = block_size % 16 == 0 and rng.random() < 0.6
    blank = [pair(*(random_cache(gen, used, kv_heads, dim, dtype) for _ in range(2)), turned) for _ in layers]
    x = torch.randn(plan.cu_q[-1], hidden, generator=gen)
    cos, sin = tables(gen, len(x), dim)

    def run(fn: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        caches: tuple[tuple[Cache, Cache], ...] = tuple((copied(k), copied(v)) for k, v in blank)
        return [fn(x, weights, caches, cos, sin, _again(plan))]

    label = f"stack {form} {dtype} hidden {hidden} heads {heads}/{kv_heads} dim {dim} inner {inner} {lens}"
    # Where activations or cached values are rounded, a last bit may turn a rounding: some rows move by a step of it.
    wrong = relative(1e-3) if form.kind != "group" and dtype == "float32" else mostly_apart
    return Trial(label, lambda c: run(c.decoder_stack), lambda: run(decoder_stack), wrong)


KINDS: tuple[tuple[int, Callable[[random.Random, torch.Generator], Trial]], ...] = (
    (30, _linear),
    (8, _rows),
    (28, _attention),
    (10, _rope),
    (7, _norm),
    (4, _silu),
    (5, _argmax),
    (8, _stack),
)
"""(how often, what)"""


def trial(seed: int, number: int) -> tuple[Trial, random.Random]:
    """Case ``number``, and the source of the choices that are left."""
    rng = random.Random(f"{seed} {number}")
    gen = torch.Generator().manual_seed(rng.getrandbits(40))
    (make,) = rng.choices([k for _, k in KINDS], [w for w, _ in KINDS])
    return make(rng, gen), rng


@cache
def _native(threads: int) -> Native:
    return Native(threads)


def check(seed: int, number: int) -> str | None:
    """What is wrong with a case, if anything."""
    case, rng = trial(seed, number)
    library = lib.load()
    assert library is not None
    results = []
    for isa in rng.sample(library.isas, min(2, len(library.isas))):
        assert library.functions.flash_use_isa(isa.encode()) == 0
        threads = rng.choice((1, 1, 2, 3))
        results.append((f"{isa}, {threads} threads", case.native(_native(threads))))
    library.functions.flash_use_isa(None)
    (where, first), *others = results
    for got, want in zip(first, case.want(), strict=True):
        if case.wrong(got, want):
            apart = (got.float() - want.float()).abs().max()
            return f"case {number}, {case.label} ({where}): {apart} apart, the largest is {want.float().abs().max()}"
    for other, again in others:
        if any(different(a, b) for a, b in zip(first, again, strict=True)):
            return f"case {number}, {case.label}: {where} and {other} differ"
    return None


def failures(seed: int, numbers: range) -> Iterator[str]:
    for number in numbers:
        found = check(seed, number)
        if found is not None:
            yield found


def main() -> int:
    parser = argparse.ArgumentParser(description="Random cases of the native kernels against the references.")
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if lib.load() is None:
        sys.stderr.write(f"no native kernels: {lib.why_missing()}\n")
        return 2
    torch.set_num_threads(1)
    begin, numbers = time.monotonic(), range(options.first, options.first + options.cases)
    kinds = Counter(trial(options.seed, n)[0].label.split()[0] for n in numbers[:: max(1, len(numbers) // 200)])
    bad = list(failures(options.seed, numbers))
    for line in bad[:20]:
        sys.stdout.write(line + "\n")
    sys.stdout.write(f"about one in {len(numbers) // 200 or 1}: {dict(kinds)}\n")
    sys.stdout.write(f"{len(numbers)} cases in {time.monotonic() - begin:.0f} s, {len(bad)} failures\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
