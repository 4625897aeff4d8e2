"""Compares what LmcConnector uses of vLLM with another version: interface_check.py VERSION

Reads the modules out of that version's wheel on PyPI, by ranges and without installing it, and
compares them with python/lmc/vllm/interface.json as the connector does when it starts. The release
that the table was made of is read first, so that a fault of the reading is seen.
"""

import ast
import http.client
import io
import json
import sys
import urllib.request
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "python"))

from checks import check, finish
from lmc.vllm import interface

INDEX = "https://pypi.org/simple/vllm/"
JSON = "application/vnd.pypi.simple.v1+json"
TIMEOUT = 60


class RemoteFile(io.RawIOBase):
    """A file on a server that gives ranges."""

    def __init__(self, url):
        self.url, self.at = url, 0
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"),
                                    timeout=TIMEOUT) as answer:
            self.size = int(answer.headers["Content-Length"])

    def seekable(self):
        return True

    def readable(self):
        return True

    def seek(self, offset, whence=io.SEEK_SET):
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.size}[whence]
        self.at = start + offset
        return self.at

    def readinto(self, into):
        end = min(self.size, self.at + len(into))
        if end <= self.at:
            return 0
        asked = urllib.request.Request(self.url,
                                       headers={"Range": f"bytes={self.at}-{end - 1}"})
        with urllib.request.urlopen(asked, timeout=TIMEOUT) as answer:
            if answer.status != 206:
                raise OSError(f"{self.url}: no ranges")
            content = answer.read(end - self.at)
        into[: len(content)] = content
        self.at += len(content)
        return len(content)


def wheel(version):
    """Opens the wheel of a version, such as 0.33.0."""
    asked = urllib.request.Request(INDEX, headers={"Accept": JSON})
    with urllib.request.urlopen(asked, timeout=TIMEOUT) as answer:
        files = json.load(answer)["files"]
    urls = [file["url"] for file in files if file["filename"].startswith(f"vllm-{version}-")
            and file["filename"].endswith("x86_64.whl")]
    if not urls:
        raise SystemExit(f"PyPI has no wheel of vLLM {version} for x86-64")
    return zipfile.ZipFile(io.BufferedReader(RemoteFile(urls[0]), 1 << 16))


# Methods that vLLM calls around its sleep; the release that lmc is tested with has none of them.
SLEEP = ("unregister_kv_caches", "restore_kv_caches")


def parameters(function):
    """The parameters of a function, as `interface` shows those of a loaded one."""
    found = function.args
    positional = found.posonlyargs + found.args
    required = len(positional) - len(found.defaults)
    shown = [item.arg + "=" * (at >= required) for at, item in enumerate(positional)]
    if found.vararg:
        shown.append(f"*{found.vararg.arg}")
    shown += [item.arg + "=" * (default is not None)
              for item, default in zip(found.kwonlyargs, found.kw_defaults)]
    if found.kwarg:
        shown.append(f"**{found.kwarg.arg}")
    return ", ".join(shown)


def members(classes, name):
    """The members of a class and of its bases in the same module; for an empty name the functions
    of the module."""
    owner, found = classes[name], {}
    for base in getattr(owner, "bases", ()):
        if isinstance(base, ast.Name) and base.id in classes:
            found |= members(classes, base.id)
    for node in ast.walk(owner) if name else ():
        # Fields that a constructor sets.
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.setdefault(node.attr, None)
    for node in owner.body:
        if isinstance(node, ast.AnnAssign) and name:
            found[node.target.id] = None
        elif isinstance(node, ast.Assign) and name:
            # Members of an enumeration.
            found |= {item.id: None for item in node.targets if isinstance(item, ast.Name)}
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            decorators = {item.id for item in node.decorator_list if isinstance(item, ast.Name)}
            found[node.name] = None if decorators & {"property", "cached_property"} \
                else parameters(node)
    return found


def abstract_methods(owner):
    """The methods that a class leaves to its heirs."""
    return {node.name for node in owner.body if isinstance(node, ast.FunctionDef)
            and any(isinstance(item, ast.Name) and item.id == "abstractmethod"
                    for item in node.decorator_list)}


def table(archive):
    """The table of a wheel, as `interface.installed` makes it of the installed vLLM; the methods that
    a connector must have, and all of its base class."""
    found, abstract, all_of_base = {}, set(), set()
    for name, used in interface.USED.items():
        module, _, owner = name.partition(":")
        try:
            tree = ast.parse(archive.read(module.replace(".", "/") + ".py"))
            classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
            classes[""] = tree
            has = members(classes, owner)
        except KeyError:
            continue
        found[name] = {member: has[member] for member in used if member in has}
        if module == interface.CONNECTOR:
            abstract |= abstract_methods(classes[owner])
            all_of_base |= set(has)
    return found, abstract, all_of_base


def main(version):
    release, wanted = interface.expected()
    for read in (f"{release}.0", version):
        try:
            found, abstract, all_of_base = table(wheel(read))
        except (OSError, http.client.HTTPException) as error:
            print(f"SKIPPED interface: {INDEX} cannot be read: {error}")
            print("0 passed, 0 failed, 1 skipped")
            return
        missing, changed = interface.compare(wanted, found)
        check(f"vLLM {read} lacks nothing of what lmc uses", not missing, ", ".join(missing))
        known = {member for members in interface.USED.values() for member in members}
        check(f"vLLM {read} asks for no method that lmc does not have", abstract <= known,
              ", ".join(sorted(abstract - known)))
        if read == version:
            lacks = [name for name in SLEEP if name not in all_of_base]
            check(f"vLLM {read} says when it sleeps", not lacks, ", ".join(lacks))
        check(f"vLLM {read} changed nothing of what lmc uses", not changed, ", ".join(changed))
    finish()


if __name__ == "__main__":
    main(sys.argv[1])
