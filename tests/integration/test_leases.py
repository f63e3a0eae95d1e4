"""Leases that end while they are published or read."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import httpx
import pytest
from fleet import TIMEOUT_S
from lives import engine_on
from pair import MANY, TOKENS, Pair, all_read, half_published
from ranks import Kv, Shape, TestEngine

from kvferry.engine import Received
from kvferry.errors import KvferryError
from kvferry.schemas import LeaseState, TransferState
from kvferryd.demo.fleet import DaemonService

pytestmark = pytest.mark.anyio
ONE = Shape.tp(1, num_blocks=64)


def revoked_unheard(engine: TestEngine, request_id: str) -> None:
    """The lease ends on every rank. While this blocks the engine hears nothing."""
    for daemon in engine.daemons:
        httpx.delete(f"{daemon.url}/v1/leases/{request_id}", trust_env=False).raise_for_status()


async def test_a_publish_that_crosses_the_end_of_its_lease_is_refused_and_the_next_number_is_another_lease(
    pair: Pair, request_id: str
) -> None:
    """Else its engine would take the new lease for over, and reuse blocks that are served."""
    _, blocks = pair.prefill.filled(TOKENS)
    before = await pair.prefill.publish(request_id, blocks, 10, more=True)
    revoked_unheard(pair.prefill, request_id)
    number = pair.prefill.lease(request_id)
    crossing = [rank.client.publish(request_id, blocks.tables(), TOKENS, lease=number) for rank in pair.prefill.ranks]
    for refused in await asyncio.gather(*crossing, return_exceptions=True):
        assert isinstance(refused, KvferryError) and refused.code == "lease_ended", refused
    assert [await lease.ended() for lease in before] == [LeaseState.REVOKED] * 2
    after = await pair.prefill.publish(request_id, blocks, TOKENS)
    assert not any(lease.over for lease in after) and all(lease.number > number for lease in after)
    received = await pair.decode.receive(request_id, pair.decode.take(TOKENS), source=pair.prefill.source())
    assert {each.lease for each in received} == {pair.prefill.lease(request_id)}
    async with asyncio.timeout(TIMEOUT_S):
        assert [await lease.ended() for lease in after] == [LeaseState.RELEASED] * 2


async def test_an_engine_of_one_rank_may_leave_that_to_its_client(
    pair: Pair, near: DaemonService, stack: AsyncExitStack, request_id: str
) -> None:
    engine, _ = await engine_on(stack, "counted", near, ONE)
    client, blocks = engine.ranks[0].client, engine.take(TOKENS)
    engine.write(Kv.random(TOKENS), blocks)
    before = await client.publish(request_id, blocks.tables(), 10, more=True)
    revoked_unheard(engine, request_id)
    after = await client.publish(request_id, blocks.tables(), TOKENS)
    assert await before.ended() is LeaseState.REVOKED
    assert not after.over and after.number > before.number
    received = await pair.decode.receive(request_id, pair.decode.take(TOKENS), source=engine.source())
    assert {each.lease for each in received} == {after.number}
    async with asyncio.timeout(TIMEOUT_S):
        assert await after.ended() is LeaseState.RELEASED


async def test_a_read_is_never_done_when_its_lease_was_revoked_meanwhile(pair: Pair, request_id: str) -> None:
    source = await half_published(pair, request_id)
    receiving = asyncio.create_task(
        pair.decode.outcomes(request_id, pair.decode.take(MANY), source=pair.prefill.source())
    )
    await all_read(pair.routers[0], request_id)
    await pair.prefill.publish(request_id, source, MANY - 1, more=True)  # now they have a lot to read
    await asyncio.gather(*(router.revoke_lease(request_id) for router in pair.prefill_routers))
    (record,) = await pair.routers[0].transfers(request_id, wait_s=20)
    assert record.state is TransferState.FAILED
    assert {share.error.code for share in record.ranks if share.error} & {"torn", "lease_ended"}
    assert not any(isinstance(outcome, Received) for outcome in await receiving)
