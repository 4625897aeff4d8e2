"""The copies that the scheduler orders from a worker."""

from dataclasses import dataclass

ConfigValue = str | int | float | bool | None


@dataclass(slots=True)
class LoadStoreOp:
    """Store or load of whole chunks of one request, or of the blocks after its last whole chunk.

    `start` and `end` count tokens and are multiples of the chunk size; `block_ids` are the blocks
    of these tokens, for each KV group. `token_ids` are the prompt's tokens up to `end`, or
    `chunk_hashes` the hashes of its chunks up to `end`, 32 bytes each.

    For a tail (`is_tail`), `start` is a multiple of the chunk size, `end` is a multiple of the block
    size, and `chunk_hashes` are the hashes of the blocks from `start` on.
    """

    request_id: str
    block_ids: list[list[int]]
    start: int
    end: int
    token_ids: list[int] | None = None
    chunk_hashes: bytes | None = None
    is_tail: bool = False
    cache_salt: str = ""
    configs: dict[str, ConfigValue] | None = None
    # Tokens at the start of a load that are not written: their blocks are shared.
    skip_first_n_tokens: int = 0
    # Number with which the adapter reports the end of a store; `None`: it does not report the end.
    store_number: int | None = None
