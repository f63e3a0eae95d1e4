"""Places at which an engine's own operation puts elements."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvferry.parts import locate
from support import refused

SLOTS, HEADS, DIM = 6, 3, 4
AXES = ("slot", "head", "dim")
Write = Callable[[torch.Tensor, torch.Tensor], None]


def rows(elements: torch.Tensor, memory: torch.Tensor) -> None:
    """[head, slot, dim], beside something else in each row."""
    memory.view(HEADS, SLOTS, 2 * DIM)[:, :, DIM:] = elements.transpose(0, 1)


def transposed(elements: torch.Tensor, memory: torch.Tensor) -> None:
    """[head, dim, slot]"""
    memory.view(HEADS, 2 * DIM, SLOTS)[:, :DIM] = elements.permute(1, 2, 0)


def tiled(elements: torch.Tensor, memory: torch.Tensor) -> None:
    """[slot / 2, head, dim, slot % 2], as some CPU kernels have it."""
    tiles = memory.view(SLOTS // 2, HEADS, 2 * DIM, 2)
    tiles[:, :, :DIM] = elements.view(SLOTS // 2, 2, HEADS, DIM).permute(0, 2, 3, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("put", [rows, transposed, tiled])
def test_a_view_made_of_the_places_is_what_was_written(put: Write, dtype: torch.dtype) -> None:
    storage = torch.zeros(1000, dtype=dtype)
    memory = storage[100 : 100 + 2 * SLOTS * HEADS * DIM]
    elements = torch.zeros(SLOTS, HEADS, DIM, dtype=dtype)
    places = locate(lambda: put(elements, memory), elements, AXES, memory, "the keys")
    assert not storage.any()
    assert not elements.any()

    elements.copy_(torch.arange(elements.numel()).view(elements.shape))
    put(elements, memory)
    view = storage.as_strided(places.extents, places.strides, places.origin)
    by_axis = sorted(range(len(places.names)), key=lambda i: AXES.index(places.names[i]))
    assert torch.equal(view.permute(by_axis).reshape(elements.shape), elements)


def test_a_tile_is_an_axis_of_two_digits() -> None:
    memory, elements = torch.zeros(2 * SLOTS * HEADS * DIM), torch.zeros(SLOTS, HEADS, DIM)
    places = locate(lambda: tiled(elements, memory), elements, AXES, memory, "the keys")
    assert places.names == ("slot", "slot", "head", "dim")
    assert places.extents == (3, 2, HEADS, DIM)
    assert places.strides == (2 * HEADS * 2 * DIM, 1, 2 * 2 * DIM, 2)


def nowhere(elements: torch.Tensor, memory: torch.Tensor) -> None:
    """As an operation does that is not what it was taken for."""


def twice(elements: torch.Tensor, memory: torch.Tensor) -> None:
    rows(elements, memory)
    memory.view(HEADS, SLOTS, 2 * DIM)[:, :, :DIM] = elements.transpose(0, 1)


def half(elements: torch.Tensor, memory: torch.Tensor) -> None:
    rows(elements * (torch.arange(SLOTS) < SLOTS // 2).view(SLOTS, 1, 1), memory)


def hashed(elements: torch.Tensor, memory: torch.Tensor) -> None:
    order = torch.randperm(elements.numel(), generator=torch.Generator().manual_seed(0))
    memory[order] = elements.flatten()


@pytest.mark.parametrize("put", [nowhere, twice, half, hashed])
def test_what_is_not_regular_is_refused(put: Write) -> None:
    memory, elements = torch.zeros(2 * SLOTS * HEADS * DIM), torch.zeros(SLOTS, HEADS, DIM)
    with refused("unknown_layout", match="the keys of layer 3 lie cannot be told"):
        locate(lambda: put(elements, memory), elements, AXES, memory, "the keys of layer 3")
