"""Handovers that were asked for and did not come about, as vLLM's /metrics and its log count them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import prometheus_client
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

if TYPE_CHECKING:
    from vllm.config import VllmConfig

METRIC = "vllm:kvferry_missed_handovers"
REASONS = ("refused", "failed", "computed", "several_prompts", "unpublished", "mixed_weights")
"""The values of the metric's label `reason`. docs/vllm.md explains them."""


class Missed(KVConnectorStats):
    """How many, by reason, since the last time that vLLM asked."""

    data: dict[str, int]

    def add(self, reason: str, count: int = 1) -> None:
        assert reason in REASONS
        self.data[reason] = self.data.get(reason, 0) + count

    def take(self) -> Missed | None:
        """All that has been counted; None where that is nothing."""
        taken, self.data = Missed(self.data), {}
        return taken if taken.data else None

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> Missed:
        self.data = dict(Counter(self.data) + Counter(other.data))
        return self

    def reduce(self) -> dict[str, int | float]:
        return {f"missed handovers, {reason}": count for reason, count in self.data.items()}

    def is_empty(self) -> bool:
        return not self.data


class MissedCounters(KVConnectorPromMetrics):
    """All of them begin at 0, so that the first one is seen as a rise."""

    def __init__(
        self, vllm_config: VllmConfig, metric_types: dict[Any, Any], labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:  # fmt: skip
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter = metric_types[prometheus_client.Counter](
            name=METRIC, documentation="Handovers of KV that were asked for and did not come about.",
            labelnames=[*labelnames, "reason"],
        )  # fmt: skip
        self._counters = {
            (engine, reason): counter.labels(*values, reason)
            for engine, values in per_engine_labelvalues.items()
            for reason in REASONS
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for reason, count in transfer_stats_data.items():
            self._counters[engine_idx, reason].inc(count)
