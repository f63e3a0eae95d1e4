"""Components of a group on the same bytes are found, whatever they are interleaved with; others are let be."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import product
from typing import Any, TypeAlias

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from layouts import Draw
from strategies import tried

from kvferry.manifest import Axis, Component
from kvferry.manifest.overlap import overlap

SLOTS, HEADS, DIM = 16, 8, 256
"""DIM in bytes."""
Shape: TypeAlias = tuple[Any, ...]


def component(label: int, offset: int, itemsize: int, *axes: tuple[int, int]) -> Component:
    """axes: (extent, stride), outermost first."""
    listed = tuple(Axis(name=str(i), extent=extent, stride=stride) for i, (extent, stride) in enumerate(axes))
    dtype = {1: "uint8", 2: "float16", 4: "float32", 8: "float64"}[itemsize]
    return Component(group="g", layer=label, name="k", dtype=dtype, region=0, offset=offset, axes=listed)


def touched(one: Component) -> set[int]:
    """Every byte, one by one."""
    starts = (
        one.offset + sum(i * axis.stride for i, axis in zip(at, one.axes, strict=True))
        for at in product(*(range(axis.extent) for axis in one.axes))
    )
    return {start + i for start in starts for i in range(one.itemsize)}


@st.composite
def nests(draw: Draw) -> Shape:
    """(itemsize, *axes) that keep the rule of strides."""
    itemsize = draw(st.sampled_from([1, 2, 4]))
    axes, span = list[tuple[int, int]](), itemsize
    for _ in range(draw(st.integers(1, 3))):
        extent, stride = draw(st.integers(1, 4)), span + draw(st.sampled_from([0, 0, 1, 2, 3, 7, span]))
        axes.insert(0, (extent, stride))
        span += (extent - 1) * stride
    return itemsize, *axes


@tried(330)
@given(
    st.lists(nests(), min_size=1, max_size=2), st.lists(st.tuples(st.integers(0, 1), st.integers(0, 150)), max_size=6)
)
def test_what_is_found_is_what_bytes_say(shapes: list[Shape], placed: list[tuple[int, int]]) -> None:
    """Few shapes and several places for them, as in a cache."""
    components = [component(i, at, *shapes[shape % len(shapes)]) for i, (shape, at) in enumerate(placed)]
    bytes_of = [touched(one) for one in components]
    clashes = {(j, i) for i, one in enumerate(bytes_of) for j in range(i) if one & bytes_of[j]}
    found = overlap(components)
    assert (found in clashes) if clashes else found is None


LAYOUTS = ("apart", "pages of K and V", "pages of all", "by slot", "by head", "by element")


def cache(layout: str, layers: int, blocks: int = 512) -> list[Component]:
    """K and V of every layer, interleaved at one level or another."""
    count, page = 2 * layers, SLOTS * HEADS * DIM
    block, slot, head, item, step = {
        "apart": (page, HEADS * DIM, DIM, 2, blocks * page),
        "pages of K and V": (2 * page, HEADS * DIM, DIM, 2, page),
        "pages of all": (count * page, HEADS * DIM, DIM, 2, page),
        "by slot": (count * page, count * HEADS * DIM, DIM, 2, HEADS * DIM),
        "by head": (count * page, count * HEADS * DIM, count * DIM, 2, DIM),
        "by element": (count * page, count * HEADS * DIM, count * DIM, count * 2, 2),
    }[layout]
    axes = (blocks, block), (SLOTS, slot), (HEADS, head), (DIM // 2, item)
    layer = blocks * 2 * page if layout == "pages of K and V" else 2 * step
    return [component(i, i // 2 * layer + i % 2 * step, 2, *axes) for i in range(count)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_interleaved_layers_are_apart_until_one_is_moved_by_a_byte(layout: str) -> None:
    components = cache(layout, layers=8)
    assert overlap(components) is None
    components[5] = components[5].model_copy(update={"offset": components[5].offset - 1})
    assert overlap(components) in ((4, 5), (5, 6))


def test_layers_that_are_listed_twice_are_found() -> None:
    components = cache("by slot", layers=8)
    assert overlap([*components, components[3]]) == (3, len(components))


def test_scales_beside_their_keys_are_apart() -> None:
    """A page of fp8 keys and one float of scale for each slot."""
    page = SLOTS * 64 + SLOTS * 4
    keys, scales = (
        component(0, 0, 1, (9, page), (SLOTS, 64), (64, 1)),
        component(1, SLOTS * 64, 4, (9, page), (SLOTS, 4)),
    )
    assert overlap([keys, scales]) is None
    assert overlap([keys, scales.model_copy(update={"offset": SLOTS * 64 - 1})]) == (0, 1)


@pytest.mark.parametrize("count", [140, 700])
def test_components_of_many_widths_are_apart_until_one_reaches_into_the_next(count: int) -> None:
    """All interleaved by block, no two at the same distance."""
    widths = [40 + 7 * i % 61 for i in range(count)]
    starts = [sum(widths[:i]) for i in range(count)]
    components = [
        component(i, start, 1, (64, sum(widths)), (width, 1))
        for i, (start, width) in enumerate(zip(starts, widths, strict=True))
    ]
    assert overlap(components) is None
    components[-1] = components[-1].model_copy(update={"offset": starts[-1] - 1})
    assert overlap(components) == (count - 2, count - 1)


def test_digits_of_an_axis_change_nothing() -> None:
    whole = component(0, 0, 1, (12, 100), (30, 1))
    digits = component(1, 30, 1, (3, 400), (4, 100), (2, 15), (15, 1))
    assert overlap([whole, digits]) is None
    assert overlap([whole, digits.model_copy(update={"offset": 29})]) == (0, 1)


def calls_of(work: Callable[[Any], object], argument: object) -> int:
    """How many calls of functions it takes, of Python's and of C's: the work, whoever else works on this machine."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work(argument)
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("layout", LAYOUTS)
def test_real_caches_take_few_steps(layout: str) -> None:
    """256 components: about 2 ms, and so many calls on any machine."""
    components = cache(layout, layers=128)
    assert calls_of(overlap, components) < 20_000


SLOW: dict[str, list[Component]] = {
    "strides that have nothing to do with each other": [
        component(i, int(at), 1, (2, 10**9 + i), (10**5, 1000 + 2 * i), (100, 3))
        for i, at in enumerate(np.random.default_rng(7).integers(0, 10**6, 400) * 1000)
    ],
    "every component of another shape": [
        component(i, i * 10**5, 1, (2, 10**12 + i), (2, 3 + i)) for i in range(20_000)
    ],
    "axes without end": [component(i, i, 1, (2**20, 2**41 + i), (2**20, 2**20 + i), (2**18, 2 + i)) for i in range(2)],
    "the same axes, shifted": [component(i, 1000 * 99 * i, 1, (2**20, 1000), (10, 50)) for i in range(3000)],
}


@pytest.mark.parametrize("components", SLOW.values(), ids=SLOW.keys())
def test_what_cannot_be_compared_in_time_is_let_be(components: list[Component]) -> None:
    """Made to be slow: a manifest comes from a peer."""
    assert calls_of(overlap, components) < 1_000_000
