"""The connector in a vLLM worker: the cache's memory and manifest, and what each step publishes, loads and reports."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs, get_kv_cache_spec_sliding_window

from kvferry.errors import KvferryError
from kvferry.manifest import Manifest, ManifestBuilder, ModelInfo, Shard, TokenShard
from kvferry.memory import CudaRegion, SharedRegion, cuda_memory
from kvferry.vllm.fingerprint import fingerprint
from kvferry.vllm.geometry import parts
from kvferry.vllm.memory import inside, region_nbytes
from kvferry.vllm.options import Options
from kvferry.vllm.session import Session
from kvferry.vllm.step import Address, Step

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

log = init_logger("vllm.kvferry.worker")


class WorkerSide:
    """One engine rank. The session begins here and ends with `close`."""

    def __init__(self, config: VllmConfig, caches: KVCacheConfig, options: Options) -> None:
        self._config = config
        self._num_blocks = caches.num_blocks
        self._nbytes = caches.kv_cache_tensors[0].size
        # Copied: the model runner adds layers that share another's cache to its groups later.
        self._groups = [
            (str(group_id), caches.kv_cache_groups[group_id].kv_cache_spec, list(names))
            for group_id in caches.transfer_group_ids
            for names in [caches.kv_cache_groups[group_id].layer_names]
        ]
        self._options = options
        self._device = torch.device(config.device_config.device_type)
        parallel = config.parallel_config
        self._tp_rank, self._tp = get_tp_group().rank_in_group, parallel.tensor_parallel_size
        self._rank = get_pp_group().rank_in_group * self._tp + self._tp_rank
        self._world_size = parallel.pipeline_parallel_size * self._tp
        socket = options.socket_of(
            self._rank, self._world_size, get_tp_group().local_rank, parallel.data_parallel_index
        )
        self._session = Session.connect(
            options, socket, config.kv_transfer_config.engine_id, config.instance_id, self._rank, self._world_size
        )
        self._region: SharedRegion | CudaRegion | None = None
        log.info("rank %d of %d is with the daemon on %s", self._rank, self._world_size, socket)

    @property
    def address(self) -> Address:
        return Address(self._session.client.peer_address)

    def pool(self) -> AbstractContextManager[None] | None:
        """The context for the allocation of the cache; None where vLLM is to allocate it as usual."""
        if self._options.memory == "adopted":
            return None
        nbytes = region_nbytes(self._nbytes, self._device)
        self._region = self._session.call(self._session.client.allocate(nbytes))
        return inside(self._region)

    def register(self, caches: Mapping[str, torch.Tensor]) -> None:
        """Describe every layer's cache to the daemon. Raises KvferryError."""
        began = time.monotonic()
        memory = next(iter(caches.values())).untyped_storage()
        if self._options.memory == "adopted":
            if self._device.type != "cuda":
                raise KvferryError(
                    "bad_option",
                    "host memory that vLLM allocated cannot be shared with a daemon",
                    field="kv_connector_extra_config.memory",
                    value="adopted",
                    remedy='leave it at "owned"',
                )
            adopted = cuda_memory(memory.data_ptr(), memory.nbytes(), device=torch.cuda.current_device())
            self._session.call(self._session.client.adopt(adopted))
            kind, address, nbytes = adopted.kind, adopted.address, adopted.nbytes
        else:
            assert self._region is not None, "vLLM has allocated its cache without asking get_mem_pool_context"
            kind, address, nbytes = self._region.kind, self._region.address, self._region.nbytes
            if not address <= memory.data_ptr() <= memory.data_ptr() + self._nbytes <= address + nbytes:
                raise KvferryError(
                    "cache_elsewhere",
                    "vLLM's cache does not lie in the daemon's memory",
                    field="kv_caches",
                    value=hex(memory.data_ptr()),
                    remedy="this version of vLLM allocates it in another way than docs/vllm.md says: please report it",
                )
        manifest = self._describe(caches, kind, address, nbytes)
        for note in self._session.call(self._session.client.register(manifest)):
            log.warning("%s", note)
        log.info("described %d components in %.1f s", len(manifest.components), time.monotonic() - began)

    def _describe(self, caches: Mapping[str, torch.Tensor], kind: str, address: int, nbytes: int) -> Manifest:
        config, parallel = self._config, self._config.parallel_config
        total_heads, dcp = config.model_config.get_total_num_kv_heads(), parallel.decode_context_parallel_size
        builder = ManifestBuilder(
            config.kv_transfer_config.engine_id,
            config.instance_id,
            ModelInfo(name=config.model_config.model, fingerprint=fingerprint(config, self._options)),
            rank=self._rank,
            world_size=self._world_size,
            parallel={"tp": self._tp, "pp": parallel.pipeline_parallel_size, "dcp": dcp},
        ).region(0, kind, nbytes=nbytes, address=address)
        layers = config.compilation_config.static_forward_context
        seen: dict[int, int] = {}
        for group, spec, names in self._groups:
            builder.group(
                group,
                num_blocks=self._num_blocks,
                block_size=spec.block_size,
                window=get_kv_cache_spec_sliding_window(spec),
                token_shard=TokenShard(
                    rank=self._tp_rank % dcp, size=dcp, interleave=parallel.cp_kv_cache_interleave_size
                )
                if dcp > 1 and spec.dcp_sharded
                else None,
            )
            for name in names:
                one = spec.kv_cache_specs[name] if isinstance(spec, UniformTypeKVCacheSpecs) else spec
                index = extract_layer_index(name)
                nth = seen[index] = seen.get(index, -1) + 1
                shards = min(self._tp, one.max_tp_shards or total_heads)
                heads = caches[name].shape[1]
                shard = Shard(axis="head", start=self._tp_rank * shards // self._tp * heads, total=shards * heads)
                found = parts(layers[name], name, one, caches[name], self._num_blocks, config.model_config.dtype)
                for part in found:
                    label = f"{part.name}.{nth}" if nth else part.name
                    builder.component(
                        group, layer=index, name=label, array=part.view, axes=part.axes, shard=shard
                    )
        return builder.build()

    def revoke(self, step: Step) -> None:
        """Before anything else of a step, for its forward pass may overwrite these blocks."""
        for request_id in step.revoke:
            self._session.revoke(request_id)

    def begin(self, step: Step) -> None:
        """What does not depend on the step's forward pass."""
        session = self._session
        for request_id in step.cancel:
            session.cancel(request_id)
        for publish in step.finished:
            session.publish(publish)
        for request_id in step.hold:
            session.hold(request_id)
        for load in step.load:
            session.load(load)
        for load in step.release:
            session.release(load)
        for request_id in step.refuse:
            session.failed.append(request_id)
            session.arrived.append(request_id)

    def computed(self, step: Step) -> None:
        """The forward pass is under way: publish what it computes as soon as it has."""
        if not step.computed:
            return
        ready = None
        if self._device.type == "cuda":
            ready = torch.cuda.Event()
            ready.record()
        for publish in step.computed:
            self._session.publish(publish, ready)

    def results(self) -> KVConnectorTransferResults:
        """What has ended since the last step. Never waits."""
        arrived = _drain(self._session.arrived)  # before `failed`, which is told first
        return KVConnectorTransferResults(
            finished_sending=_drain(self._session.sent),
            finished_recving=arrived,
            failed_recving=_drain(self._session.failed),
        )

    def close(self) -> None:
        self._session.close()
        if self._region is not None:
            self._region.close()


def _drain(queue: Any) -> set[str]:
    return {queue.popleft() for _ in range(len(queue))}
