"""Overwrites each block that vLLM frees with a pattern, and looks for the pattern where KV data
should be.

For an engine whose scheduler and worker are in one process. A block that vLLM frees belongs to no
request any more: vLLM may write anything into it from then on. The pattern does that at once, so
that a store that still reads such a block, or a load that still writes to one, shows itself.
"""

import os
import signal
import time

import torch

# Finite in every element type (1.5e16 as float32), so that it stays invisible in positions that
# attention masks.
BYTE = 0x5A
WORDS = {2: torch.int16, 4: torch.int32}


class Poison:
    """The pattern in the free blocks of one engine."""

    def __init__(self, core):
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self.scheduler = core.scheduler
        self.pool = self.scheduler.kv_cache_manager.block_pool
        runner = core.model_executor.driver_worker.worker.model_runner
        self.layers = [self.words(layer) for layer in runner.kv_caches]
        self.byte = BYTE
        self.connector = get_kv_transfer_group()
        self.worker = self.connector._worker
        self.counts = {"freed": 0, "loaded": 0, "preempted": 0, "slid": 0}
        # Blocks that were written to while they were free, and loads that brought the pattern or
        # left it.
        self.faults = []
        # Free blocks that hold the pattern, and blocks that shall have it before the next step.
        self.free, self.due = set(), set()
        # Blocks of loads under way, by request; requests whose loads have ended just now.
        self.loads, self.ended = {}, set()
        # What frees blocks that a store may still read, if something does.
        self.taking = None
        # A process to stop when the next store begins; what to do then.
        self.stop_at_store, self.preempt_then, self.stopped = None, False, None
        for owner, name in (
            (self.pool, "free_blocks"),
            (self.pool, "get_new_blocks"),
            (self.scheduler, "schedule"),
            (self.scheduler, "_preempt_request"),
            (self.scheduler.kv_cache_manager.coordinator, "remove_skipped_blocks"),
            (self.connector, "handle_preemptions"),
            (self.connector, "get_transfer_results"),
            (self.connector, "get_block_ids_with_load_errors"),
            (self.worker, "begin_step"),
            (self.worker, "submit_stores"),
        ):
            self.wrap(owner, name)

    def wrap(self, owner, name):
        """Puts the method of this class in front of the owner's, which it gets as first argument."""
        around, call = getattr(self, name), getattr(owner, name)
        setattr(owner, name, lambda *args, **named: around(call, *args, **named))

    def words(self, layer):
        if layer.shape[0] != self.pool.num_gpu_blocks:
            raise RuntimeError(f"a KV cache of shape {tuple(layer.shape)} with "
                               f"{self.pool.num_gpu_blocks} blocks")
        return layer.view(WORDS[layer.element_size()])

    def word(self, layer):
        return int.from_bytes(bytes([self.byte]) * layer.element_size(), "little")

    def write(self, blocks):
        for layer in self.layers:
            layer[blocks] = self.word(layer)

    def is_whole(self, block):
        return all(bool((layer[block] == self.word(layer)).all()) for layer in self.layers)

    def is_in(self, block):
        return any(bool((layer[block] == self.word(layer)).any()) for layer in self.layers)

    def free_blocks(self, call, blocks):
        blocks = list(blocks)
        call(blocks)
        # What vLLM's own prefix cache can find again stays until it is evicted.
        freed = [b.block_id for b in blocks if b.ref_cnt == 0 and not b.is_null
                 and not (self.pool.enable_caching and b.block_hash is not None)]
        self.counts["freed"] += len(freed)
        if self.taking is not None:
            # The connector may read them until its `handle_preemptions` returns.
            self.counts[self.taking] += len(freed)
            self.due.update(freed)
        elif freed:
            self.due.difference_update(freed)
            self.free.update(freed)
            self.write(freed)

    def get_new_blocks(self, call, count):
        blocks = call(count)
        for block in (block.block_id for block in blocks):
            if block not in self.free:
                self.due.add(block)
            elif not self.is_whole(block):
                self.faults.append(f"block {block} was written to while it was free")
        self.free.difference_update(block.block_id for block in blocks)
        return blocks

    def schedule(self, call, *args, **named):
        if self.stopped is not None and self.preempt_then:
            self.preempt_then = False
            while self.scheduler.running:
                request = self.scheduler.running.pop()
                self.scheduler._preempt_request(request, time.monotonic())
            # As vLLM's `reset_prefix_cache` does, which preempts in the same way.
            self.scheduler.prev_step_scheduled_req_ids.clear()
        return call(*args, **named)

    def _preempt_request(self, call, *args, **named):
        return self.take("preempted", call, *args, **named)

    def remove_skipped_blocks(self, call, *args, **named):
        return self.take("slid", call, *args, **named)

    def take(self, what, call, *args, **named):
        self.taking = what
        try:
            return call(*args, **named)
        finally:
            self.taking = None

    def handle_preemptions(self, call, metadata):
        if self.stopped is not None and metadata.preempted:
            os.kill(self.stopped, signal.SIGCONT)
            self.stopped = None
        call(metadata)
        # From here on the step may write to any block that is not a request's.
        if self.due:
            self.write(sorted(self.due))
            self.free.update(b for b in self.due if self.pool.blocks[b].ref_cnt == 0)
            self.due.clear()

    def begin_step(self, call, step):
        size = self.scheduler.block_size
        self.loads |= {op.request_id: [] for op in step.loads}
        for op in step.loads:
            skipped = -(-op.skip_first_n_tokens // size)
            # Block 0 stands for those that a window has left.
            self.loads[op.request_id] += [
                block for blocks in op.block_ids for block in blocks[skipped:] if block]
        call(step)

    def get_transfer_results(self, call, finished):
        results = call(finished)
        self.ended = results.finished_recving - results.failed_recving
        return results

    def get_block_ids_with_load_errors(self, call):
        # vLLM asks for it after the requests that have ended, and the connector names a request's
        # failed blocks no later than the request.
        failed = call()
        for request in self.ended:
            for block in set(self.loads.pop(request, ())) - failed:
                self.counts["loaded"] += 1
                if self.is_in(block):
                    self.faults.append(f"block {block} holds the pattern after its load")
        self.ended = set()
        return failed

    def submit_stores(self, call, step):
        if self.stop_at_store is not None and step.stores:
            stop(self.stop_at_store)
            self.stopped, self.stop_at_store = self.stop_at_store, None
        call(step)

    def report(self, _):
        return self.counts | {"faults": self.faults[:10]}

    def stop_server(self, command):
        """Stops a process when the next store begins. With `preempt`, what runs is preempted then,
        and the process goes on when the connector learns of that."""
        self.stop_at_store, self.stopped = command["pid"], None
        self.preempt_then = command.get("preempt", False)
        return {}

    def inject(self, command):
        """Injects a fault: the connector lets vLLM write to blocks that a store still reads.
        Another pattern shows what comes of it."""
        self.byte = command["byte"]
        if command["fault"] == "preempted":
            self.worker.handle_preemptions = lambda step: None
            return {}
        side = self.scheduler.connector._scheduler
        call = side.request_finished

        def request_finished(request, tables):
            call(request, tables)
            side._next.finished.discard(request.request_id)
            return False

        side.request_finished = request_finished
        return {}


def stop(pid):
    """Stops a process and waits until all its threads have stopped."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 10
    while any(state(pid, thread) != "T" for thread in os.listdir(f"/proc/{pid}/task")):
        if time.monotonic() > deadline:
            raise RuntimeError(f"process {pid} does not stop")
        time.sleep(0.001)


def state(pid, thread):
    try:
        with open(f"/proc/{pid}/task/{thread}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "T"  # It has ended.
