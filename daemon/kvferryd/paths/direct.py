"""The paths without a staging arena. Direct: every run is one NIXL descriptor. Mapped: one kernel on this GPU reads the
peer's memory and writes ours, in a single pass."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import numpy as np

from kvferry.errors import Conflict
from kvferryd.aio import all_done, beside
from kvferryd.copy import Batch, mapped, moves, zeros
from kvferryd.paths.move import Move, Moved, PathName, Transport
from kvferryd.peers.peer import PeerEngine
from kvferryd.plan import Runs
from kvferryd.transport.read import Descriptors, Span

MOST_RUNS = 1 << 23
"""The most runs of a move: each takes some 70 bytes of rows, and 2 to 5 us where it is short."""
Rows = tuple[str, Descriptors, Descriptors, str, str]
"""A read: the source's agent, local and remote rows of equal lengths, and the type of memory of each."""


class Mapped:
    name = PathName.MAPPED

    def transport(self, _: PeerEngine) -> Transport:
        return Transport.CUDA_IPC

    async def move(self, move: Move) -> Moved:
        runner = move.engine.runner
        assert runner is not None
        sources = move.peer.mapped_addresses()
        own = move.engine.addresses
        bound = move.bound

        def batches() -> list[Batch]:
            return mapped(moves(bound), sources, own) + zeros(bound.left, runner.zeros, own)

        copy = runner.start(bound.nbytes + bound.left.nbytes, batches, move.priority, runner.programs)
        move.flights.append(copy)
        await copy.done
        return Moved(move.ranks)


class Direct:
    name = PathName.DIRECT

    def transport(self, _: PeerEngine) -> Transport:
        return Transport.UCX

    async def move(self, move: Move) -> Moved:
        """Raises TransportError of the first read that fails, KvferryError (`too_many_runs`)."""
        bound = move.bound
        regions = {id: region.span for id, region in move.engine.session.regions.items()}

        def all_rows() -> list[Rows]:
            if (count := bound.run_count) > MOST_RUNS:
                why = f"each is {bound.nbytes // count} bytes long, and at most {MOST_RUNS} are read one by one"
                remedy = "give both sides a staging arena (arena_mb, way = auto), or caches of one layout"
                raise Conflict("too_many_runs", why, field="runs", value=count, remedy=remedy)
            return [_rows(each, regions, move.peer) for each in bound.runs()]

        rows = await beside(bound.most_runs, all_rows)
        await zero(move)
        reads = [move.read(*each) for each in rows]
        await all_done([read.done for read in reads])
        return Moved(move.ranks, sum(len(local) for _, local, *_ in rows))


async def zero(move: Move) -> None:
    """Zero what is left of the blocks, alone or before any read is posted."""
    left, engine = move.bound.left, move.engine
    if left.nbytes:
        batches = functools.partial(zeros, left, engine.copies.zeros, engine.addresses)
        flight = engine.copies.start(left.nbytes, batches, move.priority)
        move.flights.append(flight)
        await flight.done


def _rows(runs: Runs, regions: Mapping[int, Span], peer: PeerEngine) -> Rows:
    source = peer.ranks[runs.source_rank]
    own, far = regions[runs.destination_region], source.regions[runs.source_region]
    local = _descriptors(own, runs.destination_offsets, runs)
    remote = _descriptors(far, runs.source_offsets, runs)
    return source.agent_name, local, remote, own.memory_type, far.memory_type


def _descriptors(span: Span, offsets: np.ndarray[tuple[int, ...], np.dtype[np.int64]], runs: Runs) -> Descriptors:
    table = np.empty((len(offsets), 3), dtype=np.uint64)
    table[:, 0] = offsets
    table[:, 0] += np.uint64(span.address)
    table[:, 1] = runs.nbytes
    table[:, 2] = span.device
    return table
