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

from checks import check, free_port
from harness import HERE, Child, VllmServe, eventually

ROOT = os.path.dirname(os.path.dirname(HERE))
DOCS = os.path.join(ROOT, "docs", "connector.md")
# Of `lmc serve`, for engines and over HTTP.
PORTS = (5555, 8080)
# A server there is found before the ports.
SOCKET = "/run/lmc/lmc.sock"
INSTALL_DEADLINE = 120


def lines():
    """The lines that install, serve and start vLLM, without the one that builds the wheel."""
    with open(DOCS) as page:
        block = page.read().split("```", 2)[1].strip().splitlines()
    install, serve, vllm = [line.split(" #")[0].strip() for line in block if "cargo" not in line]
    return install, serve.removesuffix("&").strip(), vllm


def transfer_config(port):
    """The page's value of --kv-transfer-config, with a port besides."""
    config = json.loads(lines()[2].split("'")[1])
    return json.dumps({**config, "kv_connector_extra_config": {"lmc.port": port}})


def is_free(port):
    with socket.socket() as attempt:
        attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            attempt.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


class Page:
    """A server and a `vllm serve`, installed and started by the page's lines.

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
        install, serve, vllm = lines()
        self.make_environment()
        wheels = os.path.join(os.path.dirname(self.run.args.package.rstrip("/")), "wheels")
        if not glob.glob(f"{wheels}/lmc-*.whl"):
            raise RuntimeError(f"no wheel in {wheels}: cargo xtask test-vllm builds it")
        install = install.replace("target/wheels", wheels)
        done = subprocess.run(["bash", "-c", install], env=self.env, cwd=ROOT, text=True,
                              capture_output=True, timeout=INSTALL_DEADLINE)
        check("vllm serve, own: the page's line installs the wheel", done.returncode == 0,
              done.stderr.strip()[-500:])
        if os.path.exists(SOCKET) or not all(map(is_free, PORTS)) or not self.serve(serve):
            print(f"(port {PORTS[0]}, {PORTS[1]} or {SOCKET} is taken: the page's lines run with "
                  "others)")
            port, http = free_port(), free_port()
            if not self.serve(f"{serve} --port {port} --http-port {http}"):
                raise RuntimeError(f"the page's server did not start\n{self.server.tail()}")
            vllm = vllm.replace(vllm.split("'")[1], transfer_config(port))
        vllm = vllm.replace("MODEL", shlex.quote(self.run.model))
        # What the small model needs besides follows the line.
        self.vllm = VllmServe(
            self.run.model, "--tokens-only", "--skip-tokenizer-init", "--max-model-len", "4096",
            line=["bash", "-c", f'exec {vllm} "$@"', "bash"], env=self.env)
        return self

    def __exit__(self, *_):
        self.vllm.kill(signal.SIGTERM)
        self.server.kill(signal.SIGTERM)
        check("vllm serve, own: the server ends when asked to",
              self.server.process.returncode == 0, str(self.server.process.returncode))

    def serve(self, line):
        """Starts the server. Whether it listens; others may have taken its ports meanwhile."""
        self.server = Child("page-serve", ["bash", "-c", f"exec {line}"], env=self.env)

        def listens():
            return self.server.said("listening for engines")

        eventually(lambda: listens() or self.server.process.poll() is not None)
        if not listens():
            self.server.kill()
        return listens()

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
