"""The third pure function: what a load leaves of the destination's blocks. It is zeroed beside the load.

Attention gives weight 0 to slots behind a prompt's last token, and 0 times NaN is NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kvferry.tables import BlockTable, Tables
from kvferryd.plan.axes import Ints, divided, offsets
from kvferryd.plan.plan import Copy, Plan
from kvferryd.plan.segments import Meeting, global_token, local_tokens, shared


@dataclass(frozen=True)
class Left:
    """Slots of the destination, by the copy that would fill them: the bytes at which each begins."""

    pairs: tuple[tuple[Copy, Ints], ...]

    @cached_property
    def nbytes(self) -> int:
        return sum(copy.bytes_per_token * len(places) for copy, places in self.pairs)


NOTHING = Left(())


def left(
    plan: Plan, source_tables: Mapping[int, Tables], destination_tables: Tables, tokens: tuple[int, int], rest: int
) -> Left:
    """The part of the destination's blocks that `bind` to these tables and tokens leaves: the tokens that the source
    has dropped from a window, and all from the global token `rest` on. States are always moved whole."""
    met: dict[tuple[Meeting, str, int], Ints] = {}
    pairs = []
    for copy in plan.copies:
        own, ours = copy.destination_group, destination_tables.get(copy.destination_group.name)
        if own.kind == "state" or ours is None or not len(ours.block_ids):
            continue
        theirs = source_tables[copy.source_rank][copy.source_group.name].first_token
        key = (copy.meeting, own.name, theirs)
        if key not in met:
            met[key] = _slots(copy.meeting, tokens, rest, theirs, ours)
        if len(met[key]):
            index, slots = divided(met[key], own.block_size)
            blocks = offsets(ours.block_ids[index], copy.destination.block)
            pairs.append((copy, blocks + offsets(slots, copy.destination.slot)))
    return Left(tuple(pairs)) if pairs else NOTHING


def _slots(meeting: Meeting, tokens: tuple[int, int], rest: int, theirs: int, ours: BlockTable) -> Ints:
    """Counted from our table's first. theirs: the source's first local token."""
    source, own, spans = meeting.source_shard, meeting.own_shard, []
    end = ours.first_token + len(ours.block_ids) * meeting.own_block
    if dropped := meeting.dropped(tokens, theirs):
        spans.append((tokens[0], min(tokens[1], global_token(source, dropped))))
    if local_tokens(own, rest) < end:
        spans.append((rest, global_token(own, end - 1) + 1))
    found = [
        strands.own_tokens
        for span in spans
        if span[0] < span[1]
        for strands in shared(meeting.strands(span), own, span, ours.first_token)
    ]
    return np.concatenate(found) - ours.first_token if found else np.zeros(0, dtype=np.int64)
