"""Staged execution: the source gathers into a slot, one NIXL READ fetches it whole, and it is scattered here.

    source        take a slot, gather k+1 |          packed         | free
    reader  take a slot, want k+1         | READ k into own slot, read k | scatter k-1 | free

A worker carries one chunk from its slot to the cache; several of them are what overlaps. The lease stays open until
the seal is verified, as for direct reads: the seal says that what was gathered was the lease's, and that the stream
ended well says that no slot was taken back before it was read.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvferry.errors import KvferryError
from kvferry.v1 import layout_pb2, peer_pb2
from kvferry.wire import manifest_to_proto
from kvferryd.copy import Chunk, cut, moves
from kvferryd.peers.channels import asking
from kvferryd.peers.peers import PeerEngine, PeerRank
from kvferryd.plan import Bound
from kvferryd.transfer.arena import Arena, Use
from kvferryd.transfer.chunk_stream import ChunkStream
from kvferryd.transfer.flight import Flight
from kvferryd.transfer.share import Wanted
from kvferryd.transfer.together import together
from kvferryd.transfer.view import LeaseView
from kvferryd.transport import Agent, Read, Span

PATH = "staged"
IN_FLIGHT = 4
"""Slots that one transfer may have at once."""
GRACE_S = 1.0
FEW = 4096


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
    chunk_nbytes = min(
        [journey.arena.slot_nbytes]
        + [staging.slot_nbytes for rank in peer.plan.reads_from if (staging := peer.ranks[rank].staging)]
    )
    # Many segments take milliseconds: not on the loop. A few are not worth the way to a thread.
    few = sum(len(segments.tokens) for _, segments in bound.pairs) <= FEW
    by_rank: dict[int, list[Chunk]] = defaultdict(list)
    for chunk in _cut(bound, chunk_nbytes) if few else await asyncio.to_thread(_cut, bound, chunk_nbytes):
        by_rank[chunk.source_rank].append(chunk)
    streams = []
    for view in terms.views:
        chunks = by_rank.get(view.source.rank)
        if chunks:
            pairing = await _pair(view.source, peer, terms)
            opening = _opening(view, pairing, terms.wanted, chunk_nbytes, chunks)
            streams.append(ChunkStream(view.source, opening, chunks, terms.timeout_s))
    if not streams:
        return 0
    turns = _turns(streams)
    workers = min(IN_FLIGHT, sum(map(len, by_rank.values())))
    try:
        carriers = (journey.carry(turns) for _ in range(workers))
        await together([*(stream.listen() for stream in streams), *carriers])
    finally:
        for stream in streams:
            stream.cancel()
    return sum(map(len, by_rank.values()))


@dataclass(frozen=True, slots=True, eq=False)
class _Journey:
    """Where chunks go."""

    agent: Agent
    arena: Arena
    addresses: Mapping[int, int]
    priority: int
    reads: list[Flight]

    async def carry(self, turns: Iterator[tuple[ChunkStream, int]]) -> None:
        """Take the next chunk and bring it home, until there is none left."""
        for stream, index in turns:
            await self._carry(stream, index)

    async def _carry(self, stream: ChunkStream, index: int) -> None:
        slot = await self.arena.take(Use.READ)
        read: Read | None = None
        try:
            chunk, packed = stream.chunks[index], await stream.want(index)
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
            await read.done
            await stream.was_read(index)
            await self.arena.copy(chunk.scatter(slot.address, self.addresses))
        finally:
            if read is None:
                self.arena.give_back(slot)
            else:
                if not read.done.done() or read.done.cancelled():
                    read.abandon()
                # Not before: a read that was given up may still write to it.
                read.quiet.add_done_callback(lambda _: self.arena.give_back(slot))


def _cut(bound: Bound, chunk_nbytes: int) -> list[Chunk]:
    return cut(moves(bound), chunk_nbytes)


def _turns(streams: Sequence[ChunkStream]) -> Iterator[tuple[ChunkStream, int]]:
    """All chunks, ranks by turns, so that all sources work at once."""
    for index in range(max(len(stream.chunks) for stream in streams)):
        for stream in streams:
            if index < len(stream.chunks):
                yield stream, index


def _opening(
    view: LeaseView, pairing: str, wanted: Wanted, chunk_nbytes: int, chunks: Sequence[Chunk]
) -> peer_pb2.PackOpen:
    opening = view.packing()
    opening.pairing = pairing
    opening.tokens.CopyFrom(layout_pb2.TokenRange(start=wanted.tokens[0], stop=wanted.tokens[1]))
    opening.states = wanted.states
    for group, shape in wanted.shapes.items():
        opening.tables[group].CopyFrom(peer_pb2.TableShape(first_token=shape.first_token, blocks=shape.blocks))
    opening.chunk_nbytes, opening.chunks = chunk_nbytes, len(chunks)
    opening.nbytes = sum(chunk.nbytes for chunk in chunks)
    return opening


async def _pair(rank: PeerRank, peer: PeerEngine, terms: Terms) -> str:
    """The source's name of our plan; it plans once, as we did. Raises CannotStage from one that is too old."""
    if not rank.pairing:
        request = peer_pb2.PairRequest(
            engine_id=rank.manifest.engine_id,
            epoch=rank.manifest.epoch,
            sources=[manifest_to_proto(source) for source in peer.plan.sources.values()],
            destination=manifest_to_proto(peer.plan.destination),
        )
        try:
            async with asking(rank.address):
                rank.pairing = (await rank.stub.Pair(request, timeout=terms.timeout_s)).pairing
        except KvferryError as error:
            if error.code != "protocol":
                raise
            raise CannotStage("cannot_stage", error.message, field="way", value="staged") from None
    return rank.pairing
