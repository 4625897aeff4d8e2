"""Real vLLM engines against a server that speaks LMCache's multiprocess protocol.

  scenarios.py --server-bin target/python/bin/lmc --package target/python [--only NAME ...]
  scenarios.py --peer lmcache                    the same against LMCache's own server

Prints one line a check and ends with `N passed, N failed`. Every wait has a deadline, and no
process outlives the run.
"""

import argparse
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
import urllib.request

import checks
from checks import check, free_port
from harness import (
    ANSWER_DEADLINE,
    LENGTHS,
    TOKENS,
    Child,
    Engine,
    Redis,
    Server,
    VllmServe,
    ask,
    eventually,
    expected_hits,
    prompts,
    shared_prefix,
)
from nixl_pair import both_connectors
from own import connector, containers, lmcache_server, weights
from own_events import Subscriber, events
from own_models import hash_algorithms, hybrid, latent, lora
from own_tails import tails
from page import Page
from pd import pd
from proxy import CutShort, Proxy
from quickstart import quickstart
from spans import spans
from unequal import unequal_parallelism

# What LMCache 0.5.6's own server fails, as it stands at the head of a check's name.
PEER_FAULTS = {
    "lmcache-driven: cached tokens": "a lookup may miss what a store has just acknowledged",
    "wrong_dtype": "it hands bytes of the wrong type over, and the engine dies",
}


class Run:
    """State that scenarios share: the model, the server, and the ids without a connector."""

    def __init__(self, args):
        self.args = args
        self.model = args.model
        self.server = Server(args)
        self.connectors = ("stock", "lmc") if args.package and not args.peer else ("stock",)
        self.plain = {}

    def baseline(self):
        """Ids of engines without a connector, for both element types."""
        engines = {
            dtype: Engine(f"plain-{dtype}", self.model, dtype=dtype)
            for dtype in ("float32", "bfloat16")
        }
        for dtype, engine in engines.items():
            engine.ready()
            wanted = {seed: prompts(seed, *LENGTHS) for seed in range(1, 9)}
            for mode_seed in (1, 2):
                wanted["shared", mode_seed] = shared_prefix(mode_seed)
            # One prompt at a time: bfloat16 ids depend on what shares the batch.
            single = dtype == "bfloat16"
            for seed, batch in wanted.items():
                ids = (
                    [engine.generate([p])[0][0] for p in batch] if single
                    else engine.generate(batch)[0]
                )
                self.plain[dtype, seed] = ids
            engine.kill()
        check("baseline: ids without a connector differ between prompts",
              len({tuple(i) for i in self.plain["float32", 1]}) == len(LENGTHS))

    def engine(self, name, **options):
        options.setdefault("port", self.server.port)
        return Engine(name, options.pop("model", self.model), **options)

    def cold_and_warm(self, name, engine, seed, dtype="float32"):
        batch = prompts(seed, *LENGTHS)
        plain = self.plain[dtype, seed]
        ids, cached = engine.generate(batch)
        check(f"{name}: cold ids are those without a connector", ids == plain)
        check(f"{name}: nothing is cached at first", cached == [0] * len(batch), str(cached))
        self.warm(name, engine, seed, dtype)

    def warm(self, name, engine, seed, dtype="float32"):
        ids, cached = engine.generate(prompts(seed, *LENGTHS))
        check(f"{name}: warm ids are those without a connector", ids == self.plain[dtype, seed])
        wanted = expected_hits(*LENGTHS)
        if not check(f"{name}: cached tokens are {wanted}", cached == wanted, f"found {cached}"):
            print(engine.tail())

    def kill_in_request(self, name, engine, delay, batch=None):
        """Kills an engine `delay` seconds after it was sent a batch; prompts never seen by default."""
        engine.submit(batch or prompts(60 + int(delay * 100), *[3000] * 6), max_tokens=400)
        time.sleep(delay)
        engine.kill()
        self.nothing_held(f"{name} killed {delay} s into a request")

    def skip_save(self, name, engine):
        """Requests that ask for no store, then the same ones without that."""
        batch = prompts(8, *LENGTHS)
        skips = [{"ids": ids, "transfer": {"lmcache.skip_save": True}} for ids in batch]
        for time_of in ("first", "second"):
            ids, cached = engine.generate(skips)
            check(f"{name}: ids of the {time_of} request are those without a connector",
                  ids == self.plain["float32", 8])
            check(f"{name}: nothing is cached at the {time_of} request",
                  cached == [0] * len(batch), str(cached))
        self.cold_and_warm(f"{name}, then without it", engine, 8)

    def nothing_held(self, name):
        if self.args.peer:
            return
        self.server.check_idle(f"{name}: nothing is held afterwards")


def both_modes(run):
    """Cold and warm in each transfer mode; partial hits; salts; engines that share."""
    one = run.engine("one", mode="engine_driven")
    two = run.engine("two", mode="lmcache_driven")
    for name, engine, seed in (("engine-driven", one, 1), ("lmcache-driven", two, 2)):
        engine.ready()
        run.cold_and_warm(name, engine, seed)
        plain = run.plain["float32", ("shared", seed)]
        first, second = shared_prefix(seed)
        engine.generate([first])
        ids, cached = engine.generate([second])
        check(f"{name}: a shared prefix is a partial hit with the right ids",
              cached == [512] and ids[0] == plain[1], str(cached))
        salted = [{"ids": first, "salt": "tenant"}]
        ids, cached = engine.generate(salted)
        check(f"{name}: another salt finds nothing", cached == [0], str(cached))
        ids_again, cached = engine.generate(salted)
        check(f"{name}: the same salt finds its own",
              cached == [768] and ids_again == ids == [plain[0]],
              str(cached))
    run.nothing_held("both modes")
    two.kill()
    run.one = one


def sharing_and_death(run):
    """A second engine finds what the first stored, dies in mid-request, and comes back."""
    # They start at once: one after the other takes longer.
    delays = {delay: run.engine("three") for delay in (0.0, 0.05, 0.3)}
    three = delays[0.0].ready()
    run.warm("second engine", three, 1)
    run.cold_and_warm("second engine", three, 3)
    run.warm("first engine", run.one, 3)
    for delay, three in delays.items():
        if delay:
            three.ready()
        run.kill_in_request("engine", three, delay)
    ids, _ = run.one.generate(prompts(4, *LENGTHS))
    check("the other engine goes on", ids == run.plain["float32", 4])
    three = run.engine("three").ready()
    run.warm("engine started again", three, 1)
    three.kill()
    run.nothing_held("engines that died")


def server_restart(run):
    """The server is killed and started again; the engine goes on answering throughout."""
    run.server.child.kill()
    # Longer than the time between two signs of life and the wait for an answer.
    time.sleep(6.5)
    ids, cached = run.one.generate(prompts(5, *LENGTHS))
    check("server down: the engine answers with the right ids", ids == run.plain["float32", 5])
    check("server down: nothing is cached", not any(cached), str(cached))
    run.server.start()

    def caches_again():
        _, cached = run.one.generate(prompts(6, *LENGTHS))
        return any(cached)

    check("server started again: the engine caches again", eventually(caches_again))
    run.warm("server started again", run.one, 6)
    # Killed and back before the engine's next sign of life: it must notice all the same.
    run.server.child.kill()
    run.server.start()

    def cold_then_warm():
        ids, cached = run.one.generate(prompts(7, *LENGTHS))
        if ids != run.plain["float32", 7]:
            raise RuntimeError("wrong ids after a quick restart")
        return any(cached)

    check("server restarted between two signs of life: the engine caches again",
          eventually(cold_then_warm))


def load_failure(run):
    """The server is killed between a lookup and its retrieve, under both of vLLM's policies."""
    if run.args.peer:
        return
    cases = []
    for mode in ("engine_driven", "lmcache_driven"):
        for policy in ("recompute", "fail"):
            server = Server(run.args).start()
            proxy = Proxy(free_port(), server.port, server.child.kill)
            engine = run.engine(f"{policy}-{mode}", port=proxy.port, mode=mode, policy=policy,
                                timeout=2, heartbeat=1)
            cases.append((mode, policy, server, proxy, engine))
    prompt = prompts(3, *LENGTHS)[1:2]
    plain = run.plain["float32", 3][1]
    for mode, policy, server, proxy, engine in cases:
        name = f"load failure, {mode}, policy {policy}"
        engine.ready()
        engine.generate(prompt)
        _, cached = engine.generate(prompt)
        check(f"{name}: the prompt is cached before", cached == [512], str(cached))
        proxy.armed = True
        asked = time.monotonic()
        output = engine.outputs(prompt)[0]
        took = time.monotonic() - asked
        check(f"{name}: the server died when the retrieve was sent",
              eventually(lambda: proxy.struck and server.child.process.poll() is not None))
        if policy == "recompute":
            check(f"{name}: the request ends as without a connector",
                  (output["ids"], output["finish"]) == (plain, "length"),
                  f"{output}, after {took:.1f} s")
            ids, _ = engine.generate(prompt)
            check(f"{name}: so does the next request", ids == [plain], str(ids))
        else:
            check(f"{name}: the request ends with an error",
                  (output["ids"], output["finish"]) == ([], "error"),
                  f"{output}, after {took:.1f} s")
            # vLLM 0.32 frees the failed request, then reports it as sent and asserts that it knows
            # it: the engine ends with an AssertionError at its next step.
            engine.submit(prompt)
            check(f"{name}: the next request ends the whole engine", engine.dies(30))
        engine.kill()
        proxy.stop()
        server.discard()


def disk_restart(run):
    """A server with a disk tier is killed and started again: what it knew, it knows."""
    if run.args.peer:
        return
    folder = tempfile.mkdtemp(prefix="lmc-disk-")
    server = Server(run.args, "--disk", os.path.join(folder, "tier"), "--disk-create",
                    "--disk-size", "128MiB", "--disk-keep-free", "0",
                    "--state-dir", os.path.join(folder, "state"))

    def disk():
        return server.status()["lmc"]["lower"][0]

    try:
        server.start()
        engines = {connector: run.engine(f"disk-{connector}", port=server.port, connector=connector)
                   for connector in run.connectors}
        for connector, engine in engines.items():
            engine.ready()
            run.cold_and_warm(f"disk, {connector}", engine, 3)
        chunks = 9 * len(engines)
        check("disk: every chunk is written to the disk",
              eventually(lambda: disk()["queued_bytes"] == 0 and disk()["chunks"] == chunks),
              f"{disk()['chunks']} of {chunks}")
        for how, seed in (("killed", 6), ("stopped", 7)):
            server.child.kill(signal.SIGKILL if how == "killed" else signal.SIGTERM)
            server.start()
            found = disk()["chunks"]
            check(f"disk, server {how}: it finds what was written", found >= chunks, str(found))
            for connector, engine in engines.items():
                # The engine notices that the server is another by what it stores next.
                eventually(lambda: any(engine.generate(prompts(seed, *LENGTHS))[1]))
                before = disk()["promoted"]
                run.warm(f"disk, {connector}, server {how} and started again", engine, 3)
                promoted = disk()["promoted"] - before
                check(f"disk, {connector}, server {how}: the chunks came from disk",
                      promoted >= 9, f"{promoted} read")
        for engine in engines.values():
            engine.kill()
        server.check_idle("disk: nothing is held afterwards")
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


class Peers:
    """Two servers that read each other's chunks, with an engine each. What the reader reads passes
    a proxy that can kill the owner in the middle of it."""

    def __init__(self, run, policy, connector):
        self.run = run
        self.name = f"peers, {connector}, policy {policy}"
        at = [f"127.0.0.1:{free_port()}" for _ in range(3)]
        self.addresses = at[:2]
        self.third = None
        self.owner = Server(run.args, "--p2p-listen", at[0])
        # Five milliseconds are too few for a proxy in Python on a busy machine.
        self.reader = Server(run.args, "--p2p-listen", at[1], "--p2p-peer", at[2],
                             "--p2p-locate-timeout", "5s")
        self.owner.start()
        ports = [int(address.split(":")[1]) for address in at]
        self.proxy = CutShort(ports[2], ports[0], self.owner.child.kill)
        self.reader.start()
        self.first = run.engine("peers-first", port=self.owner.port, connector=connector)
        self.second = run.engine("peers-second", port=self.reader.port, connector=connector,
                                 policy=policy)

    def counters(self):
        return self.reader.status()["lmc"]["lower"][0]["counters"]

    def connected(self):
        with open(self.reader.child.log.name, errors="replace") as log:
            return "peer connected" in log.read()

    def ready(self):
        self.first.ready()
        self.second.ready()
        check(f"{self.name}: the servers have met", eventually(self.connected))

    def share(self):
        run, name = self.run, self.name
        # A proxy that gets no core for 0.7 s costs a lease: then other prompts are tried.
        for seed in (3, 4, 5):
            before = self.counters()
            run.cold_and_warm(f"{name}, first engine", self.first, seed)
            ids, cached = self.second.generate(prompts(seed, *LENGTHS))
            check(f"{name}, second engine: ids are those without a connector",
                  ids == run.plain["float32", seed])
            found = self.counters()
            if found["failed"] + found["lapsed"] == before["failed"] + before["lapsed"]:
                break
        check(f"{name}, second engine: its prompts are warm", cached == expected_hits(*LENGTHS),
              str(cached))
        check(f"{name}: each chunk was read from the other server, once and whole",
              found["read"] == before["read"] + 9 and not found["corrupt"]
              and found["lapsed"] == before["lapsed"], str(found))
        run.warm(f"{name}, second engine again", self.second, seed)
        check(f"{name}: then it has them itself", self.counters()["read"] == found["read"])

    def hint(self):
        """A third server has the same chunks; a request that names it is read from it alone."""
        run, name = self.run, self.name
        batch, peers = prompts(8, *LENGTHS), ",".join(self.addresses)
        self.third = Server(run.args, "--p2p-listen", f"127.0.0.1:{free_port()}",
                            "--p2p-name", "third", "--p2p-peer", peers)
        self.third.start()

        def read_from():
            """Chunks that the reader has read from the third server, and from the owner."""
            found = self.reader.ask("/peers")["peers"]
            of = {peer["name"] == "third": peer["counters"]["read"] for peer in found}
            return of.get(True), of.get(False)

        self.first.generate(batch)
        met = eventually(lambda: None not in read_from() and "third" in [
            peer["name"] for peer in self.owner.ask("/peers")["peers"]])
        check(f"{name}: the third server has met both", met)
        chunks = self.owner.ask("/peers/copy", {"peer": "third"})["chunks"]
        copied = eventually(lambda: self.owner.ask("/peers/copy")["copied"] == chunks)
        check(f"{name}: the third server has what the owner has", copied)
        before = read_from()
        hinted = [{"ids": ids, "transfer": {"lmcache.p2p.source": "third"}} for ids in batch]
        ids, cached = self.second.generate(hinted)
        check(f"{name}: ids of requests that name a peer are those without a connector",
              ids == run.plain["float32", 8])
        check(f"{name}: their prompts are warm", cached == expected_hits(*LENGTHS), str(cached))
        after = read_from()
        check(f"{name}: all of their chunks come from the peer that they name",
              after == (before[0] + 9, before[1]), f"{before}, then {after}")

    def die_in_mid_read(self):
        """Chunks on their way when their owner dies are misses, and the rest is computed."""
        run, name = self.run, self.name
        self.first.generate(prompts(6, *LENGTHS))
        usage = self.owner.status()["lmc"]["usage"]
        # One chunk and a half have arrived then, of nine.
        self.proxy.left = usage["chunk_bytes"] // usage["chunks"] * 3 // 2
        outputs = self.second.outputs(prompts(6, *LENGTHS))
        check(f"{name}: the owner died while its chunks were read",
              eventually(lambda: self.proxy.struck
                         and self.owner.child.process.poll() is not None))
        check(f"{name}: ids are those without a connector when the owner dies in mid-read",
              [output["ids"] for output in outputs] == run.plain["float32", 6])
        check(f"{name}: and no request fails",
              all(output["finish"] == "length" for output in outputs), str(outputs))
        ids, _ = self.second.generate(prompts(7, *LENGTHS))
        check(f"{name}: so they are after it", ids == run.plain["float32", 7])
        self.first.kill()
        self.second.kill()
        self.reader.check_idle(f"{name}: nothing is held afterwards")

    def end(self):
        self.proxy.stop()
        self.owner.discard()
        self.reader.stop()
        if self.third:
            self.third.stop()


def peers(run):
    """Two servers that read each other's chunks, under both of vLLM's policies and with lmc's own
    connector; a third that a request names; the owner dies."""
    if run.args.peer:
        return
    peers_of(run, ("recompute", "fail"), "stock")
    # Afterwards: twelve engines and servers at once need more memory than small machines have.
    if "lmc" in run.connectors:
        peers_of(run, ("fail",), "lmc")


def peers_of(run, policies, connector):
    pairs = []
    try:
        for policy in policies:
            pairs.append(Peers(run, policy, connector))
        for pair in pairs:
            pair.ready()
        pairs[0].share()
        pairs[0].hint()
        for pair in pairs:
            pair.die_in_mid_read()
    finally:
        for pair in pairs:
            pair.end()


# Seconds for which a store hangs, prompts whose first token is timed without a store, and the most
# prompts meanwhile: each leaves 1 MiB in a server's memory of 1 GiB, which must hold the first too.
HANG, TIMED, MOST = 60, 20, 500
# What LMCache's connector and lmc's own log when a server answers no sign of life in time.
DEGRADED, LOST = "entering degraded mode", "no KV cache: server"


def hang(run, name, redis, url, server, engine):
    """A Redis that hangs for a minute under a server with the default timeouts, which replaces the
    engine's server. Prompts go on throughout: their ids are right, and their first tokens come
    about as soon as from a server without a store. Returns the server."""
    name += ", a store that hangs"

    def replaced_by(*flags):
        """A server with these flags at the ports of the one before, once the engine uses it."""
        server.discard()
        new = Server(run.args, *flags)
        new.port, new.http = server.port, server.http
        new.start()

        def caches():
            engine.generate(prompts(8, *LENGTHS))
            return any(engine.generate(prompts(8, *LENGTHS))[1])

        check(f"{name}: the engine uses the server with {' '.join(flags) or 'no store'}",
              eventually(caches))
        return new

    def first_token(number):
        """Seconds until the first token of a prompt that no server has seen, and its id."""
        engine.submit(prompts(1000 + number, 700), max_tokens=1)
        answer = engine.answer(ANSWER_DEADLINE)
        return answer["seconds"], answer["outputs"][0]["ids"]

    server = replaced_by()
    without = [first_token(number) for number in range(TIMED)]
    server = replaced_by("--remote", url)
    run.cold_and_warm(f"{name}, before that", engine, 2)
    redis.process.send_signal(signal.SIGSTOP)
    stopped, during, right, stored, unsure = time.monotonic(), [], 0, set(), set()
    lost = engine.said(DEGRADED)
    while time.monotonic() < stopped + HANG:
        during.append(first_token(len(during)))
        if len(during) % 10 == 1:
            # Each of them is cold once, and warm from then on.
            seed = 3 + len(during) // 10 % 5
            ids, cached = engine.generate(prompts(seed, *LENGTHS))
            all_hits = expected_hits(*LENGTHS)
            hits = [all_hits if seed in stored else [0] * len(LENGTHS)]
            if seed in unsure:
                hits.append(all_hits)
            if engine.said(DEGRADED) > lost:
                # The machine kept the engine from the server: chunks may be missing.
                lost = engine.said(DEGRADED)
                hits.append(cached)
                stored.discard(seed)
                unsure.add(seed)
            else:
                stored.add(seed)
                unsure.discard(seed)
            right += ids == run.plain["float32", seed] and cached in hits
        time.sleep(max(0, stopped + len(during) * HANG / MOST - time.monotonic()))
    run.warm(f"{name}, at its end", engine, 2)
    redis.process.send_signal(signal.SIGCONT)
    batches = (len(during) + 9) // 10
    check(f"{name}: {batches} batches have the ids and the hits that they have without a store",
          right == batches, f"{right} of them")
    compared = min(len(during), TIMED)
    check(f"{name}: first tokens are those without a store",
          [ids for _, ids in during[:compared]] == [ids for _, ids in without[:compared]])
    times = {what: sorted(seconds for seconds, _ in timed)
             for what, timed in (("without a store", without), ("while it hangs", during))}
    for what, taken in times.items():
        print(f"      time to first token {what}: {len(taken)} prompts, median "
              f"{taken[len(taken) // 2] * 1e3:.0f} ms, longest {taken[-1] * 1e3:.0f} ms", flush=True)
    longest = times["while it hangs"][-1]
    # A prompt that waits for the store takes the 5 s of --remote-timeout-seconds.
    check(f"{name}: no prompt waits for it",
          longest < min(times["without a store"][-1] * 3, 0.9) + 4,
          f"{longest:.1f} s")
    healthy = eventually(lambda: all(
        tier["fault"] is None for tier in server.status()["lmc"]["tiers"]))
    check("remote, a store that hung: it is used again", healthy,
          str(server.status()["lmc"]["tiers"]))
    return server


def remote(run):
    """Two servers with one store: each finds what the other stored, also after a restart of
    everything; a store that hangs costs hits and nothing else. With each connector."""
    if run.args.peer:
        return
    for connector in run.connectors:
        remote_with(run, connector)


def remote_with(run, connector):
    name = f"remote, {connector}"
    folder = tempfile.mkdtemp(prefix="lmc-remote-")
    redis = Redis() if shutil.which("redis-server") else None
    stores = {"files": f"file://{folder}"}
    if redis:
        stores["redis"] = f"redis://127.0.0.1:{redis.port}"
    else:
        print("(no redis-server: the scenario runs with files only)")
    servers = []

    def lower(server):
        return server.status()["lmc"]["lower"][0]

    def start(which):
        """A server for each store, and its engine; they start at once."""
        started = []
        for kind, url in stores.items():
            # A busy machine may take longer than the default.
            server = Server(run.args, "--remote", url, "--remote-locate-timeout", "5s")
            servers.append(server)
            server.start()
            engine = run.engine(f"remote-{connector}-{kind}-{which}", port=server.port,
                                connector=connector)
            started.append((kind, server, engine))
        return started

    try:
        for kind, first, engine in start("first"):
            engine.ready()
            run.cold_and_warm(f"{name}, {kind}", engine, 3)
            check(f"{name}, {kind}: every chunk is written",
                  eventually(lambda: lower(first)["written"] == 9), str(lower(first)))
            engine.kill()
            first.discard()
        for kind, second, engine in start("second"):
            engine.ready()
            run.warm(f"{name}, {kind}, another engine and server", engine, 3)
            check(f"{name}, {kind}: the chunks came from the store",
                  lower(second)["promoted"] == 9, str(lower(second)))
            if kind == "redis":
                second = hang(run, name, redis, stores[kind], second, engine)
                servers.append(second)
            engine.kill()
            second.check_idle(f"{name}, {kind}: nothing is held afterwards")
    finally:
        for server in servers:
            if server.child and server.child.process.poll() is None:
                server.stop()
        if redis:
            redis.kill()
        shutil.rmtree(folder, ignore_errors=True)


def skip_save(run):
    """A request that says lmcache.skip_save stores nothing; the same one without it does."""
    if run.args.peer:
        return
    run.skip_save("skip_save", run.one)
    run.nothing_held("skip_save")


def wrong_dtype(run):
    """An engine of the same model name in bfloat16 beside one in float32, with each connector."""
    dtypes_apart(run, "wrong dtype", run.one, run.engine("half", dtype="bfloat16"))
    if "lmc" in run.connectors:
        one = run.engine("own-float32", connector="lmc")
        half = run.engine("own-bfloat16", connector="lmc", dtype="bfloat16")
        dtypes_apart(run, "wrong dtype, own", one.ready(), half)
        one.kill()


def dtypes_apart(run, name, one, half):
    one.generate(prompts(1, *LENGTHS))
    half.ready()
    answers, cached = [], []
    for _ in range(2):
        for prompt in prompts(1, *LENGTHS):
            ids, hit = half.generate([prompt])
            answers += ids
            cached.append(hit[0])
    check(f"{name}: its ids are those without a connector",
          answers == run.plain["bfloat16", 1] * 2)
    check(f"{name}: it never gets the other's chunks, then its own",
          cached[: len(LENGTHS)] == [0] * len(LENGTHS)
          and cached[len(LENGTHS):] == expected_hits(*LENGTHS), str(cached))
    run.warm(f"{name}: the float32 engine still finds its own", one, 1)
    half.kill()
    run.nothing_held(name)


def block_sizes(run):
    """Engines with blocks of 64 and of 128 tokens, at once and one after the other, in both modes and
    with lmc's own connector, in memory and through a shared store: each finds what its like stored,
    and nothing of the other."""
    if run.args.peer:
        return
    modes = {mode: {"mode": mode} for mode in ("engine_driven", "lmcache_driven")}
    if "lmc" in run.connectors:
        modes["own"] = {"connector": "lmc"}
    for mode, options in modes.items():
        folder = tempfile.mkdtemp(prefix="lmc-blocks-")
        servers = []

        def start():
            server = Server(run.args, "--remote", f"file://{folder}", "--remote-locate-timeout", "5s")
            servers.append(server)
            server.start()
            engines = [run.engine(f"blocks-{mode}-{size}-{len(servers)}", port=server.port,
                                  block_size=size, **options) for size in (64, 128)]
            return server, [engine.ready() for engine in engines]

        def written(server, chunks):
            found = lambda: server.status()["lmc"]["lower"][0]["written"]
            check(f"block sizes, {mode}: {chunks} chunks are written",
                  eventually(lambda: found() == chunks), str(found()))

        try:
            server, (small, large) = start()
            run.cold_and_warm(f"block sizes, {mode}, 64", small, 5)
            run.cold_and_warm(f"block sizes, {mode}, 128 at the same time", large, 5)
            run.warm(f"block sizes, {mode}, 64 again", small, 5)
            run.cold_and_warm(f"block sizes, {mode}, 64 alone", small, 6)
            written(server, 27)
            for engine in (small, large):
                engine.kill()
            server.discard()
            # Both restart, as does the server: all that they find lies in the store.
            server, (small, large) = start()
            run.cold_and_warm(f"block sizes, {mode}, 128 where only 64 was", large, 6)
            run.warm(f"block sizes, {mode}, 128 out of the store", large, 5)
            run.warm(f"block sizes, {mode}, 64 out of the store", small, 5)
            for engine in (small, large):
                engine.kill()
        finally:
            for server in servers:
                if server.child and server.child.process.poll() is None:
                    server.stop()
            shutil.rmtree(folder, ignore_errors=True)


def serve(run):
    """`vllm serve` with the line that `lmc serve` printed, and lmc's own connector as its page says,
    asked over HTTP, as a user would."""
    with contextlib.ExitStack() as stack:
        child = stack.enter_context(
            VllmServe(run.model, *TOKENS, "--kv-transfer-config", run.server.transfer_config(),
                      paths=[run.args.package]))
        # It is installed while the other starts.
        if run.args.package:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            page = stack.enter_context(Page(run, folder))
        run.server_clear()
        ask_twice(run, "vllm serve", child)
        if run.args.package:
            ask_twice(run, "vllm serve, own", page.vllm)
            counted = eventually(lambda: page.vllm.metric("vllm:lmc_total"), 10)
            check("vllm serve, own: vLLM's metrics hold the connector's", counted > 0, str(counted))
            if page.starts:
                own_background(run, page)


def hits(child):
    """The tokens that a `vllm serve` has taken from its connector."""
    return child.metric("vllm:external_prefix_cache_hits_total")


def of_source(child, source):
    """The tokens that a `vllm serve` has taken from one kind of tier."""
    with child.open("/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines
               if line.startswith("vllm:prompt_tokens_cached_by_source_total{")
               and f'source="{source}"' in line)


def own_background(run, page):
    """The server that lmc's connector starts: shared by engines, and there when they are gone."""

    def warm(name, child):
        check(f"{name}: its first answer is the one without a connector",
              ask(run, child) == run.plain["float32", 2][2])
        found = eventually(lambda: hits(child), 10)
        check(f"{name}: 1024 tokens of it come from the cache", found == 1024, str(found))
        by_host = of_source(child, "host")
        check(f"{name}: vLLM counts them as the host's", by_host == 1024, str(by_host))

    process = page.server()
    check("own server: it is in no process tree of vLLM", process not in tree(page.vllm.process.pid))
    with page.serve() as other:
        warm("own server, second engine", other.ready())
        check("own server: two engines have one", page.server() == process)
        # As vLLM ends an engine that is stuck.
        for engine in (page.vllm, other):
            for member in tree(engine.process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(member, signal.SIGKILL)
    page.vllm = page.serve().ready()
    warm("own server, after the death of both", page.vllm)
    check("own server: it is still the same", page.server() == process)


def tree(root):
    """A process and all that it has started, as far as their parents live."""
    parents = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as stat:
            parents[int(name)] = int(stat.read().rpartition(")")[2].split()[1])
    found = [root]
    for member in found:
        found += [child for child, parent in parents.items() if parent == member]
    return found


def ask_twice(run, name, child):
    """Asks a `vllm serve` over HTTP, cold and warm."""
    child.ready()
    answers, found = [ask(run, child)], []

    def is_warm():
        # The chunks may be stored after the answer.
        before = hits(child)
        answers.append(ask(run, child))
        eventually(lambda: hits(child) > before, 3)
        found.append(hits(child) - before)
        return found[-1] == 1024

    check(f"{name}: then 1024 tokens come from the cache", eventually(is_warm), str(found))
    plain = run.plain["float32", 2][2]
    check(f"{name}: cold and warm ids are those without a connector",
          all(ids == plain for ids in answers))


def tensor_parallel(run):
    """Two ranks, each with its half of every chunk; of lmc's connector also its KV events, and one
    rank whose loads fail, or come late."""
    for connector in run.connectors:
        with Subscriber() as subscriber:
            tensor_parallel_of(run, connector, subscriber)


def tensor_parallel_of(run, connector, subscriber):
    name = f"tensor parallel, {connector}"
    own = {"faulty": True, "events": subscriber.port} if connector == "lmc" else {}
    # Its ranks wait for each other by spinning, so on two cores its signs of life are late.
    pair = run.engine(f"pair-{connector}", tp=2, heartbeat=10, timeout=60, connector=connector,
                      **own).ready()
    batch = prompts(1, *LENGTHS)[1:2]

    def stored():
        return run.server.status()["lmc"]["engine"]["inserted"]

    if connector == "lmc":
        subscriber.join()
    before = 0 if run.args.peer else stored()
    answers = [pair.generate(batch)]
    if not run.args.peer:
        # A rank that gets no core stores its chunks after the answer.
        eventually(lambda: stored() == before + 4, 5)

    def found():
        # One that got no core for so long that it lost the server stores them now.
        answers.append(pair.generate(batch))
        return answers[-1][1] == [512]

    check(f"{name}: both ranks' chunks are found", eventually(found, 90) and not any(answers[0][1]),
          str([cached for _, cached in answers]))
    if not run.args.peer:
        check(f"{name}: each rank stores two chunks", eventually(lambda: stored() == before + 4))
    check(f"{name}: ids are those of one rank without a connector",
          all(ids == run.plain["float32", 1][1:2] for ids, _ in answers))
    if connector == "lmc":
        if pair.said(LOST):
            print("(a rank lost the server meanwhile: events are compared by the scenario events)")
        else:
            subscriber.check(f"{name}, events", pair, batch)
        rank_faults(run, name, pair)
    pair.quit()
    run.nothing_held(name)


def rank_faults(run, name, pair):
    """The second rank fails to load some requests, and loads others steps later than the first."""
    batch, plain = prompts(1, *LENGTHS), run.plain["float32", 1]
    right = []

    def is_warm():
        ids, cached = pair.generate(batch)
        right.append(ids == plain)
        return cached == expected_hits(*LENGTHS)

    # Ranks that get no core store their chunks after the answer, or lose the server for a while.
    check(f"{name}: five prompts are stored", eventually(is_warm, 90))
    for fault in ("fails", "late", "late and fails"):
        # Two with the fault among others.
        faulty = [{"ids": ids} | ({"transfer": {"lmc.fault": fault}} if n in (1, 2) else {})
                  for n, ids in enumerate(batch)]

        def faults():
            before = pair.said(f"fault: {fault}, ")
            outputs = pair.outputs(faulty)
            right.append([o["ids"] for o in outputs] == plain
                         and {o["finish"] for o in outputs} == {"length"})
            if pair.said(f"fault: {fault}, ") == before + 2:
                return True
            eventually(is_warm, 90)
            return False

        check(f"{name}, a rank {fault}: two requests do so", eventually(faults, 90))
        check(f"{name}, a rank {fault}: the next requests are warm", eventually(is_warm, 90))
    pair.abort([{"ids": ids, "transfer": {"lmc.fault": "late"}} for ids in batch[1:3]], 4)
    check(f"{name}, aborted while a rank is late: the next requests are warm",
          eventually(is_warm, 90))
    check(f"{name}, with a rank that fails or is late: ids and ends are those without a connector",
          all(right), str(right))


# `connector` is the last: it kills the server, whose chunks `sharing_and_death` finds.
SCENARIOS = [both_modes, sharing_and_death, server_restart, load_failure, disk_restart, peers,
             remote, skip_save, wrong_dtype, block_sizes, serve, tensor_parallel,
             unequal_parallelism, events, containers, lora, hash_algorithms, hybrid, latent,
             lmcache_server, weights, quickstart, spans, pd, both_connectors, tails, connector]


# What uses `run.one`, an engine with the stock connector.
NEED_ONE = (sharing_and_death, server_restart, skip_save, wrong_dtype)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server-bin", default="target/release/lmc")
    parser.add_argument("--model", default=os.path.join(sys.prefix, "model"))
    parser.add_argument("--package", help="folder with lmc's Python package")
    parser.add_argument("--peer", choices=["lmcache"])
    parser.add_argument("--only", nargs="*", metavar="NAME",
                        help="of: " + ", ".join(s.__name__ for s in SCENARIOS))
    args = parser.parse_args()
    if args.peer is not None:
        checks.known_faults = PEER_FAULTS
    Engine.package = args.package
    started = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("asked to end"))
    run = Run(args)

    def server_clear():
        url = f"http://127.0.0.1:{run.server.http}/cache/clear"
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(url, b"{}", headers, method="POST")
        urllib.request.urlopen(request, timeout=5).read()

    run.server_clear = server_clear
    try:
        run.baseline()
        run.server.start()
        for scenario in SCENARIOS:
            if args.only and scenario.__name__ not in args.only:
                continue
            if scenario in NEED_ONE and not hasattr(run, "one"):
                run.one = run.engine("one").ready()
                run.one.generate(prompts(1, *LENGTHS))
            print(f"---- {scenario.__name__}: {scenario.__doc__} "
                  f"[{time.monotonic() - started:.0f} s]", flush=True)
            others = set(Child.running)
            try:
                scenario(run)
            except Exception as error:  # A scenario that breaks must not hide the others.
                check(f"{scenario.__name__}", False, str(error))
                shared = {run.server.child, getattr(run, "one", None)}
                for child in set(Child.running) - others - shared:
                    # A server removes its pool when asked to end.
                    child.kill(signal.SIGTERM if child.name == "server" else signal.SIGKILL)
    finally:
        for child in Child.running:
            if child is not run.server.child:
                child.kill()
        run.server.stop()
        for child in Child.running:
            if not checks.failed:
                with contextlib.suppress(OSError):
                    os.unlink(child.log.name)
    if checks.failed:
        # The files are gone with the machine that CI ran on, so their ends are shown here.
        for child in Child.running:
            print(f"---- end of {child.log.name}\n{child.tail(20)}", flush=True)
    print(f"took {time.monotonic() - started:.0f} s")
    checks.finish()


if __name__ == "__main__":
    main()
