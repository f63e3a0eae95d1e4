"""A request id that comes again after it was done is another attempt: bytes move again, and they are the new ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from fleet import Daemons, under_way, until
from lives import TP1
from pair import is_in
from ranks import STATE_NBYTES, TOKEN_NBYTES, Blocks
from remote import Remote, remote

from kvferry.errors import KvferryError
from kvferry.router import RouterClient
from kvferry.schemas import OrderBody, SourceBody, TransferState

pytestmark = pytest.mark.anyio
TOKENS = 50
NBYTES = TOKENS * TOKEN_NBYTES + STATE_NBYTES
BLOCKS, ELSEWHERE = Blocks((3, 1, 4, 15), 9), Blocks((2, 6, 5, 8), 7)
FIRST, SECOND, UNRELATED = 1, 2, 3
"""Seeds of KV."""
NUMBERED = 1 << 20
"""An attempt that the engine numbers itself: above all that its client has counted."""


@pytest.fixture(scope="module")
async def engines(daemons: Daemons) -> AsyncIterator[dict[str, Remote]]:
    """Each a process of its own, at a daemon of its own."""
    names = ("first", "second", "decode")
    started = await asyncio.gather(*(daemons.start(name) for name in names))
    async with AsyncExitStack() as stack:
        yield {
            name: await stack.enter_async_context(remote(daemon, name, TP1))
            for name, (daemon,) in zip(names, started, strict=True)
        }


@pytest.fixture
async def decode(engines: dict[str, Remote], request_id: str) -> Remote:
    """It has received the request from the engine `first`, has used it up, and has put other KV into its blocks."""
    source, decode = engines["first"], engines["decode"]
    await source.publish(request_id, BLOCKS, TOKENS, FIRST)
    assert await decode.receive(request_id, BLOCKS, source.source()) == NBYTES
    assert await decode.differs(BLOCKS, TOKENS, FIRST) == ""
    assert await source.ended(request_id) == "released"
    await decode.write(BLOCKS, TOKENS, UNRELATED)
    return decode


@pytest.mark.parametrize("by", ["engine", "router", "attempt"])
@pytest.mark.parametrize("name", ["first", "second"])
async def test_equal_blocks_are_read_again_from_a_source_that_holds_something_else(
    engines: dict[str, Remote], decode: Remote, request_id: str, name: str, by: str
) -> None:
    """From the source of the first time, which has published anew, and from another."""
    source = engines[name]
    await source.publish(request_id, ELSEWHERE, TOKENS, SECOND)
    match by:
        case "engine":
            nbytes = await decode.receive(request_id, BLOCKS, source.source())
        case "attempt":
            nbytes = await decode.receive(request_id, BLOCKS, source.source(), attempt=NUMBERED)
        case _:
            nbytes = await receive_as_ordered(decode, request_id, source.source())
    assert await decode.differs(BLOCKS, TOKENS, SECOND) == ""
    assert nbytes == NBYTES
    assert await source.ended(request_id) == "released"


async def receive_as_ordered(decode: Remote, request_id: str, source: SourceBody) -> int:
    """The engine reserves, and a router orders."""
    async with RouterClient(decode.daemon.url) as router, under_way(decode.receive(request_id, BLOCKS)) as receiving:

        async def reserved() -> bool:
            return receiving.done() or await is_in(router, request_id, TransferState.WAITING)

        await until(reserved, "the reservation arrives")
        await router.order(OrderBody(request_id=request_id, source=source))
        return await receiving


async def test_what_is_no_longer_published_is_not_done_again(
    engines: dict[str, Remote], decode: Remote, request_id: str
) -> None:
    with pytest.raises(KvferryError) as failed:
        await decode.receive(request_id, BLOCKS, engines["first"].source(), deadline_s=0.5)
    assert failed.value.code in ("deadline", "lease_ended"), "by whether the source still remembers the lease"
    assert await decode.differs(BLOCKS, TOKENS, UNRELATED) == ""
