"""An engine id belongs to the daemons that had it first, until its epoch is over: a namesake gets nothing."""

from __future__ import annotations

import asyncio
import signal
from contextlib import AsyncExitStack
from dataclasses import dataclass

import pytest
from fleet import SPOKEN, Daemons, ended, peer_stub
from lives import TP1, engine_on, published, reads_from
from ranks import TestEngine
from test_hostile_metadata import impostor

from kvferry.engine import TransferFailed
from kvferry.router import RouterClient
from kvferry.schemas import PeerRequest, SourceBody
from kvferry.v1 import peer_pb2
from kvferryd.demo.fleet import DaemonService
from support import refused

pytestmark = pytest.mark.anyio


@dataclass
class Scene:
    """A source that its reader has read from, and a stranger with the engine id and the epoch of the source."""

    source: TestEngine
    stranger: TestEngine
    reader: TestEngine
    router: RouterClient

    async def reads(self, request_id: str, source: TestEngine) -> None:
        """Read what `source` has published, byte for byte, while the other has published something else under that
        name."""
        kv, _ = await published(source, request_id)
        await published(self.stranger if source is self.source else self.source, request_id)
        await self.reader.gets(request_id, kv, source=source.source())

    async def is_taken(self, request_id: str, source: SourceBody) -> None:
        with refused("engine_taken", TransferFailed):
            await self.reader.receive(request_id, self.reader.take(50), source=source)


@pytest.fixture(scope="module")
async def three(daemons: Daemons) -> list[DaemonService]:
    """Daemons of the source, the stranger and the reader, whose engines are others in each test."""
    started = await asyncio.gather(*(daemons.start(name) for name in ("source", "stranger", "reader")))
    return [daemon for (daemon,) in started]


@pytest.fixture
async def scene(three: list[DaemonService], stack: AsyncExitStack, request_id: str) -> Scene:
    name = request_id[-8:]
    source, stranger = [await TestEngine.start(f"e-{name}", [each], TP1, epoch="1") for each in three[:2]]
    reader, router = await engine_on(stack, f"r-{name}", three[2])
    scene = Scene(source, stranger, reader, router)
    stack.push_async_callback(lambda: scene.stranger.close())
    stack.push_async_callback(source.close)
    await scene.reads("first", source)
    return scene


async def at(scene: Scene) -> list[str]:
    """The addresses that the source's name stands for."""
    return [peer.address for peer in await scene.router.peers() if peer.engine_id == scene.source.engine_id]


async def test_a_stranger_with_the_same_engine_id_and_epoch_changes_nothing(scene: Scene) -> None:
    for turn in range(2):
        await published(scene.stranger, f"stolen-{turn}")
        await scene.is_taken(f"stolen-{turn}", scene.stranger.source())
        assert await at(scene) == [scene.source.address]
        await scene.reads(f"later-{turn}", scene.source)


async def test_who_forgets_a_peer_by_hand_takes_the_next_one(scene: Scene) -> None:
    await scene.router.forget_peer(scene.source.engine_id)
    await reads_from(scene.reader, scene.stranger, "on purpose")


async def test_a_stranger_that_names_the_real_daemons_leads_to_them_only(scene: Scene) -> None:
    """Its words on their memory do not count: each rank is asked at the address that its roster names."""
    async with peer_stub(scene.source.daemons[0]) as stub:
        name = scene.source.engine_id
        said = await stub.Handshake(peer_pb2.HandshakeRequest(**SPOKEN, engine_id=name))
    said.agent_name, said.agent_metadata = "a stranger's", b"anything"
    async with impostor(said) as (_, address):
        await scene.router.prewarm(PeerRequest(engine_id=name, address=address))
        assert await at(scene) == [scene.source.address]
        await scene.reads("through", scene.source)


async def test_ranks_that_do_not_name_the_same_ranks_are_no_engine(scene: Scene) -> None:
    """A stranger cannot stand beside the real ranks as one more."""
    async with peer_stub(scene.source.daemons[0]) as stub:
        name = scene.source.engine_id
        said = await stub.Handshake(peer_pb2.HandshakeRequest(**SPOKEN, engine_id=name))
    async with impostor(said) as (service, address):
        said.manifest.rank, said.manifest.world_size = 1, 2
        said.members.add(rank=1, address=address, epoch="1")
        service._said.CopyFrom(said)
        with refused("roster_incomplete"):
            await scene.router.prewarm(PeerRequest(engine_id=name, address=address))
        assert await at(scene) == [scene.source.address]


async def test_an_engine_that_has_started_elsewhere_is_found_once_the_old_one_is_over(scene: Scene) -> None:
    """The stranger starts anew, in an epoch of its own: it is one only for as long as the source lives. The last test:
    the source's daemon is killed."""
    await scene.stranger.close()
    scene.stranger = await TestEngine.start(scene.source.engine_id, scene.stranger.daemons, TP1, epoch="2")
    await scene.is_taken("too early", scene.stranger.source())
    await scene.reads("meanwhile", scene.source)
    await ended(scene.source.daemons[0], signal.SIGKILL)
    await reads_from(scene.reader, scene.stranger, "moved")
    assert await at(scene) == [scene.stranger.address]
