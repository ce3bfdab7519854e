"""Run the engines in turn on the same requests and print our ratio to the best peer (above 1: we are faster)."""

import argparse
import json
import os
import statistics
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
DIR = os.environ.get("PEERS_DIR", os.path.expanduser("~/.cache/deepseek-flash-peers"))


def figures(output):
    """The JSON lines among whatever else an engine printed."""
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def measure(python, engine, workloads, seed, timeout):
    try:
        p = subprocess.run(
            [python, os.path.join(HERE, "engines.py"), engine, workloads, str(seed)],
            capture_output=True,
            text=True,
            timeout=timeout,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
    except subprocess.TimeoutExpired as e:
        return figures((e.stdout or b"").decode())
    rows = figures(p.stdout)
    if not rows:
        print(f"{engine}: no figures\n{p.stderr[-800:]}", file=sys.stderr)
    return rows


def main():
    a = argparse.ArgumentParser()
    a.add_argument("--ours", help="python that has deepseek_flash")
    a.add_argument("--only", default="ours,openvino,llama,hf")
    a.add_argument("--workloads", default="single,prefill,batch32,rag16,chat8")
    a.add_argument("--rounds", type=int, default=5)
    a.add_argument("--seed", type=int, default=0)
    a.add_argument("--timeout", type=float, default=900)
    a.add_argument("--json")
    o = a.parse_args()
    got: dict = {}
    for _ in range(o.rounds):
        for engine in o.only.split(","):
            python = o.ours if engine == "ours" else os.path.join(DIR, engine, "bin", "python")
            if not python or not os.path.exists(python):
                continue
            for row in measure(python, engine, o.workloads, o.seed, o.timeout):
                got.setdefault(row["workload"], {}).setdefault(engine, []).append(row["seconds"])
    print("| workload | " + " | ".join(o.only.split(",")) + " | best peer / ours |")
    print("|---" * (len(o.only.split(",")) + 2) + "|")
    for w, by in got.items():
        med = {e: statistics.median(s) for e, s in by.items()}
        peers = {e: s for e, s in med.items() if e != "ours"}
        ratio = min(peers.values()) / med["ours"] if peers and "ours" in med else float("nan")
        print(
            f"| {w} | "
            + " | ".join(f"{med[e]:.2f} s" if e in med else "–" for e in o.only.split(","))
            + f" | {ratio:.2f} |"
        )
    if o.json:
        with open(o.json, "w") as f:
            json.dump(got, f, indent=1)


if __name__ == "__main__":
    main()
