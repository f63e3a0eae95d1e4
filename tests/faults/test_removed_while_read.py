"""A peer that is removed while a read of it is under way stays loaded until that read is over.

Over TCP: with CMA a read is over inside NIXL's post, and none is ever seen under way.
"""

from __future__ import annotations

import asyncio
import signal

import pytest
from fleet import TCP_ALONE
from test_agent import WAIT_S, Reader, Source, a_reader, a_source

from kvferryd.transport.read import Read, TransportError

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", TCP_ALONE)


async def stopped_while_read(source: Source, reader: Reader) -> Read:
    """A read that is really under way: its source stands still."""
    source.process.send_signal(signal.SIGSTOP)
    read = reader.read(source, 0, len(reader.memory))
    while not read.in_flight:
        await reader.agent.register()  # the agent's thread takes turns: some of these later it has posted the read
    read.abandon()
    assert not read.quiet.done()
    return read


@pytest.mark.parametrize("again", [False, True])
async def test_it_is_unloaded_when_its_last_read_is_quiet_unless_it_was_added_again(*, again: bool) -> None:
    with a_source() as source:
        async with a_reader(source) as reader, asyncio.timeout(WAIT_S):
            read = await stopped_while_read(source, reader)
            await reader.agent.remove_peer(source.name)
            if again:
                await reader.agent.add_peer(source.peer)
            source.process.send_signal(signal.SIGCONT)
            await read.quiet
            if again:
                assert await reader.agent.peek(source.name, source.word(7)) == 7
                await reader.agent.remove_peer(source.name)
            with pytest.raises(TransportError):
                await reader.agent.peek(source.name, source.word(7))
