"""vLLM's own `Scheduler` and `AsyncScheduler` with lmc's connector and `lmc serve`, by seeds:

  scheduler.py --server-bin target/python/bin/lmc --package target/python [--seeds N]
  LMC_SEED=N scheduler.py …                      plays one seed again

vLLM on CPU has neither asynchronous scheduling nor model runner V2. Here one or two
workers are fake_runner.py, which makes vLLM's calls of the connector in the order of either runner.
A seed decides what is asked and aborted when, and which faults the server has; not when copies end.
"""

import argparse
import collections
import logging
import os
import sys
import time
import traceback

import checks
from checks import check
from harness import Child, Server

SEEDS = 64
# How often each of these must be seen in a run of all seeds, or the run shows nothing.
WANTED = {
    "loads": 200, "loads_at_end": 100, "loads_of_two_ranks": 50, "failed_loads": 2, "saves": 500,
    "preemptions": 200, "finished": 500, "aborted": 200, "aborted_while_loading": 20, "resets": 40,
    "refused_resets": 40, "drafts_accepted": 1000, "drafts_rejected": 1000, "kills": 5, "stops": 20,
    "ahead": 1000, "loads_with_windows": 500, "loads_of_tails": 100,
    "loads_with_two_windows": 50, "loads_with_one_window_alone": 50,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server-bin", default="target/release/lmc")
    parser.add_argument("--model", default=os.path.join(sys.prefix, "model"))
    parser.add_argument("--package", required=True, help="folder with lmc's Python package")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    args = parser.parse_args()
    args.peer = None
    checks.show_passed = False
    sys.path.insert(0, args.package)
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    from fake_engine import CHUNK, Engine

    # Each failed load and each dropped store is a warning.
    logging.disable(logging.ERROR)
    chosen = os.environ.get("LMC_SEED")
    seeds = range(args.seeds) if chosen is None else [int(chosen)]
    counts, failures = collections.Counter(), collections.defaultdict(list)
    started = time.monotonic()
    server = Server(args, chunk=CHUNK)
    try:
        server.start()
        for seed in seeds:
            engine = Engine(seed, args.model, server)
            kind = engine.plan.kind
            failures[kind]
            try:
                engine.play()
            except Exception as error:
                failures[kind].append(f"LMC_SEED={seed}: {error}")
                print(f"---- LMC_SEED={seed}, {engine.plan}\n{traceback.format_exc()}", flush=True)
            finally:
                counts += engine.counts
                engine.shutdown()
                engine.come_back()
    finally:
        server.stop()
    for kind, found in sorted(failures.items()):
        check(f"{kind}: answers, loads and blocks are right", not found, "; ".join(found))
    if chosen is None and args.seeds == SEEDS:
        for name, least in WANTED.items():
            check(f"seen: {name}", counts[name] >= least, f"{counts[name]} of {least}")
    print(f"{dict(counts)}, {time.monotonic() - started:.0f} s")
    for child in Child.running:
        if checks.failed:
            print(f"---- end of {child.log.name}\n{child.tail(20)}", flush=True)
        else:
            os.unlink(child.log.name)
    checks.finish()


if __name__ == "__main__":
    main()
