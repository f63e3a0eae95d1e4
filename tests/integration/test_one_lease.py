"""KV is of use only if every rank of a request has it, and of one lease."""

from __future__ import annotations

import asyncio

import pytest
from fleet import TIMEOUT_S, until
from pair import TOKENS, Pair, is_in, order, prefilled
from ranks import Kv

from kvferry.engine import TransferFailed
from kvferry.errors import KvferryError
from kvferry.schemas import DestinationBody, LeaseState, OrderBody, TransferState

pytestmark = pytest.mark.anyio


async def test_ranks_that_read_two_publishes_of_a_request_are_not_done(pair: Pair, request_id: str) -> None:
    """Rank 0 has read the request when the prefill takes it back and publishes it anew: the others' heads would be of
    another computation."""
    await prefilled(pair, request_id)
    blocks, source = pair.decode.take(TOKENS), pair.prefill.source()
    first, *others = (rank.client for rank in pair.decode.ranks)
    await first.receive(request_id, blocks.tables(), source=source, attempt=1)
    await asyncio.gather(*(rank.client.abort(request_id) for rank in pair.prefill.ranks))
    kv, _ = await prefilled(pair, request_id)
    late = [each.receive(request_id, blocks.tables(), source=source, attempt=1) for each in others]
    ends = await asyncio.gather(*late, return_exceptions=True)
    assert all(isinstance(end, TransferFailed) for end in ends), ends
    assert "lease_changed" in [end.code for end in ends if isinstance(end, KvferryError)]
    for end in ends:
        assert isinstance(end, TransferFailed)
        await end.quiesced()
    received = await pair.decode.gets(request_id, kv, blocks, source=source, attempt=2)
    assert {each.lease for each in received} == {pair.prefill.lease(request_id)}


async def test_a_request_that_names_its_lease_reads_no_other(pair: Pair, request_id: str) -> None:
    """A rank that comes late is told so at once, and a source that has not got it yet is waited for."""
    await prefilled(pair, request_id)
    named = pair.prefill.source(epoch=pair.prefill.epoch).model_copy(update={"lease": pair.prefill.lease(request_id)})
    await asyncio.gather(*(rank.client.abort(request_id) for rank in pair.prefill.ranks))
    blocks = pair.decode.take(TOKENS)
    following = named.model_copy(update={"lease": pair.prefill.lease(request_id) + 1})
    waiting = asyncio.create_task(pair.decode.receive(request_id, blocks, source=following, attempt=1))
    kv, _ = await prefilled(pair, request_id)
    expected = pair.decode.expecting(kv, blocks)
    assert {each.lease for each in await waiting} == {following.lease}
    assert pair.decode.differences(expected) == ""
    late = await pair.decode.outcomes(request_id, blocks, source=named, attempt=2)
    assert all(isinstance(end, KvferryError) for end in late), late
    assert {end.code for end in late if isinstance(end, KvferryError)} <= {"lease_ended", "rank_failed", "aborted"}


async def test_a_router_may_name_the_lease_and_the_record_says_which_was_read(pair: Pair, request_id: str) -> None:
    _, leases = await prefilled(pair, request_id)
    number = pair.prefill.lease(request_id)
    assert {lease.number for lease in leases} == {number}
    (held,) = [each for each in await pair.prefill_routers[0].leases() if each.request_id == request_id]
    assert held.lease == number
    source = pair.prefill.source().model_copy(update={"lease": number})
    ordered = await pair.routers[1].order(OrderBody(request_id=request_id, source=source))
    await pair.decode.receive(request_id, pair.decode.take(TOKENS))
    record = await pair.routers[1].wait(ordered.transfer_id, timeout_s=TIMEOUT_S)
    assert (record.lease, record.source.lease if record.source else None) == (number, number)


async def test_ranks_that_an_order_gives_their_tables_read_a_lease_in_one_attempt(pair: Pair, request_id: str) -> None:
    """Rank 0 counts these, and sources know the number."""
    kv, leases = await prefilled(pair, request_id)
    attempts = []
    for _ in range(2):
        blocks = pair.decode.take(TOKENS)
        expected = pair.decode.expecting(kv, blocks)
        transfer_id = await order(pair, request_id, 1, destination=DestinationBody(tables=blocks.json()))
        record = await pair.routers[1].wait(transfer_id, timeout_s=TIMEOUT_S)
        assert record.state is TransferState.DONE, record
        assert pair.decode.differences(expected) == ""
        async with asyncio.timeout(TIMEOUT_S):
            assert [await lease.ended() for lease in leases] == [LeaseState.RELEASED] * 2
        ended = await pair.prefill_routers[0].leases(ended=100)
        (readers,) = [each.readers for each in ended if (each.request_id, each.lease) == (request_id, leases[0].number)]
        (attempt,) = {reader.attempt for reader in readers}
        attempts.append(attempt)
        kv, leases = await prefilled(pair, request_id)
    assert 0 < attempts[0] < attempts[1]


# several answers to one prompt: two requests of one engine come with one lease (docs/engines.md)


async def test_a_second_answer_that_waits_for_the_first_is_another_attempt(pair: Pair, request_id: str) -> None:
    """Another engine is still to read the lease; reading it twice counts as one engine that has read it."""
    kv, leases = await prefilled(pair, request_id, readers=2)
    for _ in range(2):
        await pair.decode.gets(request_id, kv, source=pair.prefill.source())
    assert not any(lease.over for lease in leases)
    attempts = [record.attempt for record in await pair.routers[0].transfers(request_id)]
    assert len(set(attempts)) == 2
    await asyncio.gather(*(rank.client.abort(request_id) for rank in pair.prefill.ranks))


async def test_a_second_answer_finds_a_lease_that_was_read_by_the_first_over(pair: Pair, request_id: str) -> None:
    """It has to share what the first one has received, or compute the prompt."""
    kv, leases = await prefilled(pair, request_id)
    await pair.decode.gets(request_id, kv, source=pair.prefill.source())
    async with asyncio.timeout(TIMEOUT_S):
        assert {await lease.ended() for lease in leases} == {LeaseState.RELEASED}
    before = pair.decode.snapshot()
    with pytest.raises(TransferFailed) as failed:
        await pair.decode.receive(request_id, pair.decode.take(TOKENS), source=pair.prefill.source())
    assert failed.value.code in ("lease_ended", "rank_failed") and failed.value.blocks_safe
    assert not pair.decode.differences(before)


async def test_a_second_answer_that_does_not_wait_is_refused_and_harms_nothing(pair: Pair, request_id: str) -> None:
    """On all ranks, by the engine's own client, and whatever the number of its attempt."""
    kv, theirs, blocks = Kv.random(TOKENS), pair.prefill.take(TOKENS), pair.decode.take(TOKENS)
    pair.prefill.write(kv, theirs)
    await pair.prefill.publish(request_id, theirs, 10, more=True)
    expected = pair.decode.expecting(kv, blocks)
    first = asyncio.create_task(pair.decode.receive(request_id, blocks, source=pair.prefill.source()))
    await until(lambda: is_in(pair.routers[0], request_id, TransferState.READING), "the first is read")
    refused = await pair.decode.outcomes(request_id, pair.decode.take(TOKENS), source=pair.prefill.source())
    assert [refusal.code for refusal in refused if isinstance(refusal, KvferryError)] == ["receive_pending"] * 3
    await pair.prefill.publish(request_id, theirs, TOKENS)
    await first
    assert not pair.decode.differences(expected)
