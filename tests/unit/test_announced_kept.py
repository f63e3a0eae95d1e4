"""Announcements of a source are kept until they are read, and take no more memory than there is for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from alone import peer_served

from kvferry.errors import Conflict, KvferryError
from kvferry.protocol.reading import Close
from kvferry.rpc import PEER_OPTIONS
from kvferry.v1 import peer_pb2, peer_pb2_grpc
from kvferry.wire import announced_as
from kvferryd.peers.contact import Contact
from kvferryd.peers.reader_stream import ANNOUNCED_NBYTES, LEAST_NBYTES, Listener, ReaderStream

pytestmark = pytest.mark.anyio
LARGE = 64 << 10


class Source(peer_pb2_grpc.PeerServicer):
    """Announces these leases, each of a request, and ends the stream."""

    def __init__(self, leases: list[tuple[str, peer_pb2.LeaseUpdate]]) -> None:
        self.leases = leases

    async def Read(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[peer_pb2.ReadReply]:
        for request_id, update in self.leases:
            announced = peer_pb2.Announcement(request_id=announced_as(request_id), update=update)
            yield peer_pb2.ReadReply(announced=announced)


@asynccontextmanager
async def announced(
    *leases: tuple[str, peer_pb2.LeaseUpdate],
    follow: Iterable[Listener] = (),
    source: peer_pb2_grpc.PeerServicer | None = None,
) -> AsyncIterator[ReaderStream]:
    """A reader's stream on which they have come, and which is over. follow: hear of that. source: in place of the one
    that announces."""
    async with (
        peer_served(source or Source(list(leases))) as address,
        grpc.aio.insecure_channel(address, options=PEER_OPTIONS) as channel,
    ):
        stub: peer_pb2_grpc.PeerAsyncStub = peer_pb2_grpc.PeerStub(channel)
        stream = ReaderStream(stub, Contact(address), peer_pb2.ReadOpening(), several=False)
        for listener in follow:
            stream.follow(listener)
        async with asyncio.timeout(60):
            await asyncio.wait([stream._reading])
        yield stream


def of(lease: int) -> tuple[str, peer_pb2.LeaseUpdate]:
    return "r", peer_pb2.LeaseUpdate(lease=lease, version=1)


@pytest.mark.parametrize(
    ("sizes", "kept"),
    [
        pytest.param([8] * 2000, range(2000 - ANNOUNCED_NBYTES // LEAST_NBYTES, 2000), id="many"),
        pytest.param([LARGE] * 100, range(100 - ANNOUNCED_NBYTES // (LARGE + 100), 100), id="large"),
        pytest.param([8, ANNOUNCED_NBYTES, 8], [0, 2], id="one that is too large"),
    ],
)
async def test_the_newest_are_kept(sizes: list[int], kept: Iterator[int]) -> None:
    leases = [(f"r{n}", peer_pb2.LeaseUpdate(lease=1, metadata=bytes(nbytes))) for n, nbytes in enumerate(sizes)]
    async with announced(*leases) as stream:
        assert [n for n in range(len(sizes)) if stream.announced(f"r{n}", 0) is not None] == list(kept)


@pytest.mark.parametrize(
    ("leases", "asked", "given", "then"),
    [
        pytest.param([1], 1, 1, 0, id="the one that is asked for, once"),
        pytest.param([1], 2, 0, 0, id="an older one is dropped"),
        pytest.param([2], 1, 0, 2, id="a newer one is kept for who asks for it"),
        pytest.param([1, 2], 0, 2, 0, id="the newest where none is named"),
        pytest.param([2, 1], 0, 2, 0, id="one that comes late does not replace a newer one"),
    ],
)
async def test_announcements_are_of_a_lease(leases: list[int], asked: int, given: int, then: int) -> None:
    async with announced(*map(of, leases)) as stream:
        for number, lease in (asked, given), (0, then):
            update = stream.announced("r", number)
            assert (update.lease if update is not None else 0) == lease


async def test_an_announcement_without_a_number_ends_the_stream_by_name() -> None:
    async with announced(of(1), of(0)) as stream:
        with pytest.raises(KvferryError) as ended:
            stream.check()
    assert (ended.value.code, ended.value.field) == ("malformed_update", "lease")


@pytest.mark.parametrize(("closed", "kept"), [(1, 2), (2, 0), (3, 0)])
async def test_nobody_goes_by_what_was_announced_of_a_lease_that_has_been_read(closed: int, kept: int) -> None:
    async with announced(of(2)) as stream:
        stream.close_reading(Close(0, closed, complete=False, nbytes=0), "r", (1, ""), None)
        update = stream.announced("r", 0)
        assert (update.lease if update is not None else 0) == kept


class Listening:
    def __init__(self, *, breaks: bool = False) -> None:
        self.breaks, self.heard = breaks, list[KvferryError]()

    def on_reply(self, reply: peer_pb2.ReadReply) -> None:
        """None comes."""

    def on_lost(self, why: KvferryError) -> None:
        self.heard.append(why)
        if self.breaks:
            raise RuntimeError("it breaks")


async def test_a_request_that_breaks_over_a_lost_stream_keeps_no_other_from_hearing() -> None:
    first, second = Listening(breaks=True), Listening()
    async with announced(follow=(first, second)) as stream:
        assert stream.over
    assert [each.code for each in (*first.heard, *second.heard)] == ["peer_lost", "peer_lost"]


class Answering(peer_pb2_grpc.PeerServicer):
    """Answers readings 1 and 2 twice each, and ends the stream."""

    async def Read(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[peer_pb2.ReadReply]:
        for number in (1, 2, 1, 2):
            yield peer_pb2.ReadReply(reading=number, update=peer_pb2.LeaseUpdate(lease=1))


class Replied(Listening):
    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.error, self.replies = error, 0

    def on_reply(self, reply: peer_pb2.ReadReply) -> None:
        self.replies += 1
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize(
    ("error", "code"), [(RuntimeError("it breaks"), "internal"), (Conflict("protocol", "it breaks"), "protocol")]
)
async def test_a_request_that_breaks_over_a_reply_ends_alone(error: Exception, code: str) -> None:
    broken, whole = Replied(error), Replied()
    async with announced(follow=(broken, whole), source=Answering()) as stream:
        with pytest.raises(KvferryError) as ended:
            stream.check()
    assert ended.value.code == "peer_lost", "the source has ended the stream, and not we"
    assert (broken.replies, [each.code for each in broken.heard]) == (1, [code])
    assert (whole.replies, [each.code for each in whole.heard]) == (2, ["peer_lost"])
