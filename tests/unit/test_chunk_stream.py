"""Both ends of packings over one real stream, in one process: only the daemons around them are missing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from alone import peer_served
from caches import HND, attention, cache, table
from test_arena import Memory

from kvferry.errors import KvferryError
from kvferry.protocol import packing
from kvferry.protocol import reading as r
from kvferry.protocol.reading import Computed, Following
from kvferry.protocol.values import Account, Publication, ReaderId
from kvferry.schemas import LeaseState
from kvferry.v1 import peer_pb2, peer_pb2_grpc
from kvferryd.api.answer import first_of
from kvferryd.config import Config
from kvferryd.copy import Chunk
from kvferryd.copy.copying import HostCopies
from kvferryd.leases.gather import Gatherer
from kvferryd.leases.leases import Leases
from kvferryd.leases.stream import ServedStream
from kvferryd.paths.chunks import ChunkStream
from kvferryd.paths.source import SourceReader, announced
from kvferryd.peers.channels import Channels
from kvferryd.peers.peer import PeerRank, Staging
from kvferryd.staging.arena import Arena, Use
from kvferryd.staging.share import Pairings, packs, share_of, wanting
from support import refused

pytestmark = pytest.mark.anyio
SOURCE, READER = cache(*attention(dim=64)), cache(*attention(dim=64, order=HND), engine="decode")
TABLES = {"full": table(2, 0, 3, 1)}
CHUNK = 4096


@dataclass
class Source(peer_pb2_grpc.PeerServicer):
    leases: Leases
    gatherer: Gatherer
    ended: asyncio.Queue[Account]
    retired: asyncio.Event = field(default_factory=asyncio.Event)

    async def Read(  # type: ignore[override]
        self, requests: AsyncIterator[peer_pb2.ReadRequest], context: Any
    ) -> AsyncIterator[peer_pb2.ReadReply]:
        await first_of(requests, 5)
        who = ReaderId("decode", "1", 0, 1)
        served = ServedStream(self.leases, who, self.gatherer, self.retired, announcing=True)
        async for reply in served.replies(requests):
            yield reply


class View(SourceReader):
    """A lease, as a transfer that does nothing else follows it."""

    def __init__(self, source: PeerRank, request_id: str) -> None:
        super().__init__(source, Following(source.rank, request_id, 0, Computed()), (0, ""), self.on)
        self._told = asyncio.Event()

    def on(self, event: r.ReadingEvent) -> None:
        for effect in self.read.on(event, asyncio.get_running_loop().time()):
            self.take(effect)
        self._told.set()

    async def begin(self) -> None:
        self.on(r.Begin(announced(self.source, self.read.request_id, 0)))
        if not self.read.announced:
            await self.advance()

    async def advance(self) -> None:
        while not self.read.take():
            self._told.clear()
            await self._told.wait()

    async def over(self) -> None:
        while True:
            self.read.check_goes_on()
            self._told.clear()
            await self._told.wait()

    def close(self, *, complete: bool) -> None:
        self.on(r.Leave(complete))
        self.end_timer()


@dataclass
class Pair:
    source: Source
    rank: PeerRank
    arena: Arena

    def publish(self, request_id: str) -> None:
        leases, said = self.source.leases, Publication(TABLES, 16, b"", more=False)
        number = leases.source.leases.newest(request_id) + 1
        leases.publish(request_id, number, said, ttl_s=60, readers=1)

    def state(self, request_id: str) -> LeaseState | None:
        return self.source.leases.source.leases.state_of(request_id)

    async def released(self, view: View) -> None:
        """Its reader closes it, and that is all it takes."""
        view.close(complete=True)
        async with asyncio.timeout(60):
            while (ended := await self.source.ended.get()).state is not LeaseState.RELEASED:
                """Skip those that the test has revoked."""
        assert ended.request_id == view.read.request_id

    async def view(self, request_id: str) -> View:
        view = View(self.rank, request_id)
        async with asyncio.timeout(60):
            await view.begin()
        return view

    async def opened(self, request_id: str) -> View:
        self.publish(request_id)
        return await self.view(request_id)

    async def announced(self, request_id: str) -> View:
        """Published before; and the source has told of it by now, as it has told of something later."""
        await self.opened(f"later than {request_id}")
        view = await self.view(request_id)
        assert view.read.announced
        return view

    def stream(self, view: View, **change: Any) -> ChunkStream:
        chunks = every_chunk()
        opening = wanting(TABLES, (0, 16), states=True, chunk_nbytes=CHUNK)
        opening.pairing = self.rank.pairing
        opening.chunks, opening.nbytes = len(chunks), sum(chunk.nbytes for chunk in chunks)
        opening.MergeFrom(peer_pb2.PackOpen(**change))
        return ChunkStream(view, opening, chunks, self.pair)

    async def pair(self, forgotten: str) -> str:
        raise AssertionError("no pairing is forgotten")


def every_chunk() -> Sequence[Chunk]:
    return packs(share_of([SOURCE], READER, 0), 0, TABLES, wanting(TABLES, (0, 16), states=True, chunk_nbytes=CHUNK))


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    pool = np.zeros(SOURCE.regions[0].nbytes, dtype=np.uint8)
    arena = Arena(Memory(), HostCopies())  # type: ignore[arg-type]
    gatherer = Gatherer(SOURCE, {0: pool.ctypes.data}, arena, Pairings())
    ended: asyncio.Queue[Account] = asyncio.Queue()
    source = Source(Leases("prefill", "1", ended.put_nowait, 8), gatherer, ended)
    async with peer_served(source) as address:
        channel = Channels(Config()).open(address)
        rank = PeerRank(channel, SOURCE, 1, "", "", b"", {}, peer_pb2.ReadOpening())
        rank.staging = Staging(arena.span, arena.slot_nbytes)
        rank.pairing = "a plan"
        await gatherer.pairings.add(rank.pairing, SOURCE, [SOURCE], READER)
        yield Pair(source, rank, arena)
        await rank.close()
    await arena.close()


async def carried(stream: ChunkStream) -> None:
    async with asyncio.timeout(60):
        for index in range(len(stream.chunks)):
            await stream.want(index)
            stream.was_read(index)
        await stream.vouched()


async def all_slots_are_back(arena: Arena) -> None:
    async with asyncio.timeout(60):
        for slot in [await arena.take(Use.PACKED) for _ in range(arena.most)]:
            arena.give_back(slot)


async def test_an_announced_lease_is_packed_without_being_told_again(pair: Pair) -> None:
    await carried(pair.stream(await pair.opened("first")))
    pair.publish("second")
    view = await pair.announced("second")
    await carried(pair.stream(view))
    assert pair.state("second") is LeaseState.PUBLISHED, "another attempt may need it"
    await pair.released(view)
    assert not view.read.announced, "the source has agreed"
    assert not view.read.take()
    await all_slots_are_back(pair.arena)


async def test_another_lease_than_was_announced_is_told_and_not_packed(pair: Pair) -> None:
    await carried(pair.stream(await pair.opened("first")))
    pair.publish("second")
    view = await pair.announced("second")
    pair.source.leases.revoke("second", "for a test")
    pair.publish("second")
    with refused("lease_changed"):
        await carried(pair.stream(view))
    assert view.read.announced
    view.on(r.AskAgain())
    await view.advance()
    await carried(pair.stream(view))
    await pair.released(view)


async def test_who_reads_later_than_slots_are_kept_asks_the_source(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "KEPT_S", 0.0)
    stream = pair.stream(await pair.opened("late"))
    await carried(stream)
    assert stream._vouched.done()
    stream = pair.stream(await pair.opened("too late"))
    for index in range(len(stream.chunks)):
        await asyncio.wait_for(stream.want(index), 5)
        stream.was_read(index)
    pair.source.retired.set()  # first of all when an engine goes: its arena is closed later
    with refused("peer_lost"):
        await asyncio.wait_for(stream.vouched(), 60)


async def test_a_packing_that_fails_leaves_its_reading_and_others_alone(pair: Pair) -> None:
    view, other = await pair.opened("first"), await pair.opened("other")
    beside = pair.stream(other)
    await asyncio.wait_for(beside.want(0), 5)
    with refused("cut_differs"):
        await carried(pair.stream(view, nbytes=1))
    await carried(pair.stream(view))
    beside.was_read(0)
    async with asyncio.timeout(60):
        await beside.want(1)
    beside.was_read(1)
    await beside.vouched()


async def test_a_stream_that_was_given_up_while_it_pairs_does_not_take_the_place_of_the_next(pair: Pair) -> None:
    """Another rank has failed, and this one's lease is read again."""
    view, pairing, paired = await pair.opened("first"), asyncio.Event(), asyncio.Event()

    async def slowly(forgotten: str) -> str:
        pairing.set()
        await paired.wait()
        return pair.rank.pairing

    given_up = pair.stream(view, pairing="forgotten")
    given_up._pair = slowly
    given_up.want(0)
    await asyncio.wait_for(pairing.wait(), 60)
    following = pair.stream(view)
    paired.set()
    await carried(following)


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


async def test_a_reading_that_the_source_has_ended_is_packed_no_more(pair: Pair) -> None:
    """The source would not answer: it knows nothing of it any more."""
    leases = pair.source.leases
    leases.publish("first", 1, Publication(TABLES, 16, b"", more=True), ttl_s=60, readers=1)
    view = await pair.view("first")
    leases.revoke("first", "for a test")
    await pair.opened("other")  # told later on the same stream
    with refused("lease_ended"):
        pair.stream(view)


async def lost(pair: Pair) -> None:
    pair.source.retired.set()
    async with asyncio.timeout(60):
        await pair.rank.stream._reading
    assert pair.rank.lost


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that goes by an announcement opens the lease only when the test tells it to."""
    monkeypatch.setattr(r, "OPEN_AFTER_S", 3600.0)


@pytest.mark.usefixtures("late")
async def test_a_source_that_was_lost_stays_lost(pair: Pair) -> None:
    """Another daemon may answer at its address by now: only a handshake tells."""
    await pair.opened("first")
    for request_id in ("read", "packed", "opened"):
        pair.publish(request_id)
    read, packed, opened = [await pair.announced(request_id) for request_id in ("read", "packed", "opened")]
    told: list[KvferryError] = []
    opened._tell_lost = told.append
    await lost(pair)
    read.close(complete=True)
    assert pair.rank.lost
    with pytest.raises(KvferryError):
        pair.stream(packed)
    assert pair.rank.lost
    opened.on(r.Due())
    assert pair.rank.lost
    assert told
    for request_id in ("later than opened", "another"):  # the first of them is announced
        with pytest.raises(KvferryError):
            await pair.view(request_id)
    assert pair.rank.lost


@pytest.mark.usefixtures("late")
async def test_what_was_read_of_an_engine_that_is_retired_is_closed(pair: Pair) -> None:
    """Its streams and channels are closed by then."""
    await pair.opened("first")
    pair.publish("second")
    view = await pair.announced("second")
    await pair.rank.close()
    view.close(complete=True)
