"""Both ends of packings over one real stream, in one process: only the daemons around them are missing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
import pytest
from caches import HND, attention, cache, table
from test_arena import Memory

from kvferry.errors import KvferryError
from kvferry.schemas import LeaseState
from kvferry.v1 import layout_pb2, peer_pb2, peer_pb2_grpc
from kvferryd.api.answer import first_of, said_beside
from kvferryd.copy import Chunk
from kvferryd.leases import pack
from kvferryd.leases.lease import Lease, ReaderId
from kvferryd.leases.leases import Leases
from kvferryd.leases.pack import Packer, Packing
from kvferryd.leases.readings import Readings
from kvferryd.peers.lease_stream import LeaseStream
from kvferryd.peers.peer import PeerRank, Staging
from kvferryd.staging.arena import Arena, Use
from kvferryd.staging.copies import HostCopies
from kvferryd.staging.pairings import Pairings
from kvferryd.staging.share import Wanted, packs, shapes, share_of
from kvferryd.transfer.chunk_stream import ChunkStream
from kvferryd.transfer.view import LeaseView

pytestmark = pytest.mark.anyio
SOURCE, READER = cache(*attention(dim=64)), cache(*attention(dim=64, order=HND), engine="decode")
TABLES = {"full": table(2, 0, 3, 1)}
CHUNK = 4096


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@dataclass
class Source(peer_pb2_grpc.PeerServicer):
    leases: Leases
    packer: Packer
    retired: asyncio.Event = field(default_factory=asyncio.Event)

    async def Read(  # type: ignore[override]
        self, requests: AsyncIterator[peer_pb2.ReadRequest], context: Any
    ) -> AsyncIterator[peer_pb2.ReadReply]:
        await first_of(requests, 5)
        readings = Readings(self.leases, ReaderId("decode", "1", 0, 1), self.packer, self.retired, announcing=True)
        try:
            said: peer_pb2.ReadReply | Packing
            async for said in said_beside(readings.said, readings.run(requests)):
                yield said.take() if isinstance(said, Packing) else said
        finally:
            readings.close()


@dataclass
class Pair:
    source: Source
    rank: PeerRank
    arena: Arena

    def publish(self, request_id: str) -> Lease:
        return self.source.leases.publish(request_id, TABLES, 16, more=False, metadata=b"", ttl_s=60, readers=1)

    async def view(self, request_id: str) -> LeaseView:
        view = LeaseView(self.rank, request_id)
        async with asyncio.timeout(5):
            await view.advance()
        return view

    async def opened(self, request_id: str) -> LeaseView:
        self.publish(request_id)
        return await self.view(request_id)

    async def announced(self, request_id: str) -> LeaseView:
        """Published before; and the source has told of it by now, as it has told of something later."""
        await self.opened(f"later than {request_id}")
        view = await self.view(request_id)
        assert view.announced
        return view

    def stream(self, view: LeaseView, **change: Any) -> ChunkStream:
        chunks = every_chunk()
        opening = peer_pb2.PackOpen(
            pairing=self.rank.pairing,
            tokens=layout_pb2.TokenRange(start=0, stop=16),
            states=True,
            chunk_nbytes=CHUNK,
            chunks=len(chunks),
            nbytes=sum(chunk.nbytes for chunk in chunks),
            last=True,
        )
        for group, shape in shapes(TABLES).items():
            opening.tables[group].CopyFrom(peer_pb2.TableShape(first_token=shape.first_token, blocks=shape.blocks))
        opening.MergeFrom(peer_pb2.PackOpen(**change))
        return ChunkStream(view, opening, chunks)


def every_chunk() -> Sequence[Chunk]:
    return packs(share_of([SOURCE], READER, 0), 0, TABLES, Wanted((0, 16), True, shapes(TABLES)), CHUNK)


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    pool = np.zeros(SOURCE.regions[0].nbytes, dtype=np.uint8)
    arena = Arena(Memory(), HostCopies())  # type: ignore[arg-type]
    packer = Packer(SOURCE, {0: pool.ctypes.data}, arena, Pairings())
    source = Source(Leases("prefill", "1", lambda lease: None, 8), packer)
    server = grpc.aio.server()
    peer_pb2_grpc.add_PeerServicer_to_server(source, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        stub = peer_pb2_grpc.PeerStub(channel)
        leases = LeaseStream(stub, address, peer_pb2.ReadOpening())
        rank = PeerRank(address, SOURCE, 1, "", "", b"", {}, stub, peer_pb2.Reader(), leases)
        rank.staging = Staging(arena.span, arena.slot_nbytes)
        rank.pairing = await packer.pairings.add(SOURCE, [SOURCE], READER, b"a plan")
        yield Pair(source, rank, arena)
        await leases.close()
    await server.stop(0)
    await arena.close()


async def carried(stream: ChunkStream) -> None:
    async with asyncio.timeout(5):
        for index in range(len(stream.chunks)):
            await stream.want(index)
            stream.was_read(index)
        await stream.vouched()


async def all_slots_are_back(arena: Arena) -> None:
    async with asyncio.timeout(5):
        for slot in [await arena.take(Use.PACKED) for _ in range(arena.most)]:
            arena.give_back(slot)


async def ended(lease: Lease) -> LeaseState:
    async with asyncio.timeout(5):
        while not lease.state.ended:
            await lease.changed()
    return lease.state


async def refused(stream: ChunkStream) -> str:
    with pytest.raises(KvferryError) as caught:
        await carried(stream)
    return caught.value.code


async def test_an_announced_lease_is_packed_without_being_told_again(pair: Pair) -> None:
    await carried(pair.stream(await pair.opened("first")))
    lease = pair.publish("second")
    view = await pair.announced("second")
    await carried(pair.stream(view))
    assert await ended(lease) is LeaseState.RELEASED
    assert not view.announced, "the source has agreed"
    assert view._reading is not None and not view._reading.updated
    await all_slots_are_back(pair.arena)


async def test_another_lease_than_was_announced_is_told_and_not_packed(pair: Pair) -> None:
    await carried(pair.stream(await pair.opened("first")))
    pair.publish("second")
    view = await pair.announced("second")
    pair.source.leases.revoke("second", "for a test")
    lease = pair.publish("second")
    assert await refused(pair.stream(view)) == "lease_changed"
    assert view.announced
    await view.confirm()
    await carried(pair.stream(view))
    assert await ended(lease) is LeaseState.RELEASED


async def test_who_reads_later_than_slots_are_kept_asks_the_source(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "KEPT_S", 0.0)
    stream = pair.stream(await pair.opened("late"))
    await carried(stream)
    assert stream._vouched.done()
    stream = pair.stream(await pair.opened("too late"))
    for index in range(len(stream.chunks)):
        await asyncio.wait_for(stream.want(index), 5)
        stream.was_read(index)
    await pair.arena.close()
    with pytest.raises(KvferryError) as caught:
        await asyncio.wait_for(stream.vouched(), 5)
    assert caught.value.code == "arena_closed"


async def test_a_packing_that_fails_leaves_its_reading_and_others_alone(pair: Pair) -> None:
    view, other = await pair.opened("first"), await pair.opened("other")
    beside = pair.stream(other)
    await asyncio.wait_for(beside.want(0), 5)
    assert await refused(pair.stream(view, pairing="another")) == "unknown_pairing"
    assert await refused(pair.stream(view, nbytes=1)) == "cut_differs"
    await carried(pair.stream(view))
    beside.was_read(0)
    async with asyncio.timeout(5):
        await beside.want(1)
    beside.was_read(1)
    await beside.vouched()


async def test_the_end_of_the_stream_ends_what_is_not_packed_and_gives_slots_back(pair: Pair) -> None:
    view = await pair.opened("first")
    stream = pair.stream(view)
    await asyncio.wait_for(stream.want(0), 5)
    pair.source.retired.set()
    pair.source.leases.revoke_all("for a test")
    with pytest.raises(KvferryError) as caught:
        await asyncio.wait_for(stream.want(1), 5)
    assert caught.value.code in {"lease_ended", "peer_lost"}
    await all_slots_are_back(pair.arena)
