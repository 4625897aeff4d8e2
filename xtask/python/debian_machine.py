"""A Debian in namespaces of its own, with or without systemd, of which nothing is left when it ends.

Its root is a layer in memory over the folders of debian.sh. It has processes, a network, a /dev, a
/dev/shm and control groups of its own.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import tempfile
import time

from checks import check

DEADLINE = 120
HERE = os.path.dirname(os.path.abspath(__file__))
LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1
# Where control groups of version 2 are, beside those of version 1 or alone; none where there are none.
CGROUPS = next((path for path in ("/sys/fs/cgroup/unified", "/sys/fs/cgroup")
                if os.path.exists(os.path.join(path, "cgroup.controllers"))), None)
# The arguments: the layers, the folder of the root, the control group or nothing, and the command that
# becomes process 1.
BOOT = r"""
layers=$1 at=$2 groups=$3 devices="null zero full random urandom tty"
shift 3
mount -t tmpfs tmpfs "$at"
mkdir "$at/upper" "$at/work" "$at/root"
root=$at/root
mount -t overlay overlay -o "lowerdir=$layers,upperdir=$at/upper,workdir=$at/work" "$root"
mount -t proc proc "$root/proc"
mount -t sysfs -o ro sysfs "$root/sys"
mount -t tmpfs -o mode=755 tmpfs "$root/run"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
mkdir -m 1777 "$root/dev/shm"
mount -t tmpfs -o mode=1777,size=1g tmpfs "$root/dev/shm"
for device in $devices; do
    touch "$root/dev/$device"
    mount --bind "/dev/$device" "$root/dev/$device"
done
ln -s /proc/self/fd "$root/dev/fd"
ip link set lo up
if [ -n "$groups" ]; then mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"; fi
cd "$root"
mkdir old
pivot_root . old
umount -l /old
rmdir /old
echo booted
exec "$@"
"""
SYSTEMD = ["/lib/systemd/systemd", "--system", "--unit=sysinit.target", "--log-target=journal"]


def debian():
    """The folder of a Debian without anything else, or none and the reason."""
    done = subprocess.run(["bash", os.path.join(HERE, "debian.sh")], stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, text=True, timeout=1200)
    last = done.stdout.strip().splitlines()[-1]
    if done.returncode not in (0, 75):
        raise RuntimeError("debian.sh failed: see above")
    return (None, last) if done.returncode else (last, "")


def ran(machine, name, *command):
    """Checks that a command succeeds in a machine. Returns what it printed."""
    ok, said = machine.run(*command)
    check(name, ok, "" if ok else said)
    return said


class Machine:
    """A running Debian of these layers, the upper ones first; process 1 is systemd or does nothing."""

    def __init__(self, folder, *layers, systemd=False):
        self.at = tempfile.mkdtemp(prefix="lmc-machine-")
        self.cgroup = None
        command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--uts", "--ipc", "--net"]
        if CGROUPS:
            self.cgroup = os.path.join(CGROUPS, os.path.basename(self.at))
            os.mkdir(self.cgroup)
            command.append("--cgroup")
        self.outer = subprocess.Popen(
            command + ["bash", "-euc", BOOT, "boot",
                       ":".join(os.path.join(folder, layer) for layer in layers), self.at,
                       self.cgroup or ""]
            + (SYSTEMD if systemd else ["sleep", "infinity"]),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
            env={"PATH": os.environ["PATH"], "container": "lmc"}, preexec_fn=self._enter)
        if self.outer.stdout.readline() != "booted\n":
            self.end()
            raise RuntimeError("the machine did not boot: see above")
        with open(f"/proc/{self.outer.pid}/task/{self.outer.pid}/children") as children:
            self.process = int(children.read())
        if systemd and not self.eventually("sh", "-c", "systemctl is-system-running --wait | "
                                           "grep -qE 'running|degraded'"):
            said = self.run("systemctl", "--failed", "--no-pager")[1]
            self.end()
            raise RuntimeError(f"systemd has not started the machine: {said}")

    def _enter(self):
        # The machine ends with this program, however that ends.
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if self.cgroup:
            with open(os.path.join(self.cgroup, "cgroup.procs"), "w") as processes:
                processes.write(str(os.getpid()))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end()

    def command(self, *command):
        """The line that runs a command there."""
        cgroup = ["--cgroup"] if self.cgroup else []
        return ["nsenter", "--target", str(self.process), "--mount", "--pid", "--uts", "--ipc",
                "--net", *cgroup, "--root", "--wd", "env", "-i",
                "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C.UTF-8", *command]

    def run(self, *command):
        """Runs a command to its end. Whether it succeeded, and what it printed."""
        done = subprocess.run(self.command(*command), stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              timeout=DEADLINE)
        return done.returncode == 0, done.stdout.strip()

    def start(self, *command):
        """Starts a command, whose output is the caller's to read."""
        return subprocess.Popen(self.command(*command), stdin=subprocess.DEVNULL,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def put(self, path, inside):
        """Copies a file into the machine."""
        with open(path, "rb") as content:
            subprocess.run(self.command("sh", "-c", 'cat >"$1"', "put", inside), stdin=content,
                           check=True, timeout=DEADLINE)

    def write(self, text, inside):
        """Writes a text file in the machine, and the folder that it lies in."""
        subprocess.run(self.command("sh", "-c", 'mkdir -p "$(dirname "$1")" && cat >"$1"', "write",
                                    inside), input=text, text=True, check=True, timeout=DEADLINE)

    def files(self):
        """Paths of everything on the root file system, with modes and owners, but for the records that
        package managers keep."""
        ok, said = self.run("find", "/", "-xdev", "(", "-path", "/var/lib/dpkg", "-o", "-path",
                            "/var/lib/apt", "-o", "-path",
                            "/var/log", "-o", "-path", "/var/cache", "-o", "-path",
                            "/var/lib/systemd", ")", "-prune", "-o", "-printf", "%M %u %g %p\n")
        if not ok:
            raise RuntimeError(said)
        return set(said.splitlines())

    def eventually(self, *command):
        """Waits until a command succeeds. Whether it did within the deadline."""
        end = time.monotonic() + DEADLINE
        while time.monotonic() < end:
            if self.run(*command)[0]:
                return True
            time.sleep(0.05)
        return False

    def end(self):
        """Kills every process of the machine, and takes away what it was made of."""
        self.outer.kill()
        self.outer.wait()
        if self.cgroup:
            end = time.monotonic() + DEADLINE
            # Processes that were killed leave their groups one by one.
            while os.path.isdir(self.cgroup) and time.monotonic() < end:
                for folder, _, _ in os.walk(self.cgroup, topdown=False):
                    with contextlib.suppress(OSError):
                        os.rmdir(folder)
        shutil.rmtree(self.at, ignore_errors=True)
