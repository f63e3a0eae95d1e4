"""Blocks that an abandoned read may still write belong to nobody else, until it is known that it cannot.

Over TCP, with a source that stands still in the middle of a read: NIXL cannot abort, so the READ goes on when the
source does, whatever has become of its request by then.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from fleet import TIMEOUT_S, Daemons, under_way, until
from pair import is_in
from ranks import Blocks, Kv
from remote import Remote, remote
from wire import BIG, NBYTES, TOKENS, MidRead, TcpPair, tcp_pair

from kvferry.errors import KvferryError
from kvferry.schemas import TransferState
from support import refused

pytestmark = pytest.mark.anyio
COUNT = TOKENS // BIG.block_size
BLOCKS = Blocks(tuple(range(COUNT)), 0)
"""The reader's, of the old request, and then of the new one."""
NEW = 2
"""Seed of its KV."""
OVERLAPS = (BLOCKS, Blocks((2 * COUNT, COUNT - 1), 1), Blocks((2 * COUNT,), 0))
"""All of them; one block of many; the block of the state."""


@pytest.fixture
async def pair(daemons: Daemons, request_id: str) -> AsyncIterator[TcpPair]:
    async with tcp_pair(daemons, request_id[-8:]) as pair:
        yield pair


@pytest.fixture
async def reader(pair: TcpPair) -> AsyncIterator[Remote]:
    """The engine that receives: a process of its own, beside the pair's."""
    async with remote(pair.reader_daemon, "decode", BIG) as reader:
        yield reader


async def test_blocks_of_a_cancelled_receive_are_given_to_nobody_until_they_are_quiet(
    pair: TcpPair, reader: Remote, stack: AsyncExitStack, request_id: str
) -> None:
    async with abandoned(pair, reader, request_id) as old:
        cancelling = await stack.enter_async_context(under_way(reader.cancel(old.request_id)))
        aborted = TransferState.ABORTED
        await until(lambda: is_in(pair.reader_router, old.request_id, aborted), "the transfer is aborted")
        assert await pair.quarantined() >= NBYTES
        await refuses(reader, request_id)
        with refused("deadline"):  # others are free: it is taken, and nobody orders it
            await reader.receive(f"{request_id}-free", Blocks((2 * COUNT,), 1), deadline_s=0.1)

    async def quiet() -> bool:
        return await pair.quarantined() == 0

    await until(quiet, "the abandoned read has ended")
    await asyncio.wait_for(cancelling, TIMEOUT_S)
    await receives_the_new(pair, reader, request_id)


async def test_an_engine_learns_when_the_blocks_of_an_aborted_receive_are_safe(
    pair: TcpPair, reader: Remote, stack: AsyncExitStack, request_id: str
) -> None:
    async with abandoned(pair, reader, request_id) as old:
        await pair.reader_router.abort_request(old.request_id)
        with pytest.raises(KvferryError):
            await asyncio.wait_for(asyncio.shield(old.receiving), TIMEOUT_S)
        (record,) = await pair.reader_router.transfers(old.request_id)
        assert 0 < record.phases_ms["moving"] <= record.phases_ms["reading"], "bytes moved until it was aborted"
        quiesced = await stack.enter_async_context(under_way(reader.quiesced(old.request_id)))
        await refuses(reader, request_id)
        assert not quiesced.done()
    await asyncio.wait_for(quiesced, TIMEOUT_S)
    await receives_the_new(pair, reader, request_id)  # with no further wait: safe is safe
    assert await pair.quarantined() == 0


async def test_a_daemon_stops_by_itself_while_a_read_is_not_quiet(daemons: Daemons, request_id: str) -> None:
    """The end of its agent alone ends that read: nothing is waited for before that, or the keeper kills the daemon."""
    async with (
        tcp_pair(daemons, request_id[-8:], kept=True) as pair,
        remote(pair.reader_daemon, "decode", BIG) as reader,
        abandoned(pair, reader, request_id) as old,
        under_way(reader.cancel(old.request_id)),
    ):
        aborted, daemon = TransferState.ABORTED, pair.reader_daemon
        await until(lambda: is_in(pair.reader_router, old.request_id, aborted), "the transfer is aborted")
        daemon.signal(signal.SIGTERM)  # its drain waits for nothing: the fleet says so
        assert await asyncio.to_thread(daemon.process.wait, TIMEOUT_S) == 0
        assert "killed" not in daemon.log.read_text()


@asynccontextmanager
async def abandoned(pair: TcpPair, reader: Remote, request_id: str) -> AsyncIterator[MidRead[int]]:
    """A request that is read into BLOCKS while its source stands still."""

    def receive(old: str) -> Coroutine[Any, Any, int]:
        return reader.receive(old, BLOCKS, pair.source.source())

    async with pair.stopped_in_mid_read(f"{request_id}-old", receive) as old:
        yield old


async def refuses(reader: Remote, request_id: str) -> None:
    """Every reservation that has a block in common with those of the abandoned read."""
    codes = []
    for number, blocks in enumerate(OVERLAPS):
        try:
            await reader.receive(f"{request_id}-{number}", blocks, deadline_s=TIMEOUT_S)  # a busy daemon may be slow
        except KvferryError as error:
            codes.append(error.code)
    assert codes == ["blocks_not_quiet"] * len(OVERLAPS)


async def receives_the_new(pair: TcpPair, reader: Remote, request_id: str) -> None:
    """The same blocks are reserved again, and hold what was read last."""
    kv, blocks = Kv.random(TOKENS, NEW), pair.source.take(TOKENS)
    pair.source.write(kv, blocks)
    await pair.source.publish(f"{request_id}-new", blocks, TOKENS)
    await reader.receive(f"{request_id}-new", BLOCKS, pair.source.source())
    assert await reader.differs(BLOCKS, TOKENS, NEW) == ""
