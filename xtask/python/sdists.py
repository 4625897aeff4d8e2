"""Files of source distributions on PyPI that are in no wheel.

As a program: prints the path of one, by its archive, the checksum of that, and its name in it.
"""

import hashlib
import io
import json
import os
import sys
import tarfile
import tempfile
import urllib.request
from pathlib import Path

INDEX = "https://pypi.org/simple/"
JSON = "application/vnd.pypi.simple.v1+json"
TIMEOUT = 60


def sdist_file(archive, sha256, member):
    """The path of a member of `archive`, such as vllm-0.33.0.tar.gz, kept in the cache folder.

    Raises OSError where it cannot be had, and ValueError where the archive is another one.
    """
    cache = Path(os.environ.get("LMC_CACHE_DIR") or Path.home() / ".cache" / "lmc")
    kept = cache / f"sdist-{sha256[:12]}" / Path(member).name
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(fileobj=io.BytesIO(download(archive, sha256))) as files:
            content = files.extractfile(f"{archive.removesuffix('.tar.gz')}/{member}").read()
        with tempfile.NamedTemporaryFile(dir=kept.parent, delete=False) as made:
            made.write(content)
        os.replace(made.name, kept)
    return str(kept)


def download(archive, sha256):
    project = archive.rsplit("-", 1)[0]
    asked = urllib.request.Request(f"{INDEX}{project}/", headers={"Accept": JSON})
    with urllib.request.urlopen(asked, timeout=TIMEOUT) as answer:
        files = json.load(answer)["files"]
    urls = [file["url"] for file in files if file["filename"] == archive]
    if not urls:
        raise OSError(f"PyPI has no {archive}")
    with urllib.request.urlopen(urls[0], timeout=TIMEOUT) as answer:
        content = answer.read()
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise ValueError(f"{archive} has the SHA-256 {found}, expected {sha256}")
    return content


if __name__ == "__main__":
    print(sdist_file(*sys.argv[1:]))
