"""vLLM's OffloadingConnector without a GPU: its own scheduling and bookkeeping, with copies in host memory.

CPUOffloadingSpec makes its worker beside a GPU only: it copies with CUDA streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class HostOffloadingSpec(CPUOffloadingSpec):
    def get_worker(self, kv_caches: Any) -> HostWorker:
        return HostWorker([cache.tensor for cache in kv_caches.tensors], self.num_chunks)


class HostWorker(OffloadingWorker):
    """A chunk for each block. A copy is over when it has been submitted."""

    def __init__(self, caches: Sequence[torch.Tensor], chunks: int) -> None:
        self._caches = caches
        self._kept = [torch.zeros((chunks, cache.shape[1]), dtype=cache.dtype) for cache in caches]
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, self._caches, src_spec, self._kept, dst_spec)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, self._kept, src_spec, self._caches, dst_spec)

    def _copy(self, job_id: int, sources: Any, taken: Any, destinations: Any, given: Any) -> bool:
        rows, places = torch.as_tensor(taken.block_ids), torch.as_tensor(given.block_ids)
        for source, destination in zip(sources, destinations, strict=True):
            destination[places] = source[rows]
        nbytes = len(rows) * sum(source.shape[1] for source in sources)
        self._done.append(TransferResult(job_id, success=True, transfer_size=nbytes, transfer_time=0.0))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Every copy is over."""
