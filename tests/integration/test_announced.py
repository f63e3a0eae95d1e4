"""A reader that goes by an announcement reads what the lease holds now."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass

import pytest
from fleet import TIMEOUT_S, ByHand, Daemons, logged, peer_stub
from lives import engine_on, published, reads_from
from ranks import TestEngine

from kvferry.router import RouterClient
from kvferry.schemas import LeaseState
from kvferry.v1 import peer_pb2
from kvferryd.demo.fleet import DaemonService

pytestmark = pytest.mark.anyio


@dataclass
class Two:
    source: TestEngine
    reader: TestEngine
    router: RouterClient
    """The source's router."""
    log: DaemonService
    """The reader's log."""

    async def was_announced(self, request_id: str) -> bool:
        (ended,) = await logged(self.log, "transfer ended", request_id)
        return bool(ended["announced"])


@pytest.fixture
async def two(far: DaemonService, near: DaemonService, stack: AsyncExitStack, request_id: str) -> Two:
    """Warm: the stream of leases between them is open."""
    tail = request_id[-8:]
    source, router = await engine_on(stack, f"source-{tail}", far)
    reader, _ = await engine_on(stack, f"reader-{tail}", near)
    two = Two(source, reader, router, near)
    await reads_from(reader, source, f"warm-up-{tail}")
    assert not await two.was_announced(f"warm-up-{tail}")
    return two


async def test_a_warm_reader_goes_by_the_announcement_and_the_lease_is_released(two: Two, request_id: str) -> None:
    for name in (f"{request_id}-{i}" for i in range(20)):  # now and then the receive is there before the announcement
        kv, leases = await published(two.source, name)
        await two.reader.gets(name, kv, source=two.source.source())
        assert await leases[0].ended() is LeaseState.RELEASED
        if await two.was_announced(name):
            return
    pytest.fail("no reader went by an announcement")


async def test_what_is_published_anew_is_read_and_not_what_was_announced_before(two: Two, request_id: str) -> None:
    _, old = await published(two.source, request_id)
    await two.router.revoke_lease(request_id)
    assert await old[0].ended() is LeaseState.REVOKED
    kv, blocks = two.source.filled(80)
    await two.source.publish(request_id, blocks, 40, more=True)  # progressive leases are not announced
    await two.source.publish(request_id, blocks, 80)
    await two.reader.gets(request_id, kv, source=two.source.source())
    assert not await two.was_announced(request_id)


async def test_a_lease_that_is_opened_and_closed_in_one_breath_has_been_read(
    far: DaemonService, stack: AsyncExitStack, request_id: str
) -> None:
    """A read of some tens of milliseconds opens its lease and closes it soon after. A busy source gets both at once."""
    source, _ = await engine_on(stack, "source-breath", far)
    reader = peer_pb2.Reader(engine_id="by hand", epoch="1", rank=0, world_size=1)
    async with peer_stub(far) as stub:
        hand = ByHand(stub, peer_pb2.ReadOpening(engine_id="source-breath", epoch=source.epoch, reader=reader))
        await published(source, "known to the reader")
        assert (await hand.open("known to the reader")).HasField("update")
        _, leases = await published(source, request_id)
        async with asyncio.timeout(TIMEOUT_S):
            told = await hand.call.read()
        assert isinstance(told, peer_pb2.ReadReply)
        update = told.announced.update
        opens = peer_pb2.LeaseOpen(
            reading=2, request_id=request_id, known_word=update.word, known_version=update.version
        )
        closes = peer_pb2.LeaseClose(reading=2, request_id=request_id, complete=True, nbytes=7, lease=update.lease)
        await hand.say(
            several=peer_pb2.ReadRequests(
                requests=[peer_pb2.ReadRequest(open=opens), peer_pb2.ReadRequest(close=closes)]
            )
        )
        async with asyncio.timeout(TIMEOUT_S):
            assert await leases[0].ended() is LeaseState.RELEASED
        hand.call.cancel()


async def test_a_strict_source_announces_nothing(daemons: Daemons, stack: AsyncExitStack, request_id: str) -> None:
    flags = "--strict", "--ucx", "TLS=all"
    near, far = [await daemons.start(f"{side}-strict", 1, *flags) for side in ("source", "reader")]
    source, router = await engine_on(stack, "source-strict", near[0])
    reader, _ = await engine_on(stack, "reader-strict", far[0])
    strict = Two(source, reader, router, far[0])
    for name in ("first", "second"):
        await reads_from(reader, source, name)
        assert not await strict.was_announced(name)
