"""Print what SGLang's own pools are said to hold, as JSON. Run by the Python of SGLang's environment.

.venv-sglang/bin/python tests/engines/sglang_pools.py
"""

from __future__ import annotations

import json
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

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
    print(json.dumps(found))


def said(pool: Any, cache_type: str) -> dict[str, str]:
    """The meaning of each component of the first layer, and the dtype of its memory."""
    buffers = pool.kv_buffer if hasattr(pool, "kv_buffer") else pool.k_buffer + pool.v_buffer
    start = min(buffer.data_ptr() for buffer in buffers)
    stop = max(buffer.data_ptr() + buffer.nbytes for buffer in buffers)
    builder = ManifestBuilder("e", "e", ModelInfo(name="m", fingerprint="f"))
    describe(builder.region(0, "host", nbytes=stop - start, address=start), pool, 0, 1, lambda layer: 2, cache_type)
    manifest: Manifest = builder.build()
    return {each.name: f"{each.dtype} {each.meaning}" for each in manifest.components if each.layer == 0}


if __name__ == "__main__":
    main()
