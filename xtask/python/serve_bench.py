"""Measures `vllm serve` by `vllm bench serve`, for `cargo xtask bench vllm`.

  serve_bench.py --server-bin target/release/lmc --package target/python --model FOLDER --trace FILE

Four set-ups in turn, each with an engine and a cache server of its own: no connector, the stock
connector with LMCache's server, the stock connector with ours, our connector with ours. vLLM's own
prefix cache is off, so that all reuse is the connector's. Prints one line of JSON.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import types

from harness import Server, VllmServe
from toys import worded

SETUPS = ("no connector", "stock, LMCache", "stock, lmc", "own, lmc")
# The model's positions, less the answer.
LONGEST = 8192 - 64
OUTPUT = 16
LOAD_DEADLINE = 900
TAKEN = ("mean_ttft_ms", "median_ttft_ms", "p90_ttft_ms", "p99_ttft_ms", "median_e2el_ms",
         "p99_e2el_ms", "request_throughput", "duration")


def trace_of(path, count, into):
    """Writes the first requests of a trace that the model has positions for, with short answers.
    Returns how many of their tokens were asked for before."""
    seen, repeated, total, taken = set(), 0, 0, 0
    with open(path) as lines, open(into, "w") as out:
        for line in lines:
            request = json.loads(line)
            if request["input_length"] > LONGEST or taken == count:
                continue
            taken += 1
            request["output_length"] = OUTPUT
            out.write(json.dumps(request) + "\n")
            whole = request["hash_ids"][: request["input_length"] // 512]
            repeated += 512 * sum(block in seen for block in whole)
            total += request["input_length"]
            seen.update(whole)
    return {"requests": taken, "tokens": total, "repeated": repeated}


class Setup:
    """An engine behind HTTP, and the server of its cache."""

    def __init__(self, name, args, model):
        self.server, flags, package = None, [], None
        if name != "no connector":
            options = types.SimpleNamespace(server_bin=args.server_bin, peer="LMCache" in name)
            self.server = Server(options).start()
            flags = ["--kv-transfer-config", self.server.transfer_config()]
        if name.startswith("own"):
            flags[1] = self.server.own_transfer_config()
            package = args.package
        self.engine = VllmServe(model, "--max-model-len", "8192", *flags, space=2,
                                threads=args.threads, paths=(package,)).ready()

    def load(self, model, *flags):
        """The figures of one run of vLLM's load generator."""
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve",
                       "--backend", "vllm", "--endpoint", "/v1/completions", "--model", model,
                       "--base-url", f"http://127.0.0.1:{self.engine.http}", "--ignore-eos",
                       "--percentile-metrics", "ttft,e2el", "--metric-percentiles", "90,99",
                       "--disable-tqdm", "--seed", "1", "--save-result", "--result-dir", folder,
                       "--result-filename", "result.json", *flags]
            # The trace's prompts are made of Python's hashes.
            env = dict(os.environ, HF_HUB_OFFLINE="1", PYTHONHASHSEED="0")
            done = subprocess.run(command, env=env, capture_output=True, text=True,
                                  timeout=LOAD_DEADLINE)
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
            with open(os.path.join(folder, "result.json")) as result:
                found = json.load(result)
        if found["failed"]:
            raise RuntimeError(f"{found['failed']} requests failed\n{self.engine.tail(30)}")
        return {name: found[name] for name in TAKEN} | {"completed": found["completed"]}

    def cached(self):
        """Tokens that the connector brought so far."""
        return self.engine.metric("vllm:external_prefix_cache_hits_total")

    def end(self):
        self.engine.kill()
        if self.server:
            self.server.discard()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server-bin", required=True)
    parser.add_argument("--package", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--trace", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=64, help="of each load")
    parser.add_argument("--threads", default="2", help="of each engine's computation")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = worded(args.model, os.path.join(folder, "model"))
        trace = os.path.join(folder, "trace.jsonl")
        about = trace_of(args.trace, args.requests, trace)
        loads = {
            "begin": ("--dataset-name", "random", "--input-len", "1024", "--output-len", "4",
                      "--num-prompts", "4", "--max-concurrency", "2"),
            "prefix_repetition": (
                "--dataset-name", "prefix_repetition", "--num-prompts", str(args.requests),
                "--prefix-repetition-num-prefixes", "8", "--prefix-repetition-prefix-len", "2048",
                "--prefix-repetition-suffix-len", "128", "--prefix-repetition-output-len", str(OUTPUT),
                "--max-concurrency", "4"),
            "timed_trace": (
                "--dataset-name", "timed_trace", "--dataset-path", trace, "--num-prompts",
                str(args.requests), "--timed-trace-chunk-hash-size", "512",
                "--timed-trace-sec-multiplier", "0.001"),
        }
        rounds = []
        for number in range(args.rounds):
            first = number % len(SETUPS)
            figures = {}
            for name in SETUPS[first:] + SETUPS[:first]:
                print(f"round {number + 1} of {args.rounds}: {name}", file=sys.stderr, flush=True)
                setup = Setup(name, args, model)
                try:
                    figures[name] = {}
                    for load, flags in loads.items():
                        before = setup.cached()
                        found = setup.load(model, *flags)
                        found["cached_tokens"] = setup.cached() - before
                        figures[name][load] = found
                finally:
                    setup.end()
            rounds.append(figures)
        print(json.dumps({"rounds": rounds, "trace": about, "threads": args.threads}))


if __name__ == "__main__":
    main()
