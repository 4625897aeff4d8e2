"""Measures prefill on one engine and decode on another, for `cargo xtask bench pd`.

  pd_bench.py --server-bin target/release/lmc --package target/python --model FOLDER

Two engines with a server each, which are peers, and a proxy before them that sends a prompt to one
after the other, one that sends it to both at once, and one that has it pushed. The prefill engine
computes a prompt in eight steps. vLLM's own prefix cache is off. Each engine has a core of its own: one
that waits polls. The decode engine's server reaches the other over each `--link` in turn: RATE=PORT=BARE,
where PORT leads to `--listen` and BARE to `--bare-listen`, at the same rate. Prints one line of JSON.
"""

import argparse
import contextlib
import json
import os
import socket
import sys
import tempfile
import threading
import time
import types

from checks import free_port
from harness import Child, Server, VllmServe, eventually, metric, open_http, prompts
from pd import answers, text
from toys import worded

STEP = 512
STEPS = 8
FLAGS = ("--max-model-len", "8192", "--max-num-batched-tokens", str(STEP))
DEADLINE = 120
WAYS = ("prefill engine", "decode engine, warm", "decode engine, cold", "one after the other",
        "both at once", "pushed")
# Ways to hand a prompt over whose prefill has ended long before.
LATER = ("warm", "pull", "hint", "push")


def first_token(port, ids, **more):
    """The time from a request to the first part of its streamed answer."""
    body = {"prompt": text(ids), "max_tokens": 4, "temperature": 0, "stream": True, **more}
    began = time.perf_counter()
    with open_http(port, "/v1/completions", body, DEADLINE) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                taken = time.perf_counter() - began
                for _ in answer:
                    pass
                return taken
    raise RuntimeError("an answer without a token")


class Notices(threading.Thread):
    """Receives what the prefill engine's server sends as soon as it has every whole chunk of a prompt."""

    def __init__(self, stack):
        super().__init__(daemon=True)
        import zmq

        context = zmq.Context()
        self.socket = context.socket(zmq.PULL)
        self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.last = 0.0
        stack.callback(lambda: context.destroy(linger=0))
        self.start()

    def run(self):
        with contextlib.suppress(Exception):
            while True:
                message = self.socket.recv()
                now = time.perf_counter()
                if b"ProxyNotifFailed" not in message:
                    self.last = now

    def since(self, began):
        """The time from then to the notice of a prompt that was sent then."""
        if not eventually(lambda: self.last > began, 30):
            raise RuntimeError("a prompt that is not stored")
        return self.last - began


class Pair:
    def __init__(self, args, model, stack, link, *notify):
        """`link`: port under which the decode engine's server reaches the other."""
        options = types.SimpleNamespace(server_bin=args.server_bin, peer=False)
        self.at, self.other = f"127.0.0.1:{link}", f"127.0.0.1:{free_port()}"
        flags = (("--p2p-listen", f"127.0.0.1:{args.listen}", "--p2p-advertise", self.at, *notify),
                 ("--p2p-listen", self.other, "--p2p-peer", self.at))
        self.servers = []
        for own in flags:
            server = Server(options, *own).start()
            stack.callback(server.discard)
            self.servers.append(server)
        self.prefill, self.decode = (self.engine(args, model, server, stack, core)
                                     for core, server in enumerate(self.servers))
        self.prefill.ready()
        self.decode.ready()
        self.one, self.both, self.pushed = (
            self.proxy(args, stack, *flags)
            for flags in ((), ("--prefill-peer", self.at), ("--decode-peer", self.other)))

    @staticmethod
    def engine(args, model, server, stack, core):
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {sorted(cores)[core % len(cores)]})
        engine = VllmServe(model, *FLAGS, "--kv-transfer-config", server.own_transfer_config(),
                           space=2, threads=args.threads, paths=(args.package,))
        os.sched_setaffinity(0, cores)
        stack.callback(engine.kill)
        return engine

    def proxy(self, args, stack, *flags):
        port = free_port()
        proxy = Child("proxy", [
            args.server_bin, "proxy", "--listen", f"127.0.0.1:{port}",
            "--prefill", f"http://127.0.0.1:{self.prefill.http}",
            "--decode", f"http://127.0.0.1:{self.decode.http}", *flags])
        stack.callback(proxy.kill)
        if not eventually(lambda: answers(port), 60):
            raise RuntimeError(proxy.tail())
        return port

    def hits(self):
        return self.decode.metric("vllm:external_prefix_cache_hits_total")

    def read(self):
        """Bytes that the decode engine's server has read from the other."""
        return metric(self.servers[1].http, 'lmc_tier_fetched_bytes_total{tier="peers"')

    def measure(self, way, seed, notices):
        """The time to the first token of a prompt that is new, that from the last store to it, and the
        tokens that the decode engine took from the cache."""
        (ids,) = prompts(seed, STEP * STEPS)
        if way == "decode engine, warm":
            # In the memory of its own server.
            first_token(self.decode.http, ids)
        ports = {"prefill engine": self.prefill.http, "one after the other": self.one,
                 "both at once": self.both, "pushed": self.pushed}
        before, read = self.hits(), self.read()
        began = time.perf_counter()
        taken = first_token(ports.get(way, self.decode.http), ids)
        found = {"seconds": taken, "cached_tokens": self.hits() - before}
        if way in ports:
            found["stored"] = notices.since(began)
        found["bytes"] = self.read() - read
        # What is still being pushed would take the link from the next way.
        while (before := self.read()) and not time.sleep(0.5) and self.read() > before:
            pass
        return found

    def later(self, way, seed, notices):
        """As `measure`, of the decode engine, while the prefill engine and its server are idle."""
        (ids,) = prompts(seed, STEP * STEPS)
        name = f"later-{seed}"
        hints = {"hint": {"lmcache.pd.id": name}, "push": {"lmcache.pd.to": self.other}}
        if way == "warm":
            first_token(self.decode.http, ids)
        else:
            chunks = metric(self.servers[1].http, "lmc_chunks ")
            began = time.perf_counter()
            first_token(self.prefill.http, ids, kv_transfer_params=hints.get(way))
            notices.since(began)
            whole = STEP * STEPS // 256
            if way == "push" and not eventually(
                    lambda: metric(self.servers[1].http, "lmc_chunks ") >= chunks + whole):
                raise RuntimeError("a prompt that is not pushed")
        time.sleep(0.3)
        before = self.hits()
        source = {"lmcache.pd.source": self.at, "lmcache.pd.wait_ms": 20000, "lmcache.pd.id": name}
        taken = first_token(self.decode.http, ids,
                            kv_transfer_params=source if way == "hint" else None)
        return {"seconds": taken, "cached_tokens": self.hits() - before}


def bare(listener, port, count):
    """Seconds in which `count` bytes pass a link and one byte of an answer comes back."""
    def sink():
        peer, _ = listener.accept()
        with peer:
            left = count
            while left and (part := peer.recv(min(left, 1 << 20))):
                left -= len(part)
            peer.sendall(b".")

    thread = threading.Thread(target=sink)
    thread.start()
    with socket.create_connection(("127.0.0.1", port)) as sender:
        # The connection stands, also behind the relay.
        time.sleep(0.1)
        began = time.perf_counter()
        sender.sendall(bytes(count))
        sender.recv(1)
        taken = time.perf_counter() - began
    thread.join()
    return taken


def measure_link(args, model, rate, port, bare_port, listener):
    """The figures of all ways over one link."""
    with contextlib.ExitStack() as stack:
        notices = Notices(stack)
        pair = Pair(args, model, stack, port, "--pd-notify", f"tcp://127.0.0.1:{notices.port}")
        rounds = []
        # The first round warms all up.
        for number in range(args.rounds + 1):
            print(f"link {rate}, round {number} of {args.rounds}", file=sys.stderr, flush=True)
            figures = {}
            for names, measure in ((WAYS, pair.measure), (LATER, pair.later)):
                first = number % len(names)
                for at, way in enumerate(names[first:] + names[:first]):
                    seed = 1000 + number * 100 + at + (50 if names is LATER else 0)
                    figures[way] = measure(way, seed, notices)
            count = int(figures["one after the other"]["bytes"])
            figures["bare"] = {"seconds": bare(listener, bare_port, count), "bytes": count}
            rounds.append(figures)
        return {"rate": rate, "rounds": rounds[1:]}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server-bin", required=True)
    parser.add_argument("--package", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--listen", required=True, help="port of the prefill engine's server for peers")
    parser.add_argument("--bare-listen", required=True, type=int)
    parser.add_argument("--link", action="append", metavar="RATE=PORT=BARE", required=True)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", default="1", help="of each engine's computation")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, \
            socket.create_server(("127.0.0.1", args.bare_listen)) as listener:
        model = worded(args.model, folder)
        links = []
        for link in args.link:
            rate, port, bare_port = (int(part) for part in link.split("="))
            links.append(measure_link(args, model, rate, port, bare_port, listener))
        print(json.dumps({"links": links, "tokens": STEP * STEPS, "threads": args.threads}))


if __name__ == "__main__":
    main()
