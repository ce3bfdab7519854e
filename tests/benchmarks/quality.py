"""What quantised computing costs in quality: perplexity and agreement over 20,000 tokens of English, on one GGUF file.

    python tests/benchmarks/quality.py MODEL.gguf [--tokens 20000] [--judge FOLDER] [--llama PYTHON]

The measure is the same model dequantised to fp32: by transformers, from the folder that ``peers/dequantise.py`` writes,
or without --judge by our own torch kernels. Beside it: our kernels (int8 activations) with an fp32, fp16 and int8
cache, and llama.cpp through an interpreter that has llama-cpp-python. Every variant runs in a process of its own and
scores the same tokens in windows of 1,024, none of them with a token in front: each token but a window's first is given
all before it in its window. Sums are taken in fp64.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pydoc_data.topics import topics
from typing import Any

WINDOW = 1024
VARIANTS = {
    "fp32 dequantised, our torch kernels": ("torch", "fp32"),
    "int8 activations, fp32 cache": ("auto", "fp32"),
    "int8 activations, fp16 cache": ("auto", "fp16"),
    "int8 activations, int8 cache": ("auto", "int8"),
}
"""Name → DEEPSEEK_FLASH_KERNELS and kv_cache_dtype."""


def windows(tokens: list[int]) -> list[list[int]]:
    """Pieces of at least two tokens."""
    return [w for i in range(0, len(tokens), WINDOW) if len(w := tokens[i : i + WINDOW]) > 1]


@dataclass
class Scores:
    """Of every scored place: what its token lost (negative log-likelihood), and the likeliest token."""

    lost: list[float] = field(default_factory=list)
    best: list[int] = field(default_factory=list)

    def add(self, logits: Any, following: Any) -> None:
        """``logits`` [rows, vocabulary] of a torch tensor, and the token that follows each row."""
        import torch

        for rows, ids in zip(logits.split(128), torch.tensor(following).split(128), strict=True):
            x = rows.double()
            self.lost += (x.logsumexp(1) - x.gather(1, ids.unsqueeze(1))[:, 0]).tolist()
            self.best += x.argmax(1).tolist()


def text_tokens(model: str, count: int) -> list[int]:
    """The first tokens of Python's documentation topics."""
    from deepseek_flash import FlashEngine

    with FlashEngine(model, max_model_len=WINDOW) as engine:
        return list(engine.tokenize("\n\n".join(topics[k] for k in sorted(topics))[: 8 * count]))[:count]


def by_us(model: str, pieces: list[list[int]], cache: str) -> Scores:
    """Through the engine, as a user's request goes; only what it makes of the logits is replaced, to see them all."""
    from deepseek_flash import FlashEngine, SamplingParams
    from deepseek_flash.runtime import runner

    scores = Scores()

    def record(logits: Any, following: Any, *_: Any) -> list[dict[int, float]]:
        scores.add(logits, following)
        return [dict.fromkeys((token,), 0.0) for token in following]

    runner.prompt_logprobs = record
    with FlashEngine(model, kv_cache_dtype=cache, max_model_len=WINDOW + 1, enable_prefix_caching=False) as engine:
        params = SamplingParams(max_new_tokens=0, prompt_logprobs=1)
        for piece in pieces:
            engine.generate(prompt_token_ids=piece, params=params)
    return scores


def by_transformers(folder: str, pieces: list[list[int]]) -> Scores:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    scores = Scores()
    with torch.inference_mode():
        for piece in pieces:
            scores.add(model(torch.tensor([piece])).logits[0, :-1], piece[1:])
    return scores


LLAMA = """
import json, sys
import numpy as np
from llama_cpp import Llama
llm = Llama(sys.argv[1], n_ctx=1100, n_batch=512, logits_all=True, verbose=False)
lost, best = [], []
for window in json.load(sys.stdin):
    llm.reset()
    llm.eval(window)
    for i in range(len(window) - 1):
        x = llm.scores[i].astype(np.float64)
        top = x.max()
        lost.append(float(top + np.log(np.exp(x - top).sum()) - x[window[i + 1]]))
        best.append(int(x.argmax()))
print(json.dumps({"lost": lost, "best": best}))
"""


def run(command: list[str], given: Any, **env: str) -> Any:
    """The JSON line a process prints last."""
    begin = time.perf_counter()
    done = subprocess.run(
        command, input=json.dumps(given), capture_output=True, text=True, env={**os.environ, **env}, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    print(f"{time.perf_counter() - begin:.0f} s: {' '.join(command[-3:])[-100:]}", file=sys.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def report(found: dict[str, Any], judge: str) -> None:
    base, count = found[judge], len(found[judge]["lost"])
    want = sum(base["lost"]) / count
    print(f"{count} tokens in windows of {WINDOW}; the judge is: {judge}\n")
    print("| variant | perplexity | against the judge | same likeliest token |\n|---|---|---|---|")
    ppl = {}
    for name, got in found.items():
        ppl[name] = math.exp(sum(got["lost"]) / count)
        same = sum(x == y for x, y in zip(got["best"], base["best"], strict=True)) / count
        more = sum(got["lost"]) / count - want
        print(f"| {name} | {ppl[name]:.4f} | {100 * math.expm1(more):+.3f} % | {100 * same:.2f} % |")
    wide, small = (ppl[f"int8 activations, {c} cache"] for c in ("fp32", "int8"))
    print(f"\nan int8 cache adds {100 * (small / wide - 1):+.3f} % (goal: at most 0.3 %)")
    print("goals of int8 activations: perplexity within 0.5 %, the same likeliest token at least 98 % of the time")


def main() -> None:
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("model")
    a.add_argument("--tokens", type=int, default=20_000)
    a.add_argument("--judge", help="folder with the model in fp32, for transformers")
    a.add_argument("--llama", help="python that has llama-cpp-python")
    a.add_argument("--json", help="file for the scores of every token")
    a.add_argument("--one", help=argparse.SUPPRESS)  # one of tokens, transformers, fp32, fp16, int8
    o = a.parse_args()
    if o.one == "tokens":
        print(json.dumps(text_tokens(o.model, o.tokens)))
        return
    if o.one:
        pieces = json.load(sys.stdin)
        scores = by_transformers(o.judge, pieces) if o.one == "transformers" else by_us(o.model, pieces, o.one)
        print(json.dumps({"lost": scores.lost, "best": scores.best}))
        return
    again = [sys.executable, __file__, o.model, "--tokens", str(o.tokens)]
    pieces = windows(run([*again, "--one", "tokens"], None))
    found: dict[str, Any] = {}
    if o.judge:
        found["fp32 dequantised, transformers"] = run([*again, "--judge", o.judge, "--one", "transformers"], pieces)
    for name, (kernels, cache) in VARIANTS.items():
        found[name] = run([*again, "--one", cache], pieces, DEEPSEEK_FLASH_KERNELS=kernels)
    if o.llama:
        found["llama.cpp, fp16 cache"] = run([o.llama, "-c", LLAMA, o.model], pieces)
    if o.json:
        with open(o.json, "w") as file:
            json.dump({"windows": pieces, **found}, file)
    report(found, next(iter(found)))


if __name__ == "__main__":
    main()
