"""Two engines with vLLM's NixlConnector behind vLLM's own proxy, and the scenario of both connectors."""

import contextlib
import json
import os
import sys
import tempfile
import types

from checks import check, free_port
from harness import (
    ANSWER_DEADLINE,
    CHUNK,
    LENGTHS,
    Child,
    Server,
    VllmServe,
    eventually,
    expected_hits,
    metric,
    prompts,
    script_folder,
)
from own_models import make
from pd import FLAGS, TOY_PROXY, Answers, answers, complete
from sdists import sdist_file

NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu",
        "kv_connector_extra_config": {"num_threads": 1}}


def nixl_packages(folder, found):
    """A folder with the packages that vLLM imports: `nixl` itself picks one by the CUDA of torch."""
    os.mkdir(os.path.join(folder, "nixl"))
    for name in ("nixl_cu12", "nixl_cu12.libs"):
        os.symlink(os.path.join(found, name), os.path.join(folder, name))
    for module in ("_api", "_bindings", "logging"):
        with open(os.path.join(folder, "nixl", f"{module}.py"), "w") as file:
            file.write("import importlib, sys\n"
                       f"sys.modules[__name__] = importlib.import_module('nixl_cu12.{module}')\n")
    with open(os.path.join(folder, "nixl", "__init__.py"), "w"):
        return folder


class NixlPair:
    """Engines with NixlConnector behind vLLM's own proxy; with `keeps`, also with a server each that
    keeps the prompts."""

    def __init__(self, server_bin, model, packages, stack, keeps, flags, threads="1"):
        self.engines, self.servers = [], []
        for _ in range(2):
            config = NIXL
            if keeps:
                options = types.SimpleNamespace(server_bin=server_bin, peer=False)
                server = Server(options).start()
                stack.callback(server.discard)
                self.servers.append(server)
                connectors = [NIXL, json.loads(server.transfer_config())]
                config = {"kv_connector": "MultiConnector", "kv_role": "kv_both",
                          "kv_connector_extra_config": {"connectors": connectors}}
            env = dict(os.environ, VLLM_NIXL_SIDE_CHANNEL_HOST="127.0.0.1",
                       VLLM_NIXL_SIDE_CHANNEL_PORT=str(free_port()))
            engine = VllmServe(model, *flags, "--kv-transfer-config", json.dumps(config),
                               threads=threads, paths=(packages,), env=env)
            stack.callback(engine.kill)
            self.engines.append(engine)
        for engine in self.engines:
            engine.ready()
        self.prefill, self.decode = self.engines
        self.port = free_port()
        proxy = Child("proxy", [
            sys.executable, sdist_file(*TOY_PROXY), "--port", str(self.port),
            "--prefiller-host", "127.0.0.1", "--prefiller-port", str(self.prefill.http),
            "--decoder-host", "127.0.0.1", "--decoder-port", str(self.decode.http)])
        stack.callback(proxy.kill)
        if not eventually(lambda: answers(self.port, "/healthcheck"), 60):
            raise RuntimeError(proxy.tail())


def both_connectors(run):
    """`NixlConnector` hands prompts over, and lmc keeps them for the prefill engine."""
    if run.args.peer:
        return
    made = script_folder("nixl.sh", "NixlConnector")
    if made is None:
        return
    found = os.path.join(made, "lib/python3.11/site-packages")
    with contextlib.ExitStack() as stack:
        folder, packages = (stack.enter_context(tempfile.TemporaryDirectory()) for _ in range(2))
        make("worded", run.model, folder)
        nixl_packages(packages, found)
        with VllmServe(folder, *FLAGS) as plain:
            wanted = Answers(plain.ready().http).of(80)
        pair = NixlPair(run.args.server_bin, folder, packages, stack, True, FLAGS)
        hits = "vllm:external_prefix_cache_hits_total"
        asked = prompts(80, *LENGTHS)
        whole = sum(expected_hits(*LENGTHS))
        for turn, least in (("a first time", 0), ("again", whole)):
            before = [engine.metric(hits) for engine in pair.engines]
            words = [complete(pair.port, ids) for ids in asked]
            check(f"both connectors: answers are those of one engine, {turn}", words == wanted)
            prefill, decode = (engine.metric(hits) - had
                               for engine, had in zip(pair.engines, before, strict=True))
            check(f"both connectors: the decode engine computes no prompt, {turn}",
                  decode >= sum(LENGTHS) - len(LENGTHS), f"{decode} of {sum(LENGTHS)} tokens")
            check(f"both connectors: the prefill engine reads every whole chunk from lmc, {turn}"
                  if least else "both connectors: the prefill engine computes new prompts",
                  prefill == least, f"{prefill} of {least} tokens")
            # What is stored is there before it is asked for again.
            stored = 'lmc_stored_chunks_total '
            eventually(lambda: metric(pair.servers[0].http, stored) >= whole // CHUNK)
        for server in pair.servers:
            server.check_idle("both connectors: nothing is held afterwards", ANSWER_DEADLINE)
