"""lmc's own worker on tensors of a GPU, in the engine's process: bytes, order, rates, price.

The worker is the one that vLLM's connector has. One line of JSON for each of the checks; ends with 1
if a byte was wrong.
"""

import argparse
import itertools
import json
import os
import random
import statistics
import sys
import threading
import time

import torch

from lmc._native import SchedulerAdapter, WorkerAdapter, chunk_hashes
from lmc.ops import LoadStoreOp
from lmc.vllm.metadata import Step
from lmc.vllm.worker import WorkerSide

CHUNK = 256
DEADLINE = 60
# Axes blocks, heads, tokens, content in the order in which they lie in memory.
LAYOUTS = {"tokens_first": (0, 2, 1, 3), "heads_first": (0, 1, 2, 3), "latent": (0, 1, 2, 3)}


NUMBERS = itertools.count()


class Engine:
    """Tensors of a worker as vLLM's runner makes them, and the two adapters."""

    def __init__(self, args, layout, layers, heads, block, prompts, chunks, later=False, windows=(None,), hash_mode=False):
        """`later`: `register` is called by the caller. The KV groups, one for each of `windows`, share
        the tensors, and so have blocks of their own."""
        self.layout, self.block, self.chunks, self.windows = layout, block, chunks, windows
        self.per_chunk = CHUNK // block
        self.blocks = prompts * chunks * self.per_chunk * len(windows) + 9
        axes, is_latent = LAYOUTS[layout], layout == "latent"
        shape = (self.blocks, 1, block, 576) if is_latent else (self.blocks, heads, block, 256)
        lying = [shape[axis] for axis in axes]
        count = self.blocks * shape[1] * shape[2] * shape[3]
        self.tensors = []
        for _ in range(layers):
            raw = torch.randint(-30000, 30000, (count,), dtype=torch.int16, device=args.device)
            view = raw.view(torch.bfloat16).view(lying)
            self.tensors.append(view.permute([axes.index(axis) for axis in range(4)]))
        self.chunk_bytes = count // self.blocks * 2 * layers * self.per_chunk * len(windows)
        self.run_bytes = count // self.blocks * 2
        common = {"model": f"own/{os.getpid()}/{next(NUMBERS)}", "world_size": 1, "hash_mode": hash_mode, "block_size": block}
        self.scheduler = SchedulerAdapter(args.endpoint, **common)
        self.adapter = WorkerAdapter(args.endpoint, kv_rank=0, **common)
        self.worker = WorkerSide(self.adapter, can_store=True)
        self.rng = random.Random(7)
        if not later:
            self.register()

    def register(self):
        axes, is_latent = LAYOUTS[self.layout], self.layout == "latent"
        began = time.perf_counter()
        groups = [(self.tensors, window) for window in self.windows]
        self.worker.register_kv_caches(groups, axes, blocks=self.blocks, block_size=self.block, is_latent=is_latent)
        self.register_ms = (time.perf_counter() - began) * 1e3

    def prompt(self):
        return self.rng.choices(range(1, 30000), k=CHUNK * self.chunks)

    def ids(self, prompts, in_order=False):
        ids = list(range(1, self.blocks))  # vLLM never names block 0
        if not in_order:
            self.rng.shuffle(ids)
        wanted = self.per_chunk * self.chunks
        return [ids[number * wanted : (number + 1) * wanted] for number in range(prompts)]

    def op(self, name, tokens, ids):
        return LoadStoreOp(name, [ids], 0, len(tokens), token_ids=tokens)

    def until(self, done, what):
        end = time.perf_counter() + DEADLINE
        while not done():
            if time.perf_counter() > end:
                raise SystemExit(f"{what} did not end in {DEADLINE} s: {self.adapter.take_log()}")
            time.sleep(0.00005)

    def store(self, name, tokens, ids):
        self.store_all([self.op(name, tokens, ids)])

    def store_all(self, ops):
        self.worker.submit_stores(Step(stores=ops))

    def stored(self, name):
        return name in self.worker.get_finished(Step(finished={name}))[0]

    def lookup(self, name, tokens=None, hashes=None):
        self.scheduler.maybe_submit_lookup_request(name, token_ids=tokens, block_hashes=hashes)
        self.until(lambda: self.scheduler.check_lookup_result(name) is not None, "a lookup")
        return self.scheduler.check_lookup_result(name)

    def load(self, name, tokens, ids):
        self.load_all([self.op(name, tokens, ids)])

    def load_all(self, ops):
        self.worker.begin_step(Step(loads=ops))

    def loaded(self, name):
        return name in self.worker.get_finished(None)[1]

    def end(self, name):
        self.scheduler.cleanup_lookup_result(name)
        self.scheduler.end_session(name)

    def bytes_of(self, ids):
        ids = torch.tensor(ids, device=self.tensors[0].device)
        return [tensor.view(torch.int16)[ids] for tensor in self.tensors]

    def close(self):
        self.adapter.shutdown()
        self.scheduler.shutdown()


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def check_bytes(args, layout, block, heads=8, in_order=False, rounds=3):
    """Stores from random blocks, loads into others, compares these and all that were not named."""
    engine = Engine(args, layout, 8, heads, block, 2, 8)
    faults = []
    for number in range(rounds):
        source, target = engine.ids(2, in_order)
        others = sorted(set(range(engine.blocks)) - set(target))
        tokens = engine.prompt()
        want, rest = engine.bytes_of(source), engine.bytes_of(others)
        engine.store(f"s{number}", tokens, source)
        engine.until(lambda: engine.stored(f"s{number}"), "a store")
        if engine.lookup(f"l{number}", tokens) != len(tokens):
            faults.append("not all tokens were found")
            break
        engine.load(f"l{number}", tokens, target)
        engine.until(lambda: engine.loaded(f"l{number}"), "a load")
        engine.end(f"l{number}")
        if engine.adapter.get_block_ids_with_load_errors():
            faults.append("blocks failed to load")
        if not same(engine.bytes_of(target), want):
            faults.append(f"round {number}: wrong bytes")
        if not same(engine.bytes_of(others), rest):
            faults.append(f"round {number}: blocks changed that were not named")
    stats = engine.adapter.stats()
    engine.close()
    return {"run_bytes": engine.run_bytes, "register_ms": round(engine.register_ms, 1), "stored": stats["stored_chunks"], "loaded": stats["retrieved_chunks"], "faults": faults}


def check_windows(args, block, rounds=3):
    """Two KV groups, as of a model with sliding windows: of the second one half of each chunk's blocks
    are stored, and the last of them loaded."""
    chunks, window = 8, 128
    kept = window // block
    engine = Engine(args, "tokens_first", 8, 8, block, 2, chunks, windows=(None, window))
    faults = []
    for number in range(rounds):
        full, late, into, into_late = engine.ids(4)
        gone = engine.per_chunk - kept
        # In a block table, 0 stands for a block that is not kept.
        stored = [0 if at % engine.per_chunk < gone else one for at, one in enumerate(late)]
        loaded = [0] * (len(late) - kept) + into_late[-kept:]
        others = sorted(set(range(engine.blocks)) - set(into) - set(into_late[-kept:]))
        tokens = engine.prompt()
        want, rest = engine.bytes_of(full) + engine.bytes_of(late[-kept:]), engine.bytes_of(others)
        op = engine.op(f"s{number}", tokens, full)
        op.block_ids.append(stored)
        engine.store_all([op])
        engine.until(lambda: engine.stored(f"s{number}"), "a store")
        if engine.lookup(f"l{number}", tokens) != len(tokens):
            faults.append("not all tokens were found")
            break
        op = engine.op(f"l{number}", tokens, into)
        op.block_ids.append(loaded)
        engine.load_all([op])
        engine.until(lambda: engine.loaded(f"l{number}"), "a load")
        engine.end(f"l{number}")
        if not same(engine.bytes_of(into) + engine.bytes_of(into_late[-kept:]), want):
            faults.append(f"round {number}: wrong bytes")
        if not same(engine.bytes_of(others), rest):
            faults.append(f"round {number}: blocks changed that were not named")
    faults += [text for level, text in engine.adapter.take_log() if level > 20]
    engine.close()
    return {"window": window, "block": block, "faults": faults}


def check_tails(args, block, rounds=3):
    """A prompt that is named by hashes, with blocks after its last whole chunk."""
    chunks, blocks_of_tail = 4, (CHUNK // block) // 2 + 1
    engine = Engine(args, "tokens_first", 8, 8, block, 2, chunks + 1, hash_mode=True)
    whole = chunks * engine.per_chunk
    faults = []

    def ops(name, hashes, ids):
        start, end = whole * block, (whole + blocks_of_tail) * block
        named = chunk_hashes(hashes, engine.per_chunk, chunks)
        tail = chunk_hashes(hashes[whole:], 1, blocks_of_tail)
        return [
            LoadStoreOp(name, [ids[:whole]], 0, start, chunk_hashes=named),
            LoadStoreOp(name, [ids[whole:]], start, end, chunk_hashes=tail, is_tail=True),
        ]

    for number in range(rounds):
        source, target = (ids[: whole + blocks_of_tail] for ids in engine.ids(2))
        others = sorted(set(range(engine.blocks)) - set(target))
        hashes = [engine.rng.randbytes(32) for _ in source]
        want, rest = engine.bytes_of(source), engine.bytes_of(others)
        engine.store_all(ops(f"s{number}", hashes, source))
        engine.until(lambda: engine.stored(f"s{number}"), "a store")
        # A prompt that parts from this one in the tail's last block.
        if (found := engine.lookup(f"p{number}", hashes=[*hashes[:-1], bytes(32)])) != (len(source) - 1) * block:
            faults.append(f"{found} tokens of a prompt with another last block were found")
        engine.end(f"p{number}")
        if (found := engine.lookup(f"l{number}", hashes=hashes)) != len(source) * block:
            faults.append(f"{found} of {len(source) * block} tokens were found")
            break
        engine.load_all(ops(f"l{number}", hashes, target))
        engine.until(lambda: engine.loaded(f"l{number}"), "a load")
        engine.end(f"l{number}")
        if not same(engine.bytes_of(target), want):
            faults.append(f"round {number}: wrong bytes")
        if not same(engine.bytes_of(others), rest):
            faults.append(f"round {number}: blocks changed that were not named")
    faults += [text for level, text in engine.adapter.take_log() if level > 20]
    engine.close()
    return {"tail_tokens": blocks_of_tail * block, "block": block, "faults": faults}


def check_order(args):
    """Stores and loads are queued while the GPU is busy before it writes the same blocks."""
    engine = Engine(args, "tokens_first", 8, 8, 16, 2, 8)
    faults, queued, took = [], [], []
    # Its kernel is loaded at the first call, which waits for the GPU.
    engine.tensors[0].view(torch.int16).index_fill_(0, torch.tensor([0], device=args.device), 0)
    for number in range(5):
        source, target = engine.ids(2)
        indices = [torch.tensor(ids, device=args.device) for ids in (source, target)]
        tokens = engine.prompt()

        def begin(kind, value, ids, index, act, done):
            torch.cuda.synchronize()
            torch.cuda._sleep(300_000_000)  # more than 0.1 s
            for tensor in engine.tensors:
                tensor.view(torch.int16).index_fill_(0, index, value)
            began = time.perf_counter()
            act(f"{kind}{number}", tokens, ids)
            queued.append(time.perf_counter() - began)
            engine.until(lambda: done(f"{kind}{number}"), kind)
            took.append(time.perf_counter() - began)

        begin("s", 100 + number, source, indices[0], engine.store, engine.stored)
        if engine.lookup(f"l{number}", tokens) != len(tokens):
            faults.append("not all tokens were found")
        begin("l", -1, target, indices[1], engine.load, engine.loaded)
        engine.end(f"l{number}")
        if any(not bool((part == 100 + number).all()) for part in engine.bytes_of(target)):
            faults.append(f"round {number}: the copy came before the engine's work")
    if min(took) < 0.1 or max(queued) > 0.05:
        faults.append("the copies did not wait, or the engine's thread did")
    engine.close()
    return {"queued_ms": [round(1e3 * part, 2) for part in queued], "took_ms": [round(1e3 * part) for part in took], "faults": faults}


def check_graphs(args, rounds=3):
    """Another thread captures CUDA graphs, as vLLM does when it starts, while a worker registers,
    stores and loads: neither disturbs the other."""
    faults, captured = [], 0
    for number in range(rounds):
        engine = Engine(args, "tokens_first", 8, 8, 16, 2, 8, later=True)
        source, target = engine.ids(2)
        tokens, want = engine.prompt(), engine.bytes_of(source)
        values = torch.zeros(1 << 20, device=args.device)
        torch.cuda.synchronize()
        state = {"stop": False, "captured": 0}

        def capture():
            try:
                side = torch.cuda.Stream()
                while not state["stop"]:
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph, stream=side):
                        for _ in range(200):
                            values.add_(1)
                    graph.replay()
                    side.synchronize()
                    state["captured"] += 1
            except Exception as error:
                faults.append(f"round {number}: {error!r}"[:300])

        thread = threading.Thread(target=capture)
        thread.start()
        time.sleep(0.2)
        engine.register()
        # The pool is registered meanwhile.
        for turn in range(40):
            engine.store(f"s{turn}", tokens if turn == 0 else engine.prompt(), source)
            engine.until(lambda: engine.stored(f"s{turn}"), "a store")
            engine.lookup(f"l{turn}", tokens)
            engine.load(f"l{turn}", tokens, target)
            engine.until(lambda: engine.loaded(f"l{turn}"), "a load")
            engine.end(f"l{turn}")
        state["stop"] = True
        thread.join()
        captured += state["captured"]
        stats = engine.adapter.stats()
        if stats["stores_failed"] or stats["retrieves_failed"] or not state["captured"]:
            faults.append(f"round {number}: {stats} {state} {engine.adapter.take_log()}")
        torch.cuda.synchronize()
        if not same(engine.bytes_of(target), want):
            faults.append(f"round {number}: wrong bytes")
        faults += [text for level, text in engine.adapter.take_log() if level > 20]
        engine.close()
    return {"graphs": captured, "faults": faults}


def check_rates(args, heads, in_order=False, rounds=5, chunks=64):
    """GB/s of stores, of loads, and of both at once, from the request to the report."""
    engine = Engine(args, "tokens_first", 32, heads, 16, 3, chunks)
    size = engine.chunk_bytes * chunks / 1e9
    faults, rates = [], {"store": [], "load": [], "both": []}
    # The pool is registered in the background.
    time.sleep(4)
    for number in range(rounds):
        first, second, third = engine.ids(3, in_order)
        tokens, others = engine.prompt(), engine.prompt()
        want = engine.bytes_of(first[:64])
        torch.cuda.synchronize()

        def timed(kind, begin, done, amount):
            began = time.perf_counter()
            begin()
            engine.until(done, kind)
            rates[kind].append(amount / (time.perf_counter() - began))

        timed("store", lambda: engine.store(f"s{number}", tokens, first), lambda: engine.stored(f"s{number}"), size)
        if engine.lookup(f"l{number}", tokens) != len(tokens):
            faults.append("not all tokens were found")
        timed("load", lambda: engine.load(f"l{number}", tokens, second), lambda: engine.loaded(f"l{number}"), size)
        if not same(engine.bytes_of(second[:64]), want):
            faults.append(f"round {number}: wrong bytes")
        if engine.lookup(f"b{number}", tokens) != len(tokens):
            faults.append("not all tokens were found")
        torch.cuda.synchronize()
        ended = set()

        def both():
            stored, loaded, _ = engine.worker.get_finished(Step(finished={f"t{number}"}))
            ended.update(stored, loaded)
            return ended >= {f"t{number}", f"b{number}"}

        def begin():
            engine.load(f"b{number}", tokens, third)
            engine.store(f"t{number}", others, second)

        timed("both", begin, both, 2 * size)
        engine.end(f"l{number}")
        engine.end(f"b{number}")
    engine.close()
    middle = {kind: round(statistics.median(found[1:]), 1) for kind, found in rates.items()}
    return {"run_bytes": engine.run_bytes, "prompt_mib": round(size * 1e9 / 2**20), **{f"{kind}_gb_s": rate for kind, rate in middle.items()}, "faults": faults}


def check_small(args, rounds=30):
    """Milliseconds of one chunk and of eight, from the request to the report, on an idle GPU."""
    found = {}
    for chunks in (1, 8):
        engine = Engine(args, "tokens_first", 32, 8, 16, 2, chunks)
        time.sleep(4)
        times = {"store": [], "load": []}
        for number in range(rounds):
            source, target = engine.ids(2)
            tokens = engine.prompt()
            torch.cuda.synchronize()
            began = time.perf_counter()
            engine.store(f"s{number}", tokens, source)
            engine.until(lambda: engine.stored(f"s{number}"), "a store")
            times["store"].append(time.perf_counter() - began)
            engine.lookup(f"l{number}", tokens)
            began = time.perf_counter()
            engine.load(f"l{number}", tokens, target)
            engine.until(lambda: engine.loaded(f"l{number}"), "a load")
            times["load"].append(time.perf_counter() - began)
            engine.end(f"l{number}")
        engine.close()
        found |= {f"{kind}_{chunks}_ms": round(statistics.median(part) * 1e3, 2) for kind, part in times.items()}
    return found | {"chunk_mib": engine.chunk_bytes >> 20, "faults": []}


def check_waits(args, tokens=8192, rounds=10):
    """Milliseconds that the engine's thread waits, after a step's work on the GPU, for the stores of
    blocks that a window has left in it."""
    chunks = tokens // CHUNK
    engine = Engine(args, "tokens_first", 32, 8, 16, 1, chunks)
    time.sleep(4)
    waits = []
    for number in range(rounds):
        (ids,) = engine.ids(1)
        engine.store(f"s{number}", engine.prompt(), ids)
        torch.cuda.synchronize()
        began = time.perf_counter()
        engine.worker.handle_preemptions(Step(freed={f"s{number}": tokens}))
        waits.append(time.perf_counter() - began)
        engine.until(lambda: engine.stored(f"s{number}"), "a store")
    stats = engine.adapter.stats()
    engine.close()
    faults = [] if stats["stored_chunks"] == rounds * chunks else [str(stats)]
    return {"step_mib": engine.chunk_bytes * chunks >> 20, "wait_ms": round(statistics.median(waits[1:]) * 1e3, 1), "faults": faults}


def check_price(args, heads, seconds=4):
    """What copies without a pause cost the engine's own work: a bf16 matrix product on its stream."""
    engine = Engine(args, "tokens_first", 32, heads, 16, 2, 32)
    time.sleep(4)
    a = torch.randn(8192, 8192, dtype=torch.bfloat16, device=args.device)
    b = torch.randn(8192, 8192, dtype=torch.bfloat16, device=args.device)
    # Copies are asked for on a stream that the product does not hold up.
    side = torch.cuda.Stream()
    size = engine.chunk_bytes * engine.chunks
    prompts = [engine.prompt() for _ in range(400)]
    source, target = engine.ids(2)
    state = {"next": 0, "bytes": 0, "stores": set(), "loads": set(), "stored": []}

    def carry_on():
        """Keeps two stores under way, and two loads of prompts that were stored before."""
        stored, loaded, _ = engine.worker.get_finished(Step(finished=state["stores"]))
        state["bytes"] += size * (len(stored) + len(loaded))
        state["stores"] -= stored
        state["loads"] -= loaded
        state["stored"] += stored
        for name in loaded:
            engine.end(name)
        with torch.cuda.stream(side):
            while len(state["stores"]) < 2 and state["next"] < len(prompts):
                name = str(state["next"])
                engine.store(name, prompts[state["next"]], source)
                state["stores"].add(name)
                state["next"] += 1
            while len(state["loads"]) < 2 and state["stored"]:
                name = state["stored"].pop()
                engine.lookup(f"l{name}", prompts[int(name)])
                engine.load(f"l{name}", prompts[int(name)], target)
                state["loads"].add(f"l{name}")

    def products(seconds, beside=None):
        times, end = [], time.perf_counter() + seconds
        while time.perf_counter() < end:
            begin, done = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(8):
                torch.mm(a, b)
            done.record()
            while not done.query():
                if beside:
                    beside()
                time.sleep(0.0002)
            times.append(begin.elapsed_time(done) / 8)
        return statistics.median(times)

    products(1)
    before = products(seconds / 2)
    products(1, carry_on)
    moved, began = state["bytes"], time.perf_counter()
    beside = products(seconds, carry_on)
    rate = (state["bytes"] - moved) / (time.perf_counter() - began) / 1e9
    state["next"], state["stored"] = len(prompts), []
    while state["stores"] or state["loads"]:
        carry_on()
        state["stored"] = []
    after = products(seconds / 2)
    engine.close()
    alone = (before + after) / 2
    return {"run_bytes": engine.run_bytes, "product_ms": round(alone, 4), "beside_ms": round(beside, 4), "slower": round(beside / alone - 1, 4), "copied_gb_s": round(rate, 1), "faults": []}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["tests", "figures"])
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--only", help="names of checks that contain this")
    args = parser.parse_args()
    checks = {f"bytes {layout} {block}": lambda layout=layout, block=block: check_bytes(args, layout, block) for layout in LAYOUTS for block in (16, 64)}
    checks |= {
        "bytes of 1 head": lambda: check_bytes(args, "tokens_first", 16, heads=1),
        "bytes of windows, blocks of 16": lambda: check_windows(args, 16),
        "bytes of windows, blocks of 64": lambda: check_windows(args, 64),
        "bytes of tails, blocks of 16": lambda: check_tails(args, 16),
        "bytes of tails, blocks of 64": lambda: check_tails(args, 64),
        "bytes of blocks in order": lambda: check_bytes(args, "tokens_first", 16, in_order=True),
        "order": lambda: check_order(args),
        "graphs": lambda: check_graphs(args),
        "rates of 8 heads": lambda: check_rates(args, 8),
        "rates of 4 heads": lambda: check_rates(args, 4),
        "rates of 2 heads": lambda: check_rates(args, 2, chunks=128),
        "rates of 1 head": lambda: check_rates(args, 1, chunks=128),
        "rates of blocks in order": lambda: check_rates(args, 8, in_order=True),
        "small prompts": lambda: check_small(args),
        "waits of windows": lambda: check_waits(args),
        "price of 8 heads": lambda: check_price(args, 8),
        "price of 1 head": lambda: check_price(args, 1),
    }
    failed = False
    for name, check in checks.items():
        is_figure = name.split()[0] in ("rates", "small", "waits", "price")
        if is_figure != (args.part == "figures") or (args.only and args.only not in name):
            continue
        result = check()
        failed |= bool(result["faults"])
        print("FAILED " if result["faults"] else "ok     ", f"own: {name}", json.dumps(result), flush=True)
        torch.cuda.empty_cache()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
