"""What quantised computing costs in quality: perplexity and agreement over 20,000 tokens of English, on one GGUF file.

    python tests/benchmarks/quality.py MODEL.gguf [--tokens 20000] [--llama PYTHON]

The measure is the same model dequantised to fp32 and computed by torch. Beside it: our kernels (int8 activations) with
an fp32, fp16 and int8 cache, and llama.cpp through an interpreter that has llama-cpp-python. Every variant runs in a
process of its own and scores the same tokens in windows of 1,024: each token given all before it in its window.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from pydoc_data.topics import topics

WINDOW = 1024
VARIANTS = {
    "fp32 dequantised (torch)": ("torch", "fp32"),
    "int8 activations, fp32 cache": ("auto", "fp32"),
    "int8 activations, fp16 cache": ("auto", "fp16"),
    "int8 activations, int8 cache": ("auto", "int8"),
}


def windows(tokens: list[int]) -> list[list[int]]:
    """Pieces of at least two tokens."""
    return [w for i in range(0, len(tokens), WINDOW) if len(w := tokens[i : i + WINDOW]) > 1]


def ours(model: str, count: int, cache: str) -> None:
    """Print the tokens, their negative log-likelihoods and the likeliest token at every place."""
    from deepseek_flash import FlashEngine, SamplingParams

    with FlashEngine(model, kv_cache_dtype=cache, max_model_len=WINDOW + 1, enable_prefix_caching=False) as engine:
        text = "\n\n".join(topics[k] for k in sorted(topics))
        tokens = list(engine.tokenize(text[: 8 * count]))[:count]
        lost, best = [], []
        for window in windows(tokens):
            params = SamplingParams(max_new_tokens=0, prompt_logprobs=1)
            places = engine.generate(prompt_token_ids=window, params=params).prompt_logprobs
            for token, place in zip(window[1:], places[1:], strict=True):
                lost.append(-place[token])
                best.append(max(place, key=place.get))
    print(json.dumps({"tokens": tokens, "lost": lost, "best": best}))


LLAMA = """
import json, sys
import numpy as np
from llama_cpp import Llama
model, windows = sys.argv[1], json.load(sys.stdin)
llm = Llama(model, n_ctx=1100, n_batch=512, logits_all=True, verbose=False)
lost, best = [], []
for window in windows:
    llm.reset()
    llm.eval(window)
    x = np.asarray(llm.scores[: len(window) - 1], dtype=np.float64)
    top = x.max(-1, keepdims=True)
    norm = top[:, 0] + np.log(np.exp(x - top).sum(-1))
    lost += (norm - x[np.arange(len(window) - 1), window[1:]]).tolist()
    best += x.argmax(-1).tolist()
print(json.dumps({"lost": lost, "best": best}))
"""


def run(command: list[str], given: str = "", **env: str) -> dict:
    """The JSON line a process prints last."""
    done = subprocess.run(command, input=given, capture_output=True, text=True, env={**os.environ, **env}, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("model")
    a.add_argument("--tokens", type=int, default=20_000)
    a.add_argument("--llama", help="python that has llama-cpp-python")
    a.add_argument("--one", help=argparse.SUPPRESS)
    o = a.parse_args()
    if o.one:
        ours(o.model, o.tokens, o.one)
        return
    found = {}
    for name, (kernels, cache) in VARIANTS.items():
        command = [sys.executable, __file__, o.model, "--tokens", str(o.tokens), "--one", cache]
        found[name] = run(command, DEEPSEEK_FLASH_KERNELS=kernels)
    base = next(iter(found.values()))
    if o.llama:
        found["llama.cpp"] = run([o.llama, "-c", LLAMA, o.model], json.dumps(windows(base["tokens"])))
    print(f"{len(base['lost'])} tokens in windows of {WINDOW}\n")
    print("| variant | perplexity | against fp32 | same likeliest token |\n|---|---|---|---|")
    want = math.exp(sum(base["lost"]) / len(base["lost"]))
    for name, got in found.items():
        ppl = math.exp(sum(got["lost"]) / len(got["lost"]))
        same = sum(x == y for x, y in zip(got["best"], base["best"], strict=True)) / len(base["best"])
        print(f"| {name} | {ppl:.4f} | {100 * (ppl / want - 1):+.3f} % | {100 * same:.2f} % |")


if __name__ == "__main__":
    main()
