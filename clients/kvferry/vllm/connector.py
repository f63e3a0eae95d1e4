"""KvferryConnector: vLLM's interface, divided among the scheduler's and the worker's side."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from kvferry.vllm import register
from kvferry.vllm.missed import Missed, MissedCounters
from kvferry.vllm.options import Options
from kvferry.vllm.scheduler import SchedulerSide
from kvferry.vllm.step import Address, Step
from kvferry.vllm.weights import watch_core
from kvferry.vllm.worker import WorkerSide

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


register()  # MultiConnector looks its connectors up by name, also where the name came with a module's path


class KvferryConnector(KVConnectorBase_V1, SupportsHMA):
    """Each method is called in one of the two roles only."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        options = Options.parse(vllm_config.kv_transfer_config.kv_connector_extra_config)
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(vllm_config, kv_cache_config, options)
            watch_core()
        else:
            self._worker = WorkerSide(vllm_config, kv_cache_config, options)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        return False  # the cache is the daemon's: vLLM cannot unmap it

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Missed:
        return Missed(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: VllmConfig, metric_types: dict[Any, Any], labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> MissedCounters:  # fmt: skip
        return MissedCounters(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def get_kv_connector_stats(self) -> Missed | None:
        return (self._scheduler if self.role is KVConnectorRole.SCHEDULER else self._worker).missed.take()

    # The scheduler's side.

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._scheduler.watch(kv_cache_manager)

    def reset_cache(self) -> bool | None:
        """Nothing of a prefix is cached here. Published KV stays readable: its weights are the same ones."""
        return True

    def joined(self) -> None:
        """It is one of several."""
        self._scheduler.joined()

    def others_emptied(self) -> None:
        """All connectors beside this one have forgotten what they had."""
        self._scheduler.others_emptied()

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Address]) -> None:
        self._scheduler.reached_at(metadata)

    def on_new_request(self, request: Request) -> None:
        self._scheduler.admit(request)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        return tuple(self._kv_cache_config.transfer_group_ids)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler.loadable(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Step:
        return self._scheduler.next_step(scheduler_output, self._kv_cache_manager.get_block_ids)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._scheduler.ended(connector_output.finished_recving or (), connector_output.failed_recving)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.finished(request, block_ids)

    # The worker's side, in the order of a step.

    def get_mem_pool_context(self) -> AbstractContextManager[None] | None:
        return self._worker.pool()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker.register(kv_caches)

    def get_handshake_metadata(self) -> Address:
        return self._worker.address

    def handle_preemptions(self, kv_connector_metadata: Step) -> None:
        self._worker.revoke(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: Step) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._worker.begin(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads begin with the step: they need nothing of its forward pass."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """No forward pass waits: a request runs when all of its KV is there."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is saved: readers read the cache itself."""

    def wait_for_save(self) -> None:
        self._worker.computed(self._get_connector_metadata())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return self._worker.results(self._get_connector_metadata())

    def shutdown(self) -> None:
        if self.role is KVConnectorRole.WORKER:
            self._worker.close()
