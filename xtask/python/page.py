"""The lines of docs/connector.md as they stand, in an environment of its own."""

import glob
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import sysconfig
import venv

from checks import check
from harness import HERE, TOKENS, VllmServe, eventually

ROOT = os.path.dirname(os.path.dirname(HERE))
DOCS = os.path.join(ROOT, "docs", "connector.md")
# A server there, for engines, is taken instead of one that is started.
PORT = 5555
SOCKET = "/run/lmc/lmc.sock"
# The folder of the server that the connector starts.
FOLDER = "/run/lmc" if os.geteuid() == 0 else f"/tmp/lmc-{os.geteuid()}"
INSTALL_DEADLINE = 120


def lines():
    """The lines that install and start vLLM, without the one that builds the wheel."""
    with open(DOCS) as page:
        block = page.read().split("```", 2)[1].strip().splitlines()
    install, vllm = [line.split(" #")[0].strip() for line in block if "cargo" not in line]
    return install, vllm


def is_free(port):
    with socket.socket() as attempt:
        attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            attempt.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def is_running(process):
    """Whether a process runs; one that its parent has not waited for does not."""
    try:
        with open(f"/proc/{process}/status") as status:
            return "State:\tZ" not in status.read()
    except OSError:
        return False


class Page:
    """A `vllm serve`, installed and started by the page's lines, and the server that it starts.

    The environment has the wheel and, by their folder, vLLM's packages; importing lmcache fails in
    it.
    """

    def __init__(self, run, folder):
        self.run = run
        self.folder = folder
        bin = os.path.join(folder, "bin")
        self.env = {name: value for name, value in os.environ.items()
                    if name != "PYTHONPATH" and not name.startswith("LMC_")}
        # The wheel needs nothing that pip would have to fetch.
        self.env |= {"PATH": f"{bin}:{os.environ['PATH']}", "VIRTUAL_ENV": folder,
                     "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}

    def __enter__(self):
        install, self.line = lines()
        self.make_environment()
        wheels = os.path.join(os.path.dirname(self.run.args.package.rstrip("/")), "wheels")
        if not glob.glob(f"{wheels}/lmc-*.whl"):
            raise RuntimeError(f"no wheel in {wheels}: cargo xtask test-vllm builds it")
        install = install.replace("target/wheels", wheels)
        done = subprocess.run(["bash", "-c", install], env=self.env, cwd=ROOT, text=True,
                              capture_output=True, timeout=INSTALL_DEADLINE)
        check("vllm serve, own: the page's line installs the wheel", done.returncode == 0,
              done.stderr.strip()[-500:])
        self.process = None
        sockets = SOCKET, os.path.join(FOLDER, "lmc.sock")
        self.starts = is_free(PORT) and not any(map(os.path.exists, sockets))
        if not self.starts:
            print(f"(port {PORT} or a socket of {sockets} is taken: the page's line runs with the "
                  "server of the scenarios, and starts none)")
            config = json.loads(self.line.split("'")[1])
            config["kv_connector_extra_config"] = {
                "lmc.server": f"tcp://127.0.0.1:{self.run.server.port}"}
            self.line = self.line.replace(self.line.split("'")[1], json.dumps(config))
        self.vllm = self.serve()
        return self

    def __exit__(self, *_):
        self.vllm.kill(signal.SIGTERM)
        # Only the one that this run has started.
        if (process := self.process) is not None:
            os.kill(process, signal.SIGTERM)
            ended = eventually(lambda: not is_running(process))
            check("vllm serve, own: the server ends when asked to", ended, self.log())

    def serve(self):
        """Starts a `vllm serve` by the page's line."""
        line = self.line.replace("MODEL", shlex.quote(self.run.model))
        # What the small model needs besides follows the line.
        return VllmServe(
            self.run.model, *TOKENS,
            line=["bash", "-c", f'exec {line} "$@"', "bash"], env=self.env)

    def server(self):
        """The process of the server that the page's vLLM has started."""
        with open(os.path.join(FOLDER, "serve.json")) as record:
            self.process = json.load(record)["process"]
        return self.process

    def log(self):
        """The log of that server."""
        with open(os.path.join(FOLDER, "serve.log")) as log:
            return log.read()

    def make_environment(self):
        """As if vLLM was installed in it: its packages, and its program."""
        venv.create(self.folder, with_pip=True)
        python = os.path.join(self.folder, "bin", "python")
        site = os.path.join(self.folder, "lib", f"python{sys.version_info[0]}.{sys.version_info[1]}",
                            "site-packages")
        with open(os.path.join(site, "vllm.pth"), "w") as file:
            file.write(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
        with open(os.path.join(site, "sitecustomize.py"), "w") as file:
            file.write("import sys\nsys.modules['lmcache'] = None\n")
        program = os.path.join(self.folder, "bin", "vllm")
        with open(os.path.join(os.path.dirname(sys.executable), "vllm")) as theirs:
            text = theirs.read().partition("\n")[2]
        with open(program, "w") as ours:
            ours.write(f"#!{python}\n{text}")
        os.chmod(program, 0o755)
