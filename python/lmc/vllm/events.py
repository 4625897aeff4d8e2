"""KV events of stored chunks: they tell routers which blocks the server has.

The scheduler's side describes the blocks of a store. A worker's side creates an event for each chunk
when its store is committed. The scheduler's side passes an event to vLLM when every storing rank has
named it. This module does not import vLLM: `kv_events.py` has the parts of its interface.
"""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from lmc._native import WorkerAdapter

BlockHash = bytes | int
# Limit on the events that wait for a rank; beyond it the oldest are dropped. A rank whose store failed
# never names its chunk.
MAX_WAITING = 4096


@dataclass(slots=True)
class StoredBlocks:
    """The content of vLLM's events about the blocks of one store."""

    hashes: list[BlockHash]
    # Hash of the block before the first; `None` at the start of a prompt.
    parent: BlockHash | None
    token_ids: list[int]
    # Further content of each block's hash, in addition to its tokens.
    extra_keys: list[Any] | None
    lora_id: int | None
    lora_name: str | None
    # Session of the request whose store this is.
    session_id: str | None
    # The blocks are after the prompt's last whole chunk, and each block is a chunk by itself.
    is_tail: bool


class EventSource:
    """Describes stores in the scheduler. Exists only if vLLM's KV events are on."""

    def __init__(
        self,
        block_size: int,
        spelled: Callable[[bytes], BlockHash],
        extra_keys: Callable[["Request", int, int], list[Any] | None],
    ) -> None:
        """`spelled` returns a block hash in vLLM's published form, `extra_keys` those of tokens."""
        self._block_size = block_size
        self._spelled = spelled
        self._extra_keys = extra_keys
        self._next_number = 0

    def describe(
        self, request: "Request", start: int, end: int, *, is_tail: bool
    ) -> tuple[int, StoredBlocks]:
        """Returns a number for the store of these tokens, and its blocks."""
        size, lora = self._block_size, request.lora_request
        first, last = start // size, end // size
        hashes = [self._spelled(found) for found in request.block_hashes[max(first - 1, 0) : last]]
        number = self._next_number
        self._next_number += 1
        return number, StoredBlocks(
            hashes=hashes[1:] if first else hashes,
            parent=hashes[0] if first else None,
            token_ids=request.all_token_ids[start:end],
            extra_keys=self._extra_keys(request, start, end),
            lora_id=None if lora is None else lora.adapter_id,
            lora_name=None if lora is None else lora.name,
            session_id=request.session_id,
            is_tail=is_tail,
        )


class StoredChunks:
    """Creates events in a worker."""

    def __init__(
        self,
        adapter: "WorkerAdapter",
        block_size: int,
        event: Callable[..., Hashable],
    ) -> None:
        """`event` creates vLLM's event for a chunk."""
        self._adapter = adapter
        self._block_size = block_size
        self._event = event
        # Stores that were submitted and have not ended, by their numbers.
        self._submitted: dict[int, StoredBlocks] = {}

    def submitted(self, stores: dict[int, StoredBlocks]) -> None:
        """Records the stores that a step begins."""
        self._submitted |= stores

    def take(self) -> list[Hashable]:
        """Returns the events of the chunks that were committed since the last call."""
        # A chunk that was evicted and stored again within a step is named once.
        events: dict[tuple[BlockHash, ...], Hashable] = {}
        for number, chunks in self._adapter.take_ended_stores():
            stored = self._submitted.pop(number, None)
            if stored is None:
                continue
            per_chunk = 1 if stored.is_tail else self._adapter.num_blocks_per_chunk
            for first in (chunk * per_chunk for chunk in chunks):
                name = tuple(stored.hashes[first : first + per_chunk])
                events[name] = self._of_chunk(stored, first, per_chunk)
        return list(events.values())

    def _of_chunk(self, stored: StoredBlocks, first: int, blocks: int) -> Hashable:
        size, last = self._block_size, first + blocks
        return self._event(
            block_hashes=stored.hashes[first:last],
            parent_block_hash=stored.hashes[first - 1] if first else stored.parent,
            token_ids=stored.token_ids[first * size : last * size],
            block_size=size,
            extra_keys=stored.extra_keys and stored.extra_keys[first:last],
            lora_id=stored.lora_id,
            lora_name=stored.lora_name,
            session_id=stored.session_id,
        )


class EventTally:
    """Events that wait until all ranks have named them, and complete events for vLLM."""

    def __init__(self, ranks: int, chunk_of: Callable[[Any], Hashable]) -> None:
        """`ranks`: number of workers that each store their part of a chunk.

        `chunk_of` names an event's chunk: ranks may store their parts for different requests.
        """
        self._ranks = ranks
        self._chunk_of = chunk_of
        self._waiting: dict[Hashable, int] = {}
        self._complete: list[Hashable] = []
        self.dropped = 0

    def add(self, events: Iterable[Hashable]) -> None:
        """Takes events from workers, each event once for each worker."""
        for event in events:
            chunk = self._chunk_of(event)
            named = self._waiting.pop(chunk, 0) + 1
            if named >= self._ranks:
                self._complete.append(event)
                continue
            self._waiting[chunk] = named
            if len(self._waiting) > MAX_WAITING:
                del self._waiting[next(iter(self._waiting))]
                self.dropped += 1

    def take(self) -> list[Hashable]:
        """Returns the events that all ranks have named since the last call."""
        complete, self._complete = self._complete, []
        return complete
