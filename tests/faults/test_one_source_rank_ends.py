"""A reader waits for more of one source rank while another one's daemon dies, or its lease ends: it is told."""

from __future__ import annotations

import asyncio
import signal
from contextlib import AsyncExitStack

import pytest
from fleet import TIMEOUT_S, Daemons, until
from ranks import Kv, Shape, TestEngine

from kvferry.engine import TransferFailed
from kvferry.router import RouterClient
from kvferry.schemas import Awaited, TransferState
from kvferryd.demo.fleet import DaemonService

pytestmark = pytest.mark.anyio
TOKENS, SOME, MORE = 40, 16, 32


@pytest.fixture(scope="module")
async def three(daemons: Daemons) -> list[DaemonService]:
    """Daemons of the source's ranks and the reader's: as the last test left them, one of them perhaps dead."""
    theirs, ours = await asyncio.gather(daemons.start("p", 2), daemons.start("d"))
    return theirs + ours


@pytest.mark.parametrize("dies", [True, False], ids=["its daemon dies", "its lease is revoked"])
async def test_a_source_rank_that_ends_is_noticed_while_another_is_waited_for(
    daemons: Daemons, three: list[DaemonService], stack: AsyncExitStack, request_id: str, dies: bool
) -> None:
    name = request_id[-8:]
    three[:] = [daemons.fleet.again(each) if each.process.poll() is not None else each for each in three]
    await daemons.fleet.ready(*three, timeout_s=TIMEOUT_S)
    theirs, ours = three[:2], three[2]
    source = await TestEngine.start(f"{name}-p", theirs, Shape.tp(2, num_blocks=16))
    reader = await TestEngine.start(f"{name}-d", [ours], Shape.tp(1, num_blocks=16))
    stack.push_async_callback(reader.close)
    behind, ahead = (rank.client for rank in source.ranks)
    stack.push_async_callback(behind.close)
    if not dies:
        stack.push_async_callback(ahead.close)
    blocks, given = reader.take(TOKENS), source.take(TOKENS)
    source.write(Kv.random(TOKENS), given)
    await behind.publish(request_id, given.tables(), SOME, more=True, lease=1)
    await ahead.publish(request_id, given.tables(), MORE, more=True, lease=1)
    receiving = asyncio.create_task(
        reader.ranks[0].client.receive(request_id, blocks.tables(), source=source.source(), deadline_s=4 * TIMEOUT_S)
    )
    async with RouterClient(ours.url) as router:

        async def waits() -> bool:
            found = await router.transfers(request_id)
            return any(each.state is TransferState.READING and each.waits_for is Awaited.PUBLISH for each in found)

        await until(waits, "it waits for the rank that is behind")
    if dies:
        theirs[1].signal(signal.SIGKILL)
    else:
        await ahead.abort(request_id)
    with pytest.raises(TransferFailed) as failed:
        await asyncio.wait_for(receiving, TIMEOUT_S)
    assert failed.value.code == ("peer_unreachable" if dies else "lease_ended")
    if dies:
        await asyncio.to_thread(theirs[1].process.wait, TIMEOUT_S)  # or the next test takes it for one that lives
        await ahead.close()
