"""Prefixes that one Mooncake Store client reads from another over TCP, for `cargo xtask bench p2p --race`.

`mooncake_peer.py drive` starts `mooncake_master` and the owner of the memory, and obeys lines
`prefixes CHUNKS BYTES PROMPTS AGAIN` as the example p2p_speed does: the owner puts the chunks, and
the reader gets those of a prompt with one batch_get_into into memory that it registered. That asks
the master for their locations and reads them; Mooncake compares no checksum.
"""

import ctypes
import json
import mmap
import os
import random
import socket
import subprocess
import sys
import time

from mooncake.store import MooncakeDistributedStore

from checks import cpu, free_port

OWNER = 3 << 30
BUFFER = 512 << 20
# A client has memory of its own for copies.
LOCAL = 512 << 20


def connect(master, metadata, segment):
    store = MooncakeDistributedStore()
    failed = store.setup(
        f"127.0.0.1:{free_port()}", metadata, segment, LOCAL, "tcp", "", master
    )
    if failed:
        sys.exit(f"Mooncake's setup failed with {failed}")
    return store


def registered(store):
    memory = mmap.mmap(-1, BUFFER)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    ctypes.memset(address, 1, BUFFER)
    if store.register_buffer(address, BUFFER):
        sys.exit("Mooncake registers no memory")
    return memory, address


def names(prompt, chunks):
    return [f"{prompt}-{chunk}" for chunk in range(chunks)]


def own(master, metadata):
    store = connect(master, metadata, OWNER)
    memory, address = registered(store)
    print(json.dumps({"ready": "owner"}), flush=True)
    stored = []
    for line in sys.stdin:
        chunks, size, first, end = map(int, line.split())
        for name in stored:
            store.remove(name, True)
        stored = []
        for prompt in range(first, end):
            memory[: chunks * size] = random.Random(prompt).randbytes(size) * chunks
            keys = names(prompt, chunks)
            offsets = [address + chunk * size for chunk in range(chunks)]
            if any(store.batch_put_from(keys, offsets, [size] * chunks)):
                sys.exit("a put failed")
            stored += keys
        print(json.dumps({"stored": len(stored)}), flush=True)


def drive():
    port, http = free_port(), free_port()
    folder = os.path.dirname(sys.modules["mooncake"].__file__)
    log = open("target/bench/mooncake.log", "w")
    master = subprocess.Popen(
        [
            f"{folder}/mooncake_master",
            f"--rpc_port={port}",
            f"--metrics_port={free_port()}",
            "--enable_http_metadata_server=true",
            f"--http_metadata_server_port={http}",
            "--eviction_high_watermark_ratio=1.0",
        ],
        stdout=log,
        stderr=log,
    )
    try:
        for at in (port, http):
            deadline = time.monotonic() + 20
            while socket.socket().connect_ex(("127.0.0.1", at)):
                if time.monotonic() > deadline:
                    sys.exit("mooncake_master does not listen; see target/bench/mooncake.log")
                time.sleep(0.05)
        serve(f"127.0.0.1:{port}", f"http://127.0.0.1:{http}/metadata", log)
    finally:
        master.kill()


def serve(master, metadata, log):
    owner = subprocess.Popen(
        [sys.executable, __file__, "own", master, metadata],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
    )

    def answer():
        for line in owner.stdout:
            if line.startswith("{"):
                return json.loads(line)
        sys.exit("the owner ended; see target/bench/mooncake.log")

    answer()
    store = connect(master, metadata, 0)
    memory, address = registered(store)
    print(json.dumps({"ready": "mooncake"}), flush=True)
    following = 0
    for line in sys.stdin:
        chunks, size, prompts, again = map(int, line.split()[1:])
        first, following = following, following + prompts
        print(chunks, size, first, following, file=owner.stdin, flush=True)
        answer()
        seconds, used = [], [0.0, 0.0]
        offsets = [address + chunk * size for chunk in range(chunks)]
        for prompt in range(first, following):
            keys = names(prompt, chunks)
            for turn in range(again + 1):
                before = cpu(os.getpid()), cpu(owner.pid)
                begun = time.perf_counter()
                found = store.batch_get_into(keys, offsets, [size] * chunks)
                took = time.perf_counter() - begun
                after = cpu(os.getpid()), cpu(owner.pid)
                if any(got != size for got in found):
                    sys.exit(f"a get failed: {found}")
                if turn == 0:
                    if memory[:size] != random.Random(prompt).randbytes(size):
                        sys.exit("Mooncake got other bytes")
                    continue
                seconds.append(took)
                used = [sum + a - b for sum, a, b in zip(used, after, before)]
        found = {"seconds": seconds, "cpu_reader": used[0], "cpu_owner": used[1]}
        print(json.dumps({"mooncake": found}), flush=True)
    owner.stdin.close()
    owner.wait()


if sys.argv[1] == "own":
    own(*sys.argv[2:])
else:
    drive()
