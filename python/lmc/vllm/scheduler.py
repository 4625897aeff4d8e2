"""The scheduler's side of the connector: lookups, and the loads and stores of workers.

No method waits. The workers' state is not known here; decisions follow from what was sent to them.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from lmc.ops import LoadStoreOp
from lmc.vllm.adapters import Adapters
from lmc.vllm.events import EventSource
from lmc.vllm.metadata import Step
from lmc.vllm.request import (
    RequestState,
    effective_salt,
    trace_parent,
    transfer_configs,
    without_wait,
)
from lmc.vllm.weights import Weights

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from lmc._native import SchedulerAdapter

# Value of `preemptions` for a request whose lookup no longer counts.
NO_LOOKUP = -1
# Block id in place of a block that was freed.
NULL = 0


class SchedulerSide:
    """State of all requests that the scheduler knows."""

    def __init__(
        self,
        adapter: "SchedulerAdapter",
        chunk_hashes: Callable[[Sequence[bytes], int, int], bytes],
        weights: Weights,
        *,
        block_size: int,
        by_hash: bool,
        can_store: bool,
        looks_up_early: bool = False,
        volatile_tokens: int = 0,
        min_load_tokens: int = 1,
        windows: Sequence[int | None] = (None,),
        events: EventSource | None = None,
    ) -> None:
        """`looks_up_early`: requests are looked up when they arrive.

        The last `volatile_tokens` of a request may be computed again (speculative decoding). Fewer
        than `min_load_tokens` tokens are not loaded, because a load takes some steps.
        `windows` are the tokens that the layers of each KV group look back; `None` means all tokens.
        `events` describes stores if vLLM's KV events are on.
        """
        self.adapter = adapter
        self.counts: Counter[str] = Counter()
        self._chunk_hashes = chunk_hashes
        self._weights = weights
        self._block_size = block_size
        self._by_hash = by_hash
        self._can_store = can_store
        self._looks_up_early = looks_up_early
        self._volatile_tokens = volatile_tokens
        self._min_load_tokens = min_load_tokens
        self._windows = windows
        self._sizes = sorted({window for window in windows if window is not None})
        self._events = events
        self._adapters = Adapters()
        self._requests: dict[str, RequestState] = {}
        # Requests that are not cached; each is counted once.
        self._refused: set[str] = set()
        self._next = Step()

    def on_new_request(self, request: "Request") -> None:
        """Counts a request that will not be cached. Looks up another one if early lookups are on."""
        # Also without a server: vLLM's prefix cache keeps the blocks of the adapter.
        salt = effective_salt(request, self._adapters)
        by_hash = self._by_hash and self.adapter.hash_mode
        if salt is None or not self._is_cacheable(request, by_hash):
            self._refuse(request)
        elif self._looks_up_early:
            self._state(request)

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Returns the tokens to load beyond those that vLLM has; `None` while the answer is pending."""
        state = self._state(request)
        if state is None or state.is_allocated:
            # A request that returns without a preemption has lost its load and is computed.
            return 0, False
        if state.matched is None:
            state.matched = self.adapter.check_lookup_result(request.request_id)
            if state.matched is None:
                return None, False
            state.tiers = self.adapter.lookup_tiers(request.request_id)
            self.adapter.cleanup_lookup_result(request.request_id)
        state.computed = num_computed_tokens
        # vLLM computes at least one token, from which it takes its first output.
        new_tokens = min(state.matched, request.num_tokens - 1) - num_computed_tokens
        return (new_tokens, True) if new_tokens >= self._min_load_tokens else (0, False)

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        """Plans the load of a request that now has its blocks."""
        state = self._requests.get(request.request_id)
        # The second call for a request comes after its load.
        if state is None or state.is_allocated:
            return
        state.is_allocated = True
        chunk = self.adapter.chunk_size
        matched = state.tail = state.matched or 0
        state.stored = matched - matched % chunk
        if num_external_tokens == 0:
            if not state.is_awaited(self.adapter.notices):
                self._end_session(state)
            return
        tables = blocks.get_block_ids()
        count = min(map(len, tables))
        if count * self._block_size < matched:
            raise RuntimeError(
                f"vLLM gave request {request.request_id} {count} blocks of "
                f"{self._block_size} tokens to load {matched} tokens into"
            )
        # Chunks hold the data that layers with a window need for exactly these tokens.
        wanted = min(matched, request.num_tokens - 1) - state.computed
        if self._sizes and num_external_tokens != wanted:
            raise RuntimeError(
                f"vLLM loads {num_external_tokens} tokens of request {request.request_id}, expected "
                f"{wanted}"
            )
        start = state.computed - state.computed % chunk
        # Whole chunks, and the tail.
        for first, last in ((start, state.stored), (state.stored, matched)):
            if max(first, state.computed) < last:
                load = self._op(state, tables, first, last)
                load.skip_first_n_tokens = max(state.computed - first, 0)
                self._next.loads.append(load)
        state.is_loading = True
        self.counts["load_tokens"] += matched - state.computed

    def tiers_of(self, request_id: str, tokens: int) -> dict[str, int]:
        """Returns the number of loaded tokens of a request that came from each tier, as far as known."""
        state, found = self._requests.get(request_id), dict[str, int]()
        if state is None:
            return found
        end = 0
        for tier, count in state.tiers:
            start, end = end, end + count
            part = min(end, state.computed + tokens) - max(start, state.computed)
            if part > 0:
                found[tier] = found.get(tier, 0) + part
        return found

    def build_connector_meta(self, output: "SchedulerOutput") -> Step:
        """Returns the work of the workers in this step."""
        step, self._next = self._next, Step()
        if self._sizes:
            for known in self._requests.values():
                self._note_freed(known, step.freed)
        for request_id in output.preempted_req_ids or ():
            state = self._requests.get(request_id)
            if state is not None and state.has_stored:
                step.preempted.append(request_id)
        if self._can_store and self.adapter.healthy:
            self._add_stores(step, output)
        return step

    def _add_stores(self, step: Step, output: "SchedulerOutput") -> None:
        """Adds the chunks that this step completes."""
        chunk, requests = self.adapter.chunk_size, self._requests
        for request_id, scheduled in output.num_scheduled_tokens.items():
            state = requests.get(request_id)
            if state is None or state.is_mixed:
                continue
            request = state.request
            # vLLM counts the tokens of a step as computed once it is scheduled.
            end = request.num_computed_tokens + scheduled
            # With one output token, another engine computes the answer and needs the prompt's tail at once.
            ends_after_prefill = request.max_tokens == 1 and end >= request.num_tokens
            if end < state.stored + chunk and not ends_after_prefill:
                continue
            # Scheduled draft tokens may be rejected; tokens in the request are final.
            computed = min(end, request.num_tokens)
            end = computed - self._volatile_tokens
            end -= end % chunk
            if end <= state.stored and not ends_after_prefill:
                continue
            table = output.kv_connector_block_state
            tables = table.get_block_ids(request_id) if table is not None else None
            if tables is None or self._adapters.are_refused(request.lora_request):
                continue
            if end > state.stored:
                start = self._first_to_store(tables, state.stored, end)
                self.counts["unstorable_tokens"] += start - state.stored
                state.stored = end
                if start < end:
                    step.stores.append(self._store(state, tables, start, end, step))
            if ends_after_prefill:
                step.stores += self._rest(state, tables, computed, step)
                step.handed_over.append(request_id)

    def _store(
        self,
        state: RequestState,
        tables: Sequence[list[int]],
        start: int,
        end: int,
        step: Step,
    ) -> LoadStoreOp:
        """Returns a store of a step, and adds its blocks to the step if vLLM's KV events are on."""
        store = self._op(state, tables, start, end)
        if self._events is not None:
            store.store_number, blocks = self._events.describe(
                state.request, start, end, is_tail=store.is_tail
            )
            step.blocks[store.store_number] = blocks
        self.counts["store_tokens"] += end - start
        state.has_stored = True
        return store

    def _first_to_store(self, tables: Sequence[list[int]], start: int, end: int) -> int:
        """Returns the start of the first chunk that can be stored.

        In layers with a window, a load that ends with a chunk needs the last tokens of that chunk.
        They are gone if the chunk was complete some steps ago: there was no server to take it, or a
        step has more draft tokens than a block has tokens.
        """
        chunk = self.adapter.chunk_size
        while start < end and not all(
            window is None or table[max(start, start + chunk - window) // self._block_size] != NULL
            for table, window in zip(tables, self._windows, strict=True)
        ):
            start += chunk
        return start

    def _note_freed(self, state: RequestState, freed: dict[str, int]) -> None:
        """Adds a request if vLLM has freed blocks since the last call that a store may read."""
        if not self._sizes or not state.has_stored:
            return
        request, size = state.request, self._block_size
        # As vLLM does when it allocates blocks, and when a request has finished.
        processed = request.num_computed_tokens - request.num_in_flight_tokens
        before = state.freed or [0] * len(self._sizes)
        # Different windows may leave a block in different steps.
        state.freed = [max(processed - window + 1, 0) // size * size for window in self._sizes]
        pairs = zip(before, state.freed, strict=True)
        if any(last < min(now, state.stored) for last, now in pairs):
            freed[request.request_id] = max(state.freed)

    def update_connector_output(self, output: "KVConnectorOutput") -> None:
        """Records the loads that have ended."""
        for request_id in output.finished_recving or ():
            state = self._requests.get(request_id)
            if state is None:
                continue
            state.is_loading = False
            # vLLM has already subtracted failed tokens; a load of a whole prompt lacks one token.
            chunk = self.adapter.chunk_size
            kept = state.request.num_computed_tokens + 1
            state.stored = min(state.stored, kept - kept % chunk)
            state.tail = min(state.tail, kept)
            if not state.is_awaited(self.adapter.notices):
                self._end_session(state)

    def request_finished(self, request: "Request", tables: Sequence[list[int]]) -> bool:
        """Removes a request. Returns True if vLLM must keep its blocks until a worker reports it.

        `tables` are its blocks, for each KV group.
        """
        self._refused.discard(request.request_id)
        state = self._requests.pop(request.request_id, None)
        if state is None:
            return False
        if state.has_session and state.matched is None:
            self.adapter.cleanup_lookup_result(request.request_id)
        self._end_session(state)
        # vLLM keeps the blocks of an aborted request with a load until the load is reported, and would
        # not know the request at a second report. The request has computed no blocks since then.
        if state.is_loading:
            return False
        if self._can_store and self.adapter.healthy:
            # The last token is not computed; a step that runs ahead may compute more tokens than the
            # request has.
            end = min(request.num_computed_tokens, request.num_tokens - 1)
            self._next.tails += self._rest(state, tables, end, self._next)
        if not state.has_stored:
            return False
        self._next.finished.add(request.request_id)
        self._note_freed(state, self._next.freed)
        return True

    def _rest(
        self,
        state: RequestState,
        tables: Sequence[list[int]],
        computed: int,
        step: Step,
    ) -> list[LoadStoreOp]:
        """Returns the last stores of a request that will compute no more blocks: whole chunks that no
        step has stored, and the tail."""
        request, size, chunk = state.request, self._block_size, self.adapter.chunk_size
        end = (computed - self._volatile_tokens) // size * size
        whole = end - end % chunk
        has_blocks = state.is_allocated and state.preemptions == request.num_preemptions
        has_blocks = has_blocks and all(len(table) * size >= end for table in tables)
        # Blocks that a window has left are gone.
        if not has_blocks or state.is_mixed or self._sizes:
            return []
        if self._adapters.are_refused(request.lora_request):
            return []
        stores = []
        if whole > state.stored:
            stores.append(self._store(state, tables, state.stored, whole, step))
            state.stored = whole
        # Without the chunks before it, a tail is never found.
        if self._has_tails(state.by_hash) and end > max(state.tail, whole) and state.stored == whole:
            stores.append(self._store(state, tables, whole, end, step))
            state.tail = end
        return stores

    def shutdown(self) -> None:
        """Ends the adapter's thread."""
        self.adapter.shutdown()

    def reset_cache(self) -> None:
        """Gives the chunks of all later requests another name, because the weights change."""
        self._weights.renew()
        for request_id, state in self._requests.items():
            if state.is_allocated:
                state.is_mixed = True
                continue
            # The request is waiting, and is looked up again.
            if state.has_session and state.matched is None:
                self.adapter.cleanup_lookup_result(request_id)
            state.preemptions = NO_LOOKUP

    def _state(self, request: "Request") -> RequestState | None:
        """Returns the state of a request that is looked up. Begins the lookup of a new request."""
        state = self._requests.get(request.request_id)
        if state is not None and state.preemptions == request.num_preemptions:
            return state
        by_hash = self._by_hash and self.adapter.hash_mode
        if self.adapter.chunk_size == 0 or not self._is_cacheable(request, by_hash):
            return None
        salt = effective_salt(request, self._adapters)
        if salt is None:
            self._refuse(request)
            return None
        has_stored = state is not None and state.has_stored
        own = self._weights.tags() | trace_parent(request)
        configs = transfer_configs(request.kv_transfer_params, own)
        if state is not None:
            self._end_session(state)
            configs = without_wait(configs)
        state = RequestState(
            request=request,
            salt=salt,
            configs=configs,
            by_hash=by_hash,
            preemptions=request.num_preemptions,
            has_stored=has_stored,
        )
        self._requests[request.request_id] = state
        shortest = self._block_size if self._has_tails(by_hash) else self.adapter.chunk_size
        shortest = max(shortest, self._min_load_tokens)
        if request.skip_reading_prefix_cache or request.num_tokens < shortest:
            state.matched = 0
            return state
        self.adapter.maybe_submit_lookup_request(
            request.request_id,
            token_ids=None if by_hash else request.all_token_ids[:],
            block_hashes=request.block_hashes if by_hash else None,
            cache_salt=state.salt,
            configs=state.configs,
        )
        state.has_session = True
        return state

    def _has_tails(self, by_hash: bool) -> bool:
        return by_hash and self.adapter.tails

    def _refuse(self, request: "Request") -> None:
        if request.request_id not in self._refused:
            self._refused.add(request.request_id)
            self.counts["refused_requests"] += 1

    def _is_cacheable(self, request: "Request", by_hash: bool) -> bool:
        """Returns True if the names of a request's chunks cover everything that decides their data."""
        if request.resumable:
            # The prompt of a streaming session changes while it runs.
            return False
        return by_hash or not (request.mm_features or request.prompt_embeds is not None)

    def _op(
        self, state: RequestState, tables: Sequence[list[int]], start: int, end: int
    ) -> LoadStoreOp:
        request, size = state.request, self._block_size
        op = LoadStoreOp(
            request_id=request.request_id,
            block_ids=[table[start // size : end // size] for table in tables],
            start=start,
            end=end,
            cache_salt=state.salt,
            configs=state.configs,
        )
        chunk = self.adapter.chunk_size
        if end % chunk:
            op.is_tail = True
            hashes = request.block_hashes[start // size : end // size]
            op.chunk_hashes = self._chunk_hashes(hashes, 1, len(hashes))
        elif state.by_hash:
            op.chunk_hashes = self._chunk_hashes(request.block_hashes, chunk // size, end // chunk)
        else:
            op.token_ids = request.all_token_ids[:end]
        return op

    def _end_session(self, state: RequestState) -> None:
        if state.has_session:
            state.has_session = False
            self.adapter.end_session(state.request.request_id)
