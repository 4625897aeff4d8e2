"""A bf16 matrix product on a GPU while lmc copies there: the time of a product alone and beside it."""

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


def main():
    url, client = sys.argv[1], os.path.join(os.path.dirname(os.path.abspath(__file__)), "client.py")
    products(1)
    for mode in ("lmcache_driven", "engine_driven"):
        stop = f"/tmp/stop-{os.getpid()}-{mode}"
        alone = products(2)
        beside = subprocess.Popen([sys.executable, client, "--url", url, "--mode", mode, "--until", stop, *LAYOUT], stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL)
        time.sleep(12)
        loaded = products(4)
        open(stop, "w").close()
        out = beside.communicate(timeout=60)[0].strip().splitlines()
        copies = json.loads(out[-1]) if out else {}
        again = products(2)
        alone = statistics.median(alone + again)
        print(json.dumps({"mode": mode, "product_ms_alone": round(alone, 4), "product_ms_beside": round(statistics.median(loaded), 4), "slower": round(statistics.median(loaded) / alone - 1, 4), "store_gb_s": copies.get("store_gb_s"), "retrieve_gb_s": copies.get("retrieve_gb_s"), "rounds": copies.get("rounds")}), flush=True)


if __name__ == "__main__":
    main()
