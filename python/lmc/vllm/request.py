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
# Salts that begin so are made here, and never taken from a request as they are.
OWN_SALT = "lmc-"


@dataclass(slots=True)
class RequestState:
    """What the scheduler's connector knows of a request.

    A request is looked up, may be loaded, and stores its chunks as they become complete. A
    preemption starts it again.
    """

    request: "Request"
    salt: str
    configs: dict[str, ConfigValue] | None
    # The request's chunks are named by vLLM's block hashes; by tokens otherwise.
    by_hash: bool
    # Preemptions of the request at its lookup.
    preemptions: int
    # Tokens that the server has; `None` until it has answered.
    matched: int | None = None
    # Tiers that the matched tokens came from, in the order of the tokens; empty where that is not known.
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
    # Tokens at the start whose blocks vLLM has freed, since a window has left them, for each window.
    freed: list[int] = field(default_factory=list)
    # The weights have changed since vLLM gave it its blocks: nothing more of it is stored.
    is_mixed: bool = False

    def is_awaited(self, by_proxies: bool) -> bool:
        """Whether another engine may wait until this request has ended, or a proxy does: its server keeps
        what the lookup has found until then, so it has to be short."""
        configs = self.configs or {}
        prefill = configs.get(PREFILL)
        is_named = isinstance(prefill, str) and 0 < len(prefill.encode()) <= MAX_PREFILL
        is_prefill = WAIT not in configs and self.request.max_tokens == 1
        return is_prefill and (is_named or by_proxies)


def transfer_configs(
    params: dict[str, Any] | None, own: dict[str, str]
) -> dict[str, ConfigValue] | None:
    """Returns the entries of `kv_transfer_params` that are for lmc's server, and the engine's own."""
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
    """Returns the entry with the parent of the request's spans, which vLLM knows where it traces."""
    headers = getattr(request, "trace_headers", None) or {}
    parent = headers.get("traceparent")
    return {TRACE_PARENT: parent} if isinstance(parent, str) else {}


def without_wait(configs: dict[str, ConfigValue] | None) -> dict[str, ConfigValue] | None:
    """Returns the entries of a request that has generated tokens: no other engine computes those."""
    if configs is None or WAIT not in configs:
        return configs
    kept = {key: value for key, value in configs.items() if not key.startswith("lmcache.pd.")}
    return kept or None


def effective_salt(request: "Request", adapters: Adapters) -> str | None:
    """Returns the salt that keeps a request's chunks apart from others'.

    The request's own salt, unless the protocol cannot carry it or a LoRA adapter changes the KV
    data: then the digest of all of these. `None` where nothing tells the adapter's KV data apart.
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
