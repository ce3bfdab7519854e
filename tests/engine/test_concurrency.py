"""Threads, event loops, sharing, preemption: results never depend on company."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from deepseek_flash import Completion, ContextLengthError, FlashEngine, SamplingParams, Stream
from tests.support.engines import open_engine

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}


def test_many_threads_equal_one_after_another(engine: FlashEngine) -> None:
    """T01, T03, T04, T05: one engine, twelve threads, the same answers, nobody mixed up."""
    prompts = [f"thread {i} asks about {'something ' * (i % 5)}" for i in range(24)]
    alone = [engine.generate(p, **GREEDY).token_ids for p in prompts]
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(lambda p: engine.generate(p, **GREEDY).token_ids, prompts))
    assert together == alone


def test_every_kind_of_call_at_once(engine: FlashEngine) -> None:
    """T01, T05: completions, chats, streams, scores, tokenising, cancelled requests: each gets its own."""
    chat = [{"role": "user", "content": "hello from <|im_end|> me"}]

    def cancelled(i: int) -> Any:
        stream = engine.submit(f"never mind {i}", **{**GREEDY, "max_new_tokens": 300})
        next(iter(stream))
        stream.cancel()
        return stream.result().token_ids[:1]

    calls: list[Callable[[int], Any]] = [
        lambda i: engine.generate(f"generate {i % 3}", **GREEDY).text,
        lambda i: engine.chat(chat, **GREEDY).token_ids,
        lambda i: [d.text for d in engine.stream(f"stream {i % 2}", **GREEDY)],
        lambda i: [c.token_ids for c in engine.generate(f"n {i % 2}", n=2, seed=i % 2, max_new_tokens=9).choices],
        lambda i: engine.detokenize(engine.tokenize(f"你好 {i} <|im_end|>"), skip_special_tokens=False),
        lambda i: engine.apply_chat_template(chat, tokenize=True),
        lambda i: [round(p, 3) for p in engine.score("score this long enough text").logprobs[1:]],
        cancelled,
    ]
    work = [(calls[i % len(calls)], i) for i in range(80)]
    alone = [call(i) for call, i in work]
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(lambda w: w[0](w[1]), work))
    assert together == alone


def test_any_mix_of_loops_and_threads(engine: FlashEngine) -> None:
    """N05, N07: sync calls, several asyncio.run, loops in threads, sync inside a running loop."""
    expect = engine.generate("loops", **GREEDY).token_ids

    async def ask() -> tuple[int, ...]:
        return (await engine.agenerate("loops", **GREEDY)).token_ids

    async def inside_a_loop() -> tuple[int, ...]:
        return engine.generate("loops", **GREEDY).token_ids

    assert asyncio.run(ask()) == expect
    assert asyncio.run(inside_a_loop()) == expect
    assert engine.generate("loops", **GREEDY).token_ids == expect
    assert asyncio.run(ask()) == expect
    got: list[tuple[int, ...]] = []
    threads = [threading.Thread(target=lambda: got.append(asyncio.run(ask()))) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert got == [expect] * 4


def test_an_event_loop_that_is_gone_disturbs_nobody(engine: FlashEngine) -> None:
    """N05: a loop that stops and closes while its task still waits; others are served, and the request goes on."""
    stream = engine.submit("waits", **{**GREEDY, "max_new_tokens": 200})
    other = engine.submit("loops", **{**GREEDY, "max_new_tokens": 200})

    async def wait() -> None:
        await stream

    loop = asyncio.new_event_loop()
    task = loop.create_task(wait())
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    assert len(other.result().token_ids) == 200
    assert len(stream.result().token_ids) == 200
    assert asyncio.run(again(stream)).token_ids == stream.result().token_ids
    task.get_coro().close()  # type: ignore[union-attr]
    task._log_destroy_pending = False  # type: ignore[attr-defined]


async def again(stream: Stream) -> Completion:
    return await stream


def test_sixteen_requests_read_a_shared_prefix_once(tiny: Path) -> None:
    prefix = [(7 * i) % 250 for i in range(320)]
    with open_engine(tiny, max_model_len=512, max_batch_size=16, prefill_chunk_size=64) as engine:
        alone = [engine.generate(prompt_token_ids=[*prefix, i, i + 1], **GREEDY).token_ids for i in range(2)]
    with open_engine(tiny, max_model_len=512, max_batch_size=16, prefill_chunk_size=64) as engine:
        many = engine.generate(prompt_token_ids=[[*prefix, i, i + 1] for i in range(16)], **GREEDY)
        computed = engine.describe()["counters"]["tokens_computed"]
    assert [c.token_ids for c in many[:2]] == alone
    assert sorted(c.usage.cached_tokens for c in many) == [0] + [320] * 15
    # the prefix once, sixteen tails of two, sixteen answers of which the last token is never fed back
    assert computed == 320 + 16 * 2 + 16 * (12 - 1)


def test_running_requests_keep_producing_during_a_long_prefill(tiny: Path) -> None:
    with open_engine(tiny, max_model_len=900, max_batch_size=4, prefill_chunk_size=32) as engine:
        order: list[str] = []
        talker = engine.submit("talk", temperature=0.0, max_new_tokens=200, ignore_eos=True)
        iterator = iter(talker)
        next(iterator)
        reader = engine.submit("r" * 640, temperature=0.0, max_new_tokens=1)
        waiter = threading.Thread(target=lambda: (reader.result(), order.append("long prompt read")))
        waiter.start()
        order.extend("token" for _ in iterator)
        waiter.join()
        between = order[: order.index("long prompt read")]
    assert between.count("token") >= 10


@pytest.mark.parametrize("kv_blocks", [14, 20, 31])
def test_preemption_never_changes_tokens(tiny: Path, kv_blocks: int) -> None:
    """D07, D08: a pool far too small for the crowd; the youngest yields and resumes with the same tokens."""
    prompts = [[(i * 31 + j) % 300 for j in range(20 + 9 * i)] for i in range(8)]
    params = [SamplingParams(seed=i, max_new_tokens=60, ignore_eos=True, repetition_penalty=1.1) for i in range(8)]
    with open_engine(tiny, max_model_len=220, max_batch_size=8, prefill_chunk_size=48) as roomy:
        expect = [roomy.generate(prompt_token_ids=p, params=s).token_ids for p, s in zip(prompts, params, strict=True)]
    with open_engine(tiny, kv_blocks=kv_blocks, max_model_len=220, max_batch_size=8, prefill_chunk_size=48) as tight:
        got = tight.generate(prompt_token_ids=prompts, params=params)
        assert sum(c.cache.preemptions for c in got) > 0
        report = tight.memory_report()
    assert [c.token_ids for c in got] == expect
    assert report.kv_cache.used_blocks == 0


def test_what_can_never_fit_is_refused_at_once(tiny: Path) -> None:
    with open_engine(tiny, kv_blocks=4, max_batch_size=4) as engine:
        limit = engine.describe()["limits"]["max_model_len"]
        assert limit <= 64
        with pytest.raises(ContextLengthError, match=str(limit)):
            engine.generate(prompt_token_ids=[5] * 65)
        assert engine.generate(prompt_token_ids=[5] * 30, **GREEDY).finish_reason == "length"


@pytest.mark.parametrize("caching", [True, False])
def test_cache_on_and_off_give_the_same_tokens(tiny: Path, caching: bool) -> None:
    """K01, K02, K04, K05: cold, warm, an exact hit, and a hit that ends mid-prompt."""
    document = "a shared document that is quite a few blocks long when every byte is a token or nearly so. " * 2
    prompts = [document + tail for tail in ("", "first?", "second?", "")]
    with open_engine(tiny, max_model_len=512, enable_prefix_caching=caching) as engine:
        got = [engine.generate(p, **GREEDY) for p in prompts]
        assert [c.usage.cached_tokens > 0 for c in got] == [False, caching, caching, caching]
    with open_engine(tiny, max_model_len=512, enable_prefix_caching=False) as engine:
        assert [c.token_ids for c in got] == [engine.generate(p, **GREEDY).token_ids for p in prompts]


def test_salts_do_not_share(tiny: Path) -> None:
    """Two engines with different salts give the same answers from different keys."""
    answers = []
    for salt in ("a", "b"):
        with open_engine(tiny, max_model_len=256, cache_salt=salt) as engine:
            answers.append(engine.generate("salted prompt", **GREEDY).token_ids)
    assert answers[0] == answers[1]


def test_chunk_block_and_batch_sizes_never_change_tokens(tiny: Path) -> None:
    prompts = [[(i * 17 + j * 3) % 300 for j in range(n)] for i, n in enumerate((1, 15, 16, 17, 100, 230))]
    seen = set()
    for chunk, block, batch in ((512, 16, 8), (7, 16, 3), (64, 1, 6), (33, 32, 1), (100, 5, 2)):
        with open_engine(
            tiny, max_model_len=300, prefill_chunk_size=chunk, block_size=block, max_batch_size=batch
        ) as engine:
            seen.add(tuple(c.token_ids for c in engine.generate(prompt_token_ids=prompts, **GREEDY)))
    assert len(seen) == 1


def test_two_engines_in_one_process(tiny: Path) -> None:
    """M01: engines are independent; closing one leaves the other alone."""
    with open_engine(tiny, max_model_len=128) as a, open_engine(tiny, max_model_len=128) as b:
        first = a.generate("both", **GREEDY).token_ids
        assert b.generate("both", **GREEDY).token_ids == first
        a.close()
        assert b.generate("both", **GREEDY).token_ids == first


def test_steps_stay_flat_over_many_requests(engine: FlashEngine) -> None:
    """Z04, Z05, A05: hundreds of one-token requests leave nothing behind in the engine."""
    tenant = engine._runtime.tenant
    for start in range(0, 300, 50):
        engine.generate([f"request {start + i}" for i in range(50)], max_new_tokens=1, temperature=0.0)
    assert not tenant._live
    assert not tenant._by_sequence
    assert engine.memory_report().kv_cache.used_blocks == 0
