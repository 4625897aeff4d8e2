"""Counters of the connector, as vLLM collects and shows them."""

from collections import Counter
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)


class LmcStats(KVConnectorStats):
    """Counts since the last report, by name."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> "LmcStats":
        sums: Counter[str] = Counter(self.data)
        sums.update(other.data)
        return LmcStats(data=dict(sums))

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not any(self.data.values())


class StatsSource:
    """Differences between totals, so that each count is reported once."""

    def __init__(self) -> None:
        self._reported: dict[str, int] = {}

    def take(self, totals: dict[str, int]) -> LmcStats | None:
        """Returns the counts since the last call; `None` if nothing was counted."""
        if totals == self._reported:
            return None
        news = {name: total - self._reported.get(name, 0) for name, total in totals.items()}
        self._reported = dict(totals)
        return LmcStats(data={name: count for name, count in news.items() if count})


class LmcPromMetrics(KVConnectorPromMetrics):
    """One Prometheus counter, `vllm:lmc_total`, with the counters' names as a label."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counter: Any = self._counter_cls(
            name="vllm:lmc",
            documentation="Events of the lmc connector, by name.",
            labelnames=[*labelnames, "event"],
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, count in transfer_stats_data.items():
            if count > 0:
                self._counter.labels(*labels, name).inc(count)
