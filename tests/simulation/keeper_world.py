"""A keeper and its daemons, drawn from one seed: processes that start slowly or not, that hang or die at any time, and
wishes for upgrades and stops at any time. In the second part of a run new daemons are well, and nothing is wished for.
"""

from __future__ import annotations

import enum
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from violation import Violation

from kvferry.protocol import keeper_events as e
from kvferry.protocol.keeper import AGAIN_S, BEYOND_DRAIN_S, KILLED_S, LOADS_S, MOST, STANDBYS_APART_S, Keeper, State

DRAIN_S, NEVER = 30.0, float("inf")
CALM_S = 40 * LOADS_S
"""Within which all is as it should be, once blows have stopped: what hangs is killed, after twice as long each time."""
LIVES = 32
"""Keepers of one run, in turn."""
TURNS = 6
"""As many within half a second are too many, when daemons die at once and upgrades come between."""
BLOWS = ("upgrade", "upgrade", "kill", "kill", "time", "time", "time", "time", "time", "stop",
         "crashes")  # fmt: skip


class Does(enum.Enum):
    """A process does one of these."""

    LOAD = "loads"
    WAIT = "waits for its turn"
    TAKE = "takes over"
    SERVE = "serves"
    DRAIN = "drains"
    LINGER = "is killed, and does not end"


@dataclass(eq=False)
class Process:
    """until: when it is done with what it does, or dies of it. since: when it began, or was told to drain."""

    number: int
    since: float
    does: Does
    until: float
    dies: bool
    said: deque[e.KeeperEvent] = field(default_factory=deque)
    """What the keeper has not heard yet."""
    turn: bool = False


class World:
    def __init__(self, seed: int, *, told: Callable[[str], None] | None = None) -> None:
        self.seed, self.rng, self.now, self.steps = seed, random.Random(seed), 0.0, 0
        self._told = told
        self.ends: Counter[str] = Counter()
        self._anew()

    def _anew(self) -> None:
        """On another host, with another keeper."""
        self.keeper = Keeper()
        self.processes: dict[int, Process] = {}
        self.gone: deque[e.KeeperEvent] = deque()
        """Words and deaths of processes that have ended."""
        self.calm = self.crashing = False
        """New daemons are well; or die when they have their turn."""
        self.hangs = self.rng.choice((0.06, 0.06, 0.4))
        """Share of what daemons do that never ends; some hosts are bad."""
        self.impatient = self.rng.choice((0.0, 0.0, 0.3, 0.5))
        """How often somebody wishes for something while nothing serves."""
        self.wishes: list[int] = []
        """Each the number of the last daemon that had been started when it came."""
        self.stops: list[float] = []
        self.ready = 0
        self.status: int | None = None
        self.turns: deque[float] = deque(maxlen=TURNS)

    def tell(self, line: str) -> None:
        if self._told is not None:
            self._told(f"{self.steps:5} {self.now:7.1f} s  {line}")

    # ---- the keeper ----

    def feed(self, event: e.KeeperEvent) -> None:
        """As its shell does: what comes of an effect comes after all effects."""
        events = deque([event])
        while events:
            next_one = events.popleft()
            self.steps += 1
            for effect in self.keeper.on(next_one, self.now):
                self._do(effect, events)
            self.keeper.check()
            if self.keeper.sizes()["daemons"] > MOST:
                raise Violation("more daemons than there may be")

    def _do(self, effect: e.KeeperEffect, events: deque[e.KeeperEvent]) -> None:
        self.tell(f"keeper: {effect}")
        if self.status is not None:
            raise Violation("something is done after the end")
        match effect:
            case e.Start(number):
                self._start(number, events)
            case e.Turn(number, _):
                self._turn(number)
            case e.Signal(number, which):
                if number in self.processes:
                    self._signal(self.processes[number], which)
            case e.Ready():
                self.ready += 1
            case e.Stays(number, _):
                if not any(each.does is Does.SERVE for each in self.processes.values()) and not self._unheard():
                    raise Violation("nothing that serves stays")
                if not self.stops and all(wish >= number for wish in self.wishes):
                    raise Violation("a wish is answered that nobody has")
                self.wishes = [wish for wish in self.wishes if wish >= number]
                self.ends["answered"] += 1
            case e.End(status):
                self.status = status
                self._ended()

    def _unheard(self) -> bool:
        return bool(self.gone) or any(each.said for each in self.processes.values())

    def _start(self, number: int, events: deque[e.KeeperEvent]) -> None:
        rng = self.rng
        if number in self.processes:
            raise Violation("a daemon is started twice")
        if not self.calm and rng.random() < (0.15 if number > 1 else 0.01):
            events.append(e.NotStarted(number, "no process"))
            return
        until, dies = (0.01, False) if self.crashing else self._drawn((1.0, 5.0, 60.0), 0.12)
        if number == 1:  # its supervisor watches it
            until, dies = min(until, 5.0), rng.random() < 0.02
        self.processes[number] = Process(number, self.now, Does.LOAD, self.now + until, dies)

    def _drawn(self, takes: tuple[float, ...], dies: float) -> tuple[float, bool]:
        """How long something takes, and whether it ends with a death."""
        if self.calm or self.crashing:
            return (0.01, True) if self.crashing else (1.0, False)
        if self.rng.random() < self.hangs:
            return NEVER, False
        return self.rng.choice(takes), self.rng.random() < dies

    def _turn(self, number: int) -> None:
        process = self.processes.get(number)
        self._check_pauses()
        if process is not None:
            process.turn = True
            if process.does is Does.WAIT:
                self._takes(process)

    def _check_pauses(self) -> None:
        self.turns.append(self.now)
        if len(self.turns) == TURNS and self.turns[-1] - self.turns[0] < 0.5:
            raise Violation("daemons take turns without a pause")

    def _takes(self, process: Process) -> None:
        takes_s, process.dies = self._drawn((0.1, 1.0, 10.0), 0.15)
        process.does, process.since = Does.TAKE, self.now
        process.until = self.now + (min(takes_s, 10.0) if process.number == 1 else takes_s)

    def _signal(self, process: Process, number: int) -> None:
        if number == e.KILL:
            if not self._may_be_killed(process):
                raise Violation("a daemon that does what it should is killed", f"{process}")
            if not self.calm and self.rng.random() < 0.8:
                lasts_s = self.rng.choice((3.0, KILLED_S + 3.0, NEVER))
                process.does, process.until, process.dies = Does.LINGER, self.now + lasts_s, True
            else:
                self._dies(process, -number)
        elif process.does in (Does.LOAD, Does.WAIT, Does.TAKE):
            self._dies(process, -number)
        elif process.does is Does.SERVE:
            if not self.stops and max(self.wishes, default=-1) < process.number:
                raise Violation("a daemon that serves is told to stop, and nobody wishes it")
            process.does, process.since = Does.DRAIN, self.now
            drains_s, process.dies = (1.0 if self.calm else self.rng.choice((0.0, 1.0, DRAIN_S, NEVER))), True
            process.until = self.now + drains_s
        elif process.does is Does.DRAIN:
            if len(self.stops) < 2:
                raise Violation("a drain is cut off by the first signal")
            process.since = self.now
            process.until = min(process.until, self.now + 1.0) if process.until < NEVER else NEVER

    def _may_be_killed(self, process: Process) -> bool:
        """It is late, or another one is there in its place."""
        age_s = self.now - process.since + 1e-6
        newer = any(each.number > process.number for each in self.processes.values())
        unheard = any(isinstance(said, e.Loaded) for said in process.said)
        match Does.LOAD if unheard else process.does:
            case Does.DRAIN:
                return age_s >= (AGAIN_S if len(self.stops) > 1 else DRAIN_S + BEYOND_DRAIN_S)
            case Does.TAKE:
                return age_s >= LOADS_S or bool(self.stops)
            case Does.WAIT:
                return newer or bool(self.stops)
            case Does.LOAD:
                wished = max(self.wishes, default=0) >= process.number
                return age_s >= LOADS_S or newer or wished or bool(self.stops)
            case _:
                return False

    def _dies(self, process: Process, status: int) -> None:
        del self.processes[process.number]
        self.gone.extend([*process.said, e.Died(process.number, status, f"status {status}")])

    def _ended(self) -> None:
        self.ends["ended"] += 1
        if not self.stops and self.ready:
            raise Violation("the keeper ends, and nobody wishes it")
        if any(each.does in (Does.SERVE, Does.DRAIN) for each in self.processes.values()):
            raise Violation("the keeper ends before its daemon")

    # ---- processes ----

    def hear(self) -> bool:
        """The keeper hears one word, or of one death."""
        said = [each.said for each in self.processes.values() if each.said] + ([self.gone] if self.gone else [])
        if not said:
            return False
        self.feed(self.rng.choice(said).popleft())
        return True

    def act(self, process: Process) -> None:
        """It is done with what it does."""
        if process.dies:
            self._dies(process, 0 if process.does is Does.DRAIN else -e.KILL if process.does is Does.LINGER else 1)
        elif process.does is Does.LOAD:
            process.said.append(e.Loaded(process.number, DRAIN_S))
            process.does, process.since, process.until = Does.WAIT, self.now, NEVER
            if process.turn:
                self._takes(process)
        elif process.does is Does.TAKE:
            process.said.append(e.Serves(process.number))
            process.does, process.until = Does.SERVE, NEVER
            self.ends["served"] += 1
            if sum(each.does in (Does.SERVE, Does.DRAIN) for each in self.processes.values()) > 1:
                raise Violation("two daemons serve")
            self.wishes = [wish for wish in self.wishes if wish >= process.number]

    def pass_time(self, seconds: float) -> None:
        """All that is due happens in its order; what happens at one time, in any."""
        until, rings = self.now + seconds, 0
        while self.status is None:
            while self.hear():
                pass
            timer = self.keeper.next_timer()
            due = min([each.until for each in self.processes.values()], default=NEVER)
            at = min(due, NEVER if timer is None else timer)
            if at > until:
                break
            rings = rings + 1 if at <= self.now and due > self.now else 0
            if rings > 20:
                raise Violation("a timer rings and rings")
            self.now = max(self.now, at)
            if due <= self.now and (timer is None or timer > self.now or self.rng.random() < 0.5):
                self.act(next(each for each in self.processes.values() if each.until <= self.now))
            else:
                self.feed(e.Tick())
            self._lose_patience()
        self.now = until

    def _lose_patience(self) -> None:
        """Nothing serves: whoever sees it may wish for something, and wish again."""
        current = self.processes.get(self.keeper.current)
        waits = not self.calm and (current is None or current.does is not Does.SERVE)
        while waits and self.status is None and self.rng.random() < self.impatient:
            self.wish("stop" if self.rng.random() < 0.4 else "upgrade")

    # ---- a run ----

    def wish(self, what: str) -> None:
        if what == "stop":
            self.tell("SIGTERM")
            self.stops.append(self.now)
            self.wishes.clear()  # the stop is the answer
            self.feed(e.Stop(e.TERM))
        else:
            self.tell("SIGHUP")
            if not self.stops:
                self.wishes.append(self.keeper.started)
            self.feed(e.Upgrade())

    def blow(self) -> None:
        rng = self.rng
        match rng.choice(BLOWS):
            case "upgrade":
                self.wish("upgrade")
            case "stop":
                if rng.random() < 0.3:
                    self.wish("stop")
            case "crashes":
                self.tell("daemons crash")
                self.crashing = True
                self.pass_time(rng.choice((1.0, 10.0)))
                self.crashing = False
            case "kill":
                if self.processes:
                    process = self.processes.get(self.keeper.current) or rng.choice(list(self.processes.values()))
                    process = rng.choice([process, *self.processes.values()])
                    self.tell(f"daemon {process.number} dies, which {process.does.value}")
                    self._dies(process, -11)
            case _:
                self.pass_time(rng.choice((0.0, 0.2, 3.0, 6.0, 30.0, 60.0)))

    def run(self) -> None:
        for life in range(LIVES):
            if life:
                self._anew()
            self._live()

    def _live(self) -> None:
        self.feed(e.Begin())
        if self.rng.random() < 0.8:
            self.pass_time(20.0)
        for _ in range(self.rng.randint(5, 60)):
            if self.status is not None:
                break
            if self.rng.random() < 0.5:
                self.hear()
            else:
                self.blow()
        self.tell("blows stop")
        self.calm = True
        self._come_to_rest()

    def _come_to_rest(self) -> None:
        if self.stops:
            patience_s = max(DRAIN_S, LOADS_S) + BEYOND_DRAIN_S + AGAIN_S + KILLED_S
            self.pass_time(patience_s + 1.0)
        else:
            self.pass_time(CALM_S)
        if self.status is not None:
            self.ends["told to stop" if self.stops else "never served"] += 1
            self._outlive()
            return
        if self.stops:
            raise Violation("a stop is not fulfilled")
        self._check_rest()
        self.ends["done"] += 1
        self._upgrade_once_more()
        self._die_once_more()

    def _outlive(self) -> None:
        """Words of daemons and people after the end come to nothing."""
        for process in list(self.processes.values()):
            self._dies(process, -e.KILL)
        while self.hear():
            pass
        for event in (e.Upgrade(), e.Stop(e.TERM), e.Tick()):
            self.feed(event)

    def _check_rest(self) -> None:
        serving = [each for each in self.processes.values() if each.does is Does.SERVE]
        if len(serving) != 1:
            raise Violation("nothing serves, though no blow has fallen", f"{list(self.processes.values())}")
        if self.wishes:
            raise Violation("a wish is neither fulfilled nor answered", f"{self.wishes}")
        standing = [each for each in self.processes.values() if each.does is Does.WAIT]
        if len(standing) != 1:
            raise Violation("none stands by, or several do", f"{standing}")
        if self.keeper.next_timer() is not None:
            raise Violation("a timer is left")
        if self.ready != 1:
            raise Violation("whoever started the keeper is not told once that a daemon serves", str(self.ready))
        if self.keeper.daemons[serving[0].number].state is not State.SERVING or len(self.keeper.daemons) != 2:
            raise Violation("the keeper is wrong about its daemons")

    def _upgrade_once_more(self) -> None:
        before = self.keeper.started
        self.wishes.append(before)
        self.feed(e.Upgrade())
        self.pass_time(20.0)
        self._check_rest()
        if self.keeper.current <= before:
            raise Violation("an upgrade that nothing stands in the way of is not done")

    def _die_once_more(self) -> None:
        """The one that stands by serves at once."""
        self.pass_time(STANDBYS_APART_S)
        self._dies(self.processes[self.keeper.current], 1)
        self.pass_time(1.5)
        if not any(each.does is Does.SERVE for each in self.processes.values()):
            raise Violation("the one that stands by does not follow at once")
