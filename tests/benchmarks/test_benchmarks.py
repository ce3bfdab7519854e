"""The benchmark scripts compute what they say; what they print is measured on demand, never here."""

from __future__ import annotations

import ctypes

import gguf
import numpy as np
import pytest
import torch

from deepseek_flash import FlashEngine
from deepseek_flash.kernels.cpu import build, lib
from deepseek_flash.runtime import runner
from tests.benchmarks import big, quality
from tests.support.checkpoints import tiny_gguf, tiny_llama

needs_compiler = pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")


def test_windows_cover_all_tokens_but_a_lonely_last():
    tokens = list(range(2 * quality.WINDOW + 1))
    assert [len(w) for w in quality.windows(tokens)] == [quality.WINDOW] * 2
    assert [t for w in quality.windows([*tokens, 1]) for t in w] == [*tokens, 1]


def test_scores_are_the_losses_and_the_likeliest():
    logits = torch.randn(300, 50, generator=torch.Generator().manual_seed(0))
    following = torch.arange(300) % 50
    scores = quality.Scores()
    scores.add(logits, following.tolist())
    want = torch.nn.functional.cross_entropy(logits.double(), following, reduction="none")
    torch.testing.assert_close(torch.tensor(scores.lost, dtype=torch.float64), want)
    assert scores.best == logits.argmax(1).tolist()


def test_our_scores_are_those_of_transformers(tmp_path, monkeypatch):
    monkeypatch.setattr(quality, "WINDOW", 24)
    monkeypatch.setattr(runner, "prompt_logprobs", runner.prompt_logprobs)  # put back what by_us replaces
    monkeypatch.setenv("DEEPSEEK_FLASH_KERNELS", "torch")
    folder = tiny_llama(tmp_path / "tiny")
    pieces = quality.windows([(7 * i) % 60 + 3 for i in range(60)])
    ours = quality.by_us(str(folder), pieces, "fp32")
    theirs = quality.by_transformers(str(folder), pieces)
    assert len(ours.lost) == len(theirs.lost) == 60 - len(pieces)
    torch.testing.assert_close(torch.tensor(ours.lost), torch.tensor(theirs.lost), atol=1e-4, rtol=1e-4)
    assert ours.best == theirs.best


@needs_compiler
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("copies", [1, 3])
def test_the_reading_loop_reads_every_byte_once(threads, copies):
    roof = big.machine()
    size = 4096 * 6
    room = torch.randint(0, 255, (size * copies + 64,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    data = room[-room.data_ptr() % 64 :][: size * copies]
    seconds, total = (ctypes.c_double * copies)(), ctypes.c_uint64()
    for ahead in (0, 1):
        got = roof.library.roof_read(
            ctypes.c_void_p(data.data_ptr()),
            ctypes.c_int64(size),
            copies,
            threads,
            ahead,
            copies,
            seconds,
            ctypes.byref(total),
        )
        assert got == size
        assert total.value == np.bitwise_xor.reduce(data.numpy().view(np.uint64))
        assert all(s > 0 for s in seconds)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_the_larger_shape_is_a_sound_file(tmp_path, monkeypatch, kind):
    if lib.load() is None:
        pytest.skip("no native kernels")
    vocabulary = tiny_gguf(tiny_llama(tmp_path / "tiny"), tmp_path / "tiny.gguf")
    tokens = len(gguf.GGUFReader(vocabulary).fields["tokenizer.ggml.tokens"].contents())
    small = {"HIDDEN": 64, "LAYERS": 2, "HEADS": 4, "KV_HEADS": 2, "INNER": 96, "VOCABULARY": tokens + 40}
    for name, value in small.items():
        monkeypatch.setattr(big, name, value)
    path = tmp_path / "big.gguf"
    big.write(path, str(vocabulary), kind)
    table = gguf.GGUFReader(path).tensors
    assert {t.tensor_type.name for t in table if t.name.endswith("weight") and "norm" not in t.name} == {kind}
    embedding = next(t for t in table if t.name == "token_embd.weight")
    values = gguf.dequantize(embedding.data, embedding.tensor_type)
    assert values.shape == (tokens + 40, 64)
    assert 0.5 < values.std() * 64**0.5 < 2  # products keep the size of their input
    with FlashEngine(path) as engine:
        assert len(engine.generate(prompt_token_ids=[5, 6, 7], max_new_tokens=4, ignore_eos=True).token_ids) == 4
