"""Staged execution: the source gathers into a slot, one NIXL READ fetches it whole, and it is scattered here.

    source                       gather k+2, packed | gather k+3, packed | ...
    reader  want k, k+1, k+2 ... | READ k, k+1      | read k, want k+3   | scatter k | READ k+2 ...

Every slot of the reader has a carrier that takes chunk after chunk through it. The first message wants as many chunks
as there are carriers; afterwards a chunk is wanted as soon as the one before it in its slot has arrived, in the message
that frees the source's slot, while that one is scattered. So the source gathers ahead, READs run back to back, and no
READ waits for a message that answers another. The blocks are the source's own again as soon as all is gathered: that a
chunk is told as packed says that the lease held until then, and `ChunkStream.vouched` that no slot was taken back
before it was read.
"""

from __future__ import annotations

import asyncio
import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvferry.errors import KvferryError
from kvferry.v1 import layout_pb2, peer_pb2
from kvferryd.beside import beside
from kvferryd.copy import Chunk, cut, moves
from kvferryd.copy.chunks import FIRST
from kvferryd.peers.peer import PeerEngine, PeerRank, Staging
from kvferryd.peers.staging import pair
from kvferryd.plan import Bound
from kvferryd.staging.arena import SLOT_ALIGN, Arena, Slot, Use
from kvferryd.staging.copies import over
from kvferryd.staging.share import Wanted
from kvferryd.transfer.chunk_stream import ChunkStream
from kvferryd.transfer.flight import Flight
from kvferryd.transfer.together import together
from kvferryd.transfer.view import LeaseView
from kvferryd.transport import Agent, Read, Span

PATH = "staged"
IN_FLIGHT = 8
"""Slots that one transfer may have at once."""
LEAST_NBYTES, DEPTH = {"host": 8 << 20, "cuda": 64 << 20}, 5
"""A transfer is cut into about DEPTH chunks, so that the gather of one, the READ of another and the scatter of a third
overlap; but into chunks of no less than LEAST_NBYTES, by kind of memory, and no more than a slot (`SLOT_NBYTES`). Of
several the first is smaller (`FIRST`), and so is what is left for the last: the ends overlap with nothing."""
OPEN_S, CHUNK_S = 2e-3, 2e-4
"""What an estimate gives to the opening (a message each way, the source's plan) and to each chunk's messages and
launches: 8 MB take 2 ms and 671 MB in six chunks 5 ms on two H200s."""
COPY_BYTES_PER_S = {"host": 3e9, "cuda": 600e9}
"""Of a gather or scatter (facts/gpu.md). The first chunk's gather and the last's scatter overlap with no READ."""
GRACE_S = 1.0


class CannotStage(KvferryError):
    """This pair cannot; nothing has been moved. The message says why, in words."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What a staged read needs beside the bound plan: the leases that are read, and what of them is wanted now."""

    views: Sequence[LeaseView]
    wanted: Wanted
    deadline: float
    """On the loop's clock."""

    @property
    def timeout_s(self) -> float:
        """For calls: a little more than is left, so that the transfer's own deadline tells what it waited for."""
        return max(0.0, self.deadline - asyncio.get_running_loop().time()) + GRACE_S


def refusal(peer: PeerEngine, arena: Arena | None) -> str:
    """Why this pair cannot stage; empty where it can."""
    if arena is None:
        return "this daemon has no staging arena"
    for rank in peer.plan.reads_from:
        if peer.ranks[rank].staging is None:
            return f"the daemon of rank {rank} of engine {peer.engine_id} has no staging arena, or is older"
    return ""


def estimate_s(bound: Bound, peer: PeerEngine) -> float:
    """By the slowest link of the ranks that are read."""
    stagings = [staging for rank in peer.plan.reads_from if (staging := peer.ranks[rank].staging)]
    chunk_nbytes = _chunk_nbytes(bound.nbytes, stagings)
    rate = min((staging.bytes_per_s for staging in stagings), default=1e9)
    copy_rate = min((COPY_BYTES_PER_S[staging.span.kind] for staging in stagings), default=1e9)
    ends = 2 * min(bound.nbytes, chunk_nbytes) / (copy_rate if bound.nbytes <= 2 * chunk_nbytes else FIRST * copy_rate)
    return OPEN_S + -(-bound.nbytes // chunk_nbytes) * CHUNK_S + bound.nbytes / rate + ends


def _chunk_nbytes(nbytes: int, stagings: Sequence[Staging], own: Sequence[int] = ()) -> int:
    """`own`: bytes of a slot here."""
    part = -(-2 * nbytes // (2 * DEPTH - 1) // SLOT_ALIGN) * SLOT_ALIGN  # a quarter more at either end
    least = min((LEAST_NBYTES[staging.span.kind] for staging in stagings), default=SLOT_ALIGN)
    return min([*own, *(staging.slot_nbytes for staging in stagings), max(least, part)])


async def move(
    bound: Bound,
    agent: Agent,
    arena: Arena | None,
    regions: Mapping[int, Span],
    peer: PeerEngine,
    priority: int,
    reads: list[Flight],
    terms: Terms,
) -> int:
    """Read everything that `bound` says; returns the number of descriptors, one for each chunk.

    Every read is put into `reads` as soon as it exists. When this returns or raises, nothing is being scattered any
    more. Raises CannotStage, TransportError of the first read that fails, KvferryError of a source that gives up.
    """
    why = refusal(peer, arena)
    if why or arena is None:
        raise CannotStage("cannot_stage", why, field="way", value="staged", remedy="read directly")
    addresses = {id: span.address for id, span in regions.items()}
    try:
        return await _move(_Journey(agent, arena, addresses, priority, reads), bound, peer, terms)
    except KvferryError as error:
        if error.code != "unknown_pairing":
            raise
        for rank in peer.ranks.values():
            rank.pairing = ""
    return await _move(_Journey(agent, arena, addresses, priority, reads), bound, peer, terms)


async def _move(journey: _Journey, bound: Bound, peer: PeerEngine, terms: Terms) -> int:
    stagings = [staging for rank in peer.plan.reads_from if (staging := peer.ranks[rank].staging)]
    chunk_nbytes = _chunk_nbytes(bound.nbytes, stagings, [journey.arena.slot_nbytes])
    read = {copy.source_rank for copy, segments in bound.pairs if len(segments.tokens)}
    views = [view for view in terms.views if view.source.rank in read]
    for view in views:
        await _pair(view.source, peer, terms)
    segments = sum(len(segments.tokens) for _, segments in bound.pairs)
    by_rank: dict[int, list[Chunk]] = defaultdict(list)
    for chunk in await beside(segments, lambda: cut(moves(bound), chunk_nbytes)):
        by_rank[chunk.source_rank].append(chunk)
    streams, last = [], []
    for view in views:
        chunks = by_rank[view.source.rank]
        assert chunks, "segments have bytes"
        opening = _opening(view, terms.wanted, chunk_nbytes, chunks)
        streams.append(ChunkStream(view, opening, chunks))
        last += [view] if opening.last else []
    turns = _turns(streams)
    chunks_in_all = sum(map(len, by_rank.values()))
    await together(journey.carry(turns) for _ in range(min(IN_FLIGHT, journey.arena.most, chunks_in_all)))
    await together(stream.vouched() for stream in streams)
    for view in last:
        view.packed = True
    return chunks_in_all


Turn = tuple[ChunkStream, int]
"""The next chunk: its stream and its index there."""


@dataclass(frozen=True, slots=True, eq=False)
class _Journey:
    """Where chunks go."""

    agent: Agent
    arena: Arena
    addresses: Mapping[int, int]
    priority: int
    reads: list[Flight]

    async def carry(self, turns: Iterator[Turn]) -> None:
        """Bring the next chunk home, until there is none left; each time with a slot of its turn."""
        turn = next(turns, None)
        while turn is not None:
            turn = await self._through(await self.arena.take(Use.READ), turn, turns)

    async def _through(self, slot: Slot, turn: Turn, turns: Iterator[Turn]) -> Turn | None:
        """Chunk after chunk through this slot, until there is none left or somebody else is to have it: the next."""
        read: Read | None = None
        try:
            stream, index = turn
            coming = stream.want(index)
            while True:
                packed, chunk = await coming, stream.chunks[index]
                read = self._read(slot, stream, chunk, packed)
                await read.done
                scatter = functools.partial(chunk.scatter, slot.address, self.addresses)
                scattering = self.arena.copies.start(chunk.nbytes, scatter, self.priority)
                stream.was_read(index)
                following = next(turns, None)
                onward = following is not None and not self.arena.sought(Use.READ)
                if following is not None and onward:
                    # Into this very slot, which waits for nothing but the copy that has begun.
                    stream, index = following
                    coming = stream.want(index)
                await over(scattering)
                if not onward:
                    return following
        finally:
            if read is not None and (not read.done.done() or read.done.cancelled()):
                read.abandon()
            # Not before it is quiet: a read that was given up may still write to the slot.
            self.arena.give_back(slot, read.quiet if read is not None else None)

    def _read(self, slot: Slot, stream: ChunkStream, chunk: Chunk, packed: peer_pb2.Packed) -> Read:
        own, far = self.arena.span, stream.span
        read = self.agent.read(
            stream.agent_name,
            np.array([(slot.address, chunk.nbytes, own.device)], dtype=np.uint64),
            np.array([(packed.address, chunk.nbytes, far.device)], dtype=np.uint64),
            own.memory_type,
            far.memory_type,
            self.priority,
        )
        self.reads.append(read)
        return read


def _turns(streams: Sequence[ChunkStream]) -> Iterator[Turn]:
    """All chunks, ranks by turns, so that all sources work at once."""
    for index in range(max(len(stream.chunks) for stream in streams)):
        for stream in streams:
            if index < len(stream.chunks):
                yield stream, index


def _opening(view: LeaseView, wanted: Wanted, chunk_nbytes: int, chunks: Sequence[Chunk]) -> peer_pb2.PackOpen:
    opening = peer_pb2.PackOpen(pairing=view.source.pairing, states=wanted.states)
    opening.tokens.CopyFrom(layout_pb2.TokenRange(start=wanted.tokens[0], stop=wanted.tokens[1]))
    for group, shape in wanted.shapes.items():
        opening.tables[group].CopyFrom(peer_pb2.TableShape(first_token=shape.first_token, blocks=shape.blocks))
    opening.chunk_nbytes, opening.chunks = chunk_nbytes, len(chunks)
    opening.nbytes = sum(chunk.nbytes for chunk in chunks)
    # States come with the last tokens. Of what was read from the blocks themselves only the lease's seal can tell.
    opening.last = wanted.states and not view.sealed
    return opening


async def _pair(rank: PeerRank, peer: PeerEngine, terms: Terms) -> None:
    """Have the source name our plan, where it did not at the handshake. Raises CannotStage from one that is too old."""
    if not rank.pairing:
        try:
            await pair(rank, peer.plan, terms.timeout_s)
        except KvferryError as error:
            if error.code != "protocol":
                raise
            raise CannotStage("cannot_stage", error.message, field="way", value="staged") from None
