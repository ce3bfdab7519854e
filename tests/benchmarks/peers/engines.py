"""One adapter an engine. `python engines.py ENGINE WORKLOADS SEED` prints a JSON line a measurement."""

import json
import os
import sys
import time

T0 = time.perf_counter()
DIR = os.environ.get("PEERS_DIR", os.path.expanduser("~/.cache/deepseek-flash-peers"))
GGUF, HF = os.path.join(DIR, "smollm2.gguf"), os.path.join(DIR, "smollm2")


class Ours:
    def __init__(self):
        from deepseek_flash import FlashEngine, SamplingParams

        self.P = SamplingParams
        self.engine = FlashEngine(os.environ.get("OURS_MODEL", GGUF), max_model_len=4096)

    def run(self, requests):
        params = [self.P(temperature=0.0, max_new_tokens=n, ignore_eos=True) for _, n in requests]
        results = self.engine.generate([p for p, _ in requests], params)
        return [(len(r.prompt_token_ids), len(r.token_ids), r.text) for r in results]


class Llama:
    def __init__(self):
        from llama_cpp import Llama as L
        from llama_cpp import llama_cpp as c

        if os.environ.get("PEERS_LLAMA_NO_AMX"):
            defaults = c.llama_model_default_params

            def without():
                params = defaults()
                params.use_extra_bufts = False  # AMX, and Q4_0 rearranged: of no use to Q4_1
                return params

            c.llama_model_default_params = without
        self.llm = L(GGUF, n_ctx=4096, n_threads=os.cpu_count(), n_batch=512, verbose=False)

    def run(self, requests):
        out = []
        for prompt, n in requests:
            ids, got = self.llm.tokenize(prompt.encode()), []
            for token in self.llm.generate(ids, temp=0.0, top_k=1):
                got.append(token)
                if len(got) >= n:
                    break
            out.append((len(ids), len(got), self.llm.detokenize(got).decode(errors="replace")))
        return out


class OpenVino:
    """LLMPipeline for one request (its faster path), ContinuousBatchingPipeline with a length each for several."""

    def __init__(self):
        import openvino_genai as ov

        self.ov, self.many = ov, None
        # Where there is AMX, OpenVINO computes in bf16 with it.
        self.options = {"INFERENCE_PRECISION_HINT": "f32"} if os.environ.get("PEERS_OPENVINO_F32") else {}
        self.one = ov.LLMPipeline(GGUF, "CPU", scheduler_config=self.scheduler(), **self.options)

    def scheduler(self):
        s = self.ov.SchedulerConfig()
        s.cache_size, s.enable_prefix_caching, s.max_num_batched_tokens = 2, True, 512
        return s

    def prepare(self):
        self.many = self.ov.ContinuousBatchingPipeline(GGUF, self.scheduler(), "CPU", self.options)

    def config(self, n):
        c = self.ov.GenerationConfig()
        c.max_new_tokens = c.min_new_tokens = n
        c.ignore_eos, c.do_sample, c.apply_chat_template = True, False, False
        return c

    def run(self, requests):
        prompts, configs = [p for p, _ in requests], [self.config(n) for _, n in requests]
        if len(requests) == 1:
            texts = self.one.generate(prompts, configs[0]).texts
        else:
            texts = [r.m_generation_ids[0] for r in self.many.generate(prompts, configs)]
        return [(0, n, t) for (_, n), t in zip(requests, texts, strict=True)]


class Vllm:
    def __init__(self):
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        from vllm import LLM, SamplingParams

        self.P = SamplingParams
        self.llm = LLM(HF, dtype="float32", max_model_len=4096)

    def run(self, requests):
        params = [self.P(temperature=0, max_tokens=n, ignore_eos=True) for _, n in requests]
        out = self.llm.generate([p for p, _ in requests], params, use_tqdm=False)
        return [(len(o.prompt_token_ids), len(o.outputs[0].token_ids), o.outputs[0].text) for o in out]


class Transformers:
    def __init__(self):
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(os.cpu_count())
        self.tok = AutoTokenizer.from_pretrained(HF)
        self.tok.padding_side = "left"
        self.model = AutoModelForCausalLM.from_pretrained(HF, dtype=torch.float32)

    def run(self, requests):
        n = max(k for _, k in requests)
        enc = self.tok([p for p, _ in requests], return_tensors="pt", padding=True)
        out = self.model.generate(**enc, max_new_tokens=n, min_new_tokens=n, do_sample=False)
        new = out[:, enc["input_ids"].shape[1] :]
        return [
            (int(m.sum()), k, self.tok.decode(t[:k]))
            for (_, k), t, m in zip(requests, new, enc["attention_mask"], strict=True)
        ]


ENGINES = {"ours": Ours, "llama": Llama, "openvino": OpenVino, "vllm": Vllm, "hf": Transformers}


def main():
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import workloads

    name, wanted, seed = sys.argv[1], sys.argv[2].split(","), int(sys.argv[3])
    engine = ENGINES[name]()
    sets = workloads.build(seed)
    engine.run([(sets["single"][0][0], 1)])
    print(json.dumps({"engine": name, "workload": "cold_start", "seconds": time.perf_counter() - T0}), flush=True)
    if hasattr(engine, "prepare"):
        engine.prepare()
    engine.run([(workloads.text(60, 7), 16)])
    for w in wanted:
        start = time.perf_counter()
        if w == "chat8":
            histories = ["" for _ in sets[w]]
            tokens = 0
            for turn in range(4):
                for i, conv in enumerate(sets[w]):
                    histories[i] += "\nUser: " + conv[turn][0] + "\nAssistant:"
                got = engine.run([(h, conv[turn][1]) for h, conv in zip(histories, sets[w], strict=True)])
                for i, (_, n, t) in enumerate(got):
                    histories[i] += t
                    tokens += n
        else:
            tokens = sum(n for _, n, _ in engine.run(sets[w]))
        seconds = time.perf_counter() - start
        print(json.dumps({"engine": name, "workload": w, "seconds": seconds, "output_tokens": tokens}), flush=True)


if __name__ == "__main__":
    main()
