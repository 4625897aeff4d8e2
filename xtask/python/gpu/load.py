"""A bf16 matrix product on a GPU: its time alone, beside lmc's copies, and beside what bounds these.

Plain large copies are what any copy costs at this rate: pinned memory, 256 MiB at a time, one
direction after the other as a store and a retrieve do. Empty kernels are what any kernel of another
process costs: one each millisecond, on 16 numbers.
"""

import json
import os
import statistics
import subprocess
import sys
import time

import torch

LAYOUT = ["--chunks", "64", "--rounds", "1", "--layers", "32", "--heads", "8"]


def products(seconds):
    """Milliseconds of each product."""
    a = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    b = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        begin, done = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(8):
            torch.mm(a, b)
        done.record()
        done.synchronize()
        times.append(begin.elapsed_time(done) / 8)
    return times


def copy_until(stop):
    """Copies between pinned memory and the GPU until a file exists. Prints the rate."""
    size = 256 << 20
    host, device = torch.empty(size, dtype=torch.uint8, pin_memory=True), torch.empty(size, dtype=torch.uint8, device="cuda")
    began, count = time.perf_counter(), 0
    while not os.path.exists(stop):
        host.copy_(device, non_blocking=True)
        device.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        count += 2
    print(json.dumps({"store_gb_s": round(count * size / (time.perf_counter() - began) / 1e9, 2)}))


def launch_until(stop):
    """Launches a kernel each millisecond until a file exists."""
    numbers = torch.zeros(16, device="cuda")
    while not os.path.exists(stop):
        numbers.add_(1)
        torch.cuda.synchronize()
        time.sleep(0.001)


BESIDE = {"copies of 256 MiB": copy_until, "empty kernels": launch_until}


def main():
    if sys.argv[1] in BESIDE:
        return BESIDE[sys.argv[1]](sys.argv[2])
    url, client = sys.argv[1], os.path.join(os.path.dirname(os.path.abspath(__file__)), "client.py")
    products(1)
    for mode in sys.argv[2:]:
        stop = f"/tmp/stop-{os.getpid()}-{mode[:3]}"
        alone = products(2)
        command = [client, "--url", url, "--mode", mode, "--until", stop, *LAYOUT] if "driven" in mode else [__file__, mode, stop]
        beside = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL)
        time.sleep(9)
        loaded = products(3)
        open(stop, "w").close()
        out = beside.communicate(timeout=60)[0].strip().splitlines()
        copies = json.loads(out[-1]) if out else {}
        again = products(2)
        alone = statistics.median(alone + again)
        print(json.dumps({"mode": mode, "product_ms_alone": round(alone, 4), "product_ms_beside": round(statistics.median(loaded), 4), "slower": round(statistics.median(loaded) / alone - 1, 4), "store_gb_s": copies.get("store_gb_s"), "retrieve_gb_s": copies.get("retrieve_gb_s"), "rounds": copies.get("rounds")}), flush=True)


if __name__ == "__main__":
    main()
