"""A store, a lookup and a load by the adapters of an installed wheel: wheel_request.py PORT"""

import ctypes
import sys
import time

from lmc._native import SchedulerAdapter, WorkerAdapter
from lmc.ops import LoadStoreOp

BLOCK, HEADS, CONTENT = 16, 2, 8
DEADLINE = 30


def eventually(what):
    """Tries until it returns something true; that value."""
    end = time.monotonic() + DEADLINE
    while time.monotonic() < end:
        if value := what():
            return value
        time.sleep(0.005)
    raise SystemExit(f"no answer in {DEADLINE} s")


def main():
    endpoint = f"tcp://127.0.0.1:{sys.argv[1]}"
    engine = dict(model="wheel", world_size=1, hash_mode=False, block_size=BLOCK)
    worker = WorkerAdapter(endpoint, kv_rank=0, **engine)
    scheduler = SchedulerAdapter(endpoint, **engine)
    eventually(lambda: worker.healthy and scheduler.healthy)
    chunk, per_chunk = worker.chunk_size, worker.num_blocks_per_chunk
    # One chunk of values that all differ, then blocks to load it into.
    count = chunk * HEADS * CONTENT
    cache = (ctypes.c_float * (2 * count))(*range(count))
    shape = (2 * per_chunk, BLOCK, HEADS, CONTENT)
    strides = (BLOCK * HEADS * CONTENT, HEADS * CONTENT, CONTENT, 1)
    layers = [(ctypes.addressof(cache), shape, strides, "float32")]
    worker.register_kv_caches([(layers, None)], layout="NHD", tokens_per_block=BLOCK)
    tokens = list(range(chunk))

    def op(request, blocks):
        return LoadStoreOp(request, [list(blocks)], 0, chunk, token_ids=tokens)

    worker.submit_store_request(op("stored", range(per_chunk)))
    eventually(lambda: "stored" in worker.get_finished({"stored"})[0])
    scheduler.maybe_submit_lookup_request("loaded", token_ids=tokens)
    eventually(lambda: scheduler.check_lookup_result("loaded") is not None)
    found = scheduler.check_lookup_result("loaded")
    if found != chunk:
        raise SystemExit(f"{found} of {chunk} tokens were found: {worker.take_log()}")
    worker.submit_retrieve_request(op("loaded", range(per_chunk, 2 * per_chunk)))
    eventually(lambda: "loaded" in worker.get_finished(set())[1])
    errors = worker.get_block_ids_with_load_errors()
    scheduler.end_session("loaded")
    scheduler.shutdown()
    worker.shutdown()
    if errors or cache[count:] != cache[:count]:
        raise SystemExit(f"what was loaded is not what was stored: {errors}")
    print(f"{chunk} tokens, {ctypes.sizeof(cache) // 2} bytes")


if __name__ == "__main__":
    main()
