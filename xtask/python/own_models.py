"""Scenarios of lmc's own connector with LoRA adapters, and with models of several kinds of layers."""

import os
import subprocess
import sys
import tempfile

from checks import check
from harness import HERE, LENGTHS, START_DEADLINE, expected_hits, prompts

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
    """A model with sliding-window and full-attention layers: refused as two KV groups, cached as
    one. The stock connector copies two groups in `lmcache_driven` mode only."""
    if run.args.peer or not run.args.package:
        return
    with tempfile.TemporaryDirectory() as folder:
        make("hybrid", run.model, folder)
        plain = run.engine("plain-hybrid", port=0, model=folder)
        refused = run.engine("own-hybrid", connector="lmc", model=folder)
        own = run.engine("own-one-group", connector="lmc", model=folder, one_group=True,
                         poison=True)
        stock = run.engine("stock-hybrid", mode="engine_driven", model=folder)
        plain.ready()
        wanted = plain.generate(prompts(9, *LENGTHS))[0]
        plain.kill()
        check("hybrid: an engine with two KV groups ends at its start",
              refused.dies(START_DEADLINE))
        text = refused.tail(60)
        check("hybrid: it says why, and which flag helps",
              "2 groups (" in text and "SlidingWindowSpec" in text
              and "--disable-hybrid-kv-cache-manager" in text, text)
        check("hybrid, stock: an engine-driven engine with two KV groups ends at its start",
              stock.dies(START_DEADLINE))
        stock = {
            "engine-driven, one group": run.engine(
                "stock-one-group", mode="engine_driven", model=folder, one_group=True),
            "lmcache-driven, two groups": run.engine(
                "stock-two-groups", mode="lmcache_driven", model=folder),
        }
        for name, engine in {"own, one group": own, **stock}.items():
            engine.ready()
            for time_of in ("cold", "warm"):
                ids, cached = engine.generate(prompts(9, *LENGTHS))
                check(f"hybrid, {name}: {time_of} ids are those without a connector", ids == wanted)
                hits = expected_hits(*LENGTHS) if time_of == "warm" else [0] * len(LENGTHS)
                check(f"hybrid, {name}: {time_of} requests find what they should", cached == hits,
                      str(cached))
        for engine in stock.values():
            engine.kill()
        found = own.ask("poison")
        check("hybrid, one group: freed blocks are left alone, and loads fill their blocks",
              not found["faults"] and found["loaded"] > 0, str(found))
        own.kill()
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
        run.nothing_held("latent")


def make(*what):
    """Saves a small model or adapters."""
    subprocess.run([sys.executable, os.path.join(HERE, "toys.py"), *what], check=True,
                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
