"""Scenario of two engines of one model with different numbers of ranks, on servers that are peers."""

from checks import check, free_port
from harness import ANSWER_DEADLINE, CHUNK, LENGTHS, Server, eventually, expected_hits, prompts

# What a server logs of a peer whose chunks its engines cannot use.
MISMATCH = "a peer serves this model in another space"
# Whole chunks of the prompts, each of which has a part of either rank.
PARTS = 2 * sum(length // CHUNK for length in LENGTHS)


def unequal_parallelism(run):
    """An engine with one rank takes what one with two ranks has computed at another server: pulled,
    pulled while it is computed, and pushed. Where the client does not say how its chunks are laid
    out, a miss with its reason."""
    if run.args.peer:
        return
    for connector, mode in (("lmc", None), ("stock", "lmcache_driven"), ("stock", "engine_driven")):
        if connector in run.connectors:
            unequal_of(run, connector, mode)


def unequal_of(run, connector, mode):
    name = f"unequal parallelism, {connector}" + (f", {mode}" if mode else "")
    at = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    wide, narrow = (
        Server(run.args, "--p2p-listen", own, "--p2p-peer", other, "--p2p-locate-timeout", "5s")
        for own, other in (at, at[::-1])
    )
    options = {"connector": connector} | ({"mode": mode} if mode else {})
    try:
        wide.start()
        narrow.start()
        # Its ranks wait for each other by spinning, so on two cores its signs of life are late.
        pair = run.engine("unequal-pair", port=wide.port, tp=2, heartbeat=10, timeout=60, **options)
        one = run.engine("unequal-one", port=narrow.port, **options)
        pair.ready()
        one.ready()
        if mode == "engine_driven":
            is_missed(run, name, pair, one, narrow)
        else:
            pulled(run, name, pair, one, narrow)
            at_once(run, name, pair, one, at[0])
            pushed(run, name, pair, one, narrow, at[1])
        if mode == "lmcache_driven":
            one.quit()
            one = run.engine("unequal-blocks", port=narrow.port, block_size=64, **options).ready()
            ids, cached = one.generate(prompts(3, *LENGTHS))
            check(f"{name}, blocks of another size: ids are those without a connector",
                  ids == run.plain["float32", 3])
            check(f"{name}, blocks of another size: nothing is cached", cached == [0] * len(LENGTHS),
                  str(cached))
        for engine in (one, pair):
            engine.quit()
        for server in (wide, narrow):
            server.check_idle(f"{name}: nothing is held afterwards")
    finally:
        for server in (wide, narrow):
            if server.child and server.child.process.poll() is None:
                server.stop()


def read_by(server):
    return server.status()["lmc"]["lower"][0]["counters"]["read"]


def stored(run, name, pair, seed, transfer=None):
    """Computes the prompts on both ranks, until all of their chunks are stored."""
    batch = [{"ids": ids} | ({"transfer": transfer} if transfer else {})
             for ids in prompts(seed, *LENGTHS)]

    def are_found():
        return pair.generate(batch) == (run.plain["float32", seed], expected_hits(*LENGTHS))

    check(f"{name}: two ranks compute and store the prompts", eventually(are_found, 90))


def is_warm(run, name, one, seed):
    ids, cached = one.generate(prompts(seed, *LENGTHS))
    check(f"{name}: ids of one rank are those without a connector", ids == run.plain["float32", seed])
    check(f"{name}: one rank has every whole chunk", cached == expected_hits(*LENGTHS), str(cached))


def pulled(run, name, pair, one, narrow):
    stored(run, name, pair, 3)
    is_warm(run, f"{name}, pulled", one, 3)
    read = read_by(narrow)
    check(f"{name}, pulled: each part was read once", read == PARTS, str(read))
    is_warm(run, f"{name}, again", one, 3)
    check(f"{name}, again: nothing is read", read_by(narrow) == read)
    log = said(narrow, MISMATCH)
    check(f"{name}: the server does not warn of the other space", not log, log)


def at_once(run, name, pair, one, source):
    """Both engines have the request at the same time."""
    batch = prompts(4, *LENGTHS)
    hint = {"lmcache.pd.source": source, "lmcache.pd.wait_ms": 30000}

    def with_id(transfer):
        return [{"ids": ids, "transfer": transfer | {"lmcache.pd.id": f"{name} {number}"}}
                for number, ids in enumerate(batch)]

    one.submit(with_id(hint))
    # As a proxy sends it to a prefill engine.
    pair.submit(with_id({}), max_tokens=1)
    pair.answer(ANSWER_DEADLINE)
    outputs = one.answer(ANSWER_DEADLINE)["outputs"]
    check(f"{name}, at once: ids are those without a connector",
          [output["ids"] for output in outputs] == run.plain["float32", 4])
    cached = [output["cached"] for output in outputs]
    check(f"{name}, at once: one rank has every whole chunk", cached == expected_hits(*LENGTHS),
          str(cached))


def pushed(run, name, pair, one, narrow, to):
    before = read_by(narrow)
    stored(run, name, pair, 5, {"lmcache.pd.to": to})
    there = eventually(lambda: read_by(narrow) == before + PARTS, 30)
    check(f"{name}, pushed: the parts come before a request", there, str(read_by(narrow) - before))
    is_warm(run, f"{name}, pushed", one, 5)
    check(f"{name}, pushed: the request reads nothing", read_by(narrow) == before + PARTS)


def is_missed(run, name, pair, one, narrow):
    stored(run, name, pair, 3)
    ids, cached = one.generate(prompts(3, *LENGTHS))
    check(f"{name}: ids of one rank are those without a connector", ids == run.plain["float32", 3])
    check(f"{name}: nothing is cached", cached == [0] * len(LENGTHS), str(cached))
    warned = eventually(lambda: said(narrow, MISMATCH), 30)
    check(f"{name}: the server says why", warned and "world_size" in said(narrow, MISMATCH))


def said(server, text):
    """Returns the line of a server's log with this text; empty without one."""
    with open(server.child.log.name, errors="replace") as log:
        return next((line for line in log if text in line), "")
