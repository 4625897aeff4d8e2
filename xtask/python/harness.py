"""Engines and servers for the scenarios: processes with their logs, prompts, deadlines."""

import contextlib
import ctypes
import glob
import json
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

from checks import check, free_port, skip

HERE = os.path.dirname(os.path.abspath(__file__))
CHUNK = 256
MAX_TOKENS = 16
# The model has no tokenizer: prompts and answers are token ids.
TOKENS = ["--tokens-only", "--skip-tokenizer-init", "--max-model-len", "4096"]
START_DEADLINE = 180
ANSWER_DEADLINE = 120
# What poison.py writes into the blocks that vLLM frees, unless it shall be another byte.
POISON = 0x5A


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
        # In the same session: Linux shares cores among sessions (sched_autogroup_enabled), and the ranks
        # of an engine, which spin, would keep all threads of a server from them for seconds.
        self.process = subprocess.Popen(
            command, stderr=self.log, process_group=0, preexec_fn=die_with_parent, **options
        )
        Child.running.append(self)

    def kill(self, how=signal.SIGKILL):
        pids = {self.process.pid, *group(self.process.pid)}
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, how)
        try:
            # The server waits 10 s for requests and 5 s for its tiers.
            self.process.wait(40)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(20)
        # An engine that is killed leaves its KV cache, 1 GiB of memory, behind under its id.
        for pid in pids:
            for segment in glob.glob(f"/dev/shm/lmcache_kv_{pid}_*"):
                os.unlink(segment)

    def said(self, text):
        """How often a text is in the log."""
        with open(self.log.name, errors="replace") as f:
            return f.read().count(text)

    def tail(self, lines=15):
        with open(self.log.name, errors="replace") as f:
            return "".join(f.readlines()[-lines:])


class Engine(Child):
    """A vLLM engine behind engine.py."""

    # Folder with lmc's own Python package.
    package = None
    # Threads of the computation.
    threads = "1"
    # Python with vLLM.
    python = sys.executable

    def __init__(self, name, model, prefix=(), **options):
        command = [*prefix, Engine.python, os.path.join(HERE, "engine.py"), "--model", model]
        for key, value in options.items():
            if value is not False:
                command += [f"--{key.replace('_', '-')}"] + ([] if value is True else [str(value)])
        env = dict(os.environ, OMP_NUM_THREADS=Engine.threads, VLLM_CPU_OMP_THREADS_BIND="nobind",
                   PYTHONPATH=Engine.package or "")
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

    def submit(self, prompts, max_tokens=MAX_TOKENS, **more):
        prompts = [p if isinstance(p, dict) else {"ids": p} for p in prompts]
        self.send({"op": "generate", "prompts": prompts, "max_tokens": max_tokens} | more)

    def send(self, command):
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def quit(self):
        """Lets the engine end by itself, so that it removes its own shared memory."""
        with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
            self.send({"op": "quit"})
            self.process.wait(30)
        self.kill()

    def outputs(self, prompts, **more):
        """Ids, cached tokens and finish reason of each prompt."""
        self.submit(prompts, **more)
        return self.answer(ANSWER_DEADLINE)["outputs"]

    def generate(self, prompts, settle=True):
        """Ids and cached tokens of each prompt. With `settle`, once its chunks are stored."""
        outputs = self.outputs(prompts, settle=settle)
        return [o["ids"] for o in outputs], [o["cached"] for o in outputs]

    def abort(self, prompts, steps):
        """Aborts prompts after so many steps of the engine. Returns how many were unfinished."""
        self.submit(prompts, op="abort", steps=steps)
        return self.answer(ANSWER_DEADLINE)["unfinished"]

    def idle(self, **more):
        """What the engine holds when it has nothing left to do."""
        return self.ask("idle", **more)

    def ask(self, op, **more):
        self.send({"op": op} | more)
        return self.answer(ANSWER_DEADLINE)

    def dies(self, deadline):
        """Whether the engine's process ends by itself within the deadline."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(deadline)
        return self.process.poll() is not None


class VllmServe(Child):
    """`vllm serve` with these flags, and these folders to import from; or another line that starts
    it, in another environment."""

    def __init__(self, model, *flags, space=1, threads="1", paths=(), line=None, env=os.environ):
        self.http = free_port()
        command = line or [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model]
        command += ["--dtype", "float32", "--enforce-eager", "--no-enable-prefix-caching"]
        command += ["--host", "127.0.0.1", "--port", str(self.http)]
        # As long as a batch may be, so that prompts are not computed in parts.
        command += ["--max-num-batched-tokens", "8192", *flags]
        env = dict(env, VLLM_CPU_KVCACHE_SPACE=str(space), OMP_NUM_THREADS=threads,
                   VLLM_CPU_OMP_THREADS_BIND="nobind", HF_HUB_OFFLINE="1")
        if line is None:
            env["PYTHONPATH"] = ":".join(path or "" for path in paths)
        super().__init__("vllm-serve", command, env=env)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill(signal.SIGTERM)

    def ready(self):
        eventually(lambda: self.is_healthy() or self.process.poll() is not None, START_DEADLINE)
        if not self.is_healthy():
            raise RuntimeError(f"vllm serve did not start\n{self.tail(30)}")
        return self

    def is_healthy(self):
        with contextlib.suppress(OSError), self.open("/health", deadline=5):
            return True
        return False

    def open(self, path, body=None, deadline=30, headers=None):
        """The answer over HTTP; to a POST where there is a body."""
        return open_http(self.http, path, body, deadline, headers)

    def metric(self, head):
        return metric(self.http, head)


def open_http(port, path, body=None, deadline=30, headers=None):
    """The answer of a server here; to a POST where there is a body."""
    body = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", body,
        {"Content-Type": "application/json"} | (headers or {}))
    return urllib.request.urlopen(request, timeout=deadline)


def metric(port, head):
    """The sum of the metrics of an HTTP server here whose lines begin so."""
    with open_http(port, "/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(head))


def ask(run, child, headers=None):
    """The ids that a `vllm serve` answers to one of the prompts."""
    body = {"token_ids": prompts(2, *LENGTHS)[2], "model": run.model,
            "sampling_params": {"max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True,
                                "detokenize": False}}
    with child.open("/inference/v1/generate", body, ANSWER_DEADLINE, headers) as answer:
        return json.load(answer)["choices"][0]["token_ids"]


class Server:
    """The server under test, which can be killed and started again at the same ports."""

    def __init__(self, args, *flags, prefix=(), peer=None, chunk=CHUNK):
        """`peer`: LMCache's own server instead, whatever the arguments of the run say. `chunk`: in
        tokens."""
        self.args = args
        self.peer = peer or args.peer
        self.prefix = prefix
        self.flags, self.chunk = flags, chunk
        self.port, self.http = free_port(), free_port()
        self.child = None
        # Those of the host have files of other servers, also of ones that had its port.
        self.state = tempfile.TemporaryDirectory(prefix="lmc-state-")

    def start(self):
        common = ["--host", "127.0.0.1", "--port", str(self.port), "--l1-size-gb", "1"]
        common += ["--chunk-size", str(self.chunk), "--http-port", str(self.http)]
        if self.peer:
            lmcache = os.path.join(os.path.dirname(sys.executable), "lmcache")
            command = [sys.executable, lmcache, "server", *common]
            command += ["--eviction-policy", "LRU", "--no-l1-use-lazy"]
            # It has one transfer mode and no shared memory unless asked.
            command += ["--supported-transfer-mode", "auto", "--shm-name", f"lmc-peer-{self.port}"]
        else:
            command = [*self.prefix, self.args.server_bin, "serve", *common, *self.flags]
        # A container has a /tmp of its own.
        state = "none" if self.prefix else self.state.name
        self.child = Child("server", command, env=dict(os.environ, LMC_STATE_DIR=state))
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
        if self.peer:
            return json.dumps({
                "kv_connector": "LMCacheMPConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"lmcache.mp.port": self.port},
            })
        with open(self.child.log.name, errors="replace") as log:
            return log.read().split("--kv-transfer-config '")[1].split("'")[0]

    def own_transfer_config(self):
        """As `transfer_config`, for lmc's own connector."""
        return json.dumps({
            "kv_connector": "LmcConnector", "kv_connector_module_path": "lmc.vllm",
            "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"lmc.server": f"tcp://127.0.0.1:{self.port}"},
        })

    def segments(self):
        """The pool that a server which was killed leaves behind; its name holds the port."""
        return glob.glob(f"/dev/shm/lmc*[_-]{self.port}*")

    def holds(self, byte):
        """Whether 64 such bytes are anywhere in the pool: in a chunk, or in memory that was one's."""
        pattern = bytes([byte]) * 64
        for segment in self.segments():
            end = b""
            with open(segment, "rb") as pool:
                while part := pool.read(1 << 24):
                    if pattern in end + part:
                        return True
                    end = part[-len(pattern):]
        return False

    def stop(self):
        """Asks the server to end; ours must then leave nothing behind."""
        if self.child is None:
            return
        asked = time.monotonic()
        self.child.kill(signal.SIGTERM)
        took = time.monotonic() - asked
        if not self.peer:
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
        with open_http(self.http, path, body) as answer:
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

    def check_idle(self, name, deadline=30):
        """Checks that it soon holds nothing for engines."""
        free = eventually(lambda: not any(self.held().values()), deadline)
        check(name, free, str(self.held()))


class Redis(Child):
    """A redis-server that keeps all in memory."""

    def __init__(self):
        self.port = free_port()
        super().__init__("redis", ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1",
                                   "--save", "", "--appendonly", "no"])


def container(folder, own_network):
    """What to put before a command that is to run in a container of its own: nothing of the host
    but its programs, and `folder` at /run/lmc."""
    script = (
        f"set -e; mount -t tmpfs tmpfs /dev/shm; mount --bind {folder} /mnt; "
        "mount -t tmpfs tmpfs /run; mkdir /run/lmc; mount --move /mnt /run/lmc; "
        "mount -t tmpfs tmpfs /tmp; "
    )
    network = []
    if own_network:
        network = ["--net"]
        script += "ip link set lo up; "
    spaces = ["--mount", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return ["unshare", *network, *spaces, "sh", "-c", script + 'exec "$@"', "sh"]


def prompts(seed, *lengths):
    rng = random.Random(seed)
    return [[rng.randrange(1, 1000) for _ in range(n)] for n in lengths]


def expected_hits(*lengths, unit=CHUNK):
    """Whole units, less one token when that is all of the prompt: vLLM computes the last."""
    return [min(n // unit * unit, n - 1) for n in lengths]


def script_folder(script, what):
    """The folder that a script of this one makes where it is missing; `None` where it cannot be had."""
    made = subprocess.run(["bash", os.path.join(HERE, script)], capture_output=True, text=True)
    if made.returncode == 0:
        return made.stdout.strip()
    skip(what, made.stderr.strip()[-300:])
    return None


def eventually(what, deadline=30, pause=0.2):
    """Tries until it returns something true or the deadline comes; the last value."""
    end = time.monotonic() + deadline
    while True:
        value = what()
        if value or time.monotonic() > end:
            return value
        time.sleep(pause)


LENGTHS = (300, 700, 1025, 512, 100)


def shared_prefix(seed):
    """A prompt, and one with the same first 600 tokens."""
    first, other = prompts(50 + seed, 900, 500)
    return [first, first[:600] + other]
