"""Times LMCache's own disk adapters with the chunks of `cargo xtask bench disk`.

    disk_peer.py fs|raw_block FOLDER CHUNK_BYTES COUNT AT_A_TIME

Stores COUNT chunks, so many at a time, loads them in another order, then loads them again, outside
the time, and compares every byte. Prints one line of JSON. Neither adapter syncs what it writes; the line says so.
"""

import json
import os
import random
import resource
import sys
import time

import torch
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj


def adapter(name, folder, chunk, count):
    os.makedirs(folder, exist_ok=True)
    if name == "fs":
        from lmcache.v1.distributed.l2_adapters import fs_l2_adapter as module

        return module.FSL2Adapter(module.FSL2AdapterConfig(folder, use_odirect=True))
    from lmcache.v1.distributed.l2_adapters import raw_block_l2_adapter as module

    device = os.path.join(folder, "device")
    slot = chunk + (1 << 20)
    size = slot * (count + 8) + (512 << 20)
    with open(device, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)
    config = module.RawBlockL2AdapterConfig(
        device_path=device, slot_bytes=slot, io_engine="io_uring", num_store_workers=4,
    )
    return module.RawBlockL2Adapter(config)


def aligned(size):
    """A buffer at a page's start, as LMCache's own pool hands out."""
    raw = torch.empty(size + 4096, dtype=torch.uint8)
    start = -raw.data_ptr() % 4096
    return raw[start:start + size]


def memory(buffer):
    shape = torch.Size([buffer.numel()])
    metadata = MemoryObjMetadata(
        shape=shape, dtype=torch.uint8, address=0, phy_size=buffer.numel(), ref_count=1,
        fmt=MemoryFormat.KV_2LTD, shapes=[shape], dtypes=[torch.uint8],
    )
    return TensorMemoryObj(buffer, metadata, None)


def key(number):
    return ObjectKey(chunk_hash=number.to_bytes(32, "little"), model_name="bench", kv_rank=0)


def cpu():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def drive(numbers, at_a_time, submit, ended):
    """Keeps so many operations of one chunk each under way; seconds and CPU seconds."""
    waiting, under_way = list(reversed(numbers)), {}
    started, used = time.perf_counter(), cpu()
    deadline = time.monotonic() + 300
    while waiting or under_way:
        while waiting and len(under_way) < at_a_time:
            number = waiting.pop()
            under_way[submit(number)] = number
        done = ended(under_way)
        for task in done:
            del under_way[task]
        if time.monotonic() > deadline:
            raise RuntimeError(f"{len(under_way)} operations never ended")
        if not done:
            time.sleep(0.0001)
    return time.perf_counter() - started, cpu() - used


def main():
    name, folder, chunk, count, at_a_time = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
    l2 = adapter(name, folder, chunk, count)
    generator = torch.Generator().manual_seed(1)
    data = [aligned(chunk).random_(0, 256, generator=generator) for _ in range(at_a_time)]
    into = {}

    def store(number):
        return l2.submit_store_task([key(number)], [memory(data[number % at_a_time])])

    def stored(under_way):
        done = l2.pop_completed_store_tasks()
        for task, result in done.items():
            if not result.is_successful():
                raise RuntimeError(f"store of chunk {under_way[task]} failed")
        return list(done)

    free = [aligned(chunk) for _ in range(at_a_time)]

    def load(number):
        buffer = free.pop()
        task = l2.submit_load_task([key(number)], [memory(buffer)])
        into[task] = buffer
        return task

    wrong = []

    def compared(under_way):
        return loaded(under_way, lambda number, buffer: torch.equal(buffer, data[number % at_a_time]))

    def loaded(under_way, right=lambda number, buffer: True):
        done = []
        for task, number in under_way.items():
            found = l2.query_load_result(task)
            if found is None:
                continue
            done.append(task)
            buffer = into.pop(task)
            if not found.test(0) or not right(number, buffer):
                wrong.append(number)
            free.append(buffer)
        return done

    numbers = list(range(count))
    write_s, write_cpu = drive(numbers, at_a_time, store, stored)
    random.Random(1).shuffle(numbers)
    lookup = l2.submit_lookup_and_lock_task([key(n) for n in numbers], {})
    while l2.query_lookup_and_lock_result(lookup) is None:
        time.sleep(0.001)
    read_s, read_cpu = drive(numbers, at_a_time, load, loaded)
    drive(numbers, at_a_time, load, compared)
    if wrong:
        raise RuntimeError(f"{len(wrong)} chunks came back wrong, such as {wrong[:3]}")
    total = chunk * count
    print(json.dumps({
        "durable": False,
        "write": {"bytes": total, "seconds": write_s, "cpu_seconds": write_cpu},
        "read": {"bytes": total, "seconds": read_s, "cpu_seconds": read_cpu},
    }), flush=True)
    # Its threads may hold the exit up.
    os._exit(0)


main()
