"""Measures the time to the first token by where a prompt's KV cache is, for `cargo xtask bench ttft`.

  ttft_bench.py --server-bin target/release/lmc --package target/python --model FOLDER

Seven engines on CPU, with the same cores and in turn: one that computes each prompt, one whose own
prefix cache is on, one with the stock connector and LMCache's server, and four with lmc's connector,
each with a server of its own that has the prompt in memory, on a drive, at a peer or in Redis. The
engine that finds prompts in memory is measured with prompts that are nowhere, too. Peers and Redis
are on loopback. Prints one line of JSON.
"""

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
import time

from checks import free_port
from harness import ANSWER_DEADLINE, CHUNK, Child, Engine, Redis, Server, eventually, prompts

# Tokens of a prompt, and those that each source has of it: whole chunks, and whole blocks of vLLM's
# own prefix cache. vLLM computes the last token of a prompt in any case.
TOKENS, CACHED = 2049, 2048
CHUNKS = CACHED // CHUNK
# Blocks of an engine's KV cache. A prompt takes 17 of 128 tokens, and the prefix cache keeps one
# prompt while another is computed.
BLOCKS = 64
# Seconds between the last prompt of a preparation and the one that is measured.
PAUSE = 0.5
# Other prompts that LMCache is measured with after one that it has missed.
RETRIES = 3
SOURCES = ("computed", "prefix", "lmcache", "uncached", "memory", "disk", "peer", "redis")
# Sources where the prompt is computed, tiers that a server writes it to, and all tiers from which a
# server promotes it.
COLD, WRITTEN = ("computed", "uncached"), ("disk", "redis")
LOWER = ("peer", *WRITTEN)


def first_token(engine, prompt):
    """Milliseconds to the first token of a prompt, and the tokens of it that were found."""
    engine.submit(prompt, max_tokens=1, settle=True)
    answer = engine.answer(ANSWER_DEADLINE)
    return 1000 * answer["seconds"], answer["outputs"][0]["cached"]


def never_seen(engine, name):
    """Computes the prompt of a name, which no engine has seen."""
    _, cached = first_token(engine, prompts(name, TOKENS))
    assert cached == 0, f"{engine.name}: {cached} tokens of {name} were found"


def lower(server):
    return server.status()["lmc"]["lower"][0]


def disk_io(server):
    """The kind of I/O that a server's log names for its drive, or none."""
    with open(server.child.log.name, errors="replace") as log:
        found = re.search(r"disk: \S+ by (.+)", log.read())
    return found and found[1].strip()


class Sources:
    """The engines, by where they find a prompt, and their servers, which are put into `servers` so
    that the caller can discard them also when this fails."""

    def __init__(self, args, folder, servers):
        self.servers, self.engines = servers, {}
        # Prompts that LMCache has missed.
        self.retries = 0
        redis = Redis()
        memory, peer = (f"127.0.0.1:{free_port()}" for _ in range(2))
        # On a busy machine answers take longer than the defaults of 5 and 50 ms.
        patient = ("--p2p-locate-timeout", "1s")
        flags = {
            "memory": ("--p2p-listen", memory, *patient),
            "peer": ("--p2p-listen", peer, "--p2p-peer", memory, *patient),
            "disk": ("--disk", os.path.join(folder, "drive"), "--disk-create",
                     "--disk-size", "4GiB"),
            "redis": ("--remote", f"redis://127.0.0.1:{redis.port}",
                      "--remote-locate-timeout", "1s"),
        }
        servers["lmcache"] = Server(args, peer="lmcache")
        for source, own in flags.items():
            servers[source] = Server(args, *own)
        for server in servers.values():
            server.start()
        for source in SOURCES:
            if source == "uncached":
                continue
            options = {"blocks": BLOCKS, "prefix_caching": source == "prefix"}
            if source in servers:
                # As users have it: a busy machine makes the signs of life of the tests late.
                options |= {"port": servers[source].port, "heartbeat": 10,
                            "connector": "stock" if source == "lmcache" else "lmc"}
            self.engines[source] = Engine(f"ttft-{source}", args.model, **options).ready()
            # The first prompts of a process compile and fault its memory in.
            for number in range(2):
                never_seen(self.engines[source], f"begin {source} {number}")
        for source in WRITTEN:
            # Else what is written late is taken for the chunks of the first turn.
            self.written(source, 2 * CHUNKS)
        met = eventually(lambda: servers["peer"].child.said("peer connected"))
        assert met, servers["peer"].child.tail()

    def measure(self, number):
        """The times of a round, in which the order is another than in the one before."""
        first = number % len(SOURCES)
        return {source: self.turn(source, number) for source in SOURCES[first:] + SOURCES[:first]}

    def turn(self, source, number):
        """The time of a source. LMCache may miss what a store has just acknowledged: then it is
        measured with another prompt."""
        wanted = 0 if source in COLD else CACHED
        name = f"first {number} {source}"
        for retry in range(RETRIES + 1):
            ms, cached = self.once(source, f"{name} again {retry}" if retry else name)
            if cached == wanted:
                return ms
            assert source == "lmcache", f"{name}: {cached} tokens were found"
            self.retries += 1
        raise RuntimeError(f"{name}: {RETRIES + 1} prompts were missed; {cached} tokens were found")

    def once(self, source, name):
        """Milliseconds to the first token of a prompt that has been brought to its source, and the
        tokens of it that were found."""
        engine = self.engines["memory" if source == "uncached" else source]
        before = lower(self.servers[source]) if source in LOWER else None
        if source not in COLD:
            never_seen(self.engines["memory"] if source == "peer" else engine, name)
        if source in WRITTEN:
            self.leave_memory(source, before["written"] + CHUNKS)
        # So that each engine has just computed a prompt, also one whose prompt another has stored.
        never_seen(engine, f"{name}, before")
        if source in WRITTEN:
            self.written(source, before["written"] + 2 * CHUNKS)
        time.sleep(PAUSE)
        found = first_token(engine, prompts(name, TOKENS))
        if source in LOWER:
            read = lower(self.servers[source])["promoted"] - before["promoted"]
            assert read == CHUNKS, f"{name}: {read} chunks were read"
        return found

    def written(self, source, chunks):
        """Waits until a server has written this number of chunks since its start."""
        server = self.servers[source]
        assert eventually(lambda: lower(server)["written"] >= chunks), lower(server)

    def leave_memory(self, source, chunks):
        """Removes what a server has in memory, once it has written this number of chunks."""
        self.written(source, chunks)
        server = self.servers[source]
        assert eventually(lambda: not any(server.held().values())), server.held()
        cleared = server.ask("/cache/clear", {"tier": "l1"})["cleared"]
        assert cleared["chunks"] >= CHUNKS, cleared

    def end(self):
        for engine in self.engines.values():
            engine.quit()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server-bin", required=True)
    parser.add_argument("--package", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", default="2", help="of each engine's computation")
    parser.add_argument("--dir", default="target", help="folder on the drive to use")
    args = parser.parse_args()
    args.peer = None
    Engine.package, Engine.threads = args.package, args.threads
    # LMCache's server and the stock connector log each request otherwise.
    os.environ["LMCACHE_LOG_LEVEL"] = "WARNING"
    folder = tempfile.mkdtemp(prefix="lmc-bench-ttft-", dir=args.dir)
    servers = {}
    try:
        sources = Sources(args, folder, servers)
        # Warms up what only a hit needs.
        print("a round that is not measured", file=sys.stderr, flush=True)
        sources.measure(-1)
        sources.retries = 0
        rounds = []
        for number in range(args.rounds):
            print(f"round {number + 1} of {args.rounds}", file=sys.stderr, flush=True)
            rounds.append(sources.measure(number))
        result = {
            "tokens": TOKENS,
            "cached_tokens": CACHED,
            "threads": args.threads,
            "rounds": rounds,
            "lmcache_retries": sources.retries,
            "disk_io": disk_io(servers["disk"]),
        }
        sources.end()
        print(json.dumps(result))
    finally:
        for child in Child.running:
            child.kill()
        for server in servers.values():
            if server.child:
                server.discard()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
