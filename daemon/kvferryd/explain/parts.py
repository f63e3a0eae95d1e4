"""A plan as data: who reads which layers, components and heads from whom."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from kvferry.manifest import Group
from kvferry.schemas import PlanRead
from kvferryd.plan import Plan
from kvferryd.plan.axes import Span


class Share(NamedTuple):
    """Which part of a component is read from a source rank.

    span: of the sharded axis ("": none) with `total` positions. group: the source's; of its tokens those of its shard.
    """

    source_rank: int
    group: Group
    axis: str
    span: Span
    total: int


class Part(NamedTuple):
    """A share of several components in several layers. nbytes: of one token, in a state group of the state."""

    share: Share
    layers: tuple[int, ...]
    components: tuple[str, ...]
    nbytes: int


def parts(chosen: Plan) -> list[Part]:
    """The parts that the plan's destination reads, each element in one; components with equal shares and layers
    together."""
    read: dict[tuple[Share, str], dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for copy in chosen.copies:
        for alike in copy.alike:
            choice = alike.choice
            share = Share(copy.source_rank, copy.source_group, choice.axis, choice.span, choice.total)
            for component in alike.components:
                read[share, component.name][component.layer] += alike.nbytes
    together: dict[tuple[Share, tuple[int, ...]], dict[str, int]] = defaultdict(dict)
    for (share, name), nbytes in read.items():
        together[share, tuple(sorted(nbytes))][name] = sum(nbytes.values())
    return [Part(share, layers, tuple(by), sum(by.values())) for (share, layers), by in together.items()]


def reads(plans: Iterable[Plan]) -> list[PlanRead]:
    """The reads of each of these plans' destinations, for GET /v1/plan."""
    return [
        PlanRead(
            reader=chosen.destination.rank,
            source=part.share.source_rank,
            group=part.share.group.name,
            kind=part.share.group.kind,
            layers=list(part.layers),
            components=list(part.components),
            axis=part.share.axis,
            start=part.share.span.start,
            stop=part.share.span.stop,
            total=part.share.total,
            token_shard=part.share.group.token_shard.model_dump(),
            nbytes=part.nbytes,
        )
        for chosen in plans
        for part in parts(chosen)
    ]
