"""A transfer of several ranks has one deadline: a rank whose daemon is stopped does not hold it up."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from contextlib import AsyncExitStack

import pytest
from bounded import bounded
from fleet import Daemons, retired, until
from pair import is_in, prewarmed
from ranks import Kv, Shape, TestEngine

from kvferry.engine import TransferFailed
from kvferry.router import RouterClient
from kvferry.rpc import PEER_OPTIONS
from kvferry.schemas import OrderBody, TransferState
from kvferryd.demo.fleet import DaemonService
from stopping import stopped

pytestmark = pytest.mark.anyio
TOKENS, DEADLINE_MS, ENDS_S = 40, 8000, 30.0
"""DEADLINE_MS: enough for the rank that is not stopped, whose daemon may get no processor for a while. ENDS_S: the
longest wait for the end; without a deadline of its own such a transfer stayed for a minute or more."""
PATIENT: dict[str, object] = {
    "kvferry.rpc.PEER_OPTIONS[:]": [
        *(each for each in PEER_OPTIONS if "timeout" not in each[0]),
        ("grpc.keepalive_timeout_ms", 600_000),
        ("grpc.http2.ping_timeout_ms", 600_000),
    ]
}
"""A daemon that is stopped is taken for gone after 4.5 s, or 2.5 s where nothing was heard for 2 s: never here."""
ONE, TWO = Shape.tp(1, num_blocks=16), Shape.tp(2, num_blocks=16)


@pytest.fixture(scope="module")
async def three(daemons: Daemons) -> list[DaemonService]:
    """The source's, and those of a reader of two ranks."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        bounded(monkeypatch, PATIENT)
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


async def test_a_rank_whose_daemon_is_stopped(
    three: list[DaemonService], stack: AsyncExitStack, request_id: str
) -> None:
    source = await source_of(stack, three, "stopped-source", request_id)
    ours, reader, (router, _) = await reader_of_two(stack, three, "stopped-reader")
    await prewarmed(source, [router])
    receiving = asyncio.create_task(reader.ranks[0].client.receive(request_id, reader.take(TOKENS).tables(), attempt=1))
    with stopped(ours[1].process.pid):
        await until(lambda: is_in(router, request_id, TransferState.WAITING), "the reservation arrives")
        ordered = await router.order(OrderBody(request_id=request_id, source=source.source(), deadline_ms=DEADLINE_MS))
        record = await router.transfer(ordered.transfer_id, wait_s=ENDS_S)
        await receiving
    assert record.state is TransferState.FAILED, "it has ended, although rank 1 says nothing"
    by_rank = {share.rank: share for share in record.ranks}
    assert by_rank[0].state is TransferState.DONE, "the blocks of rank 0 hold its KV"
    error = by_rank[1].error
    assert error is not None and (error.code, error.field, error.value) == ("deadline", "rank", "1")


async def test_a_rank_that_was_handed_an_order_names_the_deadline_that_was_ordered(
    three: list[DaemonService], stack: AsyncExitStack, request_id: str
) -> None:
    """And not what was left of it."""
    source = await source_of(stack, three, "handed-source", request_id)
    ours, reader, (first, second) = await reader_of_two(stack, three, "handed-reader")
    receiving = asyncio.create_task(reader.ranks[0].client.receive(request_id, reader.take(TOKENS).tables(), attempt=1))
    await first.order(OrderBody(request_id=request_id, source=source.source(), deadline_ms=DEADLINE_MS))
    await until(lambda: is_in(second, request_id, TransferState.WAITING), "the order is handed on")
    with stopped(ours[0].process.pid):
        (record,) = await second.transfers(request_id, wait_s=ENDS_S)
    with contextlib.suppress(TransferFailed):
        await receiving
    assert record.error is not None
    assert (record.error.code, record.error.value) == ("deadline", str(DEADLINE_MS))
