"""How a transfer goes on with an engine's other ranks, and what becomes of the channels to them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from caches import attention, cache

from kvferry.rpc import PEER_OPTIONS
from kvferry.schemas import TransferState
from kvferry.v1 import peer_pb2, peer_pb2_grpc
from kvferryd.aio import Notes
from kvferryd.config import Config
from kvferryd.copy.sums import Sums
from kvferryd.engine import Engine
from kvferryd.engine.session import Rank, Session
from kvferryd.leases.leases import Leases
from kvferryd.observe.metrics import Metrics
from kvferryd.peers.peers import Peers
from kvferryd.transfers.order import Order
from kvferryd.transfers.transfers import Transfers
from kvferryd.transport.agent import Agent

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def first_of_two(address: str) -> Engine:
    return first_of(address)


def first_of(*others: str) -> Engine:
    """Its agent is never started: nothing is read."""
    size = 1 + len(others)
    session, leases = Session(Rank("e", "1", 0, size)), Leases("e", "1", lambda lease: None, 1)
    return Engine(
        *session.rank, session, cache(*attention(), engine="e", of=size), Agent("a"), b"", leases, False, None, None,
        "", (), dict(enumerate(("127.0.0.1:1", *others))), None, Sums(),
    )  # fmt: skip


async def test_a_rank_that_is_told_of_an_end_after_its_engine_has_gone_keeps_no_channel() -> None:
    config, metrics = Config(connect_timeout_s=0.1), Metrics()
    peers = Peers(config, metrics)
    jobs = Transfers(config, peers, metrics, Notes(lambda: False))
    # Takes connections, and says nothing.
    silent = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    engine = first_of_two(f"127.0.0.1:{silent.sockets[0].getsockname()[1]}")
    async with asyncio.timeout(60), silent:
        transfer, _ = jobs.order(engine, "r", Order("p", "127.0.0.1:1"))
        while not len(peers.channels):  # noqa: ASYNC110  nothing else tells that rank 1 is called
            await asyncio.sleep(0)
        engine.session.retiring = asyncio.create_task(asyncio.sleep(0))
        jobs.abort_engine(engine, "it has gone")
        await jobs.leave(engine)
        await transfer.ended.wait()
        while tasks := jobs._ranks._tasks | jobs._after:
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
    peers, servers, addresses = Peers(config, metrics), [], []
    jobs = Transfers(config, peers, metrics, Notes(lambda: False))
    for service in (Rank1(), Rank2()):
        servers.append(grpc.aio.server(options=PEER_OPTIONS))
        peer_pb2_grpc.add_PeerServicer_to_server(service, servers[-1])
        addresses.append(f"127.0.0.1:{servers[-1].add_insecure_port('127.0.0.1:0')}")
        await servers[-1].start()
    transfer, _ = jobs.order(first_of(*addresses), "r", Order("p", "127.0.0.1:1", deadline_s=3600))
    async with asyncio.timeout(60):
        while not transfer.over:
            await transfer.changed.wait()
    assert {share.state for share in transfer.record().ranks} == {TransferState.FAILED}
    assert transfer.ranks[1].error is not None and transfer.ranks[1].error.code == "internal"
    await jobs.close()
    await asyncio.gather(peers.close(), *(server.stop(0) for server in servers))
