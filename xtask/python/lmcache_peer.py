"""Prefixes that one LMCache server reads from another, for `cargo xtask bench p2p --race`.

`lmcache_peer.py drive` starts LMCache's coordinator and two of its servers, which read each other
by NIXL (UCX over TCP), and obeys lines `prefixes CHUNKS BYTES PROMPTS AGAIN` as the example
p2p_speed does. The clients are those of `lmcache bench server`: the owner's stores prompts, and the
reader's looks each up and asks every millisecond, instead of every 50 ms, whether all of it has
come. It lies in the reader's memory then, under its locks; LMCache compares no checksum. What was
read leaves that memory when its locks are given back, so each lookup reads it again.
"""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request

os.environ.update(LMCACHE_LOG_LEVEL="WARNING", UCX_TLS="tcp", UCX_NET_DEVICES="lo")
# Libraries print on stdout, too.
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

from lmcache.cli.commands.bench.server_bench import helpers
from lmcache.cli.commands.bench.server_bench.client import ServerBenchClient
from lmcache.cli.commands.bench.server_bench.config import BenchConfig

from checks import cpu, free_port

TOKENS = 256
BLOCK = 16
# GB of each server's memory.
POOL = 3
LOG = "target/bench/lmcache-p2p-{}.log"
PAUSE = 0.001
# Lookups that may find less than all before the measurement fails, and the pause after one.
MISSED = 20
BACK_OFF = 0.3


def say(answer):
    print(json.dumps(answer), file=answers, flush=True)


def start(name, *arguments):
    program = os.path.join(os.path.dirname(sys.executable), "lmcache")
    log = open(LOG.format(name), "w")
    return subprocess.Popen([program, *arguments], stdout=log, stderr=log)


def await_port(process, name, port):
    deadline = time.monotonic() + 100
    while socket.socket().connect_ex(("127.0.0.1", port)):
        if process.poll() is not None or time.monotonic() > deadline:
            sys.exit(f"LMCache's {name} does not listen; see {LOG.format(name)}")
        time.sleep(0.05)


class Server:
    def __init__(self, name, coordinator):
        self.port, self.http = free_port(), free_port()
        flags = {
            "host": "127.0.0.1",
            "port": self.port,
            "http-port": self.http,
            "instance-id": name,
            "chunk-size": TOKENS,
            "l1-size-gb": POOL,
            "l1-align-bytes": 65536,
            "eviction-policy": "LRU",
            "supported-transfer-mode": "auto",
            "shm-name": f"lmc_p2p_{name}_{self.port}",
            "coordinator-url": f"http://127.0.0.1:{coordinator}",
            "coordinator-advertise-ip": "127.0.0.1",
            "coordinator-heartbeat-interval": 1,
            "p2p-advertise-url": f"127.0.0.1:{free_port()}",
        }
        flags = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        self.name, self.process = name, start(name, "server", "--no-l1-use-lazy", *flags)

    def listens(self):
        await_port(self.process, self.name, self.port)
        await_port(self.process, self.name, self.http)

    def clear(self):
        address = f"http://127.0.0.1:{self.http}/cache/clear"
        urllib.request.urlopen(urllib.request.Request(address, method="POST")).close()

    def client(self, chunks, size):
        """A client whose chunks have `size` bytes: one layer of float16, keys and values."""
        elements = size // (2 * 2 * TOKENS)
        blocks = chunks * TOKENS // BLOCK + 1
        config = BenchConfig(
            rpc_url=f"tcp://127.0.0.1:{self.port}",
            http_url="",
            mode="cpu",
            transfer_mode="engine_driven",
            tp_size=1,
            use_mla=False,
            num_tokens=chunks * TOKENS,
            kvcache_shape_spec=f"(2,{blocks},{BLOCK},1,{elements}):float16:1",
            num_blocks=blocks,
            block_size=BLOCK,
        )
        client = ServerBenchClient(config, lambda line: None)
        client.start()
        return client


def key_of(request):
    return helpers._make_key(
        request.token_ids, request.request_id, end=request.num_full_tokens
    )


def look_up(client, request):
    """Seconds until the prefix lies in the reader's memory, and whether all of it does."""
    asked = client._req_client
    key = key_of(request)
    begun = time.perf_counter()
    hits = None
    helpers._send_lookup(asked, key)
    while time.perf_counter() < begun + 10:
        hits = asked.query_prefetch_status(request.request_id).result(timeout=10)
        if hits is not None:
            break
        time.sleep(PAUSE)
    return time.perf_counter() - begun, hits == request.total_chunks


def check(stores, reads, request):
    """Compares what the reader has with what the owner's client stored."""
    whole = request, 0, request.num_full_tokens
    reads.zero_destination(*whole)
    read = reads.retrieve(*whole)
    if not read.succeeded or reads.compute_checksums(*whole) != stores.compute_checksums(*whole):
        sys.exit("LMCache read other bytes")


def measure(owner, reader, chunks, size, prompts, again):
    stores, reads = owner.client(chunks, size), reader.client(chunks, size)
    seconds, used, missed = [], [0.0, 0.0], 0
    for prompt in range(prompts):
        request = stores.create_request(prompt, f"store-{size}-{chunks}-{prompt}", "store")
        if not stores.store(request, 0, request.num_full_tokens).succeeded:
            sys.exit("LMCache stored nothing")
        stores.end_session(request)
        turn = 0
        while turn <= again:
            number = f"read-{size}-{chunks}-{prompt}-{turn}-{missed}"
            request = reads.create_request(prompt, number, "read")
            before = cpu(reader.process.pid), cpu(owner.process.pid)
            took, is_whole = look_up(reads, request)
            after = cpu(reader.process.pid), cpu(owner.process.pid)
            if is_whole and turn == 0:
                check(stores, reads, request)
            else:
                reads._req_client.free_lookup_locks(key_of(request), 1).result(timeout=10)
            reads.end_session(request)
            if not is_whole:
                # Before the servers know each other, for example.
                missed += 1
                if missed > MISSED:
                    sys.exit(f"LMCache found less than all; see {LOG.format('reader')}")
                time.sleep(BACK_OFF)
                continue
            if turn > 0:
                seconds.append(took)
                used = [sum + a - b for sum, a, b in zip(used, after, before)]
            turn += 1
    stores.close()
    reads.close()
    owner.clear()
    reader.clear()
    return {"seconds": seconds, "cpu_reader": used[0], "cpu_owner": used[1]}


def drive():
    port = free_port()
    flags = ("--host", "127.0.0.1", "--port", str(port))
    processes = [start("coordinator", "coordinator", *flags)]
    try:
        await_port(processes[0], "coordinator", port)
        owner, reader = (Server(name, port) for name in ("owner", "reader"))
        processes += [owner.process, reader.process]
        owner.listens()
        reader.listens()
        # Until the servers know each other.
        measure(owner, reader, 1, 65536, 1, 0)
        say({"ready": "lmcache"})
        for line in sys.stdin:
            found = measure(owner, reader, *map(int, line.split()[1:]))
            say({"lmcache": found})
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


drive()
