"""State of one request in the scheduler's connector."""

import hashlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lmc.ops import ConfigValue
from lmc.vllm.adapters import Adapters

if TYPE_CHECKING:
    from vllm.v1.request import Request

# Request fields of other connectors that lmc's server reads as well.
ALIASES = frozenset(
    (
        "remote_prefiller",
        "remote_decoder",
        "remote_kv_source",
        "do_remote_prefill",
        "do_remote_decode",
    )
)
# Fields of a hand-over from a prefill engine to a decode engine: the id that both requests have, and the
# time for which the second one waits.
PREFILL = "lmcache.pd.id"
WAIT = "lmcache.pd.wait_ms"
TRACE_PARENT = "lmcache.traceparent"
MAX_PREFILL = 256
MAX_SALT = 128
# Prefix of the salts that are created here. A salt of a request with this prefix is not used unchanged.
OWN_SALT = "lmc-"


@dataclass(slots=True)
class RequestState:
    """The state of a request in the scheduler's connector.

    A request is looked up, may be loaded, and stores its chunks when they are complete. A
    preemption starts it again.
    """

    request: "Request"
    salt: str
    configs: dict[str, ConfigValue] | None
    # True: the request's chunks are named by vLLM's block hashes; False: by tokens.
    by_hash: bool
    # Preemptions of the request at its lookup.
    preemptions: int
    # Tokens that the server has; `None` until it has answered.
    matched: int | None = None
    # Tiers that the matched tokens came from, in the order of the tokens; empty if not known.
    tiers: list[tuple[str, int]] = field(default_factory=list)
    # Tokens that vLLM had itself when the server's answer was used.
    computed: int = 0
    # vLLM has given the request its blocks.
    is_allocated: bool = False
    # A load was sent to the workers and not reported as finished.
    is_loading: bool = False
    # The server may hold leases for the request.
    has_session: bool = False
    # Tokens that were found or whose store was sent to the workers.
    stored: int = 0
    # Tokens whose blocks were found, or whose store as a tail was sent to the workers.
    tail: int = 0
    # A store was sent to the workers at some time; outlives preemptions.
    has_stored: bool = False
    # For each window, the number of leading tokens that it has left and whose blocks vLLM has freed.
    freed: list[int] = field(default_factory=list)
    # The weights have changed since vLLM gave the request its blocks: no more of its chunks are stored.
    is_mixed: bool = False

    def is_awaited(self, by_proxies: bool) -> bool:
        """Returns True if another engine or a proxy may wait until this request has ended. The server
        keeps the chunks of the lookup leased until then, so such a request must be short."""
        configs = self.configs or {}
        prefill = configs.get(PREFILL)
        is_named = isinstance(prefill, str) and 0 < len(prefill.encode()) <= MAX_PREFILL
        is_prefill = WAIT not in configs and self.request.max_tokens == 1
        return is_prefill and (is_named or by_proxies)


def transfer_configs(
    params: dict[str, Any] | None, own: dict[str, str]
) -> dict[str, ConfigValue] | None:
    """Returns the entries of `kv_transfer_params` for lmc's server, and the engine's own entries."""
    configs: dict[str, ConfigValue] = {}
    for key, value in (params or {}).items():
        if isinstance(key, str) and key.startswith(("lmcache.", "lmc.")):
            is_plain = isinstance(value, (str, int, float, bool, type(None)))
            configs[key] = value if is_plain else _json(value)
        elif key in ALIASES:
            configs[key] = value if isinstance(value, str) else _json(value)
    configs |= own
    return configs or None


def trace_parent(request: "Request") -> dict[str, str]:
    """Returns the entry with the parent of the request's spans, which vLLM has if it traces."""
    headers = getattr(request, "trace_headers", None) or {}
    parent = headers.get("traceparent")
    return {TRACE_PARENT: parent} if isinstance(parent, str) else {}


def without_wait(configs: dict[str, ConfigValue] | None) -> dict[str, ConfigValue] | None:
    """Returns the entries of a request that has generated tokens, without the wait: no other engine
    computes these tokens."""
    if configs is None or WAIT not in configs:
        return configs
    kept = {key: value for key, value in configs.items() if not key.startswith("lmcache.pd.")}
    return kept or None


def effective_salt(request: "Request", adapters: Adapters) -> str | None:
    """Returns the salt that separates a request's chunks from other chunks.

    This is the request's own salt, or a digest of salt and adapter if the protocol cannot carry the
    salt or a LoRA adapter changes the KV data. `None` if nothing identifies the adapter's KV data.
    """
    salt, lora = request.cache_salt or "", request.lora_request
    is_plain = len(salt) <= MAX_SALT and not set(salt) & set("@/\\\0")
    if lora is None and is_plain and not salt.startswith(OWN_SALT):
        return salt
    adapter = None if lora is None else adapters.named(lora)
    if lora is not None and adapter is None:
        return None
    return OWN_SALT + hashlib.sha256(_json([salt, adapter]).encode()).hexdigest()


def _json(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
