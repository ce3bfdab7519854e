"""The whole engine against transformers: greedy tokens and log-probabilities, in a crowd, on too small a cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from deepseek_flash import Completion
from tests.support.checkpoints import LLAMA3, load_reference, tiny_gguf, tiny_llama, tiny_qwen2, tiny_qwen3
from tests.support.engines import open_engine

TIE = 2e-3
"""Where the two best logits are closer than this, either token is right."""
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
MODELS: dict[str, tuple[Callable[..., Path], dict[str, Any]]] = {
    "llama": (tiny_llama, {}),
    "llama-tied-llama3": (tiny_llama, {"tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "qwen2": (tiny_qwen2, {}),
    "qwen3-yarn": (tiny_qwen3, {"rope_parameters": YARN}),
}


def expect_right(done: Completion, reference: Any) -> None:
    """Teacher-forced: each of our tokens is transformers' choice, each log-probability its log-softmax."""
    ids = [*done.prompt_token_ids, *done.token_ids]
    with torch.inference_mode():
        logits = reference(torch.tensor([ids])).logits[0, len(done.prompt_token_ids) - 1 : -1].float()
    logits = logits[:, :289]  # ids the tokenizer does not know are never sampled
    best = logits.topk(2).values
    logprobs = reference_logprobs(reference, ids)[len(done.prompt_token_ids) - 1 : -1]
    assert done.logprobs is not None
    for i, token in enumerate(done.token_ids):
        if best[i, 0] - best[i, 1] > TIE:
            assert token == int(logits[i].argmax()), f"token {i}"
        assert done.logprobs[i][token] == pytest.approx(float(logprobs[i, token]), abs=1e-3)


def reference_logprobs(reference: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return torch.log_softmax(reference(torch.tensor([ids])).logits[0].float(), -1)


@pytest.mark.parametrize("name", MODELS)
def test_greedy_crowd_equals_transformers(tmp_path: Path, name: str) -> None:
    make, over = MODELS[name]
    folder = make(tmp_path / name, **over)
    reference = load_reference(folder)
    document = [(i * 13 + 5) % 280 for i in range(150)]
    prompts = [
        [3],
        [(i * 7) % 280 for i in range(31)],
        document,
        [*document, 9, 8, 7],
        [(i * 29) % 280 for i in range(600)],
        [*document[:80], 4],
    ]
    with open_engine(
        folder, kv_blocks=60, max_model_len=800, max_batch_size=6, prefill_chunk_size=90, block_size=16
    ) as engine:
        many = engine.generate(
            prompt_token_ids=prompts, temperature=0.0, max_new_tokens=60, ignore_eos=True, logprobs=0
        )
        assert sum(c.usage.cached_tokens for c in many) > 0
        assert sum(c.cache.preemptions for c in many) > 0
        score = engine.generate(prompt_token_ids=prompts[3], max_new_tokens=0, prompt_logprobs=0).prompt_logprobs
    for done in many:
        expect_right(done, reference)
    logprobs = reference_logprobs(reference, prompts[3])
    for i in range(1, len(prompts[3])):
        assert score[i][prompts[3][i]] == pytest.approx(float(logprobs[i - 1, prompts[3][i]]), abs=1e-3)


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen2, tiny_qwen3])
def test_the_same_model_as_gguf_gives_the_same_tokens(tmp_path: Path, make: Callable[..., Path]) -> None:
    """G06 too: the ids that pad a converted vocabulary are never sampled."""
    chat = [{"role": "user", "content": "héllo <|im_end|> 你好"}]
    folder = make(tmp_path / "model")
    gguf = tiny_gguf(folder, tmp_path / "model.gguf")
    answers = []
    for model in (folder, gguf):
        with open_engine(model, max_model_len=256) as engine:
            done = engine.chat(chat, temperature=0.0, max_new_tokens=30)
            answers.append((done.prompt_token_ids, done.token_ids, done.text))
    assert answers[0] == answers[1]
