"""Nobody is called malformed for having died, or for what another peer has done to the process that tries metadata."""

from __future__ import annotations

import os
import signal
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from fleet import Daemons, ended, peer_stub
from lives import engine_on, published, receives
from test_hostile_metadata import impostor

from kvferry.errors import KvferryError
from kvferry.schemas import PeerRequest
from kvferry.v1 import peer_pb2
from kvferryd.demo.fleet import DaemonService

pytestmark = pytest.mark.anyio


def screen(daemon: DaemonService) -> int:
    """The process in which it tries peers' metadata."""
    pid = daemon.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    said = {int(child): Path(f"/proc/{child}/cmdline").read_bytes() for child in children}
    (found,) = [child for child, command in said.items() if b"kvferryd.transport.screening" in command]
    return found


async def test_a_screening_process_that_died_of_one_peer_speaks_against_no_other(
    daemons: Daemons, stack: AsyncExitStack
) -> None:
    (first,), (second,), (ours,) = [await daemons.start(f"dies-{name}") for name in ("first", "second", "reader")]
    dying, _ = await engine_on(stack, "dying", first)
    living, _ = await engine_on(stack, "living", second)
    reader, router = await engine_on(stack, "reader", ours)
    await router.prewarm(PeerRequest(engine_id="dying", address=dying.address))
    os.kill(screen(ours), signal.SIGKILL)
    kv, _ = await published(living, "r")
    await receives(reader, "r", kv, living.source())


async def test_a_peer_that_dies_while_it_is_met_is_unreachable(daemons: Daemons, stack: AsyncExitStack) -> None:
    """It has answered the handshake; by the time that its metadata is tried there is nobody."""
    (theirs,), (ours,) = [await daemons.start(name, 1, "--way", "direct") for name in ("met-source", "met-reader")]
    await engine_on(stack, "met", theirs)
    _, router = await engine_on(stack, "met-reader", ours)
    async with peer_stub(theirs) as stub:
        said = await stub.Handshake(peer_pb2.HandshakeRequest(protocol_min=1, protocol_max=1, engine_id="met"))
    await ended(theirs, signal.SIGKILL)
    async with impostor(said) as (service, address):
        service.moves_to(address)
        service.answers = 1
        with pytest.raises(KvferryError) as refused:
            await router.prewarm(PeerRequest(engine_id="met", address=address))
    assert refused.value.code == "peer_unreachable"
