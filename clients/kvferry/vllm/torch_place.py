"""Make torch allocate an engine's cache inside a region of either kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from kvferry.memory import CudaRegion, SharedRegion, torch_pool
from kvferry.memory.pools import segment_nbytes


def region_nbytes(nbytes: int, device: str) -> int:
    """What a region must have for one tensor of `nbytes`."""
    return segment_nbytes(nbytes) if device == "cuda" else nbytes


@contextmanager
def placed(region: SharedRegion | CudaRegion) -> Iterator[None]:
    """Inside, `torch.zeros(nbytes, dtype=torch.int8)` lies in the region, which is new.

    On a GPU torch's own pools do that (and for every other allocation too: see `torch_pool`). Host memory has no
    pools: there the one call that asks for all of the region is answered with it.
    """
    place: AbstractContextManager[Any] = (
        torch_pool(region) if isinstance(region, CudaRegion) else _Answered(region.tensor().view(torch.int8))
    )
    with place:
        yield


class _Answered(TorchFunctionMode):
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
