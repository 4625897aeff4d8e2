"""Real vLLM engines against a server that speaks LMCache's multiprocess protocol.

  scenarios.py --server-bin target/release/lmc [--only NAME ...]
  scenarios.py --peer lmcache                    the same against LMCache's own server

Prints one line a check and ends with `N passed, N failed`. Every wait has a deadline, and no
process outlives the run.
"""

import argparse
import contextlib
import ctypes
import glob
import json
import os
import queue
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

import checks
from checks import check, free_port
from proxy import CutShort, Proxy

HERE = os.path.dirname(os.path.abspath(__file__))
CHUNK = 256
MAX_TOKENS = 16
START_DEADLINE = 180
ANSWER_DEADLINE = 120

# What LMCache 0.5.6's own server fails, as it stands at the head of a check's name.
PEER_FAULTS = {
    "lmcache-driven: cached tokens": "a lookup may miss what a store has just acknowledged",
    "wrong_dtype": "it hands bytes of the wrong type over, and the engine dies",
}


def die_with_parent():
    """In a child: be killed when this run ends, even when it is killed itself."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def group(leader):
    """The processes that a child has started, itself included."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    found = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(pid) == leader:
                found.append(pid)
    return found


class Child:
    """A child process with its log in a file; killed at the end whatever happens."""

    running = []

    def __init__(self, name, command, **options):
        self.name = name
        self.log = tempfile.NamedTemporaryFile(
            mode="w+", prefix=f"lmc-{name}-", suffix=".log", delete=False
        )
        options.setdefault("stdout", self.log)
        self.process = subprocess.Popen(
            command, stderr=self.log, start_new_session=True, preexec_fn=die_with_parent, **options
        )
        Child.running.append(self)

    def kill(self, how=signal.SIGKILL):
        pids = {self.process.pid, *group(self.process.pid)}
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, how)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(20)
        # An engine that is killed leaves its KV cache, 1 GiB of memory, behind under its id.
        for pid in pids:
            for segment in glob.glob(f"/dev/shm/lmcache_kv_{pid}_*"):
                os.unlink(segment)

    def tail(self, lines=15):
        with open(self.log.name, errors="replace") as f:
            return "".join(f.readlines()[-lines:])


class Engine(Child):
    """A vLLM engine behind engine.py."""

    def __init__(self, name, model, **options):
        command = [sys.executable, os.path.join(HERE, "engine.py"), "--model", model]
        for key, value in options.items():
            command += [f"--{key}", str(value)]
        env = dict(os.environ, OMP_NUM_THREADS="1", VLLM_CPU_OMP_THREADS_BIND="nobind")
        super().__init__(
            name, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )
        self.answers = queue.Queue()
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        for line in self.process.stdout:
            self.answers.put(json.loads(line))
        self.answers.put(None)

    def answer(self, deadline):
        try:
            answer = self.answers.get(timeout=deadline)
        except queue.Empty:
            raise RuntimeError(f"{self.name}: no answer in {deadline} s\n{self.tail()}") from None
        if answer is None:
            raise RuntimeError(f"{self.name} died\n{self.tail()}")
        return answer

    def ready(self):
        self.answer(START_DEADLINE)
        return self

    def submit(self, prompts, max_tokens=MAX_TOKENS):
        prompts = [p if isinstance(p, dict) else {"ids": p} for p in prompts]
        command = {"op": "generate", "prompts": prompts, "max_tokens": max_tokens}
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def quit(self):
        """Lets the engine end by itself, so that it removes its own shared memory."""
        with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
            self.process.stdin.write('{"op": "quit"}\n')
            self.process.stdin.flush()
            self.process.wait(30)
        self.kill()

    def outputs(self, prompts):
        """Ids, cached tokens and finish reason of each prompt."""
        self.submit(prompts)
        return self.answer(ANSWER_DEADLINE)["outputs"]

    def generate(self, prompts):
        """Ids and cached tokens of each prompt."""
        outputs = self.outputs(prompts)
        return [o["ids"] for o in outputs], [o["cached"] for o in outputs]

    def dies(self, deadline):
        """Whether the engine's process ends by itself within the deadline."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(deadline)
        return self.process.poll() is not None


class Server:
    """The server under test, which can be killed and started again at the same ports."""

    def __init__(self, args, *flags):
        self.args = args
        self.flags = flags
        self.port, self.http = free_port(), free_port()
        self.child = None

    def start(self):
        common = ["--host", "127.0.0.1", "--port", str(self.port), "--l1-size-gb", "1"]
        common += ["--chunk-size", str(CHUNK), "--http-port", str(self.http)]
        if self.args.peer:
            lmcache = os.path.join(os.path.dirname(sys.executable), "lmcache")
            command = [sys.executable, lmcache, "server", *common]
            command += ["--eviction-policy", "LRU", "--no-l1-use-lazy"]
            # It has one transfer mode and no shared memory unless asked.
            command += ["--supported-transfer-mode", "auto", "--shm-name", f"lmc-peer-{self.port}"]
        else:
            command = [self.args.server_bin, "serve", *common, *self.flags]
        self.child = Child("server", command)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(
                ("127.0.0.1", self.port), 1
            ):
                return self
            if self.child.process.poll() is not None:
                break
            time.sleep(0.05)
        raise RuntimeError(f"the server did not start\n{self.child.tail()}")

    def transfer_config(self):
        """The value of --kv-transfer-config that our server printed; one with the port alone for
        LMCache's."""
        if self.args.peer:
            return json.dumps({
                "kv_connector": "LMCacheMPConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"lmcache.mp.port": self.port},
            })
        with open(self.child.log.name, errors="replace") as log:
            return log.read().split("--kv-transfer-config '")[1].split("'")[0]

    def segments(self):
        """The pool that a server which was killed leaves behind; its name holds the port."""
        return glob.glob(f"/dev/shm/lmc*[_-]{self.port}*")

    def stop(self):
        """Asks the server to end; ours must then leave nothing behind."""
        if self.child is None:
            return
        asked = time.monotonic()
        self.child.kill(signal.SIGTERM)
        took = time.monotonic() - asked
        if not self.args.peer:
            check("the server ends when asked to, and leaves no shared memory",
                  self.child.process.returncode == 0 and not self.segments(),
                  f"exit {self.child.process.returncode} after {took:.1f} s, {self.segments()}")
        self.discard()

    def discard(self):
        """Kills the server where it still runs, and removes the pool that it left."""
        self.child.kill()
        for segment in self.segments():
            os.unlink(segment)

    def ask(self, path, body=None):
        """The answer over HTTP; to a POST where there is a body."""
        url = f"http://127.0.0.1:{self.http}{path}"
        body = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=5) as answer:
            return json.load(answer)

    def status(self):
        return self.ask("/status")

    def held(self):
        """What is held for engines: all zero when no engine is at work."""
        status = self.status()["lmc"]
        return {
            "sessions": status["sessions"]["sessions"],
            "stores": status["transfers"]["stores"],
            "retrieves": status["transfers"]["retrieves"],
            "leases": status["usage"]["leases"],
            "reserved": status["usage"]["reserved_slots"],
        }


def prompts(seed, *lengths):
    rng = random.Random(seed)
    return [[rng.randrange(1, 1000) for _ in range(n)] for n in lengths]


def expected_hits(*lengths):
    """Whole chunks, less one token when that is all of the prompt: vLLM computes the last."""
    return [min(n // CHUNK * CHUNK, n - 1) for n in lengths]


def eventually(what, deadline=30):
    """Tries until it returns something true or the deadline comes; the last value."""
    end = time.monotonic() + deadline
    while True:
        value = what()
        if value or time.monotonic() > end:
            return value
        time.sleep(0.2)


LENGTHS = (300, 700, 1025, 512, 100)


class Run:
    """State that scenarios share: the model, the server, and the ids without a connector."""

    def __init__(self, args):
        self.args = args
        self.model = args.model
        self.server = Server(args)
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
        return Engine(name, self.model, **options)

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
        check(f"{name}: cached tokens are {wanted}", cached == wanted, f"found {cached}")

    def nothing_held(self, name):
        if self.args.peer:
            return
        free = eventually(lambda: not any(self.server.held().values()))
        check(f"{name}: nothing is held afterwards", free, str(self.server.held()))


def shared_prefix(seed):
    """A prompt, and one with the same first 600 tokens."""
    first, other = prompts(50 + seed, 900, 500)
    return [first, first[:600] + other]


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
    three = run.engine("three").ready()
    run.warm("second engine", three, 1)
    run.cold_and_warm("second engine", three, 3)
    run.warm("first engine", run.one, 3)
    for delay in (0.0, 0.05, 0.3):
        three.submit(prompts(60 + int(delay * 100), *[3000] * 6), max_tokens=400)
        time.sleep(delay)
        three.kill()
        run.nothing_held(f"engine killed {delay} s into a request")
        if delay < 0.3:
            three = run.engine("three").ready()
    ids, _ = run.one.generate(prompts(4, *LENGTHS))
    check("the other engine goes on", ids == run.plain["float32", 4])
    three = run.engine("three").ready()
    run.warm("engine started again", three, 1)
    three.kill()
    run.nothing_held("engines that died")


def server_restart(run):
    """The server is killed and started again; the engine goes on answering throughout."""
    run.server.child.kill()
    time.sleep(2.5)
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
                                timeout=2)
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
              proxy.struck and server.child.process.poll() is not None)
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
        engine = run.engine("disk", port=server.port).ready()
        run.cold_and_warm("disk", engine, 3)
        check("disk: every chunk goes down",
              eventually(lambda: disk()["queued_bytes"] == 0 and disk()["chunks"] == 9),
              f"{disk()['chunks']} of 9")
        for how, seed in (("killed", 6), ("stopped", 7)):
            server.child.kill(signal.SIGKILL if how == "killed" else signal.SIGTERM)
            server.start()
            found = disk()["chunks"]
            # The engine notices that the server is another by what it stores next.
            eventually(lambda: any(engine.generate(prompts(seed, *LENGTHS))[1]))
            run.warm(f"disk, server {how} and started again", engine, 3)
            check(f"disk, server {how}: the chunks came from disk",
                  found >= 9 and disk()["promoted"] >= 9, f"{found} found, {disk()['promoted']} read")
        engine.kill()
        free = eventually(lambda: not any(server.held().values()))
        check("disk: nothing is held afterwards", free, str(server.held()))
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


class Peers:
    """Two servers that read each other's chunks, with an engine each. What the reader reads passes
    a proxy that can kill the owner in the middle of it."""

    def __init__(self, run, policy):
        self.run = run
        self.name = f"peers, policy {policy}"
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
        self.first = run.engine("peers-first", port=self.owner.port)
        self.second = run.engine("peers-second", port=self.reader.port, policy=policy)

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
        run.cold_and_warm(f"{name}, first engine", self.first, 3)
        run.warm(f"{name}, second engine", self.second, 3)
        found = self.counters()
        check(f"{name}: each chunk was read from the other server, once and whole",
              found["read"] == 9 and not found["corrupt"] + found["lapsed"], str(found))
        run.warm(f"{name}, second engine again", self.second, 3)
        check(f"{name}: then it has them itself", self.counters()["read"] == 9)

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
              self.proxy.struck and self.owner.child.process.poll() is not None)
        check(f"{name}: ids are those without a connector when the owner dies in mid-read",
              [output["ids"] for output in outputs] == run.plain["float32", 6])
        check(f"{name}: and no request fails",
              all(output["finish"] == "length" for output in outputs), str(outputs))
        ids, _ = self.second.generate(prompts(7, *LENGTHS))
        check(f"{name}: so they are after it", ids == run.plain["float32", 7])
        self.first.kill()
        self.second.kill()
        free = eventually(lambda: not any(self.reader.held().values()))
        check(f"{name}: nothing is held afterwards", free, str(self.reader.held()))

    def end(self):
        self.proxy.stop()
        self.owner.discard()
        self.reader.stop()
        if self.third:
            self.third.stop()


def peers(run):
    """Two servers that read each other's chunks, under both of vLLM's policies; a third that a
    request names; the owner dies."""
    if run.args.peer:
        return
    pairs = []
    try:
        for policy in ("recompute", "fail"):
            pairs.append(Peers(run, policy))
        for pair in pairs:
            pair.ready()
        pairs[0].share()
        pairs[0].hint()
        for pair in pairs:
            pair.die_in_mid_read()
    finally:
        for pair in pairs:
            pair.end()


class Redis(Child):
    """A redis-server that keeps all in memory."""

    def __init__(self):
        self.port = free_port()
        super().__init__("redis", ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1",
                                   "--save", "", "--appendonly", "no"])


def remote(run):
    """Two servers with one store: each finds what the other stored, also after a restart of
    everything; a store that hangs costs hits and nothing else."""
    if run.args.peer:
        return
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

    try:
        for kind, url in stores.items():
            # A busy machine may take longer than the default.
            flags = ["--remote", url, "--remote-locate-timeout", "5s"]
            first, second = Server(run.args, *flags), Server(run.args, *flags)
            servers += [first, second]
            first.start()
            engine = run.engine(f"remote-{kind}-first", port=first.port).ready()
            run.cold_and_warm(f"remote, {kind}", engine, 3)
            check(f"remote, {kind}: every chunk is written",
                  eventually(lambda: lower(first)["written"] == 9), str(lower(first)))
            engine.kill()
            first.discard()
            second.start()
            engine = run.engine(f"remote-{kind}-second", port=second.port).ready()
            run.warm(f"remote, {kind}, another engine and server", engine, 3)
            check(f"remote, {kind}: the chunks came from the store",
                  lower(second)["promoted"] == 9, str(lower(second)))
            if kind == "redis":
                redis.process.send_signal(signal.SIGSTOP)
                ids, _ = engine.generate(prompts(6, *LENGTHS))
                check("remote, a store that hangs: cold ids are those without a connector",
                      ids == run.plain["float32", 6])
                run.warm("remote, a store that hangs", engine, 3)
                redis.process.send_signal(signal.SIGCONT)
                healthy = eventually(lambda: all(
                    tier["fault"] is None for tier in second.status()["lmc"]["tiers"]))
                check("remote, a store that hung: it is used again", healthy,
                      str(second.status()["lmc"]["tiers"]))
            engine.kill()
            free = eventually(lambda: not any(second.held().values()))
            check(f"remote, {kind}: nothing is held afterwards", free, str(second.held()))
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
    engine = run.engine("skip-save").ready()
    batch = prompts(8, *LENGTHS)
    skips = [{"ids": ids, "transfer": {"lmcache.skip_save": True}} for ids in batch]
    for time_of in ("first", "second"):
        ids, cached = engine.generate(skips)
        check(f"skip_save: ids of the {time_of} request are those without a connector",
              ids == run.plain["float32", 8])
        check(f"skip_save: nothing is cached at the {time_of} request",
              cached == [0] * len(batch), str(cached))
    run.cold_and_warm("skip_save, then without it", engine, 8)
    engine.kill()
    run.nothing_held("skip_save")


def wrong_dtype(run):
    """An engine of the same model name in bfloat16 beside one in float32."""
    ids, _ = run.one.generate(prompts(1, *LENGTHS))
    half = run.engine("half", dtype="bfloat16").ready()
    answers, cached = [], []
    for _ in range(2):
        for prompt in prompts(1, *LENGTHS):
            ids, hit = half.generate([prompt])
            answers += ids
            cached.append(hit[0])
    check("wrong dtype: its ids are those without a connector",
          answers == run.plain["bfloat16", 1] * 2)
    check("wrong dtype: it never gets the other's chunks, then its own",
          cached[: len(LENGTHS)] == [0] * len(LENGTHS)
          and cached[len(LENGTHS):] == expected_hits(*LENGTHS), str(cached))
    run.warm("wrong dtype: the float32 engine still finds its own", run.one, 1)
    half.kill()
    run.nothing_held("wrong dtype")


def serve(run):
    """`vllm serve` with the line that `lmc serve` printed, asked over HTTP, as a user would."""
    http = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", run.model]
    # The model has no tokenizer: prompts and answers are token ids.
    command += ["--tokens-only", "--skip-tokenizer-init", "--dtype", "float32"]
    command += ["--enforce-eager", "--no-enable-prefix-caching", "--max-model-len", "4096"]
    command += ["--max-num-batched-tokens", "8192", "--host", "127.0.0.1", "--port", str(http)]
    command += ["--kv-transfer-config", run.server.transfer_config()]
    env = dict(os.environ, VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind",
               OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    child = Child("vllm-serve", command, env=env)

    def up():
        with contextlib.suppress(OSError):
            return urllib.request.urlopen(f"http://127.0.0.1:{http}/health", timeout=2).status
        if child.process.poll() is not None:
            raise RuntimeError(f"vllm serve ended\n{child.tail(30)}")
        return None

    if not check("vllm serve: starts", eventually(up, START_DEADLINE) == 200):
        print(child.tail(30))
        return

    def ask(ids):
        body = {"token_ids": ids, "sampling_params": {"max_tokens": MAX_TOKENS,
                "temperature": 0, "ignore_eos": True, "detokenize": False}, "model": run.model}
        request = urllib.request.Request(
            f"http://127.0.0.1:{http}/inference/v1/generate", json.dumps(body).encode(),
            {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=ANSWER_DEADLINE) as answer:
            return json.load(answer)["choices"][0]["token_ids"]

    def cached_tokens():
        with urllib.request.urlopen(f"http://127.0.0.1:{http}/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
        hits = [l for l in lines if l.startswith("vllm:external_prefix_cache_hits_total")]
        return sum(float(l.rsplit(" ", 1)[1]) for l in hits)

    run.server_clear()
    prompt = prompts(2, *LENGTHS)[2]
    cold, warm = ask(prompt), ask(prompt)
    plain = run.plain["float32", 2][2]
    check("vllm serve: cold and warm ids are those without a connector", cold == warm == plain)
    hits = eventually(cached_tokens, 10)
    check("vllm serve: the second time 1024 tokens come from the cache", hits == 1024, str(hits))
    child.kill(signal.SIGTERM)


def tensor_parallel(run):
    """Two ranks, each with its half of every chunk."""
    # Its ranks wait for each other by spinning, so on two cores its signs of life are late.
    pair = run.engine("pair", tp=2, heartbeat=10, timeout=60)
    pair.ready()
    batch = prompts(1, *LENGTHS)[1:2]
    cold, none = pair.generate(batch)
    warm, cached = pair.generate(batch)
    check("tensor parallel: cold and warm ids are those of one rank without a connector",
          cold == warm == run.plain["float32", 1][1:2])
    check("tensor parallel: both ranks' chunks are found", none == [0] and cached == [512],
          f"{none} {cached}")
    pair.quit()
    run.nothing_held("tensor parallel")


SCENARIOS = [both_modes, sharing_and_death, server_restart, load_failure, disk_restart, peers, remote,
             skip_save, wrong_dtype, serve, tensor_parallel]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server-bin", default="target/release/lmc")
    parser.add_argument("--model", default=os.path.join(sys.prefix, "model"))
    parser.add_argument("--peer", choices=["lmcache"])
    parser.add_argument("--only", nargs="*", metavar="NAME",
                        help="of: " + ", ".join(s.__name__ for s in SCENARIOS))
    args = parser.parse_args()
    if args.peer is not None:
        checks.known_faults = PEER_FAULTS
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
            if scenario in (sharing_and_death, server_restart, wrong_dtype) and not hasattr(
                run, "one"
            ):
                run.one = run.engine("one").ready()
                run.one.generate(prompts(1, *LENGTHS))
            print(f"---- {scenario.__name__}: {scenario.__doc__} "
                  f"[{time.monotonic() - started:.0f} s]", flush=True)
            try:
                scenario(run)
            except Exception as error:  # A scenario that breaks must not hide the others.
                check(f"{scenario.__name__}", False, str(error))
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
