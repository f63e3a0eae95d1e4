"""Places of the bytes of a drawn engine: any axis order, padding, regions, and what is interleaved with what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from kvferry.manifest import BLOCK, ITEMSIZE, SLOT

Draw = Callable[[st.SearchStrategy[Any]], Any]
Span = tuple[int, int]
Digits = list[tuple[str, int]]
Spans = dict[tuple[str, int], Span]


@dataclass(frozen=True)
class Part:
    """A component as the model knows it: global axes, and the one along which ranks may share it."""

    layer: int
    name: str
    dtype: str
    axes: tuple[tuple[str, int], ...]
    sharded: str | None = None
    kind: str = "paged"
    window: int | None = None
    encoding: str | None = None


@dataclass(frozen=True)
class Group:
    """`style`: apart: each component on its own. together: components of one shape interleaved (K and V, or layers)
    at any level. page: all of them in one block, the block outermost of everything."""

    name: str
    kind: str
    window: int | None
    block_size: int
    parts: tuple[Part, ...]
    style: str
    mixed_radix: bool
    token_ranks: int
    start: int
    """Which of the possible first tokens its tables have: the same on ranks that hold the same tokens."""

    def of(self, stages: dict[int, int], stage: int) -> Group:
        return replace(self, parts=tuple(part for part in self.parts if stages[part.layer] == stage))

    def digits(self, name: str, extent: int) -> Digits:
        """The axis as one digit or, where the engine likes mixed radix, as its prime factors."""
        inner = next((n for n in (2, 3) if extent % n == 0 and extent > n), None)
        if not self.mixed_radix or inner is None:
            return [(name, extent)]
        return [*self.digits(name, extent // inner), (name, inner)]

    def inner(self, part: Part, spans: Spans) -> Digits:
        """The part's own axes as this rank holds them: (head, dim/x, x) where the engine likes mixed radix."""
        held = [(n, spans[n, total] if n == part.sharded else (0, total)) for n, total in part.axes]
        return [digit for name, (start, stop) in held for digit in self.digits(name, stop - start)]

    def slots(self) -> Digits:
        return self.digits(SLOT, self.block_size) if self.kind == "paged" else []


class Regions:
    """Hands out places, region after region."""

    def __init__(self, count: int) -> None:
        self.ends = [0] * count
        self.turn = 0

    def place(self, nbytes: int, gap: int) -> tuple[int, int]:
        region = self.turn % len(self.ends)
        self.turn += 1
        offset = self.ends[region] + gap
        self.ends[region] = offset + nbytes
        return region, offset


def lay_out(
    draw: Draw, groups: list[Group], num_blocks: dict[str, int], spans: Spans, region_count: int, overlay: bool
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(regions, components) of a rank's manifest."""
    regions, components = Regions(region_count), []
    paged = [replace(group, style="page") for group in groups if group.kind == "paged"]
    if overlay and paged:
        components += lay_out_pages(draw, paged, num_blocks[paged[0].name], spans, regions)
    for group in groups:
        if overlay and group.kind == "paged":
            continue
        lay = lay_out_pages if group.style == "page" else lay_out_arrays
        components += lay(draw, [group], num_blocks[group.name], spans, regions)
    sizes = [end + draw(st.sampled_from([0, 5])) for end in regions.ends]
    return [{"id": 3 * i, "kind": "host", "nbytes": max(1, size)} for i, size in enumerate(sizes)], components


def lay_out_pages(
    draw: Draw, groups: list[Group], num_blocks: int, spans: Spans, regions: Regions
) -> list[dict[str, Any]]:
    """A block of any of the groups is one page; with several groups, any page may belong to any of them."""
    laid, page = [], 0
    for group in groups:
        at = 0
        for part in group.parts:
            inside = draw(st.permutations(group.inner(part, spans) + group.slots()))
            axes, span = strides(draw, inside, ITEMSIZE[part.dtype])
            laid.append((group, part, axes, at))
            at += span + draw(st.sampled_from([0, 0, 3]))
        page = max(page, at)
    # Groups that share pages have to agree on which page a block id means.
    blocks, span = strides(draw, groups[0].digits(BLOCK, num_blocks), page)
    region, offset = regions.place(span, draw(st.sampled_from([0, 7])))
    return [component(draw, g, part, spans, region, offset + at, blocks + axes) for g, part, axes, at in laid]


def lay_out_arrays(
    draw: Draw, groups: list[Group], num_blocks: int, spans: Spans, regions: Regions
) -> list[dict[str, Any]]:
    (group,) = groups
    bundles: dict[Any, list[Part]] = {}
    for i, part in enumerate(group.parts):
        shape = (part.dtype, *group.inner(part, spans)) if group.style == "together" else i
        bundles.setdefault(shape, []).append(part)
    components = []
    for parts in bundles.values():
        digits = group.digits(BLOCK, num_blocks) + group.slots() + group.inner(parts[0], spans)
        axes, span = strides(draw, draw(st.permutations([("part", len(parts)), *digits])), ITEMSIZE[parts[0].dtype])
        step = next(axis["stride"] for axis in axes if axis["name"] == "part")
        axes = [axis for axis in axes if axis["name"] != "part"]
        region, offset = regions.place(span, draw(st.sampled_from([0, 7])))
        components += [component(draw, group, p, spans, region, offset + i * step, axes) for i, p in enumerate(parts)]
    return components


def strides(draw: Draw, digits: Digits, span: int) -> tuple[list[dict[str, Any]], int]:
    """Axes, outermost in memory first, and the bytes they span; `span`: bytes of one position of the innermost."""
    axes: list[dict[str, Any]] = []
    for name, extent in reversed(digits):
        stride = span + draw(st.sampled_from([0, 0, 0, 2, 4]))
        # engines leave any number as the stride of an axis of one position
        axes.insert(0, {"name": name, "extent": extent, "stride": stride if extent > 1 else draw(st.integers(0, 3))})
        span += (extent - 1) * stride
    return axes, span


def component(
    draw: Draw, group: Group, part: Part, spans: Spans, region: int, offset: int, axes: list[dict[str, Any]]
) -> dict[str, Any]:
    # The order in which an engine lists its axes says nothing about memory, except for digits of one name.
    listed = draw(st.permutations(axes))
    if group.style == "page":
        listed = [axis for axis in axes if axis["name"] == BLOCK] + [axis for axis in listed if axis["name"] != BLOCK]
    shard = None
    if part.sharded is not None:
        total = dict(part.axes)[part.sharded]
        start, stop = spans[part.sharded, total]
        if (start, stop) != (0, total) or draw(st.booleans()):
            shard = {"axis": part.sharded, "start": start, "total": total}
    # An engine may hold it as raw bytes, and say what they mean.
    raw = part.encoding is not None and draw(st.booleans())
    return {
        "group": group.name, "layer": part.layer, "name": part.name, "dtype": "uint8" if raw else part.dtype,
        "region": 3 * region, "offset": offset, "axes": listed, "shard": shard,
        "encoding": part.encoding if raw else None,
    }  # fmt: skip
