"""The channels to an engine's other ranks go with the engine, whatever its transfers still say to them."""

from __future__ import annotations

import asyncio

import pytest
from caches import attention, cache

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
    """Its agent is never started: nothing is read."""
    session, leases = Session(Rank("e", "1", 0, 2)), Leases("e", "1", lambda lease: None, 1)
    return Engine(
        *session.rank, session, cache(*attention(), engine="e", of=2), Agent("a"), b"", leases, False, None, None, "",
        (), {0: "127.0.0.1:1", 1: address}, None, Sums(),
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
