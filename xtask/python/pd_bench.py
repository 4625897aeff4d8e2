"""Measures prefill on one engine and decode on another, for `cargo xtask bench pd`.

  pd_bench.py --server-bin target/release/lmc --package target/python --model FOLDER

Two engines with a server each, which are peers, and a proxy before them that sends a prompt to one
after the other, one that sends it to both at once, and one that has it pushed. The prefill engine computes a prompt in eight
steps. vLLM's own prefix cache is off. Each engine has a core of its own: one that waits polls. The decode
engine's server reaches the other through `--link`, a port that leads to `--listen` over a narrow link.
Prints one line of JSON: seconds to the first token.
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
import types

from checks import free_port
from harness import Child, Server, VllmServe, eventually, open_http, prompts
from pd import answers, text
from toys import worded

STEP = 512
STEPS = 8
FLAGS = ("--max-model-len", "8192", "--max-num-batched-tokens", str(STEP))
DEADLINE = 120
WAYS = ("prefill engine", "decode engine, warm", "decode engine, cold", "one after the other",
        "both at once", "pushed")


def first_token(port, ids):
    """The time from a request to the first part of its streamed answer."""
    body = {"prompt": text(ids), "max_tokens": 4, "temperature": 0, "stream": True}
    began = time.perf_counter()
    with open_http(port, "/v1/completions", body, DEADLINE) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                taken = time.perf_counter() - began
                for _ in answer:
                    pass
                return taken
    raise RuntimeError("an answer without a token")


class Pair:
    def __init__(self, args, model, stack):
        options = types.SimpleNamespace(server_bin=args.server_bin, peer=False)
        at, other = f"127.0.0.1:{args.link}", f"127.0.0.1:{free_port()}"
        flags = (("--p2p-listen", f"127.0.0.1:{args.listen}", "--p2p-advertise", at),
                 ("--p2p-listen", other, "--p2p-peer", at))
        self.servers = []
        for own in flags:
            server = Server(options, *own).start()
            stack.callback(server.discard)
            self.servers.append(server)
        self.prefill, self.decode = (self.engine(args, model, server, stack, core)
                                     for core, server in enumerate(self.servers))
        self.prefill.ready()
        self.decode.ready()
        self.one, self.both, self.pushed = (
            self.proxy(args, stack, *flags)
            for flags in ((), ("--prefill-peer", at), ("--decode-peer", other)))

    @staticmethod
    def engine(args, model, server, stack, core):
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {sorted(cores)[core % len(cores)]})
        engine = VllmServe(model, *FLAGS, "--kv-transfer-config", server.own_transfer_config(),
                           space=2, threads=args.threads, paths=(args.package,))
        os.sched_setaffinity(0, cores)
        stack.callback(engine.kill)
        return engine

    def proxy(self, args, stack, *flags):
        port = free_port()
        proxy = Child("proxy", [
            args.server_bin, "proxy", "--listen", f"127.0.0.1:{port}",
            "--prefill", f"http://127.0.0.1:{self.prefill.http}",
            "--decode", f"http://127.0.0.1:{self.decode.http}", *flags])
        stack.callback(proxy.kill)
        if not eventually(lambda: answers(port), 60):
            raise RuntimeError(proxy.tail())
        return port

    def hits(self):
        return self.decode.metric("vllm:external_prefix_cache_hits_total")

    def measure(self, way, seed):
        """The time to the first token of a prompt that is new, and the tokens that the decode engine
        took from the cache."""
        (ids,) = prompts(seed, STEP * STEPS)
        if way == "decode engine, warm":
            # In the memory of its own server.
            first_token(self.decode.http, ids)
        port = {"prefill engine": self.prefill.http, "one after the other": self.one,
                "both at once": self.both, "pushed": self.pushed}.get(way, self.decode.http)
        before = self.hits()
        taken = first_token(port, ids)
        return taken, self.hits() - before


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server-bin", required=True)
    parser.add_argument("--package", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--listen", required=True, help="port of the prefill engine's server for peers")
    parser.add_argument("--link", required=True, help="port under which the other server reaches it")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", default="1", help="of each engine's computation")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        pair = Pair(args, worded(args.model, folder), stack)
        rounds = []
        # The first round warms all up.
        for number in range(args.rounds + 1):
            print(f"round {number} of {args.rounds}", file=sys.stderr, flush=True)
            first = number % len(WAYS)
            figures = {}
            for at, way in enumerate(WAYS[first:] + WAYS[:first]):
                taken, cached = pair.measure(way, 1000 + number * len(WAYS) + at)
                figures[way] = {"seconds": taken, "cached_tokens": cached}
            rounds.append(figures)
        print(json.dumps({"rounds": rounds[1:], "tokens": STEP * STEPS, "threads": args.threads}))


if __name__ == "__main__":
    main()
