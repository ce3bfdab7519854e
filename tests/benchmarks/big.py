"""Decoding a larger shape: a random-weight model of Qwen2.5-1.5B's shape in Q4_1, ours and llama.cpp on the same file.

    python tests/benchmarks/big.py --llama PYTHON --vocabulary MODEL.gguf [--rounds 5] [--keep FILE.gguf]

Writes the file (about 1 GB, into a temporary folder unless --keep), then runs both engines in turns, each round in a
fresh process on all processors: tokens a second of one request after its first token, and how much of the rate of a
loop that only reads memory that makes, every weight being read once a token. The vocabulary is borrowed from a real
GGUF file and filled up; what the model says means nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

HIDDEN, LAYERS, HEADS, KV_HEADS, INNER, VOCABULARY = 1536, 28, 12, 2, 8960, 151_936
NEW = 48

OURS = """
import json, sys, time
from deepseek_flash import FlashEngine
with FlashEngine(sys.argv[1], max_model_len=512, enable_prefix_caching=False) as engine:
    ids = list(range(100, 116))
    def run(n):
        begin = time.perf_counter()
        engine.generate(prompt_token_ids=ids, max_new_tokens=n, temperature=0.0, ignore_eos=True)
        return time.perf_counter() - begin
    run(8)
    one, all_ = min(run(1) for _ in range(3)), run(int(sys.argv[2]) + 1)
print(json.dumps(int(sys.argv[2]) / (all_ - one)))
"""

LLAMA = """
import json, os, sys, time
from llama_cpp import Llama
llm = Llama(sys.argv[1], n_ctx=512, n_threads=os.cpu_count(), verbose=False)
steps = llm.generate(list(range(100, 116)), temp=0.0, top_k=1)
for _ in range(8):
    next(steps)
begin = time.perf_counter()
for _ in range(int(sys.argv[2])):
    next(steps)
print(json.dumps(int(sys.argv[2]) / (time.perf_counter() - begin)))
"""


def write(path: Path, vocabulary: str) -> None:
    """A GGUF file of architecture qwen2."""
    import gguf

    rng = np.random.default_rng(0)
    kind = gguf.GGMLQuantizationType.Q4_1
    out = gguf.GGUFWriter(path, "qwen2")
    out.add_context_length(32_768)
    out.add_embedding_length(HIDDEN)
    out.add_block_count(LAYERS)
    out.add_feed_forward_length(INNER)
    out.add_head_count(HEADS)
    out.add_head_count_kv(KV_HEADS)
    out.add_rope_freq_base(1e6)
    out.add_layer_norm_rms_eps(1e-6)
    out.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_1)
    fields = gguf.GGUFReader(vocabulary).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("qwen2")
    filling = VOCABULARY - len(tokens)
    out.add_token_list([*tokens, *(f"[FILL{i}]" for i in range(filling))])
    out.add_token_types([*fields["tokenizer.ggml.token_type"].contents(), *[5] * filling])
    out.add_token_merges(fields["tokenizer.ggml.merges"].contents())
    out.add_eos_token_id(0)

    def quantised(name: str, rows: int, columns: int) -> None:
        """Codes at random around zero, so that a product keeps the size of its input."""
        d = np.float16(columns**-0.5 / 4.6)
        blocks = np.zeros((rows, columns // 32), dtype=[("d", "<f2"), ("m", "<f2"), ("codes", "u1", 16)])
        blocks["d"], blocks["m"] = d, np.float16(-7.5) * d
        blocks["codes"] = rng.integers(0, 256, (rows, columns // 32, 16), dtype=np.uint8)
        out.add_tensor(name, blocks.view(np.uint8).reshape(rows, -1), raw_dtype=kind)

    def floats(name: str, values: np.ndarray) -> None:
        out.add_tensor(name, values.astype(np.float32))

    quantised("token_embd.weight", VOCABULARY, HIDDEN)
    floats("output_norm.weight", np.ones(HIDDEN))
    width = HIDDEN // HEADS
    for i in range(LAYERS):
        for name, rows in (("q", HEADS * width), ("k", KV_HEADS * width), ("v", KV_HEADS * width)):
            quantised(f"blk.{i}.attn_{name}.weight", rows, HIDDEN)
            floats(f"blk.{i}.attn_{name}.bias", 0.1 * rng.standard_normal(rows))
        quantised(f"blk.{i}.attn_output.weight", HIDDEN, HEADS * width)
        quantised(f"blk.{i}.ffn_gate.weight", INNER, HIDDEN)
        quantised(f"blk.{i}.ffn_up.weight", INNER, HIDDEN)
        quantised(f"blk.{i}.ffn_down.weight", HIDDEN, INNER)
        floats(f"blk.{i}.attn_norm.weight", np.ones(HIDDEN))
        floats(f"blk.{i}.ffn_norm.weight", np.ones(HIDDEN))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def rate(python: str, code: str, path: Path) -> float:
    """Tokens a second."""
    done = subprocess.run([python, "-c", code, str(path), str(NEW)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return float(json.loads(done.stdout.splitlines()[-1]))


def reading(threads: int) -> float:
    """Bytes a second."""
    import torch

    from tests.benchmarks.kernels import read_rate, roof

    data = torch.randint(0, 255, (1 << 29,), dtype=torch.uint8)
    library = roof()
    return statistics.median(read_rate(library, data, threads) for _ in range(5))


def main() -> None:
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--llama", required=True, help="python that has llama-cpp-python")
    a.add_argument("--vocabulary", required=True, help="GGUF file with a byte-level BPE vocabulary")
    a.add_argument("--rounds", type=int, default=5)
    a.add_argument("--keep", type=Path, help="where the file is, or is to stay")
    o = a.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = o.keep or Path(folder) / "big.gguf"
        if not path.exists():
            write(path, o.vocabulary)
        size = path.stat().st_size
        found: dict[str, list[float]] = {"ours": [], "llama.cpp": []}
        reads = []
        for i in range(o.rounds):
            found["ours"].append(rate(sys.executable, OURS, path))
            found["llama.cpp"].append(rate(o.llama, LLAMA, path))
            reads.append(reading(len(os.sched_getaffinity(0))))
            print(f"round {i + 1}:", {k: round(v[-1], 2) for k, v in found.items()}, f"read {reads[-1] / 1e9:.1f} GB/s")
        print(f"\n{size / 1e6:.0f} MB\n| engine | tokens a second | share of a loop that only reads |\n|---|---|---|")
        for name, rates in found.items():
            share = statistics.median(r * size / m for r, m in zip(rates, reads, strict=True))
            print(f"| {name} | {statistics.median(rates):.2f} | {100 * share:.0f} % |")
        ratio = statistics.median(x / y for x, y in zip(*found.values(), strict=True))
        print(f"\nours / llama.cpp: {ratio:.2f}")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    main()
