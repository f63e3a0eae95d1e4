"""An attempt at a request has one number on all ranks: whatever comes first, it ends alike on all of them."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest
from fleet import TIMEOUT_S, Daemons, refusal, until
from lives import engine_on
from pair import MANY, TOKENS, Pair, all_in, half_published, is_in, order, prefilled, waits_for
from ranks import Blocks, Kv, Shape, TestEngine

from kvferry.engine import EngineClient, Lease, Received
from kvferry.errors import KvferryError
from kvferry.router import RouterClient
from kvferry.schemas import Awaited, LeaseState, OrderBody, TransferRecord, TransferState
from kvferry.v1 import engine_pb2
from kvferry.wire import tables_to_proto
from kvferryd.demo.fleet import DaemonService
from support import refused

pytestmark = pytest.mark.anyio
ONE = Shape.tp(1, block_size=24, num_blocks=240)
TWO = Shape.tp(2, num_blocks=16)
FAR_AWAY = (1 << 31) - 1
"""The highest attempt that a router may name."""


async def done_by(pair: Pair, transfer_id: str) -> TransferRecord:
    record = await pair.routers[0].wait(transfer_id, timeout_s=TIMEOUT_S)
    assert record.state is TransferState.DONE, record
    return record


async def moves(pair: Pair, request_id: str) -> None:
    """A whole attempt: the request is published, ordered and received, and what was moved is right."""
    kv, _ = await prefilled(pair, request_id)
    blocks = pair.decode.take(TOKENS)
    expected = pair.decode.expecting(kv, blocks)
    attempt = pair.decode.next_attempt()
    transfer_id = await order(pair, request_id, 1, attempt=attempt)
    await pair.decode.receive(request_id, blocks, attempt=attempt)
    assert (await done_by(pair, transfer_id)).attempt == attempt
    assert not pair.decode.differences(expected)


def codes(outcomes: list[Received | BaseException]) -> set[str]:
    """All have failed, and are quiet."""
    assert all(isinstance(outcome, KvferryError) for outcome in outcomes), outcomes
    return {outcome.code for outcome in outcomes if isinstance(outcome, KvferryError)}


# which half comes first, and where


@pytest.mark.parametrize("rank", [0, 2])
async def test_an_order_with_a_number_waits_for_the_reservation_of_that_attempt(
    pair: Pair, request_id: str, rank: int
) -> None:
    """The attempt before is reserved meanwhile, and has no part in it."""
    kv, _ = await prefilled(pair, request_id)
    before, attempt = pair.decode.next_attempt(), pair.decode.next_attempt()
    transfer_id = await order(pair, request_id, rank, attempt=attempt)
    blocks = pair.decode.take(TOKENS)
    expected = pair.decode.expecting(kv, blocks)
    earlier = await pair.decode.outcomes(request_id, pair.decode.take(TOKENS), attempt=before, deadline_s=0.2)
    assert codes(earlier) == {"deadline"}
    record = await pair.routers[rank].transfer(transfer_id)
    assert (record.state, record.attempt, record.waits_for) == (TransferState.WAITING, attempt, Awaited.RESERVATION)
    await pair.decode.receive(request_id, blocks, attempt=attempt)
    assert (await done_by(pair, transfer_id)).attempt == attempt
    assert not pair.decode.differences(expected)


@pytest.mark.parametrize("orders", ["router", "engine"])
@pytest.mark.parametrize("first", [1, 0])
async def test_ranks_may_reserve_one_after_another(pair: Pair, request_id: str, first: int, orders: str) -> None:
    kv, leases = await prefilled(pair, request_id)
    blocks = pair.decode.take(TOKENS)
    expected = pair.decode.expecting(kv, blocks)
    said = {"attempt": pair.decode.next_attempt(), "source": pair.prefill.source() if orders == "engine" else None}
    ranks = [pair.decode.ranks[(first + n) % 3].client for n in range(3)]
    ahead = asyncio.create_task(ranks[0].receive(request_id, blocks.tables(), **said))
    await until(lambda: is_in(pair.routers[first], request_id, *TransferState), "the first has reserved")
    if orders == "router":
        await order(pair, request_id, 2)
    receives = (rank.receive(request_id, blocks.tables(), **said) for rank in ranks[1:])
    received = await asyncio.gather(ahead, *receives)
    assert {each.lease for each in received} == {pair.prefill.lease(request_id)}
    assert not pair.decode.differences(expected)
    async with asyncio.timeout(TIMEOUT_S):
        assert [await lease.ended() for lease in leases] == [LeaseState.RELEASED] * 2


# a rank fails or is refused


@pytest.mark.parametrize("refused_first", [True, False])
@pytest.mark.parametrize("orders", ["router", "engine"])
async def test_a_reservation_that_one_rank_refuses_ends_the_attempt_on_all_and_the_next_is_done(
    pair: Pair, request_id: str, orders: str, *, refused_first: bool
) -> None:
    """Rank 0 has reserved, or does so later, and would wait for it until the deadline."""
    await half_published(pair, request_id)
    blocks, beyond = pair.decode.take(MANY), Blocks((1 << 20,), 1)
    said = {"attempt": pair.decode.next_attempt(), "source": pair.prefill.source() if orders == "engine" else None}
    first, second, third = (rank.client for rank in pair.decode.ranks)

    async def refuse() -> None:
        assert (await refusal(second.receive(request_id, beyond.tables(), **said))).code == "block_id_out_of_range"

    if refused_first:
        await refuse()
    receiving = [asyncio.create_task(each.receive(request_id, blocks.tables(), **said)) for each in (first, third)]
    if orders == "router":
        await order(pair, request_id, 1)
    if not refused_first:
        await until(lambda: waits_for(pair.routers[1], request_id, Awaited.RESERVATION), "the order is handed on")
        await refuse()
    async with asyncio.timeout(TIMEOUT_S / 2):
        outcomes = await asyncio.gather(*receiving, return_exceptions=True)
    assert codes(outcomes) <= {"rank_failed", "aborted"}
    (record,) = [each for each in await pair.routers[0].transfers(request_id, wait_s=TIMEOUT_S) if each.error]
    (error,) = [share.error for share in record.ranks if share.rank == 1]
    assert error is not None and error.code == "block_id_out_of_range"
    await asyncio.gather(*(rank.client.abort(request_id) for rank in pair.prefill.ranks))
    await moves(pair, request_id)


@pytest.mark.parametrize("orders", ["router", "engine"])
@pytest.mark.parametrize("missing", [0, 1])
async def test_a_rank_that_reserves_nothing_fails_the_attempt_by_its_deadline_and_the_next_reads_the_same_lease(
    pair: Pair, request_id: str, missing: int, orders: str
) -> None:
    """Other ranks than rank 0 wait for it; those that it has led may have their part, and read it anew."""
    kv, leases = await prefilled(pair, request_id)
    blocks, source = pair.decode.take(TOKENS), pair.prefill.source()
    said: dict[str, Any] = {"source": source if orders == "engine" else None, "deadline_s": 2.0}
    others = [rank.client for rank in pair.decode.ranks if rank.manifest.rank != missing]
    attempt = pair.decode.next_attempt()
    receiving = [
        asyncio.create_task(each.receive(request_id, blocks.tables(), attempt=attempt, **said)) for each in others
    ]
    if orders == "router":
        await order(pair, request_id, 2, deadline_ms=2000)
    async with asyncio.timeout(TIMEOUT_S):
        outcomes = await asyncio.gather(*receiving, return_exceptions=True)
        records = await pair.routers[0 if missing else 1].transfers(request_id, wait_s=TIMEOUT_S)
        if orders == "router":  # or it waits for the next attempt still
            await pair.routers[0].transfers(request_id, wait_s=TIMEOUT_S)
    assert [record.state for record in records] == [TransferState.FAILED] * len(records)
    if missing:
        (share,) = [share for record in records for share in record.ranks if share.rank == missing]
        assert share.state is TransferState.FAILED
    else:
        assert codes(outcomes) <= {"deadline", "rank_failed"}
    assert not any(lease.over for lease in leases)
    expected = pair.decode.expecting(kv, blocks)
    assert {each.lease for each in await pair.decode.receive(request_id, blocks, source=source)} == {leases[0].number}
    assert not pair.decode.differences(expected)
    async with asyncio.timeout(TIMEOUT_S):
        assert [await lease.ended() for lease in leases] == [LeaseState.RELEASED] * 2


async def test_the_attempt_after_one_that_a_rank_gave_up_is_done(pair: Pair, request_id: str) -> None:
    theirs = await half_published(pair, request_id)
    receiving = asyncio.create_task(
        pair.decode.outcomes(request_id, pair.decode.take(TOKENS), source=pair.prefill.source())
    )
    await all_in(pair.routers, request_id, TransferState.READING)
    await pair.decode.ranks[1].client.abort(request_id)
    assert codes(await receiving) == {"aborted"}
    await pair.prefill.publish(request_id, theirs, TOKENS)
    await asyncio.gather(*(rank.client.abort(request_id) for rank in pair.prefill.ranks))
    await moves(pair, request_id)


@pytest.mark.parametrize("field", ["attempt", "lease"])
async def test_a_daemon_takes_nothing_without_a_number(pair: Pair, request_id: str, field: str) -> None:
    """As from an engine that is written by somebody else."""
    client, tables = pair.decode.ranks[1].client, tables_to_proto(pair.decode.take(TOKENS).tables())
    said: dict[str, Any] = {
        "attempt": {"receive": engine_pb2.ReceiveRequest(request_id=request_id, tables=tables)},
        "lease": {"publish": engine_pb2.PublishRequest(request_id=request_id, tables=tables, num_tokens=TOKENS)},
    }
    with refused("number_required", field=field):
        await client._ask(**said[field])
    assert await pair.routers[1].transfers(request_id) == []


# one lease


@pytest.mark.parametrize("named", [False, True], ids=["whichever there is", "by its number"])
async def test_a_reader_of_one_rank_reads_one_lease_of_both_ranks_of_the_source(
    pair: Pair, near: DaemonService, stack: AsyncExitStack, request_id: str, named: bool
) -> None:
    """Rank 0 of the source has published anew when rank 1 has not, and is waited for."""
    reader, router = await engine_on(stack, "one-of-two", near, ONE)
    await prefilled(pair, request_id)
    first, second = (rank.client for rank in pair.prefill.ranks)
    kv, theirs = pair.prefill.filled(TOKENS)
    number = pair.prefill.next_lease()
    await first.publish(request_id, theirs.tables(), TOKENS, lease=number)
    blocks, expected = reader.take(TOKENS), reader.snapshot()
    source = pair.prefill.source().model_copy(update={"lease": number if named else None})
    receiving = asyncio.create_task(reader.receive(request_id, blocks, source=source))
    await until(lambda: waits_for(router, request_id, Awaited.PUBLISH), "rank 1 is waited for")
    assert not reader.differences(expected), "nothing was read before"
    reader.write_into(expected, kv, blocks)
    lease = await second.publish(request_id, theirs.tables(), TOKENS, lease=number)
    (received,) = await receiving
    assert received.lease == number
    assert not reader.differences(expected)
    async with asyncio.timeout(TIMEOUT_S):
        assert await lease.ended() is LeaseState.RELEASED


@pytest.mark.parametrize("named", [False, True], ids=["whichever there is", "by its number"])
async def test_ranks_of_the_source_may_publish_one_after_another_and_at_different_speeds(
    pair: Pair, request_id: str, named: bool
) -> None:
    """As stages of a pipeline do."""
    kv, theirs = pair.prefill.filled(TOKENS)
    blocks, expected, number = pair.decode.take(TOKENS), pair.decode.snapshot(), pair.prefill.next_lease()
    pair.decode.write_into(expected, kv, blocks)
    first, second = (rank.client for rank in pair.prefill.ranks)

    async def published(client: EngineClient, tokens: int) -> None:
        await client.publish(request_id, theirs.tables(), tokens, more=tokens < TOKENS, lease=number)

    source = pair.prefill.source().model_copy(update={"lease": number if named else None})
    await published(first, 48)
    receiving = asyncio.create_task(pair.decode.receive(request_id, blocks, source=source))
    await until(lambda: waits_for(pair.routers[2], request_id, Awaited.PUBLISH), "the other rank is waited for")
    for client, tokens in ((first, TOKENS), (second, 16), (second, 112), (second, TOKENS)):
        assert not receiving.done()
        await published(client, tokens)
    assert {(each.lease, each.tokens) for each in await receiving} == {(number, (0, TOKENS))}
    assert not pair.decode.differences(expected)


async def test_two_engines_read_one_lease_and_each_in_its_own_attempts(
    pair: Pair, near: DaemonService, stack: AsyncExitStack, request_id: str
) -> None:
    """Both count from 1: an attempt is of its engine."""
    reader, _ = await engine_on(stack, "beside", near, ONE)
    kv, leases = await prefilled(pair, request_id, readers=2)
    number, source = pair.prefill.lease(request_id), pair.prefill.source()
    ours, theirs = pair.decode.take(TOKENS), reader.take(TOKENS)
    pair.decode.write_into(mine := pair.decode.snapshot(), kv, ours)
    reader.write_into(other := reader.snapshot(), kv, theirs)
    received = await asyncio.gather(
        pair.decode.receive(request_id, ours, source=source, attempt=1),
        reader.receive(request_id, theirs, source=source, attempt=1),
    )
    assert {each.lease for several in received for each in several} == {number}
    assert not pair.decode.differences(mine) and not reader.differences(other)
    async with asyncio.timeout(TIMEOUT_S):
        assert [await lease.ended() for lease in leases] == [LeaseState.RELEASED] * 2


# lives of the reading engine


async def test_an_engine_that_is_started_anew_while_it_reads_begins_below_its_last_attempt(
    pair: Pair, daemons: Daemons, request_id: str
) -> None:
    """Attempts of its last start end with that: they are no newer ones, and read the lease no more. So does an order
    that waits for a reservation which never comes."""
    ours, theirs = await daemons.start("midway", 2), pair.prefill.take(TOKENS)
    kv, number = Kv.random(TOKENS), pair.prefill.next_lease()
    pair.prefill.write(kv, theirs)

    async def publish(tokens: int) -> list[Lease]:
        more = {"lease": number, "more": tokens < TOKENS}
        return list(await asyncio.gather(
            *(each.client.publish(request_id, theirs.tables(), tokens, **more) for each in pair.prefill.ranks)
        ))  # fmt: skip

    await publish(48)
    async with AsyncExitStack() as stack:
        routers = [await stack.enter_async_context(RouterClient(each.url)) for each in ours]
        before = await TestEngine.start("midway", ours, TWO)
        order = OrderBody(request_id=request_id, source=pair.prefill.source(), deadline_ms=1e3 * TIMEOUT_S)
        first = await routers[1].order(order)
        waiting = await routers[1].order(order.model_copy(update={"request_id": f"{request_id}-", "attempt": FAR_AWAY}))
        reading = asyncio.create_task(before.outcomes(request_id, before.take(TOKENS), attempt=7))
        await all_in(routers, request_id, TransferState.READING)
        await before.close()
        assert all(isinstance(outcome, KvferryError) for outcome in await reading)
        after = await TestEngine.start("midway", ours, TWO)
        for over in (first, waiting):
            assert (await routers[0].wait(over.transfer_id, timeout_s=TIMEOUT_S)).state is TransferState.FAILED
        blocks = after.take(TOKENS)
        expected = after.expecting(kv, blocks)
        second = await routers[1].order(order)
        receiving = asyncio.create_task(after.receive(request_id, blocks, attempt=1))
        await all_in(routers, request_id, TransferState.READING)
        leases = await publish(TOKENS)
        assert {each.lease for each in await receiving} == {number}
        record = await routers[0].wait(second.transfer_id, timeout_s=TIMEOUT_S)
        assert (record.state, record.attempt) == (TransferState.DONE, 1), record
        assert not after.differences(expected)
        async with asyncio.timeout(TIMEOUT_S):
            assert [await lease.ended() for lease in leases] == [LeaseState.RELEASED] * 2
        await after.close()
