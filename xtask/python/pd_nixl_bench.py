"""Measures a hand-over on one host beside vLLM's NixlConnector, for `cargo xtask bench pd-nixl`.

  pd_nixl_bench.py --server-bin target/release/lmc --package target/python --model FOLDER --nixl FOLDER

Three pairs of engines, one after the other, since threads of NIXL take time of the cores also while
nothing is handed over: with lmc's own connector and servers that are peers; with NixlConnector; with both
NixlConnector and LMCache's connector, which keeps the prompts in lmc. Prompts are computed in eight steps;
vLLM's own prefix cache is off. `--nixl`: the Python packages with NIXL. Prints one line of JSON: seconds
to the first token.
"""

import argparse
import contextlib
import json
import sys
import tempfile

from checks import free_port
from harness import open_http, prompts
from nixl_pair import NixlPair, nixl_packages
from pd import text
from pd_bench import DEADLINE, FLAGS, STEP, STEPS, Pair, first_token
from toys import worded

OWN = ("prefill engine", "decode engine, warm", "one after the other", "both at once", "pushed")
ALONE = ("NixlConnector, prefill engine", "NixlConnector")
BOTH = ("both connectors, prefill engine", "both connectors", "both connectors, again")


def answer(port, ids):
    body = {"prompt": text(ids), "max_tokens": 8, "temperature": 0, "skip_special_tokens": False}
    with open_http(port, "/v1/completions", body, DEADLINE) as found:
        return json.load(found)["choices"][0]["text"]


def measure(rounds, ways, before):
    """Adds the figures of ways to the rounds: of each its port, and the engine whose tokens from elsewhere
    count. `before`: ports that have a prompt first. Returns the answers to one prompt."""
    (ids,) = prompts(999, STEP * STEPS)
    found = {answer(port, ids) for port, _ in ways.values()}
    hits = "vllm:external_prefix_cache_hits_total"
    names = list(ways)
    for number, figures in enumerate(rounds):
        print(f"round {number} of {len(rounds) - 1}", file=sys.stderr, flush=True)
        first = number % len(names)
        for at, way in enumerate(names[first:] + names[:first]):
            (ids,) = prompts(1000 + number * len(names) + at, STEP * STEPS)
            if way in before:
                first_token(before[way], ids)
            port, engine = ways[way]
            cached = engine.metric(hits)
            taken = first_token(port, ids)
            figures[way] = {"seconds": taken, "cached_tokens": engine.metric(hits) - cached}
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server-bin", required=True)
    parser.add_argument("--package", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--nixl", required=True)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", default="1", help="of each engine's computation")
    args = parser.parse_args()
    args.listen = free_port()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as packages:
        model = worded(args.model, folder)
        nixl_packages(packages, args.nixl)
        rounds = [{} for _ in range(args.rounds + 1)]
        with contextlib.ExitStack() as stack:
            own = Pair(args, model, stack, args.listen)
            ports = (own.prefill.http, own.decode.http, own.one, own.both, own.pushed)
            ways = {way: (port, own.decode) for way, port in zip(OWN, ports, strict=True)}
            found = measure(rounds, ways, {OWN[1]: own.decode.http})
        with contextlib.ExitStack() as stack:
            nixl = NixlPair(args.server_bin, model, packages, stack, False, FLAGS, args.threads)
            ways = dict(zip(ALONE, ((nixl.prefill.http, nixl.decode), (nixl.port, nixl.decode)),
                            strict=True))
            found |= measure(rounds, ways, {})
        with contextlib.ExitStack() as stack:
            both = NixlPair(args.server_bin, model, packages, stack, True, FLAGS, args.threads)
            # The last one's prompt is what the prefill engine's server keeps.
            ways = dict(zip(BOTH, ((both.prefill.http, both.decode), (both.port, both.decode),
                                   (both.port, both.prefill)), strict=True))
            found |= measure(rounds, ways, {BOTH[2]: both.port})
        if len(found) != 1:
            raise RuntimeError(f"answers differ: {found}")
        # The first round has warmed all up.
        print(json.dumps({"rounds": rounds[1:], "tokens": STEP * STEPS, "threads": args.threads}))


if __name__ == "__main__":
    main()
