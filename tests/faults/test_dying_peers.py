"""Nobody is called malformed for having died, or for what another peer has done to the process that tries metadata."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from contextlib import AsyncExitStack

import numpy as np
import pytest
from fleet import SPOKEN, TCP_ALONE, Daemons, ended, peer_stub, screens
from lives import engine_on, published, receives
from test_hostile_metadata import impostor, inner

from kvferry.errors import KvferryError
from kvferry.schemas import PeerRequest
from kvferry.v1 import peer_pb2
from kvferryd.transport.agent import Agent
from kvferryd.transport.metadata import Metadata, Screen, parse
from kvferryd.transport.read import Span, TransportError

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
    kv, _ = await published(living, "r")
    await receives(reader, "r", kv, living.source())


@pytest.mark.slow
async def test_a_peer_that_dies_while_it_is_met_is_unreachable(daemons: Daemons, stack: AsyncExitStack) -> None:
    """It has answered the handshake; by the time that its metadata is tried there is nobody."""
    (theirs,), (ours,) = [await daemons.start(name, 1, "--way", "direct") for name in ("met-source", "met-reader")]
    await engine_on(stack, "met", theirs)
    _, router = await engine_on(stack, "met-reader", ours)
    async with peer_stub(theirs) as stub:
        said = await stub.Handshake(peer_pb2.HandshakeRequest(**SPOKEN, engine_id="met"))
    await ended(theirs, signal.SIGKILL)
    async with impostor(said) as (service, address):
        service.moves_to(address)
        service.answers = 1
        with pytest.raises(KvferryError) as refused:
            await router.prewarm(PeerRequest(engine_id="met", address=address))
    assert refused.value.code == "peer_unreachable"


class Watched(Screen):
    """Notes how many peers are tried at once."""

    def __init__(self) -> None:
        super().__init__()
        self.together: list[int] = []

    async def _answers(self, together: Sequence[object], timeout_s: float) -> list[str]:
        self.together.append(len(together))
        return await super()._answers(together, timeout_s)  # type: ignore[arg-type]  # passed on as they are


async def test_peers_that_wait_are_tried_together_and_one_of_them_harms_no_other(
    monkeypatch: pytest.MonkeyPatch, stack: AsyncExitStack
) -> None:
    monkeypatch.setenv("UCX_TLS", TCP_ALONE)
    words, screen = np.zeros(8, dtype=np.uint64), Watched()
    stack.push_async_callback(screen.close)
    span, peers = Span(words.ctypes.data, words.nbytes, "host"), list[Metadata]()
    for number in range(6):
        agent = Agent(f"tried-{number}")
        stack.push_async_callback(agent.close)
        await agent.start()
        peers.append(parse(agent.name, await agent.register(span)))
    address = inner(peers[2].blob)[0]
    hostile = bytearray(peers[2].blob)
    hostile[address.start : address.stop] = bytes(len(address))
    peers[2] = Metadata(peers[2].alias, bytes(hostile))
    told = await asyncio.gather(*(screen.check(each, [span], WAIT_S) for each in peers), return_exceptions=True)
    assert isinstance(told.pop(2), TransportError)
    assert told == [None] * 5
    assert screen.together[:2] == [1, 5]  # whoever comes first is not kept waiting for others
