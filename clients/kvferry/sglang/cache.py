"""The cache of one rank: what lies where in SGLang's pool, as the daemon is told."""

from __future__ import annotations

from typing import Any

from kvferry.errors import Malformed
from kvferry.manifest import ManifestBuilder
from kvferry.parts import Describing, Part

GROUP = "0"
AXES = {"nhd": ("block", "slot", "head", "dim"), "hnd": ("block", "head", "slot", "dim")}
"""Of keys and values, by SGLang's name of the layout."""


def describe(builder: ManifestBuilder, pool: Any, rank: int, ranks: int, heads: int) -> None:
    """Add the pool's layers to the manifest. heads: the model's KV heads. Raises KvferryError (`unknown_layout`)."""
    page = pool.page_size
    blocks = pool.size // page + 1  # page 0 takes what padding writes
    builder.group(GROUP, num_blocks=blocks, block_size=page)
    describing = Describing(builder, rank, ranks)
    for layer in range(pool.layer_num):
        describing.add(GROUP, pool.start_layer + layer, _parts(pool, layer, blocks, min(ranks, heads)))


def _parts(pool: Any, layer: int, blocks: int, shards: int) -> list[Part]:
    if hasattr(pool, "kv_buffer"):  # latent attention: one row for a token, the same on all ranks
        rows = pool.kv_buffer[layer]
        view = rows[: blocks * pool.page_size].view(blocks, pool.page_size, *rows.shape[1:])
        return [Part("kv", view, ("block", "slot", "head", "content"), "head", 1)]
    axes = AXES.get(pool.kv_cache_layout)
    if axes is None:
        what = f"the cache's layout {pool.kv_cache_layout} is not known"
        remedy = f"one of {', '.join(AXES)}: choose another attention backend"
        raise Malformed("unknown_layout", what, field="kv_cache_layout", value=pool.kv_cache_layout, remedy=remedy)
    found = []
    for name, buffer in (("k", pool.k_buffer[layer]), ("v", pool.v_buffer[layer])):
        view = buffer
        if axes[1] == "slot":
            view = buffer[: blocks * pool.page_size].view(blocks, pool.page_size, *buffer.shape[1:])
        found.append(Part(name, view, axes, "head", shards))
    return found
