"""Starts a server on this host if none answers."""

import json
import logging
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

logger = logging.getLogger("vllm.lmc")

# Seconds to wait for a server to start. A drive may take longer to open; the engine does not wait for it.
START_TIMEOUT = 30
# Keys of the answer of `lmc start`.
ANSWER = {"address", "http", "started", "log", "warnings"}
NO_CACHE = "no KV cache: %s; requests run without the cache until a server answers"


def program() -> str | None:
    """Returns the path of the `lmc` program of this package."""
    for file in metadata.files("lmc") or []:
        if file.name == "lmc" and (path := Path(file.locate())).is_file():
            return str(path)
    return None


def start(flags: Sequence[str]) -> None:
    """Starts a server of this user in the background, unless one answers.

    The server belongs to no engine, and ends ten minutes after the last engine has gone. A failure is
    one line in the log.
    """
    try:
        found = _started(flags)
        for warning in found["warnings"]:
            logger.warning(warning)
        if found["started"]:
            logger.info(
                "started a server at %s (lmc status --url %s); its log is %s",
                *(found[key] for key in ("address", "http", "log")),
            )
    except Exception as error:  # An engine without a cache is better than no engine.
        logger.warning(NO_CACHE, _one_line(str(error) or repr(error)))


def _started(flags: Sequence[str]) -> dict[str, Any]:
    """Runs `lmc start`, and returns its answer."""
    if (path := program()) is None:
        raise RuntimeError("no server can be started: install lmc's wheel, which has the program")
    line = [path, "start", "--json", f"--timeout-seconds={START_TIMEOUT}"]
    done = subprocess.run(
        [*line, "--", *flags],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        # `lmc start` is killed if it hangs, but not the server that it has started.
        timeout=START_TIMEOUT + 10,
        # A session of its own, because vLLM kills processes by their session and by their parents.
        start_new_session=True,
        check=False,
    )
    # If vLLM ignores the exits of its children, the code is always 0.
    if done.returncode != 0 or not done.stdout:
        raise RuntimeError(done.stderr.strip() or f"{path} start ended with {done.returncode}")
    found = json.loads(done.stdout)
    if not isinstance(found, dict) or not found.keys() >= ANSWER:
        raise RuntimeError(f"{path} is not the program of this package")
    return found


def _one_line(text: str) -> str:
    return "; ".join(line.strip() for line in text.splitlines() if line.strip())
