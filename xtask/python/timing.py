"""Time that a connector takes in an engine of one process: in the scheduler step by step, and in the
worker's copies."""

import contextlib
import glob
import os
import time

CONNECTOR_CALLS = (
    "on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc",
    "build_connector_meta", "update_connector_output", "request_finished",
    "request_finished_all_groups", "get_kv_connector_stats", "take_events",
)


class Timing:
    """Times of an engine's connector since `time connector` was asked for."""

    def __init__(self, scheduler):
        self.scheduler = scheduler
        self.steps = []
        # Bytes and seconds of the stock connector's copies.
        self.stock = {"store": [0, 0.0], "retrieve": [0, 0.0]}

    def operations(self):
        """The commands of engine.py that this class answers."""
        return {
            "time connector": self.time_connector,
            "connector times": self.connector_times,
            "time stock copies": self.time_stock_copies,
            "copies": self.copies,
            "worker stats": self.worker_stats,
            "cores": self.cores,
        }

    def time_connector(self, _):
        """Begins again; the methods are wrapped once."""
        if not self.steps:
            for name in CONNECTOR_CALLS:
                self.wrap(self.scheduler.connector, name, self.timed)
            self.wrap(self.scheduler, "schedule", self.begins)
            self.wrap(self.scheduler, "update_from_output", self.ends)
        self.steps = [self.step()]
        return {}

    def wrap(self, owner, name, around):
        call = getattr(owner, name)
        setattr(owner, name, lambda *args, **named: around(name, call, args, named))

    def step(self):
        return {"seconds": 0.0, "lookups": 0, "running": [0, 0]}

    def timed(self, name, call, args, named):
        began = time.perf_counter()
        try:
            return call(*args, **named)
        finally:
            self.steps[-1]["seconds"] += time.perf_counter() - began
            self.steps[-1]["lookups"] += name == "get_num_new_matched_tokens"

    def begins(self, _, call, args, named):
        self.steps[-1]["running"][0] = len(self.scheduler.running)
        return call(*args, **named)

    def ends(self, _, call, args, named):
        try:
            return call(*args, **named)
        finally:
            self.steps[-1]["running"][1] = len(self.scheduler.running)
            # Calls between two steps count for the next.
            self.steps.append(self.step())

    def connector_times(self, _):
        return {"steps": self.steps}

    def time_stock_copies(self, _):
        """Times the two functions that the stock connector copies with, on its worker's thread."""
        from lmcache.v1.multiprocess.transfer_context import worker_transfer

        gather = worker_transfer.gather_paged_kv_to_cpu
        scatter = worker_transfer.scatter_cpu_to_paged_kv

        def store(*args, **named):
            began = time.perf_counter()
            chunks = gather(*args, **named)
            self.count("store", chunks, began)
            return chunks

        def retrieve(caches, blocks, chunks, *args, **named):
            began = time.perf_counter()
            scatter(caches, blocks, chunks, *args, **named)
            self.count("retrieve", chunks, began)

        worker_transfer.gather_paged_kv_to_cpu = store
        worker_transfer.scatter_cpu_to_paged_kv = retrieve
        return {}

    def count(self, which, chunks, began):
        self.stock[which][0] += sum(chunk.nbytes for chunk in chunks)
        self.stock[which][1] += time.perf_counter() - began

    def copies(self, _):
        """Bytes that the stock connector has stored and retrieved, and the seconds of their copies."""
        return self.stock

    def worker_stats(self, _):
        """Figures of the worker's side of lmc's connector, and of its thread."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        stats = get_kv_transfer_group()._worker.adapter.stats()
        for task in glob.glob("/proc/self/task/*"):
            with contextlib.suppress(FileNotFoundError), \
                    open(f"{task}/comm") as name, open(f"{task}/schedstat") as times:
                if name.read().strip() == "lmc-worker":
                    ran, waited, _ = map(int, times.read().split())
                    stats |= {"thread_ran_nanos": ran, "thread_waited_nanos": waited}
        return stats

    def cores(self, _):
        """Threads of the computation, and the cores that each thread of this process may run on,
        but for those of lmc."""
        import torch

        bound = set()
        for task in os.listdir("/proc/self/task"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError), \
                    open(f"/proc/self/task/{task}/comm") as name:
                if not name.read().startswith("lmc-"):
                    bound.add(tuple(sorted(os.sched_getaffinity(int(task)))))
        return {"threads": torch.get_num_threads(), "bound": sorted(bound)}
