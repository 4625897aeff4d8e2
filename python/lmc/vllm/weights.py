"""The name of the weights that an engine computes with, which changes when vLLM resets its caches."""

import logging
import uuid

logger = logging.getLogger("vllm.lmc")

# Chunks are found by requests with an equal entry only.
TAG = "lmcache.tag.lmc.weights"
MAX_NAME = 256
# Characters of a file that are read; a longer one has no name, rather than the beginning of one.
MAX_FILE = 1024


class Weights:
    """The part of the weights in the names of chunks.

    vLLM resets its caches when weights change, before or after. From then on chunks get a name that
    no chunk has had, unless the user has another one ready in a file, so that replicas share.
    """

    def __init__(self, setting: str) -> None:
        """`setting`: empty for those of the model's files, a name, or `@` and a file's path.

        Raises `ValueError` for a file without a name.
        """
        self._path = setting[1:] if setting.startswith("@") else None
        try:
            self.name = setting if self._path is None else _read(self._path)
        except OSError as error:
            raise ValueError(f"lmc.weights: {error}") from error
        if len(self.name) > MAX_NAME or (self._path is not None and not self.name):
            raise ValueError(
                f"lmc.weights needs a name of 1 to {MAX_NAME} characters, also in a file: {setting}"
            )
        self._used = {self.name}

    def renew(self) -> None:
        """Takes the next name: that of the file if it is a new one, or else one of its own."""
        name = ""
        if self._path is not None:
            try:
                name = _read(self._path)
            except OSError as error:
                logger.warning("lmc.weights: %s", error)
        if not name or len(name) > MAX_NAME or name in self._used:
            name = f"reset-{uuid.uuid4()}"
            if self._path is not None:
                logger.warning(
                    "no new name of weights in %s: no other engine shares chunks with this one "
                    "until the next reset",
                    self._path,
                )
        self._used.add(name)
        self.name = name

    def tags(self) -> dict[str, str]:
        """Returns the entry of each request."""
        return {TAG: self.name} if self.name else {}


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        text = file.read(MAX_FILE + 1)
    return text.strip() if len(text) <= MAX_FILE else text
