"""Print whether vLLM's own kernels write its packed caches as kvferry's plug-in describes them, as JSON.

ENGINES_VENV/bin/python tests/gpu/vllm_packed.py [NAME ...]: of a vLLM for CUDA. Each name is "proven" or "opaque".
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionType, MLAAttentionImpl
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SparseCacheRole, get_kv_quant_mode

from kvferry.vllm.cells import packed_parts, proven

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCKS, SLOTS, HEADS, SIZE = 3, 64, 4, 128
LATENTS, ROTATED, INDEX = 512, 64, 132


def per_token_head(kind: str) -> tuple[Any, Any]:
    dtype = torch.int8 if kind.startswith("int8") else torch.uint8
    mode = get_kv_quant_mode(kind)
    spec = FullAttentionSpec(block_size=SLOTS, num_kv_heads=HEADS, head_size=SIZE, dtype=dtype, kv_quant_mode=mode)
    impl = TritonAttentionImpl.__new__(TritonAttentionImpl)
    impl.attn_type, impl.kv_cache_dtype, impl.head_size = AttentionType.DECODER, kind, SIZE
    impl._is_per_token_head_quant, impl._kv_quant_mode, impl.fp8_dtype = True, mode, current_platform.fp8_dtype()
    return SimpleNamespace(kv_cache_dtype=kind, impl=impl), TritonAttentionBackend.customize_spec(spec)


def latents(kind: str) -> tuple[Any, Any]:
    class Impl:
        do_kv_cache_update = MLAAttentionImpl.do_kv_cache_update

    content = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}[kind]
    spec = MLAAttentionSpec(
        block_size=SLOTS, num_kv_heads=1, head_size=LATENTS + ROTATED, dtype=torch.uint8, state_content_bytes=content
    )
    sizes = {"kv_lora_rank": LATENTS, "qk_rope_head_dim": ROTATED}
    return SimpleNamespace(kv_cache_dtype=kind, impl=Impl(), _k_scale=torch.ones(1, device=DEVICE), **sizes), spec


def indexer(kind: str) -> tuple[Any, Any]:
    role = SparseCacheRole.INDEXER
    spec = MLAAttentionSpec(block_size=SLOTS, num_kv_heads=1, head_size=INDEX, dtype=torch.uint8, cache_role=role)
    return SimpleNamespace(uses_shuffled_layout=False), spec


def nvfp4(kind: str) -> tuple[Any, Any]:
    from vllm.v1.attention.backends.flashinfer import FlashInferBackend, FlashInferImpl, _nvfp4_kv_on_fa2

    mode = get_kv_quant_mode(kind)
    spec = FullAttentionSpec(
        block_size=SLOTS, num_kv_heads=HEADS, head_size=SIZE, dtype=torch.uint8, kv_quant_mode=mode
    )
    impl = FlashInferImpl.__new__(FlashInferImpl)
    impl.num_kv_heads, impl.head_size, impl.cache_dtype, impl.is_kvcache_nvfp4 = HEADS, SIZE, kind, True
    impl.kv_sharing_target_layer_name, impl.nvfp4_fa2 = None, _nvfp4_kv_on_fa2()
    impl.nvfp4_trtllm = not impl.nvfp4_fa2
    scale = torch.ones(1, device=DEVICE)
    return SimpleNamespace(
        kv_cache_dtype=kind, impl=impl, _k_scale=scale, _v_scale=scale
    ), FlashInferBackend.customize_spec(spec)


KINDS = {
    "int8_per_token_head": per_token_head, "fp8_per_token_head": per_token_head, "int4_per_token_head": per_token_head,
    "fp8_ds_mla": latents, "nvfp4_ds_mla": latents, "indexer": indexer, "nvfp4": nvfp4,
}  # fmt: skip


def outcome(kind: str) -> str:
    layer, spec = KINDS[kind](kind)
    content = spec.state_content_size_bytes // spec.dtype.itemsize
    cache = torch.zeros(BLOCKS, spec.num_heads, SLOTS, content, dtype=spec.dtype, device=DEVICE)
    layer.kv_cache = cache if spec.head_size_v else cache.squeeze(1)
    blocks = cache.unsqueeze(1)
    parts = packed_parts(layer, spec, blocks, 1)
    return "proven" if parts and proven(layer, spec, parts, blocks[0], torch.bfloat16, kind) else "opaque"


if __name__ == "__main__":
    print(json.dumps({kind: outcome(kind) for kind in sys.argv[1:] or KINDS}))
