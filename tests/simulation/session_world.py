"""Engines that attach to a daemon, register, publish, die, leave and resume, drawn from one seed; and ends of sessions,
of which every step may fail, be late or hang. The memory of a session knows what may read and write it.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from violation import Violation

from kvferry.protocol import session_events as e
from kvferry.protocol.session import DYING_S, KEPT_S, STEP_S, State
from kvferry.protocol.session_events import Step
from kvferry.protocol.sessions import DETACH_S, ROOM_S, Sessions

NEVER = float("inf")
BLOWS = ("attach", "attach", "attach", "register", "register", "end", "end", "publish", "publish", "time", "time",
         "stop", "late word", "late word", "late word")  # fmt: skip
CALM_S = 8 * STEP_S
"""All steps of a session's end may be late, one after the other."""


@dataclass(eq=False)
class Region:
    owned: bool
    freed: bool = False


@dataclass(eq=False)
class Engine:
    """A start of an engine. session: as it was told."""

    name: str
    epoch: str
    alive: bool = True
    session: str = ""
    attaching: str = ""
    lapsed: bool = False
    """Its memory has waited for it in vain, or may never be given to it."""


@dataclass(eq=False)
class Held:
    """A session as the daemon has it."""

    id: str
    engine: Engine
    regions: list[Region] = field(default_factory=list)
    stream: bool = True
    introduced: bool = False
    registered: bool = False
    registering: bool = False
    used: bool = False
    """Something of it may read or write its memory: since a registration began, until all is stopped."""
    whole: int = 0
    """Leases that are published whole, and are read."""
    wanted: bool = False
    """Its end is wanted by somebody who knows."""
    parted: bool = False
    """Its engine is known to be dead, or has left."""
    detached: bool = False
    ended: bool = False
    ended_at: float = NEVER
    hangs: bool = False
    """The step that stops what uses its memory has failed, or has not ended."""
    stray: bool = False
    """A registration has failed, and what it had begun could not be stopped."""
    freeing: bool = False

    @property
    def unquiet(self) -> bool:
        return self.used or self.registering or self.stray

    @property
    def unstopped(self) -> bool:
        return self.hangs or self.registering or self.stray


class World:
    def __init__(self, seed: int, *, told: Callable[[str], None] | None = None) -> None:
        self.seed, self.rng, self.now, self.steps = seed, random.Random(seed), 0.0, 0
        self._told = told
        self.sessions = Sessions()
        self.held: dict[str, Held] = {}
        self.ids, self.epochs = itertools.count(1), itertools.count(1)
        self.engines = {name: Engine(name, f"{name}-0") for name in ("a", "b")[: self.rng.choice((1, 1, 2))]}
        self.attaching: dict[str, tuple[Engine, float]] = {}
        self.registered: set[tuple[str, str]] = set()
        self.due: list[tuple[float, int, e.SessionEvent]] = []
        """Ends of steps, and deaths that are noticed: they come by themselves."""
        self.all: list[Region] = []
        self.calm = self.closing = False
        self.ends: Counter[str] = Counter()
        self.past: deque[str] = deque(maxlen=4)
        """Sessions that are over."""

    def tell(self, *said: object) -> None:
        if self._told is not None:
            self._told(f"{self.steps:5} {self.now:7.1f} s  {' '.join(map(str, said))}")

    # ---- the machine ----

    def feed(self, event: e.SessionEvent) -> None:
        events = deque([event])
        while events:
            each = events.popleft()
            self.steps += 1
            self.tell(each)
            for effect in self.sessions.on(each, self.now):
                self.tell("   ", effect)
                self._do(effect, events)
            self.sessions.check()

    def _do(self, effect: e.SessionEffect, events: deque[e.SessionEvent]) -> None:
        match effect:
            case e.Open(id, _, before):
                engine, _ = self.attaching[id]
                if before is None and (engine.name, engine.epoch) in self.registered:
                    raise Violation("an epoch goes on without its memory", id)
                self.held[id] = Held(id, engine)
                if before is not None:
                    self._resumed(self.held[id], self.held[before])
            case e.Attached(id):
                self._attached(id, events)
            case e.Refused(id, why):
                self._refused(id, why.code)
            case e.Detach(id, _):
                if self.held[id].detached:
                    raise Violation("an engine is detached twice", id)
                self.held[id].detached = True
                self._wanted(self.held[id])
            case e.EndLeases(id, _, keep_whole):
                held = self.held[id]
                if not held.detached:
                    raise Violation("leases end of an engine that is attached", id)
                if any(not each.owned for each in held.regions) and keep_whole:
                    raise Violation("leases outlive the engine that owns their memory", id)
                held.parted, held.whole = True, held.whole if keep_whole else 0
                if not held.whole:
                    events.append(e.LeasesOver(id))
            case e.Shut(id):
                held = self.held[id]
                if held.registering and self.rng.random() < 0.7:
                    events.append(self._over(held, done=False))
            case e.Take(id, step, _, keep):
                self._take(self.held[id], step, keep, events)
            case e.Hold(id):
                if not self.held[id].unstopped:
                    raise Violation("memory is held though all has stopped", id)
            case e.Ended(id, stuck):
                self._ended(self.held[id], stuck)
            case e.Over(id):
                held = self.held.pop(id)
                self.past.append(id)
                if held.regions or held.used or held.stray:
                    raise Violation("something is left of a session that is over", id)

    def _wanted(self, held: Held) -> None:
        if held.engine.alive and held.stream and not held.wanted and not self.closing:
            raise Violation("a session ends though its engine lives in it", held.id)

    def _resumed(self, held: Held, before: Held) -> None:
        if before.engine is not held.engine or before.used or before.stray or before.freeing:
            raise Violation("memory goes on in a session of another start, or is used", held.id)
        held.regions, before.regions = before.regions, []
        self.ends["resumed"] += 1

    def _attached(self, id: str, events: deque[e.SessionEvent]) -> None:
        engine, _ = self.attaching.pop(id)
        for other in self.held.values():
            if other.id != id and other.engine.name == engine.name and not other.ended:
                raise Violation("an engine is attached beside its session before", id)
        engine.attaching = ""
        if self.calm or self.rng.random() < 0.9:
            engine.session = id
        else:  # it hears nothing of it
            self.held[id].stream = False
            events.append(e.StreamEnded(id))
        self.ends["attached"] += 1

    def _refused(self, id: str, code: str) -> None:
        engine, _ = self.attaching.pop(id)
        engine.attaching = ""
        others = [each for each in self.held.values() if each.engine.name == engine.name]
        right = {
            "engine_attached": any(not each.detached for each in others),
            "epoch_reused": (engine.name, engine.epoch) in self.registered and (engine.lapsed or not engine.session),
            "not_quiet": any(each.unstopped for each in others),
            "draining": self.closing,
        }
        if not right[code]:
            raise Violation(f"refused for nothing: {code}", id)
        self.ends[code] += 1

    def _take(self, held: Held, step: Step, keep: bool, events: deque[e.SessionEvent]) -> None:
        self._wanted(held)
        self._check_step(held, step)
        held.freeing |= step is Step.FREE and not keep
        if step is Step.FREE and not keep and self.now >= held.ended_at + KEPT_S:
            held.engine.lapsed = True
        draw = 0.0 if self.calm else self.rng.random()
        if draw < 0.5:
            events.append(self._taken(held, step, keep, done=True))
        elif draw < 0.7:
            self._later(self.rng.choice((0.1, 5.0, 20.0)), e.StepOver(held.id, step, True), keep)
        elif draw < 0.85:
            self._fails(held, step)
            events.append(e.StepOver(held.id, step, False))
        else:
            self._fails(held, step)
            if self.rng.random() < 0.5:
                self._later(STEP_S + self.rng.choice((1.0, 20.0, 20.0, STEP_S)), e.StepOver(held.id, step, True), keep)

    def _fails(self, held: Held, step: Step) -> None:
        """Or hangs. Memory that cannot be freed is held elsewhere, and accounted for."""
        if step is Step.STOP:
            held.hangs = held.used = True
        elif step is Step.FREE:
            held.regions = []

    def _check_step(self, held: Held, step: Step) -> None:
        if step is Step.TRANSFERS and held.whole and held.parted and not (held.wanted or self.closing):
            raise Violation("leases end under their readers", held.id)
        if step is Step.FREE and held.unquiet:
            raise Violation("memory is freed while something may read or write it", held.id)

    def _taken(self, held: Held, step: Step, keep: bool, done: bool) -> e.SessionEvent:
        match step:
            case Step.LEASES:
                held.whole = 0
            case Step.STOP:
                held.used, held.hangs = held.registering, False
            case Step.FREE:
                for region in [each for each in held.regions if not (keep and each.owned)]:
                    if region.freed:
                        raise Violation("memory is freed twice", held.id)
                    region.freed = True
                    held.regions.remove(region)
        return e.StepOver(held.id, step, done)

    def _ended(self, held: Held, stuck: bool) -> None:
        if held.ended:
            raise Violation("an engine is told the end of its session twice", held.id)
        held.ended, held.ended_at = True, self.now
        held.engine.lapsed |= stuck
        if held.unquiet and not stuck:
            raise Violation("an engine is told that all is quiet while it is not", held.id)
        self.ends["stuck" if stuck else "retired"] += 1

    # ---- time ----

    def _later(self, seconds: float, event: e.SessionEvent, keep: bool = False) -> None:
        self.due.append((self.now + seconds, int(keep), event))

    def _comes(self, keep: int, event: e.SessionEvent) -> None:
        if isinstance(event, e.StepOver):
            held = self.held.get(event.session)
            if held is not None:
                self._taken(held, event.step, bool(keep), done=True)
        self.feed(event)

    def pass_time(self, seconds: float) -> None:
        until, rings = self.now + seconds, 0
        while True:
            timer = self.sessions.next_timer()
            at = min([at for at, _, _ in self.due], default=NEVER)
            if min(at, NEVER if timer is None else timer) > until:
                break
            first = at if timer is None or at < timer or (at == timer and self.rng.random() < 0.5) else timer
            rings = rings + 1 if first == timer and first <= self.now else 0
            if rings > 20:
                raise Violation("a timer rings and rings")
            self.now = max(self.now, first)
            if first == at and at <= self.now and (timer != first or self.rng.random() < 0.5):
                each = min(self.due, key=lambda each: each[0])
                self.due.remove(each)
                self._comes(*each[1:])
            else:
                self.feed(e.Tick())
        self.now = until

    # ---- engines ----

    def attach(self, name: str, *, resume: bool) -> Engine:
        engine = self.engines[name]
        if not engine.alive or not resume:
            engine = self.engines[name] = Engine(name, f"{name}-{next(self.epochs)}")
        id = engine.attaching = str(next(self.ids))
        self.attaching[id] = engine, self.now
        for held in self.held.values():
            held.wanted |= held.engine.name == name and (not held.stream or held.id == engine.session)
        self.feed(e.Attach(id, e.Rank(engine.name, engine.epoch, 0, 1), engine.session if resume else ""))
        return engine

    def _mine(self, engine: Engine) -> Held | None:
        held = self.held.get(engine.session)
        return held if held is not None and self.sessions.is_open(held.id) and not held.detached else None

    def introduce(self, held: Held) -> None:
        held.introduced = True
        self.feed(e.Introduced(held.id))

    def register(self, held: Held) -> None:
        rng = self.rng
        if held.registered or held.registering:
            return
        if not held.introduced and rng.random() < 0.8:
            self.introduce(held)
        if not held.regions:
            for _ in range(rng.randint(1, 2)):
                held.regions.append(region := Region(owned=rng.random() < 0.7))
                self.all.append(region)
                self.feed(e.Allocated(held.id, region.owned))
        held.registering = held.used = True
        self.feed(e.RegistrationBegun(held.id))
        if rng.random() < 0.7:
            self.feed(self._over(held, done=rng.random() < 0.8))

    def _over(self, held: Held, *, done: bool) -> e.SessionEvent:
        """One that fails stops what it has begun, or cannot. None is done in a session that is not open any more."""
        done = done and not held.detached
        held.registering, held.registered = False, done
        stopped = self.calm or self.rng.random() < 0.8
        if done:
            self.registered.add((held.engine.name, held.engine.epoch))
        else:
            held.used, held.stray = held.hangs, held.stray or not stopped
        return e.RegistrationOver(held.id, done, stopped)

    def end(self, engine: Engine) -> None:
        """The stream, the process, or the session ends, in every order; of the start before, if that stands."""
        standing = (each for each in self.held.values() if each.engine.name == engine.name and not each.detached)
        held = next((each for each in standing if each.engine is not engine), None)
        held, engine = (self._mine(engine), engine) if held is None else (held, held.engine)
        how = self.rng.choice(("stream", "death", "death", "leave", "withdraw", "give up"))
        self.tell(f"{engine.name}: {how}")
        if how == "give up" and engine.attaching:
            id, engine.attaching = engine.attaching, ""
            del self.attaching[id]
            if id in self.held:
                self.held[id].wanted = True
            self.feed(e.GiveUp(id))
            return
        if held is None:
            return
        held.wanted |= any(other.name == engine.name for other, _ in self.attaching.values())  # a start takes its place
        if how == "stream":
            held.stream = False
            self.feed(e.StreamEnded(held.id))
        elif how == "death":
            engine.alive = held.stream = False
            events: list[e.SessionEvent] = [e.StreamEnded(held.id)]
            if held.introduced:
                late = e.Died(held.id)
                if self.rng.random() < 0.3:
                    self._later(self.rng.choice((1.0, DYING_S - 1.0)), late)
                else:
                    events.append(late)
            for each in self.rng.sample(events, len(events)):
                self.feed(each)
        elif how == "leave":
            engine.alive = held.stream = False
            self.feed(e.Leave(held.id))
        elif how == "withdraw":
            held.wanted = True
            self.feed(e.Withdraw(held.id))

    def _say_late(self) -> None:
        """A word of a session that is not open any more: of its stream, its process, or its last reader."""
        if self.past and self.rng.random() < 0.3:
            self.feed(self.rng.choice((e.StreamEnded, e.Died))(self.rng.choice(self.past)))
        for held in [each for each in self.held.values() if each.detached]:
            what = self.rng.choice((e.StreamEnded, e.Died, e.LeasesOver, e.RegistrationOver))
            if what is e.RegistrationOver:
                if held.registering:
                    self.feed(self._over(held, done=False))
            elif what is not e.Died or self._may_die(held.engine):
                held.stream = held.stream and what is e.LeasesOver
                held.whole = held.whole if what is not e.LeasesOver else 0
                held.engine.alive = held.engine.alive and what is not e.Died
                self.feed(what(held.id))

    def _may_die(self, engine: Engine) -> bool:
        """No other session is its own."""
        return not engine.attaching and all(each.detached for each in self.held.values() if each.engine is engine)

    # ---- a run ----

    def blow(self) -> None:
        rng, name = self.rng, self.rng.choice(list(self.engines))
        engine = self.engines[name]
        held = self._mine(engine)
        match rng.choice(BLOWS):
            case "attach":
                if not engine.attaching and (held is None or rng.random() < 0.1):
                    if held is not None and rng.random() < 0.5:  # another start beside the one that lives
                        engine.session = ""
                    self.attach(name, resume=bool(engine.session) and rng.random() < 0.6)
            case "register" if held is not None:
                self.register(held)
            case "end":
                self.end(engine)
            case "publish" if held is not None and held.registered:
                held.whole += 1
            case "stop":
                for each in list(self.held.values()):
                    if each.whole and rng.random() < 0.5:
                        each.whole = 0
                        self.feed(e.LeasesOver(each.id))
                    if each.registering and rng.random() < 0.5:
                        self.feed(self._over(each, done=rng.random() < 0.7))
            case "late word":
                self._say_late()
            case _:
                self.pass_time(rng.choice((0.0, DETACH_S, 1.0, 1.0, DYING_S, DYING_S, KEPT_S, STEP_S)))

    def run(self) -> None:
        for _ in range(self.rng.randint(300, 900)):
            self.blow()
        self.tell("blows stop")
        self.calm = True
        self._come_to_rest()
        self._attach_once_more()
        if self.rng.random() < 0.5:
            self._close()
        self.ends["done"] += 1

    def _close(self) -> None:
        """Engines that attach meanwhile are refused: nobody would end their sessions."""
        before, name = self.rng.random() < 0.5, self.rng.choice(list(self.engines))
        if before:
            self.attach(name, resume=False)
        self.closing, opened = True, set(self.held)
        self.feed(e.Close())
        if not before:
            self.attach(name, resume=False)
        self.pass_time(CALM_S)
        if self.attaching:
            raise Violation("an engine that attaches is never answered", f"{self.attaching}")
        if set(self.held) - opened:
            raise Violation("a session is opened though the daemon stops", f"{set(self.held) - opened}")
        self._check_empty(closed=True)

    def _come_to_rest(self) -> None:
        for held in list(self.held.values()):
            if held.whole:
                held.whole = 0
                self.feed(e.LeasesOver(held.id))
            if held.registering:
                self.feed(self._over(held, done=False))
        self.pass_time(CALM_S)
        if self.attaching:
            raise Violation("an engine that attaches is never answered", f"{self.attaching}")
        self._check_empty()

    def _check_empty(self, *, closed: bool = False) -> None:
        for held in self.held.values():
            living = held.engine.alive and held.stream and not held.detached and not closed
            if not (living or held.hangs or held.stray):
                raise Violation("a session does not end", f"{held}")
        kept = {region for held in self.held.values() for region in held.regions}
        timers = [each for each in self.sessions.sessions.values() if each.due is not None]
        if timers:
            raise Violation("a timer is left", f"{timers}")
        self.ends["freed"] += sum(region.freed for region in self.all if region not in kept)

    def _attach_once_more(self) -> None:
        """An engine that resumes at the last moment has its memory; and another start is attached after it."""
        name = self.rng.choice(list(self.engines))
        for each in list(self.held.values()):
            if each.engine.name == name and self.sessions.is_open(each.id) and not each.detached:
                each.wanted = True
                each.stream = each.engine.alive = False
                self.feed(e.Leave(each.id))
        engine = self.attach(name, resume=False)
        self.pass_time(ROOM_S + 1.0)
        held = self._mine(engine)
        if held is None:
            raise Violation("an engine is not attached though nothing stands in the way")
        held.regions.append(region := Region(owned=True))
        self.all.append(region)
        self.feed(e.Allocated(held.id, True))
        self.introduce(held)
        held.registering = held.used = True
        self.feed(e.RegistrationBegun(held.id))
        self.feed(self._over(held, done=True))
        held.stream = False
        self.feed(e.StreamEnded(held.id))
        self.pass_time(DYING_S + KEPT_S - 1.0)
        if self.sessions.sessions[held.id].state is not State.KEPT or region.freed:
            raise Violation("memory does not wait for its engine")
        again = self.attach(name, resume=True)
        self.pass_time(1.0)
        if (mine := self._mine(again)) is None or mine.regions != [region]:
            raise Violation("an engine that resumes in time does not have its memory")
