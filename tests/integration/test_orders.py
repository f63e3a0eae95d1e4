"""Orders and questions: the same one again, a different one, waiting for the end, aborting."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
from fleet import TIMEOUT_S, until
from pair import MANY, TOKENS, Pair, all_in, all_read, half_published, is_in, order, prefilled, waits_for
from victim import Victim

from kvferry.engine import Received, TransferFailed
from kvferry.router import DaemonError
from kvferry.schemas import Awaited, LeaseState, OrderBody, TransferRecord, TransferState
from support import refused

pytestmark = pytest.mark.anyio
FEW = 60


# idempotency and questions


async def test_the_same_order_with_its_id_gets_the_same_answer_after_the_end(pair: Pair, request_id: str) -> None:
    """At every rank, and though the request has another attempt by then."""
    named = {"order_id": f"{request_id}-order"}
    first = await moved_by_order(pair, request_id, **named)
    assert await moved_by_order(pair, request_id) != first
    for rank in range(3):
        assert await order(pair, request_id, rank, **named) == first
        assert (await pair.routers[rank].transfer(first)).state is TransferState.DONE
    with refused("order_conflict", DaemonError, status=409, field="order_id"):
        await order(pair, request_id, priority=7, **named)


async def moved_by_order(pair: Pair, request_id: str, **more: Any) -> str:
    """The request is published, ordered and received: what was moved is right, and of which transfer."""
    kv, leases = await prefilled(pair, request_id)
    blocks = pair.decode.take(TOKENS)
    expected = pair.decode.expecting(kv, blocks)
    transfer_id = await order(pair, request_id, **more)
    await pair.decode.receive(request_id, blocks)
    assert (await pair.routers[0].wait(transfer_id)).state is TransferState.DONE
    assert not pair.decode.differences(expected)
    assert {await lease.ended() for lease in leases} == {LeaseState.RELEASED}  # the next publish is of another one
    return transfer_id


async def test_the_same_order_at_another_rank_is_the_same_transfer(pair: Pair, request_id: str) -> None:
    await prefilled(pair, request_id)
    body = OrderBody(request_id=request_id, source=pair.prefill.source(), deadline_ms=60_000)
    first = await pair.routers[0].order(body)
    assert (await pair.routers[1].order(body)).transfer_id == first.transfer_id
    with refused("order_conflict", DaemonError, status=409):
        await pair.routers[1].order(body.model_copy(update={"priority": 7}))
    await pair.decode.receive(request_id, pair.decode.take(TOKENS))
    assert (await pair.routers[2].wait(first.transfer_id)).state is TransferState.DONE


async def test_a_transfer_that_was_ordered_at_another_rank_is_deleted_there(pair: Pair, request_id: str) -> None:
    """Before any reservation, and when all ranks have theirs."""
    transfer_id = await order(pair, request_id, 1)
    assert (await pair.routers[2].transfer(transfer_id)).waits_for is Awaited.RESERVATION
    assert (await pair.routers[2].abort_transfer(transfer_id)).state is TransferState.ABORTED
    receiving = asyncio.create_task(pair.decode.outcomes(request_id, pair.decode.take(TOKENS)))
    await all_in(pair.routers, request_id, TransferState.WAITING)
    transfer_id = await order(pair, request_id, 1)
    await until(lambda: waits_for(pair.routers[1], request_id, Awaited.PUBLISH), "the order is handed on")
    assert (await pair.routers[1].abort_transfer(transfer_id)).state is TransferState.ABORTED
    await all_told(await receiving)
    with refused("unknown_transfer", DaemonError, status=404):
        await pair.routers[1].transfer("nothing of that name")


DIFFERENT: dict[str, dict[str, Any]] = {
    "another source": {"source": {"engine_id": "another", "address": "127.0.0.1:9"}},
    "another epoch": {"source": {"epoch": "another"}},
    "another priority": {"priority": 7},
    "another deadline": {"deadline_ms": 12_345},
    "other blocks": {"destination": {"tables": {"full": {"block_ids": [3, 4]}, "state": {"block_ids": [5]}}}},
    "other tokens": {"destination": {"token_range": (0, 20)}},
    "other blocks on another rank": {
        "destination": {"tables": {"1": {"full": {"block_ids": [7, 8]}, "state": {"block_ids": [5]}}}}
    },
}


@pytest.mark.parametrize("change", DIFFERENT.values(), ids=DIFFERENT.keys())
async def test_a_different_order_for_the_same_request_is_refused(
    pair: Pair, request_id: str, change: dict[str, Any]
) -> None:
    blocks: dict[str, Any] = {"full": {"block_ids": [1, 2]}, "state": {"block_ids": [5]}}
    by_rank = "1" in change.get("destination", {}).get("tables", {})
    destination = {"tables": {str(rank): blocks for rank in range(3)} if by_rank else blocks, "token_range": (0, 48)}
    body: dict[str, Any] = {
        "request_id": request_id,
        "source": pair.prefill.source().model_dump(),
        "destination": destination,
    }
    first = await pair.routers[0].order(OrderBody.model_validate(body))
    for key, value in change.items():
        if by_rank:
            value = {"tables": destination["tables"] | value["tables"], "token_range": (0, 48)}
        body[key] = {**body[key], **value} if isinstance(value, dict) else value
    with refused("order_conflict", DaemonError, status=409):
        await pair.routers[0].order(OrderBody.model_validate(body))
    assert (await pair.routers[0].abort_transfer(first.transfer_id)).state is TransferState.ABORTED


async def test_a_long_poll_answers_with_the_end(pair: Pair, request_id: str) -> None:
    transfer_id = await order(pair, request_id)
    assert not (await pair.routers[0].transfer(transfer_id, wait_s=0.05)).state.ended
    polls = [
        asyncio.create_task(pair.routers[0].transfer(transfer_id, wait_s=20)),
        asyncio.create_task(pair.routers[0].transfers(request_id, wait_s=20)),
    ]
    await prefilled(pair, request_id)
    await pair.decode.receive(request_id, pair.decode.take(TOKENS))
    one, several = await asyncio.gather(*polls)
    assert isinstance(one, TransferRecord)
    assert isinstance(several, list)
    assert [one.state, *(record.state for record in several)] == [TransferState.DONE] * 2


async def test_a_long_poll_waits_for_a_request_that_is_yet_to_come(pair: Pair, request_id: str) -> None:
    assert await pair.routers[0].transfers(request_id, wait_s=0.3) == []
    poll = asyncio.create_task(pair.routers[0].transfers(request_id, wait_s=20))
    other = f"{request_id}-other"
    await pair.decode.outcomes(other, pair.decode.take(TOKENS), deadline_s=0.1)
    await prefilled(pair, request_id)
    assert not poll.done(), "another request came"
    await pair.decode.receive(request_id, pair.decode.take(TOKENS), source=pair.prefill.source())
    assert [record.state for record in await poll] == [TransferState.DONE]


# aborts


@pytest.mark.parametrize("door", ["transfer", "request", "engine"])
async def test_a_transfer_that_waits_can_be_aborted(pair: Pair, request_id: str, door: str) -> None:
    receiving = asyncio.create_task(pair.decode.outcomes(request_id, pair.decode.take(TOKENS)))
    await all_in(pair.routers, request_id, TransferState.WAITING)
    transfer_id = await order(pair, request_id)
    await abort(pair, request_id, transfer_id, door)
    record = await pair.routers[0].wait(transfer_id)
    assert record.state is TransferState.ABORTED
    await all_told(await receiving)


@pytest.mark.parametrize("door", ["transfer", "request", "engine"])
async def test_a_transfer_in_the_middle_of_a_read_can_be_aborted(pair: Pair, request_id: str, door: str) -> None:
    source = await half_published(pair, request_id)
    receiving = asyncio.create_task(pair.decode.outcomes(request_id, pair.decode.take(MANY)))
    await all_in(pair.routers, request_id, TransferState.WAITING)
    transfer_id = await order(pair, request_id)
    await all_read(pair.routers[0], request_id)
    await pair.prefill.publish(request_id, source, MANY - 1, more=True)  # now they have a lot to read, and never all
    await abort(pair, request_id, transfer_id, door)
    assert (await pair.routers[0].wait(transfer_id)).state is TransferState.ABORTED
    await all_told(await receiving)
    await pair.prefill_routers[0].abort_request(request_id)


async def abort(pair: Pair, request_id: str, transfer_id: str, door: str) -> None:
    if door == "transfer":
        assert (await pair.routers[0].abort_transfer(transfer_id)).state is TransferState.ABORTED
    elif door == "request":
        assert (await pair.routers[0].abort_request(request_id)).transfers_ended >= 1
    else:
        await pair.decode.ranks[0].client.abort(request_id)


async def all_told(outcomes: list[Received | BaseException]) -> None:
    """Every engine rank was told that it failed, and is told when its blocks are safe."""
    for outcome in outcomes:
        assert isinstance(outcome, TransferFailed), outcome
        assert outcome.code == "aborted", outcome
        async with asyncio.timeout(TIMEOUT_S):
            await outcome.quiesced()
        assert outcome.blocks_safe


async def test_cancelling_a_receive_aborts_the_transfer(pair: Pair, request_id: str) -> None:
    client, attempt = pair.decode.ranks[0].client, pair.decode.next_attempt()
    receiving = asyncio.create_task(client.receive(request_id, pair.decode.take(TOKENS).tables(), attempt=attempt))
    await until(lambda: is_in(pair.routers[0], request_id, TransferState.WAITING), "the reservation arrives")
    receiving.cancel()
    await asyncio.wait([receiving])
    assert await is_in(pair.routers[0], request_id, TransferState.ABORTED)


async def test_a_request_that_was_cancelled_may_be_received_again_at_once(
    pair: Pair, victim: Victim, request_id: str
) -> None:
    """Late words on the first transfer are not taken for the second's."""
    client, source = victim.engine.ranks[0].client, pair.prefill.source()
    for i in range(8):
        again, theirs = f"{request_id}-{i}", pair.prefill.take(FEW)
        await pair.prefill.publish(again, theirs, 10, more=True)
        first = asyncio.create_task(client.receive(again, victim.engine.take(FEW).tables(), source=source))
        await until(lambda again=again: is_in(victim.router, again, TransferState.READING), "it reads")
        first.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await first
        second = asyncio.create_task(client.receive(again, victim.engine.take(FEW).tables(), source=source))
        await until(lambda again=again: is_in(victim.router, again, TransferState.READING), "it reads again")
        assert not second.done()
        await pair.prefill.publish(again, theirs, FEW)
        assert (await second).tokens == (0, FEW)


async def test_an_aborted_request_ends_on_both_sides(pair: Pair, request_id: str) -> None:
    _, leases = await prefilled(pair, request_id)
    await order(pair, request_id)
    ended = await pair.routers[2].abort_request(request_id)
    assert [await lease.ended() for lease in leases] == [LeaseState.REVOKED] * 2
    assert ended.leases_ended + ended.transfers_ended > 0
    again = await pair.routers[2].abort_request(request_id)
    assert (again.transfers_ended, again.leases_ended) == (0, 0)


async def test_aborting_a_request_at_its_source_revokes_the_lease_on_every_rank(pair: Pair, request_id: str) -> None:
    _, leases = await prefilled(pair, request_id)
    assert (await pair.prefill_routers[1].abort_request(request_id)).leases_ended == 2
    assert [await lease.ended() for lease in leases] == [LeaseState.REVOKED] * 2


async def test_an_aborted_request_may_come_again_with_other_blocks(pair: Pair, request_id: str) -> None:
    for _ in range(3):
        blocks = pair.decode.take(TOKENS)
        receiving = asyncio.create_task(pair.decode.outcomes(request_id, blocks, source=pair.prefill.source()))
        await all_in(pair.routers, request_id, TransferState.CONNECTING)
        await pair.decode.ranks[0].client.abort(request_id)
        await receiving
    kv, _ = await prefilled(pair, request_id)
    await pair.decode.gets(request_id, kv, source=pair.prefill.source())
