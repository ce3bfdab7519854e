"""Decoding a larger shape: a random-weight model of Qwen2.5-1.5B's shape, ours and llama.cpp on the same file.

    python tests/benchmarks/big.py --llama PYTHON --vocabulary MODEL.gguf [--kind Q4_0] [--rounds 5] [--keep FILE.gguf]

Writes the file (about 1 GB, into a temporary folder unless --keep), opens it in one process an engine, and lets them
decode in turns on all processors: tokens a second of one request after its first token, greedy, and which share of the
rate of a loop that only reads memory that is, every weight being read once a token. Q4_0 is llama.cpp's fastest type
here (it rearranges it while loading), Q4_1 the one of the other benchmarks. The vocabulary is borrowed from a real
GGUF file and filled up; what the model says means nothing.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from machine import Watch, about, machine

from deepseek_flash.kernels.cpu.native import processors

HIDDEN, LAYERS, HEADS, KV_HEADS, INNER, VOCABULARY = 1536, 28, 12, 2, 8960, 151_936
NEW = 64

OURS = """
import sys, time
from deepseek_flash import FlashEngine
with FlashEngine(sys.argv[1], max_model_len=512, enable_prefix_caching=False) as engine:
    for line in sys.stdin:
        new, seen = int(line), []
        for delta in engine.stream(
            prompt_token_ids=list(range(100, 116)), max_new_tokens=new + 1, temperature=0.0, ignore_eos=True
        ):
            seen += [time.perf_counter()] * len(delta.token_ids)
        assert len(seen) == new + 1
        print("rate", new / (seen[-1] - seen[0]), flush=True)
"""

LLAMA = """
import os, sys, time
from llama_cpp import Llama
llm = Llama(sys.argv[1], n_ctx=512, n_threads=os.cpu_count(), verbose=False)
for line in sys.stdin:
    new = int(line)
    steps = llm.generate(list(range(100, 116)), temp=0.0, top_k=1)
    next(steps)
    begin = time.perf_counter()
    for _ in range(new):
        next(steps)
    print("rate", new / (time.perf_counter() - begin), flush=True)
"""


class Worker:
    """An engine in a process of its own, which decodes when told to."""

    def __init__(self, python: str, code: str, path: Path) -> None:
        self._process = subprocess.Popen(
            [python, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def rate(self, new: int) -> float:
        """Tokens a second over so many tokens after the first."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{new}\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("rate "):
                return float(line.split()[1])
        raise SystemExit(f"an engine ended with status {self._process.wait()}")

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def write(path: Path, vocabulary: str, kind_name: str) -> None:
    """A GGUF file of architecture qwen2."""
    import gguf

    rng = np.random.default_rng(0)
    kind = gguf.GGMLQuantizationType[kind_name]
    out = gguf.GGUFWriter(path, "qwen2")
    out.add_context_length(32_768)
    out.add_embedding_length(HIDDEN)
    out.add_block_count(LAYERS)
    out.add_feed_forward_length(INNER)
    out.add_head_count(HEADS)
    out.add_head_count_kv(KV_HEADS)
    out.add_rope_freq_base(1e6)
    out.add_layer_norm_rms_eps(1e-6)
    out.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind_name}"])
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
        least = [("m", "<f2")] if kind_name == "Q4_1" else []  # the other type has its zero at code 8
        blocks = np.zeros((rows, columns // 32), dtype=[("d", "<f2"), *least, ("codes", "u1", 16)])
        blocks["d"] = d
        if least:
            blocks["m"] = np.float16(-7.5) * d
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


def measure(path: Path, llama: str, rounds: int) -> None:
    """Both engines in turns, each turn beside a loop that only reads."""
    roof, threads, size = machine(), processors(), path.stat().st_size
    memory = torch.randint(0, 255, (1 << 30,), dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % 64 :][: (1 << 30) - 4096]
    workers = {"ours": Worker(sys.executable, OURS, path), "llama.cpp": Worker(llama, LLAMA, path)}
    rates: dict[str, list[float]] = {name: [] for name in workers}
    shares: dict[str, list[float]] = {name: [] for name in workers}
    for worker in workers.values():
        worker.rate(8)
    watch = Watch()
    for i in range(rounds):
        said = [f"round {i + 1}:"]
        for name, worker in workers.items():
            time.sleep(0.5)  # let the other one's threads fall asleep
            before = roof.read_rate(memory, threads, copies=4)
            rates[name].append(worker.rate(NEW))
            read = (before + roof.read_rate(memory, threads, copies=4)) / 2
            shares[name].append(rates[name][-1] * size / read)
            said.append(f"{name} {rates[name][-1]:.2f} tokens a second, reading {read / 1e9:.1f} GB/s;")
        print(*said, flush=True)
    for worker in workers.values():
        worker.close()
    print(f"\n{watch.report()}")
    print(f"\n{size / 1e6:.0f} MB a token\n\n| engine | tokens a second | of a loop that only reads |\n|---|---|---|")
    for name in workers:
        share = statistics.median(shares[name])
        print(f"| {name} | {statistics.median(rates[name]):.2f} | {100 * share:.0f} % |")
    ratio = statistics.median(x / y for x, y in zip(*rates.values(), strict=True))
    print(f"\nours / llama.cpp: {ratio:.2f} (goal: at least 1.1, or both at 85 % of the loop)")


def main() -> None:
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--llama", required=True, help="python that has llama-cpp-python")
    a.add_argument("--vocabulary", required=True, help="GGUF file with a byte-level BPE vocabulary")
    a.add_argument("--kind", choices=("Q4_0", "Q4_1"), default="Q4_0")
    a.add_argument("--rounds", type=int, default=5)
    a.add_argument("--keep", type=Path, help="where the file is, or is to stay")
    o = a.parse_args()
    print(f"{about()}\n")
    with tempfile.TemporaryDirectory() as folder:
        path = o.keep or Path(folder) / "big.gguf"
        if not path.exists():
            write(path, o.vocabulary, o.kind)
        measure(path, o.llama, o.rounds)


if __name__ == "__main__":
    main()
