"""Logits and greedy tokens against transformers in fp32, across the ways a sequence can be served."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from deepseek_flash.kernels.cpu.probe import rows_are_invariant
from deepseek_flash.models.base import Model, ModelInfo
from tests.models.harness import Answer, Harness, load, prompt
from tests.support.checkpoints import load_reference, tiny_gguf, tiny_llama, tiny_qwen2, tiny_qwen3

Loaded = tuple[ModelInfo, Model, Any]
"""Our info and model, transformers' model."""

NEW = 5
BASE = {"rope_theta": 1e4}
KINDS: dict[str, tuple[Callable[..., Path], dict[str, Any]]] = {
    "llama": (tiny_llama, {}),
    "llama tied": (tiny_llama, {"tie_word_embeddings": True}),
    "llama biases": (tiny_llama, {"attention_bias": True, "mlp_bias": True}),
    "llama mha": (tiny_llama, {"num_key_value_heads": 4}),
    "llama mqa, odd sizes": (
        tiny_llama,
        {
            "num_attention_heads": 6,
            "num_key_value_heads": 1,
            "head_dim": 10,
            "hidden_size": 60,
            "intermediate_size": 77,
        },
    ),
    "llama linear": (tiny_llama, {"rope_parameters": {**BASE, "rope_type": "linear", "factor": 4.0}}),
    "llama llama3": (
        tiny_llama,
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
            }
        },
    ),
    "llama yarn": (
        tiny_llama,
        {
            "rope_parameters": {
                **BASE,
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 16,
            }
        },
    ),
    "llama yarn mscale": (
        tiny_llama,
        {
            "rope_parameters": {
                **BASE,
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 128,
                "mscale": 0.7,
                "mscale_all_dim": 1.2,
                "truncate": False,
            }
        },
    ),
    "qwen2": (tiny_qwen2, {}),
    "qwen2 untied": (tiny_qwen2, {"tie_word_embeddings": False}),
    "qwen3": (tiny_qwen3, {}),
    "qwen3 yarn": (
        tiny_qwen3,
        {
            "rope_parameters": {
                **BASE,
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 256,
                "attention_factor": 1.3,
            }
        },
    ),
    "qwen3 biases": (tiny_qwen3, {"attention_bias": True}),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small are faster so; tests/kernels compares bits with all threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Loaded]:
    """Each kind made once."""
    made: dict[str, Loaded] = {}

    def get(kind: str) -> Loaded:
        if kind not in made:
            make, over = KINDS[kind]
            folder = make(tmp_path_factory.mktemp("tiny"), **over)
            made[kind] = (*load(folder), load_reference(folder))
        return made[kind]

    return get


@torch.inference_mode()
def assert_parity(answer: Answer, reference: Any, prompt_len: int) -> None:
    """Teacher-forced on our tokens: logits within 1e-3, and our choice is theirs unless their top two nearly tie."""
    want = reference(torch.tensor([answer.tokens])).logits[0]
    for at, got in answer.logits.items():
        assert (got - want[at]).abs().max() <= 1e-3, f"position {at}"
    for at in range(prompt_len - 1, len(answer.tokens) - 1):
        best, second = want[at].topk(2).values
        if best - second > 2e-3:
            assert answer.tokens[at + 1] == int(want[at].argmax()), f"token {at + 1}"


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(models: Callable[[str], Loaded], kind: str) -> None:
    """Q03: prompts go far beyond the length where a wrong rotary pairing shows."""
    info, model, reference = models(kind)
    prompts = [prompt(i, n) for i, n in enumerate((1, 7, 64, 130, 600))]
    answers = Harness(info, model, chunk=100).serve(prompts, NEW)
    for tokens, answer in zip(prompts, answers, strict=True):
        assert len(answer.logits) == len(tokens) + NEW - 1
        assert_parity(answer, reference, len(tokens))


@pytest.mark.parametrize("prefer", ["torch", "reference"])
@pytest.mark.parametrize("kind", ["llama", "llama biases", "qwen2", "qwen3"])
def test_the_other_kernels(models: Callable[[str], Loaded], tmp_path: Path, kind: str, prefer: str) -> None:
    make, over = KINDS[kind]
    info, model = load(make(tmp_path, **over), prefer)
    prompts = [prompt(i, n) for i, n in enumerate((1, 40, 130))]
    for tokens, answer in zip(prompts, Harness(info, model, chunk=64).serve(prompts, NEW), strict=True):
        assert_parity(answer, models(kind)[2], len(tokens))


@pytest.mark.parametrize("kind", ["llama", "llama biases", "llama llama3", "llama yarn", "qwen2", "qwen3"])
def test_gguf_of_the_same_weights(models: Callable[[str], Loaded], tmp_path: Path, kind: str) -> None:
    """Q03: llama-architecture GGUF files store q and k rows in the other pairing."""
    make, over = KINDS[kind]
    info, model = load(tiny_gguf(make(tmp_path / "hf", **over), tmp_path / "m.gguf"))
    tokens = prompt(3, 200)
    (answer,) = Harness(info, model).serve([tokens], NEW)
    assert_parity(answer, models(kind)[2], len(tokens))


@pytest.mark.parametrize(
    ("chunk", "block_size"), [(9, 16), (64, 1), (64, 4), (64, 32), (512, 16), (512, 100), (512, 256)]
)
def test_chunk_and_block_sizes(models: Callable[[str], Loaded], chunk: int, block_size: int) -> None:
    info, model, reference = models("llama yarn")
    prompts = [prompt(i, n) for i, n in enumerate((3, 100, 257))]
    harness = Harness(info, model, chunk=chunk, block_size=block_size, blocks=-(-400 // block_size) + 8)
    for tokens, answer in zip(prompts, harness.serve(prompts, NEW), strict=True):
        assert_parity(answer, reference, len(tokens))


def _same_bits(answer: Answer, alone: Answer) -> bool:
    return answer.tokens == alone.tokens and all(torch.equal(v, alone.logits[at]) for at, v in answer.logits.items())


needs_invariance = pytest.mark.skipif(
    not rows_are_invariant().holds, reason=f"not on this machine: {rows_are_invariant().reason}"
)


@pytest.fixture(scope="module", params=["llama", "llama mqa, odd sizes", "qwen2", "qwen3"])
def alone(request: pytest.FixtureRequest, models: Callable[[str], Loaded]) -> tuple[ModelInfo, Model, list[Answer]]:
    """Prompts served one at a time, in one chunk, nothing shared."""
    info, model, _ = models(request.param)
    return info, model, [Harness(info, model, chunk=700).serve([p], NEW)[0] for p in PROMPTS]


PROMPTS = [prompt(i, n) for i, n in enumerate((1, 16, 129, 300, 600))]


@needs_invariance
@pytest.mark.parametrize("chunk", [17, 100, 700])
def test_same_bits_in_a_crowd_and_in_chunks(alone: tuple[ModelInfo, Model, list[Answer]], chunk: int) -> None:
    """T01 and T05: sequences that run side by side do not touch each other's numbers. D11 likewise."""
    info, model, wanted = alone
    some = PROMPTS[: 3 if chunk == 17 else None]
    for answer, want in zip(Harness(info, model, chunk=chunk).serve(some, NEW), wanted, strict=False):
        assert _same_bits(answer, want)


@needs_invariance
def test_same_bits_after_a_prefix_hit(alone: tuple[ModelInfo, Model, list[Answer]]) -> None:
    """K04: an exact hit of the whole prompt still computes its last token."""
    info, model, wanted = alone
    harness = Harness(info, model, chunk=128)
    harness.serve([PROMPTS[3][:200], PROMPTS[4]], 2)
    answers = harness.serve([PROMPTS[3], PROMPTS[4], PROMPTS[1], PROMPTS[1]], NEW)
    assert [a.cached for a in answers[:2]] == [192, 592]
    for answer, want in zip(answers, [wanted[3], wanted[4], wanted[1], wanted[1]], strict=True):
        assert _same_bits(answer, want)


@needs_invariance
def test_same_bits_after_preemption(alone: tuple[ModelInfo, Model, list[Answer]]) -> None:
    info, model, wanted = alone
    prompts = [PROMPTS[1], PROMPTS[2], PROMPTS[2], PROMPTS[3]]
    harness = Harness(info, model, chunk=300, blocks=22, block_size=16, prefix_caching=False)
    first = [PROMPTS[1]] * 10
    answers = harness.serve([*first, *prompts], NEW)
    for answer, want in zip(answers[10:], [wanted[1], wanted[2], wanted[2], wanted[3]], strict=True):
        assert _same_bits(answer, want)


@needs_invariance
def test_a_preempted_sequence_resumes_with_the_same_bits(models: Callable[[str], Loaded]) -> None:
    info, model, _ = models("llama")
    (want,) = Harness(info, model).serve([PROMPTS[1]], 60)
    answers = Harness(info, model, blocks=12, block_size=8).serve([PROMPTS[0], PROMPTS[1]], 60)
    assert answers[1].preemptions > 0
    assert _same_bits(answers[1], want)


@pytest.mark.slow
@pytest.mark.smollm2
def test_smollm2(smollm2: Path) -> None:
    """The real model, its Q4_1 weights widened: logits and 20 greedy tokens as transformers computes them."""
    import transformers

    info, model = load(smollm2, "torch")
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2.parent, gguf_file=smollm2.name, dtype=torch.float32
    ).eval()
    licence = (Path(__file__).parents[2] / "LICENSE").read_text()
    prompts = [tokenizer(t)["input_ids"] for t in ("The capital of France is", licence * 2, "Once upon a time, " * 120)]
    for tokens, answer in zip(prompts, Harness(info, model, chunk=256).serve(prompts, 20), strict=True):
        assert_parity(answer, reference, len(tokens))
    # The native kernels round activations to int8: the same choice wherever transformers' is clear.
    native = load(smollm2)
    for tokens, answer in zip(prompts, Harness(*native, chunk=256).serve(prompts, 20), strict=True):
        with torch.inference_mode():
            want = reference(torch.tensor([answer.tokens])).logits[0]
        best = want.topk(2).values
        for at, got in answer.logits.items():
            if best[at, 0] - best[at, 1] > 2.0:
                assert int(got.argmax()) == int(want[at].argmax()), f"{len(tokens)} tokens, position {at}"
    # On random tokens fp32 itself is 1e-3 off, transformers' too: compare errors against fp64.
    noise = prompt(1, 600, info.vocab_size)
    (answer,) = Harness(info, model, chunk=256).serve([noise], 1)
    with torch.inference_mode():
        theirs = reference(torch.tensor([noise])).logits[0]
        exact = reference.double()(torch.tensor([noise])).logits[0]
    ours = (answer.matrix() - exact).abs().max()
    assert ours <= 2 * (theirs - exact).abs().max()
    assert ours <= 2e-3
