"""The cache of one rank: what lies where in SGLang's pool, as the daemon is told."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvferry.errors import Malformed
from kvferry.manifest import ManifestBuilder
from kvferry.manifest.encoding import OF_DTYPE, OPAQUE
from kvferry.parts import Describing, Part, recurrent_parts
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
    with suppress(OSError):  # then SGLang takes 1 for all of them
        if path is not None and cache_dtype == "fp8_e4m3":
            return {"kv_cache_scales": hashlib.sha256(Path(path).read_bytes()).hexdigest()}
    return {}


def tables_of(num_tokens: int, page_size: int, *pages: Any) -> dict[str, BlockTable]:
    """The tables of pages that hold the last of these tokens, by group: SGLang says no more of them."""
    stop = -(-num_tokens // page_size)
    return {str(at): BlockTable.of(ids, (stop - len(ids)) * page_size) for at, ids in enumerate(pages)}


def describe(
    builder: ManifestBuilder, cache: Any, window: int, rank: int, ranks: int, heads: Callable[[int], int],
    cache_dtype: str, draft: tuple[Any, Callable[[int], int]] | None = None,
) -> str:  # fmt: skip
    """Add the cache's pools, each a group, and their layers to the manifest. window: tokens that a sliding window has,
    the newest included. heads: how many KV heads a layer has on all ranks. cache_dtype: SGLang's name of the cache
    type. draft: the cache of a draft model, whose pages have the numbers of the first pool's, and its heads. Returns
    the encoding of the first pool, which a stage of a pipeline has without layers, too. Raises KvferryError
    (`unknown_layout`, `unknown_heads`, `unsupported_cache`)."""
    describing = Describing(builder, rank, ranks)
    pools = [getattr(cache, name) for name in POOLS if hasattr(cache, name)] or [cache]

    def add(group: str, of: Any, pool: Any, heads: Callable[[int], int], whose: str = "") -> None:
        # A pool of latents beside states numbers its layers anew.
        for layer, number in enumerate(getattr(of, "full_attention_layer_id_mapping", pool.model_layer_ids)):
            parts = _attention(pool, layer, number, _pages(pool), ranks, heads(number), cache_dtype)
            named = [replace(part, name=whose + part.name) for part in parts]
            describing.add(group, number, named, f"{whose}layer {number}")

    for group, pool in enumerate(pools):
        reach = window if group else None
        builder.group(str(group), num_blocks=_pages(pool), block_size=pool.page_size, window=reach)
        add(str(group), cache, pool, heads)
    if draft is not None:
        add(GROUP, draft[0], _draft_pool(draft[0], pools[0]), draft[1], "draft.")
    if states := getattr(cache, "mamba_pool", None):
        builder.group(str(len(pools)), kind="state", num_blocks=states.size + 1)
        for layer, number in enumerate(states.mamba_layer_ids):
            describing.add(str(len(pools)), number, _state(states, layer, number, ranks), f"layer {number}")
    return _meaning(pools[0], cache_dtype)


def _pages(pool: Any) -> int:
    return int(pool.size // pool.page_size + 1)  # page 0 takes what padding writes


def _draft_pool(cache: Any, target: Any) -> Any:
    """The pool of a draft model's cache, in which a request's pages have the numbers of the model's. Raises
    KvferryError (`unsupported_cache`)."""
    pool = getattr(cache, POOLS[0], cache)
    if hasattr(cache, POOLS[1]) or (pool.size, pool.page_size) != (target.size, target.page_size):
        what = f"a draft model's cache is a {type(cache).__name__} of {pool.size} tokens in pages of {pool.page_size}"
        remedy = f"one pool of {target.size} in pages of {target.page_size} is moved, as the model's: report the model"
        raise Malformed("unsupported_cache", what, field="draft", value=type(cache).__name__, remedy=remedy)
    return pool


def _meaning(pool: Any, cache_dtype: str) -> str:
    """Sparse attention's rows in fp8 hold values, their scales and a part in bf16."""
    packed = getattr(pool, "dsa_kv_cache_store_fp8", False)
    return f"{OPAQUE}sglang.packed_{cache_dtype}" if packed else encoding(cache_dtype, pool.dtype)


def _state(pool: Any, layer: int, number: int, ranks: int) -> list[Part]:
    """A recurrent layer's convolution, and its state, [block, head, dim, n] (or none). Each rank has its share of the
    heads, and of all channels: x alone; x, b and c; or q, k and v, of which SGLang says how wide they are. Raises
    KvferryError (`unsupported_cache`)."""
    held = pool.mamba_cache.at_layer_idx(layer)
    conv, states = held.conv[0].movedim(1 + pool.conv_slice_axis, 1), [held.temporal] if held.temporal.numel() else []
    wide, of = states[0].shape[1:3].numel() if states else conv.shape[1], pool.conv_shard_groups
    if len(held.conv) > 1 or pool._slot_siblings or (of and of[-1] != wide * ranks):
        what = f"layer {number} keeps states that have no names here"
        raise Malformed("unsupported_cache", what, field="layer", value=number, remedy="report the model")
    return recurrent_parts(conv, states, "x" if conv.shape[1] == wide else "qkv" if of else "xbc", ranks, ranks)


def _attention(
    pool: Any, layer: int, number: int, blocks: int, ranks: int, total: int, cache_dtype: str
) -> list[Part]:  # fmt: skip
    """Latent attention has a row for each token, the same on all ranks. A rank has its share of keys and values of
    the layer's own heads, so many in all, or it is not known which it has. Raises KvferryError (`unknown_layout`,
    `unknown_heads`)."""

    def paged(rows: Any) -> Any:
        return rows[: blocks * pool.page_size].view(blocks, pool.page_size, *rows.shape[1:])

    means = _meaning(pool, cache_dtype)
    if hasattr(pool, "kv_buffer"):
        return [Part("kv", paged(pool.kv_buffer[layer]), ("block", "slot", "head", "content"), "head", 1, means)]
    axes = AXES.get(pool.kv_cache_layout)
    if axes is None:
        what = f"the cache's layout {pool.kv_cache_layout} is not known"
        remedy = f"one of {', '.join(AXES)}: choose another attention backend"
        raise Malformed("unknown_layout", what, field="kv_cache_layout", value=pool.kv_cache_layout, remedy=remedy)
    found, shards = [], min(ranks, total)
    for name, buffer in (("k", pool.k_buffer[layer]), ("v", pool.v_buffer[layer])):
        found.append(Part(name, paged(buffer) if axes[1] == "slot" else buffer, axes, "head", shards, means))
    held = sorted({part.view.shape[axes.index("head")] for part in found})
    if held != [max(1, total // ranks)]:
        what = f"layer {number} has {total} KV heads, and each of {ranks} ranks keeps {held}"
        remedy = "which heads these are cannot be told: report the model and its --tp-size"
        raise Malformed("unknown_heads", what, field="heads", value=held, remedy=remedy)
    return found
