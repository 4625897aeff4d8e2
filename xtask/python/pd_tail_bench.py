"""Measures what the end of a prompt costs a decode engine, for `cargo xtask bench pd-tail`.

  pd_tail_bench.py --server-bin target/release/lmc --package target/python --model FOLDER

Two engines with a server each, which are peers, for each chunk size: with LMCache's connector, which
hands whole chunks over, and with lmc's own, which hands over the blocks after them too. The prefill
engine computes a prompt, and then the decode engine answers it. Prompts end anywhere in a chunk. vLLM's
own prefix cache is off. Prints one line of JSON.
"""

import argparse
import contextlib
import json
import sys
import tempfile
import time
import types

from checks import free_port
from harness import Server, VllmServe, open_http, prompts
from pd import text
from pd_bench import DEADLINE, first_token
from toys import worded

LENGTH = 2048
BLOCK = 32
SPREAD = 256
FLAGS = ("--max-model-len", "4096", "--block-size", str(BLOCK))
# Connector, and tokens of a chunk.
WAYS = (("stock", 32), ("stock", 64), ("stock", 256), ("lmc", 256))


class Pair:
    def __init__(self, args, model, stack, connector, chunk):
        options = types.SimpleNamespace(server_bin=args.server_bin, peer=False)
        at = [f"127.0.0.1:{free_port()}" for _ in range(2)]
        self.engines = []
        for own, other in (at, at[::-1]):
            server = Server(options, "--p2p-listen", own, "--p2p-peer", other, chunk=chunk).start()
            stack.callback(server.discard)
            config = server.own_transfer_config if connector == "lmc" else server.transfer_config
            engine = VllmServe(model, *FLAGS, "--kv-transfer-config", config(), space=2,
                               threads=args.threads, paths=(args.package,))
            stack.callback(engine.kill)
            self.engines.append(engine)
        for engine in self.engines:
            engine.ready()

    def measure(self, ids):
        """Seconds of the prefill, seconds to the first token after it, and tokens that the decode
        engine computes."""
        prefill, decode = self.engines
        body = {"prompt": text(ids), "max_tokens": 1, "temperature": 0}
        began = time.perf_counter()
        with open_http(prefill.http, "/v1/completions", body, DEADLINE) as answer:
            answer.read()
        prefilled = time.perf_counter() - began
        hits = "vllm:external_prefix_cache_hits_total"
        before = decode.metric(hits)
        taken = first_token(decode.http, ids)
        cached = decode.metric(hits) - before
        return {"prefill": prefilled, "seconds": taken, "computed": len(ids) - cached}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server-bin", required=True)
    parser.add_argument("--package", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--threads", default="1", help="of each engine's computation")
    args = parser.parse_args()
    # Evenly over all ends of a chunk.
    lengths = [LENGTH + (2 * n + 1) * SPREAD // (2 * args.rounds) for n in range(args.rounds)]
    ways = []
    with tempfile.TemporaryDirectory() as folder:
        model = worded(args.model, folder)
        for connector, chunk in WAYS:
            with contextlib.ExitStack() as stack:
                pair = Pair(args, model, stack, connector, chunk)
                # The first ones warm all up.
                for seed in range(3):
                    pair.measure(prompts(2000 + seed, LENGTH)[0])
                print(f"{connector}, chunks of {chunk} tokens", file=sys.stderr, flush=True)
                rounds = [pair.measure(prompts(2100 + at, length)[0])
                          for at, length in enumerate(lengths)]
            ways.append({"connector": connector, "chunk": chunk, "rounds": rounds})
    print(json.dumps({"ways": ways, "length": LENGTH, "spread": SPREAD, "block": BLOCK,
                      "threads": args.threads}))


if __name__ == "__main__":
    main()
