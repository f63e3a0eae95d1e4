"""Where an operation of the engine's own puts elements, found by doing it.

What a cache's tensor looks like does not always tell: one attention backend has a token's keys and values in a row,
another all keys of a block transposed and then all values. So no layout is assumed: every element is given a number,
the numbers are written bit by bit (0 or 1: exact in any dtype), and where they land is fitted to strides.
Needs torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry.errors import KvferryError, Malformed

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Places:
    """Elements at regular distances. `origin` and strides in elements of the storage; an axis of several digits (mixed
    radix, outermost first) has its name several times."""

    origin: int
    names: tuple[str, ...]
    extents: tuple[int, ...]
    strides: tuple[int, ...]


def locate(
    write: Callable[[], None], elements: torch.Tensor, axes: Sequence[str], memory: torch.Tensor, what: str
) -> Places:
    """Where in `memory` does `write` put `elements`, whose dimensions are `axes`?

    Both hold zeros before and after. `what`: names them in errors. Raises KvferryError (`unknown_layout`).
    """
    import torch

    count = elements.numel()
    numbers = torch.arange(1, count + 1, device=elements.device).view(elements.shape)
    seen = torch.zeros(memory.shape, dtype=torch.int64, device=memory.device)
    for bit in range(count.bit_length()):
        elements.copy_((numbers >> bit) & 1)
        write()
        landed = memory.view(torch.uint8) if memory.element_size() == 1 else memory
        seen |= (landed != 0).long() << bit
    elements.zero_()
    write()

    seen, offsets = seen.cpu(), _offsets(memory)
    hit = seen != 0
    order = torch.argsort(seen[hit])
    if not torch.equal(seen[hit][order], torch.arange(1, count + 1)):
        raise _unknown(what, "not every element has one place of its own")
    places = offsets[hit][order].view(elements.shape)
    origin = int(places.flatten()[0])
    fitted = torch.zeros_like(places) + origin
    digits: list[tuple[str, int, int]] = []
    for axis, name in enumerate(axes):
        along = places[tuple(slice(None) if i == axis else 0 for i in range(places.ndim))] - origin
        fitted += along.view([-1 if i == axis else 1 for i in range(places.ndim)])
        digits += [(name, extent, stride) for extent, stride in _digits(along.tolist())]
    names, extents, strides = zip(*digits, strict=True)
    if min(strides) < 0 or not torch.equal(places, fitted):
        raise _unknown(what, "its elements do not lie at regular distances")
    return Places(origin, names, extents, strides)


def _offsets(memory: torch.Tensor) -> torch.Tensor:
    """Where in its storage each element of a tensor lies."""
    import torch

    offsets = torch.full(memory.shape, int(memory.storage_offset()), dtype=torch.int64)
    for axis, (extent, stride) in enumerate(zip(memory.shape, memory.stride(), strict=True)):
        offsets += (torch.arange(extent) * stride).view([-1 if i == axis else 1 for i in range(memory.ndim)])
    return offsets


def _digits(steps: Sequence[int]) -> list[tuple[int, int]]:
    """Places along one axis as (extent, stride), outermost first: [0, 1, 8, 9] is [(2, 8), (2, 1)].

    (-1 for a stride where there is nothing regular.)
    """
    digits: list[tuple[int, int]] = []
    while len(steps) > 1:
        stride, extent = steps[1], 2
        while extent < len(steps) and steps[extent] == extent * stride:
            extent += 1
        if len(steps) % extent or any(
            step != steps[i - i % extent] + i % extent * stride for i, step in enumerate(steps)
        ):
            return [(len(steps), -1)]
        digits.insert(0, (extent, stride))
        steps = steps[::extent]
    return digits or [(1, 0)]


def _unknown(what: str, why: str) -> KvferryError:
    return Malformed(
        "unknown_layout",
        f"where {what} lie cannot be told: {why}",
        field="kv_cache",
        value=what,
        remedy="choose another attention backend or cache dtype",
    )
