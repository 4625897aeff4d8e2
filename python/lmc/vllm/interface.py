"""The parts of vLLM's connector interface that lmc uses, and the check that they are unchanged.

`interface.json` holds these parts of the release with which lmc was tested.
`python -m lmc.vllm.interface` prints the parts of the installed vLLM.
"""

import importlib
import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.base"
USED = {
    f"{CONNECTOR}:KVConnectorBase_V1": (
        "__init__",
        "bind_connector_metadata",
        "build_connector_meta",
        "build_kv_connector_stats",
        "build_prom_metrics",
        "clear_connector_metadata",
        "get_block_ids_with_load_errors",
        "get_external_cache_hit_sources",
        "get_finished",
        "get_kv_connector_kv_cache_events",
        "get_kv_connector_stats",
        "get_num_new_matched_tokens",
        "get_transfer_results",
        "handle_preemptions",
        "on_new_request",
        "register_finished_partial_tail",
        "register_kv_caches",
        "request_finished",
        "requires_kv_delivery",
        "reset_cache",
        "save_kv_layer",
        "shutdown",
        "start_load_kv",
        "take_events",
        "update_connector_output",
        "update_state_after_alloc",
        "wait_for_layer_load",
        "wait_for_save",
    ),
    f"{CONNECTOR}:SupportsHMA": ("request_finished_all_groups",),
    "vllm.v1.core.sched.output:SchedulerOutput": (
        "kv_connector_block_state",
        "num_scheduled_tokens",
        "preempted_req_ids",
    ),
    "vllm.v1.core.sched.output:KVConnectorBlockState": ("get_block_ids",),
    "vllm.v1.core.kv_cache_manager:KVCacheBlocks": ("get_block_ids",),
    "vllm.v1.outputs:KVConnectorOutput": ("finished_recving", "kv_cache_events"),
    "vllm.distributed.kv_events:BlockStored": (
        "block_hashes",
        "block_size",
        "extra_keys",
        "group_idx",
        "lora_id",
        "lora_name",
        "medium",
        "parent_block_hash",
        "session_id",
        "token_ids",
    ),
    "vllm.distributed.kv_events:KVConnectorKVEvents": (
        "add_events",
        "aggregate",
        "clear_events",
        "get_all_events",
        "get_number_of_workers",
        "increment_workers",
    ),
    "vllm.lora.request:LoRARequest": (
        "adapter_id",
        "load_inplace",
        "lora_int_id",
        "lora_name",
        "lora_path",
        "name",
    ),
    "vllm.config.attention:AttentionConfig": ("backend", "backend_per_kind"),
    "vllm.config.device:DeviceConfig": ("device_type",),
    "vllm.config.model:ModelConfig": ("enable_sleep_mode",),
    "vllm.platforms.interface:Platform": ("get_device_capability",),
    "vllm.config.parallel:ParallelConfig": ("distributed_executor_backend", "nnodes_within_dp"),
    "vllm.v1.request:Request": ("num_tokens", "is_finished"),
    f"{CONNECTOR}:KVConnectorTransferResults": (
        "failed_recving",
        "finished_recving",
        "finished_sending",
    ),
    "vllm.v1.metrics.cache_hit_source:CacheHitSource": (
        "DISK",
        "EXTERNAL_UNSPECIFIED",
        "HOST",
        "P2P",
    ),
    "vllm.v1.kv_cache_interface:SlidingWindowSpec": ("extra_retained_tokens", "sliding_window"),
    "vllm.v1.kv_cache_interface:KVCacheConfig": (
        "hash_block_size",
        "kv_cache_groups",
        "kv_cache_layout",
        "num_blocks",
    ),
    # Functions of a module.
    "vllm.v1.core.kv_cache_utils:": (
        "generate_block_hash_extra_keys",
        "maybe_convert_block_hash",
        "to_event_extra_keys",
    ),
}

# Class or module, then name, then parameters; `None` for a field or property.
Table = dict[str, dict[str, str | None]]


def expected() -> tuple[str, Table]:
    """Returns the vLLM release of `interface.json` and its table."""
    found = json.loads(Path(__file__).with_name("interface.json").read_text())
    return found["vllm"], found["classes"]


def installed(load: Callable[[str], object] | None = None) -> Table:
    """Returns the table of the installed vLLM, without members that it lacks."""
    table: Table = {}
    for name, members in USED.items():
        try:
            owner = (load or _load)(name)
        except (ImportError, AttributeError):
            continue
        table[name] = {
            member: _parameters(owner, member) for member in members if _has(owner, member)
        }
    return table


def compare(wanted: Table, found: Table) -> tuple[list[str], list[str]]:
    """Returns what is missing and what has changed, each as `Class.member` or `module.function`."""
    missing, changed = [], []
    for name, members in wanted.items():
        module, _, owner = name.partition(":")
        shown = owner or module
        for member, parameters in members.items():
            if member not in found.get(name, {}):
                missing.append(f"{shown}.{member}")
            elif found[name][member] != parameters:
                changed.append(f"{shown}.{member}")
    return missing, changed


def check(warn: Callable[[str], object], found: Table | None = None) -> None:
    """Compares the installed vLLM with the table.

    Warns once of all changes. Raises `RuntimeError` if something is missing.
    """
    release, wanted = expected()
    missing, changed = compare(wanted, installed() if found is None else found)
    if missing:
        raise RuntimeError(
            f"this vLLM lacks {', '.join(missing)}, which lmc uses: install vLLM {release}"
        )
    if changed:
        warn(
            f"lmc was tested with vLLM {release}; in this vLLM the parameters of "
            f"{', '.join(changed)} differ: if requests fail, install vLLM {release}"
        )


@contextmanager
def explained_imports() -> Iterator[None]:
    """Turns a failed import from vLLM into a `RuntimeError` with the release that has the name."""
    try:
        yield
    except ImportError as error:
        # Errors of other packages explain themselves.
        if (error.name or "").partition(".")[0] != "vllm":
            raise
        release, _ = expected()
        raise RuntimeError(
            f"this vLLM lacks a name that lmc imports ({error}): install vLLM {release}"
        ) from error


def _load(name: str) -> object:
    module, _, attribute = name.partition(":")
    loaded = importlib.import_module(module)
    return getattr(loaded, attribute) if attribute else loaded


def _has(owner: object, member: str) -> bool:
    return hasattr(owner, member) or member in getattr(owner, "__dataclass_fields__", {})


def _parameters(owner: object, member: str) -> str | None:
    value = inspect.getattr_static(owner, member, None)
    if isinstance(value, (classmethod, staticmethod)):
        value = value.__func__
    if not inspect.isfunction(value):
        return None
    return ", ".join(map(_shown, inspect.signature(value).parameters.values()))


def _shown(parameter: inspect.Parameter) -> str:
    stars: dict[object, str] = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
    default = "" if parameter.default is parameter.empty else "="
    return stars.get(parameter.kind, "") + parameter.name + default


if __name__ == "__main__":
    import vllm

    release = ".".join(vllm.__version__.split(".")[:2])
    print(json.dumps({"vllm": release, "classes": installed()}, indent=1))
