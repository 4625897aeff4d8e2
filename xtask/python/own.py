"""Scenarios of lmc's own connector for vLLM."""

import os
import signal
import subprocess
import sys
import tempfile
import time

from checks import check, free_port
from harness import (
    ANSWER_DEADLINE,
    LENGTHS,
    POISON,
    Child,
    Server,
    container,
    eventually,
    expected_hits,
    prompts,
    shared_prefix,
)
from proxy import Proxy


def own_engine(run, name, **options):
    """An engine with lmc's own connector."""
    return run.engine(name, connector="lmc", **options)


def connector(run):
    """lmc's own connector, without LMCache: both ways of naming chunks, engines that share, aborted
    and preempted requests, blocks that are freed, a starved machine, loads that fail, a server that
    dies."""
    if run.args.peer:
        return
    if not run.args.package:
        print("(no --package: the scenario does not run)")
        return
    # Engines of earlier scenarios named chunks in the same way.
    run.server_clear()
    one = own_engine(run, "own-hashes", poison=True)
    proxy = Proxy(free_port(), run.server.port, lambda: other.kill())
    other = own_engine(run, "own-tokens", naming="tokens", port=proxy.port)
    # Which has vLLM's prefix cache and steps of few tokens.
    two = own_engine(run, "own-two", prefix_caching=True, batched_tokens=256, poison=True)
    for name, engine, seed in (("own, hashes", one, 1), ("own, tokens", other, 1)):
        engine.ready()
        # Neither finds chunks of the other, nor those of the stock connector.
        run.cold_and_warm(name, engine, seed)
        first, second = shared_prefix(seed)
        engine.generate([first])
        ids, cached = engine.generate([second])
        check(f"{name}: a shared prefix is a partial hit with the right ids",
              cached == [512] and ids[0] == run.plain["float32", ("shared", seed)][1], str(cached))
        salted = [{"ids": first, "salt": "tenant"}]
        check(f"{name}: another salt finds nothing", engine.generate(salted)[1] == [0])
        check(f"{name}: the same salt finds its own", engine.generate(salted)[1] == [768])
        check(f"{name}: the engine holds nothing", engine.idle() == {"requests": 0, "blocks": 0})
    own_killed_at_load(run, other, proxy)
    own_generated_tokens(run, one)
    run.skip_save("own, skip_save", one)
    own_aborts(run, "own", one, 5)
    run.nothing_held("own, aborts")
    own_sharing(run, one, two.ready())
    own_starved(run, one)
    own_poison("own", one, run.server)
    own_crowd(run)
    own_load_failure(run)
    own_server_restart(run, one)
    # While it looks up, loads or computes.
    run.kill_in_request("own: engine", one, 0.005, prompts(6, *LENGTHS))


def containers(run):
    """Server and engines in containers of their own, which share only the folder of the Unix socket."""
    if run.args.peer or not run.args.package:
        return
    with tempfile.TemporaryDirectory() as folder:
        tried = subprocess.run([*container(folder, True), "true"], capture_output=True, text=True)
        if tried.returncode:
            print(f"(no namespaces here, the scenario does not run: {tried.stderr.strip()})")
            return
        inside = container(folder, True)
        # It finds the server by itself, also when that is started later.
        one = run.engine("contained-one", connector="lmc", server="local", prefix=inside)
        flags = ("--ipc-path", "/run/lmc/lmc.sock", "--shm-name", "sealed")
        server = Server(run.args, *flags, prefix=container(folder, False)).start()
        one.ready()
        run.cold_and_warm("containers", one, 4)
        two = run.engine("contained-two", connector="lmc", server="local", prefix=inside).ready()
        run.warm("containers, second engine", two, 4)
        one.submit(prompts(70, *[3000] * 6), max_tokens=400)
        time.sleep(0.3)
        one.kill()
        # By its death, long before the grace time of 120 s.
        server.check_idle("containers: nothing is held of an engine that was killed")
        run.warm("containers, after the death of the first", two, 4)
        two.kill()
        counts = server.status()["lmc"]["counts"]
        check("containers: no slot waited for the grace time",
              counts["slots_released_by_grace"] == 0, str(counts))
        server.stop()


def lmcache_server(run):
    """lmc's own connector with LMCache's own server, which knows no block hashes: chunks are named
    by their tokens."""
    if run.args.peer or not run.args.package:
        return
    server = Server(run.args, peer="lmcache")
    # It may start before the server.
    engine = own_engine(run, "own-lmcache", port=server.port)
    server.start()
    engine.ready()
    name = "own, LMCache's server"
    check(f"{name}: the engine finds it",
          eventually(lambda: any(engine.generate(prompts(9, *LENGTHS))[1])))
    batch = prompts(1, *LENGTHS)
    ids, cached = engine.generate(batch)
    check(f"{name}: cold ids are those without a connector", ids == run.plain["float32", 1])
    check(f"{name}: nothing is cached at first", not any(cached), str(cached))
    # Its lookups may miss what a store has just acknowledged, with the stock connector as well.
    check(f"{name}: the chunks are found",
          eventually(lambda: engine.generate(batch)[1] == expected_hits(*LENGTHS)))
    own_aborts(run, name, engine, 3)
    engine.kill()
    server.discard()


def own_killed_at_load(run, engine, proxy):
    """An engine is killed when its requests were found and their first load begins."""
    proxy.armed = True
    engine.submit(prompts(1, *LENGTHS))
    check("own: an engine is killed when a load begins",
          eventually(lambda: proxy.struck and engine.process.poll() is not None))
    proxy.stop()
    run.nothing_held("own, engine killed when a load begins")


def own_generated_tokens(run, one):
    """What an engine generated is found when it comes back in a prompt."""
    prompt = prompts(21, 500)[0]
    one.submit([prompt], max_tokens=40, settle=True)
    generated = one.answer(ANSWER_DEADLINE)["outputs"][0]["ids"]
    _, cached = one.generate([prompt + generated])
    check("own: generated tokens are cached as well", cached == [512], str(cached))


def own_aborts(run, name, one, most):
    """Requests that are aborted at each step from their lookup to their first tokens."""
    run.warm(f"{name}, before aborts", one, 1)
    for steps in range(most):
        for seed in (1, 30 + steps):
            unfinished = one.abort(prompts(seed, *LENGTHS), steps)
            check(f"{name}: {unfinished} requests are aborted after {steps} steps, seed {seed}",
                  unfinished == len(LENGTHS))
    held = one.idle()
    check(f"{name}: nothing is held of aborted requests", held == {"requests": 0, "blocks": 0},
          str(held))
    run.warm(f"{name}, after aborts", one, 1)


def weights(run):
    """Weights that change under one model name, in engines of lmc's own connector."""
    if run.args.peer or not run.args.package:
        return
    run.server_clear()
    batch, before = prompts(1, *LENGTHS), run.plain["float32", 1]
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "weights")

        def name(text):
            with open(file, "w") as weights:
                weights.write(text)

        def change(engine, factor):
            check(f"{engine.name}: the caches are reset", engine.ask("weights", factor=factor) == {
                "reset": True})

        def finds(engine, ids, cached, what):
            found = engine.generate(batch)
            check(f"{engine.name}, {what}: ids are those of its weights", found[0] == ids)
            check(f"{engine.name}, {what}: cached tokens are {cached}", found[1] == cached,
                  str(found[1]))

        name("before")
        plain = run.engine("weights-plain", port=0)
        one = own_engine(run, "weights-one", prefix_caching=True)
        other = own_engine(run, "weights-other")
        first, second = (own_engine(run, f"weights-{which}", weights=f"@{file}")
                         for which in ("first", "second"))
        plain.ready()
        change(plain, 2)
        after, _ = plain.generate(batch)
        check("other weights make other ids", after != before)
        plain.quit()
        none, all_of_it = [0] * len(batch), expected_hits(*LENGTHS)
        one.ready()
        finds(one, before, none, "before")
        change(one, 2)
        finds(one, after, none, "after a reset")
        finds(other.ready(), before, all_of_it, "whose weights stay")
        change(one, 0.5)
        finds(one, before, none, "after a second reset")
        # The names of weights are another part of the chunks' names.
        finds(first.ready(), before, none, "before")
        finds(second.ready(), before, all_of_it, "of equal name")
        name("after")
        for replica, cached in ((first, none), (second, all_of_it)):
            change(replica, 2)
            finds(replica, after, cached, "of the new name")
        # The file has no new name.
        for replica in (first, second):
            change(replica, 0.5)
            finds(replica, before, none, "of no new name")
    run.nothing_held("own, weights")


def own_sharing(run, one, two):
    """A second engine, which has vLLM's prefix cache and steps of few tokens."""
    run.warm("own, second engine", two, 1)
    # Now its own prefix cache has them as well; whole blocks of it are counted as cached.
    ids, cached = two.generate(prompts(1, *LENGTHS))
    check("own, second engine again: ids are those without a connector",
          ids == run.plain["float32", 1])
    check("own, second engine again: no less is cached",
          all(found >= hit - 1 for found, hit in zip(cached, expected_hits(*LENGTHS))), str(cached))
    first, second = shared_prefix(2)
    two.generate([first[:600]])
    one.generate([first])
    # 512 tokens are in its own prefix cache, 768 in the server.
    ids, cached = two.generate([first])
    check("own, second engine: the server adds to its own prefix cache",
          cached == [768] and ids[0] == run.plain["float32", ("shared", 2)][0], str(cached))
    run.cold_and_warm("own, first engine", one, 2)
    run.warm("own, second engine, chunks of the first", two, 2)
    held = two.idle()
    check("own, second engine: no request is held", held["requests"] == 0, str(held))
    own_poison("own, second engine", two, run.server)
    run.kill_in_request("own, second engine: engine", two, 0.3)
    run.warm("own, first engine goes on", one, 2)


def own_poison(name, engine, server):
    """No store has read a block that vLLM has freed, and no load has written to one or left one
    out."""
    found = engine.ask("poison")
    check(f"{name}: freed blocks are left alone, and loads fill their blocks",
          not found["faults"] and found["freed"] > 0 and found["loaded"] > 0, str(found))
    check(f"{name}: no chunk holds bytes of a freed block", not server.holds(POISON))
    return found


def own_crowd(run):
    """More than forty requests at once in a KV cache that holds a few, some that preempt each
    other, and some that are aborted meanwhile."""
    # Its pool is to be looked at as a whole.
    server = Server(run.args).start()
    crowd = own_engine(run, "own-crowd", port=server.port, blocks=41, poison=True)
    plain = run.engine("plain-crowd", port=0, blocks=41)
    crowd.ready(), plain.ready()
    wanted, batch = [], []
    for seed in range(1, 9):
        batch += prompts(seed, *LENGTHS)
        wanted += run.plain["float32", seed]
    for seed in (1, 2):
        batch += shared_prefix(seed)
        wanted += run.plain["float32", ("shared", seed)]
    for time_of in ("first", "second"):
        ids, _ = crowd.generate(batch)
        check(f"own, crowd: ids of the {time_of} time are those without a connector",
              ids == wanted)
    # Their prompts fill the cache, so that each block of generated tokens costs a request its own.
    # Two have their first 600 tokens in common.
    preempting = [*prompts(22, 1000, 1000, 1000), *(p[:1000] for p in shared_prefix(3))]

    def generate(engine):
        engine.submit(preempting, max_tokens=200)
        return [output["ids"] for output in engine.answer(ANSWER_DEADLINE)["outputs"]]

    plain_ids = generate(plain)
    for time_of in ("first", "second"):
        check(f"own, preempted: ids of the {time_of} time are those without a connector",
              generate(crowd) == plain_ids)
    check("own, preempted: requests were preempted", crowd.ask("preemptions")["preemptions"] > 0,
          str(crowd.ask("preemptions")))
    own_crowd_aborts(crowd, plain)
    ids, _ = crowd.generate(batch)
    check("own, crowd after aborts: ids are those without a connector", ids == wanted)
    held = crowd.idle()
    check("own, crowd: nothing is held", held == {"requests": 0, "blocks": 0}, str(held))
    found = own_poison("own, crowd", crowd, server)
    check("own, crowd: preempted requests had blocks that were freed", found["preempted"] > 0,
          str(found))
    own_late_store(crowd, plain, server)
    crowd.kill()
    plain.kill()
    server.check_idle("own, crowd: the server holds nothing afterwards")
    server.stop()


def own_crowd_aborts(crowd, plain):
    """Of 32 requests at once every second one is aborted, with 600 tokens of the next in common."""
    for steps in (2, 5, 9):
        pairs = [shared_prefix(40 + 20 * steps + pair) for pair in range(16)]
        kept = [pair[1] for pair in pairs]
        wanted = plain.generate(kept)[0]
        batch = [{"ids": ids, "keep": ids is pair[1]} for pair in pairs for ids in pair]
        crowd.submit(batch, op="abort", steps=steps)
        answer = crowd.answer(ANSWER_DEADLINE)
        check(f"own, crowd: requests are aborted after {steps} steps", answer["unfinished"] > 0)
        check(f"own, crowd: ids of the others are those without a connector, {steps} steps",
              [output["ids"] for output in answer["outputs"]] == wanted)


def own_late_store(crowd, plain, server):
    """A request ends, or is preempted, while its store waits for the server; then so with a
    connector that does not keep the blocks, to see that the pattern would be found."""
    # Where the machine leaves the server stopped for 2 s, the connector takes it for dead, and a
    # store fails: then another prompt is tried.
    seeds = iter(range(400, 1000))

    def links_are_up():
        """The first try may be what stores the prompt."""
        return eventually(lambda: crowd.generate([[1] * 300])[1] == [256])

    def end_before_store():
        links_are_up()
        prompt = prompts(next(seeds), 512)[0]
        crowd.ask("stop server", pid=server.child.process.pid)
        crowd.submit([prompt], max_tokens=1)
        try:
            crowd.answer(ANSWER_DEADLINE)
            return prompt, crowd.idle(wait=0)
        finally:
            server.child.process.send_signal(signal.SIGCONT)

    def preempt_before_store():
        links_are_up()
        batch = prompts(next(seeds), 512, 700)
        crowd.ask("stop server", pid=server.child.process.pid, preempt=True)
        try:
            return batch, crowd.generate(batch, settle=False)[0]
        finally:
            server.child.process.send_signal(signal.SIGCONT)

    def stored_late():
        prompt, held = end_before_store()
        check("own, late store: the blocks of a request that has ended are kept for its store",
              held == {"requests": 1, "blocks": 4}, str(held))
        held = crowd.idle()
        check("own, late store: then they are freed", held == {"requests": 0, "blocks": 0},
              str(held))
        return crowd.generate([prompt])[1] == [511]

    def stored_when_preempted():
        batch, ids = preempt_before_store()
        check("own, late store: ids of preempted requests are those without a connector",
              ids == plain.generate(batch)[0])
        return crowd.generate(batch)[1] == [511, 512]

    check("own, late store: the chunks are found afterwards", eventually(stored_late))
    before = crowd.ask("preemptions")["preemptions"]
    check("own, late store: those of preempted requests, too", eventually(stored_when_preempted))
    after = crowd.ask("preemptions")["preemptions"]
    # The second may still wait for its lookup when the server stops at the store of the first.
    check("own, late store: requests were preempted", after > before, f"{before}, {after}")
    own_poison("own, late store", crowd, server)
    for byte, fault, late in ((0x3C, "preempted", preempt_before_store),
                              (0x3D, "finished", end_before_store)):
        crowd.ask("inject", fault=fault, byte=byte)

        def is_found():
            late()
            return eventually(lambda: server.holds(byte), 5)

        check(f"own, late store: the pattern is found when blocks of {fault} requests are not kept",
              eventually(is_found))


def own_starved(run, one):
    """Twice as many busy processes as cores, at the engine's own priority."""
    busy = [Child("busy", [sys.executable, "-c", "while True: pass"])
            for _ in range(2 * len(os.sched_getaffinity(0)))]
    try:
        run.cold_and_warm("own, starved", one, 4)
        batch = [*prompts(4, *LENGTHS), *shared_prefix(1)]
        wanted = [*run.plain["float32", 4], *run.plain["float32", ("shared", 1)]]
        right = []
        # The machine may be busy with other things, too: one of three tries must be as wanted.
        for _ in range(3):
            before, known, hits = one.ask("connections lost"), registered(run.server), []
            # Longer than a server or a connector waits for a sign of life.
            began = time.monotonic()
            while time.monotonic() < began + 15:
                ids, cached = one.generate(batch)
                right.append(ids == wanted)
                hits.append(cached == expected_hits(*map(len, batch)))
            # Engines that ended before may leave the list meanwhile.
            lost, found = one.ask("connections lost"), registered(run.server)
            if all(hits) and lost == before and found and found <= known:
                break
        check("own, starved: all ids are those without a connector", all(right), str(right))
        check(f"own, starved: {len(hits)} times all of seven requests are warm", all(hits),
              str(hits))
        check("own, starved: no connection is lost and no worker registers again",
              lost == before and found and found <= known,
              f"{lost}, before {before}; {found}, before {known}")
    finally:
        for child in busy:
            child.kill()


def registered(server):
    """The workers that the server knows."""
    return {instance["instance_id"] for instance in server.status()["lmc"]["instances"]}


def own_load_failure(run):
    """The server is killed when a retrieve begins, under both of vLLM's policies."""
    cases = []
    for policy in ("recompute", "fail"):
        server = Server(run.args).start()
        proxy = Proxy(free_port(), server.port, server.child.kill)
        engine = own_engine(run, f"own-{policy}", port=proxy.port, policy=policy)
        cases.append((policy, server, proxy, engine))
    prompt = prompts(3, *LENGTHS)[1:2]
    plain = run.plain["float32", 3][1]
    for policy, server, proxy, engine in cases:
        name = f"own, load failure, policy {policy}"
        engine.ready()
        engine.generate(prompt)
        check(f"{name}: the prompt is cached before", engine.generate(prompt)[1] == [512])
        proxy.armed = True
        output = engine.outputs(prompt)[0]
        check(f"{name}: the server died when the retrieve was sent",
              eventually(lambda: proxy.struck and server.child.process.poll() is not None))
        ends = (plain, "length") if policy == "recompute" else ([], "error")
        check(f"{name}: the request ends as the policy says",
              (output["ids"], output["finish"]) == ends, str(output))
        check(f"{name}: the next request ends as without a connector",
              engine.generate(prompt)[0] == [plain])
        held = engine.idle()
        check(f"{name}: the engine holds nothing", held == {"requests": 0, "blocks": 0}, str(held))
        engine.kill()
        proxy.stop()
        server.discard()


# Seconds for which a server stays away.
AWAY = 60


def own_server_away(run, one):
    """The server stays away, and prompts go on throughout."""
    run.server.child.kill()
    until, times = time.monotonic() + AWAY, []
    wrong = 0
    while time.monotonic() < until:
        began = time.monotonic()
        ids, cached = one.generate(prompts(5, *LENGTHS))
        times.append(time.monotonic() - began)
        wrong += ids != run.plain["float32", 5] or any(cached)
    check(f"own, server away for {AWAY} s: the ids are those without a connector", not wrong,
          f"{wrong} of {len(times)} batches")
    # One that waits for an answer takes 5 s.
    check("own, server away: no batch waits", max(times) < 4,
          f"{len(times)} batches, {min(times):.2f} to {max(times):.2f} s")
    run.server.start()
    check("own, server away: it is used when it is back",
          eventually(lambda: one.generate(prompts(6, *LENGTHS))[1] == expected_hits(*LENGTHS)))


def own_server_restart(run, one):
    """The server is killed and started again; requests never wait for it."""
    began = time.monotonic()
    one.generate(prompts(40, *LENGTHS))
    usual = time.monotonic() - began
    run.server.child.kill()
    began = time.monotonic()
    ids, cached = one.generate(prompts(5, *LENGTHS))
    took = time.monotonic() - began
    check("own, server down: the ids are those without a connector",
          ids == run.plain["float32", 5] and not any(cached), str(cached))
    # A request that waits for an answer takes 5 s.
    check("own, server down: requests do not wait", took < min(2 * usual, 0.9) + 4,
          f"{took:.1f} s, {usual:.1f} s before")
    run.server.start()

    def caches_again():
        ids, cached = one.generate(prompts(6, *LENGTHS))
        return ids == run.plain["float32", 6] and any(cached)

    check("own, server started again: the engine caches again", eventually(caches_again))
    run.warm("own, server started again", one, 6)
    own_server_away(run, one)
    batch = prompts(7, *LENGTHS)
    one.generate(batch)
    # The server dies while a load is under way, or just before or after it.
    for delay in (0.0, 0.005, 0.02):
        one.submit(batch)
        time.sleep(delay)
        run.server.child.kill()
        outputs = one.answer(ANSWER_DEADLINE)["outputs"]
        check(f"own, server killed {delay} s into a warm request: ids and ends are as usual",
              [o["ids"] for o in outputs] == run.plain["float32", 7]
              and {o["finish"] for o in outputs} == {"length"})
        run.server.start()
        eventually(lambda: any(one.generate(batch)[1]))
    held = one.idle()
    check("own, server killed: the engine holds nothing", held == {"requests": 0, "blocks": 0},
          str(held))
