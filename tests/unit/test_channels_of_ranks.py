"""How a transfer goes on with an engine's other ranks, and what becomes of the channels to them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from alone import first_of, peer_served

from kvferry.errors import KvferryError
from kvferry.schemas import TransferState
from kvferry.tables import BlockTable
from kvferry.v1 import peer_pb2, peer_pb2_grpc
from kvferryd.aio import Notes
from kvferryd.config import Config
from kvferryd.engine import Engine
from kvferryd.observe.history import opened
from kvferryd.observe.metrics import Metrics
from kvferryd.peers import channels
from kvferryd.peers.peers import Peers
from kvferryd.transfers.order import Order, Reservation
from kvferryd.transfers.ranks import Ranks
from kvferryd.transfers.record import record_of
from kvferryd.transfers.transfers import Transfers

pytestmark = pytest.mark.anyio


@contextlib.asynccontextmanager
async def silent() -> AsyncIterator[str]:
    """The address of one that takes connections, and says nothing."""
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        yield f"{host}:{port}"


async def test_a_rank_that_is_told_of_an_end_after_its_engine_has_gone_keeps_no_channel() -> None:
    config, metrics = Config(connect_timeout_s=0.1, deadline_s=1.0), Metrics()
    peers = Peers(config, metrics)
    jobs = Transfers(config, peers, metrics, opened(), Notes(lambda: False), lambda: None, "instance")
    async with asyncio.timeout(60), silent() as address:
        engine = first_of(address)
        transfer = jobs.receive(engine, "r", 1, reserved(engine), Order("p", address), None)
        while engine not in jobs.ranks._open:  # noqa: ASYNC110  nothing else tells that rank 1 is called
            await asyncio.sleep(0)
        engine.session.retiring = True
        jobs.abort_engine(engine, "it has gone")
        await jobs.leave(engine)
        await transfer.ended.wait()
        while tasks := jobs.ranks._calls() | jobs._after:
            await asyncio.wait(tasks)
        assert not len(peers.channels)
    await peers.close()


class Rank1(peer_pb2_grpc.PeerServicer):
    """Says of the order what breaks whoever reckons with it."""

    async def Order(self, request: Any, context: Any) -> AsyncIterator[peer_pb2.RankTransfer]:
        yield peer_pb2.RankTransfer(rank=1, state="reading", nbytes=1 << 40, phases_ms={"moving": 1e-320})


class Rank2(peer_pb2_grpc.PeerServicer):
    """Goes on with the order until it is told to abort."""

    def __init__(self) -> None:
        self.aborted = asyncio.Event()

    async def Order(self, request: Any, context: Any) -> AsyncIterator[peer_pb2.RankTransfer]:
        yield peer_pb2.RankTransfer(rank=2, state="reading")
        await self.aborted.wait()
        yield peer_pb2.RankTransfer(rank=2, state="failed")

    async def Abort(self, request: Any, context: Any) -> peer_pb2.AbortReply:
        self.aborted.set()
        return peer_pb2.AbortReply(transfers_ended=1)


async def test_what_breaks_over_one_rank_fails_the_transfer_of_all_and_leaves_none_waiting() -> None:
    config, metrics = Config(), Metrics()
    peers = Peers(config, metrics)
    jobs = Transfers(config, peers, metrics, opened(), Notes(lambda: False), lambda: None, "instance")
    async with (
        asyncio.timeout(60), silent() as source, peer_served(Rank1()) as first, peer_served(Rank2()) as second
    ):  # fmt: skip
        engine = first_of(first, second)
        transfer = jobs.receive(engine, "r", 1, reserved(engine), Order("p", source, deadline_s=3600), None)
        while not transfer.over:
            await transfer.changed.wait()
        assert {share.state for share in record_of(transfer).ranks} == {TransferState.FAILED}
        assert transfer.ranks[1].error is not None and transfer.ranks[1].error.code == "internal"
        await jobs.close()
        await peers.close()


@pytest.fixture
async def jobs() -> AsyncIterator[Transfers]:
    config, metrics = Config(connect_timeout_s=0.2), Metrics()
    peers = Peers(config, metrics)
    jobs = Transfers(config, peers, metrics, opened(), Notes(lambda: False), lambda: None, "instance")
    yield jobs
    await jobs.close()
    await peers.close()


def reserved(engine: Engine) -> Reservation:
    return Reservation({group.name: BlockTable.of([0]) for group in engine.manifest.groups}, None)


ORDER = Order("p", "127.0.0.1:9", deadline_s=0.5)


async def test_an_order_that_cannot_be_handed_on_ends_by_its_deadline(jobs: Transfers) -> None:
    """Nothing that is in it may leave a part of which nobody hears."""
    engine, too_high = first_of("127.0.0.1:9"), 1 << 32  # more than the field can hold
    async with asyncio.timeout(60):
        transfer = jobs.receive(engine, "r", too_high, reserved(engine), ORDER, None)
        while not transfer.over:
            await transfer.changed.wait()
    assert transfer.ranks[1].error is not None and transfer.ranks[1].error.code == "internal"


async def test_who_waits_for_a_request_is_not_woken_by_another(jobs: Transfers) -> None:
    engine = first_of("127.0.0.1:9")
    waiting = [asyncio.create_task(jobs.wait_new(request)) for request in ("r", "q")]
    await asyncio.sleep(0)
    transfer = jobs.receive(engine, "r", 1, reserved(engine), None, 5.0)
    async with asyncio.timeout(60):
        await waiting[0]
    assert not waiting[1].done() and jobs.of_request("r") == [transfer] and jobs.of_request("q") == []
    waiting[1].cancel()


async def test_a_rank_that_was_away_is_dialled_once_when_it_is_back(
    monkeypatch: pytest.MonkeyPatch, stack: contextlib.AsyncExitStack
) -> None:
    dials, dial = [], channels._dial
    monkeypatch.setattr(channels, "_dial", lambda *of: dials.append(of) or dial(*of))

    async def told() -> bool:
        try:
            async with ranks._asking(engine, address) as stub:
                await stub.Abort(peer_pb2.AbortRequest(), timeout=30)
        except KvferryError:
            return False
        return True

    ours = channels.Channels(Config())
    ranks = Ranks(Config(), ours, "instance", {}, lambda it: None)
    held_port = stack.enter_context(socket.socket())  # keeps others from it while no server is there
    held_port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held_port.bind(("127.0.0.1", 0))
    port = held_port.getsockname()[1]
    async with peer_served(Rank2(), port) as address:
        engine = first_of(address)
        assert await told()
    while len(dials) < 2:  # gRPC waits before it dials again: another channel has tried meanwhile
        assert not await told()
    async with peer_served(Rank2(), port):
        held = ranks._open[engine][address]
        async with asyncio.timeout(60):
            while held._shared.waits:  # noqa: ASYNC110  gRPC dials again by itself
                await asyncio.sleep(0.02)
        before = len(dials)
        assert all([await told() for _ in range(5)])
        assert len(dials) == before and len(ours) == 1
        await ranks.close()
        await ours.close()
