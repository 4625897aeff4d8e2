"""lmc's connector with faults in the loads of rank 1, which a request asks for with `lmc.fault` in its
`kv_transfer_params`:

  fails            the rank asks for chunks that the server does not have
  late             the rank begins the load when it has looked 20 times for loads that have ended
  late and fails   both
"""

import logging

from lmc.vllm.connector import LmcConnector

logger = logging.getLogger("vllm.lmc.faulty")
LATE = 20


class FaultyConnector(LmcConnector):
    """See above."""

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        self.has_faults = vllm_config.parallel_config.rank == 1
        # Loads that are held back, each with how often it still is.
        self.late = []

    def start_load_kv(self, forward_context, **kwargs):
        step = self._connector_metadata
        if self.has_faults:
            named = set()
            for op in list(step.loads):
                fault = (op.configs or {}).get("lmc.fault", "")
                # Whole chunks and a tail are one load of a request.
                if fault and op.request_id not in named:
                    named.add(op.request_id)
                    logger.warning("fault: %s, %s", fault, op.request_id)
                if fault.endswith("fails"):
                    op.chunk_hashes = bytes(byte ^ 0xFF for byte in op.chunk_hashes)
                if fault.startswith("late"):
                    step.loads.remove(op)
                    self.late.append([LATE, op])
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids):
        for held in self.late:
            held[0] -= 1
        due = [op for left, op in self.late if left == 0]
        self.late = [held for held in self.late if held[0] > 0]
        if due:
            self._worker.adapter.batched_submit_retrieve_requests(due)
        return super().get_transfer_results(finished_req_ids)
