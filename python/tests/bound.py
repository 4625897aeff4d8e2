"""Processes that are bound as vLLM binds its workers.

  python -m tests.bound ALLOWED RANKS

An engine that may use some cores starts a worker for each rank, as vLLM does: by `spawn`, with the
rank's variables. A rank is bound to cores, then starts a thread as the connector does. Prints the
cores of each rank's copies, and of its first thread afterwards.
"""

import json
import multiprocessing
import os
import sys
import threading
from contextlib import contextmanager
from unittest import mock

from lmc.vllm.cores import beside_the_engine

TIMEOUT = 60


def worker(own, pipe):
    """Starts a thread that copies, which runs until all ranks have theirs."""
    os.sched_setaffinity(0, own)
    found, started, done = [], threading.Event(), threading.Event()

    def copies():
        found.append(sorted(os.sched_getaffinity(0)))
        started.set()
        done.wait(TIMEOUT)

    pipe.recv()
    with beside_the_engine():
        threading.Thread(target=copies, daemon=True).start()
        started.wait(TIMEOUT)
    pipe.send([found[0], sorted(os.sched_getaffinity(0))])
    pipe.recv()
    done.set()


@contextmanager
def running(ranks):
    """The pipes to a worker for each rank."""
    spawn, workers = multiprocessing.get_context("spawn"), []
    try:
        for own, variables in ranks:
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=worker, args=(own, theirs), daemon=True)
            with mock.patch.dict(os.environ, variables):
                process.start()
            workers.append((process, ours))
        yield [pipe for _, pipe in workers]
        for process, pipe in workers:
            pipe.send("end")
            process.join(TIMEOUT)
    finally:
        for process, _ in workers:
            process.kill()


def main(allowed, ranks):
    os.sched_setaffinity(0, allowed)
    found = []
    with running(ranks) as pipes:
        for pipe in pipes:
            pipe.send("start")
            if not pipe.poll(TIMEOUT):
                raise TimeoutError("a rank does not answer")
            found.append(pipe.recv())
    print(json.dumps(found))


if __name__ == "__main__":
    main(*map(json.loads, sys.argv[1:]))
