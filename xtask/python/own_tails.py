"""Scenario of lmc's own connector with tails: the blocks after a request's last whole chunk."""

import os
import shutil
import signal
import tempfile

from checks import check
from harness import ANSWER_DEADLINE, POISON, Server, eventually, prompts, shared_prefix
from own import own_poison

BLOCK = 64
# Without a whole chunk, without a tail, with tails, and of whole chunks; none of their answers fills
# another chunk.
LENGTHS = (100, 300, 450, 700, 512, 50)
HITS = [64, 256, 448, 640, 511, 0]


def tails(run):
    """Tails in memory, on a drive and beside a store: what is found, by engines of every kind, with
    requests that are preempted and aborted, and with a server that is killed."""
    if run.args.peer or not run.args.package:
        return
    folder = tempfile.mkdtemp(prefix="lmc-tails-")
    os.mkdir(os.path.join(folder, "store"))
    server = Server(run.args, "--disk", os.path.join(folder, "tier"), "--disk-create",
                    "--disk-size", "512MiB", "--disk-keep-free", "0",
                    "--state-dir", os.path.join(folder, "state"),
                    "--remote", f"file://{folder}/store", "--remote-locate-timeout", "5s")
    try:
        server.start()
        check_tails(run, server, os.path.join(folder, "store"))
    finally:
        if server.child and server.child.process.poll() is None:
            server.stop()
        shutil.rmtree(folder, ignore_errors=True)


def check_tails(run, server, store):
    plain = run.engine("tails-plain", port=0, block_size=BLOCK)
    own = {"port": server.port, "connector": "lmc", "block_size": BLOCK, "tails": True}
    one = run.engine("tails-one", **own, poison=True)
    # Which has vLLM's prefix cache and steps of few tokens.
    two = run.engine("tails-two", **own, prefix_caching=True, batched_tokens=128, poison=True)
    without = run.engine("tails-without", **own | {"tails": False})
    for engine in (plain, one, two, without):
        engine.ready()

    def answers(engine, name, batch, wanted, max_tokens=16):
        engine.submit(batch, max_tokens=max_tokens, settle=True)
        outputs = engine.answer(ANSWER_DEADLINE)["outputs"]
        plain.submit(batch, max_tokens=max_tokens)
        known = plain.answer(ANSWER_DEADLINE)["outputs"]
        ids, cached = ([output[part] for output in outputs] for part in ("ids", "cached"))
        check(f"tails, {name}: ids are those without a connector",
              ids == [output["ids"] for output in known])
        check(f"tails, {name}: cached tokens are {wanted}", cached == wanted, str(cached))
        return ids

    batch, none = prompts(1, *LENGTHS), [0] * len(LENGTHS)
    answers(one, "cold", batch, none)
    answers(one, "warm", batch, HITS)
    answers(two, "another engine", batch, HITS)
    answers(without, "an engine without tails", batch, [0, 256, 256, 512, 511, 0])
    # Two prompts that have 600 tokens in common, which is in the middle of the first one's tail.
    first, second = shared_prefix(1)
    answers(one, "before they part", [first[:650]], [0])
    answers(two, "where prompts part", [second], [576])
    # A conversation.
    turn = prompts(2, 600)[0]
    ids = answers(one, "a first turn", [turn], [0], max_tokens=100)[0]
    answers(two, "a second turn", [turn + ids + [7] * 50], [640])
    # What a decode engine asks for.
    prefill = prompts(3, 700)
    answers(one, "a prefill for one token", prefill, [0], max_tokens=1)
    answers(two, "its decode", prefill, [640])
    for steps in range(4):
        one.abort(prompts(1, *LENGTHS), steps)
        one.abort(prompts(40 + steps, *LENGTHS), steps)
    answers(one, "after aborts", batch, HITS)
    crowd(run, plain, server)
    for engine in (one, two):
        own_poison(f"tails, {engine.name}", engine, server)
    store_and_drive(server, store, one, answers, batch)
    for engine in (plain, one, two, without):
        engine.kill()
    server.check_idle("tails: nothing is held afterwards")


def crowd(run, plain, server):
    """Requests that preempt each other, twice, in a KV cache that holds a few of them."""
    small = run.engine("tails-crowd", port=server.port, connector="lmc", block_size=BLOCK,
                       tails=True, blocks=81, poison=True).ready()
    batch = [ids[:length] for seed in range(10, 14) for ids, length in
             zip(shared_prefix(seed) + shared_prefix(seed), (900, 1000, 700, 800))]

    def generate(engine):
        engine.submit(batch, max_tokens=150)
        return [output["ids"] for output in engine.answer(ANSWER_DEADLINE)["outputs"]]

    wanted = generate(plain)
    for time_of in ("first", "second"):
        check(f"tails, crowd: ids of the {time_of} time are those without a connector",
              generate(small) == wanted)
    preempted = small.ask("preemptions")["preemptions"]
    check("tails, crowd: requests were preempted", preempted > 0, str(preempted))
    held = small.idle()
    check("tails, crowd: nothing is held", held == {"requests": 0, "blocks": 0}, str(held))
    own_poison("tails, crowd", small, server)
    small.kill()


def store_and_drive(server, store, engine, answers, batch):
    """A drive keeps tails over the death of the server; a store has none."""
    def lower():
        tiers = server.status()["lmc"]["lower"]
        return {tier["tier"]: tier for tier in tiers}

    settled = eventually(lambda: all(tier["queued_bytes"] == 0 for tier in lower().values()))
    written = {name: tier["written"] for name, tier in lower().items()}
    (whole,) = {worker["chunk_bytes"] for worker in server.status()["lmc"]["instances"]}
    sizes = [os.path.getsize(os.path.join(at, name))
             for at, _, names in os.walk(store) for name in names]
    objects = [size for size in sizes if size > whole // 8]
    check("tails: the drive has them, and the store has whole chunks only",
          settled and written["disk"] > written["remote"] == len(objects) > 0
          and min(objects) >= whole, f"{written}, {len(objects)} objects")
    server.child.kill(signal.SIGKILL)
    server.start()
    # The engine notices that the server is another by what it stores next.
    eventually(lambda: any(engine.generate(prompts(5, *LENGTHS))[1]))
    answers(engine, "from the drive", batch, HITS)
    check("tails: no store has bytes of a freed block", not server.holds(POISON))
