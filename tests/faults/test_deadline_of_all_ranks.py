"""A transfer of several ranks has one deadline: a rank whose daemon is stopped, or answers nothing, does not hold it
up."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest
from fleet import SPOKEN, Daemons, Joining, peer_stub, retired, until
from pair import is_in, prewarmed
from ranks import Kv, Shape, TestEngine, start_rank
from stopping import stopped

from kvferry.engine import TransferFailed
from kvferry.router import RouterClient
from kvferry.schemas import OrderBody, TransferRecord, TransferState
from kvferry.v1 import peer_pb2, peer_pb2_grpc
from kvferryd.demo.fleet import DaemonService

pytestmark = pytest.mark.anyio
TOKENS, DEADLINE_MS, ENDS_S = 40, 3000, 15.0
"""DEADLINE_MS: passes before a daemon that is stopped is taken for gone, after 4.5 s. ENDS_S: the longest wait for the
end; without a deadline of its own such a transfer stayed for a minute or for ever."""
ONE, TWO = Shape.tp(1, num_blocks=16), Shape.tp(2, num_blocks=16)


@pytest.fixture(scope="module")
async def three(daemons: Daemons) -> list[DaemonService]:
    """The source's, and those of a reader of two ranks."""
    theirs, ours = await asyncio.gather(daemons.start("source"), daemons.start("reader", 2))
    return theirs + ours


async def source_of(stack: AsyncExitStack, three: Sequence[DaemonService], name: str, request_id: str) -> TestEngine:
    engine = await TestEngine.start(name, three[:1], ONE)
    stack.push_async_callback(engine.close)
    blocks = engine.take(TOKENS)
    engine.write(Kv.random(TOKENS), blocks)
    await engine.publish(request_id, blocks, TOKENS)
    return engine


async def reader_of_two(
    stack: AsyncExitStack, three: Sequence[DaemonService], name: str
) -> tuple[Sequence[DaemonService], TestEngine, list[RouterClient]]:
    """An engine with two ranks: (their daemons, the engine, a client of each daemon)."""
    ours = three[1:]
    await retired(*ours)
    reader = await TestEngine.start(name, ours, TWO)
    stack.push_async_callback(reader.close)
    return ours, reader, [await stack.enter_async_context(RouterClient(daemon.url)) for daemon in ours]


async def received(reader: TestEngine, request_id: str, attempt: int) -> None:
    """Rank 0 reserves, and no other does; however it ends."""
    with contextlib.suppress(TransferFailed):
        await reader.ranks[0].client.receive(request_id, reader.take(TOKENS).tables(), attempt=attempt)


async def outcome(router: RouterClient, source: TestEngine, request_id: str) -> TransferRecord:
    """The record of an order with a deadline, as the router sees it, for what rank 0 has reserved."""
    await until(lambda: is_in(router, request_id, TransferState.WAITING), "the reservation arrives")
    order = OrderBody(request_id=request_id, source=source.source(), deadline_ms=DEADLINE_MS)
    ordered = await router.order(order)
    return await router.transfer(ordered.transfer_id, wait_s=ENDS_S)


def fails_at_rank_1(record: TransferRecord) -> None:
    assert record.state is TransferState.FAILED, "it has ended, although rank 1 says nothing"
    by_rank = {share.rank: share for share in record.ranks}
    assert by_rank[0].state is TransferState.DONE, "the blocks of rank 0 hold its KV"
    error = by_rank[1].error
    assert error is not None and (error.code, error.field, error.value) == ("deadline", "rank", "1")


async def test_a_rank_whose_daemon_is_stopped(
    three: list[DaemonService], stack: AsyncExitStack, request_id: str
) -> None:
    source = await source_of(stack, three, "stopped-source", request_id)
    ours, reader, (router, _) = await reader_of_two(stack, three, "stopped-reader")
    await prewarmed(source, [router])
    receiving = asyncio.create_task(reader.ranks[0].client.receive(request_id, reader.take(TOKENS).tables(), attempt=1))
    with stopped(ours[1].process.pid):
        record = await outcome(router, source, request_id)
        await receiving
    fails_at_rank_1(record)


async def test_a_rank_that_was_handed_an_order_names_the_deadline_that_was_ordered(
    three: list[DaemonService], stack: AsyncExitStack, request_id: str
) -> None:
    """And not what was left of it. It passes before rank 0, which stands still, is taken for gone."""
    source = await source_of(stack, three, "handed-source", request_id)
    ours, reader, (first, second) = await reader_of_two(stack, three, "handed-reader")
    receiving = asyncio.create_task(received(reader, request_id, 1))
    await first.order(OrderBody(request_id=request_id, source=source.source(), deadline_ms=DEADLINE_MS))
    await until(lambda: is_in(second, request_id, TransferState.WAITING), "the order is handed on")
    with stopped(ours[0].process.pid):
        (record,) = await second.transfers(request_id, wait_s=ENDS_S)
    await receiving
    assert record.error is not None
    assert (record.error.code, record.error.value) == ("deadline", str(DEADLINE_MS))


async def test_an_attempt_that_is_deleted_late_leaves_the_next_one_alone(
    three: list[DaemonService], stack: AsyncExitStack, request_id: str
) -> None:
    """The first goes on at a rank whose daemon is stopped, so it is not over."""
    source = await source_of(stack, three, "late-source", request_id)
    ours, reader, (first, second) = await reader_of_two(stack, three, "late-reader")
    body = OrderBody(request_id=request_id, source=source.source(), attempt=1)
    receiving = [asyncio.create_task(received(reader, request_id, 1))]
    before = await first.order(body)
    await until(lambda: is_in(second, request_id, TransferState.WAITING), "the order is handed on")
    with stopped(ours[1].process.pid):
        await reader.ranks[0].client.abort(request_id)
        receiving.append(asyncio.create_task(received(reader, request_id, 2)))
        after = await first.order(body.model_copy(update={"attempt": 2}))
        await first.abort_transfer(before.transfer_id)
        record = await first.transfer(after.transfer_id)
        assert record.state is not TransferState.ABORTED, record
        assert not [share for share in record.ranks if share.error and share.error.code == "aborted"], record
    await first.abort_transfer(after.transfer_id)
    await asyncio.gather(*receiving)


class Silent(Joining):
    """A daemon that takes an order and says nothing."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    async def Order(  # type: ignore[override]
        self, request: peer_pb2.OrderRequest, context: Any
    ) -> AsyncIterator[peer_pb2.RankTransfer]:
        await self.ended.wait()
        yield peer_pb2.RankTransfer(rank=1, state="waiting")

    async def Abort(self, request: peer_pb2.AbortRequest, context: Any) -> peer_pb2.AbortReply:  # type: ignore[override]
        return peer_pb2.AbortReply()

    async def Prewarm(self, request: peer_pb2.PrewarmRequest, context: Any) -> peer_pb2.PrewarmReply:  # type: ignore[override]
        return peer_pb2.PrewarmReply()


@pytest.mark.slow
async def test_a_rank_whose_daemon_answers_nothing(
    three: list[DaemonService], stack: AsyncExitStack, request_id: str
) -> None:
    source = await source_of(stack, three, "silent-source", request_id)
    ours = three[1]
    await retired(ours)
    epoch, ring = "1", itertools.cycle(range(TWO.num_blocks))
    blocks = TestEngine("silent-reader", epoch, TWO, [], [], ring, ring)
    rank = await start_rank("silent-reader", ours.socket, TWO, 0, epoch, "f")
    stack.push_async_callback(rank.client.close)
    silent, server = Silent(), grpc.aio.server()
    peer_pb2_grpc.add_PeerServicer_to_server(silent, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    stack.push_async_callback(server.stop, 0)
    stub = await stack.enter_async_context(peer_stub(ours))
    member = peer_pb2.Member(rank=1, address=address, epoch=epoch)
    joining = stub.Join(peer_pb2.JoinRequest(**SPOKEN, engine_id="silent-reader", member=member, world_size=2))
    await joining.read()
    router = await stack.enter_async_context(RouterClient(ours.url))
    await prewarmed(source, [router])
    receiving = asyncio.create_task(rank.client.receive(request_id, blocks.take(TOKENS).tables(), attempt=1))
    record = await outcome(router, source, request_id)
    await receiving
    fails_at_rank_1(record)
    silent.ended.set()
    joining.cancel()
