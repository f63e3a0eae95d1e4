"""Direct execution: every run is one NIXL descriptor."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kvferryd.beside import beside
from kvferryd.peers.peer import Link, PeerEngine
from kvferryd.plan import Bound, Runs
from kvferryd.transfer.flight import Flight
from kvferryd.transport import Agent, Span
from kvferryd.transport.read import Descriptors

PATH, TRANSPORT = "direct", "UCX"
POST_S = 150e-6
"""To NIXL's thread and back, whatever is read."""


@dataclass(frozen=True, slots=True)
class Rows:
    """NIXL descriptor rows of one (source rank, regions): equal lengths in each row of both."""

    rank: int
    local: Descriptors
    remote: Descriptors
    local_type: str
    remote_type: str


def estimate_s(bound: Bound, peer: PeerEngine) -> float:
    """By the slowest link of the ranks that are read, and as if all segments were as long as the longest."""
    descriptors = 0
    for copy, segments in bound.pairs:
        if number := len(segments.tokens):
            patterns = copy.patterns(int(segments.tokens.max()))
            descriptors += number * sum(len(pattern.source_offsets) for pattern in patterns)
    links = [peer.ranks[rank].link for rank in peer.plan.reads_from] or [Link()]
    moving = bound.nbytes / min(link.bytes_per_s for link in links)
    return POST_S + descriptors * max(link.descriptor_s for link in links) + moving


async def move(
    bound: Bound, agent: Agent, regions: Mapping[int, Span], peer: PeerEngine, priority: int, reads: list[Flight]
) -> int:
    """Read everything that `bound` says; returns the number of descriptors.

    Every read is put into `reads` as soon as it exists, so that the caller knows what may still write if this fails or
    is cancelled. Raises TransportError of the first read that fails; the others are given up.
    """
    runs = sum(len(copy.boxes) * len(segments.tokens) for copy, segments in bound.pairs)
    rows = await beside(runs, lambda: _rows(bound, regions, peer))
    mine = [
        agent.read(peer.ranks[row.rank].agent_name, row.local, row.remote, row.local_type, row.remote_type, priority)
        for row in rows
    ]
    reads += mine
    try:
        await asyncio.gather(*(read.done for read in mine))
    finally:
        for read in mine:
            if not read.done.done() or read.done.cancelled():
                read.abandon()
    return sum(len(row.local) for row in rows)


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
