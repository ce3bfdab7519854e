"""Fill a model from a checkpoint, completely: every parameter placed, every tensor used, every shape equal."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from deepseek_flash.errors import CheckpointError, FlashError, MemoryBudgetError
from deepseek_flash.kernels.cpu.packer import best_packer
from deepseek_flash.loading.flash import FlashFolder, flash_rules
from deepseek_flash.loading.packed import Part, parts_of, read_part
from deepseek_flash.loading.rules import Rule
from deepseek_flash.loading.source import TensorIndex, TensorSource
from deepseek_flash.memory.probe import host_memory


@dataclass(slots=True)
class _Slot:
    """A parameter or buffer, and every place of the model that holds it (more than one when it is tied)."""

    tensor: torch.Tensor
    places: list[tuple[nn.Module, str]]

    def put(self, value: torch.Tensor) -> None:
        """Let ``value`` be the tensor everywhere."""
        is_parameter = isinstance(self.tensor, nn.Parameter)
        new = nn.Parameter(value, requires_grad=False) if is_parameter else value
        for module, name in self.places:
            (module._parameters if is_parameter else module._buffers)[name] = new  # type: ignore[assignment]
        self.tensor = new


def load_model_weights(
    model: nn.Module,
    rules: Sequence[Rule],
    source: TensorSource,
    dtype: torch.dtype,
    *,
    packed: bool = True,
    quantize: str | None = None,
) -> None:
    """Place the checkpoint's tensors into ``model`` (on the meta device or not).

    Modules that have a method ``take_weight`` get their ``weight`` packed, as it is stored or as ``quantize``
    (``int4``, ``int8``) says; ``packed=False`` and everything else means tensors of ``dtype``.

    Names and shapes are all compared first; CheckpointError lists what is missing, unexpected or mismatched, and
    MemoryBudgetError says that the weights need more memory than is free: then nothing has been allocated. A
    checkpoint tensor must be used by a rule or match one of the model's ``ignore`` patterns (full matches).
    Memory: the weights and one tensor. Afterwards every module that has an ``after_load()`` method gets one call,
    inner modules first.
    """
    slots, rules, active = _fit(model, rules, source)
    plans = {r.target: parts_of(r.target, r.sources, source, quantize) for r in active if packed and _packs(slots, r)}
    needed = _check_memory(slots, plans, dtype)
    try:
        _load(model, slots, rules, active, source, dtype, plans)
    except (MemoryError, RuntimeError) as e:
        # The system can give less than it said, to a process with a limit of its own (ulimit -v).
        if isinstance(e, FlashError) or not (isinstance(e, MemoryError) or "allocate memory" in str(e)):
            raise
        raise MemoryBudgetError(f"the system refused memory for {_gib(needed)} of weights", needed=needed) from None


def _load(
    model: nn.Module,
    slots: dict[str, _Slot],
    rules: Sequence[Rule],
    active: Sequence[Rule],
    source: TensorSource,
    dtype: torch.dtype,
    plans: Mapping[str, list[Part]],
) -> None:
    done = {r.target for r in active}
    for rule in rules:
        slot = slots.get(rule.target)
        if slot is not None and rule.target not in plans:
            slot.put(_room(slot.tensor, dtype) if rule.target in done else torch.zeros(slot.tensor.shape, dtype=dtype))
    pack = best_packer()
    for rule in active:
        if rule.target in plans:
            ((module, _),) = slots.pop(rule.target).places
            cast(Any, module).take_weight(tuple(read_part(part, source, pack) for part in plans[rule.target]))
        else:
            _fill(slots[rule.target].tensor.detach(), rule, source)
    left = [name for name, slot in slots.items() if slot.tensor.is_meta]
    if left:
        raise CheckpointError("tensors of the model have neither a rule nor a value", missing=left)
    for module in reversed(list(model.modules())):
        hook = getattr(module, "after_load", None)
        if callable(hook):
            cast(Callable[[], None], hook)()


def storage_plan(
    model: nn.Module, rules: Sequence[Rule], source: TensorIndex, quantize: Callable[[str], str | None], group: int
) -> tuple[dict[str, list[Part]], list[tuple[Rule, torch.Size]]]:
    """What ``load_model_weights`` would keep of a checkpoint, to be counted, or written to a file instead: the parts
    of packed weights by target, then the other tensors' rules and shapes. ``quantize`` decides for each target."""
    slots, _, active = _fit(model, rules, source)
    parts = {
        r.target: parts_of(r.target, r.sources, source, quantize(r.target), group) for r in active if _packs(slots, r)
    }
    return parts, [(r, slots[r.target].tensor.shape) for r in active if r.target not in parts]


def read_floats(rule: Rule, shape: torch.Size, source: TensorSource) -> torch.Tensor:
    """A tensor that is not packed, fp32."""
    out = torch.empty(shape)
    _fill(out, rule, source)
    return out


def _fit(
    model: nn.Module, rules: Sequence[Rule], source: TensorIndex
) -> tuple[dict[str, _Slot], Sequence[Rule], list[Rule]]:
    """The model's tensors, its rules for this source, and those that have something to place, all checked."""
    if isinstance(source, FlashFolder):
        rules = flash_rules(rules, source)
    slots = _slots(model)
    present = set(source.names())
    active = [r for r in rules if not (r.optional and present.isdisjoint(r.sources))]
    _check(model, slots, rules, active, source)
    return slots, rules, active


def _packs(slots: dict[str, _Slot], rule: Rule) -> bool:
    """Whether the target is a weight of a module that takes it packed."""
    places = slots[rule.target].places
    return len(places) == 1 and places[0][1] == "weight" and hasattr(places[0][0], "take_weight")


def _slots(model: nn.Module) -> dict[str, _Slot]:
    """Every parameter and buffer by dotted name; tied names share one slot."""
    by_identity: dict[int, _Slot] = {}
    out: dict[str, _Slot] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None:
                continue
            slot = by_identity.setdefault(id(tensor), _Slot(tensor, []))
            slot.places.append((module, name))
            out[f"{prefix}.{name}" if prefix else name] = slot
    return out


def _check(
    model: nn.Module, slots: dict[str, _Slot], rules: Sequence[Rule], active: Sequence[Rule], source: TensorIndex
) -> None:
    """CheckpointError unless rules, model and checkpoint fit together exactly."""
    names = source.names()
    present = set(names)
    missing = [s for r in active for s in r.sources if s not in present]
    used = {s for r in rules for s in r.sources}
    patterns = [re.compile(p) for p in cast(Iterable[str], getattr(model, "ignore", ()))]
    unexpected = [n for n in names if n not in used and not any(p.fullmatch(n) for p in patterns)]
    mismatched = [m for r in active if present.issuperset(r.sources) for m in _mismatch(slots, r, source)]
    mismatched += [f"{t} (two rules)" for t, count in Counter(r.target for r in rules).items() if count > 1]
    targets = {id(slots[r.target]) for r in rules if r.target in slots}
    persistent = model.state_dict(keep_vars=True).keys()
    missing += [f"{n} (no rule)" for n in persistent if n in slots and id(slots[n]) not in targets]
    if missing or unexpected or mismatched:
        raise CheckpointError(
            f"the checkpoint does not fit {type(model).__name__}",
            missing=missing,
            unexpected=unexpected,
            mismatched=mismatched,
        )


def _check_memory(slots: dict[str, _Slot], plans: Mapping[str, list[Part]], dtype: torch.dtype) -> int:
    """Bytes that the model's tensors will take; MemoryBudgetError when they are not free."""
    unique = {id(s): s.tensor for name, s in slots.items() if name not in plans}.values()
    needed, available = sum(t.numel() * dtype.itemsize for t in unique if t.is_meta), host_memory().available
    needed += sum(part.nbytes for parts in plans.values() for part in parts)
    if needed > available:
        raise MemoryBudgetError(
            f"the weights need {_gib(needed)}{'' if plans else ' as ' + str(dtype).removeprefix('torch.')}, but "
            f"{_gib(available)} are free; use a smaller model, or free memory",
            needed=needed,
            available=available,
        )
    return needed


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"


def _mismatch(slots: dict[str, _Slot], rule: Rule, source: TensorIndex) -> list[str]:
    shapes = [source.shape(s) for s in rule.sources]
    if rule.target not in slots:
        return [f"{', '.join(rule.sources)} (the model has no {rule.target})"]
    want = tuple(slots[rule.target].tensor.shape)
    if rule.combine == "copy":
        got = shapes[0]
        fits = got == want
    else:
        got = (sum(s[0] for s in shapes if s), *shapes[0][1:])
        fits = got == want and all(len(s) == len(want) and s[1:] == want[1:] for s in shapes)
    given = " + ".join(f"{name} {list(shape)}" for name, shape in zip(rule.sources, shapes, strict=True))
    return [] if fits else [f"{given} for {rule.target} {list(want)}"]


def _room(given: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Where a target's values go. All of them are allocated before any is read: between two reads, a buffer that is
    freed again would leave a hole (glibc seldom reuses one for aligned memory), half the weights for bf16 files."""
    return torch.empty(given.shape, dtype=dtype) if given.is_meta else given.detach().to(dtype).contiguous()


def _fill(out: torch.Tensor, rule: Rule, source: TensorSource) -> None:
    row = 0
    for name in rule.sources:
        if rule.combine == "copy":
            source.read_into(name, out)
        else:
            count = source.shape(name)[0]
            source.read_into(name, out[row : row + count])
            row += count
