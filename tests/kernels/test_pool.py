"""The kernels' threads: idle ones cost nothing, pools do not disturb each other, forks go on alone."""

from __future__ import annotations

import ctypes
import os
import threading
import time

import pytest
import torch

from deepseek_flash.kernels.cpu import lib
from deepseek_flash.kernels.cpu.native import Native
from deepseek_flash.kernels.ops.packed import FORMATS, PackedLinear, random_weight

LIBRARY = lib.load()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason=f"no native kernels: {lib.why_missing()}")


def _layer() -> tuple[PackedLinear, torch.Tensor]:
    gen = torch.Generator().manual_seed(1)
    return PackedLinear((random_weight(gen, FORMATS[0], 640, 256),), None), torch.randn(9, 256, generator=gen)


def test_an_idle_pool_uses_no_processor() -> None:
    layer, x = _layer()
    native = Native(4)
    native.packed_linear(x, layer)
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.4)
    assert time.process_time() - before < 0.1


def test_pools_work_side_by_side_and_end() -> None:
    layer, x = _layer()
    want = Native(1).packed_linear(x, layer)
    wrong: list[int] = []

    def run(threads: int) -> None:
        native = Native(threads)
        wrong.extend(threads for _ in range(150) if not torch.equal(native.packed_linear(x, layer), want))

    workers = [threading.Thread(target=run, args=(n,)) for n in (1, 2, 3, 4)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    assert not wrong


def test_more_threads_than_processors_or_work() -> None:
    layer, x = _layer()
    want = Native(1).packed_linear(x, layer)
    for threads in (5, 16, 64):
        assert torch.equal(Native(threads).packed_linear(x, layer), want)


def test_a_quota_sets_how_many_threads_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = _layer()
    monkeypatch.setattr("deepseek_flash.kernels.cpu.native.processors", lambda: 3)
    assert Native().threads == 3
    assert Native(5).threads == 5  # a wish is a wish
    assert torch.equal(Native().packed_linear(x, layer), Native(1).packed_linear(x, layer))


def test_threads_that_share_a_processor_do_not_wait_by_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether they do is the pool's own answer; what they compute is the same."""
    assert LIBRARY is not None
    spins = LIBRARY.functions.flash_pool_processors
    layer, x = _layer()
    want = Native(1).packed_linear(x, layer)
    for count, looking in ((2, 0), (3, 1), (64, 1)):
        told: list[int] = []

        def note(pool: int, processors: int, told: list[int] = told) -> int:
            told.append(spins(pool, processors))
            return told[-1]

        monkeypatch.setattr("deepseek_flash.kernels.cpu.native.processors", lambda count=count: count)
        monkeypatch.setattr(LIBRARY.functions, "flash_pool_processors", note)
        native = Native(3)
        for pause in (0.0, 0.003) * 10:
            time.sleep(pause)
            assert torch.equal(native.packed_linear(x, layer), want)
        assert told == [looking]
    assert spins(None, 4) == 0


def test_sleeping_workers_are_woken_or_not_waited_for() -> None:
    layer, x = _layer()
    native = Native(3)
    want = Native(1).packed_linear(x, layer)
    for pause in (0.0, 0.001, 0.003, 0.01) * 5:
        time.sleep(pause)
        assert torch.equal(native.packed_linear(x, layer), want)


@pytest.mark.parametrize("threads", [0, -3, 5000])
def test_impossible_pools_are_refused(threads: int) -> None:
    assert LIBRARY is not None
    assert LIBRARY.functions.flash_pool_create(threads) is None
    LIBRARY.functions.flash_pool_destroy(None)
    assert LIBRARY.functions.flash_pool_threads(None) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_computes_without_the_parents_threads() -> None:
    assert LIBRARY is not None
    c = LIBRARY.functions
    pool = c.flash_pool_create(3)
    x, weight, y = (
        (ctypes.c_float * 4096)(*([1.0] * 4096)),
        (ctypes.c_float * 16)(*([1.0] * 16)),
        (ctypes.c_float * 4096)(),
    )
    args = (ctypes.byref(x), 16, ctypes.byref(weight), 0.0, 256, 16, ctypes.byref(y))
    assert c.flash_rms_norm(pool, *args) == 0
    child = os.fork()
    if child == 0:
        done = c.flash_rms_norm(pool, *args) == 0 and abs(y[4095] - 1.0) < 1e-6
        c.flash_pool_destroy(pool)
        os._exit(0 if done else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert c.flash_rms_norm(pool, *args) == 0
    c.flash_pool_destroy(pool)


def test_a_thread_that_lost_its_processor_does_not_stop_the_others() -> None:
    """More spinning threads than processors, as when an embedding model computes beside us."""
    layer, x = _layer()
    want = Native(1).packed_linear(x, layer)
    stop = threading.Event()

    def burn() -> None:
        a = torch.randn(256, 256)
        while not stop.is_set():
            a = (a @ a).clamp_(-1, 1)

    burner = threading.Thread(target=burn)
    burner.start()
    try:
        native = Native(2)
        begin = time.monotonic()
        for _ in range(200):
            assert torch.equal(native.packed_linear(x, layer), want)
        assert time.monotonic() - begin < 30
    finally:
        stop.set()
        burner.join()
