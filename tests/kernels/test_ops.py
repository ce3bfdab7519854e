"""Every op × implementation × generated inputs against the op's reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepseek_flash.errors import ConfigError
from deepseek_flash.kernels.op import Case, Impl, Op
from deepseek_flash.kernels.plan import AttentionPlan
from deepseek_flash.kernels.registry import IMPLS, OPS, candidates, op, select

BINDS = ("bind_packed", "bind_stack")
"""Ops that make handles, which other ops take."""


def _cases(name: str) -> list[Case]:
    return list(op(name).inputs(torch.Generator().manual_seed(1)))


def _matrix() -> list[Any]:
    return [
        pytest.param(op(name), impl, case, id=f"{name}-{impl.name}-{case.label}")
        for name in OPS
        for device in IMPLS
        for impl in candidates(device, name)[:-1]
        for case in _cases(name)
    ]


def _fresh(args: tuple[Any, ...], writes: tuple[int, ...] = ()) -> list[Any]:
    """Arguments that nobody has written to, views still strided as they were."""
    out: list[Any] = []
    for i, a in enumerate(args):
        if isinstance(a, AttentionPlan):
            a = AttentionPlan(a.cu_q, a.context_lens, a.block_table, a.slots)
        elif i in writes:
            a = _copy(a)
        out.append(a)
    return out


def _copy(a: Any) -> Any:
    """A tensor, or caches of layers, strided as before in memory of its own."""
    if isinstance(a, tuple):
        return tuple(_copy(x) for x in a)
    base = a._base.clone() if a._base is not None else a.clone()
    return base.as_strided(a.shape, a.stride(), a.storage_offset())


def _flat(values: Any) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values]
    return [t for v in values for t in _flat(v)]


def _run(o: Op, fn: Any, case: Case) -> list[torch.Tensor]:
    """What it returned and what it wrote."""
    args = _fresh(case.args, o.writes)
    result = fn(*args)
    returned = list(result) if isinstance(result, tuple) else [] if result is None else [result]
    return [*returned, *(t for i in o.writes for t in _flat(args[i]))]


def _close(o: Op, got: torch.Tensor, want: torch.Tensor) -> bool:
    nan = torch.isnan(want)
    if got.shape != want.shape or not torch.equal(torch.isnan(got), nan):
        return False
    difference = (got - want).masked_fill(nan, 0).abs().max().item()
    return difference <= o.tolerance * want.masked_fill(nan, 0).abs().max().item()


@pytest.mark.parametrize(("o", "impl", "case"), _matrix())
def test_implementation_equals_reference(o: Op, impl: Impl, case: Case) -> None:
    reason = impl.unavailable()
    if reason:
        pytest.skip(reason)
    if o.name in BINDS:
        assert impl.fn(*case.args) is not None
        return
    if o.name == "pack_linear":
        assert torch.equal(impl.fn(*case.args).to_dense(), case.args[0])
        return
    for got, want in zip(_run(o, impl.fn, case), _run(o, o.reference, case), strict=True):
        assert _close(o, got, want), f"{(got - want).abs().max()} apart"


@pytest.mark.parametrize("name", [n for n in OPS if n not in ("pack_linear", "argmax", "sample", *BINDS)])
def test_one_per_cent_is_noticed(name: str) -> None:
    o = op(name)
    for case in _cases(name):
        for want in _run(o, o.reference, case):
            assert _close(o, want, want)
            assert not _close(o, want * 1.01, want)


@pytest.mark.parametrize("name", OPS)
def test_cost_is_known_for_every_input(name: str) -> None:
    o = op(name)
    for case in _cases(name):
        cost = o.cost(*case.args)
        assert cost.bytes > 0
        assert cost.flops >= 0


def test_packed_weights_give_the_same_as_plain_ones() -> None:
    k = select("cpu")
    for case in _cases("linear"):
        x, weight, bias = case.args
        assert torch.allclose(k.linear(x, k.pack_linear(weight), bias), k.linear(x, weight, bias), atol=1e-5)


def test_inputs_are_not_changed() -> None:
    k = select("cpu")
    for name in OPS:
        o = op(name)
        for case in _cases(name):
            args = _fresh(case.args, o.writes)
            before = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
            getattr(k, name)(*args)
            for i, (a, b) in enumerate(zip(args, before, strict=True)):
                if isinstance(a, torch.Tensor) and i not in o.writes:
                    assert torch.equal(a.nan_to_num(1e9), b.nan_to_num(1e9)), f"{name} changed argument {i}"


def test_reference_is_forced_by_name() -> None:
    k = select("cpu", "reference")
    assert set(k.describe().values()) == {"reference"}
    assert all(getattr(k, name) is op(name).reference for name in OPS)


def test_describe_names_every_op() -> None:
    described = select("cpu").describe()
    assert list(described) == list(OPS)
    assert described["paged_attention"] in ("native", "torch-cpu")


def test_missing_onednn_falls_back_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepseek_flash.kernels.cpu.linear._ONEDNN_OPS", ("_no_such_op",))
    described = select("cpu").describe()
    assert described["pack_linear"] == "reference (this torch has no mkldnn._no_such_op)"
    assert described["linear"] == "blas (rows are not bit-invariant; this torch has no mkldnn._no_such_op)"


@pytest.mark.parametrize(("device", "prefer"), [("tpu", "auto"), ("cpu", "fastest")])
def test_unknown_choices_are_config_errors(device: str, prefer: str) -> None:
    with pytest.raises(ConfigError, match=r"tpu|fastest"):
        select(device, prefer)
