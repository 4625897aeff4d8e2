"""The worker's side of the connector: copies, and reports of their ends."""

import logging
import time
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

from lmc.vllm.events import StoredChunks
from lmc.vllm.metadata import Step

if TYPE_CHECKING:
    import torch

    from lmc._native import WorkerAdapter

logger = logging.getLogger("vllm.lmc")

# Names of the orders of heads and tokens in a block.
LAYOUTS: dict[tuple[int, ...], str] = {(0, 1, 2, 3): "HND", (0, 2, 1, 3): "NHD"}
# Longest time in seconds that a step waits for stores of requests that lost their blocks, and of
# requests that lost blocks which a window has left; the second case is more frequent.
PREEMPTION_TIMEOUT = 5.0
WINDOW_TIMEOUT = 0.5
# Longest time in seconds that a step waits until other servers can find the stores for another engine.
HAND_OVER_TIMEOUT = 0.05
# Time in seconds without further waits after a wait for a window's blocks timed out.
HURRY = 10.0


class WorkerSide:
    """Copies of one worker."""

    def __init__(
        self,
        adapter: "WorkerAdapter",
        *,
        can_store: bool,
        events: StoredChunks | None = None,
    ) -> None:
        """`can_store`: this rank stores. Of ranks with equal KV data only one stores.

        `events` creates KV events if vLLM's KV events are on.
        """
        self.adapter = adapter
        self._can_store = can_store
        self._events = events if can_store else None
        # The GPU with the KV cache.
        self._device: torch.device | None = None
        # The arguments of vLLM's registration, for the registration after a sleep.
        self._kv_caches: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._sleeps = False
        self._hurries_until = 0.0

    def register_kv_caches(
        self,
        groups: "Sequence[tuple[Sequence[torch.Tensor], int | None]]",
        axes: tuple[int, ...],
        *,
        blocks: int,
        block_size: int,
        is_latent: bool,
    ) -> None:
        """Registers the KV cache of each layer, and the window of each KV group, with the adapter.

        vLLM's tensors have the axes blocks, heads, tokens, content. `axes` is their order in memory.
        `is_latent`: one vector for each token instead of heads (MLA).
        """
        named = {"blocks": blocks, "block_size": block_size, "is_latent": is_latent}
        self._kv_caches = ((groups, axes), named)
        layout = LAYOUTS.get(axes)
        if layout is None:
            raise ValueError(
                f"lmc does not support a KV cache with the axes in the order {axes} in memory: "
                "set VLLM_KV_CACHE_LAYOUT to LBHNC or LBNHC"
            )
        device = groups[0][0][0].device
        described = []
        for tensors, window in groups:
            # Layers of a group may share one cache.
            layers = {}
            for tensor in tensors:
                if tensor.device != device:
                    raise ValueError(
                        f"lmc requires all KV caches of a worker on one device, but they are on "
                        f"{device} and {tensor.device}: start vLLM without lmc"
                    )
                if tensor.dim() != 4 or tensor.shape[0] != blocks:
                    raise ValueError(
                        f"lmc does not support a KV cache of shape {tuple(tensor.shape)} with {blocks} "
                        f"blocks of {block_size} tokens: set --block-size to a size that the attention "
                        "backend uses unchanged"
                    )
                view = tensor.permute(axes)
                if is_latent:
                    view = view.squeeze(axes.index(1))
                dtype = str(tensor.dtype).removeprefix("torch.")
                address = view.data_ptr()
                layers[address] = (address, list(view.shape), list(view.stride()), dtype)
            described.append((list(layers.values()), window))
        gpu = None if device.type == "cpu" else _uuid(device)
        self.adapter.register_kv_caches(
            described, layout=layout, tokens_per_block=block_size, gpu=gpu
        )
        self._device = None if gpu is None else device

    def unregister_kv_caches(self) -> None:
        """Stops using the KV cache's memory until it is restored."""
        if self._kv_caches is not None:
            self.adapter.unregister_kv_caches()
            self._sleeps = True

    def restore_kv_caches(self) -> None:
        """Registers the KV cache as before, wherever its memory lies now."""
        if self._kv_caches is None or not self._sleeps:
            return
        positional, named = self._kv_caches
        try:
            self.register_kv_caches(*positional, **named)
        except ValueError as error:
            # An engine without a cache is better than an engine that does not wake up.
            logger.warning(
                "the KV cache could not be registered again, so no chunks are loaded or stored until "
                "vLLM has slept and woken up once more: %s",
                error,
            )
            return
        self._sleeps = False

    def shutdown(self) -> None:
        """Ends all threads, and leaves the KV cache to vLLM."""
        self.adapter.shutdown()
        self._kv_caches = None

    def handle_preemptions(self, step: Step) -> None:
        """Waits until no store reads the blocks that requests have lost."""
        if step.preempted and not self.adapter.wait_for_stores(step.preempted, PREEMPTION_TIMEOUT):
            self._warn_of_dropped(len(step.preempted), PREEMPTION_TIMEOUT)
        if step.freed:
            now = time.monotonic()
            timeout = 0.0 if now < self._hurries_until else WINDOW_TIMEOUT
            if not self.adapter.wait_for_stores_before(step.freed, timeout):
                if timeout:
                    self._warn_of_dropped(len(step.freed), timeout)
                self._hurries_until = now + HURRY

    def _warn_of_dropped(self, requests: int, timeout: float) -> None:
        logger.warning(
            "vLLM frees blocks of %d requests whose stores took longer than %s s; stores that had not "
            "begun were dropped, and their chunks are not cached",
            requests,
            timeout,
        )

    def begin_step(self, step: Step) -> None:
        """Begins the loads of a step, and the stores of blocks that earlier steps have written.

        vLLM also calls this for a step that computes nothing.
        """
        if self._events is not None:
            self._events.submitted(step.blocks)
        if step.tails and self._can_store:
            self.adapter.batched_submit_store_requests(step.tails, stream=self._stream())
        if step.loads:
            self.adapter.batched_submit_retrieve_requests(step.loads, stream=self._stream())

    def submit_stores(self, step: Step) -> None:
        """Begins the stores of the blocks that this step has written.

        A decode engine may ask for these chunks as soon as vLLM has answered.
        """
        if step.stores and self._can_store:
            self.adapter.batched_submit_store_requests(step.stores, stream=self._stream())
        if step.handed_over and self._can_store:
            self.adapter.wait_until_reserved(step.handed_over, HAND_OVER_TIMEOUT)

    def _stream(self) -> int | None:
        """Returns the GPU stream of the step's work; copies begin after this work.

        Loads wait for it, too: the previous step may still write to blocks that a request has lost.
        """
        if self._device is None:
            return None
        import torch

        return torch.cuda.current_stream(self._device).cuda_stream

    def take_events(self) -> list[Hashable]:
        """Returns the KV events of the chunks that were stored since the last call.

        Called after `get_finished`, it returns the events of every reported request.
        """
        return [] if self._events is None else self._events.take()

    def get_finished(self, step: Step | None) -> tuple[set[str], set[str], set[str]]:
        """Returns three sets of requests: stores have ended, loads have ended, loads have failed.

        The adapter gets only finished requests whose blocks vLLM keeps: a report of any other request
        would end vLLM.
        """
        finished = step.finished if step is not None else set()
        if self._can_store:
            return self.adapter.get_finished(finished)
        # vLLM waits for every rank, and this one has stored nothing.
        return (finished, *self.adapter.get_finished(set())[1:])


def _uuid(device: "torch.device") -> str:
    """Returns the id of an NVIDIA GPU, or raises `ValueError` for another device."""
    import torch

    if device.type != "cuda" or torch.version.cuda is None:
        raise ValueError(
            f"lmc supports KV caches in host memory and on NVIDIA GPUs, but this one is on {device}: "
            "start vLLM without lmc"
        )
    return str(torch.cuda.get_device_properties(device).uuid)
