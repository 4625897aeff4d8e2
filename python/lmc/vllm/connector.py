"""`LmcConnector`: vLLM's connector interface over the adapters."""

import logging
import os
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.utils import get_pp_indices
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from lmc import _native
from lmc.vllm import interface, server
from lmc.vllm.cores import beside_the_engine
from lmc.vllm.events import EventTally, StoredChunks
from lmc.vllm.identity import device_name, hash_mode, identity_record
from lmc.vllm.kv_events import LmcKVEvents, are_wanted, chunk_of, event_source, stored
from lmc.vllm.metadata import Step
from lmc.vllm.scheduler import SchedulerSide
from lmc.vllm.settings import Settings
from lmc.vllm.stats import LmcPromMetrics, LmcStats, StatsSource
from lmc.vllm.weights import Weights
from lmc.vllm.worker import WorkerSide

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from vllm.config import ParallelConfig, VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent, KVConnectorKVEvents
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
        PromMetric,
        PromMetricT,
    )
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.lmc")

KVConnectorMetadata.register(Step)

# vLLM's names for the tiers of lmc's server; it has no name for shared stores.
_SOURCES = {"dram": "HOST", "disk": "DISK", "peers": "P2P"}


class LmcConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps the KV cache of prompts in `lmc serve`.

    vLLM creates one connector in its scheduler and one in each worker.
    """

    def __init__(
        self,
        vllm_config: "VllmConfig",
        role: KVConnectorRole,
        kv_cache_config: "KVCacheConfig",
    ) -> None:
        interface.check(logger.warning)
        super().__init__(vllm_config, role, kv_cache_config)
        _refuse_unsupported(vllm_config, kv_cache_config)
        self._windows = [_window(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups]
        # With one KV group a failed load is reported by block, with several groups by request.
        self._fails_by_block = self._windows == [None]
        settings = Settings.read(self._kv_transfer_config.kv_connector_extra_config)
        cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
        if settings.starts and _may_span_hosts(parallel):
            raise ValueError(
                "lmc: the ranks of this engine may be on several hosts, and each host needs a "
                "server: run `lmc start` on each, and set lmc.server to local in "
                "kv_connector_extra_config"
            )
        mode = hash_mode(
            cache.prefix_caching_hash_algo, settings.hash_mode, os.environ.get("PYTHONHASHSEED")
        )
        # All ranks of a tensor-parallel group hold the same latent vectors.
        readers = parallel.tensor_parallel_size if self._is_latent else 1
        common: dict[str, Any] = {
            "model": vllm_config.model_config.model,
            "world_size": parallel.world_size // readers,
            "num_kv_readers": readers,
            "identity": identity_record(
                vllm_config,
                kv_cache_config,
                mode,
                "vllm " + ".".join(vllm.__version__.split(".")[:2]),
                device_name(
                    vllm_config.device_config.device_type, current_platform.get_device_capability()
                ),
                _layers_of_ranks(vllm_config),
                None if self._fails_by_block else self._windows,
                settings.identity,
            ),
            "hash_mode": mode.by_hash,
            # With a window, vLLM has already freed blocks of the tail when it is stored.
            "tails": settings.tails and self._windows == [None],
            "block_size": cache.block_size,
        }
        can_store = self._kv_transfer_config.is_kv_producer
        has_events = are_wanted(vllm_config)
        # Events of chunks that not all ranks have stored.
        self._tally = EventTally(common["world_size"], chunk_of)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._stats = StatsSource()
        self._last_line = ""
        if role == KVConnectorRole.SCHEDULER:
            if mode.warning is not None:
                logger.warning(mode.warning)
            if self._kv_transfer_config.kv_load_failure_policy != "recompute":
                logger.warning(
                    "a failed load ends its request with an error: set "
                    '"kv_load_failure_policy":"recompute" in --kv-transfer-config'
                )
            # The workers have already allocated their KV caches.
            if settings.starts:
                server.start(settings.serve_flags)
            speculative = vllm_config.speculative_config
            self._scheduler = SchedulerSide(
                _native.SchedulerAdapter(settings.endpoint, **common),
                _native.chunk_hashes,
                Weights(settings.weights),
                block_size=cache.block_size,
                by_hash=mode.by_hash,
                can_store=can_store,
                looks_up_early=settings.lookup_on_arrival,
                # A draft model may rewrite the last tokens of a request.
                volatile_tokens=0
                if speculative is None
                else 1 + speculative.num_speculative_tokens,
                min_load_tokens=settings.min_load_tokens,
                windows=self._windows,
                events=event_source(cache.block_size) if has_events else None,
            )
        else:
            with beside_the_engine():
                adapter = _native.WorkerAdapter(
                    settings.endpoint,
                    kv_rank=parallel.rank // readers,
                    copy_threads=settings.copy_threads,
                    **common,
                )
            self._worker = WorkerSide(
                adapter,
                can_store=can_store and parallel.rank % readers == 0,
                events=StoredChunks(adapter, cache.block_size, stored) if has_events else None,
            )
        self._log()

    @property
    def requires_kv_delivery(self) -> bool:
        """Returns False: a dropped store only causes a miss later."""
        return False

    # Workers.

    def register_kv_caches(self, kv_caches: "dict[str, torch.Tensor]") -> None:
        assert self._worker is not None
        groups = self._kv_cache_config.kv_cache_groups
        layout = self._kv_cache_config.kv_cache_layout
        if layout is None:
            raise ValueError("lmc: vLLM gave no layout of the KV cache (kv_cache_layout)")
        self._worker.register_kv_caches(
            [
                ([kv_caches[name] for name in group.layer_names], window)
                for group, window in zip(groups, self._windows, strict=True)
            ],
            KVCacheLayout[layout].layer_view_order,
            blocks=self._kv_cache_config.num_blocks,
            block_size=groups[0].kv_cache_spec.block_size,
            is_latent=self._is_latent,
        )

    def unregister_kv_caches(self) -> None:
        """Stops using the KV cache's memory. vLLM calls it from 0.33 on, before it sleeps."""
        assert self._worker is not None
        self._worker.unregister_kv_caches()

    def restore_kv_caches(self) -> None:
        """Uses the KV cache's memory again after vLLM has woken up."""
        assert self._worker is not None
        self._worker.restore_kv_caches()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert self._worker is not None
        self._worker.handle_preemptions(_step(kv_connector_metadata))

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        assert self._worker is not None
        self._worker.begin_step(_step(self._connector_metadata))

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: loads end before vLLM schedules their request."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: "torch.Tensor",
        attn_metadata: "AttentionMetadata",
        **kwargs: Any,
    ) -> None:
        """Does nothing: stores begin when all layers are computed."""

    def wait_for_save(self) -> None:
        """Begins the stores of this step; vLLM keeps their blocks until the stores have ended."""
        assert self._worker is not None
        self._worker.submit_stores(_step(self._connector_metadata))

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending, results.finished_recving

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        assert self._worker is not None
        step = self._connector_metadata
        stores, loads, failed = self._worker.get_finished(None if step is None else _step(step))
        return KVConnectorTransferResults(stores, loads, set() if self._fails_by_block else failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        assert self._worker is not None
        failed = self._worker.adapter.get_block_ids_with_load_errors()
        return failed if self._fails_by_block else set()

    def get_kv_connector_kv_cache_events(self) -> "KVConnectorKVEvents | None":
        """Returns the chunks that this worker has stored since the last step."""
        assert self._worker is not None
        events = self._worker.take_events()
        return LmcKVEvents(events) if events else None

    # Scheduler.

    def on_new_request(self, request: "Request") -> None:
        assert self._scheduler is not None
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        assert self._scheduler is not None
        return self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        assert self._scheduler is not None
        self._scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: "Request", num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """Returns the number of loaded tokens that came from each kind of tier."""
        assert self._scheduler is not None
        tiers = self._scheduler.tiers_of(request.request_id, num_external_tokens)
        found = {
            CacheHitSource[source]: tiers[tier] for tier, source in _SOURCES.items() if tier in tiers
        }
        if rest := num_external_tokens - sum(found.values()):
            found[CacheHitSource.EXTERNAL_UNSPECIFIED] = rest
        return found

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        assert self._scheduler is not None
        return self._scheduler.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        assert self._scheduler is not None
        self._scheduler.update_connector_output(connector_output)
        if connector_output.kv_cache_events:
            self._tally.add(connector_output.kv_cache_events.get_all_events())

    def take_events(self) -> "Iterable[KVCacheEvent]":
        """Returns the chunks that all ranks have stored; vLLM publishes them."""
        return self._tally.take()

    def register_finished_partial_tail(
        self,
        request: "Request",
        block_ids: tuple[list[int], ...],
        partial_tail_offloads: list[tuple[int, int, int]],
    ) -> bool:
        """Returns False: partial blocks are not stored.

        vLLM 0.32 calls this only for Mamba layers (`MambaManager.finalize_partial_tail_offload`), and
        lmc refuses models with such layers.
        """
        return False

    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduler is not None
        return self._scheduler.request_finished(request, (block_ids,)), None

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduler is not None
        return self._scheduler.request_finished(request, block_ids), None

    def reset_cache(self) -> bool | None:
        """Makes this engine miss all chunks stored before; other engines still find them.

        vLLM calls it when weights change.
        """
        if self._scheduler is None:
            return None
        self._scheduler.reset_cache()
        return True

    # Both.

    def get_kv_connector_stats(self) -> "KVConnectorStats | None":
        self._log()
        if self._scheduler is not None:
            totals = {
                **self._scheduler.adapter.stats(),
                **self._scheduler.counts,
                "kv_events_dropped": self._tally.dropped,
            }
        else:
            assert self._worker is not None
            totals = self._worker.adapter.stats()
        return self._stats.take(totals)

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> "KVConnectorStats | None":
        return LmcStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: "dict[type[PromMetric], type[PromMetricT]]",
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> "KVConnectorPromMetrics | None":
        return LmcPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Ends all threads; vLLM frees the KV cache afterwards."""
        self._log()
        for side in self._sides:
            side.shutdown()

    def _log(self) -> None:
        """Writes the adapters' lines to vLLM's log, once a step."""
        for side in self._sides:
            for level, text in side.adapter.take_log():
                # A server that stays away is named at each attempt to connect.
                if text != self._last_line:
                    logger.log(level, "%s", text)
                self._last_line = text

    @property
    def _sides(self) -> "list[SchedulerSide | WorkerSide]":
        return [side for side in (self._scheduler, self._worker) if side is not None]

    @property
    def _is_latent(self) -> bool:
        return isinstance(self._kv_cache_config.kv_cache_groups[0].kv_cache_spec, MLAAttentionSpec)


def _step(metadata: object) -> Step:
    assert isinstance(metadata, Step)
    return metadata


def _refuse_unsupported(config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> None:
    """Raises `ValueError` for KV caches that lmc cannot hold."""
    parallel = config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise ValueError(
            "lmc does not support context-parallel engines: start vLLM without "
            "--decode-context-parallel-size and --prefill-context-parallel-size, or without lmc"
        )
    sleeps = config.device_config.device_type != "cpu" and config.model_config.enable_sleep_mode
    if sleeps and not hasattr(KVConnectorBase_V1, "unregister_kv_caches"):
        raise ValueError(
            "lmc copies while the engine computes, and sleep mode of this vLLM frees the KV cache's "
            "memory during copies: start vLLM without --enable-sleep-mode, or without lmc, or use "
            "vLLM 0.33, which announces a sleep to connectors"
        )
    groups = kv_cache_config.kv_cache_groups
    specs = [group.kv_cache_spec for group in groups]
    # Subclasses of these kinds keep blocks in other ways.
    are_known = all(type(spec) in (FullAttentionSpec, SlidingWindowSpec) for spec in specs)
    if not (specs and are_known) and [type(spec) for spec in specs] != [MLAAttentionSpec]:
        kinds = ", ".join(type(spec).__name__ for spec in specs)
        raise ValueError(
            "lmc supports KV caches of layers with full attention and with sliding windows, but "
            f"this model has {len(specs)} groups ({kinds}): start vLLM with "
            "--disable-hybrid-kv-cache-manager if the model allows it, or without lmc"
        )
    hashes = kv_cache_config.hash_block_size or config.cache_config.block_size
    for spec in specs:
        if not spec.block_size == hashes == config.cache_config.block_size:
            raise ValueError(
                "lmc requires KV blocks, vLLM's block hashes and --block-size to have the same number "
                f"of tokens: a group has {spec.block_size}, the hashes {hashes}, --block-size is "
                f"{config.cache_config.block_size}: set --block-size to a size that the attention "
                "backend uses unchanged, and start vLLM without --prefix-match-unit"
            )
    if not all(group.layer_names for group in groups):
        raise ValueError(
            "lmc requires layers of every KV group in every pipeline rank, but a rank of this engine "
            "has no layer of one group: start vLLM with --disable-hybrid-kv-cache-manager or with "
            "fewer ranks"
        )


def _window(spec: "KVCacheSpec") -> int | None:
    """Returns the number of tokens before a token that vLLM keeps; `None` if it keeps all."""
    if not isinstance(spec, SlidingWindowSpec):
        return None
    return spec.sliding_window + spec.extra_retained_tokens


def _may_span_hosts(parallel: "ParallelConfig") -> bool:
    """Returns True if vLLM may run ranks of one engine on other hosts. With Ray, Ray decides."""
    # A name, or a class of executors.
    is_ray = "ray" in str(parallel.distributed_executor_backend).lower()
    return is_ray or parallel.nnodes_within_dp > 1


def _layers_of_ranks(config: "VllmConfig") -> list[tuple[int, int]]:
    """Returns the layers of each pipeline rank; all ranks return the same list."""
    layers = config.model_config.get_total_num_hidden_layers()
    ranks = config.parallel_config.pipeline_parallel_size
    return [get_pp_indices(layers, rank, ranks) for rank in range(ranks)]
