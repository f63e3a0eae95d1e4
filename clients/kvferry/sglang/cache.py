"""The cache of one rank: SGLang's pool, placed in memory that the daemon owns, and described to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from kvferry.errors import Malformed
from kvferry.manifest import ManifestBuilder
from kvferry.memory import CudaRegion, SharedRegion, torch_pool
from kvferry.memory.pools import segment_nbytes
from kvferry.parts import Describing, Part

GROUP = "0"
ALIGNED = 256
"""Where a buffer in host memory may begin."""
AXES = {"nhd": ("block", "slot", "head", "dim"), "hnd": ("block", "head", "slot", "dim")}
"""Of keys and values, by SGLang's name of the layout."""


def buffers_of(create: Callable[[Any], None], pool: Any) -> list[torch.Tensor]:
    """What `create`, a method of the pool, will allocate: tensors without memory."""
    recorded = _Zeros(lambda shape, dtype: torch.empty(shape, dtype=dtype, device="meta"))
    with recorded:
        create(pool)
    return recorded.made


def region_nbytes(buffers: list[torch.Tensor], device: str) -> int:
    """What a region must have for all of them."""
    return sum(segment_nbytes(each.nbytes) if device == "cuda" else _aligned(each.nbytes) for each in buffers)


@contextmanager
def placed(region: SharedRegion | CudaRegion) -> Iterator[None]:
    """Inside, what `torch.zeros` makes lies in the region, which is new.

    On a GPU torch's own pools do that. Host memory has no pools: there the calls are answered with parts of it.
    """
    place: AbstractContextManager[Any] = (
        torch_pool(region) if isinstance(region, CudaRegion) else _Zeros(_parts_of(region))
    )
    with place:
        yield


class _Zeros(TorchFunctionMode):
    """Answers every `torch.zeros` of this thread, and remembers the answers."""

    def __init__(self, answer: Callable[[tuple[int, ...], torch.dtype], torch.Tensor]) -> None:
        super().__init__()
        self._answer = answer
        self.made: list[torch.Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func is not torch.zeros or "dtype" not in given:
            return func(*args, **given)
        self.made.append(self._answer(tuple(args[0]), given["dtype"]))
        return self.made[-1]


def _parts_of(region: SharedRegion) -> Callable[[tuple[int, ...], torch.dtype], torch.Tensor]:
    """One after another, zeroed by the daemon."""
    memory, used = region.tensor(), 0

    def part(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        nonlocal used
        nbytes, start = torch.Size(shape).numel() * dtype.itemsize, used
        used += _aligned(nbytes)
        return memory[start : start + nbytes].view(dtype).view(shape)

    return part


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNED) * ALIGNED


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
