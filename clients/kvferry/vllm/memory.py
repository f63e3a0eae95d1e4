"""Where vLLM's cache is allocated: inside `get_mem_pool_context`, in memory that the daemon owns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from kvferry.memory import CudaRegion, SharedRegion, torch_pool
from kvferry.torch_pool import segment_nbytes


def region_nbytes(nbytes: int, device: torch.device) -> int:
    """What a region must have for a cache of `nbytes`."""
    return segment_nbytes(nbytes) if device.type == "cuda" else nbytes


@contextmanager
def inside(region: SharedRegion | CudaRegion) -> Iterator[None]:
    """vLLM's one allocation of its cache, `torch.zeros(nbytes, dtype=torch.int8)`, lies in the region.

    On a GPU torch's own pools do that. Host memory has none: there the one call is answered with the region.
    """
    place: AbstractContextManager[Any] = (
        torch_pool(region) if isinstance(region, CudaRegion) else _Placed(region.tensor().view(torch.int8))
    )
    with place:
        yield


class _Placed(TorchFunctionMode):
    def __init__(self, memory: torch.Tensor) -> None:
        super().__init__()
        self._memory = memory

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func is torch.zeros and given.get("dtype") is torch.int8 and args == (self._memory.numel(),):
            return self._memory  # zeroed by the daemon
        return func(*args, **given)
