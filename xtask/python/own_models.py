"""Scenarios of lmc's own connector with LoRA adapters, with models of several kinds of layers, and with
vLLM's other hash algorithms."""

import os
import subprocess
import sys
import tempfile

from checks import check
from harness import (
    CHUNK, HERE, LENGTHS, START_DEADLINE, eventually, expected_hits, free_port, prompts,
)
from proxy import Proxy

ADAPTERS = ("first", "second")


def lora(run):
    """Requests with two LoRA adapters and without one, in both ways of naming chunks."""
    if run.args.peer or not run.args.package:
        return
    with tempfile.TemporaryDirectory() as folder:
        make("adapters", run.model, folder)
        plain = run.engine("plain-lora", port=0, lora=folder)
        own = {naming: run.engine(f"own-lora-{naming}", connector="lmc", naming=naming, lora=folder,
                                  poison=True)
               for naming in ("hashes", "tokens")}
        batches = {name: [{"ids": ids} | ({"lora": name} if name else {})
                          for ids in prompts(9, *LENGTHS)] for name in (None, *ADAPTERS)}
        plain.ready()
        wanted = {name: plain.generate(batch)[0] for name, batch in batches.items()}
        check("lora: each adapter changes the ids of every prompt",
              all(len({tuple(ids[n]) for ids in wanted.values()}) == 3
                  for n in range(len(LENGTHS))))
        plain.kill()
        for naming, engine in own.items():
            engine.ready()
            for name, batch in batches.items():
                of = f"lora, {naming}, {name or 'no'} adapter"
                ids, cached = engine.generate(batch)
                check(f"{of}: ids are those without a connector", ids == wanted[name])
                check(f"{of}: no chunks of the others are found", not any(cached), str(cached))
            # vLLM 0.32 on CPU computes requests without an adapter with the last one's weights when
            # their batch has adapters, also without a connector: they are a batch of their own.
            for names in ((None,), ADAPTERS):
                ids, cached = engine.generate([p for name in names for p in batches[name]])
                of = f"lora, {naming}, {' and '.join(map(str, names))}"
                check(f"{of}: warm ids are those without a connector",
                      ids == [i for name in names for i in wanted[name]])
                check(f"{of}: each request is warm", cached == expected_hits(*LENGTHS) * len(names),
                      str(cached))
            found = engine.ask("poison")
            check(f"lora, {naming}: freed blocks are left alone, and loads fill their blocks",
                  not found["faults"] and found["loaded"] > 0, str(found))
            engine.kill()
        run.nothing_held("lora")


def hybrid(run):
    """Models whose layers look back a window: as several KV groups, as one with windows, and, as the
    stock connector needs it in engine-driven mode, as one without."""
    if run.args.peer or not run.args.package:
        return
    batch, cold = prompts(9, *LENGTHS), [0] * len(LENGTHS)
    kinds = ("hybrid", "narrow", "sliding")
    with tempfile.TemporaryDirectory() as folder:
        models = {kind: os.path.join(folder, kind) for kind in kinds}
        for kind, model in models.items():
            os.mkdir(model)
            make(kind, run.model, model)
        for kind, model in models.items():
            plain = run.engine(f"plain-{kind}", port=0, model=model)
            proxy = Proxy(free_port(), run.server.port, lambda: None)
            engines = {
                "whole prompts in a step": run.engine(
                    f"own-{kind}", port=proxy.port, connector="lmc", model=model, poison=True),
                # Windows leave blocks in the middle of prompts and chunks.
                "small steps": run.engine(
                    f"own-small-{kind}", connector="lmc", model=model, poison=True, block_size=32,
                    batched_tokens=160),
            }
            if kind == "hybrid":
                engines["one group"] = run.engine(
                    "own-one-group", connector="lmc", model=model, one_group=True, poison=True)
                engines["stock, one group"] = run.engine(
                    "stock-one-group", mode="engine_driven", model=model, one_group=True)
                engines["stock, lmcache-driven"] = run.engine(
                    "stock-two-groups", mode="lmcache_driven", model=model)
                stock = run.engine("stock-hybrid", mode="engine_driven", model=model)
                check("hybrid, stock: an engine-driven engine with two KV groups ends at its start",
                      stock.dies(START_DEADLINE))
            plain.ready()
            wanted = plain.generate(batch)[0]
            again = plain.generate([batch[1] + wanted[1] + batch[0]])[0]
            plain.kill()
            for steps, engine in engines.items():
                name = f"{kind}, {steps}"
                engine.ready()
                # The server would copy blocks that vLLM has given to other tokens.
                warm = cold if "lmcache-driven" in steps else expected_hits(*LENGTHS)
                for time_of, hits in (("cold", cold), ("warm", warm)):
                    ids, cached = engine.generate(batch)
                    check(f"{name}: {time_of} ids are those without a connector", ids == wanted)
                    check(f"{name}: {time_of} requests find what they should", cached == hits,
                          str(cached))
                if steps.startswith("stock"):
                    engine.kill()
                    continue
                # A follow-up: the first prompt, its answer, another question.
                ids, cached = engine.generate([batch[1] + wanted[1] + batch[0]])
                check(f"{name}: a follow-up gets the ids without a connector", ids == again)
                check(f"{name}: and finds the chunks before", cached[0] >= 512, str(cached))
                found = engine.ask("poison")
                check(f"{name}: freed blocks are left alone, and loads fill their blocks",
                      not found["faults"] and found["loaded"] > 0, str(found))
                check(f"{name}: windows leave blocks behind",
                      (found["slid"] > 0) == (steps != "one group"), str(found))
            engine = engines["whole prompts in a step"]
            proxy.armed = True
            ids, _ = engine.generate(batch[1:2])
            check(f"{kind}: a load that fails leaves the ids without a connector",
                  ids == wanted[1:2] and proxy.struck)
            for engine in engines.values():
                engine.kill()
            proxy.stop()
        run.nothing_held("hybrid")


def latent(run):
    """A model with MLA, whose layers keep one vector for each token."""
    if run.args.peer or not run.args.package:
        return
    with tempfile.TemporaryDirectory() as folder:
        make("latent", run.model, folder)
        plain = run.engine("plain-latent", port=0, model=folder)
        own = run.engine("own-latent", connector="lmc", model=folder, poison=True)
        batch = prompts(9, *LENGTHS)
        plain.ready()
        wanted = plain.generate(batch)[0]
        plain.kill()
        own.ready()
        for time_of in ("cold", "warm"):
            ids, cached = own.generate(batch)
            check(f"latent: {time_of} ids are those without a connector", ids == wanted)
            hits = expected_hits(*LENGTHS) if time_of == "warm" else [0] * len(LENGTHS)
            check(f"latent: {time_of} requests find what they should", cached == hits, str(cached))
        found = own.ask("poison")
        check("latent: freed blocks are left alone, and loads fill their blocks",
              not found["faults"] and found["loaded"] > 0, str(found))
        own.kill()
        # Both ranks hold the same vectors: one of them stores, and both load.
        run.server_clear()

        def stored():
            return run.server.status()["lmc"]["engine"]["inserted"]

        before = stored()
        pair = run.engine("pair-latent", connector="lmc", model=folder, tp=2, heartbeat=10,
                          timeout=60).ready()
        answers = [pair.generate(batch)]

        def found():
            # A rank that got no core stores its chunks after the answer.
            answers.append(pair.generate(batch))
            return answers[-1][1] == expected_hits(*LENGTHS)

        check("latent, two ranks: all chunks are found", eventually(found, 90)
              and not any(answers[0][1]), str([cached for _, cached in answers]))
        check("latent, two ranks: ids are those without a connector",
              all(ids == wanted for ids, _ in answers))
        whole = sum(length // CHUNK for length in LENGTHS)
        check("latent, two ranks: each chunk is stored once",
              eventually(lambda: stored() == before + whole), str(stored() - before))
        pair.quit()
        run.nothing_held("latent")


def make(*what):
    """Saves a small model or adapters."""
    subprocess.run([sys.executable, os.path.join(HERE, "toys.py"), *what], check=True,
                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def hash_algorithms(run):
    """Engines that hash blocks by xxhash, whose seed vLLM does not fix: without PYTHONHASHSEED lmc names
    chunks by their tokens, and with it by the hashes."""
    if run.args.peer or not run.args.package:
        return
    run.server_clear()

    def engine(name, *environment):
        return run.engine(f"own-xxhash-{name}", connector="lmc", hash_algo="xxhash",
                          prefix=("env", *environment))

    def warned(engine):
        return engine.said("differ between processes without PYTHONHASHSEED, so lmc names")

    for name, environment in (("no seed", ("-u", "PYTHONHASHSEED")), ("seed", ("PYTHONHASHSEED=7",))):
        of = f"xxhash, {name}"
        one, two = (engine(f"{name.replace(' ', '-')}-{n}", *environment) for n in (1, 2))
        run.cold_and_warm(of, one.ready(), 3)
        run.warm(f"{of}, another engine", two.ready(), 3)
        wanted = int(name == "no seed")
        check(f"{of}: {wanted} warnings in each engine's log",
              warned(one) == warned(two) == wanted, f"{warned(one)}, {warned(two)}")
        one.kill()
        two.kill()
    other = engine("other-seed", "PYTHONHASHSEED=8").ready()
    run.cold_and_warm("xxhash, another seed", other, 3)
    other.kill()
    run.nothing_held("xxhash")
