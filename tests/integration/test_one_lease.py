"""KV is of use only if every rank of a request has it, and of one lease."""

from __future__ import annotations

import asyncio

import pytest
from fleet import TIMEOUT_S
from pair import TOKENS, Pair, prefilled

from kvferry.schemas import LeaseState

pytestmark = pytest.mark.anyio


async def test_ranks_that_have_read_in_two_attempts_have_not_read_a_lease_together(pair: Pair, request_id: str) -> None:
    """The lease is there until all ranks have read it in one attempt: else the first would find it released."""
    kv, leases = await prefilled(pair, request_id)
    blocks, source = pair.decode.take(TOKENS), pair.prefill.source()
    first, *others = (rank.client for rank in pair.decode.ranks)
    await first.receive(request_id, blocks.tables(), source=source, attempt=1)
    (record,) = await pair.routers[0].transfers(request_id)
    await pair.routers[0].abort_transfer(record.transfer_id)  # the other ranks' parts of it, which wait
    await asyncio.gather(*(each.receive(request_id, blocks.tables(), source=source, attempt=2) for each in others))
    assert not any(lease.over for lease in leases)
    expected = pair.decode.snapshot()
    pair.decode.write_into(expected, kv, blocks)
    await first.receive(request_id, blocks.tables(), source=source, attempt=2)
    assert pair.decode.differences(expected) == ""
    async with asyncio.timeout(TIMEOUT_S):
        assert [await lease.ended() for lease in leases] == [LeaseState.RELEASED] * 2
