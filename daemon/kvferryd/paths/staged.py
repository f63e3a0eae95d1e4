"""Staged: the source gathers into a slot, one NIXL READ fetches the slot whole, and it is scattered here. A slot that
is mapped in this process is scattered from where it is, without a READ; an own slot is its credit all the same.

    source                       gather k+2, packed | gather k+3, packed | ...
    reader  want k, k+1, k+2 ... | READ k, k+1      | read k, want k+3   | scatter k | READ k+2 ...

Every slot of the reader has a carrier that takes chunk after chunk through it. The first message wants as many chunks
as there are carriers. Each later "chunk read" message also asks for that slot's next chunk, while the one just read is
being scattered. So the source gathers ahead, READs run back to back, and no READ waits for a round trip. The source may
reuse its blocks as soon as all chunks are gathered: a chunk is reported as packed only while the lease held, and
`ChunkStream.vouched` makes sure that no slot was taken back before it was read.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvferry.errors import KvferryError
from kvferry.schemas import Awaited
from kvferry.v1 import peer_pb2
from kvferryd.aio import beside, together
from kvferryd.copy import Batch, Chunk, cut_by_rank, moves, zeros
from kvferryd.copy.copying import Copying
from kvferryd.paths.chunks import ChunkStream
from kvferryd.paths.move import ARENA, Flight, Move, Moved, PathName, Transport
from kvferryd.peers.peer import PeerEngine, Staging
from kvferryd.plan import Left
from kvferryd.plan.left import NOTHING
from kvferryd.staging.arena import SLOT_ALIGN, Arena, Slot, Use
from kvferryd.staging.share import wanting
from kvferryd.transport.read import Read

IN_FLIGHT = 8
"""Slots that one transfer may have at once."""
LEAST_NBYTES, DEPTH = {"host": 8 << 20, "cuda": 64 << 20}, 5
"""A transfer is cut into about DEPTH chunks, so that the gather of one, the READ of another and the scatter of a third
overlap; but into chunks of at least LEAST_NBYTES, by kind of memory, and at most a slot. The first of several chunks is
smaller (`copy.chunks.FIRST`), and so is the last: the ends overlap with nothing."""
GRACE_S = 1.0
"""Calls may take so much longer than the transfer: its own deadline then says what it waited for."""


class Staged:
    name = PathName.STAGED

    def transport(self, peer: PeerEngine) -> Transport:
        """UCX where any rank's slots are not mapped."""
        mapped = (peer.ranks[rank].slots_here is not None for rank in peer.plan.reads_from)
        return Transport.CUDA_IPC if all(mapped) else Transport.UCX

    async def move(self, move: Move) -> Moved:
        """Read with a descriptor for each chunk. Raises TransportError of the first read that fails, KvferryError of a
        source that gives up. After an announcement the other ranks are read to their end: theirs may have released the
        lease by then."""
        peer, bound, arena = move.peer, move.bound, move.engine.arena
        assert arena is not None
        journey = _Journey(move, arena, move.engine.addresses, bound.left)
        stagings = [staging for rank in peer.plan.reads_from if (staging := peer.ranks[rank].staging)]
        chunk_nbytes = _chunk_nbytes(bound.nbytes, stagings, arena.slot_nbytes)
        readers = [reader for reader in move.readers if reader.source.rank in move.ranks]
        timeout_s = max(0.0, move.deadline - asyncio.get_running_loop().time()) + GRACE_S
        pair = {reader.source.rank: functools.partial(peer.pair, reader.source, timeout_s) for reader in readers}
        pairings = {rank: await known() for rank, known in pair.items()}
        by_rank = await beside(bound.segment_count, lambda: cut_by_rank(moves(bound), chunk_nbytes))
        streams = []
        for reader in readers:
            rank = reader.source.rank
            chunks = by_rank[rank]
            opening = wanting(move.tables, move.tokens, states=move.states, chunk_nbytes=chunk_nbytes, chunks=chunks)
            opening.pairing = pairings[rank]
            streams.append(ChunkStream(reader, opening, chunks, pair[rank]))
        counts = [len(chunks) for chunks in by_rank.values()]
        # Ranks by turns, so that all sources work at once.
        every = [(stream, index) for index in range(max(counts)) for stream in streams if index < len(stream.chunks)]
        turns = (turn for turn in every if turn[0].problem is None)
        await together(journey.carry(turns) for _ in range(min(IN_FLIGHT, arena.most, len(every))))
        await together(_prove(stream) for stream in streams)
        whole = [stream for stream in streams if stream.problem is None]
        ranks, failed = frozenset(stream.source.rank for stream in whole), (stream.problem for stream in streams)
        carried = sum(len(stream.chunks) for stream in whole)
        return Moved(ranks, carried, packed=ranks, failed=next(filter(None, failed), None))


async def _prove(stream: ChunkStream) -> None:
    """Its chunks are whole, or it has a problem. Raises KvferryError where its source rank will not be asked again."""
    if stream.problem is None:
        try:
            await stream.vouched()
        except KvferryError:
            if not stream.may_begin_again:
                raise


def _chunk_nbytes(nbytes: int, stagings: Sequence[Staging], own: int) -> int:
    """`own`: bytes of a slot here."""
    part = -(-2 * nbytes // (2 * DEPTH - 1) // SLOT_ALIGN) * SLOT_ALIGN  # a quarter more at either end
    least = min(LEAST_NBYTES[staging.span.kind] for staging in stagings)
    return min([own, *(staging.slot_nbytes for staging in stagings), max(least, part)])


Turn = tuple[ChunkStream, int]
"""The next chunk: its stream and its index there."""


@dataclass(slots=True, eq=False)
class _Journey:
    """The destination of chunks. `addresses`: of our regions. `left`: what no scatter has zeroed yet."""

    move: Move
    arena: Arena
    addresses: Mapping[int, int]
    left: Left
    slots: int = 0
    """Slots that it has."""
    awaiting: list[str] = field(default_factory=list)
    """For each carrier that awaits a packed chunk: the address of the source."""
    busy: int = 0
    """Carriers that read or scatter one."""

    async def carry(self, turns: Iterator[Turn]) -> None:
        """Carry chunk after chunk, until none is left; each time in a slot of its own."""
        turn = next(turns, None)
        while turn is not None:
            turn = await self._through(await self._slot(), turn, turns)

    async def _slot(self) -> Slot:
        if not self.slots:
            self._wait(Awaited.SLOT, ARENA)
        slot = await self.arena.take(Use.READ)
        self.slots += 1
        self._waited(Awaited.SLOT, ARENA)
        return slot

    def _wait(self, what: Awaited, on: str) -> None:
        """Nothing of this transfer moves meanwhile. A wait that is cancelled goes on: the deadline ends it."""
        if not self.busy and self.move.waits.what is not what:
            self.move.waits.turn(what, time.monotonic(), on)

    def _waited(self, what: Awaited, on: str) -> None:
        waits = self.move.waits
        if waits.what is what and waits.turn(None, time.monotonic()):
            waits.keep(what, on)

    async def _through(self, slot: Slot, turn: Turn, turns: Iterator[Turn]) -> Turn | None:
        """Carry chunks through this slot until none is left or others wait for a slot; returns the next turn then."""
        flight: Flight | None = None
        """The flight that reads or writes the slot."""
        try:
            stream, index = turn
            coming = stream.want(index)
            while True:
                address = stream.source.address
                try:
                    self.awaiting.append(address)
                    self._wait(Awaited.PACK, address)
                    packed, chunk = await coming, stream.chunks[index]
                except KvferryError:
                    self._waited(Awaited.PACK, address)
                    if not stream.may_begin_again:
                        raise
                    return next(turns, None)
                finally:
                    self.awaiting.remove(address)
                self._waited(Awaited.PACK, address)
                self.busy += 1
                if (here := stream.source.slots_here) is None:
                    flight = self._read(slot, stream, chunk, packed)
                    await flight.done
                    flight = self._scatter(slot.address, chunk)
                else:
                    flight = self._scatter(here + packed.address - stream.span.address, chunk)
                    await flight.done  # the source may have its slot back then
                stream.was_read(index)
                following = next(turns, None)
                onward = following is not None and not self.arena.sought(Use.READ)
                if following is not None and onward:
                    # Into this very slot, which waits for nothing but the copy that has begun.
                    stream, index = following
                    coming = stream.want(index)
                await flight.done
                self.busy -= 1
                if self.awaiting:
                    self._wait(Awaited.PACK, self.awaiting[0])
                if not onward:
                    return following
        finally:
            self.slots -= 1
            if flight is not None and (not flight.done.done() or flight.done.cancelled()):
                flight.abandon()
            # Not before it is quiet: what was given up may still be in the slot.
            self.arena.give_back(slot, flight.quiet if flight is not None else None)

    def _scatter(self, address: int, chunk: Chunk) -> Copying:
        """From the slot at this address. The first one writes zeros as well."""
        left, self.left = self.left, NOTHING
        copies, addresses = self.arena.copies, self.addresses

        def batches() -> list[Batch]:
            return chunk.scatter(address, addresses) + zeros(left, copies.zeros, addresses)

        copy = copies.start(chunk.nbytes + left.nbytes, batches, self.move.priority)
        self.move.flights.append(copy)
        return copy

    def _read(self, slot: Slot, stream: ChunkStream, chunk: Chunk, packed: peer_pb2.Packed) -> Read:
        own, far = self.arena.span, stream.span
        return self.move.read(
            stream.source.agent_name,
            np.array([(slot.address, chunk.nbytes, own.device)], dtype=np.uint64),
            np.array([(packed.address, chunk.nbytes, far.device)], dtype=np.uint64),
            own.memory_type,
            far.memory_type,
        )
