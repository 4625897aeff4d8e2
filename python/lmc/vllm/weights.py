"""The name of the weights of an engine, which changes when vLLM resets its caches."""

import logging
import uuid

logger = logging.getLogger("vllm.lmc")

# Only requests with an equal entry find a chunk.
TAG = "lmcache.tag.lmc.weights"
MAX_NAME = 256
# Limit on the characters of a file; a longer file counts as having no name.
MAX_FILE = 1024


class Weights:
    """The weights' part of chunk names.

    vLLM resets its caches before or after weights change. From then on chunks get a new name. The
    user may provide the new name in a file, so that replicas share chunks.
    """

    def __init__(self, setting: str) -> None:
        """`setting`: empty for the weights of the model's files, a name, or `@` and a file's path.

        Raises `ValueError` for a file without a name.
        """
        self._path = setting[1:] if setting.startswith("@") else None
        try:
            self.name = setting if self._path is None else _read(self._path)
        except OSError as error:
            raise ValueError(f"lmc.weights: {error}") from error
        if len(self.name) > MAX_NAME or (self._path is not None and not self.name):
            raise ValueError(
                f"lmc.weights {setting}: expected a name of 1 to {MAX_NAME} characters, also in a file"
            )
        self._used = {self.name}

    def renew(self) -> None:
        """Takes the next name: the name in the file if it is new, or else a random name."""
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
                    "lmc.weights: %s has no new name, so no other engine shares chunks with this engine "
                    "until the next reset; write a new name into the file before a reset",
                    self._path,
                )
        self._used.add(name)
        self.name = name

    def tags(self) -> dict[str, str]:
        """Returns the entry for each request."""
        return {TAG: self.name} if self.name else {}


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        text = file.read(MAX_FILE + 1)
    return text.strip() if len(text) <= MAX_FILE else text
