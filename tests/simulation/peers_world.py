"""An engine that reads from others, drawn from one seed: daemons that start anew, move, fall silent, answer late, or
answer to the id of another engine; orders that come and are given up; addresses that the settings name.

The machine is the one that daemons run. Around it everything takes its step when the seed says so: each handshake asks,
asks after the owner of the engine's id, loads, and ends, and may hang in any of that.

A run has three parts: blows, then none until all has come to rest, and at last one order for each engine.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from source_world import Violation

from kvferry.errors import KvferryError, PeerFailed, Unavailable
from kvferry.protocol import peers as machine
from kvferry.protocol import peers_events as e
from kvferry.protocol.kept import Alarms
from kvferry.protocol.peers import Peers
from kvferry.protocol.peers_asked import ASKINGS
from kvferry.protocol.peers_homes import FORGOTTEN
from kvferry.protocol.peers_wanted import AGAIN_S, AT_ONCE

OWN, STEP_S, WITHIN_S, ORDER_S, LOOK_S = "own", 5.0, 40.0, 30.0, 2.0
BLOWS = ("start anew", "start anew", "move", "die", "silence", "silence", "hang", "stranger", "stranger leaves", "lost",
         "lost", "memory gone", "memory gone", "forget", "forget", "forget", "give up", "time", "time", "long time",
         "renew")  # fmt: skip


@dataclass(eq=False)
class Source:
    """An engine elsewhere. addresses: of its ranks' daemons now."""

    engine_id: str
    epoch: int
    addresses: tuple[str, ...]
    alive: bool = True

    @property
    def home(self) -> e.Home:
        return e.Home(str(self.epoch), self.addresses)


@dataclass(eq=False)
class Shaking:
    """A handshake under way."""

    number: int
    engine_id: str
    address: str
    began: int
    since: float
    ordered: bool
    until: float
    """When the daemon that is asked has been silent for too long."""
    source: Source | None = None
    home: e.Home | None = None
    owner_asked: bool = False
    loaded: bool = False
    hangs: bool = False


@dataclass(eq=False)
class Caller:
    """An order, a prewarming, or the renewal of a peer."""

    wanted: e.Get
    came: int
    deadline: float
    state: str = "waits"
    renews: bool = False
    number: int = 0
    """Number of the peer that it uses; of the one that it renews."""

    @property
    def place(self) -> tuple[str, str]:
        return self.wanted.engine_id, self.wanted.address


@dataclass(eq=False)
class Loaded:
    """A peer as one handshake has made it."""

    source: Source
    home: e.Home
    began: int
    used_at: float
    kept: bool = False
    users: int = 0
    over: int | None = None
    """The step in which the machine heard that it is not to be used any more."""


@dataclass
class Owner:
    home: e.Home
    presumed: bool
    passed: bool = False
    """The id may go to another."""


@dataclass(eq=False)
class Naming:
    place: e.Place
    until: float
    hangs: bool = False


class World:
    def __init__(self, seed: int, *, told: Callable[[str], None] | None = None) -> None:
        """told: each line of the transcript."""
        self.seed, self.rng, self.now, self.steps = seed, random.Random(seed), 0.0, 0
        self._told = told
        self.peers = Peers(OWN, WITHIN_S)
        self.askers = itertools.count(1)
        self.sources = [
            Source(name, 1, tuple(f"{name}{rank}" for rank in range(self.rng.choice((1, 1, 2))))) for name in "abc"
        ]
        self.strangers: list[Source] = []
        self.silent: set[str] = set()
        self.shakings: dict[int, Shaking] = {}
        self.callers: dict[int, Caller] = {}
        self.loaded: dict[int, Loaded] = {}
        self.owners: dict[str, Owner] = {}
        self.leads: set[tuple[str, e.Home, str]] = set()
        """(engine, home, address) of which a handshake has found that the address leads there."""
        self.late: list[Shaking] = []
        """Handshakes that were stopped as they ended."""
        self.ended: Shaking | None = None
        """The last."""
        self.naming: dict[e.Place, Naming] = {}
        self.wanted: tuple[str, ...] = ()
        self.shut = False
        self.ends: Counter[str] = Counter()

    def tell(self, line: str) -> None:
        if self._told is not None:
            self._told(f"{self.steps:5} {self.now:6.1f} s  {line}")

    # ---- the machine ----

    def feed(self, event: e.PeersEvent) -> None:
        for effect in self.peers.on(event, self.now):
            self._do(effect)
        self.peers.check()
        self._check()

    def _do(self, effect: e.PeersEffect) -> None:
        match effect:
            case e.Shake(number, engine_id, address):
                place = engine_id, address
                if any((each.engine_id, each.address) == place for each in self.shakings.values()):
                    raise Violation("one place is asked twice at once", f"{place}")
                waiting = [each for each in self.callers.values() if each.state == "waits" and each.place == place]
                owner = self.owners.get(engine_id)
                renewed = owner is not None and not (owner.presumed or owner.passed)
                ordered = any(each.wanted.ordered or (each.renews and renewed) for each in waiting)
                self.tell(f"handshake {number}: asks for {engine_id} at {address}")
                self.shakings[number] = Shaking(
                    number, engine_id, address, self.steps, self.now, ordered, self.now + STEP_S
                )
            case e.Stop(number):
                self.ended = stopped = self.shakings.pop(number)
                if stopped.loaded and self.rng.random() < 0.5:
                    self.late.append(stopped)
                else:
                    self.loaded.pop(number, None)
            case e.Keep(number):
                self._keep(number)
            case e.Unload(number) | e.Close(number):
                gone = self.loaded.pop(number)
                if gone.users and not self.shut:
                    raise Violation("a peer is unloaded under its users", f"peer {number}")
            case e.Shaken(number, why):
                self.ended = self.shakings.pop(number, self.ended)
                self.ends["met" if why is None else why.code] += 1
            case e.Found(int(asker), number):
                self._found(self.callers[asker], number)
            case e.Refused(int(asker), why):
                self._refused(self.callers[asker], why)
            case e.Name(place):
                if place in self.naming:
                    raise Violation("a daemon is asked twice at once who it is", f"{place}")
                self.naming[place] = Naming(place, self.now + STEP_S)
            case e.Missing():
                pass
            case _:
                raise Violation("nobody is told", f"{effect}")

    def _keep(self, number: int) -> None:
        kept, shaking = self.loaded[number], self.shakings[number]
        kept.kept, kept.used_at = True, self.now
        engine_id, owner = shaking.engine_id, self.owners.get(shaking.engine_id)
        gives_way = owner is None or owner.passed or (owner.presumed and shaking.ordered)
        if owner is not None and owner.home.addresses != kept.home.addresses and not gives_way:
            raise Violation("an engine id passes to a stranger", f"{engine_id}: {owner.home} to {kept.home}")
        presumed = owner.presumed if owner is not None and not owner.passed else not shaking.ordered
        self.owners[engine_id] = Owner(kept.home, presumed)
        for each, other in self.loaded.items():
            if each != number and other.kept and other.source.engine_id == engine_id:
                other.over = self.steps if other.over is None else other.over
        self.tell(f"handshake {number}: {engine_id} is met, epoch {kept.home.epoch} at {kept.home.addresses}")

    def _found(self, caller: Caller, number: int) -> None:
        if caller.state != "waits":
            raise Violation("a caller is answered twice")
        loaded, wanted = self.loaded.get(number), caller.wanted
        if loaded is None or not loaded.kept:
            raise Violation("a caller is given a peer that is not there", f"peer {number}")
        if loaded.over is not None and loaded.over < caller.came:
            raise Violation("a stale plan is used for an order that came later", f"peer {number}")
        if wanted.epoch not in ("", loaded.home.epoch):
            raise Violation("a caller is given another epoch", f"{wanted.epoch}, not {loaded.home.epoch}")
        if (wanted.engine_id, loaded.home, wanted.address) not in self.leads:
            raise Violation("an address is taken for a peer's that nobody has asked", f"{wanted}")
        if caller.renews and loaded.began < caller.came:
            raise Violation("a peer is renewed by what it was asked before", f"peer {number}")
        caller.state, caller.number, loaded.used_at = "found", number, self.now
        if wanted.ordered and wanted.engine_id in self.owners:
            self.owners[wanted.engine_id].presumed = False
        self.tell(f"caller {wanted.asker}: has peer {number}")

    def _refused(self, caller: Caller, why: KvferryError) -> None:
        if caller.state != "waits":
            raise Violation("a caller is answered twice")
        caller.state = "refused"
        self.ends[f"refused {why.code}"] += 1
        self.tell(f"caller {caller.wanted.asker}: refused, {why.code}")
        ended = self.ended
        if caller.renews and (peer := self.peers.get(caller.number)) is not None and not peer.stale:
            raise Violation("a peer that could not be asked anew is gone by")
        mine = ended is not None and (ended.engine_id, ended.address) == caller.place and not self.shut
        if mine and caller.wanted.ordered and not ended.ordered and ended.began < caller.came:
            raise Violation("an order fails with what nobody ordered")
        if why.code == "stale_epoch":
            known = self.peers.known(caller.wanted.engine_id)
            began = self.loaded[known.number].began if known is not None else self.steps
            if began < caller.came:
                raise Violation("an order is refused for what was heard before it came")

    def _check(self) -> None:
        """After each event, when its effects have been carried out."""
        places = {(each.engine_id, each.address) for each in self.shakings.values()}
        for caller in self.callers.values():
            if caller.state == "waits" and caller.place not in places:
                raise Violation("a caller waits, and its peer is not asked", f"{caller.wanted}")
        first = min((each.since for each in self.shakings.values()), default=None)
        timer = self.peers.next_timer()
        if first is not None and (timer is None or timer > first + WITHIN_S):
            raise Violation("a handshake has no bound")
        ending = {*self.shakings, *(each.number for each in self.late)}
        for number, loaded in self.loaded.items():
            peer = self.peers.get(number)
            if not loaded.kept and number not in ending:
                raise Violation("what a handshake in vain has loaded stays", f"handshake {number}")
            if loaded.kept and (peer is None or peer.users != loaded.users):
                raise Violation("users are not counted", f"peer {number}: {loaded.users}")
            if loaded.kept and not loaded.users and loaded.over is not None and peer is not None and peer.stale:
                raise Violation("a peer stays loaded for nobody", f"peer {number}")
        if len(self.naming) > AT_ONCE:
            raise Violation("too many daemons are asked at once who they are")
        waiting = sum(caller.state == "waits" for caller in self.callers.values())
        sizes = self.peers.sizes()
        most = {
            "known": 4, "loaded": 4 + sum(each.users > 0 for each in self.loaded.values()), "askings": ASKINGS,
            "waiting": waiting + AT_ONCE, "wanted": len(self.wanted), "had": 3, "met": len(self.wanted) + 3,
            "awaited": 3, "resting": 2 * (len(self.wanted) + 3) + Alarms.SLACK, "forgotten": FORGOTTEN,
            "addresses": (2 + machine.NAMES) * len(self.loaded),
        }  # fmt: skip
        for name, bound in most.items():
            if sizes[name] > bound:
                raise Violation(f"more than may be kept: {name}", f"{sizes[name]} of {bound}")

    # ---- those who want a peer ----

    def ask(self, engine_id: str = "", address: str = "", epoch: str | None = None) -> Caller:
        rng = self.rng
        source = rng.choice(self.sources)
        engine_id = engine_id or (OWN if rng.random() < 0.02 else source.engine_id)
        if not address:
            near = [*source.addresses, *source.addresses, f"{source.engine_id}-by-name"]
            near += [each.addresses[0] for each in self.strangers if each.engine_id == source.engine_id]
            address = rng.choice(near)
        if epoch is None:
            epoch = (
                str(rng.choice((source.epoch, source.epoch, max(1, source.epoch - 1)))) if rng.random() < 0.5 else ""
            )
        wanted = e.Get(next(self.askers), engine_id, address, epoch, rng.random() < 0.8)
        return self._come(Caller(wanted, self.steps, self.now + ORDER_S))

    def _come(self, caller: Caller) -> Caller:
        asker = caller.wanted.asker
        assert isinstance(asker, int)
        self.tell(f"caller {asker}: wants {caller.wanted}")
        self.notice(caller.wanted.engine_id)
        caller.came = self.steps
        self.callers[asker] = caller
        self.feed(caller.wanted)
        return caller

    def renew(self) -> None:
        for peer in list(self.peers):
            wanted = e.Get(next(self.askers), peer.engine_id, peer.home.addresses[0], ordered=False)
            self.steps += 1
            self.callers[int(wanted.asker)] = Caller(wanted, self.steps, 0.0, renews=True, number=peer.number)
            self.tell(f"caller {wanted.asker}: renews peer {peer.number}")
            self.feed(e.Renew(int(wanted.asker), peer.number))

    def notice(self, engine_id: str = "") -> None:
        """The stream of a peer whose engine has started anew is over."""
        for peer in list(self.peers):
            loaded = self.loaded[peer.number]
            gone = loaded.source.home != loaded.home or not loaded.source.alive
            if engine_id in ("", peer.engine_id) and gone and not peer.lost:
                self._lose(peer.number)

    def _lose(self, number: int) -> None:
        loaded = self.loaded[number]
        loaded.over = self.steps if loaded.over is None else loaded.over
        self.steps += 1
        self.feed(e.Lost(number))

    def _forget(self, number: int) -> None:
        loaded = self.loaded[number]
        loaded.over = self.steps if loaded.over is None else loaded.over
        self.steps += 1
        self.feed(e.Forget(number))

    def use(self, caller: Caller) -> None:
        """The next turn of a caller that has its answer."""
        peer = self.peers.get(caller.number)
        if caller.renews:
            caller.state = "over"
        elif peer is None or peer.stale:
            self.callers.pop(int(caller.wanted.asker))
            again = e.Get(next(self.askers), *caller.place, caller.wanted.epoch, caller.wanted.ordered)
            self._come(Caller(again, self.steps, caller.deadline))
        elif not caller.wanted.ordered:  # it only wanted to know
            caller.state = "over"
        else:
            caller.state = "uses"
            self.loaded[caller.number].users += 1
            self.loaded[caller.number].used_at = self.now
            self.feed(e.Use(caller.number))

    def leave(self, caller: Caller) -> None:
        caller.state = "over"
        if (loaded := self.loaded.get(caller.number)) is not None:
            loaded.users -= 1
        self.feed(e.Leave(caller.number))

    def give_up(self, caller: Caller) -> None:
        self.tell(f"caller {caller.wanted.asker}: gives up")
        caller.state = "gave up"
        self.feed(e.GiveUp(int(caller.wanted.asker)))

    # ---- those who are asked ----

    def at(self, address: str) -> list[Source]:
        """The engines that the daemon there serves."""
        name = address.removesuffix("-by-name")
        every = [*self.sources, *self.strangers]
        return [each for each in every if each.alive and (address in each.addresses or each.engine_id == name)]

    def shake(self, shaking: Shaking) -> bool:
        """A step of a handshake."""
        if shaking.hangs:
            return False
        if shaking.home is None:
            return self._answer(shaking)
        before = self.peers.in_the_way(shaking.number, shaking.home)
        if before is not None and not shaking.owner_asked:
            return self._ask_owner(shaking, before)
        assert shaking.source is not None
        if not shaking.loaded:
            shaking.loaded = True
            self.loaded[shaking.number] = Loaded(shaking.source, shaking.home, shaking.began, self.now)
            return True
        self.leads |= {
            (shaking.engine_id, shaking.home, address) for address in (shaking.address, *shaking.home.addresses)
        }
        self.notice()
        self.feed(e.Met(shaking.number, shaking.home))
        self._check_traces()
        return True

    def _answer(self, shaking: Shaking) -> bool:
        if shaking.address in self.silent:
            if self.now < shaking.until:
                return False
            return self._fail(shaking, "peer_unreachable")
        here = [each for each in self.at(shaking.address) if each.engine_id == shaking.engine_id]
        if not here:
            return self._fail(shaking, "unknown_engine")
        shaking.source = self.rng.choice(here)
        shaking.home = shaking.source.home
        return True

    def _ask_owner(self, shaking: Shaking, before: e.Home) -> bool:
        assert shaking.home is not None
        living = [each for address in before.addresses if address not in self.silent for each in self.at(address)]
        lives = any(each.engine_id == shaking.engine_id and str(each.epoch) == before.epoch for each in living)
        if before.epoch == shaking.home.epoch or lives:
            return self._fail(shaking, "engine_taken")
        shaking.owner_asked = True
        owner = self.owners.get(shaking.engine_id)
        if owner is not None and owner.home == before:
            owner.passed = True
        self.feed(e.Over(shaking.engine_id, before))
        return True

    def _fail(self, shaking: Shaking, code: str) -> bool:
        self.loaded.pop(shaking.number, None)
        self.tell(f"handshake {shaking.number}: {code}")
        self.feed(e.Unmet(shaking.number, PeerFailed(code, "a test")))
        return True

    def _check_traces(self) -> None:
        """A peer has been met: those that are idle are gone."""
        for peer in self.peers:
            if not peer.users and self.loaded[peer.number].used_at < self.now - machine.IDLE_S:
                raise Violation("a peer that nobody reads stays for ever", f"{peer.engine_id}")

    def name(self, naming: Naming) -> bool:
        engine_id, address = naming.place
        if naming.hangs or (address in self.silent and self.now < naming.until):
            return False
        del self.naming[naming.place]
        here = [] if address in self.silent else self.at(address)
        here = [each for each in here if engine_id in ("", each.engine_id)]
        if here:
            source = self.rng.choice(here)
            self.feed(e.Named(naming.place, source.engine_id, source.addresses[0]))
            known = self.peers.known(source.engine_id)
            if known is not None and known.used_at == self.now:
                self.loaded[known.number].used_at = self.now
        else:
            self.feed(e.Unnamed(naming.place, PeerFailed("peer_unreachable", "a test")))
        return True

    def look(self) -> None:
        """As the settings' names are looked up again and again."""
        self.notice()
        for peer in self.peers:
            if peer.number in self.peers.wanted.named:
                self.loaded[peer.number].used_at = self.now
        self.feed(e.Want(self.wanted))

    # ---- blows and time ----

    def blow(self) -> None:
        rng = self.rng
        blow, source = rng.choice(BLOWS), rng.choice(self.sources)
        self.tell(f"blow: {blow}, {source.engine_id}")
        known = list(self.peers)
        match blow:
            case "start anew":
                source.epoch, source.alive = source.epoch + 1, True
            case "move":
                number = len(source.addresses) + source.epoch
                source.epoch, source.alive = source.epoch + 1, True
                source.addresses = tuple(f"{source.engine_id}{number + each}" for each in range(len(source.addresses)))
                self._is_over(source)
            case "die":
                source.alive = False
                self._is_over(source)
            case "silence":
                address = rng.choice(source.addresses)
                (self.silent.discard if address in self.silent else self.silent.add)(address)
            case "hang" if self.shakings:
                rng.choice(list(self.shakings.values())).hangs = True
            case "stranger":
                self.strangers.append(
                    Source(source.engine_id, 1000 + len(self.strangers), (f"x{len(self.strangers)}",))
                )
            case "stranger leaves" if self.strangers:
                rng.choice(self.strangers).alive = False
            case "lost" if known:
                number = rng.choice(known).number
                for _ in range(rng.choice((1, 2))):  # each of its streams may end
                    self._lose(number)
                self._tidy(number)
            case "memory gone" if known:
                self._forget(rng.choice(known).number)
            case "forget":
                owner = self.owners.get(source.engine_id)
                self._unbind(source.engine_id)
                if (peer := self.peers.known(source.engine_id)) is not None:
                    self._forget(peer.number)
                if owner is not None and rng.random() < 0.3:  # a daemon there says so late
                    self.feed(e.Over(source.engine_id, owner.home))
            case "give up":
                waiting = [each for each in self.callers.values() if each.state == "waits"]
                if waiting:
                    self.give_up(rng.choice(waiting))
            case "time":
                self.pass_time(rng.choice((0.5, STEP_S, 2 * STEP_S, WITHIN_S)))
            case "long time":
                self.pass_time(machine.IDLE_S + 1.0)
            case "renew":
                self.renew()

    def _unbind(self, engine_id: str) -> None:
        self.owners.pop(engine_id, None)
        self.feed(e.Unbind(engine_id))

    def _tidy(self, number: int) -> None:
        """A peer that is lost is renewed, forgotten or unbound."""
        peer = self.peers.get(number)
        match self.rng.randrange(4):
            case _ if peer is None:
                pass
            case 0:
                self.renew()
            case 1:
                self._forget(number)
            case 2:
                self._unbind(peer.engine_id)
            case _:
                pass

    def _is_over(self, source: Source) -> None:
        """A daemon says that it has the engine no more, before its peers notice."""
        owner = self.owners.get(source.engine_id)
        living = [each.home for each in (*self.sources, *self.strangers) if each.alive]
        if owner is not None and owner.home not in living and self.rng.random() < 0.3:
            owner.passed = True
            self.feed(e.Over(source.engine_id, owner.home))

    def pass_time(self, seconds: float) -> None:
        until, looks = self.now + seconds, 0
        while self.now < until:
            timer = self.peers.next_timer()
            if looks < 20 and self.wanted:
                self.now, looks = min(until, self.now + LOOK_S, timer or until), looks + 1
                self.look()
            else:
                self.now = min(until, timer or until)
            if timer is not None and timer <= self.now:
                self.feed(e.Tick())
                if (again := self.peers.next_timer()) is not None and again <= self.now:
                    raise Violation("a timer rings and rings")
            for caller in list(self.callers.values()):
                if caller.state == "waits" and not caller.renews and caller.deadline <= self.now:
                    self.give_up(caller)

    # ---- a run ----

    def step(self) -> bool:
        """Somebody's next step, if anybody can take one."""
        self.steps += 1
        if self.late and self.rng.random() < 0.5:
            late = self.late.pop()
            assert late.home is not None
            self.feed(e.Met(late.number, late.home))
            return True
        kinds = [self._step_shaking, self._step_shaking, self._step_naming, self._step_caller]
        self.rng.shuffle(kinds)
        return any(kind() for kind in kinds)

    def _step_shaking(self) -> bool:
        under_way = list(self.shakings.values())
        return any(self.shake(each) for each in self.rng.sample(under_way, len(under_way)))

    def _step_naming(self) -> bool:
        under_way = list(self.naming.values())
        return any(self.name(each) for each in self.rng.sample(under_way, len(under_way)))

    def _step_caller(self) -> bool:
        having = [each for each in self.callers.values() if each.state in ("found", "uses")]
        if not having:
            return False
        caller = self.rng.choice(having)
        if caller.state == "found":
            self.use(caller)
        elif self.rng.random() < 0.3:
            self.leave(caller)
        return True

    def go(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def run_dry(self) -> None:
        """Until nobody can take a step."""
        idle = 0
        for _ in range(20_000):
            idle = 0 if self.step() else idle + 1
            if idle > 10 and not self.late:
                return
        raise Violation("it never comes to rest")

    def run(self) -> None:
        rng = self.rng
        every = [address for each in self.sources for address in each.addresses]
        self.wanted = tuple(rng.sample(every, rng.randint(0, 2)))
        if rng.random() < 0.5:
            self._take_over()
        for _ in range(rng.randint(4, 12)):
            for _ in range(rng.choice((1, 1, 2, 4))):
                self.ask()
                self.go(rng.choice((0, 0, 2, 6)))
            self.blow()
            self.go(rng.choice((0, 2, 10)))
        self.tell("blows stop")
        self._come_to_rest()
        if rng.random() < 0.3:
            self._end()
        else:
            self._order_once_more()
            self._end()

    def _take_over(self) -> None:
        """The daemon before has met some of them, of which one may be dead."""
        had = self.rng.sample(self.sources, self.rng.randint(1, 3))
        had[0].alive = self.rng.random() < 0.5
        self.feed(e.Had(tuple((each.engine_id, each.addresses[0]) for each in had)))
        self.run_dry()
        for each in had:
            if each.alive and not self._is_known(each):
                raise Violation("an engine of the daemon before is not known", each.engine_id)
        if self.peers.wanted.awaited:
            raise Violation("an engine that has gone is awaited")

    def _come_to_rest(self) -> None:
        self.silent.clear()
        for each in self.strangers:
            each.alive = False
        for source in self.sources:
            source.alive = True
        self.run_dry()
        self.pass_time(WITHIN_S)  # for those that hang
        self.run_dry()
        for naming in self.naming.values():
            naming.hangs = False
        self.run_dry()
        if any(each.state in ("waits", "found", "uses") for each in self.callers.values()) or self.shakings:
            raise Violation("something goes on for ever")
        sizes = self.peers.sizes()
        if any(sizes[name] for name in ("askings", "numbers", "waiting", "bounds", "asked", "awaited")):
            raise Violation("something is left", f"{sizes}")
        if sizes["loaded"] != sizes["known"]:
            raise Violation("a peer stays loaded for nobody", f"{sizes}")

    def _order_once_more(self) -> None:
        """Nothing stands in the way of it."""
        living = [each for each in self.sources if self._is_known(each)]
        for each in living:
            self._lose(self.peers.known(each.engine_id).number)
        for _ in range(int(2 * AGAIN_S[1] / LOOK_S)):
            self.pass_time(LOOK_S)
            self.run_dry()
        for each in living:
            if not self._is_known(each):
                raise Violation("an engine that was met and lost is not known again", each.engine_id)
        for source in self.sources:
            known = self.peers.known(source.engine_id)
            wanted = [address for address in self.wanted if address in source.addresses]
            if wanted and (known is None or known.lost or known.home != source.home):
                raise Violation("what the settings name is not known", f"{wanted}")
        for source in self.sources:
            caller = self.ask(source.engine_id, source.addresses[0], str(source.epoch))
            self.run_dry()
            if caller.state != "over":
                raise Violation(f"not found though nothing stands in the way: {caller.state}", f"{caller.wanted}")
            self.ends["done"] += 1

    def _is_known(self, source: Source) -> bool:
        known = self.peers.known(source.engine_id)
        return known is not None and not known.lost and known.home == source.home

    def _end(self) -> None:
        """Our engine ends."""
        for _ in range(self.rng.choice((0, 2))):
            self.ask()
            self.go(self.rng.choice((0, 2, 5)))
        self.tell("our engine ends")
        self.shut = True
        self.feed(e.Shut(Unavailable("engine_gone", "a test")))
        waits = any(each.state == "waits" for each in self.callers.values())
        if self.shakings or waits or self.loaded.keys() - {late.number for late in self.late}:
            raise Violation("something outlives our engine")
        for caller in list(self.callers.values()):
            if caller.state == "uses":
                self.leave(caller)
        if self.ask().state != "refused":
            raise Violation("an engine that has ended is given a peer")
        self.feed(e.Want(self.wanted))
        self.run_dry()
        if self.loaded or any(self.peers.sizes()[name] for name in ("known", "askings", "wanted", "had", "asked")):
            raise Violation("something outlives our engine", f"{self.peers.sizes()}")
        self.ends["done"] += 1
