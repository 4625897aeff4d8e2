"""Checks a wheel: wheel_check.py GLIBC WHEEL

It names the Python versions and machines that it runs on and the texts that belong to it. Every
program and library in it needs no later glibc than that, and no library that is not on every
machine. It installs into an environment of its own without any other package, and works there: the
server, its commands, and a store and a load by the adapters.

Prints one line a check and ends with `N passed, N failed`. Every wait has a deadline.
"""

import contextlib
import email
import io
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import venv
import zipfile

from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection

from checks import check, finish, free_port

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
# What manylinux allows of what we use.
LIBRARIES = {"libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1",
             "libgcc_s.so.1", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
# Most bytes that the wheel may have.
MAX_BYTES = 15 << 20
DEADLINE = 120


def text(*path):
    """A file of this repository."""
    with open(os.path.join(ROOT, *path)) as f:
        return f.read()


def numbers(version):
    """2.28 as (2, 28); none for a name that is no version, such as PRIVATE."""
    parts = version.split(".")
    return tuple(map(int, parts)) if all(part.isdecimal() for part in parts) else None


def needs(elf):
    """Libraries that a file needs, and the names of glibc's versions; without their prefix."""
    libraries, versions = set(), set()
    for section in elf.iter_sections():
        if section.name == ".dynamic":
            libraries |= {tag.needed for tag in section.iter_tags("DT_NEEDED")}
        if isinstance(section, GNUVerNeedSection):
            for _, names in section.iter_versions():
                versions |= {n.name.removeprefix("GLIBC_") for n in names
                             if n.name.startswith("GLIBC_")}
    return libraries, versions


def runs_with(versions, glibc):
    """Whether a file that needs these versions runs with that glibc, and why."""
    if not versions:
        return False, "it needs no version of glibc, so it was not linked to one"
    private = sorted(v for v in versions if numbers(v) is None)
    if private:
        return False, f"needs GLIBC_{', GLIBC_'.join(private)}"
    latest = max(versions, key=numbers)
    return numbers(latest) <= numbers(glibc), f"needs {latest}"


def files(archive, glibc):
    """The programs and libraries, and the files of the package."""
    programs = []
    for name in archive.namelist():
        content = archive.read(name)
        if not content.startswith(b"\x7fELF"):
            continue
        programs.append(os.path.basename(name))
        libraries, versions = needs(ELFFile(io.BytesIO(content)))
        ok, why = runs_with(versions, glibc)
        check(f"{name} runs with glibc {glibc}", ok, f"{why}, {len(content) / 1e6:.1f} MB")
        check(f"{name} needs no library that may be missing", libraries <= LIBRARIES,
              ", ".join(sorted(libraries)))
    check("the wheel holds the program and the module",
          sorted(programs) == ["_native.abi3.so", "lmc"], str(programs))
    package = {name for name in archive.namelist() if name.startswith("lmc/")}
    wanted = {"lmc/_native.abi3.so"}
    for folder, _, names in os.walk(os.path.join(ROOT, "python", "lmc")):
        if os.path.basename(folder) != "__pycache__":
            relative = os.path.relpath(folder, os.path.join(ROOT, "python"))
            wanted |= {os.path.join(relative, name) for name in names}
    check("the wheel holds the files of python/lmc and the module, and no others",
          package == wanted, str(sorted(package ^ wanted)))


def metadata(archive, wheel, glibc):
    """The tags, the metadata and the texts. Returns the version."""
    [folder] = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name}
    about = email.message_from_bytes(archive.read(f"{folder}/METADATA"))
    version = about["Version"]
    tag = f"cp310-abi3-manylinux_{glibc.replace('.', '_')}_{platform.machine()}"
    name = os.path.basename(wheel)
    check("the wheel's name has its version and tag", name == f"lmc-{version}-{tag}.whl", name)
    tags = email.message_from_bytes(archive.read(f"{folder}/WHEEL")).get_all("Tag")
    check(f"its only tag is {tag}", tags == [tag], str(tags))
    for key, wanted in (("Name", ["lmc"]), ("Requires-Python", [">=3.10"]),
                        ("Requires-Dist", None), ("License-Expression", ["Apache-2.0"]),
                        ("License-File", ["LICENSE"])):
        found = about.get_all(key)
        check(f"its metadata have {key} {wanted}", found == wanted, str(found))
    licence = f"{folder}/licenses/LICENSE"
    check("it holds the licence", licence in archive.namelist()
          and archive.read(licence).decode() == text("LICENSE"))
    readme = about.get_payload()
    check("its description is python/README.md",
          readme.strip() == text("python", "README.md").strip()
          and about["Description-Content-Type"].startswith("text/markdown"),
          about["Description-Content-Type"])
    lines = [transfer_config(page) for page in (readme, text("docs", "connector.md"))]
    check("its description has the line for vLLM of docs/connector.md",
          lines[0] is not None and lines[0] == lines[1], str(lines))
    return version


def transfer_config(page):
    """The value of --kv-transfer-config for lmc's own connector that a page gives."""
    found = re.search(r"""--kv-transfer-config '(\{"kv_connector":"LmcConnector".*?\})'""", page)
    return found and found[1]


def run(*command):
    """Runs a command to its end. Whether it succeeded, and what it printed."""
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, timeout=DEADLINE)
    return done.returncode == 0, done.stdout.strip()


def ran(name, *command):
    """Checks that a command succeeds. Returns what it printed."""
    ok, said = run(*command)
    check(name, ok)
    if not ok:
        print(said)
    return said


def installs(wheel, version):
    """Installs the wheel alone, into a new environment of this Python, and uses it."""
    with tempfile.TemporaryDirectory(prefix="lmc-wheel-") as folder:
        venv.create(folder, with_pip=True)
        python = os.path.join(folder, "bin", "python")
        lmc = os.path.join(folder, "bin", "lmc")
        pip = [python, "-m", "pip", "--disable-pip-version-check"]
        ran(f"it installs without any other package for Python {platform.python_version()}",
            *pip, "install", "--quiet", "--no-index", wheel)
        listed = ran("pip lists it", *pip, "list", "--format", "freeze")
        # Python brings the first two itself.
        packages = {line.split("==")[0] for line in listed.split()} - {"pip", "setuptools"}
        check("it is the only package", packages == {"lmc"}, str(packages))
        said = ran("lmc --version runs", lmc, "--version")
        check("the program has the wheel's version", said.split()[:2] == ["lmc", version],
              said.partition("\n")[0])
        for shell in ("bash", "zsh", "fish"):
            ok, said = run(lmc, "completions", shell)
            check(f"lmc completions {shell} prints completions", ok and "serve" in said)
        code = ("import time; began = time.perf_counter(); import lmc, lmc._native; "
                "took = time.perf_counter() - began; import lmc.ops, lmc.vllm.scheduler; "
                "print(f'import of lmc._native: {took * 1000:.1f} ms')")
        print(ran("its package is imported without vLLM", python, "-I", "-c", code))
        serves(folder, lmc, python)
        others(folder, python)


def serves(folder, lmc, python):
    """The server, what asks it, and the adapters."""
    port, http = str(free_port()), str(free_port())
    log = os.path.join(folder, "serve.log")
    with open(log, "w") as out:
        server = subprocess.Popen(
            [lmc, "serve", "--port", port, "--http-port", http, "--l1-size-gb", "0.1"],
            stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    try:
        up = listens(server, int(port)) and listens(server, int(http))
        if not check("lmc serve starts", up):
            return
        ran("lmc status asks it", lmc, "status", "--url", f"http://127.0.0.1:{http}")
        ran("the adapters store and load through it", python, "-I",
            os.path.join(HERE, "wheel_request.py"), port)
        server.send_signal(signal.SIGTERM)
        check("it ends when asked to", server.wait(DEADLINE) == 0, str(server.returncode))
    finally:
        server.kill()
        server.wait()
        with open(log) as said:
            if server.returncode:
                print(said.read())


def listens(server, port):
    """Waits until a server's port is open. Whether it is before the server or the time has ended."""
    end = time.monotonic() + DEADLINE
    while server.poll() is None and time.monotonic() < end:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return True
        time.sleep(0.02)
    return False


def others(folder, python):
    """The other versions of Python on this machine that the tag names."""
    site = subprocess.run([python, "-c", "import lmc; print(lmc.__path__[0])"],
                          capture_output=True, text=True, check=True).stdout.strip()
    for minor in range(10, 20):
        other = shutil.which(f"python3.{minor}")
        # A name may be there without a Python behind it.
        if other is None or minor == sys.version_info.minor or not run(other, "--version")[0]:
            continue
        code = (f"import sys; sys.path.append({os.path.dirname(site)!r}); "
                "import lmc._native, lmc.vllm.scheduler; print(sys.version.split()[0])")
        ran(f"python3.{minor} imports it", other, "-I", "-c", code)


def main():
    glibc, wheel = sys.argv[1:]
    size = os.path.getsize(wheel)
    check(f"the wheel is smaller than {MAX_BYTES / 1e6:.1f} MB", size < MAX_BYTES,
          f"{size / 1e6:.1f} MB")
    with zipfile.ZipFile(wheel) as archive:
        version = metadata(archive, wheel, glibc)
        files(archive, glibc)
    installs(wheel, version)
    finish()


if __name__ == "__main__":
    main()
