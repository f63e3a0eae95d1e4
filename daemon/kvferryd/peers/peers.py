"""The engines that this daemon reads from: handshaken once, kept warm, forgotten when they are stale."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator

from kvferry.errors import LONGEST, KvferryError, PeerFailed, Unavailable, shorten
from kvferry.manifest import Manifest
from kvferry.protocol import peers_events as e
from kvferry.v1 import peer_pb2
from kvferryd.aio import Tasks
from kvferryd.config import Config
from kvferryd.engine import Engine
from kvferryd.memory.node import NodeDir
from kvferryd.observe import logs
from kvferryd.observe.metrics import Metrics
from kvferryd.peers.certificates import Certificates
from kvferryd.peers.channels import Channels
from kvferryd.peers.handshake import NO_WAY, Handshakes
from kvferryd.peers.introduce import Introductions
from kvferryd.peers.meeting import Meeting
from kvferryd.peers.peer import PeerEngine
from kvferryd.peers.remembered import Remembered
from kvferryd.transport import ucx
from kvferryd.transport.metadata import parse
from kvferryd.transport.read import TransportError
from kvferryd.transport.screen import Screen

log = logs.get(__name__)


class Peers:
    """The peers of all engines of ours. Owns the channels, and the screen for NIXL metadata."""

    def __init__(
        self,
        config: Config,
        metrics: Metrics,
        certificates: Certificates | None = None,
        remembered: Remembered | None = None,
        node: NodeDir | None = None,
    ) -> None:
        """remembered: none without a keeper."""
        self._metrics, self._remembered = metrics, remembered or Remembered()
        self.channels = Channels(config, certificates)
        self._introductions = Introductions(self.channels, config.connect_timeout_s)
        self._handshakes = Handshakes(config, self._introductions, Screen(), node)
        self._of: dict[Engine, Meeting] = {}
        self._preparing = Tasks()

    def __iter__(self) -> Iterator[PeerEngine]:
        return iter([peer for meeting in self._of.values() for peer in meeting])

    @property
    def held_up(self) -> str:
        """Why no handshake goes on for now; empty where they do."""
        return self._handshakes.screen.held_up

    def expect(self, engine: Engine) -> None:
        """An engine is there that may read: meet whom it had met before, and do now what its next handshake would wait
        for."""
        self._prepare()
        if had := self._remembered.of(engine.engine_id).met:
            self._meeting(engine).take_over(had)

    def _prepare(self) -> None:
        self._preparing.spawn(self._handshakes.screen.prepare())

    async def try_reader(self, asked: peer_pb2.HandshakeRequest, within_s: float) -> None:
        """Make sure that NIXL here has a way to a reader's agent, where the kernel has none over TCP. UCX ends the
        process that is read by an agent to which it has none: another process tries it. Raises KvferryError:
        `peer_unreachable`, `malformed_metadata`, ..."""
        if await asyncio.to_thread(ucx.routed, [each.partition(" ")[0] for each in asked.ucx]):
            return
        metadata = await asyncio.to_thread(parse, asked.agent_name, asked.agent_connection)
        try:
            async with asyncio.timeout(within_s):
                await self._handshakes.screen.check(metadata, (), within_s)
        except TimeoutError:
            why, remedy = f"the source could not try its way to the reader within {within_s:g} s", "try again"
            raise Unavailable("peer_unreachable", why, field="timeout_s", value=within_s, remedy=remedy) from None
        except TransportError as error:
            if NO_WAY not in str(error.value):
                raise
            at = shorten(", ".join(asked.ucx), LONGEST)
            why = f"the source has no way back to the reader, whose UCX is at {at}"
            remedy = (
                "give the source's network interface a route to that address, which may be the default route, or let "
                "the reader's UCX use an interface that the source reaches (NET_DEVICES in ucx)"
            )
            raise PeerFailed("peer_unreachable", why, field="ucx", value=at, remedy=remedy) from None

    def awaited(self, engine: Engine) -> int:
        """Peers of the daemon before this one that are to be known before the engine is said to be ready."""
        meeting = self._of.get(engine)
        return 0 if meeting is None else meeting.awaited

    async def get(
        self, engine: Engine, engine_id: str, address: str, epoch: str = "", *, ordered: bool = True
    ) -> PeerEngine:
        """The peer engine, from memory or by a handshake that concurrent callers share.

        ordered: an order names this engine at this address. Raises KvferryError: `peer_unreachable`, `unknown_engine`,
        `engine_taken`, `stale_epoch`, `protocol`, ...
        """
        return await self._meeting(engine).get(engine_id, address, epoch, ordered=ordered)

    async def use(self, engine: Engine, engine_id: str, address: str, epoch: str = "") -> PeerEngine:
        """As `get`; its names stay loaded and its memory stays mapped until `leave`."""
        while (peer := await self.get(engine, engine_id, address, epoch)).stale:
            pass  # forgotten between the end of its handshake and this turn: the next `get` shakes hands anew
        self._tell(peer, e.Use)
        return peer

    def leave(self, peer: PeerEngine) -> None:
        """A transfer is quiet: its use of the peer ends. Its names stay loaded until then (see `PeerEngine.users`)."""
        self._tell(peer, e.Leave)

    def forget(self, peer: PeerEngine) -> None:
        """Drop a peer engine that is stale or was asked to be forgotten. The next order shakes hands anew.
        Idempotent."""
        self._tell(peer, e.Forget)

    def _tell(self, peer: PeerEngine, event: type[e.Use | e.Leave | e.Forget]) -> None:
        meeting = self._of.get(peer.own)
        if meeting is not None and peer.place is not None:  # else our engine has ended, and the peer with it
            meeting.on(event(peer.place.number))

    def notice(self, engine: Engine) -> None:
        """The roster of our engine has changed: peers may know it by one that is over."""
        if (meeting := self._of.get(engine)) is not None:
            meeting.notice()

    def want(self, engine: Engine, addresses: tuple[str, ...]) -> None:
        """Meet whatever engines are at these addresses, and keep them: until this is called again with others."""
        if not engine.session.retiring:
            self._meeting(engine).want(addresses)

    def _meeting(self, engine: Engine) -> Meeting:
        meeting = self._of.get(engine)
        if meeting is None:
            if engine.session.retiring:
                raise _gone(engine)
            about = self._handshakes, self._introductions, self._metrics, self._on_shaken
            meeting = self._of[engine] = Meeting(engine, *about)
        return meeting

    def _on_shaken(self, meeting: Meeting) -> None:
        self._prepare()
        self._remembered.put(meeting.engine.engine_id, met=meeting.machine.wanted.had)

    async def renew(self) -> None:
        """Shake hands anew with everybody, by what proves us now. Transfers under way go on where they read."""
        await asyncio.gather(*(self._of[peer.own].renew(peer) for peer in self))

    async def manifests(self, engine: Engine) -> dict[int, Manifest | KvferryError]:
        """The manifest of every rank of an engine of ours; the error where its daemon does not tell."""

        async def manifest(rank: int, address: str) -> Manifest | KvferryError:
            if rank == engine.rank:
                return engine.manifest
            try:
                told, _ = await self._introductions.ask(engine, engine.engine_id, address)
            except KvferryError as error:
                return error
            told.let_go()
            return told.manifest

        members = dict(engine.members)
        return dict(zip(members, await asyncio.gather(*itertools.starmap(manifest, members.items())), strict=True))

    def unbind(self, engine_id: str) -> bool:
        """The next one to answer to this engine id is its owner. Returns whether it had one."""
        bound = any(meeting.machine.is_bound(engine_id) for meeting in self._of.values())
        for meeting in self._of.values():  # a meeting that has lost it may look for it still
            meeting.on(e.Unbind(engine_id))
            self._remembered.put(meeting.engine.engine_id, met=meeting.machine.wanted.had)
        return bound

    async def forget_engine(self, engine: Engine) -> None:
        """Our own engine is retired, its agent with it: nothing to unload."""
        if (meeting := self._of.pop(engine, None)) is not None:
            await meeting.end(_gone(engine))

    def forgotten(self) -> Iterator[tuple[str, e.Home]]:
        """The engines that were known and are not any more, with where they were."""
        return (each for meeting in list(self._of.values()) for each in meeting.machine.forgotten())

    def of_engine(self, engine_id: str) -> list[PeerEngine]:
        """The peer engine with this id, as each engine of ours knows it."""
        return [peer for peer in self if peer.engine_id == engine_id]

    async def close(self) -> None:
        await asyncio.gather(*(meeting.end(_gone(engine)) for engine, meeting in self._of.items()))
        self._of.clear()
        await self._preparing.end()
        await self._handshakes.screen.close()
        await self.channels.close()


def _gone(engine: Engine) -> Unavailable:
    return Unavailable("engine_gone", f"engine {engine.engine_id} was retired during the handshake")
