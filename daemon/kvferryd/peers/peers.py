"""The engines that this daemon reads from: handshaken once, kept warm, forgotten when they are stale.

Each engine of ours has a `Meeting`, which carries out what its machine says (kvferry.protocol.peers).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import assert_never

from kvferry.errors import LONGEST, Internal, KvferryError, PeerFailed, Unavailable, shorten
from kvferry.manifest import Manifest
from kvferry.protocol import peers as protocol
from kvferry.protocol import peers_events as e
from kvferry.v1 import peer_pb2
from kvferryd.aio import Tasks, Timer, all_over, carry_out, settle
from kvferryd.config import Config
from kvferryd.engine import Engine
from kvferryd.memory.node import NodeDir
from kvferryd.observe import logs
from kvferryd.observe.metrics import Metrics
from kvferryd.peers.certificates import Certificates
from kvferryd.peers.channels import Channels
from kvferryd.peers.handshake import NO_WAY, Handshakes
from kvferryd.peers.inbound import AWAITED_S
from kvferryd.peers.introduce import Introductions
from kvferryd.peers.peer import PeerEngine
from kvferryd.peers.remembered import Remembered
from kvferryd.transport import ucx
from kvferryd.transport.metadata import parse
from kvferryd.transport.read import TransportError
from kvferryd.transport.screen import Screen

log = logs.get(__name__)
END_S = 5.0
"""The longest wait for what is under way when our engine ends."""


class Meeting:
    """Owns the handshakes, what they have made, and the tasks that unload it. `on` hands an event to the machine and
    carries out its effects, in order."""

    def __init__(
        self, engine: Engine, handshakes: Handshakes, introductions: Introductions, metrics: Metrics,
        on_shaken: Callable[[Meeting], None],
    ) -> None:  # fmt: skip
        """on_shaken: called at the end of each handshake."""
        self.engine, self._handshakes, self._introductions = engine, handshakes, introductions
        self._metrics, self._on_shaken = metrics, on_shaken
        self.machine = protocol.Peers(engine.engine_id, handshakes.within_s)
        self._met: dict[int, PeerEngine] = {}
        """Peers by the number of their handshake, until they are unloaded."""
        self._shaking, self._naming, self._unloading = Tasks(), Tasks(), Tasks()
        self._under_way: dict[int, tuple[asyncio.Task[None], float]] = {}
        """Handshakes by number, and when each began."""
        self._answers: dict[int, asyncio.Future[PeerEngine]] = {}
        """By caller."""
        self._callers = itertools.count(1)
        self._timer = Timer(lambda: self.on(e.Tick()))
        self._taken_over_at = 0.0

    def __iter__(self) -> Iterator[PeerEngine]:
        """The known peers."""
        return (self._met[peer.number] for peer in self.machine)

    async def get(self, engine_id: str, address: str, epoch: str = "", *, ordered: bool = True) -> PeerEngine:
        """The peer engine, from memory or by a handshake that concurrent callers share.

        ordered: an order names this engine at this address. Raises KvferryError: `peer_unreachable`, `unknown_engine`,
        `engine_taken`, `stale_epoch`, `protocol`, ...
        """
        self._notice(self.machine.known(engine_id))
        return await self._answer(e.Get(next(self._callers), engine_id, address, epoch, ordered))

    async def use(self, engine_id: str, address: str, epoch: str = "") -> PeerEngine:
        """As `get`; its names stay loaded and its memory stays mapped until `leave`."""
        while (peer := await self.get(engine_id, address, epoch)).stale:
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
        assert peer.place is not None
        self.on(event(peer.place.number))

    async def renew(self, peer: PeerEngine) -> None:
        """Shake hands anew. The peer is forgotten where that fails."""
        assert peer.place is not None
        try:
            await self._answer(e.Renew(next(self._callers), peer.place.number))
        except KvferryError as error:
            log.info("peer forgotten", engine_id=peer.engine_id, why=str(error))

    async def _answer(self, asked: e.Get | e.Renew) -> PeerEngine:
        asker = asked.asker
        assert isinstance(asker, int)
        for effect in self.on(asked):
            match effect:
                case e.Found(answered, number) if answered == asker:
                    return self._met[number]
                case e.Refused(answered, why) if answered == asker:
                    raise why
        answer: asyncio.Future[PeerEngine] = asyncio.get_running_loop().create_future()
        self._answers[asker] = answer
        try:
            return await answer
        finally:
            if self._answers.pop(asker, None) is not None:
                self.on(e.GiveUp(asker))

    def want(self, addresses: tuple[str, ...]) -> None:
        self.notice()
        self.on(e.Want(addresses))

    def take_over(self, had: tuple[e.Place, ...]) -> None:
        """Meet the engines that the daemon before had met."""
        self._taken_over_at = time.monotonic()
        self.on(e.Had(had))

    @property
    def awaited(self) -> int:
        """Engines of the daemon before that are being met, for AWAITED_S at most."""
        return self.machine.wanted.awaited if time.monotonic() < self._taken_over_at + AWAITED_S else 0

    def notice(self) -> None:
        """Peers are lost by themselves."""
        for peer in list(self.machine):
            self._notice(peer)

    def _notice(self, peer: protocol.Peer | None) -> None:
        if peer is not None and not peer.stale and not peer.lost and self._met[peer.number].lost:
            self.on(e.Lost(peer.number))

    async def end(self, why: KvferryError) -> None:
        """Our engine ends, its agent with it."""
        self.on(e.Shut(why))
        await self._naming.end()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                while under_way := self._shaking | self._unloading:  # a shake that ends may leave an unload
                    await all_over(under_way)

    def on(self, event: e.PeersEvent) -> list[e.PeersEffect]:
        """The effects, which have been carried out."""
        effects = self.machine.on(event, asyncio.get_running_loop().time())
        carry_out(effects, self._do, engine_id=self.engine.engine_id)
        self._timer.set(self.machine.next_timer())
        return effects

    def _do(self, effect: e.PeersEffect) -> None:
        match effect:
            case e.Shake(number, engine_id, address):
                shaking = self._shaking.spawn(self._shake(number, engine_id, address))
                self._under_way[number] = shaking, time.monotonic()
            case e.Stop(number):
                self._under_way[number][0].cancel()
            case e.Keep(number):
                self._keep(number)
            case e.Shaken(number, why):
                self._metrics.handshake(why.code if why else "ok", time.monotonic() - self._under_way.pop(number)[1])
                self._on_shaken(self)
            case e.Unload(number):
                self._unloading.spawn(self._met.pop(number).unload())
            case e.Close(number):
                self._unloading.spawn(self._met.pop(number).close())
            case e.Found(int(asker), number) if asker in self._answers:
                settle(self._answers.pop(asker), self._met[number])
            case e.Refused(int(asker), why) if asker in self._answers:
                settle(self._answers.pop(asker), error=why)
            case e.Found() | e.Refused():
                pass  # answered in the turn in which it asks
            case e.Name(place):
                self._naming.spawn(self._name(place))
            case e.Missing((_, address), why):
                if why.code != "own_engine":
                    log.info("known peer not met", engine_id=self.engine.engine_id, address=address, why=str(why))
            case _:
                assert_never(effect)

    def _keep(self, number: int) -> None:
        peer = self._met[number]
        peer.place = self.machine.get(number)
        self._metrics.known(peer.engine_id)
        took_ms = {step: round(1e3 * seconds, 1) for step, seconds in peer.took_s.items()}
        log.info(
            "peer met", engine_id=peer.engine_id, epoch=peer.epoch, ranks=len(peer.ranks), unmapped=peer.unmapped,
            took_ms=took_ms | {"total": round(1e3 * (time.monotonic() - self._under_way[number][1]), 1)},
        )  # fmt: skip
        loop = asyncio.get_running_loop()

        def gone(_: object) -> None:
            """gRPC says so at once of a call that is over, in the middle of what is being carried out."""
            loop.call_soon(self._memory_gone, peer)

        for rank in peer.ranks.values():
            rank.channel.contact.met()
            rank.stream.when_over(partial(self._notice, peer.place))
            if rank.mapped.call is not None:
                rank.mapped.call.add_done_callback(gone)

    def _memory_gone(self, peer: PeerEngine) -> None:
        if not peer.stale and peer.place is not None:
            log.info("peer's memory is gone", engine_id=peer.engine_id, epoch=peer.epoch)
            self.forget(peer)

    async def _shake(self, number: int, engine_id: str, address: str) -> None:
        in_the_way = partial(self.machine.in_the_way, number)

        def over(home: e.Home) -> None:
            self.on(e.Over(engine_id, home))

        try:
            peer = await self._handshakes.shake(self.engine, engine_id, address, in_the_way, over, self._unloading)
        except Exception as error:  # noqa: BLE001  its callers wait
            self.on(e.Unmet(number, _typed(error)))
        else:
            self._met[number] = peer
            self.notice()
            self.on(e.Met(number, peer.home))

    async def _name(self, place: e.Place) -> None:
        engine_id, address = place
        try:
            rank, told = await self._introductions.ask(self.engine, engine_id, address)
            rank.let_go()
        except Exception as error:  # noqa: BLE001  the address is to be tried again
            self.on(e.Unnamed(place, _typed(error)))
        else:
            # At its rank 0: then all of its ranks' daemons lead to the same handshake.
            self.on(e.Named(place, rank.manifest.engine_id, told.get(0, address)))


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
            self.of(engine).take_over(had)

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

    def notice(self, engine: Engine) -> None:
        """The roster of our engine has changed: peers may know it by one that is over."""
        if (meeting := self._of.get(engine)) is not None:
            meeting.notice()

    def want(self, engine: Engine, addresses: tuple[str, ...]) -> None:
        """Meet whatever engines are at these addresses, and keep them: until this is called again with others."""
        if not engine.session.retiring:
            self.of(engine).want(addresses)

    def of(self, engine: Engine) -> Meeting:
        """The peers of this engine of ours. Raises KvferryError where it is retired."""
        meeting = self._of.get(engine)
        if meeting is None:
            if engine.session.retiring:
                raise _gone(engine)
            about = self._handshakes, self._introductions, self._metrics, self._on_shaken
            meeting = self._of[engine] = Meeting(engine, *about)
        return meeting

    def _on_shaken(self, meeting: Meeting) -> None:
        self._prepare()
        self._remember(meeting)

    def _remember(self, meeting: Meeting) -> None:
        """Whom our engine has met, for the next daemon. The end of the meeting lets go of everybody."""
        if meeting.machine.over is None:
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

        at = engine.roster.addresses
        return dict(zip(at, await asyncio.gather(*itertools.starmap(manifest, at.items())), strict=True))

    def unbind(self, engine_id: str) -> bool:
        """The next one to answer to this engine id is its owner. Returns whether it had one."""
        bound = any(meeting.machine.is_bound(engine_id) for meeting in self._of.values())
        for meeting in self._of.values():  # a meeting that has lost it may look for it still
            meeting.on(e.Unbind(engine_id))
            self._remember(meeting)
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


def _typed(error: Exception) -> KvferryError:
    if isinstance(error, KvferryError):
        return error.kept()
    log.error("a handshake broke", exc_info=error)
    return Internal("internal", f"the handshake failed: {type(error).__name__}")
