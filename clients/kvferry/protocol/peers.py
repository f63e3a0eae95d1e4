"""The peers of one engine of ours: the owner of each engine id, the daemons to ask, and how long an answer holds.

Each (engine id, address) is a place of its own. A place has one handshake at a time, with a bound of its own, and all
callers that want the peer there share it. So a silent daemon delays only those that asked for its place.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import assert_never

from kvferry.errors import Conflict, KvferryError, Malformed, PeerFailed
from kvferry.protocol import peers_events as e
from kvferry.protocol.peers_asked import Asking, Askings, Waiting
from kvferry.protocol.peers_homes import Homes, taken_by
from kvferry.protocol.peers_wanted import Wanted
from kvferry.protocol.values import Sizes

IDLE_S = 3600.0
"""A peer not read from for so long is forgotten when the next handshake is made; one that is lost at any rate."""
NAMES = 64
"""Addresses of an engine in orders, beside those of its ranks. Another one is asked who it is."""
Effects = list[e.PeersEffect]


@dataclass(slots=True, eq=False)
class Peer:
    """An engine that was met. number: of its handshake. addresses: its ranks', and others that orders named."""

    number: int
    engine_id: str
    home: e.Home
    addresses: set[str]
    used_at: float
    users: int = 0
    """Transfers that read from it or may still be written to."""
    stale: bool = False
    """It is not given to anybody any more."""
    lost: bool = False


class Peers:
    def __init__(self, engine_id: str, within_s: float) -> None:
        """engine_id: of our engine. within_s: the longest that a handshake may take."""
        self.engine_id = engine_id
        self._known: dict[str, Peer] = {}
        self._loaded: dict[int, Peer] = {}
        """Peers that are known, and peers that are forgotten and still used."""
        self._askings, self._homes, self.wanted = Askings(within_s), Homes(), Wanted()
        self.over: KvferryError | None = None
        """The end of our engine: nobody is known or wanted any more."""

    def __iter__(self) -> Iterator[Peer]:
        """The known peers."""
        return iter(self._known.values())

    def get(self, number: int) -> Peer | None:
        """The peer as long as anything of it is loaded."""
        return self._loaded.get(number)

    def known(self, engine_id: str) -> Peer | None:
        return self._known.get(engine_id)

    def is_bound(self, engine_id: str) -> bool:
        return engine_id in self._homes

    def forgotten(self) -> Iterator[tuple[str, e.Home]]:
        """The engines that were known and are not any more, with where they were."""
        return ((name, home) for name, home in self._homes.forgotten() if name not in self._known)

    def in_the_way(self, number: int, home: e.Home) -> e.Home | None:
        """The owner of the engine id that this handshake asked for, if that is another engine."""
        asking = self._askings.get(number)
        return None if asking is None else self._homes.in_the_way(asking.place[0], home, ordered=asking.ordered)

    def next_timer(self) -> float | None:
        times = self._askings.bounds.next(), self.wanted.resting.next()
        return min((each for each in times if each is not None), default=None)

    def on(self, event: e.PeersEvent, now: float) -> Effects:
        effects = self._on(event, now)
        looks = isinstance(event, (e.Want, e.Had, e.Tick))
        if looks or any(isinstance(getattr(each, "asker", None), tuple) for each in effects):
            return self._for_nobody(effects, now)
        return effects

    def _for_nobody(self, effects: Effects, now: float) -> Effects:
        """Answers about places for which nobody waits stay here, and the next places are asked."""
        said: Effects = []
        for each in effects:
            match each:
                case e.Found((str(), str()) as place, number):
                    self.wanted.found(place, number)
                case e.Refused((str(), str()) as place, why):
                    if self.wanted.failed(place, why, now):
                        said.append(e.Missing(place, why))
                case _:
                    said.append(each)
        return said + [e.Name(place) for place in self.wanted.next(now)]

    def _on(self, event: e.PeersEvent, now: float) -> Effects:
        match event:
            case e.Get():
                return self._get(event, now)
            case e.Renew(asker, number):
                return self._renew(asker, number, now)
            case e.GiveUp(asker):
                self._askings.give_up(asker)
                return []
            case e.Use(number):
                used = self._loaded[number]
                assert not used.stale
                used.users, used.used_at = used.users + 1, now
                return []
            case e.Leave(number):
                left = self._loaded.get(number)
                if left is None:  # our engine has ended
                    return []
                left.users -= 1
                return self._unload_unused(left)
            case e.Forget(number):
                return self._forget(number, now)
            case e.Unbind(engine_id):
                self._homes.unbind(engine_id)
                self.wanted.leave(engine_id)
                return []
            case e.Met(number, home):
                return self._met(number, home, now)
            case e.Unmet(number, why):
                asking = self._askings.end(number)
                return [] if asking is None else self._fail(asking, why, now)
            case e.Over(engine_id, home):
                self._homes.over(engine_id, home)
                return []
            case e.Lost(number):
                return self._lose(number, now)
            case e.Want(addresses):
                self.wanted.want(() if self.over else addresses)
                for number in self.wanted.named:
                    self._loaded[number].used_at = now
                return []
            case e.Had(places):
                self.wanted.take_over(() if self.over else places)
                return []
            case e.Named(place, engine_id, at):
                return [] if self.over else self._get(e.Get(place, engine_id, at, ordered=False), now)
            case e.Unnamed(place, why):
                return [] if self.over else [e.Refused(place, why)]
            case e.Tick():
                return [effect for late in self._askings.end_late(now) for effect in self._give_up(late, now)]
            case e.Shut(why):
                return self._shut(why)
            case _:
                assert_never(event)

    # ---- those who want a peer ----

    def _get(self, wanted: e.Get, now: float) -> Effects:
        if self.over is not None:
            return [e.Refused(wanted.asker, self.over.kept())]
        if wanted.engine_id == self.engine_id:
            why, remedy = (
                f"engine {self.engine_id} is to read from itself",
                "its blocks are at hand: copy them in the engine",
            )
            own = Malformed("own_engine", why, field="source.engine_id", value=self.engine_id, remedy=remedy)
            return [e.Refused(wanted.asker, own)]
        known = self._known.get(wanted.engine_id)
        if known is None or known.lost or wanted.address not in known.addresses:
            return self._ask(Waiting(wanted), now)
        if wanted.epoch not in ("", known.home.epoch):
            return self._ask(Waiting(wanted), now)
        return [self._find(wanted, known, now)]

    def _find(self, wanted: e.Get, peer: Peer, now: float) -> e.Found:
        peer.used_at = now
        if wanted.ordered:
            self._homes.ordered(peer.engine_id)
        return e.Found(wanted.asker, peer.number)

    def _renew(self, asker: e.Asker, number: int, now: float, *, first: bool = False) -> Effects:
        """first: as of Waiting."""
        peer = self._loaded.get(number)
        if peer is None or peer.stale:
            return [e.Refused(asker, PeerFailed("peer_lost", "the peer was forgotten meanwhile"))]
        ordered = not self._homes.is_presumed(peer.engine_id)
        wanted = e.Get(asker, peer.engine_id, peer.home.addresses[0], ordered=ordered)
        return self._ask(Waiting(wanted, number, first), now)

    def _ask(self, waiting: Waiting, now: float) -> Effects:
        """Only the engine can say what holds now: by a handshake that is under way, or by a new one."""
        try:
            begun = self._askings.join(waiting, now)
        except KvferryError as full:
            return [e.Refused(waiting.wanted.asker, full.kept())]
        return [] if begun is None else [e.Shake(begun.number, *begun.place)]

    # ---- the ends of handshakes ----

    def _met(self, number: int, home: e.Home, now: float) -> Effects:
        taken = self.in_the_way(number, home)  # another handshake may have been quicker
        asking = self._askings.end(number)
        if asking is None:
            return [e.Unload(number)]
        engine_id, address = asking.place
        if taken is not None:
            return [e.Unload(number), *self._fail(asking, taken_by(engine_id, taken), now)]
        before, addresses = self._known.get(engine_id), {address, *home.addresses}
        if before is not None and before.home == home:
            room = len(home.addresses) + NAMES - len(addresses)
            addresses |= set(itertools.islice(before.addresses - addresses, room))
        peer = self._known[engine_id] = self._loaded[number] = Peer(number, engine_id, home, addresses, now)
        self._homes.bind(engine_id, home, ordered=asking.ordered)
        effects: Effects = [e.Keep(number), e.Shaken(number)]
        if before is not None:
            effects += self._forget(before.number, now)
        self.wanted.met((engine_id, home.addresses[0]), number)
        for each in list(self):  # a fleet replaces its pods for as long as this daemon runs: they leave no trace
            idle = each.used_at < now - IDLE_S
            if not each.users and (each.lost or idle):
                effects += self._forget(each.number, now)
                if idle:
                    self.wanted.leave(each.engine_id)
        again: list[Waiting] = []
        for waiting in asking.waiting.values():
            wanted = waiting.wanted
            agrees = wanted.epoch in ("", home.epoch)
            if not waiting.first and (waiting.renews or not agrees):  # it may have started anew since it was asked
                again.append(waiting)
            elif agrees:
                effects.append(self._find(wanted, peer, now))
            else:
                effects.append(e.Refused(wanted.asker, _other_epoch(peer, wanted.epoch)))
        return effects + self._again(again, now)

    def _fail(self, asking: Asking, why: KvferryError, now: float) -> Effects:
        """An order that joined a handshake that nobody ordered has more time, and may take over the engine's id."""
        effects: Effects = [e.Shaken(asking.number, why)]
        again: list[Waiting] = []
        for waiting in asking.waiting.values():
            if not waiting.first and (waiting.renews or (waiting.wanted.ordered and not asking.ordered)):
                again.append(waiting)
                continue
            effects += [*self._forget(waiting.renews, now), e.Refused(waiting.wanted.asker, why.kept())]
        return effects + self._again(again, now)

    def _again(self, again: list[Waiting], now: float) -> Effects:
        """Begin one handshake for all of them: an order's, if any of them is one. A renewal is judged by what holds by
        then: its peer may be forgotten, and the id another engine's."""
        effects = Effects()
        for each in sorted(again, key=lambda waiting: not waiting.wanted.ordered):
            if each.renews:
                effects += self._renew(each.wanted.asker, each.renews, now, first=True)
            else:
                effects += self._ask(each._replace(first=True), now)
        return effects

    def _give_up(self, late: Asking, now: float) -> Effects:
        address, remedy = late.place[1], "see the log of its daemon, and of this one"
        why = f"the handshake with {address} was not over within {self._askings.within_s:g} s"
        silent = PeerFailed("peer_unreachable", why, field="address", value=address, remedy=remedy)
        return [e.Stop(late.number), *self._fail(late, silent, now)]

    # ---- the ends of peers ----

    def _lose(self, number: int, now: float) -> Effects:
        lost = self._loaded.get(number)
        if lost is not None:
            lost.lost = True
            self.wanted.drop(number, now)
        return []

    def _forget(self, number: int, now: float) -> Effects:
        """The next order shakes hands anew. Idempotent."""
        peer = self._loaded.get(number)
        if peer is None or peer.stale:
            return []
        peer.stale = True
        self.wanted.drop(number, now)
        if self._known.get(peer.engine_id) is peer:
            del self._known[peer.engine_id]
            self._homes.forget(peer.engine_id, peer.home)
        return self._unload_unused(peer)

    def _unload_unused(self, peer: Peer) -> Effects:
        if peer.users or not peer.stale:
            return []
        del self._loaded[peer.number]
        return [e.Unload(peer.number)]

    def _shut(self, why: KvferryError) -> Effects:
        self.over, effects = why, Effects()
        for asking in self._askings.end_all():
            effects += [e.Stop(asking.number), e.Shaken(asking.number, why)]
            effects += [e.Refused(asker, why.kept()) for asker in asking.waiting if isinstance(asker, int)]
        for peer in self._loaded.values():
            peer.stale = True
            effects.append(e.Close(peer.number))
        self._loaded.clear()
        self._known.clear()
        self.wanted.shut()
        return effects

    # ---- what must hold ----

    def check(self) -> None:
        assert all(self._loaded.get(peer.number) is peer and not peer.stale for peer in self)
        assert all(peer.users > 0 for peer in self._loaded.values() if peer.stale), (
            "nobody uses it, and it stays loaded"
        )
        assert all(len(peer.addresses) <= len(peer.home.addresses) + NAMES for peer in self)
        assert self.wanted.named <= {peer.number for peer in self if not peer.lost}
        self._askings.check()
        self.wanted.check()
        assert self.over is None or not any(self._askings.sizes().values()), "our engine has ended, and somebody waits"

    def sizes(self) -> Sizes:
        addresses = sum(len(peer.addresses) for peer in self._loaded.values())
        own = {"known": len(self._known), "loaded": len(self._loaded), "addresses": addresses}
        return {**own, **self._askings.sizes(), **self._homes.sizes(), **self.wanted.sizes()}


def _other_epoch(peer: Peer, epoch: str) -> Conflict:
    why = f"engine {peer.engine_id} is in epoch {peer.home.epoch}"
    remedy = "prefill the request again: what that epoch held is gone"
    return Conflict("stale_epoch", why, field="source.epoch", value=epoch, remedy=remedy)
