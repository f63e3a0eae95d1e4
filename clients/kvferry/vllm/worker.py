"""The connector in a vLLM worker: the cache's memory and manifest, and what each step publishes, loads and reports."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.logger import init_logger

from kvferry.blocking import BlockingEngineClient
from kvferry.errors import Malformed
from kvferry.manifest import ManifestBuilder, ModelInfo
from kvferry.memory import CudaMemory, CudaRegion, SharedRegion, VmmMemory, cuda_memory
from kvferry.memory.placing import placed, region_nbytes
from kvferry.vllm.identity import fingerprint
from kvferry.vllm.layers import Group, describe
from kvferry.vllm.missed import Missed
from kvferry.vllm.options import Options
from kvferry.vllm.session import Before, End, Session
from kvferry.vllm.step import Address, Step
from kvferry.vllm.weights import VllmWeights

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

log = init_logger("vllm.kvferry.worker")
MIXED = (
    "mixed_weights: other weights, which have been replaced, computed what the prefix cache has of it "
    "(reset the prefix cache: docs/vllm.md)"
)
UNSUPPORTED = {
    "prefill_context_parallel_size": "all ranks of prefill context parallelism would be one here (DCP is described)",
    "enable_sleep_mode": "vLLM would give back memory that the daemon reads, and come back with another",
    "hisparse_config": "HiSparse keeps the cache in memory of the host that the daemon does not have",
}
"""Options of vLLM with which a worker does not start, and why."""
LINGER_S = 0.005
"""How long a new request may have to wait for an engine that has nothing to compute."""


class WorkerSide:
    """An engine rank. The session with its daemon begins here and ends with `close`."""

    def __init__(self, config: VllmConfig, caches: KVCacheConfig, options: Options) -> None:
        self._config = config
        self._num_blocks, self._nbytes = caches.num_blocks, caches.kv_cache_tensors[0].size
        # Names copied: the model runner adds layers that share another's cache to its groups later.
        self._groups = [
            Group(str(i), caches.kv_cache_groups[i].kv_cache_spec, tuple(caches.kv_cache_groups[i].layer_names))
            for i in caches.transfer_group_ids
        ]
        self._options = options
        self._device: str = config.device_config.device_type
        parallel = config.parallel_config
        for refused, value in _unsupported(config).items():
            what, remedy = f"vLLM has {refused}: {UNSUPPORTED[refused]}", "start vLLM without it"
            raise Malformed("unsupported_engine", what, field=refused, value=value, remedy=remedy)
        self._tp_rank, self._tp = get_tp_group().rank_in_group, parallel.tensor_parallel_size
        self._rank = get_pp_group().rank_in_group * self._tp + self._tp_rank
        self._world_size = parallel.pipeline_parallel_size * self._tp
        dp_rank = parallel.data_parallel_index
        gpu = None if self._device == "cpu" else torch.cuda.current_device()
        socket = options.socket_of(self._rank, self._world_size, get_tp_group().local_rank, dp_rank, gpu)
        self._engine_id, self._epoch = config.kv_transfer_config.engine_id, config.instance_id
        self._daemon = BlockingEngineClient.connect(
            socket, engine_id=self._engine_id, epoch=self._epoch, rank=self._rank, world_size=self._world_size,
            timeout_s=options.connect_timeout_s, say=log.warning,
        )  # fmt: skip
        self._session = Session(self._daemon, options)
        self._weights = VllmWeights(self._daemon, config)
        self.missed = Missed()
        self._memory: SharedRegion | CudaRegion | CudaMemory | VmmMemory | None = None
        log.info("rank %d of %d is attached to the daemon on %s", self._rank, self._world_size, socket)

    @property
    def address(self) -> Address:
        return Address(self._daemon.peer_address)

    def pool(self) -> AbstractContextManager[None] | None:
        """The context for the allocation of the cache; None where vLLM is to allocate it as usual."""
        if self._options.memory == "adopted":
            return None
        buffer = torch.empty(self._nbytes, dtype=torch.int8, device="meta")
        self._memory = region = self._daemon.allocate(region_nbytes([buffer], self._device))
        return placed(region, [buffer])

    def register(self, caches: Mapping[str, torch.Tensor]) -> None:
        """Describe every layer's cache to the daemon. Raises KvferryError."""
        storage = next(iter(caches.values())).untyped_storage()
        memory = self._memory
        if memory is None and self._device == "cuda":
            memory = adopted = cuda_memory(storage.data_ptr(), storage.nbytes(), device=torch.cuda.current_device())
            self._daemon.adopt(adopted)
        if memory is None or not 0 <= storage.data_ptr() - memory.address <= memory.nbytes - self._nbytes:
            field, remedy = "kv_connector_extra_config.memory", '"owned", or on a GPU "adopted"'
            what = "vLLM's cache does not lie in memory that the daemon can reach"
            raise Malformed("cache_elsewhere", what, field=field, value=self._options.memory, remedy=remedy)
        self._memory = memory
        model = ModelInfo(name=self._config.model_config.model, fingerprint=fingerprint(self._config, self._options))
        parallel = {"tp": self._tp, "pp": self._world_size // self._tp}
        builder = ManifestBuilder(
            self._engine_id, self._epoch, model, rank=self._rank, world_size=self._world_size, parallel=parallel
        ).region(0, memory.kind, nbytes=memory.nbytes, address=memory.address)
        describe(builder, self._config, self._groups, self._num_blocks, caches, self._tp_rank, self._tp)
        if self._device == "cuda":
            self._daemon.open_fences(torch.cuda.current_device())
        for note in self._daemon.register(builder.build()):
            log.warning("%s", note)
        log.info("the daemon knows the cache of %d layers", len(caches))

    def revoke(self, step: Step) -> None:
        """First of all in a step: its forward pass may overwrite these blocks."""
        for request_id in step.revoke:
            self._session.revoke(request_id)

    def begin(self, step: Step) -> None:
        """Do what does not depend on the step's forward pass."""
        session, before, self._weights.step = self._session, None, step.number
        if step.load and self._device == "cuda":  # steps that are under way may still write these blocks
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch has no types for it
            event.record()
            before = Before(event)
        with session.together():
            for request_id in step.cancel:
                session.cancel(request_id)
            for publish in step.finished:
                session.publish(publish, self._weights.of(publish.since))
            for request_id in step.hold:
                session.hold(request_id)
            for request_id in step.unread:
                session.end_unread(request_id)
            for load in step.load:
                if self._weights.replaced_since(load.since):
                    log.warning("request %s was not read: %s", load.request_id, MIXED)
                    session.refuse(load.request_id)
                else:
                    session.load(load, before)
            for load in step.release:
                session.release(load)
        for request_id in step.refuse:
            session.refuse(request_id)

    def computed(self, step: Step) -> None:
        """The forward pass is under way: publish what it computes as soon as it has."""
        after = None
        if step.computed and self._device == "cuda":
            after = self._daemon.written(torch.cuda.current_stream())
        with self._session.together():
            for publish in step.computed:
                self._session.publish(publish, self._weights.of(publish.since), after)

    def results(self, step: Step) -> KVConnectorTransferResults:
        """Ends since the last step.

        A step that computes nothing waits up to LINGER_S for an end. Otherwise vLLM would step on at once: that takes a
        core from the daemon, and the end would be seen some steps later.
        """
        session = self._session
        ended = session.ended(LINGER_S if step.idle and session.waiting else 0.0)
        arrived, failed = ended[End.ARRIVED], ended[End.FAILED]
        if unpublished := ended[End.UNPUBLISHED]:
            self.missed.add("unpublished", len(unpublished))
        if mixed := ended[End.MIXED]:
            self.missed.add("mixed_weights", len(mixed))
        return KVConnectorTransferResults(
            finished_sending=ended[End.SENT], finished_recving=arrived | failed, failed_recving=failed
        )

    def close(self) -> None:
        """Published KV stays readable until it is read or expires."""
        self._daemon.close()
        if isinstance(self._memory, SharedRegion | CudaRegion):
            self._memory.close()


def _unsupported(config: VllmConfig) -> dict[str, object]:
    """Options of UNSUPPORTED that the engine has."""
    ranks = config.parallel_config.prefill_context_parallel_size
    asked = {
        "prefill_context_parallel_size": ranks if ranks > 1 else 0,
        "enable_sleep_mode": config.model_config.enable_sleep_mode,
        "hisparse_config": config.attention_config.hisparse_config,
    }
    return {name: value for name, value in asked.items() if value}
