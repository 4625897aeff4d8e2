"""Adapters between an engine and `lmc serve`, in Rust.

All methods may be called from any thread. A method waits for the network only if its text says so.
The interpreter's lock is released while Rust works.
"""

from collections.abc import Mapping, Sequence

from lmc.ops import LoadStoreOp

def chunk_hashes(block_hashes: Sequence[bytes], blocks_per_chunk: int, chunks: int) -> bytes:
    """Returns the last block hash of each of the first `chunks` chunks, 32 bytes each.

    A hash of another length is replaced by its BLAKE3 digest.
    """

class SchedulerAdapter:
    """Lookups of an engine's scheduler."""

    def __init__(
        self,
        endpoint: str,
        *,
        model: str,
        world_size: int,
        num_kv_readers: int = 1,
        identity: str = "",
        hash_mode: bool = True,
        tails: bool = True,
        block_size: int,
    ) -> None:
        """Starts one thread and waits at most 5 s for the server at `endpoint`.

        The endpoint is `tcp://HOST:PORT`, `ipc://PATH`, or `local`: `/run/lmc/lmc.sock` if it exists,
        else `tcp://127.0.0.1:5555`. Until a server answers, every lookup is a miss. Raises
        `ValueError` if the server's chunk size is not a multiple of `block_size`.
        """

    @property
    def chunk_size(self) -> int:
        """Tokens of a chunk; 0 until a server has answered."""

    @property
    def num_blocks_per_chunk(self) -> int:
        """Blocks of a chunk; 0 until a server has answered."""

    @property
    def hash_mode(self) -> bool:
        """True if lookups may name block hashes, which the server must support."""

    @property
    def tails(self) -> bool:
        """True if the blocks after a prompt's last whole chunk are kept, which the server must support."""

    @property
    def notices(self) -> bool:
        """True if the server sends notices to proxies when stores end."""

    @property
    def healthy(self) -> bool:
        """True if the server answers."""

    def maybe_submit_lookup_request(
        self,
        request_id: str,
        *,
        token_ids: Sequence[int] | None = None,
        block_hashes: Sequence[bytes] | None = None,
        cache_salt: str = "",
        configs: Mapping[str, object] | None = None,
    ) -> None:
        """Asks for the leading chunks of a prompt, unless this request has asked before.

        Exactly one of `token_ids` and `block_hashes` must be given.
        """

    def check_lookup_result(self, request_id: str) -> int | None:
        """Returns the matched tokens: `None` while pending, 0 for an unknown request."""

    def lookup_tiers(self, request_id: str) -> list[tuple[str, int]]:
        """Returns the tiers that the matched tokens came from, in the order of the tokens, each
        with the number of tokens; empty if the server does not report them.

        A tier is `dram`, or the name of a lower tier, such as `disk`.
        """

    def cleanup_lookup_result(self, request_id: str) -> None:
        """Removes the result; the server keeps the leases."""

    def end_session(self, request_id: str) -> None:
        """Releases all leases of a request."""

    def reset_cache(self) -> bool:
        """Clears the server's cache, and waits at most 10 s for the clear."""

    def stats(self) -> dict[str, int]:
        """Returns counters since the start."""

    def take_log(self) -> list[tuple[int, str]]:
        """Returns the log lines since the last call, each with its level of `logging` and its text."""

    def shutdown(self) -> None:
        """Ends the thread."""

class WorkerAdapter:
    """Copies between an engine's KV cache and the server's pool."""

    def __init__(
        self,
        endpoint: str,
        *,
        model: str,
        world_size: int,
        kv_rank: int,
        num_kv_readers: int = 1,
        identity: str = "",
        hash_mode: bool = True,
        tails: bool = True,
        block_size: int,
        copy_threads: int = 1,
    ) -> None: ...
    @property
    def chunk_size(self) -> int: ...
    @property
    def num_blocks_per_chunk(self) -> int: ...
    @property
    def hash_mode(self) -> bool: ...
    @property
    def tails(self) -> bool: ...
    @property
    def healthy(self) -> bool: ...
    def register_kv_caches(
        self,
        groups: Sequence[tuple[Sequence[tuple[int, Sequence[int], Sequence[int], str]], int | None]],
        *,
        layout: str,
        tokens_per_block: int,
        gpu: str | None = None,
    ) -> None:
        """Registers the tensors of each KV group, in layer order, and the tokens that it looks back.

        This number is `None` for layers that look back to the start of a prompt. In the block tables
        of other groups, block 0 means a block that is not kept. A tensor is its address, shape,
        strides in elements and element type. The memory must stay valid until `shutdown` or
        `unregister_kv_caches` has returned. `gpu` is the id of the NVIDIA GPU with the memory, as
        PyTorch spells it; `None` means host memory. Raises `ValueError` for a layout that lmc does not
        support and for a GPU that cannot be used.
        """

    def unregister_kv_caches(self) -> None:
        """Stops using the tensors: after this call has returned, their memory is not touched.

        The call waits for copies under way. Until tensors are registered again, stores are dropped
        and loads fail.
        """

    def submit_store_request(self, op: LoadStoreOp) -> None:
        """Queues a store; a Rust thread copies."""

    def submit_retrieve_request(self, op: LoadStoreOp) -> None:
        """Queues a load; a Rust thread copies."""

    def batched_submit_store_requests(
        self, ops: Sequence[LoadStoreOp], *, stream: int | None = None
    ) -> None:
        """Queues stores. Memory on a GPU needs `stream`, a `CUstream` of the GPU's primary context.

        The memory is read after the work that is in the stream so far.
        """

    def batched_submit_retrieve_requests(
        self, ops: Sequence[LoadStoreOp], *, stream: int | None = None
    ) -> None:
        """Queues loads. Memory on a GPU needs `stream`, a `CUstream` of the GPU's primary context.

        The memory is written after the work that is in the stream so far.
        """

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str], set[str]]:
        """Returns three sets of requests: all stores have ended, all retrieves have ended, and
        retrieves ended without some of their chunks.

        Ended stores are reported once the engine has named their request, in this call or before.
        """

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Returns the blocks whose load failed since the last call, if there is only one KV group.

        A block is returned no later than `get_finished` reports its request.
        """

    def take_ended_stores(self) -> list[tuple[int, list[int]]]:
        """Returns the numbered stores that have ended since the last call.

        Each store comes with the chunks that it has added to the server, counted from the first chunk
        of its range. A store is returned no later than `get_finished` reports its request, unless
        `wait_for_stores` has dropped it.
        """

    def wait_until_reserved(self, request_ids: Sequence[str], timeout: float) -> bool:
        """Waits until the server has slots for all stores of these requests: from then on lookups see
        that their chunks are being written. Returns `False` at the timeout."""

    def has_stores(self, request_id: str) -> bool:
        """Returns True if a store of this request is under way."""

    def wait_for_stores(self, request_ids: Sequence[str], timeout: float) -> bool:
        """Waits until no store of these requests is under way.

        After `timeout` seconds it cancels stores that have not begun, waits for the copy under way,
        and returns `False`.
        """

    def wait_for_stores_before(self, requests: Mapping[str, int], timeout: float) -> bool:
        """Waits as `wait_for_stores`, but only for stores whose range begins before the given token of
        their request."""

    def stats(self) -> dict[str, int]: ...
    def take_log(self) -> list[tuple[int, str]]: ...
    def shutdown(self) -> None:
        """Ends all threads. No Rust thread touches Python or the tensors afterwards."""
