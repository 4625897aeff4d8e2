"""LMCache's own adapters on tensors of a GPU, against a running lmc: bytes and rates.

Stores the KV cache of a prompt of random tokens from random blocks, retrieves it into other blocks,
and compares these, and all blocks that were not named, byte by byte. One line of JSON at the end.
"""

import argparse
import json
import os
import random
import signal
import statistics
import sys
import time
import uuid

import lmcache.integration.vllm.vllm_multi_process_adapter as adapters
import torch
import zmq
from lmcache.v1.multiprocess.group_view import EngineGroupInfo

CHUNK = 256


def tensors(args, blocks):
    """The layers' tensors, as vLLM's attention backends shape them, and the order of their axes."""
    b, h, s = args.block, args.heads, args.size

    def filled(*shape):
        count = 1
        for extent in shape:
            count *= extent
        return torch.randint(-30000, 30000, (count,), dtype=torch.int16, device=args.device).view(*shape).view(torch.bfloat16)

    make, order, mla = {
        "k_v_apart": (lambda: filled(2, blocks, b, h, s), "NHD", False),
        "k_v_in_block": (lambda: filled(blocks, 2, b, h, s), "NHD", False),
        "heads_first": (lambda: filled(blocks, 2, h, b, s).permute(0, 1, 3, 2, 4), "HND", False),
        "latent": (lambda: filled(blocks, b, 576), "NHD", True),
        "bytes": (lambda: filled(2, blocks, b, h, s // 2).view(torch.uint8).view(2, blocks, b, h, s), "NHD", False),
    }[args.layout]
    return {f"model.layers.{layer}.attn": make() for layer in range(args.layers)}, order, mla


def of_blocks(tensor, ids):
    raw = tensor if tensor.dtype == torch.uint8 else tensor.view(torch.int16)
    ids = torch.tensor(ids, device=raw.device)
    return raw[:, ids] if raw.dim() == 5 and raw.shape[0] == 2 else raw[ids]


def until(done, what, seconds=30):
    end = time.perf_counter() + seconds
    while (value := done()) is None:
        if time.perf_counter() > end:
            raise SystemExit(f"{what} did not end within {seconds} s")
        time.sleep(0.0001)
    return value


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--mode", required=True, choices=["engine_driven", "lmcache_driven"])
    parser.add_argument("--layout", default="k_v_apart")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--block", type=int, default=16)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sequential", action="store_true", help="neighbouring blocks instead of random ones")
    parser.add_argument("--until", help="go on until this file exists")
    parser.add_argument("--isolated", action="store_true", help="share nothing with the server but the GPU")
    parser.add_argument("--die", action="store_true", help="be killed while a store waits for the GPU")
    args = parser.parse_args()

    per_chunk = CHUNK // args.block
    wanted = per_chunk * args.chunks
    blocks = 2 * wanted + 9
    caches, order, mla = tensors(args, blocks)
    size = sum(tensor.nbytes for tensor in caches.values()) // blocks * per_chunk
    context = zmq.Context()
    model = f"gpu/{args.mode}/{args.layout}/{uuid.uuid4().hex}"  # ids of processes come again in containers
    parallel = adapters.ParallelStrategy(mla_only=mla, vllm_world_size=1, vllm_worker_id=0, tp_size=1, pp_size=1, n_servers=1)
    extra = {"lmcache.mp.mp_transfer_mode": args.mode, "lmcache.mp.mq_timeout": 30.0, "lmcache.mp.isolated_ipc": args.isolated}
    scheduler = adapters.LMCacheMPSchedulerAdapter([args.url], context, model, args.block, parallel, extra_config=dict(extra))
    worker = adapters.LMCacheMPWorkerAdapter(args.url, context, model, args.block, parallel, extra_config=dict(extra))
    began = time.perf_counter()
    worker.register_kv_caches(caches, [EngineGroupInfo(0, tuple(range(args.layers)), args.block)], {"kv_layout": order})
    result = {"mode": args.mode, "layout": args.layout, "block": args.block, "run_bytes": size // per_chunk // args.layers // (2 if args.layout in ("k_v_apart", "bytes") else 1), "chunk_bytes": size, "chunks": args.chunks, "register_ms": (time.perf_counter() - began) * 1e3}
    stores, retrieves, faults = [], [], []
    rng = random.Random(7)

    def lookup(request, tokens):
        scheduler.maybe_submit_lookup_request(request, tokens)
        return until(lambda: scheduler.check_lookup_result(request), "a lookup")

    def end(request):
        scheduler.cleanup_lookup_result(request)
        scheduler.end_session(request)

    round_ = 0
    while (not os.path.exists(args.until)) if args.until else round_ < args.rounds:
        ids = list(range(1, blocks))  # vLLM never names block 0
        if not args.sequential:
            rng.shuffle(ids)
        source, target = ids[:wanted], ids[wanted : 2 * wanted]
        tokens = [rng.randrange(1, 30000) for _ in range(CHUNK * args.chunks)]
        others = sorted(set(range(blocks)) - set(target))
        check = round_ < args.rounds
        if check:
            want = {name: of_blocks(tensor, source).clone() for name, tensor in caches.items()}
            rest = {name: of_blocks(tensor, others).clone() for name, tensor in caches.items()}
        request = f"store-{round_}"
        if lookup(request, tokens) != 0:
            faults.append("a hit before the store")
        if args.die:
            torch.cuda._sleep(60_000_000_000)
        began = time.perf_counter()
        worker.submit_store_request(request, adapters.LoadStoreOp(tokens, [source], 0, len(tokens)), worker.create_recorded_event())
        if args.die:
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)
        until(lambda: True if request in (worker.get_finished({request})[0] or ()) else None, "a store")
        stores.append(size * args.chunks / (time.perf_counter() - began) / 1e9)
        end(request)
        request = f"retrieve-{round_}"
        found = until(lambda: lookup(request, tokens), "a lookup")
        if found != len(tokens):
            faults.append(f"{found} of {len(tokens)} tokens were found")
            break
        torch.cuda.synchronize() if args.device.startswith("cuda") else None
        began = time.perf_counter()
        worker.submit_retrieve_request(request, adapters.LoadStoreOp(tokens, [target], 0, len(tokens)), worker.create_recorded_event())
        until(lambda: True if request in (worker.get_finished(set())[1] or ()) else None, "a retrieve")
        retrieves.append(size * args.chunks / (time.perf_counter() - began) / 1e9)
        if failed := worker.get_block_ids_with_load_errors():
            faults.append(f"{len(failed)} blocks failed to load")
        end(request)
        for name, tensor in caches.items() if check else ():
            if not torch.equal(of_blocks(tensor, target), want[name]):
                faults.append(f"round {round_}: wrong bytes in {name}")
            if not torch.equal(of_blocks(tensor, others), rest[name]):
                faults.append(f"round {round_}: blocks of {name} changed that were not named")
        round_ += 1
    middle = lambda rates: round(statistics.median(rates[1:] or rates or [0]), 2)
    result |= {"rounds": round_, "store_gb_s": middle(stores), "retrieve_gb_s": middle(retrieves), "faults": faults[:8]}
    print(json.dumps(result), flush=True)
    worker.shutdown()
    scheduler.shutdown()
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
