"""What both ends of a staged transfer can have done before the first: kernels compiled, static rows uploaded."""

from __future__ import annotations

from collections.abc import Mapping

from kvferryd.copy import cut, sample
from kvferryd.plan import Plan
from kvferryd.staging.arena import Arena


async def prepare_gather(arena: Arena, share: Plan, regions: Mapping[int, int]) -> None:
    """The source's side, for its part of the plan. Addresses by region."""
    for chunk in cut(sample(share), arena.slot_nbytes):
        await arena.copies.prepare(chunk.gather(regions, arena.span.address))


async def prepare_scatter(arena: Arena, plan: Plan, regions: Mapping[int, int]) -> None:
    """The reader's side."""
    for chunk in cut(sample(plan), arena.slot_nbytes):
        await arena.copies.prepare(chunk.scatter(arena.span.address, regions))
