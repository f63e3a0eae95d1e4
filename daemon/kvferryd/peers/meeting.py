"""The peers of one engine of ours, around their machine (kvferry.protocol.peers): its effects are carried out."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import assert_never

from kvferry.errors import Internal, KvferryError
from kvferry.protocol import peers_events as e
from kvferry.protocol.peers import Peer, Peers
from kvferryd.aio import Tasks, Timer, all_over, carry_out, settle
from kvferryd.engine import Engine
from kvferryd.observe import logs
from kvferryd.observe.metrics import Metrics
from kvferryd.peers.handshake import Handshakes
from kvferryd.peers.inbound import AWAITED_S
from kvferryd.peers.introduce import Introductions
from kvferryd.peers.peer import PeerEngine

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
        self.machine = Peers(engine.engine_id, handshakes.within_s)
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
        self._notice(self.machine.known(engine_id))
        return await self._answer(e.Get(next(self._callers), engine_id, address, epoch, ordered))

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

    def _notice(self, peer: Peer | None) -> None:
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
            self.on(e.Forget(peer.place.number))

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


def _typed(error: Exception) -> KvferryError:
    if isinstance(error, KvferryError):
        return error.kept()
    log.error("a handshake broke", exc_info=error)
    return Internal("internal", f"the handshake failed: {type(error).__name__}")
