"""Handshakes, again and again: the process that tries peers' metadata keeps a connection of each, so it is replaced."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import AsyncExitStack

import psutil
import pytest
from bounded import bounded
from fleet import Daemons, screens, until
from lives import TP1, engine_on, reads_from
from ranks import TestEngine
from wire import TCP

from kvferry.schemas import PeerRequest, PeerState
from kvferryd.demo.fleet import DaemonService

pytestmark = pytest.mark.anyio
LOADS = 16


def files_of_children(daemon: DaemonService) -> int:
    return sum(child.num_fds() for child in psutil.Process(daemon.process.pid).children())


async def test_a_peer_that_is_forgotten_and_met_again(
    daemons: Daemons, stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounded(monkeypatch, {"kvferryd.transport.screen.LOADS": LOADS})
    (ours,), (theirs,) = await daemons.start("meeting", 1, *TCP), await daemons.start("met", 1, *TCP)
    reader, router = await engine_on(stack, "meeting", ours)
    source, _ = await engine_on(stack, "met", theirs)
    await reads_from(reader, source, "first")
    held = [await asyncio.to_thread(files_of_children, ours)]
    for _ in range(2 * LOADS):
        await router.forget_peer("met")
        await router.prewarm(PeerRequest(engine_id="met", address=source.address))
        held.append(await asyncio.to_thread(files_of_children, ours))
    assert max(held) <= held[0] + LOADS
    await reads_from(reader, source, "last")


def connections_of_screens(daemon: DaemonService) -> int:
    """To others: UCX in it has one with itself."""
    found = 0
    for screen in screens(daemon):
        with contextlib.suppress(psutil.Error):  # it has ended
            held = screen.net_connections("tcp")
            own = {connection.laddr for connection in held}
            found += sum(bool(connection.raddr) and connection.raddr not in own for connection in held)
    return found


async def test_the_connections_by_which_a_peer_was_tried_end_soon(
    daemons: Daemons, stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both daemons would hold them for as long as the process that tried it lives."""
    bounded(monkeypatch, {"kvferryd.transport.screen.RESTS_S": 0.5})
    (ours,), (theirs,) = await daemons.start("trying", 1, *TCP), await daemons.start("tried", 1, *TCP)
    _, router = await engine_on(stack, "trying", ours)
    source, _ = await engine_on(stack, "tried", theirs)
    body = PeerRequest(engine_id="tried", address=source.address)

    async def none() -> bool:
        return await asyncio.to_thread(connections_of_screens, ours) == 0

    for _ in range(2):
        await router.prewarm(body)
        await until(none, "no process holds one to the peer")
        await router.forget_peer("tried")


@pytest.mark.slow
async def test_a_fleet_that_was_replaced_leaves_nothing(daemons: Daemons, stack: AsyncExitStack) -> None:
    """Its engines come again under other names: those that are lost go when the first of the others is met."""
    (ours,), (theirs,) = await daemons.start("keeps", 1, *TCP), await daemons.start("replaced", 1, *TCP)
    reader, router = await engine_on(stack, "keeps", ours)
    before = [await TestEngine.start(f"before-{n}", [theirs], TP1) for n in range(4)]
    for source in before:
        await router.prewarm(PeerRequest(engine_id=source.engine_id, address=source.address))
    for source in before:
        await source.close()

    async def lost() -> bool:
        return not any(peer.state is PeerState.CONNECTED for peer in await router.peers())

    await until(lost, "they are lost")
    after, _ = await engine_on(stack, "after", theirs)
    await reads_from(reader, after, "r")
    assert {peer.engine_id for peer in await router.peers()} == {"after"}
