"""Daemons that serve, stand by and die, and wishes for others that are kept.

The daemon whose turn it is takes over, serves, or drains. Another one stands by. A wish for an upgrade is a number: a
daemon fulfils it whose own is not lower, as it was started later. Each step that a daemon must take has a deadline. A
late daemon is killed, and given up if it does not even end then.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from kvferry.protocol import keeper_events as e
from kvferry.protocol.values import Sizes

LASTED_S = 5.0
"""A daemon that has served for so long does not count as one that dies at once."""
PAUSES_S = (0.0, 0.0, 0.5, 1.0, 2.0, 4.0)
"""Before the next daemon's turn, by how many in a row have died before LASTED_S."""
STANDBYS_APART_S = 10.0
"""Between the starts of two that stand by, where the first has died: one that does not load must not take a core."""
LOADS_S = 120.0
"""The longest that a daemon may take to load, once one has served, and to take over: torch and Triton from a cold disk
take a minute."""
BEYOND_DRAIN_S = 10.0
"""How much longer than its drain a daemon may take to stop."""
AGAIN_S = 5.0
"""How long a daemon may take to stop that is told so a second time."""
KILLED_S = 10.0
"""How long a daemon may take to end that is killed. In the kernel it may take longer; it runs none of its code then."""
MOST = 4
"""Processes: one has its turn, one stands by, another one loads in its place, and one has been killed."""


class State(enum.Enum):
    LOADING = "loading"
    LOADED = "loaded"
    SERVING = "serving"
    STOPPING = "stopping"
    KILLED = "killed"


@dataclass(slots=True, eq=False)
class Daemon:
    """due: when it is killed, or given up, unless something comes from it. wanted: it has not been told to go."""

    number: int
    started: float
    due: float | None
    state: State = State.LOADING
    served: float | None = None
    drain_s: float = LOADS_S
    wanted: bool = True

    @property
    def alive(self) -> bool:
        return self.state is not State.KILLED


def _nearness(daemon: Daemon) -> tuple[bool, int]:
    """To serving, the nearest first."""
    return daemon.state is not State.LOADED, daemon.number


@dataclass(slots=True)
class Deaths:
    """How long to wait before the next daemon's turn. in_a_row: how many have died that did not last."""

    in_a_row: int = 0

    def pause_s(self, lasted_s: float) -> float:
        """Another has died, which had served for so long."""
        self.in_a_row = 0 if lasted_s >= LASTED_S else self.in_a_row + 1
        return PAUSES_S[min(self.in_a_row, len(PAUSES_S) - 1)]


@dataclass(slots=True)
class Wishes:
    """upgrade: the lowest number of a daemon that would fulfil it; 0: none is wished for. stop: how often."""

    upgrade: int = 0
    stop: int = 0


@dataclass(slots=True)
class Next:
    """When a daemon has its turn, where none has, with what became of the one before, and its status; and when the next
    one that stands by may be started."""

    turn: float | None = None
    why: str = ""
    status: int = 0
    standby: float = 0.0


@dataclass(slots=True)
class Keeper:
    daemons: dict[int, Daemon] = field(default_factory=dict)
    current: int = 0
    """The daemon whose turn it is; 0: none."""
    wishes: Wishes = field(default_factory=Wishes)
    next: Next = field(default_factory=Next)
    deaths: Deaths = field(default_factory=Deaths)
    started: int = 0
    slow: int = 1
    """Times LOADS_S: twice as much after each daemon that was killed for it, as disks may be slow."""
    served: bool = False
    """Any has."""
    ended: bool = False

    def on(self, event: e.KeeperEvent, now: float) -> list[e.KeeperEffect]:
        """Words of a daemon that is not known any more are dropped."""
        assert isinstance(event, e.Begin) is not bool(self.started), "it begins once, and first"
        assert not isinstance(event, e.NotStarted) or self.daemons[event.daemon].state is State.LOADING
        if self.ended:
            return []
        match event:
            case e.Begin():
                effects = self._follow(now)
            case e.NotStarted(number, why):
                effects = self._not_started(self.daemons.pop(number), why, now)
            case e.Loaded(number, drain_s):
                effects = self._loaded(self.daemons.get(number), drain_s, now)
            case e.Serves(number):
                effects = self._serves(self.daemons.get(number), now)
            case e.Died(number, status, how):
                effects = self._died(number, status, how, now)
            case e.Upgrade():
                effects = self._upgrade(now)
            case e.Stop(number):
                effects = self._stop(number, now)
            case e.Tick():
                effects = self._late(now)
        return effects + self._settle(now)

    # ---- a daemon's life ----

    def _start(self, now: float) -> tuple[Daemon, list[e.KeeperEffect]]:
        self.started += 1
        due = now + self.slow * LOADS_S if self.served else None  # the first of all is its supervisor's matter
        daemon = self.daemons[self.started] = Daemon(self.started, now, due)
        return daemon, [e.Start(daemon.number)]

    def _follow(self, now: float) -> list[e.KeeperEffect]:
        """The nearest daemon has its turn."""
        waiting = [each for each in self._others() if each.alive]
        effects: list[e.KeeperEffect] = []
        if waiting:
            daemon = min(waiting, key=_nearness)
        else:
            daemon, effects = self._start(now)
        if daemon.state is State.LOADED:
            daemon.due = now + LOADS_S
        self.current, self.next.turn = daemon.number, None
        return [*effects, e.Turn(daemon.number, self.next.why)]

    def _not_started(self, daemon: Daemon, why: str, now: float) -> list[e.KeeperEffect]:
        self.next.standby = now + STANDBYS_APART_S
        what = f"no daemon can be started now ({why})"
        if daemon.number == self.current:
            self.current, self.next.turn = 0, now + PAUSES_S[-1]
            if not self.served:
                return [e.Report(what), *self._end(1, now)]
            return [e.Report(f"{what}: nobody serves; it is tried again in {PAUSES_S[-1]:g} s")]
        if self._answers(daemon):
            return self._stays(daemon, what)
        return [e.Report(f"{what}: another one that stands by is tried again in {STANDBYS_APART_S:g} s")]

    def _loaded(self, daemon: Daemon | None, drain_s: float, now: float) -> list[e.KeeperEffect]:
        if daemon is None or daemon.state is not State.LOADING:
            return []
        self.slow, daemon.drain_s, daemon.state = 1, drain_s, State.LOADED
        daemon.due = now + LOADS_S if daemon.number == self.current and self.served else None
        return self._drop(now, *(each for each in self._others() if each.number < daemon.number))

    def _serves(self, daemon: Daemon | None, now: float) -> list[e.KeeperEffect]:
        if daemon is None or daemon.number != self.current or daemon.state is not State.LOADED:
            return []
        first, self.served = not self.served, True
        daemon.state, daemon.due, daemon.served = State.SERVING, None, now
        self.next.standby = now
        if daemon.number >= self.wishes.upgrade:
            self.wishes.upgrade = 0
        return [e.Ready()] if first else []

    def _died(self, number: int, status: int, how: str, now: float) -> list[e.KeeperEffect]:
        daemon = self.daemons.pop(number, None)
        if daemon is None:
            return []
        if number == self.current:
            return self._current_ended(daemon, status, how, now)
        if not daemon.wanted:
            return []
        self.next.standby = daemon.started + STANDBYS_APART_S
        if self._answers(daemon):
            return self._stays(daemon, f"the new daemon does not load ({how})")
        who = "the new daemon" if 0 < self.wishes.upgrade <= daemon.number else "the daemon that stood by"
        return [e.Report(f"{who} is dead ({how}): another one is loaded")]

    def _current_ended(self, daemon: Daemon, status: int, how: str, now: float) -> list[e.KeeperEffect]:
        self.current, self.next.status, self.next.why = 0, status, how
        if self.wishes.stop or not self.served:
            return self._end(status, now)
        effects, pause_s = list[e.KeeperEffect](), 0.0
        if not daemon.wanted:
            self.next.why = "it was upgraded"
        elif pause_s := self.deaths.pause_s(0.0 if daemon.served is None else now - daemon.served):
            times = f"{self.deaths.in_a_row} daemons in a row have not lasted {LASTED_S:g} s"
            what = f"{times}; of the last one: {how}. The next one's turn is in {pause_s:g} s"
            effects.append(e.Report(what))
        self.next.turn = now + pause_s
        return effects

    # ---- wishes ----

    def _upgrade(self, now: float) -> list[e.KeeperEffect]:
        """The daemon that stands by stays until another one is loaded, whatever its code; others that load go."""
        if self.wishes.stop:
            return []
        self.wishes.upgrade, self.next.standby = self.started + 1, now
        return self._drop(now, *sorted((each for each in self._others() if each.alive), key=_nearness)[1:])

    def _answers(self, daemon: Daemon) -> bool:
        """Whether its failure is the answer to a wish: otherwise the next one is to fulfil it."""
        serving = self.current and self.daemons[self.current].state is State.SERVING
        return bool(serving) and 0 < self.wishes.upgrade <= daemon.number

    def _stays(self, daemon: Daemon, what: str) -> list[e.KeeperEffect]:
        self.wishes.upgrade = 0
        return [e.Stays(daemon.number, f"{what}: the one that serves stays")]

    def _stop(self, signal: int, now: float) -> list[e.KeeperEffect]:
        self.wishes.stop += 1
        if not self.current:
            return self._end(self.next.status, now)
        effects = self._drop(now, *self._others())
        daemon = self.daemons[self.current]
        if not daemon.alive or (self.wishes.stop == 1 and daemon.state is State.STOPPING):
            return effects  # it drains already, and a second signal ends that
        patience_s = daemon.drain_s + BEYOND_DRAIN_S if self.wishes.stop == 1 else AGAIN_S
        return [*effects, *self._told(daemon, signal, now + patience_s)]

    def _end(self, status: int, now: float) -> list[e.KeeperEffect]:
        effects = self._drop(now, *self._others())
        self.ended = True
        return [*effects, e.End(status)]

    def _told(self, daemon: Daemon, signal: int, due: float) -> list[e.KeeperEffect]:
        daemon.state, daemon.due, daemon.wanted = State.STOPPING, due, False
        return [e.Signal(daemon.number, signal)]

    def _drop(self, now: float, *daemons: Daemon) -> list[e.KeeperEffect]:
        effects: list[e.KeeperEffect] = []
        for daemon in daemons:
            daemon.wanted = False
            effects += self._kill(daemon, now) if daemon.alive else []
        return effects

    def _kill(self, daemon: Daemon, now: float) -> list[e.KeeperEffect]:
        daemon.state, daemon.due = State.KILLED, now + KILLED_S
        return [e.Signal(daemon.number, e.KILL)]

    def _others(self) -> list[Daemon]:
        return [each for each in self.daemons.values() if each.number != self.current]

    # ---- what must happen by itself ----

    def _settle(self, now: float) -> list[e.KeeperEffect]:
        """After each event: a daemon may have its turn, be started, or have to go for another one."""
        effects: list[e.KeeperEffect] = []
        if self.ended or self.wishes.stop:
            return effects
        if self.next.turn is not None and self.next.turn <= now:
            effects += self._follow(now)
        if self._wants_another() and self.next.standby <= now:
            effects += self._start(now)[1]
        current = self.daemons.get(self.current)
        loaded = [each.number for each in self._others() if each.state is State.LOADED]
        wished = self.wishes.upgrade <= max(loaded, default=0)
        if current is not None and current.state is State.SERVING and current.number < self.wishes.upgrade and wished:
            effects += self._told(current, e.TERM, now + current.drain_s + BEYOND_DRAIN_S)
        return effects

    def _wants_another(self) -> bool:
        """A daemon that stands by is missing; or one of the code of now, where an upgrade is wished for."""
        current = self.daemons.get(self.current)
        serving = current is not None and current.state in (State.SERVING, State.STOPPING)
        wished = self.current < self.wishes.upgrade
        if self.wishes.stop or not self.served or len(self.daemons) >= MOST or not (serving or wished):
            return False
        return not any(each.alive and each.number >= self.wishes.upgrade for each in self._others())

    def _late(self, now: float) -> list[e.KeeperEffect]:
        """Kill one daemon that is late, or give it up. The timer rings for the next, unless this was the last."""
        daemon = next((each for each in self.daemons.values() if each.due is not None and each.due <= now), None)
        if daemon is None:
            return []
        match daemon.state:
            case State.KILLED:
                what = f"a daemon has not ended {KILLED_S:g} s after it was killed: it is given up"
                return [e.Report(what), *self._died(daemon.number, -e.KILL, "it was killed", now)]
            case State.LOADING:
                what = f"a daemon has not loaded within {now - daemon.started:.0f} s"
                self.slow *= 2
            case State.STOPPING:
                what = "a daemon that was told to stop has not"
            case _:
                what = f"a daemon has not taken over within {LOADS_S:g} s"
        return [e.Report(f"{what}: it is killed"), *self._kill(daemon, now)]

    def next_timer(self) -> float | None:
        times = [each.due for each in self.daemons.values() if each.due is not None]
        times += [self.next.turn] if self.next.turn is not None else []
        times += [self.next.standby] if self._wants_another() else []
        return None if self.ended else min(times, default=None)

    def check(self) -> None:
        assert self.ended or (self.current in self.daemons) != (self.next.turn is not None)
        assert len(self.daemons) <= (MOST if self.served else 1)
        assert self.wishes.upgrade <= self.started + 1
        for number, daemon in self.daemons.items():
            assert number == daemon.number <= self.started
            assert number == self.current or daemon.state not in (State.SERVING, State.STOPPING)
            rests = daemon.state is State.SERVING or (daemon.state is State.LOADED and number != self.current)
            assert (daemon.due is None) == (rests or (not self.served and daemon.wanted))

    def sizes(self) -> Sizes:
        return {"daemons": len(self.daemons)}
