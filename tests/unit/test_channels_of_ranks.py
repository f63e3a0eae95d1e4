"""How a transfer goes on with an engine's other ranks, and what becomes of the channels to them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from caches import attention, cache

from kvferry.errors import Conflict, KvferryError, Unavailable
from kvferry.rpc import PEER_OPTIONS
from kvferry.schemas import TransferState
from kvferry.tables import BlockTable
from kvferry.v1 import peer_pb2, peer_pb2_grpc
from kvferryd.aio import Notes
from kvferryd.config import Config
from kvferryd.copy.sums import Sums
from kvferryd.engine import Engine
from kvferryd.engine.session import Rank, Session
from kvferryd.leases.leases import Leases
from kvferryd.observe.metrics import Metrics
from kvferryd.peers import channels
from kvferryd.peers.peers import Peers
from kvferryd.transfers.order import Order, Reservation
from kvferryd.transfers.ranks import Ranks
from kvferryd.transfers.record import record_of
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
    jobs = Transfers(config, peers, metrics, Notes(lambda: False), lambda: None)
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
    jobs = Transfers(config, peers, metrics, Notes(lambda: False), lambda: None)
    for service in (Rank1(), Rank2()):
        servers.append(grpc.aio.server(options=PEER_OPTIONS))
        peer_pb2_grpc.add_PeerServicer_to_server(service, servers[-1])
        addresses.append(f"127.0.0.1:{servers[-1].add_insecure_port('127.0.0.1:0')}")
        await servers[-1].start()
    transfer, _ = jobs.order(first_of(*addresses), "r", Order("p", "127.0.0.1:1", deadline_s=3600))
    async with asyncio.timeout(60):
        while not transfer.over:
            await transfer.changed.wait()
    assert {share.state for share in record_of(transfer).ranks} == {TransferState.FAILED}
    assert transfer.ranks[1].error is not None and transfer.ranks[1].error.code == "internal"
    await jobs.close()
    await asyncio.gather(peers.close(), *(server.stop(0) for server in servers))


def jobs_of(metrics: Metrics) -> Transfers:
    config = Config(connect_timeout_s=0.2)
    return Transfers(config, Peers(config, metrics), metrics, Notes(lambda: False), lambda: None)


def reserved(engine: Engine) -> Reservation:
    return Reservation({group.name: BlockTable.of([0]) for group in engine.manifest.groups}, None)


ORDER = Order("p", "127.0.0.1:9", deadline_s=0.5)


async def test_an_order_that_cannot_be_handed_on_ends_by_its_deadline() -> None:
    """Nothing that is in it may leave a part of which nobody hears."""
    jobs = jobs_of(Metrics())
    async with asyncio.timeout(60):
        transfer, _ = jobs.order(first_of("127.0.0.1:9"), "r", ORDER, attempt=1 << 32)  # more than the field can hold
        while not transfer.over:
            await transfer.changed.wait()
    assert transfer.ranks[1].error is not None and transfer.ranks[1].error.code == "internal"
    await jobs.close()


async def test_a_part_that_was_ordered_by_another_part_of_the_same_rank_is_of_another_attempt() -> None:
    """Whenever it ended: by the clock alone it may be of this one."""
    jobs, engine = jobs_of(Metrics()), first_of("127.0.0.1:9")
    before = time.monotonic()
    first, new = jobs.order(engine, "r", ORDER, attempt=1, counted=True, since=before, parts={1: "a"})
    assert new and first.parts == {0: first.transfer_id, 1: "a"}
    assert jobs.order(engine, "r", ORDER, attempt=1, counted=True, since=before, parts={1: "a"}) == (first, False)
    first.stop(TransferState.ABORTED, Conflict("aborted", "by the test"))
    await first.ended.wait()
    assert jobs.order(engine, "r", ORDER, attempt=1, counted=True, since=before, parts={1: "a"}) == (first, False)
    with pytest.raises(Conflict) as stale:
        jobs.order(engine, "r", ORDER, attempt=1, counted=True, since=before, parts={1: "b"})
    assert (stale.value.code, stale.value.value) == ("stale_attempt", "2")
    second, new = jobs.order(engine, "r", ORDER, attempt=2, counted=True, since=before, parts={1: "b"})
    assert new and second is not first
    await jobs.close()


async def test_a_part_of_the_attempt_before_joins_no_other_that_one_of_its_siblings_leads() -> None:
    """Neither has heard of the other's parts; what tells them apart is what the leader's part took the place of."""
    jobs, engine = jobs_of(Metrics()), first_of("127.0.0.1:9", "127.0.0.1:9")
    first, _ = jobs.order(engine, "r", ORDER, attempt=1, counted=True, since=0.0, parts={2: "a"})
    second, new = jobs.order(engine, "r", ORDER, attempt=2, counted=True, since=0.0, parts={1: "b"}, earlier=["c", "a"])
    assert new and second is not first
    await first.ended.wait()
    assert first.problem is not None and first.problem.code == "superseded"
    await jobs.close()


async def test_an_abort_means_the_attempt_of_the_part_that_it_names() -> None:
    """Another rank has given it a higher number since."""
    jobs, engine = jobs_of(Metrics()), first_of("127.0.0.1:9", "127.0.0.1:9")
    part, _ = jobs.order(engine, "r", ORDER, attempt=1, counted=True, since=0.0, parts={2: "a"})
    assert jobs.order(engine, "r", ORDER, attempt=3, counted=True, since=0.0, parts={1: "b"}) == (part, False)
    assert not jobs.abort(engine, "r", "rank 2: failed", attempt=1, parts={2: "z"}, failed=True)
    assert jobs.abort(engine, "r", "rank 2: failed", attempt=1, parts={2: "a"}, failed=True)
    await part.ended.wait()
    await jobs.close()


async def test_a_part_ends_when_one_of_those_that_handed_it_on_lets_go() -> None:
    jobs, engine = jobs_of(Metrics()), first_of("127.0.0.1:9", "127.0.0.1:9")
    part, _ = jobs.order(engine, "r", ORDER, attempt=1, counted=True, since=0.0, parts={2: "a"})
    with part.followed(1):
        with part.followed(2), part.followed(2):
            pass
        await part.ended.wait()
    assert part.problem is not None and (part.problem.code, part.problem.value) == ("rank_failed", "2")
    await jobs.close()


async def test_a_refused_order_leaves_its_number_free() -> None:
    jobs, engine = jobs_of(Metrics()), first_of("127.0.0.1:9")
    jobs.draining = True
    with pytest.raises(Unavailable):
        jobs.order(engine, "r", ORDER, attempt=1)
    with pytest.raises(Unavailable):
        jobs.receive(engine, "r", reserved(engine), None, 5.0)
    jobs.draining = False
    waiting = jobs.receive(engine, "r", reserved(engine), None, 5.0)
    assert jobs.order(engine, "r", ORDER, attempt=1) == (waiting, True)
    await jobs.close()


async def test_what_ended_elsewhere_refuses_one_reservation_and_no_more() -> None:
    jobs, engine = jobs_of(Metrics()), first_of("127.0.0.1:9")
    jobs.abort(engine, "r", "rank 1: failed", attempt=7)
    with pytest.raises(Conflict, match="attempt 1 of request r has ended on another rank"):
        jobs.receive(engine, "r", reserved(engine), None, 5.0)
    waiting = jobs.receive(engine, "r", reserved(engine), None, 5.0)
    assert waiting.attempt == 8
    jobs.abort(engine, "r", "rank 1: failed", attempt=11)
    await waiting.ended.wait()
    assert jobs.receive(engine, "r", reserved(engine), None, 5.0).attempt == 12
    jobs.abort(engine, "q", "rank 1: aborted", attempt=1)
    ordered, _ = jobs.order(engine, "q", ORDER)
    assert ordered.attempt == 2
    await jobs.close()


async def test_who_waits_for_a_request_is_not_woken_by_another() -> None:
    jobs, engine = jobs_of(Metrics()), first_of("127.0.0.1:9")
    waiting = [asyncio.create_task(jobs.wait_new(request)) for request in ("r", "q")]
    await asyncio.sleep(0)
    transfer, _ = jobs.order(engine, "r", ORDER)
    async with asyncio.timeout(60):
        await waiting[0]
    assert not waiting[1].done() and jobs.of_request("r") == [transfer] and jobs.of_request("q") == []
    waiting[1].cancel()
    await jobs.close()


async def test_a_rank_that_was_away_is_dialled_once_when_it_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    dials, dial = [], channels._dial
    monkeypatch.setattr(channels, "_dial", lambda *of: dials.append(of) or dial(*of))

    async def serve(port: int = 0) -> tuple[grpc.aio.Server, int]:
        server = grpc.aio.server()
        peer_pb2_grpc.add_PeerServicer_to_server(Rank2(), server)
        port = server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        return server, port

    async def told() -> bool:
        try:
            async with ranks._asking(engine, address) as stub:
                await stub.Abort(peer_pb2.AbortRequest(), timeout=30)
        except KvferryError:
            return False
        return True

    ours = channels.Channels(Config())
    ranks, (server, port) = Ranks(Config(), ours), await serve()
    address = f"127.0.0.1:{port}"
    engine = first_of(address)
    assert await told()
    await server.stop(0)
    while len(dials) < 2:  # gRPC waits before it dials again: another channel has tried meanwhile
        assert not await told()
    server, _ = await serve(port)
    held = ranks._open[engine][address]
    async with asyncio.timeout(60):
        while held._shared.waits:  # noqa: ASYNC110  gRPC dials again by itself
            await asyncio.sleep(0.02)
    before = len(dials)
    assert all([await told() for _ in range(5)])
    assert len(dials) == before and len(ours) == 1
    await ranks.close()
    await ours.close()
    await server.stop(0)
