"""The cache of one rank: what lies where in SGLang's pool, as the daemon is told."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvferry.errors import Malformed
from kvferry.manifest import ManifestBuilder
from kvferry.manifest.encoding import OF_DTYPE, OPAQUE
from kvferry.parts import Describing, Part
from kvferry.tables import BlockTable

GROUP = "0"
POOLS = "full_kv_pool", "swa_kv_pool"
"""Parts of a cache that is of several pools, each a group: of whole prompts, and of sliding windows."""
AXES = {"nhd": ("block", "slot", "head", "dim"), "hnd": ("block", "head", "slot", "dim")}
"""The axes of keys and values, by SGLang's name of the layout."""
ELEMENTS = ("auto", "bf16", "bfloat16", "fp8_e4m3", "fp8_e5m2")
"""SGLang's cache types (--kv-cache-dtype) of which a pool holds plain elements of its own dtype, which is not that of
its memory: SGLang keeps fp8 in uint8. A name may stand for several encodings: on ROCm both fp8 types are e4m3fnuz."""


def encoding(cache_dtype: str, dtype: Any) -> str:
    """The encoding of a pool of this cache type and (torch) dtype. Other types (mxfp8, nvfp4, fp4_mx_block16, and such
    as nobody knows yet) are opaque: their bytes and scales are not described."""
    if cache_dtype not in ELEMENTS:
        return f"{OPAQUE}sglang.{cache_dtype}"
    name = str(dtype).removeprefix("torch.")
    return OF_DTYPE.get(name, f"{OPAQUE}sglang.{name}")


def scales(cache_dtype: str, path: str | None) -> dict[str, str]:
    """The fingerprint's part of --quantization-param-path: fp8 is read by the scales of the file there, where SGLang
    can read it and its cache type has any. Nothing without one."""
    if path is None or cache_dtype != "fp8_e4m3":
        return {}
    try:
        return {"kv_cache_scales": hashlib.sha256(Path(path).read_bytes()).hexdigest()}
    except OSError:
        return {}  # SGLang takes 1 for all of them


def tables_of(num_tokens: int, page_size: int, *pages: Any) -> dict[str, BlockTable]:
    """The tables of pages that hold the last of these tokens, by group: SGLang says no more of them."""
    stop = -(-num_tokens // page_size)
    return {str(at): BlockTable.of(np.array(ids), (stop - len(ids)) * page_size) for at, ids in enumerate(pages)}


def describe(
    builder: ManifestBuilder, cache: Any, window: int, rank: int, ranks: int, heads: Callable[[int], int],
    cache_dtype: str,
) -> None:  # fmt: skip
    """Add the cache's pools, each a group, and their layers to the manifest. window: tokens that a sliding window has,
    the newest included. heads: how many KV heads a layer has on all ranks. cache_dtype: SGLang's name of the cache
    type. Raises KvferryError (`unknown_layout`, `unknown_heads`)."""
    describing = Describing(builder, rank, ranks)
    pools = [getattr(cache, name) for name in POOLS if hasattr(cache, name)] or [cache]
    for group, pool in enumerate(pools):
        blocks = pool.size // pool.page_size + 1  # page 0 takes what padding writes
        builder.group(str(group), num_blocks=blocks, block_size=pool.page_size, window=window if group else None)
        for layer, number in enumerate(pool.model_layer_ids):
            if hasattr(pool, "kv_buffer"):
                parts = [_latent(pool, layer, blocks, cache_dtype)]
            else:
                parts = _keys_and_values(pool, layer, blocks, ranks, heads(number), cache_dtype)
            describing.add(str(group), number, parts, f"layer {number}")


def _latent(pool: Any, layer: int, blocks: int, cache_dtype: str) -> Part:
    """The cache of latent attention: a row for each token, the same on all ranks."""
    rows = pool.kv_buffer[layer]
    view = rows[: blocks * pool.page_size].view(blocks, pool.page_size, *rows.shape[1:])
    # Sparse attention's rows in fp8 hold values, their scales and a part in bf16.
    packed = getattr(pool, "dsa_kv_cache_store_fp8", False)
    means = f"{OPAQUE}sglang.packed_{cache_dtype}" if packed else encoding(cache_dtype, pool.dtype)
    return Part("kv", view, ("block", "slot", "head", "content"), "head", 1, means)


def _keys_and_values(pool: Any, layer: int, blocks: int, ranks: int, total: int, cache_dtype: str) -> list[Part]:
    """A rank has its share of the layer's own heads, so many in all, or it is not known which it has. Raises
    KvferryError (`unknown_layout`, `unknown_heads`)."""
    axes = AXES.get(pool.kv_cache_layout)
    if axes is None:
        what = f"the cache's layout {pool.kv_cache_layout} is not known"
        remedy = f"one of {', '.join(AXES)}: choose another attention backend"
        raise Malformed("unknown_layout", what, field="kv_cache_layout", value=pool.kv_cache_layout, remedy=remedy)
    found, means = [], encoding(cache_dtype, pool.dtype)
    for name, buffer in (("k", pool.k_buffer[layer]), ("v", pool.v_buffer[layer])):
        view = buffer
        if axes[1] == "slot":
            view = buffer[: blocks * pool.page_size].view(blocks, pool.page_size, *buffer.shape[1:])
        found.append(Part(name, view, axes, "head", min(ranks, total), means))
    held = sorted({part.view.shape[axes.index("head")] for part in found})
    if held != [max(1, total // ranks)]:
        what = f"layer {pool.model_layer_ids[layer]} has {total} KV heads, and each of {ranks} ranks keeps {held}"
        remedy = "which heads these are cannot be told: report the model and its --tp-size"
        raise Malformed("unknown_heads", what, field="heads", value=held, remedy=remedy)
    return found
