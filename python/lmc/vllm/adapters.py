"""LoRA adapters: the names of their chunks, and adapters whose requests are not cached."""

import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmc.vllm.identity import adapter_digest

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

logger = logging.getLogger("vllm.lmc")

# An adapter as vLLM's own prefix cache knows it: its name and its path.
Key = tuple[str, str]
# For each file in a folder: name, time of its last change, size, inode.
Files = list[tuple[str, int, int, int]]


@dataclass(slots=True)
class _Loaded:
    # vLLM gives an adapter another number each time it loads it, except in place.
    number: int
    # Only for an adapter that vLLM loads in place.
    files: Files | None
    digest: str | None


class Adapters:
    """The adapters that an engine has used.

    vLLM's prefix cache keeps the blocks of an adapter when other weights are loaded under its name
    and path. Its blocks may then be of either weights, so its requests are no longer cached. Requests
    of an adapter whose files cannot be read are not cached either: its weights may change unnoticed.
    """

    def __init__(self) -> None:
        self._loaded: dict[Key, _Loaded] = {}
        self._refused: set[Key] = set()
        # The adapter that was last used under each of vLLM's numbers.
        self._of_number: dict[int, Key] = {}

    def named(self, lora: "LoRARequest") -> list[object] | None:
        """Returns an adapter's name, path and digest; `None` if its requests are not cached.

        The files are read at the first request after vLLM has loaded the adapter. vLLM loads an
        adapter in place again with each batch, so its files are checked each time.
        """
        key = (lora.lora_name, lora.lora_path)
        before = self._of_number.get(lora.lora_int_id, key)
        if lora.load_inplace and before != key and before not in self._refused:
            # Requests that still run have used the weights of both.
            self._refuse(before, "another adapter was loaded over it")
        self._of_number[lora.lora_int_id] = key
        if key in self._refused:
            return None
        loaded = self._loaded.get(key)
        if loaded is None or loaded.number != lora.lora_int_id or lora.load_inplace:
            try:
                read = _read(lora, loaded)
            except OSError as error:
                self._refuse(key, f"its files cannot be read ({error})")
                return None
            if loaded is not None and read.digest != loaded.digest:
                self._refuse(key, "its weights changed, and vLLM keeps blocks of both weights")
                return None
            self._loaded[key] = loaded = read
        return [*key, loaded.digest]

    def are_refused(self, lora: "LoRARequest | None") -> bool:
        """Returns True if the requests of an adapter are known to be no longer cached."""
        return lora is not None and (lora.lora_name, lora.lora_path) in self._refused

    def _refuse(self, key: Key, why: str) -> None:
        self._refused.add(key)
        logger.warning(
            "requests with the LoRA adapter %s at %s are not cached: %s; load it under another "
            "name or from another path, or restart vLLM",
            *key,
            why,
        )


def _read(lora: "LoRARequest", loaded: _Loaded | None) -> _Loaded:
    files = _files(lora.lora_path) if lora.load_inplace else None
    if loaded is not None and files is not None and files == loaded.files:
        return _Loaded(lora.lora_int_id, files, loaded.digest)
    return _Loaded(lora.lora_int_id, files, adapter_digest(lora.lora_path))


def _files(path: str) -> Files:
    """Returns the state of the files in an adapter's folder; an empty list for a hub name."""
    path = os.path.expanduser(path)
    if not os.path.isdir(path):
        return []
    found = []
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.is_file():
                about = entry.stat()
                found.append((entry.name, about.st_mtime_ns, about.st_size, about.st_ino))
    return sorted(found)
