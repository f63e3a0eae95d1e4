"""Rights to order, abort, join and close: a peer that is let in is no rank of an engine yet, and no reader of a
lease."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest
from fleet import SPOKEN, TIMEOUT_S, ByHand, Daemons, Joining, ended, peer_stub, refusal, serving, until
from lives import engine_on, published, reads_from
from ranks import Blocks, Shape, TestEngine, start_rank

from kvferry.router import RouterClient
from kvferry.schemas import DestinationBody, LeaseRecord, LeaseState, OrderBody, TransferState
from kvferry.v1 import engine_pb2, peer_pb2, peer_pb2_grpc
from kvferry.wire import tables_to_proto

pytestmark = pytest.mark.anyio
TP2 = Shape.tp(2, num_blocks=32)
FIRST = peer_pb2.Attempt(number=1)
KEYS = {"none": b"", "a guess": bytes(32)}


class Scene:
    """A reader of two ranks, and a source."""

    def __init__(self, source: TestEngine, reader: TestEngine, router: RouterClient) -> None:
        self.source, self.reader, self.router = source, reader, router

    @property
    def named(self) -> engine_pb2.Source:
        return engine_pb2.Source(engine_id=self.source.engine_id, address=self.source.address)


@pytest.fixture(scope="module")
async def scene(daemons: Daemons) -> AsyncIterator[Scene]:
    async with AsyncExitStack() as stack:
        source, _ = await engine_on(stack, "roles-s", (await daemons.start("roles-s"))[0])
        both = await daemons.start("roles-r", 2)
        reader = await TestEngine.start("roles-r", both, TP2)
        stack.push_async_callback(reader.close)
        router = await stack.enter_async_context(RouterClient(both[0].url))
        yield Scene(source, reader, router)


@pytest.fixture
async def stranger(scene: Scene) -> AsyncIterator[peer_pb2_grpc.PeerAsyncStub]:
    async with peer_stub(scene.reader.daemons[0]) as stub:
        yield stub


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS.keys())
async def test_a_stranger_orders_nothing(
    scene: Scene, stranger: peer_pb2_grpc.PeerAsyncStub, key: bytes, request_id: str
) -> None:
    """Neither into blocks that it names nor into those that the engine has reserved."""
    kv, _ = await published(scene.source, request_id)
    before = scene.reader.snapshot()
    order = peer_pb2.OrderRequest(
        engine_id="roles-r", request_id=request_id, source=scene.named, key=key, attempt=FIRST,
        tables=tables_to_proto(Blocks((1, 2, 3, 4), 1).tables()),
    )  # fmt: skip
    assert (await refusal(stranger.Order([order]).read())).code == "not_a_rank"
    order.ClearField("tables")
    assert (await refusal(stranger.Order([order]).read())).code == "not_a_rank"
    assert await scene.router.transfers(request_id) == []
    assert not scene.reader.differences(before)
    await scene.reader.gets(request_id, kv, source=scene.source.source())


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS.keys())
async def test_a_stranger_asks_rank_0_for_nothing(
    scene: Scene, stranger: peer_pb2_grpc.PeerAsyncStub, key: bytes, request_id: str
) -> None:
    """Neither to take an order, nor for a record or its end."""
    body = OrderBody(request_id=request_id, source=scene.source.source())
    ordered = await scene.router.order(body)
    told: dict[str, Any] = {"engine_id": "roles-r", "key": key}
    other = body.model_copy(update={"request_id": f"{request_id}-other"}).model_dump_json().encode()
    for call, request in (
        (stranger.Lead, peer_pb2.LeadRequest(**told, order=other)),
        (stranger.Record, peer_pb2.RecordRequest(**told, transfer_id=ordered.transfer_id, abort=True)),
    ):
        assert (await refusal(call(request))).code == "not_a_rank"  # type: ignore[operator]
    assert await scene.router.transfers(f"{request_id}-other") == []
    assert not (await scene.router.transfer(ordered.transfer_id)).state.ended
    await scene.router.abort_transfer(ordered.transfer_id)


async def test_a_rank_of_one_engine_has_no_record_of_another(
    scene: Scene, stranger: peer_pb2_grpc.PeerAsyncStub, request_id: str
) -> None:
    """Both engines are beside one daemon: the key of the one opens nothing of the other."""
    beside = await start_rank("beside", scene.reader.daemons[0].socket, TP2, 0, "1")
    mine = Joining()
    async with serving(mine) as address:
        held = stranger.Join(joining(address, 1, "1", engine_id="beside"))
        await held.read()
        named = DestinationBody(engine_id="roles-r")
        order = OrderBody(request_id=request_id, source=scene.source.source(), destination=named)
        ordered = await scene.router.order(order)
        for abort in (False, True):
            asked = peer_pb2.RecordRequest(
                engine_id="beside", key=mine.key, transfer_id=ordered.transfer_id, abort=abort
            )
            assert (await refusal(stranger.Record(asked))).code == "unknown_transfer"
        assert not (await scene.router.transfer(ordered.transfer_id)).state.ended
        await scene.router.abort_transfer(ordered.transfer_id)
        held.cancel()
    await beside.client.close()


async def test_an_engine_of_one_rank_takes_orders_of_no_peer(scene: Scene) -> None:
    order = peer_pb2.OrderRequest(engine_id="roles-s", request_id="x", source=scene.named, attempt=FIRST)
    async with peer_stub(scene.source.daemons[0]) as stub:
        assert (await refusal(stub.Order([order]).read())).code == "not_a_rank"


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS.keys())
async def test_a_stranger_ends_no_transfer(
    scene: Scene, stranger: peer_pb2_grpc.PeerAsyncStub, key: bytes, request_id: str
) -> None:
    kv, blocks = scene.source.filled(50)
    await scene.source.publish(request_id, blocks, 20, more=True)
    receiving = asyncio.create_task(scene.reader.gets(request_id, kv, source=scene.source.source()))

    async def reads() -> bool:
        return any(each.state is TransferState.READING for each in await scene.router.transfers(request_id))

    await until(reads, "it reads")
    for attempt in (None, FIRST, peer_pb2.Attempt(number=99)):
        for fan_out in (False, True):
            asked = peer_pb2.AbortRequest(
                engine_id="roles-r", request_id=request_id, key=key, attempt=attempt, fan_out=fan_out, failed=True
            )
            assert (await stranger.Abort(asked)).transfers_ended == 0
    await scene.source.publish(request_id, blocks, 50)
    await receiving


async def test_the_reader_still_ends_the_lease_that_it_was_to_read(scene: Scene, request_id: str) -> None:
    """POST /v1/requests/ID/abort at the reader ends the request on both sides."""
    _, (lease,) = await published(scene.source, request_id)
    await scene.router.order(OrderBody(request_id=request_id, source=scene.source.source()))
    await scene.router.abort_request(request_id)
    assert await lease.ended() is LeaseState.REVOKED


async def test_the_lease_ends_as_well_where_the_engine_that_was_to_read_it_has_gone(
    scene: Scene, daemons: Daemons, request_id: str
) -> None:
    _, (lease,) = await published(scene.source, request_id)
    (daemon,) = await daemons.start("roles-gone")
    async with AsyncExitStack() as stack, RouterClient(daemon.url) as router:
        reader, _ = await engine_on(stack, "roles-gone", daemon)
        ordered = await router.order(OrderBody(request_id=request_id, source=scene.source.source()))
        await reader.close()
        assert (await router.wait(ordered.transfer_id)).state.ended
        await router.abort_request(request_id)
    assert await lease.ended() is LeaseState.REVOKED


def joining(
    address: str, rank: int, epoch: str, world_size: int = 2, engine_id: str = "roles-r"
) -> peer_pb2.JoinRequest:
    member = peer_pb2.Member(rank=rank, address=address, epoch=epoch)
    return peer_pb2.JoinRequest(
        **SPOKEN, engine_id=engine_id, member=member, world_size=world_size, challenge=bytes(32)
    )


async def test_nobody_joins_in_the_place_of_a_rank(scene: Scene, stranger: peer_pb2_grpc.PeerAsyncStub) -> None:
    """Not from its address, not from another, and not as one rank more: so nobody gets the roster's key."""
    epoch, members = scene.reader.epoch, [daemon.peer for daemon in scene.reader.daemons]
    mine = Joining()
    async with serving(mine) as address:
        for request, code in (
            (joining(members[1], 1, epoch), "not_joining"),
            (joining(members[0], 0, epoch), "not_joining"),
            (joining(address, 1, epoch), "rank_taken"),
            (joining(address, 2, epoch), "malformed_member"),
            (joining(address, 2, epoch, world_size=3), "malformed_member"),
        ):
            assert (await refusal(stranger.Join(request).read())).code == code
        # In an epoch of its own it may do as it likes: that key opens nothing.
        held = stranger.Join(joining(address, 1, "another epoch"))
        await held.read()
        order = peer_pb2.OrderRequest(
            engine_id="roles-r", request_id="x", source=scene.named, key=mine.key, attempt=FIRST
        )
        assert len(mine.key) == 32
        assert (await refusal(stranger.Order([order]).read())).code == "not_a_rank"
        held.cancel()
    await reads_from(scene.reader, scene.source, "after joining")


async def test_the_place_of_a_rank_that_has_gone_stays_its_own(daemons: Daemons, stack: AsyncExitStack) -> None:
    both = await daemons.start("left", 2)
    engine = await TestEngine.start("roles-r", both, TP2)
    stack.push_async_callback(engine.ranks[0].client.close)
    router = await stack.enter_async_context(RouterClient(both[0].url))

    async def joined() -> bool:
        return len((await router.engines())[0].members) == 2

    async def alone() -> bool:
        return not await joined()

    await until(joined, "both have joined")
    assert await ended(both[1], signal.SIGKILL) == -signal.SIGKILL
    await until(alone, "the rank has left")
    async with serving(Joining()) as address, peer_stub(both[0]) as stub:
        assert (await refusal(stub.Join(joining(address, 1, engine.epoch)).read())).code == "rank_taken"
    await engine.ranks[1].client.close()


async def test_nobody_is_given_a_key_that_it_has_not_asked_for(stranger: peer_pb2_grpc.PeerAsyncStub) -> None:
    given = peer_pb2.AdmitRequest(engine_id="roles-r", epoch="1", challenge=bytes(32), key=bytes(32))
    assert (await refusal(stranger.Admit(given))).code == "not_joining"


async def test_an_announcement_does_not_tell_which_request_may_be_closed(scene: Scene, request_id: str) -> None:
    """The id of a request is what makes a reader: a peer that only listens learns none, and releases nothing."""
    async with peer_stub(scene.source.daemons[0]) as stub:
        opening = peer_pb2.ReadOpening(
            engine_id="roles-s", epoch=scene.source.epoch,
            reader=peer_pb2.Reader(engine_id="listener", epoch="1", rank=0, world_size=1),
        )  # fmt: skip
        listener = ByHand(stub, opening)
        await published(scene.source, "known to the listener")
        assert (await listener.open("known to the listener")).HasField("update")
        kv, _ = await published(scene.source, request_id)
        async with asyncio.timeout(TIMEOUT_S):
            reply = await listener.call.read()
        assert isinstance(reply, peer_pb2.ReadReply)
        assert reply.HasField("announced")
        assert request_id.encode() not in reply.SerializeToString()
        told = reply.announced.request_id
        await listener.say(
            close=peer_pb2.LeaseClose(request_id=told, complete=True, lease=reply.announced.update.lease)
        )
        await stub.Abort(peer_pb2.AbortRequest(engine_id="roles-s", request_id=told, fan_out=True))
        await scene.reader.gets(request_id, kv, source=scene.source.source())
        listener.call.cancel()


@pytest.mark.parametrize("name", ["its own name", "the reader's name"])
async def test_who_knows_a_requests_id_does_not_end_what_another_reads(
    scene: Scene, request_id: str, name: str
) -> None:
    """Nor counts as that reader, nor keeps it out: a reader has a key, which only its ranks and the source know."""
    kv, blocks = scene.source.filled(50)
    told = peer_pb2.Reader(engine_id="stranger", epoch="1", rank=0, world_size=1)
    if name == "the reader's name":
        told = peer_pb2.Reader(engine_id="roles-r", epoch=scene.reader.epoch, rank=0, world_size=2)
    opening = peer_pb2.ReadOpening(engine_id="roles-s", epoch=scene.source.epoch, reader=told)
    async with peer_stub(scene.source.daemons[0]) as stub, RouterClient(scene.source.daemons[0].url) as router:
        stranger = ByHand(stub, opening)
        await scene.source.publish(request_id, blocks, 20, more=True)
        assert (await stranger.open(request_id)).HasField("update"), "it is there before the reader"
        receiving = asyncio.create_task(scene.reader.gets(request_id, kv, source=scene.source.source()))

        async def all_read() -> bool:
            return [it.readers_open for it in await router.leases() if it.request_id == request_id] == [3]

        await until(all_read, "both ranks of the reader read beside the stranger")
        named = {"engine_id": "roles-s", "epoch": scene.source.epoch, "request_id": request_id}
        served = peer_pb2.ServedRequest(**named, lease=scene.source.lease(request_id), reader=told)
        of_itself = LeaseRecord.model_validate_json((await stub.Served(served)).record)
        assert [(each.engine_id, each.rank, each.bytes) for each in of_itself.readers] == [(told.engine_id, 0, 0)]
        served.reader.epoch = "another"
        assert (await refusal(stub.Served(served))).code == "unknown_lease"
        for reader in (told, None):
            asked = peer_pb2.AbortRequest(engine_id="roles-s", request_id=request_id, fan_out=True, reader=reader)
            assert (await stub.Abort(asked)).leases_ended == 0
        for rank in range(told.world_size):
            opening.reader.rank = rank
            another = ByHand(stub, opening)
            await another.say(close=peer_pb2.LeaseClose(request_id=request_id, complete=True))
            assert (await another.open("")).problem.code == "malformed_request_id"  # so the close was taken
            another.call.cancel()
        await stranger.say(close=peer_pb2.LeaseClose(reading=1, request_id=request_id, complete=True))
        assert (await stranger.open("", reading=2)).problem.code == "malformed_request_id"
        await scene.source.publish(request_id, blocks, 50)
        await receiving
        stranger.call.cancel()


async def test_only_blocks_that_the_engine_reserved_are_written_where_orders_name_none(
    daemons: Daemons, scene: Scene, stack: AsyncExitStack, request_id: str
) -> None:
    (daemon,) = await daemons.start("reserved", 1, "--no-order-tables")
    reader, router = await engine_on(stack, "reserved", daemon)
    kv, _ = await published(scene.source, request_id)
    blocks, before = reader.take(50), reader.snapshot()
    source = scene.source.source().model_dump(exclude_none=True)
    body = {"request_id": request_id, "source": source, "destination": {"tables": blocks.json()}}
    async with httpx.AsyncClient(base_url=daemon.url) as http:
        refused = await http.post("/v1/transfers", json=body)
        assert (refused.status_code, refused.json()["code"]) == (403, "tables_not_allowed")
        assert not reader.differences(before)
        receiving = asyncio.create_task(reader.receive(request_id, blocks))

        async def reserved() -> object:
            return await router.transfers(request_id)

        await until(reserved, "the reservation arrives")
        other = body | {"destination": {"tables": reader.take(50).json()}}
        assert (await http.post("/v1/transfers", json=other)).json()["code"] == "tables_not_allowed"
        assert (await http.post("/v1/transfers", json=body)).status_code == 202
    await receiving
    reader.write_into(before, kv, blocks)
    assert not reader.differences(before)
