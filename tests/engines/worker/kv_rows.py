"""Hashes of the KV cache, made in a vLLM worker. They are equal where two engines hold the same keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.parallel_state import get_pp_group

if TYPE_CHECKING:
    from vllm.config import VllmConfig

AT_ONCE_NBYTES = 256 << 20


class KvRows:
    """vLLM adds this to its worker (`--worker-extension-cls kv_rows.KvRows`)."""

    vllm_config: VllmConfig
    model_runner: Any

    def kv_rows(self, tokens: str) -> list[list[int]]:
        """For every `tokens` consecutive slots of a block: a 64-bit hash of all layers' keys and values for each head.

        Hashes of equal bytes are equal, whatever the block size and the order of a block in memory. So `tokens` divides
        the block sizes that are compared.
        """
        layers = self.vllm_config.compilation_config.static_forward_context
        caches = [layer.kv_cache for layer in layers.values() if layer.kv_cache.numel()]
        chance = torch.Generator().manual_seed(1)
        total: torch.Tensor | None = None
        for cache in caches:
            factors = torch.randint(-(1 << 63), (1 << 63) - 1, cache[0, 0, : int(tokens)].shape, generator=chance)
            hashed = torch.cat([_hashed(part, factors.to(cache.device)) for part in _parts(cache)])
            total = hashed if total is None else total + hashed
        assert total is not None
        rows: list[list[int]] = total.tolist()
        return rows

    def make_room_between_stages(self) -> None:
        """For what the stage before sends. vLLM does so when it warms up, which it does not on a CPU."""
        runner = self.model_runner
        if not get_pp_group().is_first_rank:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )


def _parts(cache: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Pieces of `cache`, [block, head, slot, content], small enough to be taken apart in memory."""
    return cache.split(max(1, AT_ONCE_NBYTES // (cache[0].numel() * 8)))


def _hashed(blocks: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """[row, head], with len(blocks) times slots / len(factors) rows."""
    words = blocks.contiguous().view({2: torch.int16, 4: torch.int32}[blocks.element_size()]).to(torch.int64)
    words = words.unflatten(2, (-1, len(factors)))  # block, head, group, slot, content
    return (words * (factors | 1)).sum((3, 4)).transpose(1, 2).flatten(0, 1)
