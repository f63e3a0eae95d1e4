"""The source's end of a reader's stream, without a daemon: what the reader is told of each lease."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest
from caches import attention, cache, table

from kvferry.protocol.values import Account, Publication, ReaderId
from kvferry.v1 import peer_pb2
from kvferryd.leases.gather import Gatherer
from kvferryd.leases.leases import Leases
from kvferryd.leases.stream import ServedStream
from kvferryd.staging.share import Pairings

pytestmark = pytest.mark.anyio
LIMIT = 4
WHO = ReaderId("decode", "1", 0, 1)
WHOLE = Publication({"full": table(2, 0, 3, 1)}, 16, b"", more=False)


@pytest.fixture
async def leases() -> Leases:
    return Leases("prefill", "1", lambda lease: None, LIMIT)


class Reader:
    """The words of one reader, and the answers to it."""

    def __init__(self, leases: Leases) -> None:
        gatherer = Gatherer(cache(*attention()), {}, None, Pairings())
        self._saying: asyncio.Queue[peer_pb2.ReadRequest] = asyncio.Queue()
        self._served = ServedStream(leases, WHO, gatherer, asyncio.Event(), announcing=False)
        self._replies = self._served.replies(self._said())

    async def _said(self) -> AsyncIterator[peer_pb2.ReadRequest]:
        while True:
            yield await self._saying.get()

    def opens(self, *request_ids: str) -> None:
        """As one message, readings numbered from 1."""
        opened = [
            peer_pb2.ReadRequest(open=peer_pb2.LeaseOpen(reading=number, request_id=request_id))
            for number, request_id in enumerate(request_ids, start=1)
        ]
        self._saying.put_nowait(peer_pb2.ReadRequest(several=peer_pb2.ReadRequests(requests=opened)))

    async def hears(self) -> peer_pb2.ReadReply:
        async with asyncio.timeout(5):
            return await anext(self._replies)


@pytest.fixture
async def reader(leases: Leases) -> AsyncIterator[Reader]:
    reader = Reader(leases)
    async with aclosing(reader._replies):
        yield reader


async def test_a_reading_whose_name_is_none_is_refused_alone(leases: Leases, reader: Reader) -> None:
    leases.publish("r", 1, WHOLE, ttl_s=60, readers=1)
    reader.opens("\n" * 300, "r")
    told = [await reader.hears() for _ in range(2)]
    assert [each.WhichOneof("kind") for each in told] == ["problem", "update"]


async def test_events_that_arise_while_effects_are_carried_out_wait_for_them(leases: Leases) -> None:
    """And one effect that fails stops no other. The word of a lease is cleared before its end is told."""
    ended: list[tuple[str, int]] = []

    def on_end(account: Account) -> None:
        ended.append((account.request_id, int(leases.words._words.astype(bool).sum())))
        leases.revoke("second", "the first has ended")
        assert leases.get("second") is not None, "not yet"
        raise RuntimeError

    for request_id in ("first", "second"):
        leases.publish(request_id, 1, WHOLE, ttl_s=60, readers=1)
    leases.on_end = on_end
    leases.revoke("first", "a test")
    assert ended == [("first", 1), ("second", 0)] and not leases.words._words.any()
