"""A plan in numbers: what every source rank gives, and the runs, exact with tables and typical without."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from kvferry.errors import Malformed
from kvferry.manifest import Group, Manifest
from kvferry.tables import BlockTable, Tables, tables_from_json
from kvferryd.explain.ways import taken
from kvferryd.plan import Bound, Copy, Plan, bind, plan
from kvferryd.plan.segments import EVERY

Bindings: TypeAlias = tuple[dict[int, Tables], Tables, tuple[int, int]]
"""Source tables by rank, destination tables, global tokens [first, last)."""
MOST_TOKENS = 4096
"""A typical request is at most this long: enough for the block sizes of both sides to meet in every way."""
MOST_RUNS = 1 << 22
"""The most runs of a typical request of some 300 MB. A request with more is made shorter."""


@dataclass(frozen=True, slots=True)
class Summary:
    """bound: to a typical request. bytes_per_token: by source rank, of a long sequence. run_nbytes: the sizes of that
    request's runs."""

    plan: Plan
    bound: Bound
    bytes_per_token: dict[int, float]
    state_nbytes: dict[int, int]
    run_nbytes: np.ndarray[Any, np.dtype[np.int64]]
    descriptors_per_token: float

    @property
    def run_bytes(self) -> int:
        """Half of all bytes travel in runs of at least this size: what decides whether direct reads are fast."""
        if not len(self.run_nbytes):
            return 0
        sizes = np.sort(self.run_nbytes)
        so_far = np.cumsum(sizes)
        return int(sizes[np.searchsorted(so_far, so_far[-1] / 2)])


def explain_json(
    sources: Sequence[Manifest],
    destination: Manifest,
    tables: Bindings | None,
    most: int | None = None,
    *,
    way: str = "auto",
) -> dict[str, Any]:
    """The JSON form of `explain --json`.

    With tables `{"runs": [[source_rank, source_region, source_offset, destination_region, destination_offset,
    nbytes], ...]}`. Without, what a long request in scattered blocks would do: `sources` (one object per rank that is
    read; bytes_per_token is an average, state_bytes come once per request), `run_bytes` (half of all bytes travel in
    runs of at least this size), `descriptors_per_token`, `path` (which daemons with this `way` would take, as far as
    the kinds of memory tell). most: of the runs with tables. Raises PlanRefused, or KvferryError for tables, and
    `too_many_runs`.
    """
    chosen = plan_distinct(sources, destination)
    if tables is not None:
        bound = bind(chosen, *tables)
        if most is not None:
            _check_runs(bound.most_runs, most, "tables")
        return {"runs": run_rows(bound)}
    summary = summarise(chosen)
    return {
        "sources": [_source(summary, rank) for rank in chosen.reads_from],
        "run_bytes": summary.run_bytes,
        "descriptors_per_token": round(summary.descriptors_per_token, 6),
        "path": taken(way, chosen, summary.bound),
    }


def plan_distinct(sources: Sequence[Manifest], destination: Manifest) -> Plan:
    """`plan`, for manifests that a person put together: a rank may be there twice by mistake."""
    ranks = [source.rank for source in sources]
    twice = next((rank for rank in ranks if ranks.count(rank) > 1), None)
    if twice is not None:
        raise Malformed(
            "duplicate_rank",
            f"source rank {twice} is given {ranks.count(twice)} times",
            field="sources",
            value=ranks,
            remedy="give every rank of one engine once",
        )
    return plan(sources, destination)


def _check_runs(runs: int, most: int, field: str) -> None:
    """Before any is made. Raises KvferryError (`too_many_runs`)."""
    if runs > most:
        why, remedy = f"these make {runs} runs, and one answer is of {most} at most", "explain fewer blocks, or layers"
        raise Malformed("too_many_runs", why, field=field, value=runs, remedy=remedy)


def run_rows(bound: Bound) -> list[list[int]]:
    """Every run as in the JSON form; offsets and sizes in bytes."""
    return [
        [runs.source_rank, runs.source_region, source, runs.destination_region, destination, nbytes]
        for runs in bound.runs()
        for source, destination, nbytes in zip(
            runs.source_offsets.tolist(), runs.destination_offsets.tolist(), runs.nbytes.tolist(), strict=True
        )
    ]


def summarise(chosen: Plan) -> Summary:
    """Bind the plan to a long request in scattered blocks, and sum it up."""
    paged = [copy for copy in chosen.copies if copy.destination_group.kind == "paged"]
    states = [copy for copy in chosen.copies if copy.destination_group.kind == "state"]
    per_token = sum(copy.most_runs(copy.segment, EVERY) / copy.segment for copy in paged)
    tokens = _typical_tokens(paged, chosen.grain, MOST_RUNS / max(per_token, 1))
    _check_runs(sum(copy.most_runs(1, EVERY) for copy in states) + round(per_token * tokens), MOST_RUNS, "sources")
    source_tables: dict[int, dict[str, BlockTable]] = {}
    destination_tables: dict[str, BlockTable] = {}
    for copy in chosen.copies:
        held = source_tables.setdefault(copy.source_rank, {})
        held[copy.source_group.name] = _scattered(copy.source_group, tokens, ascending=True)
        own = copy.destination_group
        destination_tables[own.name] = _scattered(own, tokens, ascending=False)
    bound = bind(chosen, source_tables, destination_tables, (0, tokens), states=not paged)
    found = bound.runs()
    moved = dict.fromkeys(chosen.reads_from, 0)
    for runs in found if paged else ():
        moved[runs.source_rank] += int(runs.nbytes.sum())
    state_nbytes = dict.fromkeys(chosen.reads_from, 0)
    for copy in states:
        state_nbytes[copy.source_rank] += copy.bytes_per_token
    descriptors = sum(len(runs) for runs in found) if paged else 0
    return Summary(
        chosen,
        bound,
        {rank: nbytes / max(tokens, 1) for rank, nbytes in moved.items()},
        state_nbytes,
        np.concatenate([runs.nbytes for runs in found]) if found else np.zeros(0, dtype=np.int64),
        descriptors / max(tokens, 1),
    )


def source_tables_from_json(data: Any, sources: Sequence[Manifest], field: str = "tables.source") -> dict[int, Tables]:
    """Tables by rank and group; by group alone where there is a single source. Raises `malformed_tables`."""
    if not isinstance(data, Mapping):
        return {0: tables_from_json(data, field)}  # says what is expected
    by_group = any(isinstance(entry, Mapping) and "block_ids" in entry for entry in data.values())
    if by_group and len(sources) == 1:
        return {sources[0].rank: tables_from_json(data, field)}
    known = {str(source.rank): source.rank for source in sources}
    for name in data:
        if name not in known:
            raise Malformed(
                "malformed_tables",
                f"{field} names a rank that is not among the sources",
                field=f"{field}.{name}",
                value=name,
                remedy=f"by rank ({', '.join(known)}) and then group",
            )
    return {known[rank]: tables_from_json(entry, f"{field}.{rank}") for rank, entry in data.items()}


def _source(summary: Summary, rank: int) -> dict[str, Any]:
    alike = [each for copy in summary.plan.copies if copy.source_rank == rank for each in copy.alike]
    parts = [(component, each.choice) for each in alike for component in each.components]
    shares = {(component.name, part.axis, *part.span, part.total) for component, part in parts}
    return {
        "rank": rank,
        "engine_id": summary.plan.sources[rank].engine_id,
        "components": sorted({component.name for component, _ in parts}),
        "layers": sorted({component.layer for component, _ in parts}),
        "shares": [
            {"component": component, "axis": axis or None, "start": start, "stop": stop, "total": total}
            for component, axis, start, stop, total in sorted(shares)
        ],
        "bytes_per_token": round(summary.bytes_per_token[rank], 6),
        "state_bytes": summary.state_nbytes[rank],
    }


def _typical_tokens(paged: Sequence[Copy], grain: int, most: float) -> int:
    """So many that all blocks and token shards have met once or more, as far as the smallest cache reaches, in whole
    grains; `most` at most, unless that takes more."""
    period, capacity = 1, MOST_TOKENS
    for group in (group for copy in paged for group in (copy.source_group, copy.destination_group)):
        ring = group.token_shard.size * group.token_shard.interleave
        period = math.lcm(period, ring if group.token_shard.size > 1 else 1, group.block_size * group.token_shard.size)
        rings = group.num_blocks * group.block_size // group.token_shard.interleave
        capacity = min(capacity, rings * ring if group.token_shard.size > 1 else group.num_blocks * group.block_size)
    return min(int(most), capacity) // period * period or min(period, capacity) // grain * grain


def _scattered(group: Group, tokens: int, *, ascending: bool) -> BlockTable:
    """Blocks for `tokens`; ascending on one side and descending on the other, no two are neighbours on both."""
    if group.kind == "state":
        return BlockTable.of([0])
    shard = group.token_shard
    ring = shard.size * shard.interleave
    local = tokens if shard.size == 1 else -(-tokens // ring) * shard.interleave
    ids = np.arange(min(group.num_blocks, -(-local // group.block_size)), dtype=np.int64)
    return BlockTable.of(ids if ascending else ids[::-1].copy())
