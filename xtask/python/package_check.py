"""Checks the packages for operators: package_check.py GLIBC FOLDER OTHER

FOLDER is what `cargo xtask package` makes. The checksums name every package. The archive holds the
program, a page for each command and completions; the program needs no later glibc than that. It is
unpacked over a folder, and the server starts there and serves load whose bytes are compared. Two of
its servers read each other over NIXL. OTHER is a program with other machine code, to which the Debian
package is upgraded.

Prints one line a check and ends with `N passed, N failed`. Every wait has a deadline.
"""

import glob
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import zipfile

import package_deb
import package_image
from checks import check, finish, free_port, skip
from harness import eventually, script_folder
from package_deb import program_of
from wheel_check import DEADLINE, listens, ran, run, text

# Most bytes that the archive may have.
MAX_BYTES = 15 << 20
COMPLETIONS = {"bash": "share/bash-completion/completions/lmc",
               "zsh": "share/zsh/site-functions/_lmc",
               "fish": "share/fish/vendor_completions.d/lmc.fish"}


def sums(folder):
    """The checksums beside the packages."""
    done = subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=folder,
                          capture_output=True, text=True, timeout=DEADLINE)
    check("SHA256SUMS has the packages' checksums", done.returncode == 0, done.stderr.strip())
    with open(os.path.join(folder, "SHA256SUMS")) as lines:
        named = {line.split()[1] for line in lines}
    there = set(os.listdir(folder)) - {"SHA256SUMS"}
    check("SHA256SUMS names every package", named == there, str(sorted(named ^ there)))
    kinds = {name.rsplit(".", 1)[-1] for name in there}
    check("an archive and a wheel are among them", {"gz", "whl"} <= kinds, str(sorted(there)))


def commands(lmc, *path):
    """The commands of the program, as its help lists them, with those below."""
    _, said = run(lmc, *path, "--help")
    listed = re.search(r"^Commands:\n(.*?)\n\n", said, re.DOTALL | re.MULTILINE)
    names = re.findall(r"^  (\S+)", listed[1], re.MULTILINE) if listed else []
    found = [path]
    for name in names:
        if name != "help":
            found += commands(lmc, *path, name)
    return found


def archive(path, glibc):
    """The archive, and what it holds once it is unpacked."""
    size = os.path.getsize(path)
    check(f"the archive is smaller than {MAX_BYTES / 1e6:.1f} MB", size < MAX_BYTES,
          f"{size / 1e6:.1f} MB")
    top = os.path.basename(path).removesuffix(".tar.gz")
    with tarfile.open(path) as tar:
        members = tar.getmembers()
        program = tar.extractfile(f"{top}/bin/lmc").read()
    program_of("archive", program, glibc)
    [wheel] = glob.glob(os.path.join(os.path.dirname(path), "*.whl"))
    with zipfile.ZipFile(wheel) as files:
        [inside] = [name for name in files.namelist() if name.endswith("/scripts/lmc")]
        check("the wheel has the archive's program", files.read(inside) == program)
    outside = [m.name for m in members if m.name.split("/")[0] != top or ".." in m.name.split("/")]
    check("everything in the archive lies in one folder", not outside, str(outside))
    odd = [m.name for m in members if (m.uid, m.gid) != (0, 0) or m.mode != (
        0o755 if m.isdir() or m.name == f"{top}/bin/lmc" else 0o644)]
    check("its files are root's, and readable by all", not odd, str(odd))
    check("all its files have the time of the commit", len({m.mtime for m in members}) == 1)
    with tempfile.TemporaryDirectory(prefix="lmc-package-") as prefix:
        ran("the archive is unpacked over a folder as its README says",
            "tar", "-xzf", path, "-C", prefix, "--strip-components=1")
        unpacked(prefix)


def unpacked(prefix):
    """The files under a prefix, and the server that they start."""
    lmc = os.path.join(prefix, "bin", "lmc")
    ran("lmc --version runs", lmc, "--version")
    for name, original in (("LICENSE", ["LICENSE"]), ("README.md", ["packaging", "README.md"])):
        with open(os.path.join(prefix, "share", "doc", "lmc", name)) as file:
            check(f"it has {name}", file.read() == text(*original))
    for original in ("grafana/lmc.json", "prometheus/lmc.rules.yml"):
        with open(os.path.join(prefix, "share", "lmc", original)) as file:
            check(f"it has {original}", file.read() == text("packaging", original))
    pages(lmc, os.path.join(prefix, "share", "man", "man1"))
    completions(prefix)
    serves(lmc, prefix)
    over_nixl(lmc, prefix)


def pages(lmc, folder):
    """The manual pages."""
    wanted = {"-".join(("lmc", *path)) + ".1" for path in commands(lmc)}
    there = set(os.listdir(folder))
    check(f"each of {len(wanted)} commands has a manual page, and nothing else has one",
          len(wanted) > 10 and wanted == there, str(sorted(wanted ^ there)))
    if shutil.which("man") is None:
        skip("manual pages are formatted", "no man here")
        return
    bad = {}
    for page in sorted(there):
        done = subprocess.run(["man", "--warnings", "-E", "UTF-8", "-l", "-Tutf8", "-Z",
                               os.path.join(folder, page)], capture_output=True, text=True,
                              env=dict(os.environ, MANROFFSEQ="", MANWIDTH="80", LC_ALL="C.UTF-8"),
                              timeout=DEADLINE)
        if done.returncode or done.stderr:
            bad[page] = done.stderr.strip().splitlines()[:3]
    check("manual pages are formatted without a warning", not bad, str(bad))


def completions(prefix):
    """The completions, in the shells that are here."""
    for shell, path in COMPLETIONS.items():
        script = os.path.join(prefix, path)
        if shutil.which(shell) is None:
            skip(f"completions for {shell}", f"no {shell} here")
        elif shell == "bash":
            line = (f"source {script}; COMP_WORDS=(lmc ser); COMP_CWORD=1; _lmc lmc ser lmc; "
                    "echo ${COMPREPLY[@]}")
            ok, said = run("bash", "--noprofile", "--norc", "-c", line)
            check("bash completes `lmc ser`", ok and "serve" in said.split(), said)
        else:
            ok, said = run(shell, "-n", script)
            check(f"{shell} reads its completions", ok, said)


def serves(lmc, folder):
    """The server, what asks it, and a load whose bytes are compared."""
    port, http = str(free_port()), str(free_port())
    log = os.path.join(folder, "serve.log")
    with open(log, "w") as out:
        server = subprocess.Popen(
            [lmc, "serve", "--port", port, "--http-port", http, "--l1-size-gb", "256MiB",
             "--state-dir", os.path.join(folder, "state")],
            stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    try:
        if not check("lmc serve starts", listens(server, int(port)) and listens(server, int(http))):
            return
        url = f"http://127.0.0.1:{http}"
        ran("lmc status asks it", lmc, "status", "--url", url)
        ran("lmc bench gets the bytes that it stored", lmc, "bench", "--url",
            f"tcp://127.0.0.1:{port}", "--http-url", url, "--count", "50")
        server.send_signal(signal.SIGTERM)
        check("it ends when asked to", server.wait(DEADLINE) == 0, str(server.returncode))
    finally:
        server.kill()
        server.wait()
        if server.returncode:
            with open(log) as said:
                print(said.read())


def over_nixl(lmc, folder):
    """A server that reads from another over NIXL, with NVIDIA's library."""
    environment = script_folder("nixl.sh", "the program reads over NIXL")
    if environment is None:
        return
    key = os.path.join(folder, "key")
    with open(os.open(key, os.O_CREAT | os.O_WRONLY, 0o600), "w") as file:
        file.write("0123456789abcdef" * 4)
    env = dict(os.environ, LMC_NIXL_LIBRARY=os.path.join(environment, "libnixl_capi.so"), UCX_TLS="tcp")
    servers, peer = [], ()
    try:
        for name in ("owner", "reader"):
            port, http, listen = (str(free_port()) for _ in range(3))
            flags = ["--p2p-listen", f"127.0.0.1:{listen}", "--p2p-transport", "nixl",
                     "--p2p-interfaces", "lo", "--p2p-key", key, *peer]
            log = os.path.join(folder, f"{name}.log")
            with open(log, "w") as out:
                server = subprocess.Popen(
                    [lmc, "serve", "--port", port, "--http-port", http, "--l1-size-gb", "256MiB",
                     "--state-dir", "none", *flags],
                    stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env)
            peer = ("--p2p-peer", f"127.0.0.1:{listen}")
            urls = ["--url", f"tcp://127.0.0.1:{port}", "--http-url", f"http://127.0.0.1:{http}"]
            servers.append((server, log, urls))
            if not check(f"the {name} starts with NIXL", listens(server, int(port))):
                return
        (_, _, owner), (reader, log, urls) = servers
        load = ["bench", "--force", "--model", "nixl", "--seed", "7", "--warmup", "0", "--count", "6"]
        ran("prompts are stored at the owner", lmc, *load, "--workload", "store", *owner)

        def met():
            with open(log) as said:
                return "peer has NIXL" in said.read()

        check("the reader has met the owner over NIXL", eventually(met))
        ran("the reader gets the bytes that were stored at the owner", lmc, *load, "--workload",
            "retrieve", "--prompts", "6", *urls)
        _, said = run(lmc, "peers", "--json", "--url", urls[-1])
        counts = [int(n) for n in re.findall(r'"read_nixl_bytes": (\d+)', said)]
        # Six prompts of eight chunks of 512 KiB.
        check("and all of them came over NIXL", 6 * 8 << 19 in counts, str(counts) if counts else said)
    finally:
        for server, _, _ in servers:
            server.terminate()
            server.wait(DEADLINE)


def main():
    glibc, folder, other = sys.argv[1:]
    sums(folder)
    [path] = glob.glob(os.path.join(folder, "*.tar.gz"))
    archive(path, glibc)
    package_deb.deb(folder, glibc, other)
    package_image.image(path)
    finish()


if __name__ == "__main__":
    main()
