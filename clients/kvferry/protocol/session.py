"""A session of an engine rank, until all has ended that must.

Each step of the end may fail, or be late; that stops no other step, but those that need it: memory is freed only when
all that reads and writes it has stopped.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from kvferry.protocol import session_events as e
from kvferry.protocol.session_events import Step

STEP_S = 300.0
"""How long a step may take: a third of a second for each GB that is freed."""
DYING_S = 10.0
"""A killed process closes its sockets first and is dead some time later: with much GPU memory, seconds. If the engine
lives, its client leaves the blocks alone until the daemon has answered."""
KEPT_S = 30.0
"""How long the memory of an engine that has lost its session waits for it to attach again."""
NEEDS = frozenset({Step.REGISTRATION, Step.STOP})
"""Steps without which memory is neither free nor quiet."""


class State(enum.Enum):
    """LOST: its stream has ended. GONE: its engine is dead or has left, its leases are still read. KEPT: its memory and
    its epoch wait for the next session. FREEING: that memory is given back. STUCK: something may read and write it for
    ever."""

    OPEN = "open"
    LOST = "lost"
    GONE = "gone"
    RETIRING = "retiring"
    KEPT = "kept"
    FREEING = "freeing"
    STUCK = "stuck"


class Memory(enum.Flag):
    """Owners of the memory that a session has. Memory of the engine's own goes with the engine."""

    NONE = 0
    DAEMONS = enum.auto()
    ENGINES = enum.auto()


STANDING = (State.OPEN, State.LOST, State.GONE)
"""It is the session of its engine."""


@dataclass(slots=True, eq=False)
class Session:
    id: str
    rank: e.Rank
    memory: Memory = Memory.NONE
    follows: str = ""
    """The session that it has resumed. Its engine may never have heard of this one, and then knows only that."""
    state: State = State.OPEN
    due: float | None = None
    introduced: bool = False
    registering: bool = False
    gone: bool = False
    """The engine does not touch its memory any more."""
    keep: bool = False
    why: str = ""
    left: list[Step] = field(default_factory=list)
    taking: Step | None = None
    failed: set[Step] = field(default_factory=set)
    late: set[Step] = field(default_factory=set)
    """Steps that were given up and have not ended."""

    @property
    def name(self) -> str:
        return f"engine {self.rank.engine_id}"

    # ---- its engine ----

    def detach(self, now: float) -> list[e.SessionEffect]:
        """The engine's process tells within DYING_S whether the engine is dead."""
        if self.state is not State.OPEN:
            return []
        self.state, self.due = State.LOST, now + (DYING_S if self.introduced else 0.0)
        return [e.Detach(self.id, f"the session of {self.name} has ended")]

    def part(self, why: str) -> list[e.SessionEffect]:
        """The engine is dead or has left. Leases of memory of ours that are whole are read until they end."""
        self.gone = True
        if self.state not in (State.OPEN, State.LOST):
            return []
        detached: list[e.SessionEffect] = [e.Detach(self.id, why)] if self.state is State.OPEN else []
        self.state, self.due, self.why = State.GONE, None, why
        gone = Memory.ENGINES in self.memory
        return [*detached, e.EndLeases(self.id, f"{why}, and owned its memory" if gone else why, not gone)]

    # ---- its end ----

    def retire(self, why: str, now: float, *, keep: bool) -> list[e.SessionEffect]:
        """keep: memory that the daemon owns waits for the engine to attach again."""
        self.state, self.why, self.keep, self.left = State.RETIRING, why, keep, list(Step)
        return self._go_on(now)

    def step_over(self, step: Step, done: bool, now: float) -> list[e.SessionEffect]:
        """A step that ends late still counts: memory that was held for it is freed."""
        if step in self.late:
            self.late.discard(step)
            self.failed -= {step} if done else set()
            return self.give_back(now) if self.state is State.STUCK and not self.failed & NEEDS else []
        if self.taking is not step:
            return []
        self.failed |= set() if done else {step}
        return self._go_on(now)

    def registration_over(self, done: bool, stopped: bool, now: float) -> list[e.SessionEffect]:
        """done: only while the session is open, so that a step is still to come that stops it."""
        self.registering = False
        if not (done or stopped):
            self.failed.add(Step.REGISTRATION)
        return self.step_over(Step.REGISTRATION, stopped, now)

    def step_late(self, now: float) -> list[e.SessionEffect]:
        assert self.taking is not None
        self.late.add(self.taking)
        self.failed.add(self.taking)
        return self._go_on(now)

    def _go_on(self, now: float) -> list[e.SessionEffect]:
        effects: list[e.SessionEffect] = []
        self.taking = None
        while self.left:
            step = self.left.pop(0)
            if step is Step.REGISTRATION:
                effects.append(e.Shut(self.id))
                if not self.registering or step in self.failed:  # no later one makes that good
                    continue
            elif step is Step.FREE and self.failed & NEEDS:
                continue
            else:
                effects.append(e.Take(self.id, step, self.why, self.keep))
            self.taking, self.due = step, now + STEP_S
            return effects
        return self._retired(now)

    def _retired(self, now: float) -> list[e.SessionEffect]:
        self.due = None
        if self.failed & NEEDS:
            self.state = State.STUCK
            return [e.Hold(self.id), e.Ended(self.id, stuck=True)]
        if self.state is State.RETIRING and self.keep and (self.memory or self.follows):
            self.state, self.due = State.KEPT, now + KEPT_S
            return [e.Ended(self.id, stuck=False), *(self.give_back(now) if self.gone else [])]
        return [e.Ended(self.id, stuck=False), e.Over(self.id)] if self.state is State.RETIRING else [e.Over(self.id)]

    def give_back(self, now: float) -> list[e.SessionEffect]:
        """Memory that has waited for a session."""
        self.state, self.taking, self.due = State.FREEING, Step.FREE, now + STEP_S
        return [e.Take(self.id, Step.FREE, self.why, keep=False)]

    def check(self) -> None:
        assert (self.due is not None) == (self.state in (State.LOST, State.RETIRING, State.KEPT, State.FREEING))
        assert (self.taking is not None) == (self.state in (State.RETIRING, State.FREEING))
        assert self.state is not State.STUCK or self.failed & NEEDS
        assert self.state is not State.KEPT or (self.keep and not self.gone)
