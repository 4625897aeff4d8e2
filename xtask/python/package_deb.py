"""Checks of the Debian package, in Debians without anything else.

It holds what it should, and passes lintian and `systemd-analyze verify`. Without systemd it is
installed, started by its unit's command line as its user, serves a stock client, and is removed without
a trace. With systemd its service starts, proves to be alive, is started again when it is killed or
stuck, is upgraded while a stock client is at work, and is removed.
"""

import glob
import io
import json
import os
import re
import shutil
import subprocess
import tempfile

from elftools.elf.elffile import ELFFile

from checks import check, skip
from debian_machine import CGROUPS, DEADLINE, Machine, debian, ran
from package_client import Work, client, found, served
from wheel_check import LIBRARIES, needs, runs_with

BENCH = ("lmc", "bench", "--url", "tcp://127.0.0.1:5555", "--http-url", "http://127.0.0.1:8080")
# Prompts of eight chunks that an upgrade has to find again.
PROMPTS = 6
# Kills a server that is stuck sooner than the unit does.
SHORT_WATCHDOG = "[Service]\nWatchdogSec=4s\n"
ON_DISK = ('l1_size_gb = "64MiB"\nipc_path = "/run/lmc/lmc.sock"\ndisk = "/var/lib/lmc/disk"\n'
           'disk_size = "512MiB"\ndisk_keep_free = 0\ndisk_create = true\n')


def program_of(package, content, glibc):
    """What the program of a package needs."""
    libraries, versions = needs(ELFFile(io.BytesIO(content)))
    ok, why = runs_with(versions, glibc)
    check(f"{package}: the program runs with glibc {glibc}", ok,
          f"{why}, {len(content) / 1e6:.1f} MB")
    check(f"{package}: the program needs no library that may be missing", libraries <= LIBRARIES,
          ", ".join(sorted(libraries)))


def deb(folder, glibc, other):
    """The checks, as far as this machine can make them."""
    paths = glob.glob(os.path.join(folder, "*.deb"))
    if not paths:
        skip("Debian package", "it was not built: no dpkg-deb here")
        return
    [path] = paths
    contents(path, glibc)
    there, why = debian()
    if there is None:
        skip("Debian package installs", why)
        return
    with Machine(there, "base") as machine:
        bare(machine, path)
    if not CGROUPS:
        skip("Debian package under systemd", "no control groups of version 2 here")
        return
    with Machine(there, "tools", "base", systemd=True) as machine:
        linted(machine, path)
        service(machine, path, other)


def contents(path, glibc):
    """The fields of the package, and its files."""
    fields = subprocess.run(["dpkg-deb", "--field", path], capture_output=True, text=True,
                            check=True).stdout
    name = os.path.basename(path)
    version = re.search("^Version: (.*)$", fields, re.MULTILINE)[1]
    check("the package's name has its version", name.startswith(f"lmc_{version}_"), name)
    check("no field is left open", not re.search("@[A-Z]+@", fields))
    with tempfile.TemporaryDirectory(prefix="lmc-deb-") as top:
        subprocess.run(["dpkg-deb", "--extract", path, top], check=True)
        with open(os.path.join(top, "usr", "bin", "lmc"), "rb") as program:
            program_of("Debian package", program.read(), glibc)


def linted(machine, path):
    """Debian's own checks."""
    machine.put(path, "/root/lmc.deb")
    ok, said = machine.run("lintian", "--allow-root", "--fail-on", "error,warning", "--info",
                           "/root/lmc.deb")
    check("lintian has neither an error nor a warning", ok, "" if ok else said)


def bare(machine, path):
    """A Debian that no systemd runs, as in a container."""
    before = machine.files()
    machine.put(path, "/root/lmc.deb")
    ok, said = machine.run("apt-get", "install", "--yes", "/root/lmc.deb")
    if not check("the package needs no other that is not there", ok, "" if ok else said):
        return
    ran(machine, "no file of it was changed", "dpkg", "--verify", "lmc")
    said = ran(machine, "it has made a user without a login", "getent", "passwd", "lmc")
    check("that user has no shell", said.endswith(":/usr/sbin/nologin"), said)
    unit = ran(machine, "the unit is there", "cat", "/lib/systemd/system/lmc.service")
    line = re.search("^ExecStart=(.*)$", unit, re.MULTILINE)[1]
    # What systemd makes for StateDirectory and RuntimeDirectory.
    machine.run("install", "-d", "-o", "lmc", "-g", "lmc", "/var/lib/lmc", "/run/lmc")
    as_user = ("setpriv", "--reuid=lmc", "--regid=lmc", "--clear-groups", "--no-new-privs")
    ran(machine, "lmc doctor finds no problem for the service", *as_user, "lmc", "doctor",
        "--config", "/etc/lmc/lmc.toml")
    server = machine.start(*as_user, *line.split())
    try:
        if check("the unit's command line starts the server as that user", machine.eventually(
                "lmc", "status")):
            with client(machine) as engine:
                serving(machine)
                if engine and check("vLLM starts next to it", engine.ready()):
                    served(engine, "stock client", 1)
        without_nixl(machine, *as_user)
    finally:
        # It is the only process of its user.
        machine.run("sh", "-c", "kill $(find /proc -maxdepth 1 -user lmc -printf '%f ')")
        said, _ = server.communicate(timeout=DEADLINE)
        check("it ends when asked to", server.returncode == 0, said if server.returncode else "")
    ran(machine, "it is removed", "apt-get", "remove", "--yes", "lmc")
    there, _ = machine.run("test", "-e", "/etc/lmc/lmc.toml")
    check("its settings stay until it is purged", there)
    ran(machine, "it is purged", "apt-get", "purge", "--yes", "lmc")
    machine.run("rm", "/root/lmc.deb")
    traces(machine, before)


def without_nixl(machine, *as_user):
    """A server that needs NIXL, where NIXL is not installed."""
    machine.run(*as_user, "sh", "-c", "umask 077; printf '%064d' 7 >/var/lib/lmc/key")
    ok, said = machine.run(*as_user, "lmc", "serve", "--port", "5556", "--http-port", "8081",
                           "--l1-size-gb", "64MiB", "--p2p-listen", "127.0.0.1:7700", "--p2p-key",
                           "/var/lib/lmc/key", "--p2p-transport", "nixl")
    check("without NIXL the error says how to install it", not ok and
          "pip install nixl-cu12" in said and "LMC_NIXL_LIBRARY=" in said, said)


def serving(machine):
    """A load on the server that runs."""
    ran(machine, "lmc bench gets the bytes that it stored", *BENCH, "--count", "50")
    ok, said = machine.run("test", "-S", "/run/lmc/lmc.sock")
    check("lmc's own connector finds its socket", ok, said)
    ok, said = asked(machine, "/", "text/html")
    check("a browser gets the page", ok and "<!doctype html>" in said.lower(), said[:200])
    ok, said = asked(machine, "/live", "text/event-stream")
    check("the page gets the state of the server", ok and "data: {" in said, said[:200])


def asked(machine, path, accept):
    """The start of an answer over HTTP. A Debian without anything else has bash, and no curl."""
    head = f"GET {path} HTTP/1.1\\r\\nHost: localhost\\r\\nAccept: {accept}\\r\\n\\r\\n"
    return machine.run("timeout", "20", "bash", "-c",
                       f"exec 3<>/dev/tcp/127.0.0.1/8080; printf '{head}' >&3; head -c 2000 <&3")


def traces(machine, before):
    """Nothing is left but the records of package managers."""
    after = machine.files()
    # Copies that the tools for users keep of their own files.
    ours = {line for line in before ^ after
            if not re.search(r"/etc/(passwd|group|shadow|gshadow|subuid|subgid)-$|/\.pwd\.lock$", line)}
    check("nothing of it is left", not ours, str(sorted(ours)[:10]))
    for kind in ("passwd", "group"):
        ok, _ = machine.run("getent", kind, "lmc")
        check(f"its {kind} entry is gone", not ok)


def shows(machine, name):
    """A property of the service."""
    _, said = machine.run("systemctl", "show", "--property", name, "--value", "lmc.service")
    return said


def service(machine, path, other):
    """The service under systemd."""
    before = machine.files()
    machine.write(SHORT_WATCHDOG, "/etc/systemd/system/lmc.service.d/watchdog.conf")
    machine.write(ON_DISK, "/etc/lmc/lmc.toml")
    ok, said = machine.run("dpkg", "--force-confold", "--install", "/root/lmc.deb")
    if not check("the package is installed where systemd runs", ok, "" if ok else said):
        return
    said = ran(machine, "the service is active once it is installed", "systemctl", "is-active", "lmc")
    if said != "active":
        print(machine.run("journalctl", "--no-pager", "--unit", "lmc")[1])
        return
    ran(machine, "and starts with the host", "systemctl", "is-enabled", "lmc")
    ok, said = machine.run("systemd-analyze", "verify", "/lib/systemd/system/lmc.service")
    check("systemd-analyze verify finds nothing", ok and not said, said)
    ok, said = machine.run("systemd-analyze", "security", "--offline=true", "--threshold=30",
                           "/lib/systemd/system/lmc.service")
    check("its exposure is 3.0 at most", ok, said.splitlines()[-1])
    owner, _ = machine.run("sh", "-c", "test $(stat -c %U /proc/$(systemctl show -P MainPID lmc)) = lmc")
    check("its process is the user lmc's", owner)
    check("it reports its state", shows(machine, "StatusText").startswith("serving engines"),
          shows(machine, "StatusText"))
    if may_raise_limits():
        limits(machine)
    else:
        skip("the service may lock any memory", "this machine's root may not raise limits")
    shells(machine)
    serving(machine)
    comes_back(machine)
    upgraded(machine, path, other)
    other_user(machine)
    ran(machine, "it is purged", "dpkg", "--purge", "lmc")
    ok, said = machine.run("systemctl", "is-active", "lmc")
    check("its service has ended", not ok, said)
    # Settings of the administrator's own stay.
    machine.run("rm", "-r", "/etc/systemd/system/lmc.service.d")
    traces(machine, before)


def shells(machine):
    """Completions where the shells of Debian look for them."""
    for shell, line in (("fish", "complete -C 'lmc ser' | cut -f 1"),
                        ("zsh", "autoload -Uz compinit; compinit -D; print serve $_comps[lmc]"),
                        ("bash", "source /usr/share/bash-completion/completions/lmc; "
                                 "COMP_WORDS=(lmc ser); COMP_CWORD=1; _lmc lmc ser lmc; "
                                 "echo ${COMPREPLY[@]}")):
        ok, said = machine.run("env", "HOME=/run/home", shell, "-c", line)
        words = said.split()
        check(f"{shell} completes lmc", ok and "serve" in words
              and (shell != "zsh" or "_lmc" in words), said)
    ran(machine, "man finds a page of it", "man", "--where", "lmc-serve")


def may_raise_limits():
    """Whether this process may raise hard limits (CAP_SYS_RESOURCE)."""
    with open("/proc/self/status") as status:
        rights = re.search("^CapEff:\\s*(.*)$", status.read(), re.MULTILINE)[1]
    return int(rights, 16) >> 24 & 1 == 1


def limits(machine):
    """The limits of the service's process."""
    found = ran(machine, "its limits can be read", "sh", "-c",
                 "cat /proc/$(systemctl show -P MainPID lmc)/limits")
    locked = re.search("^Max locked memory.*", found, re.MULTILINE)
    check("it may lock any memory", "unlimited" in locked[0], locked[0])


def status(machine):
    """What the server says of itself."""
    ok, said = machine.run("lmc", "status", "--json")
    if not ok:
        raise RuntimeError(said)
    return json.loads(said)["lmc"]


def later(path, other, top):
    """Builds a later version of a package, with another program, in a folder. Returns its path."""
    tree = os.path.join(top, "tree")
    subprocess.run(["dpkg-deb", "--raw-extract", path, tree], check=True)
    control = os.path.join(tree, "DEBIAN", "control")
    with open(control) as file:
        fields = re.sub("^(Version: .*)$", r"\1+later", file.read(), flags=re.MULTILINE)
    with open(control, "w") as file:
        file.write(fields)
    shutil.copy(other, os.path.join(tree, "usr", "bin", "lmc"))
    built = os.path.join(top, "later.deb")
    subprocess.run(["dpkg-deb", "--root-owner-group", "-Zgzip", "--build", tree, built], check=True,
                   stdout=subprocess.DEVNULL)
    return built


def upgraded(machine, path, other):
    """A later version over this one while a client is at work: what is on the drive is found."""
    load = (*BENCH, "--force", "--model", "upgrade", "--seed", "7", "--warmup", "0", "--count",
            str(PROMPTS))
    with client(machine) as engine, tempfile.TemporaryDirectory(prefix="lmc-later-") as top:
        machine.put(later(path, other, top), "/root/later.deb")
        ran(machine, "prompts are stored", *load, "--workload", "store")
        work = known = None
        if engine and check("vLLM starts next to the service", engine.ready()):
            known = [served(engine, "before the upgrade", seed) for seed in (1, 2)]
        written = machine.eventually("sh", "-c", "lmc status --json | grep -q '\"queued_bytes\": 0,'")
        before = status(machine)["lower"][0]["chunks"]
        wanted = 8 * PROMPTS + (18 if known else 0)
        check("they are on the drive", written and before >= wanted, f"{before} of {wanted}")
        if known:
            work = Work(engine, 1, known[0])
            check("vLLM is at work before the upgrade", work.await_batches(2))
        process, program = running(machine)
        ran(machine, "a later version is installed over it", "dpkg", "--install", "/root/later.deb")
        machine.run("rm", "/root/later.deb")
        version = machine.run("dpkg-query", "--show", "--showformat", "${Version}", "lmc")[1]
        check("it is the later version", version.endswith("+later"), version)
        after = running(machine)
        check("its server is active, and is another program",
              machine.run("systemctl", "is-active", "lmc")[1] == "active" and after[0] != process
              and after[1] not in ("", program), str(after))
        chunks = status(machine)["lower"][0]["chunks"]
        check("it has found every chunk of the drive", chunks >= before, f"{chunks} of {before}")
        if work:
            check("vLLM is at work after the upgrade", work.await_batches(2))
            work.end()
        start = status(machine)
        ran(machine, "the same prompts have the bytes that were stored", *load, "--workload",
            "retrieve", "--prompts", str(PROMPTS))
        if known:
            found(engine, "after the upgrade", 2, known[1])
        wanted = 8 * PROMPTS + (9 if known else 0)
        end = status(machine)
        read = end["lower"][0]["promoted"] - start["lower"][0]["promoted"]
        # The tool stores prompts that it does not find.
        stored = end["counts"]["stored_chunks"] - start["counts"]["stored_chunks"]
        check("they came from the drive", read >= wanted and not stored,
              f"{read} of {wanted} chunks read, {stored} stored")


def running(machine):
    """The process of the service, and the checksum of its program."""
    process = shows(machine, "MainPID")
    return process, machine.run("sha256sum", f"/proc/{process}/exe")[1].split(" ")[0]


def other_user(machine):
    """The service as the user of the engines, as its settings advise."""
    machine.run("useradd", "--system", "vllm")
    machine.write("[Service]\nUser=vllm\nGroup=vllm\n",
                  "/etc/systemd/system/lmc.service.d/override.conf")
    ran(machine, "another user is named", "systemctl", "daemon-reload")
    ran(machine, "the service runs as the engines' user", "systemctl", "restart", "lmc")
    owner = machine.run("stat", "-c", "%U", "/var/lib/lmc/disk")[1]
    check("its folder is that user's", owner == "vllm", owner)
    check("and its chunks are still found", status(machine)["lower"][0]["chunks"] > 0)
    machine.run("systemctl", "stop", "lmc")
    machine.run("userdel", "vllm")


def comes_back(machine):
    """A server that is killed, and one that is stuck."""
    for what, signal in (("is killed", "KILL"), ("answers no engine", "STOP")):
        process = shows(machine, "MainPID")
        machine.run("sh", "-c", f"kill -{signal} {process}")
        back = machine.eventually("sh", "-c", "pid=$(systemctl show -P MainPID lmc); "
                                  f"test $pid != 0 && test $pid != {process} && "
                                  "systemctl is-active --quiet lmc")
        check(f"a server that {what} is started again", back)
    log = machine.run("journalctl", "--no-pager", "--unit", "lmc")[1]
    check("the second one was ended by the watchdog", "Watchdog timeout" in log)
    serving(machine)
    process = shows(machine, "MainPID")
    ran(machine, "its settings are read again", "systemctl", "reload", "lmc")
    done = machine.eventually("sh", "-c", "journalctl --unit lmc | grep -q 'settings read again'")
    check("by the same server", done and shows(machine, "MainPID") == process)
