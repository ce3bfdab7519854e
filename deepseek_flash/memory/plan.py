"""Whether a model fits a budget, which context and how many sequences do, and what to change where it does not.

Pure arithmetic: whoever knows the model says what it needs (``Needs``), whoever knows the device what there is
(``Budget``). Bytes and tokens throughout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import product

from deepseek_flash.errors import MemoryBudgetError
from deepseek_flash.memory.report import MemoryLine, human

STORED = "stored"
"""Key of ``Needs.weights``: as the checkpoint stores them."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes that may be taken, and where that number comes from."""

    bytes: int
    total: int | None = None
    """All the device has, if known."""
    fraction: float | None = None
    """The share of ``total`` that ``bytes`` is, where it was given as one (``memory_fraction``)."""

    @classmethod
    def share(cls, total: int, fraction: float) -> Budget:
        """``fraction`` of ``total``."""
        return cls(int(total * fraction), total, fraction)


@dataclass(frozen=True, slots=True)
class Needs:
    """What a model takes under each of the choices there are."""

    weights: Mapping[str, int]
    """``STORED``, ``"int8"``, ``"int4"`` (those there are) → bytes."""
    cache: Mapping[str, Callable[[int], int]]
    """``kv_cache_dtype`` → bytes of one sequence of so many tokens (``CacheSpec.bytes_for``)."""
    workspace: Callable[[int, str, str], int]
    """Context, ``quantize``, ``kv_cache_dtype`` → bytes of the largest step; never less for a longer context."""
    runtime: int
    """Interpreter's share, tokenizer, threads, allocator slack."""
    max_model_len: int
    """The context asked for."""
    max_batch_size: int
    kv_cache_dtype: str
    """The key of ``cache`` in use."""
    quantize: str = STORED
    """The key of ``weights`` in use."""
    longest: int = 0
    """The model's own limit, as far as the answer about the largest context looks [``max_model_len``]."""
    block_size: int = 16

    def step(self, context: int) -> int:
        """The workspace under the choices made."""
        return self.workspace(context, self.quantize, self.kv_cache_dtype)

    def fixed(self, context: int) -> int:
        """Everything but the cache."""
        return self.weights[self.quantize] + self.step(context) + self.runtime

    def least(self, context: int) -> int:
        """With the cache of one sequence of so many tokens."""
        return self.fixed(context) + self.cache[self.kv_cache_dtype](context)


@dataclass(frozen=True, slots=True)
class Alternative:
    """Options under which one full sequence fits; each was planned again with them, and does."""

    options: Mapping[str, int | float | str]
    """As ``FlashEngine`` takes them: the largest context, the smallest budget."""
    plan: MemoryPlan
    """What comes of it."""

    def __str__(self) -> str:
        said = {"max_model_len": "<=", "memory_fraction": ">=", "memory_budget": ">="}
        return " and ".join(f"{k} {said[k]} {v}" if k in said else f'{k}="{v}"' for k, v in self.options.items())


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Predicted bytes of the four layers. ``print(plan)`` shows the table."""

    lines: tuple[MemoryLine, ...]
    """weights, kv_cache, workspace, runtime. The cache is what the plan gives it: ``sequences`` full ones, or one
    where not even that fits."""
    budget: Budget
    context: int
    """Tokens of a full sequence: the ``max_model_len`` asked for."""
    sequences: int
    """Full sequences that fit side by side, up to ``max_batch_size``; 0: not one."""
    largest_context: int
    """Most tokens of a lone sequence within the budget, up to the model's limit; 0: not one block."""
    alternatives: tuple[Alternative, ...] = ()
    """Where it does not fit."""

    @property
    def total(self) -> int:
        """Sum of the lines."""
        return sum(line.bytes for line in self.lines)

    @property
    def fits(self) -> bool:
        return self.sequences > 0

    def holders(self) -> dict[str, int]:
        """Line → bytes."""
        return {line.name: line.bytes for line in self.lines}

    def __str__(self) -> str:
        left = self.budget.bytes - self.total
        rest = f"{human(left)} to spare" if left >= 0 else f"{human(-left)} too much"
        rows = [(line.name, human(line.bytes), line.what) for line in self.lines]
        rows += [
            ("total", human(self.total), f"{'fits' if self.fits else 'does not fit'}: {rest}"),
            ("budget", human(self.budget.bytes), _origin(self.budget)),
            ("concurrency", f"{self.sequences:,}", f"full sequences of {self.context:,} tokens at once"),
            ("context", f"{self.largest_context:,}", "most tokens of one sequence alone"),
        ]
        name, size = max(len(r[0]) for r in rows), max(len(r[1]) for r in rows)
        return "\n".join(f"{n:<{name}}  {b:>{size}}  {w}" for n, b, w in rows)

    def error(self) -> MemoryBudgetError:
        """What to raise before loading: the table, and what would fit."""
        ways = [f"  {a}" for a in self.alternatives]
        advice = ["any one of these fits:", *ways] if ways else ["no option alone or in a pair makes it fit"]
        return MemoryBudgetError(
            "\n".join([f"a sequence of {self.context:,} tokens does not fit the budget", str(self), *advice]),
            needed=self.total,
            available=self.budget.bytes,
            holders=self.holders(),
            largest_context=self.largest_context,
        )


def _origin(budget: Budget) -> str:
    if budget.fraction is not None and budget.total is not None:
        return f"memory_fraction {budget.fraction:g} of {human(budget.total)}"
    return "memory_budget" if budget.total is None else f"memory_budget, of {human(budget.total)}"


def plan(needs: Needs, budget: Budget | int) -> MemoryPlan:
    """The table for ``needs`` within ``budget``; where one full sequence does not fit, with the alternatives."""
    budget = Budget(budget) if isinstance(budget, int) else budget
    made = _plan(needs, budget)
    return made if made.fits else replace(made, alternatives=_alternatives(needs, budget))


def _plan(needs: Needs, budget: Budget) -> MemoryPlan:
    context = needs.max_model_len
    each, fixed = needs.cache[needs.kv_cache_dtype](context), needs.fixed(context)
    left = budget.bytes - fixed
    sequences = 0 if left < each else min(needs.max_batch_size, left // each if each else needs.max_batch_size)
    held = max(sequences, 1)
    stored = "as stored" if needs.quantize == STORED else needs.quantize
    lines = (
        MemoryLine("weights", needs.weights[needs.quantize], f"parameters, {stored}"),
        MemoryLine("kv_cache", held * each, f"{held:,} x {context:,} tokens, {needs.kv_cache_dtype}"),
        MemoryLine("workspace", needs.step(context), "the largest step"),
        MemoryLine("runtime", needs.runtime, "tokenizer, threads, fragmentation"),
    )
    return MemoryPlan(lines, budget, context, sequences, _largest(needs, budget, needs.longest or context))


def _largest(needs: Needs, budget: Budget, limit: int) -> int:
    """Most tokens of one sequence, in whole blocks unless it is the limit; 0 where not one block fits."""
    if needs.least(limit) <= budget.bytes:
        return limit
    low, high = 0, -(-limit // needs.block_size)  # in blocks: the most that fits, the least that does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if needs.least(middle * needs.block_size) <= budget.bytes else (low, middle)
    return low * needs.block_size


Change = tuple[dict[str, int | float | str], Needs, Budget]
"""Options, and what they make of needs and budget."""


def _alternatives(needs: Needs, budget: Budget) -> tuple[Alternative, ...]:
    """Single options that suffice; a smaller cache with smaller weights where only a shorter context would; pairs with
    a shorter context where nothing else does; more memory. Each was planned again."""
    caches, weights = _smaller_cache(needs, budget), _quantised(needs, budget)
    found = _verified([*_shorter(needs, budget), *caches, *weights])
    if all("max_model_len" in a.options for a in found):
        found += _verified([_both(a, b) for a, b in product(caches, weights)])
    if not found:
        found = _verified(
            [
                ({**options, **more}, again, same)
                for options, changed, _ in (*caches, *weights)
                for more, again, same in _shorter(changed, budget)
            ]
        )
    return (*found, *_verified(_more_memory(needs, budget)))


def _verified(changes: list[Change]) -> list[Alternative]:
    """Those that fit when planned again."""
    planned = [Alternative(options, _plan(needs, budget)) for options, needs, budget in changes]
    return [a for a in planned if a.plan.fits]


def _both(a: Change, b: Change) -> Change:
    (first, needs, budget), (second, other, _) = a, b
    return {**first, **second}, replace(needs, quantize=other.quantize), budget


def _shorter(needs: Needs, budget: Budget) -> list[Change]:
    """The largest context of whole blocks; an engine takes at least 2 tokens."""
    tokens = _largest(needs, budget, needs.max_model_len)
    if not 2 <= tokens < needs.max_model_len:
        return []
    return [({"max_model_len": tokens}, replace(needs, max_model_len=tokens), budget)]


def _smaller_cache(needs: Needs, budget: Budget) -> list[Change]:
    if "int8" not in needs.cache or needs.kv_cache_dtype == "int8":
        return []
    return [({"kv_cache_dtype": "int8"}, replace(needs, kv_cache_dtype="int8"), budget)]


def _quantised(needs: Needs, budget: Budget) -> list[Change]:
    """Less loss first."""
    now = needs.weights[needs.quantize]
    names = [n for n in ("int8", "int4") if n != needs.quantize and needs.weights.get(n, now) < now]
    return [({"quantize": n}, replace(needs, quantize=n), budget) for n in names]


def _more_memory(needs: Needs, budget: Budget) -> list[Change]:
    """The least budget that does, if the device has so much: as a share, to two digits, where it was given as one."""
    needed = needs.least(needs.max_model_len)
    if budget.total is not None and needed > budget.total:
        return []
    if budget.fraction is None or budget.total is None:
        return [({"memory_budget": needed}, needs, Budget(needed, budget.total))]
    hundredths = -(-needed * 100 // budget.total)
    if Budget.share(budget.total, hundredths / 100).bytes < needed:  # the last bit of the quotient
        hundredths += 1
    fraction = hundredths / 100
    return [] if fraction > 1.0 else [({"memory_fraction": fraction}, needs, Budget.share(budget.total, fraction))]
