"""A peer is not called malformed for having died, or for what another peer has done to the process that tries
metadata."""

from __future__ import annotations

import asyncio
import signal
from contextlib import AsyncExitStack

import numpy as np
import pytest
from fleet import SPOKEN, TCP_ALONE, Daemons, ended, peer_stub, screens
from lives import engine_on, reads_from
from test_agent import a_source
from test_hostile_metadata import impostor, inner

from kvferry.errors import Full, KvferryError
from kvferry.router import RouterClient
from kvferry.schemas import PeerRequest
from kvferry.v1 import peer_pb2
from kvferryd.commands.cli import main
from kvferryd.transport.agent import Agent
from kvferryd.transport.metadata import Metadata, parse
from kvferryd.transport.read import Span, TransportError
from kvferryd.transport.screen import MOST, Screen

pytestmark = pytest.mark.anyio
WAIT_S = 60.0


async def test_a_screening_process_that_died_of_one_peer_speaks_against_no_other(
    daemons: Daemons, stack: AsyncExitStack
) -> None:
    (first,), (second,), (ours,) = [await daemons.start(f"dies-{name}") for name in ("first", "second", "reader")]
    dying, _ = await engine_on(stack, "dying", first)
    living, _ = await engine_on(stack, "living", second)
    reader, router = await engine_on(stack, "reader", ours)
    await router.prewarm(PeerRequest(engine_id="dying", address=dying.address))
    (screen,) = screens(ours)
    screen.kill()
    await reads_from(reader, living, "r")


async def of_the_dead(
    daemons: Daemons, stack: AsyncExitStack, name: str
) -> tuple[peer_pb2.HandshakeReply, RouterClient]:
    """(the handshake of an engine whose daemon is dead, the router of one that may read from it)"""
    (theirs,), (ours,) = [await daemons.start(each, 1, "--way", "direct") for each in (f"{name}-source", name)]
    await engine_on(stack, name, theirs)
    _, router = await engine_on(stack, f"{name}-reader", ours)
    async with peer_stub(theirs) as stub:
        said = await stub.Handshake(peer_pb2.HandshakeRequest(**SPOKEN, engine_id=name))
    await ended(theirs, signal.SIGKILL)
    return said, router


@pytest.mark.slow
async def test_a_peer_that_dies_while_it_is_met_is_unreachable(daemons: Daemons, stack: AsyncExitStack) -> None:
    """It has answered the handshake; by the time that its metadata is tried there is nobody."""
    said, router = await of_the_dead(daemons, stack, "met")
    async with impostor(said) as (service, address):
        service.moves_to(address)
        service.answers = 1
        with pytest.raises(KvferryError) as refused:
            await router.prewarm(PeerRequest(engine_id="met", address=address))
    assert refused.value.code == "peer_unreachable"


@pytest.mark.slow
async def test_a_daemon_that_answers_and_cannot_be_read_is_named(
    daemons: Daemons, stack: AsyncExitStack, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its peer port answers every handshake, and nobody is where NIXL has to connect."""
    said, router = await of_the_dead(daemons, stack, "apart")
    async with impostor(said) as (service, address):
        service.moves_to(address)
        with pytest.raises(KvferryError) as refused:
            await router.prewarm(PeerRequest(engine_id="apart", address=address))
        (unmet,) = (await router.neighbours()).unmet
        assert (unmet.address, unmet.failures, unmet.last_error.code) == (address, 0, refused.value.code)
        (warning,) = (await router.ready()).warnings
        assert f"{address} answers and cannot be read: " in warning
        for command in ("status", "peers"):
            assert await asyncio.to_thread(main, (command, "--daemon", router.url)) == 1
            shown = capsys.readouterr().out
            assert address in shown
            assert unmet.last_error.message in shown


async def sources(stack: AsyncExitStack, count: int) -> tuple[Span, list[Metadata]]:
    """Memory of this process, and the metadata of so many agents that have it registered."""
    words, peers = np.zeros(8, dtype=np.uint64), list[Metadata]()
    span = Span(words.ctypes.data, words.nbytes, "host")
    stack.callback(lambda: words.sum())  # it lives until the agents are closed
    for number in range(count):
        agent = Agent(f"tried-{number}")
        stack.push_async_callback(agent.close)
        await agent.start()
        peers.append(parse(agent.name, await agent.register(span)))
    return span, peers


async def test_a_peer_that_kills_the_process_which_tries_it_harms_no_other(
    monkeypatch: pytest.MonkeyPatch, stack: AsyncExitStack
) -> None:
    monkeypatch.setenv("UCX_TLS", TCP_ALONE)
    screen = Screen()
    stack.push_async_callback(screen.close)
    span, peers = await sources(stack, 6)
    address = inner(peers[2].blob)[0]
    hostile = bytearray(peers[2].blob)
    hostile[address.start : address.stop] = bytes(len(address))
    peers[2] = Metadata(peers[2].alias, bytes(hostile))
    told = await asyncio.gather(*(screen.check(each, [span], WAIT_S) for each in peers), return_exceptions=True)
    assert isinstance(told.pop(2), TransportError)
    assert told == [None] * 5


async def test_peers_whose_fabric_is_silent_keep_no_other_waiting(
    monkeypatch: pytest.MonkeyPatch, stack: AsyncExitStack
) -> None:
    """Their daemons answer, and their NIXL does not: each is tried for as long as its caller says, and beside it others
    are tried to their end."""
    monkeypatch.setenv("UCX_TLS", TCP_ALONE)
    screen = Screen()
    stack.push_async_callback(screen.close)
    span, peers = await sources(stack, 6)
    with a_source() as silent, a_source() as silent_too:
        for source in (silent, silent_too):
            source.process.send_signal(signal.SIGSTOP)
        late = [asyncio.create_task(screen.check(each.peer, [each.span], WAIT_S)) for each in (silent, silent_too) * 2]
        for peer in peers:
            await screen.check(peer, [span], WAIT_S)
            assert not any(task.done() for task in late)
        await asyncio.gather(*(screen.check(peer, [span], WAIT_S) for peer in peers))
        assert not any(task.done() for task in late)
        for source in (silent, silent_too):
            source.process.send_signal(signal.SIGCONT)
        await asyncio.gather(*late)


async def test_more_peers_than_may_wait_are_refused_by_name(stack: AsyncExitStack) -> None:
    screen = Screen()
    stack.push_async_callback(screen.close)
    span, (peer,) = await sources(stack, 1)
    asked = [asyncio.create_task(screen.check(peer, [span], WAIT_S)) for _ in range(MOST)]
    await asyncio.sleep(0)  # each has its place now
    with pytest.raises(Full) as refused:
        await screen.check(peer, [span], WAIT_S)
    assert (refused.value.code, refused.value.value) == ("screen_full", str(MOST))
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    await screen.check(peer, [span], WAIT_S)
