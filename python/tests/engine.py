"""The parts of vLLM's objects that the connector reads, and an adapter that remembers its calls."""

from dataclasses import dataclass, field
from types import SimpleNamespace

BLOCK = 4
CHUNK = 16


@dataclass
class Request:
    request_id: str
    all_token_ids: list[int]
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    num_preemptions: int = 0
    cache_salt: str | None = None
    lora_request: object = None
    kv_transfer_params: dict | None = None
    mm_features: list = field(default_factory=list)
    prompt_embeds: object = None
    resumable: bool = False
    skip_reading_prefix_cache: bool = False
    session_id: str | None = None
    max_tokens: int = 100

    @property
    def num_tokens(self):
        return len(self.all_token_ids)

    @property
    def block_hashes(self):
        whole = self.num_tokens // BLOCK
        return [bytes([block]) * 32 for block in range(whole)]


class Adapter:
    """A scheduler adapter whose server finds what `found` says."""

    def __init__(self, found=None, tiers=(), tails=False):
        self.found = found or {}
        self.tiers = list(tiers)
        self.chunk_size = CHUNK
        self.hash_mode = True
        self.healthy = True
        self.tails = tails
        self.notices = False
        self.calls = []

    def maybe_submit_lookup_request(self, request_id, **named):
        self.calls.append(("lookup", request_id, named))

    def check_lookup_result(self, request_id):
        return self.found.get(request_id, 0)

    def lookup_tiers(self, request_id):
        return self.tiers

    def cleanup_lookup_result(self, request_id):
        self.calls.append(("cleanup", request_id))

    def end_session(self, request_id):
        self.calls.append(("end", request_id))

    def named(self, what):
        return [call[1] for call in self.calls if call[0] == what]


class Blocks:
    def __init__(self, *tables):
        self.tables = tables

    def get_block_ids(self):
        return self.tables


def output(scheduled, tables, preempted=()):
    """A step in which each request computes so many tokens."""
    return SimpleNamespace(
        num_scheduled_tokens=scheduled,
        preempted_req_ids=set(preempted),
        kv_connector_block_state=SimpleNamespace(
            get_block_ids=lambda request_id: tables[request_id]
        ),
    )


def chunk_hashes(block_hashes, per_chunk, chunks):
    return b"".join(block_hashes[per_chunk - 1 : chunks * per_chunk : per_chunk])
