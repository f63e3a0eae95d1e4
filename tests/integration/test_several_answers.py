"""Two requests of one engine come with one lease, as several answers to one prompt do: what an engine of one's own has
to do (docs/engines.md, "Which attempt, and which lease")."""

from __future__ import annotations

import asyncio

import pytest
from fleet import TIMEOUT_S, until
from pair import TOKENS, Pair, is_in, prefilled
from ranks import Kv

from kvferry.engine import TransferFailed
from kvferry.errors import KvferryError
from kvferry.schemas import LeaseState, TransferState

pytestmark = pytest.mark.anyio


async def received(pair: Pair, request_id: str, kv: Kv) -> None:
    """Received by all ranks, into blocks of this answer alone."""
    blocks, expected = pair.decode.take(TOKENS), pair.decode.snapshot()
    pair.decode.write_into(expected, kv, blocks)
    await pair.decode.receive(request_id, blocks, source=pair.prefill.source())
    assert not pair.decode.differences(expected)


async def test_a_second_answer_that_waits_for_the_first_is_another_attempt(pair: Pair, request_id: str) -> None:
    """Another engine is still to read the lease; reading it twice counts as one engine that has read it."""
    kv, leases = await prefilled(pair, request_id, readers=2)
    for _ in range(2):
        await received(pair, request_id, kv)
    assert not any(lease.over for lease in leases)
    attempts = [record.attempt for record in await pair.routers[0].transfers(request_id)]
    assert len(set(attempts)) == 2
    await asyncio.gather(*(rank.client.abort(request_id) for rank in pair.prefill.ranks))


async def test_a_second_answer_finds_a_lease_that_was_read_by_the_first_over(pair: Pair, request_id: str) -> None:
    """It has to share what the first one has received, or compute the prompt."""
    kv, leases = await prefilled(pair, request_id)
    await received(pair, request_id, kv)
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
