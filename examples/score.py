"""Which of several texts does the model find likeliest? Log-probabilities of given tokens, nothing generated.

python examples/score.py [MODEL]
"""

import sys

from deepseek_flash import FlashEngine

model = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
candidates = [
    "The capital of France is Paris.",
    "The capital of France is Berlin.",
    "The capital of France is purple.",
]

with FlashEngine(model) as engine:
    scores = engine.score(candidates)
    for text, score in sorted(zip(candidates, scores, strict=True), key=lambda pair: -pair[1].total):
        print(f"{score.total:8.2f}  {text}")

    # Token by token; the first has no probability, since nothing stands before it.
    print()
    for token, logprob in zip(scores[0].token_ids, scores[0].logprobs, strict=True):
        print(f"{'' if logprob is None else f'{logprob:.2f}':>8}  {engine.detokenize([token])!r}")
