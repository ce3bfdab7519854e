"""Opening, closing, forking, interrupting, exiting."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import psutil
import pytest

from deepseek_flash import EngineClosed, EngineForked, FlashEngine, ModelNotFound
from tests.support.checkpoints import tiny_llama

LONG: dict[str, Any] = {"max_new_tokens": 400, "ignore_eos": True, "temperature": 0.0}
CALLS: dict[str, Any] = {
    "generate": lambda e: e.generate("x"),
    "stream": lambda e: e.stream("x"),
    "chat": lambda e: e.chat([{"role": "user", "content": "x"}]),
    "submit": lambda e: e.submit("x"),
    "tokenize": lambda e: e.tokenize("x"),
    "detokenize": lambda e: e.detokenize([1]),
    "count_tokens": lambda e: e.count_tokens("x"),
    "apply_chat_template": lambda e: e.apply_chat_template([{"role": "user", "content": "x"}]),
    "score": lambda e: e.score("x"),
    "describe": lambda e: e.describe(),
    "memory_report": lambda e: e.memory_report(),
    "enter": lambda e: e.__enter__(),
}


def python(code: str, *args: str, timeout: float = 90) -> subprocess.CompletedProcess[str]:
    """Run a program in a fresh interpreter."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *args], capture_output=True, text=True, timeout=timeout
    )


@pytest.fixture(scope="module")
def closed(tiny: Path) -> FlashEngine:
    engine = FlashEngine(tiny, max_model_len=64)
    engine.close()
    return engine


@pytest.mark.parametrize("call", CALLS)
def test_every_call_after_close_says_so_at_once(closed: FlashEngine, call: str) -> None:
    """M01, M02: a clear "closed" error, not a hang and not an odd attribute error."""
    with pytest.raises(EngineClosed, match="closed; open a new"):
        CALLS[call](closed)


async def test_async_calls_after_close(closed: FlashEngine) -> None:
    with pytest.raises(EngineClosed):
        await closed.agenerate("x")
    with pytest.raises(EngineClosed):
        await closed.achat([{"role": "user", "content": "x"}])


def test_close_is_idempotent_and_ends_what_runs(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """X05: callers that wait when the engine closes get EngineClosed with their partial answer."""
    monkeypatch.setenv("DEEPSEEK_FLASH_KERNELS", "torch")  # the native kernels would be done before
    engine = FlashEngine(tiny, max_model_len=512)
    stream = engine.submit("never finishes", **LONG)
    errors: list[BaseException] = []

    def read() -> None:
        try:
            stream.result()
        except EngineClosed as e:
            errors.append(e)

    reader = threading.Thread(target=read)
    reader.start()
    time.sleep(0.1)
    engine.close()
    engine.close()
    reader.join(10)
    assert not reader.is_alive()
    assert len(errors) == 1
    assert errors[0].partial.text is not None  # type: ignore[attr-defined]
    assert engine.closed
    assert "closed" in repr(engine)


def test_closing_gives_the_memory_back_though_things_are_still_held(tmp_path: Path) -> None:
    """M01, M02: results, streams, tracebacks, even the engine's own parts are held; the bytes go all the same."""
    tiny_llama(tmp_path, hidden_size=1024, intermediate_size=4096, num_hidden_layers=6, vocab_size=8192)
    process = psutil.Process()
    with FlashEngine(tmp_path, max_model_len=128) as warm_up:  # first use of torch allocates for good
        warm_up.generate("x", max_new_tokens=2)
    gc.collect()
    before = process.memory_info().rss
    engine = FlashEngine(tmp_path, max_model_len=1024)
    results = engine.generate(["a" * 100, "b"], max_new_tokens=4)
    stream = engine.submit("c", **LONG)
    held = [engine._runtime.model, engine._runtime.store, engine._runtime.tenant, results, stream]
    try:
        engine.generate(prompt_token_ids=[10**9])
    except ValueError as e:
        held.append(e.__traceback__)
    loaded = process.memory_info().rss - before
    weights = engine.memory_report().weights
    assert loaded > weights * 0.8
    engine.close()
    with pytest.raises(EngineClosed) as closed:
        stream.result()
    held.append(closed)
    left = process.memory_info().rss - before
    assert left < weights * 0.25, f"{left / 2**20:.0f} MiB of {loaded / 2**20:.0f} stayed"
    assert len(held) == 7


@pytest.mark.skipif(sys.platform == "win32", reason="there the cache's pages are taken at opening")
def test_closing_gives_the_cache_back_though_the_store_is_held(tmp_path: Path) -> None:
    """M01, M02: small weights, a hundred megabytes of used cache; the store, its pools and a result stay held."""
    tiny_llama(tmp_path, num_hidden_layers=4, head_dim=256, num_key_value_heads=4)
    process = psutil.Process()
    with FlashEngine(tmp_path, max_model_len=64) as warm_up:  # first use of torch allocates for good
        warm_up.generate("x", max_new_tokens=2)
    gc.collect()
    engine = FlashEngine(tmp_path, max_model_len=1024, max_batch_size=4, prefill_chunk_size=64)
    opened = process.memory_info().rss
    prompts = [[(7 * i + j * j) % 280 for j in range(1000)] for i in range(4)]
    held = [
        engine._runtime.store,
        *engine._runtime.store.pools,
        engine.generate(prompt_token_ids=prompts, max_tokens=1),
    ]
    cache = 4 * 1000 * 4 * 2 * 4 * 256 * 4  # sequences, tokens, layers, k and v, heads, dimensions, fp32
    used = process.memory_info().rss - opened
    assert used > cache * 0.9
    engine.close()
    left = process.memory_info().rss - opened
    assert left < cache * 0.25, f"{left / 2**20:.0f} MiB of {used / 2**20:.0f} stayed"
    assert held


def test_dropping_the_engine_closes_it(tiny: Path) -> None:
    """Z01: no close(), no with: garbage collection ends the thread."""
    threads = threading.active_count()
    engine = FlashEngine(tiny, max_model_len=64)
    assert threading.active_count() == threads + 1
    loop, ref = engine._runtime.loop, weakref.ref(engine)
    del engine
    gc.collect()
    assert ref() is None
    assert loop.closed
    assert threading.active_count() == threads


def test_copies_and_pickles(engine: FlashEngine) -> None:
    """Z03: a copy is the same engine; pickling says why not."""
    assert copy.copy(engine) is engine
    assert copy.deepcopy({"llm": engine})["llm"] is engine
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(engine)
    stream = engine.submit("copy me", max_new_tokens=2)
    assert copy.deepcopy([stream])[0] is copy.copy(stream) is stream
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(stream)
    done = stream.result()
    assert pickle.loads(pickle.dumps(done)) == copy.deepcopy(done) == done


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_gets_a_clear_error(engine: FlashEngine) -> None:
    """N03: every call in the child raises at once; the parent goes on; the child exits cleanly."""
    stream = engine.submit("in the parent", **LONG)
    pid = os.fork()
    if pid == 0:  # nothing of pytest may run in the child
        code = 0
        for call in CALLS.values():
            try:
                call(engine)
                code = 1
            except EngineForked:
                continue
            except BaseException:
                code = 2
        try:
            stream.result(timeout=5)
            code = 3
        except EngineForked:
            engine.close()
        os._exit(code)
    deadline = time.time() + 30
    while (done := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        assert time.time() < deadline, "the child hangs"
        time.sleep(0.02)
    assert os.waitstatus_to_exitcode(done[1]) == 0
    stream.cancel()
    assert len(engine.generate("still fine", max_new_tokens=3, ignore_eos=True).token_ids) == 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_an_engine_can_be_opened_in_a_forked_child(tiny: Path) -> None:
    """N03: as the error says. OpenMP's workers are gone in the child, and whoever forked would wait for them."""
    done = python(
        """
        import os, sys, torch
        from deepseek_flash import FlashEngine, ModelNotFound
        def answer():
            with FlashEngine(sys.argv[1], max_model_len=64) as engine:
                return engine.generate("x", max_new_tokens=5, temperature=0.0, ignore_eos=True).token_ids
        expect = answer()
        many = torch.randn(400, 400)
        torch.nn.functional.linear(many, many).exp()
        pid = os.fork()
        if pid == 0:
            try:
                FlashEngine("/nowhere/at/all")
            except ModelNotFound:
                os._exit(0 if answer() == expect else 1)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        """,
        str(tiny),
        timeout=60,
    )
    assert done.stdout.split() == ["0"], done.stderr


@pytest.mark.parametrize(
    "ending",
    [
        pytest.param("", marks=pytest.mark.slow),
        "engine.generate('x', max_new_tokens=2); import builtins; builtins.keep = engine",
        "s = engine.submit('x', max_new_tokens=2000, ignore_eos=True)",
        pytest.param(
            "it = iter(engine.stream('x', max_new_tokens=2000, ignore_eos=True)); next(it)", marks=pytest.mark.slow
        ),
        "import threading; threading.Thread(target=engine.generate, args=('x',), daemon=True).start()",
        "import threading; threading.Thread(target=engine.generate, args=('x',)).start(); engine.cycle = engine",
        pytest.param(
            "from concurrent.futures import ThreadPoolExecutor as P; list(P(8).map(engine.generate, ['x', 'y'] * 20))",
            marks=pytest.mark.slow,
        ),
        pytest.param("engine.close()", marks=pytest.mark.slow),
    ],
)
def test_interpreter_exit_never_hangs_or_prints(tiny: Path, ending: str) -> None:
    """Z01, T02: leave an engine in any state; the process ends silently with status 0."""
    done = python(
        f"""
        import sys
        from deepseek_flash import FlashEngine
        engine = FlashEngine(sys.argv[1], max_model_len=1024)
        {ending}
        """,
        str(tiny),
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.skipif(sys.platform == "win32", reason="signals are sent the POSIX way")
def test_ctrl_c_interrupts_and_leaves_the_engine_usable(tiny: Path) -> None:
    """X03: KeyboardInterrupt comes out at once, the request is gone, the next call works."""
    done = python(
        """
        import os, signal, sys, threading, time
        from deepseek_flash import FlashEngine
        LONG = dict(max_new_tokens=1000, ignore_eos=True, temperature=0.0)
        engine = FlashEngine(sys.argv[1], max_model_len=1024)
        for call in (
            lambda: engine.generate("x", **LONG),
            lambda: list(engine.stream("x", **LONG)),
            lambda: engine.submit("x", **LONG).result(),
        ):
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            try:
                while True:
                    call()
            except KeyboardInterrupt:
                print("interrupted")
            print(len(engine.generate("again", max_new_tokens=3, ignore_eos=True).token_ids))
            for _ in range(500):
                if engine.memory_report().kv_cache.used_blocks == 0:
                    print("free")
                    break
                time.sleep(0.01)
        print(engine.describe()["counters"]["requests_cancelled"])
        """,
        str(tiny),
    )
    assert (done.returncode, done.stdout.split()) == (0, [*["interrupted", "3", "free"] * 3, "3"]), done.stderr


def test_signal_handlers_and_torch_defaults_stay_as_they_were(tiny: Path) -> None:
    """N08: importing and opening changes nothing global."""
    done = python(
        """
        import signal, sys, torch, asyncio, multiprocessing
        def state():
            return (signal.getsignal(signal.SIGINT), torch.get_default_dtype(), torch.get_num_threads(),
                    torch.is_grad_enabled(), torch.initial_seed(), asyncio.get_event_loop_policy().__class__,
                    multiprocessing.get_start_method(allow_none=True), sys.excepthook,
                    torch.is_inference_mode_enabled())
        torch.manual_seed(123)
        before = state()
        from deepseek_flash import FlashEngine
        with FlashEngine(sys.argv[1], max_model_len=64) as engine:
            engine.generate("x", max_new_tokens=3, temperature=1.0)
            inside = torch.rand(1).item()
        torch.manual_seed(123)
        print(before == state(), inside == torch.rand(1).item())
        """,
        str(tiny),
    )
    assert done.stdout.split() == ["True", "True"], done.stderr


def test_seeds_hold_across_processes_and_fresh_ones_differ(tiny: Path) -> None:
    """G08: a seed gives the same tokens in every process; without one, the first answer of each process is new."""
    told = [
        python(
            """
            import sys
            from deepseek_flash import FlashEngine
            with FlashEngine(sys.argv[1], max_model_len=64) as engine:
                print(engine.generate("roll", max_new_tokens=16, ignore_eos=True).token_ids)
                print(engine.generate("roll", max_new_tokens=16, ignore_eos=True, seed=11).token_ids)
            """,
            str(tiny),
        ).stdout.splitlines()
        for _ in range(2)
    ]
    assert told[0][1] == told[1][1]
    assert len({told[0][0], told[1][0], told[0][1]}) == 3


@pytest.mark.parametrize(
    "order",
    [
        pytest.param("import torch, deepseek_flash", marks=pytest.mark.slow),
        pytest.param("import deepseek_flash, torch", marks=pytest.mark.slow),
        "import transformers, torch",
    ],
)
def test_import_order_does_not_matter(tiny: Path, order: str) -> None:
    """N04: torch before or after us. (Every other test here is one more order.)"""
    done = python(
        f"""
        import sys
        {order}
        from deepseek_flash import FlashEngine
        with FlashEngine(sys.argv[1], max_model_len=64) as e:
            print(e.generate("x", max_new_tokens=3, temperature=0.0, ignore_eos=True).token_ids)
        """,
        str(tiny),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(",") == 2


def test_a_failed_opening_leaves_nothing_behind(tmp_path: Path) -> None:
    threads = threading.active_count()
    with pytest.raises(ModelNotFound):
        FlashEngine(tmp_path / "nowhere")
    tiny_llama(tmp_path)
    with open(tmp_path / "model.safetensors", "r+b") as f:
        f.truncate(1000)
    with pytest.raises(Exception, match=r"model\.safetensors") as e:
        FlashEngine(tmp_path)
    assert type(e.value).__module__ == "deepseek_flash.errors"
    assert threading.active_count() == threads


@pytest.mark.skipif(not hasattr(signal, "SIGTERM") or sys.platform == "win32", reason="POSIX signals")
def test_sigterm_ends_the_process(tiny: Path) -> None:
    """The engine installs no handlers: a plain kill ends a busy process."""
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys\nfrom deepseek_flash import FlashEngine\ne = FlashEngine(sys.argv[1], max_model_len=1024)\n"
            "print('up', flush=True)\nwhile True: e.generate('x', max_new_tokens=900, ignore_eos=True)",
            str(tiny),
        ],
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    child.stdout.readline()
    child.terminate()
    assert child.wait(20) == -signal.SIGTERM
    child.stdout.close()


@pytest.mark.skipif(sys.platform == "win32", reason="signals are sent the POSIX way")
def test_X03_ctrl_c_stops_an_opening_at_once() -> None:
    """The worker that loads is stopped too, not left to finish in the background."""
    done = python(
        """
        import os, signal, threading, time
        from deepseek_flash.runtime.fresh import on_fresh_thread
        beats = []
        def load():
            while True:
                beats.append(time.sleep(0.001))
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            on_fresh_thread(load)
        except KeyboardInterrupt:
            count = len(beats)
            time.sleep(0.05)
            print("interrupted", count > 0, len(beats) == count)
        """
    )
    assert (done.stdout.split(), done.stderr) == (["interrupted", "True", "True"], "")
