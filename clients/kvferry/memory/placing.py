"""Make an engine's cache, which torch allocates, lie in a region of either kind."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from kvferry.memory import CudaRegion, SharedRegion, torch_pool
from kvferry.memory.pools import segment_nbytes

ALIGNED = 256
"""A buffer in host memory begins at a multiple of this."""


def buffers_of(create: Callable[[], object]) -> list[torch.Tensor]:
    """The tensors that `create` will make with `torch.zeros`, without memory; empty ones need no place."""
    made: list[torch.Tensor] = []

    def recorded(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        made.append(torch.empty(shape, dtype=dtype, device="meta"))
        return made[-1]

    with _Zeros(recorded):
        create()
    return [each for each in made if each.nbytes]


def region_nbytes(buffers: Sequence[torch.Tensor], device: str) -> int:
    """Bytes that a region must have for all of them."""
    return sum(segment_nbytes(each.nbytes) if device == "cuda" else _aligned(each.nbytes) for each in buffers)


@contextmanager
def placed(region: SharedRegion | CudaRegion, buffers: Sequence[torch.Tensor]) -> Iterator[None]:
    """Inside, `torch.zeros` of such buffers, in this order, returns parts of the region, which is new.

    On a GPU torch's own pools do that (and for every other allocation too: see `torch_pool`). Host memory has no
    pools: there the calls are answered with parts of it.
    """
    place: AbstractContextManager[Any] = (
        torch_pool(region) if isinstance(region, CudaRegion) else _Zeros(_parts_of(region, buffers))
    )
    with place:
        yield


def _parts_of(
    region: SharedRegion, buffers: Sequence[torch.Tensor]
) -> Callable[[torch.Size, torch.dtype], torch.Tensor | None]:
    """Places them one after another, zeroed by the daemon."""
    memory, used, missing = region.tensor(), 0, deque(buffers)

    def part(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor | None:
        nonlocal used
        if not missing or (missing[0].shape, missing[0].dtype) != (shape, dtype):
            return None
        nbytes, start = missing.popleft().nbytes, used
        used += _aligned(nbytes)
        return memory[start : start + nbytes].view(dtype).view(shape)

    return part


class _Zeros(TorchFunctionMode):
    """Answers every `torch.zeros` of this thread that names a type; torch does where the answer is None."""

    def __init__(self, answer: Callable[[torch.Size, torch.dtype], torch.Tensor | None]) -> None:
        super().__init__()
        self._answer = answer

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given, answer = kwargs or {}, None
        if func is torch.zeros and given.get("dtype") is not None:
            shape = given["size"] if not args else args if isinstance(args[0], int) else args[0]
            answer = self._answer(torch.Size(shape), given["dtype"])
        return func(*args, **given) if answer is None else answer


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNED) * ALIGNED
