"""KV events of stored chunks, in vLLM's classes."""

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import MEDIUM_CPU, BlockStored, KVCacheEvent, KVConnectorKVEvents
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)

from lmc.vllm.events import EventSource

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request


def are_wanted(config: "VllmConfig") -> bool:
    """Returns True if vLLM publishes KV events."""
    events = config.kv_events_config
    return events is not None and events.enable_kv_cache_events


def event_source(block_size: int) -> EventSource:
    """Returns the object that describes stores in the scheduler."""

    def extra_keys(request: "Request", start: int, end: int) -> list[Any] | None:
        keys, image = [], 0
        for at in range(start, end, block_size):
            of_block, image = generate_block_hash_extra_keys(request, at, at + block_size, image)
            keys.append(of_block)
        return to_event_extra_keys(keys)

    return EventSource(block_size, maybe_convert_block_hash, extra_keys)


def stored(**fields: Any) -> BlockStored:
    """Returns the event for a chunk that the server now has."""
    # A chunk holds the blocks of all KV groups.
    return BlockStored(medium=MEDIUM_CPU, group_idx=0, **fields)


def chunk_of(event: BlockStored) -> tuple[Any, ...]:
    """Returns a name for the chunk of an event that does not depend on the request."""
    return tuple(event.block_hashes)


class LmcKVEvents(KVConnectorKVEvents):
    """Events of one step, each with the number of workers that have named it.

    vLLM merges the events of all workers of a step. `EventTally` counts over several steps, because
    ranks store at different times.
    """

    def __init__(self, events: Iterable[KVCacheEvent]) -> None:
        self._events = Counter(events)
        self._workers = 1

    def add_events(self, events: list[KVCacheEvent]) -> None:
        self._events.update(events)

    def aggregate(self) -> "LmcKVEvents":
        """Keeps the events that every worker has named in this step."""
        self._events = Counter(
            event for event, count in self._events.items() if count >= self._workers
        )
        self._workers = 1
        return self

    def increment_workers(self, count: int = 1) -> None:
        self._workers += count

    def get_all_events(self) -> list[KVCacheEvent]:
        return list(self._events.elements())

    def get_number_of_workers(self) -> int:
        return self._workers

    def clear_events(self) -> None:
        self._events.clear()
        self._workers = 1
