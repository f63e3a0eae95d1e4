"""A connector beside which nothing unwritten can be read unseen: the blocks of every load hold NaN before it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.vllm.connector import KvferryConnector

if TYPE_CHECKING:
    import torch

    from kvferry.vllm.step import Step


class PoisonedConnector(KvferryConnector):
    """As requests may leave them that had these blocks before. vLLM's scheduler gives blocks to a load, and its workers
    call `handle_preemptions` before they do anything else of that step."""

    def handle_preemptions(self, kv_connector_metadata: Step) -> None:
        super().handle_preemptions(kv_connector_metadata)
        blocks = [
            block
            for load in kv_connector_metadata.load
            for table in load.tables.values()
            for block in table.block_ids.tolist()
        ]
        assert 0 not in blocks
        for cache in self._caches():
            cache.view(self._kv_cache_config.num_blocks, -1, *cache.shape[1:])[blocks] = _poison(cache)

    def _caches(self) -> list[torch.Tensor]:
        """[block, ...] of every layer, and of every state of it."""
        layers = self._vllm_config.compilation_config.static_forward_context
        found: list[torch.Tensor] = []
        for layer in layers.values():
            held = getattr(layer, "kv_cache", None)
            found += held if isinstance(held, list | tuple) else [] if held is None else [held]
        return [cache for cache in found if cache.numel()]


def _poison(cache: torch.Tensor) -> float:
    """NaN: of fp8 stored as bytes, of either kind, all bits set are one."""
    return float("nan") if cache.dtype.is_floating_point else 255
