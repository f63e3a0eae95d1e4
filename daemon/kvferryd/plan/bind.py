"""The second pure function: bind a plan to block tables and a token range.

First the segments: the most tokens that lie regularly in one source block and one destination block. Then the runs:
segments times the plan's static rows. Vectorised; no Python loop over blocks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

import numpy as np

from kvferry.errors import Malformed
from kvferry.manifest import Group
from kvferry.tables import BlockTable, Tables
from kvferryd.plan.axes import Ints, coalesce, divided, offsets
from kvferryd.plan.left import NOTHING, Left
from kvferryd.plan.plan import Copy, Plan
from kvferryd.plan.rows import Pattern
from kvferryd.plan.segments import EVERY, ByLength, Meeting, Segments, Steps, global_token, local_tokens, shared

EXACT_RUNS = 16_384
"""Up to this many runs, those of different rows are joined too (a sort, 1 ms); beyond, only a few could still join, and
the sort would cost more than they do."""


@dataclass(frozen=True, slots=True)
class Runs:
    """Contiguous bytes to move from one source rank; offsets in bytes from the start of either region."""

    source_rank: int
    source_region: int
    destination_region: int
    source_offsets: Ints
    destination_offsets: Ints
    nbytes: Ints

    def __len__(self) -> int:
        return len(self.nbytes)


@dataclass(frozen=True, slots=True)
class Repeated:
    """A pattern's runs at each of these offsets, `nbytes` long there: segments that follow one another are one."""

    pattern: Pattern
    source_offsets: Ints
    destination_offsets: Ints
    nbytes: Ints


@dataclass(frozen=True)
class Bound:
    """A plan bound to one request. left: what is to be zero beside it."""

    pairs: tuple[tuple[Copy, Segments], ...]
    left: Left = NOTHING

    @cached_property
    def nbytes(self) -> int:
        return sum(self.nbytes_by_rank.values())

    @cached_property
    def nbytes_by_rank(self) -> dict[int, int]:
        """Bytes by source rank."""
        found: dict[int, int] = defaultdict(int)
        for copy, segments in self.pairs:
            found[copy.source_rank] += copy.bytes_per_token * segments.tokens
        return found

    def without(self, ranks: Collection[int]) -> Bound:
        """The reads from the other source ranks."""
        return Bound(tuple(pair for pair in self.pairs if pair[0].source_rank not in ranks)) if ranks else self

    @property
    def segment_count(self) -> int:
        return sum(len(segments) for _, segments in self.pairs)

    @cached_property
    def run_count(self) -> int:
        """How many runs there are, before those of different rows are joined."""
        return sum(len(each.nbytes) * len(each.pattern.source_offsets) for _, found in self._repeated for each in found)

    @property
    def most_runs(self) -> int:
        """At least run_count, without making any run."""
        return sum(
            copy.most_runs(tokens, each.steps) * times for copy, each in self.pairs for tokens, times in each.counted
        )

    @cached_property
    def _repeated(self) -> list[tuple[Copy, list[Repeated]]]:
        return [(copy, list(_repeat(copy, segments))) for copy, segments in self.pairs]

    def runs(self) -> list[Runs]:
        """The runs, maximal, ascending by source offset within one (source rank, regions)."""
        parts: dict[tuple[int, int, int], list[tuple[Ints, Ints, Ints]]] = defaultdict(list)
        for copy, found in self._repeated:
            parts[copy.source_rank, copy.source.region, copy.destination.region] += map(_expand, found)
        return [Runs(*where, *_join(found)) for where, found in parts.items() if found]


def bind(
    plan: Plan,
    source_tables: Mapping[int, Tables],
    destination_tables: Tables,
    tokens: tuple[int, int],
    *,
    states: bool = True,
) -> Bound:
    """Bind `plan` to block tables by source rank and the destination's, for global tokens [start, stop).

    `states=False` leaves the state groups out: a progressive reader moves them once, at the end. An empty
    destination table wants nothing of its group. Raises KvferryError naming table, value and remedy.
    """
    if not 0 <= tokens[0] <= tokens[1]:
        message = f"the token range {tokens[0]}:{tokens[1]} is not a range"
        remedy = "0 <= first <= last, global tokens, last exclusive"
        raise Malformed("malformed_tables", message, field="tokens", value=tokens, remedy=remedy)
    check_whole(plan, destination_tables, tokens)
    met: dict[tuple[object, ...], list[_Met]] = {}
    cuts: dict[_Key, _Cut] = {}
    pairs = []
    for copy in plan.copies:
        own = copy.destination_group
        if own.kind == "state" and not states:
            continue
        key = (copy.source_rank, copy.source_group.name, own.name, copy.meeting, copy.whole)
        if key not in met:
            theirs = source_tables.get(copy.source_rank, {})
            met[key] = list(_meet(copy, theirs, destination_tables, tokens, cuts))
        for piece, blocks, own_blocks in met[key]:
            source = offsets(blocks, copy.source.block) + piece.source_slots
            destination = offsets(own_blocks, copy.destination.block) + piece.own_slots
            pairs.append((copy, Segments(piece.steps, source, destination, piece.lengths)))
    return Bound(tuple(pairs))


class _Piece(NamedTuple):
    """Segments before they meet the tables: the index of the block on either side in which each begins, the bytes from
    there to its first slot, and their tokens."""

    steps: Steps
    source_index: Ints
    source_slots: Ints
    own_index: Ints
    own_slots: Ints
    lengths: ByLength


_Met: TypeAlias = tuple[_Piece, Ints, Ints]
"""Segments and the blocks of either side in which they lie."""
_Key: TypeAlias = tuple[Meeting, int, int]
"""All that a cut depends on in a request: the meeting, and the first token of the source's table and of ours."""
_ZERO = np.zeros(1, dtype=np.int64)
_STATE = _Piece(EVERY, _ZERO, _ZERO, _ZERO, _ZERO, ((1, slice(None)),))


class _Cut(NamedTuple):
    """Global tokens that both sides hold, cut into segments. Most copies of a plan share it.

    source_span: the first of the source's local tokens that are read, and the one after the last.
    """

    source_span: tuple[int, int] | None
    pieces: list[_Piece]


def _cut(meeting: Meeting, tokens: tuple[int, int], first_tokens: tuple[int, int]) -> _Cut:
    """Cut the tokens [start, stop), from these local tokens of either side's table on."""
    dropped = meeting.dropped(tokens, first_tokens[0])
    spans, pieces = [], []
    for each in shared(meeting.strands(tokens), meeting.own_shard, tokens, first_tokens[1], dropped):
        starts, own_starts, lengths = each.cut(first_tokens, meeting.grains)
        index, slots = divided(starts, meeting.source_block)
        own_index, own_slots = divided(own_starts, meeting.own_block)
        slots, own_slots = offsets(slots, meeting.source_slot), offsets(own_slots, meeting.own_slot)
        spans.append(each.source_span)
        pieces.append(_Piece(each.steps, index, slots, own_index, own_slots, lengths))
    return _Cut((min(first for first, _ in spans), max(stop for _, stop in spans)) if spans else None, pieces)


def _meet(
    copy: Copy, source_tables: Tables, own_tables: Tables, tokens: tuple[int, int], cuts: dict[_Key, _Cut]
) -> Iterator[_Met]:
    source, own, whose = copy.source_group, copy.destination_group, f"source rank {copy.source_rank}"
    ours = destination_table_of(own_tables, own)
    if len(ours.block_ids) == 0:
        return
    theirs = table_of(source_tables, source, whose)
    if own.kind == "state":
        for table, group, of in ((theirs, source, whose), (ours, own, "destination")):
            if (ids := len(table.block_ids)) != 1:
                what, remedy = f"has {ids} ids", "a state group holds one block per request"
                raise _wrong("tables_mismatch", of, group, what, ".block_ids", table.block_ids.tolist(), remedy)
        yield _STATE, theirs.block_ids, ours.block_ids
        return
    # Before the range is spelled out: it may be absurdly long. After this the table bounds it.
    check_holds(ours, own, ours.first_token, local_tokens(own.token_shard, tokens[1]), "destination")
    # Tokens before the destination's first are cached there.
    key = (copy.meeting, theirs.first_token, ours.first_token)
    if key not in cuts:
        cuts[key] = _cut(copy.meeting, tokens, key[1:])
    cut = cuts[key]
    if cut.source_span:
        check_holds(theirs, source, *cut.source_span, whose)
        if copy.whole:
            _check_first(theirs, source, whose)
    for piece in cut.pieces:
        yield piece, theirs.block_ids[piece.source_index], ours.block_ids[piece.own_index]


def table_of(tables: Tables, group: Group, whose: str) -> BlockTable:
    """The table of a group, with every id checked against it. Raises KvferryError naming table, value and remedy."""
    table = tables.get(group.name)
    if table is None:
        remedy = "give every group a table; an empty block_ids list means that nothing of it is wanted"
        raise _wrong("tables_mismatch", whose, group, "is missing", "", sorted(tables), remedy)
    lowest, highest = table.span
    if lowest < 0 or highest >= group.num_blocks:
        wrong = lowest if lowest < 0 else highest
        remedy = f"block ids lie in [0, {group.num_blocks})"
        raise _wrong("block_id_out_of_range", whose, group, f"names block {wrong}", ".block_ids", wrong, remedy)
    return table


def destination_table_of(tables: Tables, group: Group) -> BlockTable:
    """The same for a destination, whose blocks must be distinct."""
    table = table_of(tables, group, "destination")
    if table.twice is not None:
        what, remedy = "names a block twice", "every destination block holds different tokens"
        raise _wrong("duplicate_block", "destination", group, what, ".block_ids", table.twice, remedy)
    return table


def check_whole(plan: Plan, destination_tables: Tables, tokens: tuple[int, int]) -> None:
    """The token range cuts no block of a group that moves in whole blocks only, as far as the tables want it. Raises
    KvferryError (`divided`)."""
    for copy in plan.copies:
        group = copy.destination_group
        table = destination_tables.get(group.name)
        if not copy.whole or table is None or len(table.block_ids) == 0:
            continue
        size, shard = group.block_size, group.token_shard
        start = max(tokens[0], global_token(shard, table.first_token))
        first, stop = (local_tokens(shard, at) for at in (start, tokens[1]))
        if first >= stop:
            continue
        _check_first(table, group, "destination")
        if first % size or stop % size:
            why = f"tokens {start} to {tokens[1]} divide a block of group {group.name}, which may only be moved whole"
            remedy = f"name whole blocks, of {copy.grain} tokens; publish and reserve all the room of the last one"
            raise Malformed("divided", why, field="tokens", value=f"{tokens[0]}:{tokens[1]}", remedy=remedy)


def _check_first(table: BlockTable, group: Group, whose: str) -> None:
    if table.first_token % group.block_size:
        what, remedy = "begins inside a block, which may only be moved whole", f"a multiple of {group.block_size}"
        raise _wrong("divided", whose, group, what, ".first_token", table.first_token, remedy)


def check_holds(table: BlockTable, group: Group, first: int, stop: int, whose: str) -> None:
    """The table of a paged group reaches over its local tokens [first, stop). Raises KvferryError."""
    end = table.first_token + len(table.block_ids) * group.block_size
    if first < table.first_token or stop > end:
        what = f"holds local tokens [{table.first_token}, {end}), it has to hold [{first}, {stop})"
        value = f"{len(table.block_ids)} blocks of {group.block_size} from token {table.first_token}"
        remedy = "list the blocks of the whole token range, or name fewer tokens"
        if group.window is not None:
            remedy += "; a source of another version or engine may keep less of a window: see docs/vllm.md"
        raise _wrong("tables_too_short", whose, group, what, "", value, remedy)


def _wrong(code: str, whose: str, group: Group, what: str, field: str, value: object, remedy: str) -> Malformed:
    """`field`: what follows the table's name."""
    message, field = f"the {whose} table of group {group.name} {what}", f"tables.{group.name}{field}"
    return Malformed(code, message, field=field, value=value, remedy=remedy)


def _repeat(copy: Copy, segments: Segments) -> Iterator[Repeated]:
    kinds: dict[bytes, list[tuple[Pattern, Ints, Ints]]] = defaultdict(list)
    for length, chosen in segments.lengths:
        source, own = segments.source_offsets[chosen], segments.destination_offsets[chosen]
        for pattern in copy.patterns(length, segments.steps):
            kinds[pattern.key].append((pattern, source, own))
    for found in kinds.values():
        parts = [(source, own, _filled(len(source), value=pattern.nbytes)) for pattern, source, own in found]
        yield Repeated(found[0][0], *coalesce(*_columns(parts)))


def _filled(*shape: int, value: int | Ints) -> Ints:
    filled = np.empty(shape, dtype=np.int64)
    filled[:] = value
    return filled


def _expand(repeated: Repeated) -> tuple[Ints, Ints, Ints]:
    pattern, nbytes = repeated.pattern, repeated.nbytes
    return (
        (pattern.source_offsets[:, None] + repeated.source_offsets).ravel(),
        (pattern.destination_offsets[:, None] + repeated.destination_offsets).ravel(),
        _filled(len(pattern.source_offsets), len(nbytes), value=nbytes).ravel(),
    )


def _columns(parts: list[tuple[Ints, Ints, Ints]]) -> tuple[Ints, Ints, Ints]:
    if len(parts) == 1:
        return parts[0]
    source, destination, nbytes = (np.concatenate(column) for column in zip(*parts, strict=True))
    return source, destination, nbytes


def _join(parts: list[tuple[Ints, Ints, Ints]]) -> tuple[Ints, Ints, Ints]:
    columns = _columns(parts)
    return coalesce(*columns) if len(columns[0]) <= EXACT_RUNS else columns
