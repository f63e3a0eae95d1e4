"""Print what SGLang's own pools are said to hold, as JSON. Run by the Python of SGLang's environment.

.venv-sglang/bin/python tests/engines/sglang_pools.py
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from kvferry.errors import KvferryError
from kvferry.manifest import Manifest, ManifestBuilder, ModelInfo
from kvferry.sglang.cache import describe

COMMON = {"size": 64, "page_size": 16, "layer_num": 2, "device": "cpu", "enable_memory_saver": False}


def main() -> None:
    found = {}
    for cache_type, dtype in (
        ("auto", torch.bfloat16), ("fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2),
        ("fp8_e5m2", torch.float8_e4m3fnuz), ("tomorrow", torch.float8_e4m3fn),
    ):  # fmt: skip
        heads = MHATokenToKVPool(dtype=dtype, head_num=2, head_dim=8, enable_alt_stream=False, **COMMON)
        latent = MLATokenToKVPool(dtype=dtype, kv_lora_rank=16, qk_rope_head_dim=8, **COMMON)
        found[f"{cache_type} {dtype}"] = [said(pool, cache_type) for pool in (heads, latent)]
    packed = MLATokenToKVPool(
        dtype=torch.float8_e4m3fn,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        use_dsa=True,
        override_kv_cache_dim=656,
        **COMMON,
    )
    found["packed"] = [said(packed, "fp8_e4m3")]
    said_of = {"means": found, "windows": windows([5]), "windows alone": windows([]), "refused": refused_drafts()}
    print(json.dumps(said_of))


def refused_drafts() -> list[str]:
    """Caches of draft models, of another size and of two pools."""
    keys = {"dtype": torch.bfloat16, "head_num": 2, "head_dim": 8, "enable_alt_stream": False}
    cache = MHATokenToKVPool(**keys, **COMMON)
    other = MHATokenToKVPool(**keys, **COMMON | {"size": 32})
    windowed = SWAKVPool(
        size=64, size_swa=32, page_size=16, device="cpu", swa_attention_layer_ids=[0], full_attention_layer_ids=[1],
        **keys,
    )  # fmt: skip
    told = []
    for draft in (other, windowed):
        try:
            described(cache, (cache,), "auto", (draft, lambda _: 2))
        except KvferryError as error:
            told.append(f"{error.code}: {error.value}")
    return told


def windows(others: list[int]) -> list[Any]:
    """Groups of a cache of two pools, and the layers of each. others: layers without windows."""
    cache = SWAKVPool(
        size=64, size_swa=32, page_size=16, dtype=torch.bfloat16, head_num=2, head_dim=8, device="cpu",
        swa_attention_layer_ids=[4, 6], full_attention_layer_ids=others, enable_alt_stream=False,
    )  # fmt: skip
    manifest = described(cache, (cache.full_kv_pool, cache.swa_kv_pool), "auto")
    return [
        [each.num_blocks, each.window, sorted({part.layer for part in manifest.components if part.group == each.name})]
        for each in manifest.groups
    ]


def said(pool: Any, cache_type: str) -> dict[str, str]:
    """The meaning of each component of the first layer, and the dtype of its memory."""
    manifest = described(pool, (pool,), cache_type)
    return {each.name: f"{each.dtype} {each.meaning}" for each in manifest.components if each.layer == 0}


def described(cache: Any, pools: Sequence[Any], cache_type: str, draft: Any = None) -> Manifest:
    """With a region for each pool, and windows of 24 tokens."""
    builder = ManifestBuilder("e", "e", ModelInfo(name="m", fingerprint="f"))
    for at, pool in enumerate(pools):
        if not (buffers := pool.kv_buffer if hasattr(pool, "kv_buffer") else pool.k_buffer + pool.v_buffer):
            continue
        start = min(buffer.data_ptr() for buffer in buffers)
        stop = max(buffer.data_ptr() + buffer.nbytes for buffer in buffers)
        builder.region(at, "host", nbytes=stop - start, address=start)
    describe(builder, cache, 24, 0, 1, lambda layer: 2, cache_type, draft)
    return builder.build()


if __name__ == "__main__":
    main()
