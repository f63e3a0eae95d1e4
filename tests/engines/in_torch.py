"""Writes of vLLM's kernels that need a GPU, in torch."""

from __future__ import annotations

import torch


def fp8(values: torch.Tensor) -> torch.Tensor:
    return values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)


def store_index(k: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor, size: int, scale_fmt: str) -> None:
    """deepseek_v32/common/kernels.py, 78-118: all keys of the block, then the scale of each."""
    shuffled, block = scale_fmt == "shuffled", kv_cache.shape[1]
    scales = (k.float().abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448).log2().ceil().exp2()
    page, values = kv_cache.flatten(1), fp8(k.float() / scales)
    for slot, row, scale in zip(slots.tolist(), values, scales, strict=True):
        own, at, dim = page[slot // block], slot % block, torch.arange(size)
        own[at // 16 * 16 * size + at % 16 * 16 + dim // 16 * 256 + dim % 16 if shuffled else at * size + dim] = row
        own[block * size + at * 4 : block * size + at * 4 + 4] = scale.view(torch.uint8)
