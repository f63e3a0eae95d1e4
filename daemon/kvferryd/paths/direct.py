"""Direct: every run is one NIXL descriptor."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kvferryd.aio import beside
from kvferryd.engine import Engine
from kvferryd.paths.move import Move, Moved, PathName
from kvferryd.peers.peer import PeerEngine
from kvferryd.plan import Bound, Runs
from kvferryd.transport import Span
from kvferryd.transport.read import Descriptors


@dataclass(frozen=True, slots=True)
class Rows:
    """NIXL descriptor rows of one (source rank, regions): equal lengths in each row of both."""

    rank: int
    local: Descriptors
    remote: Descriptors
    local_type: str
    remote_type: str


class Direct:
    name = PathName.DIRECT

    def refusal(self, engine: Engine, peer: PeerEngine) -> str:
        if engine.strict:
            return "this daemon is strict"
        hidden = [rank for rank in peer.plan.reads_from if not peer.ranks[rank].regions]
        return f"ranks {hidden} are strict" if hidden else ""

    async def move(self, move: Move) -> Moved:
        """Raises TransportError of the first read that fails; the others are given up."""
        bound, agent = move.bound, move.engine.agent
        assert agent is not None
        runs = sum(len(copy.boxes) * len(segments.tokens) for copy, segments in bound.pairs)
        regions = move.regions
        rows = await beside(runs, lambda: _rows(bound, regions, move.peer))
        reads = [
            agent.read(
                move.peer.ranks[row.rank].agent_name,
                row.local,
                row.remote,
                row.local_type,
                row.remote_type,
                move.priority,
            )
            for row in rows
        ]
        move.flights.extend(reads)
        try:
            await asyncio.gather(*(read.done for read in reads))
        finally:
            for read in reads:
                if not read.done.done() or read.done.cancelled():
                    read.abandon()
        return Moved(move.ranks, sum(len(row.local) for row in rows))


def _rows(bound: Bound, regions: Mapping[int, Span], peer: PeerEngine) -> list[Rows]:
    rows = []
    for runs in bound.runs():
        own, far = regions[runs.destination_region], peer.ranks[runs.source_rank].regions[runs.source_region]
        rows.append(
            Rows(
                runs.source_rank,
                _descriptors(own, runs.destination_offsets, runs),
                _descriptors(far, runs.source_offsets, runs),
                own.memory_type,
                far.memory_type,
            )
        )
    return rows


def _descriptors(span: Span, offsets: np.ndarray[tuple[int, ...], np.dtype[np.int64]], runs: Runs) -> Descriptors:
    table = np.empty((len(offsets), 3), dtype=np.uint64)
    table[:, 0] = offsets
    table[:, 0] += np.uint64(span.address)
    table[:, 1] = runs.nbytes
    table[:, 2] = span.device
    return table
