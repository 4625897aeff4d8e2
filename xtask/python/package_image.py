"""Checks of the container image: packaging/container/Containerfile, built by podman in a Debian.

No registry is asked: the image that the recipe begins with is that Debian. The image is unpacked, and
its command line is run by chroot as its user, because podman cannot run a container everywhere.
"""

import json
import os
import subprocess

from checks import check, skip
from debian_machine import DEADLINE, Machine, debian, ran

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
MAX_BYTES = 35e6
# Files are copied for each layer, which needs no kernel that mounts layers over layers.
PODMAN = ("podman", "--storage-driver", "vfs")
# The flags of LMCache's operator, with a small pool.
OPERATOR = ("server --host 0.0.0.0 --port 6555 --l1-size-gb 0.0625 --chunk-size 256 --max-workers 1 "
            "--hash-algorithm blake3 --eviction-policy LRU --eviction-trigger-watermark 0.8 "
            "--eviction-ratio 0.2 --prometheus-port 9090 --http-port 8081")
# Asks a path of the operator's port for metrics; bash is the only client in the Debian.
SCRAPE = """exec 3<>/dev/tcp/127.0.0.1/9090
printf 'GET %s HTTP/1.0\\r\\n\\r\\n' "$1" >&3
cat <&3"""


def image(archive):
    """The checks, as far as this machine can make them."""
    there, why = debian()
    if there is None:
        skip("container image", why)
        return
    with Machine(there, "images", "base") as machine:
        if built(machine, there, archive):
            about(machine)
            serves(machine)


def built(machine, there, archive):
    """Builds the image. Whether it is there."""
    base = subprocess.Popen(["tar", "-C", os.path.join(there, "base"), "-c", "."],
                            stdout=subprocess.PIPE)
    imported = subprocess.run(machine.command(*PODMAN, "import", "-", "debian"), stdin=base.stdout,
                              capture_output=True, text=True, timeout=DEADLINE)
    base.wait(DEADLINE)
    if not check("podman has a Debian to begin with", imported.returncode == 0,
                 imported.stderr if imported.returncode else ""):
        return False
    folder = os.path.join(ROOT, "packaging", "container")
    machine.run("mkdir", "-p", "/build/lmc")
    for name in ("Containerfile", "collect.sh"):
        machine.put(os.path.join(folder, name), f"/build/{name}")
    # As the recipe's head says.
    machine.put(archive, "/root/lmc.tar.gz")
    ran(machine, "the archive is unpacked for the recipe", "tar", "-xzf", "/root/lmc.tar.gz", "-C",
        "/build/lmc", "--strip-components=1")
    # The Debian has no certificates, and the network is this machine's own.
    machine.run("cp", "/etc/ssl/certs/ca-certificates.crt", "/build/ca-certificates.crt")
    ok, said = machine.run(*PODMAN, "build", "--isolation", "chroot", "--format", "docker", "--tag",
                           "lmc", "--build-arg", "DEBIAN=localhost/debian", "/build")
    return check("podman builds the image", ok, "" if ok else said)


def about(machine):
    """The size, the user and the health check of the image."""
    said = ran(machine, "the image can be inspected", *PODMAN, "image", "inspect", "lmc")
    [found] = json.loads(said)
    check(f"the image is smaller than {MAX_BYTES / 1e6:.0f} MB", found["Size"] < MAX_BYTES,
          f"{found['Size'] / 1e6:.1f} MB")
    config = found["Config"]
    check("its user is not root", config["User"] == "65532:65532", config["User"])
    check("it starts the server", config["Entrypoint"] + config["Cmd"] == ["/usr/bin/lmc", "serve"])
    health = found.get("HealthCheck") or found.get("Healthcheck") or config.get("Healthcheck")
    check("it has a health check", health and health["Test"] == ["CMD", "/usr/bin/lmc", "status"],
          str(health))


def scraped(machine, path):
    """The answer to a GET of the operator's port for metrics, with its head."""
    return machine.run("bash", "-c", SCRAPE, "scrape", path)[1]


def serves(machine):
    """The unpacked image, whose command line runs as its user."""
    said = ran(machine, "the image is unpacked", *PODMAN, "image", "mount", "lmc")
    root = said.split()[-1]
    machine.run("sh", "-c", f"mkdir -p {root}/proc {root}/dev && mount -t proc proc {root}/proc && "
                            f"mount --rbind /dev {root}/dev")
    inside = ("chroot", "--userspec=65532:65532", "--groups=", root)
    ran(machine, "lmc --version runs", *inside, "/usr/bin/lmc", "--version")
    ran(machine, "lmc doctor finds no problem", *inside, "/usr/bin/lmc", "doctor")
    for what, line, health, engines, is_scraped in (
            ("the image's command line", ("/usr/bin/lmc", "serve"), 8080, 5555, False),
            ("the command line of LMCache's operator",
             ("/opt/venv/bin/lmcache", *OPERATOR.split()), 8081, 6555, True)):
        url = f"http://127.0.0.1:{health}"
        ok, said = machine.run(*inside, "/usr/bin/lmc", "status", "--url", url)
        check("the health check fails without a server", not ok, said)
        server = machine.start(*inside, *line)
        up = machine.eventually(*inside, "/usr/bin/lmc", "status", "--url", url)
        check(f"{what} starts the server, and its health check succeeds", up)
        ran(machine, "lmc bench gets the bytes that it stored", *inside, "/usr/bin/lmc", "bench",
            "--url", f"tcp://127.0.0.1:{engines}", "--http-url", url, "--count", "20")
        if is_scraped:
            said = scraped(machine, "/metrics")
            check("the operator's port has the metrics", "lmc_stores_total " in said, said[:200])
            said = scraped(machine, "/status")
            check("and nothing else", said.startswith("HTTP/1.0 404"), said[:200])
        machine.run("sh", "-c", "kill $(find /proc -maxdepth 1 -user 65532 -printf '%f ')")
        said, _ = server.communicate(timeout=DEADLINE)
        check("it ends when asked to", server.returncode == 0, said if server.returncode else "")
