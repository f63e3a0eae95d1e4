"""The sessions of a daemon's engines: one for each engine, whatever is left of those before it.

An engine that attaches waits until its session before has retired, and for memory that is being freed: there may be no
room for both. An engine lives in one session at a time; an epoch is registered once, but for a session that resumes.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kvferry.errors import Conflict, KvferryError, Unavailable
from kvferry.protocol import session_events as e
from kvferry.protocol.kept import Latest
from kvferry.protocol.session import STANDING, Memory, Session, State
from kvferry.protocol.values import Sizes

DETACH_S, ROOM_S = 0.5, 10.0
"""How long an engine that attaches waits for its old stream, which may end a little after its new start; and for memory
that is being freed."""
EPOCHS = 4096
"""Registered epochs remembered, so that none is registered twice."""


class Waits(enum.Enum):
    """An engine that attaches waits for one of these."""

    RESUMED = "the session that it resumes has retired"
    STREAM = "its old stream has ended"
    BEFORE = "its sessions before have retired"
    ROOM = "memory is free"


@dataclass(slots=True, eq=False)
class Attaching:
    rank: e.Rank
    resume: str
    waits: Waits = Waits.RESUMED
    old: str = ""
    """The session of that stream."""
    due: float | None = None


class Sessions:
    def __init__(self) -> None:
        self.sessions: dict[str, Session] = {}
        self._current: dict[str, Session] = {}
        """By engine."""
        self._attaching: dict[str, Attaching] = {}
        self._epochs: Latest[tuple[str, str], None] = Latest(EPOCHS)
        self._closing = False

    def on(self, event: e.SessionEvent, now: float) -> list[e.SessionEffect]:
        """Words of a session that is over are dropped."""
        return self._on(event, now) + self._attached(now)

    def _on(self, event: e.SessionEvent, now: float) -> list[e.SessionEffect]:
        match event:
            case e.Attach(id) if self._closing:
                return [e.Refused(id, _stopping())]
            case e.Attach(id, rank, resume):
                assert id not in self.sessions and id not in self._attaching
                self._attaching[id] = Attaching(rank, resume)
                before = self._named(resume)
                return [] if before is None else self._of(before, e.Withdraw(before.id), now)
            case e.Tick():
                return [effect for each in list(self.sessions.values()) for effect in self._late(each, now)]
            case e.Close():
                self._closing = True
                refused = [effect for id in list(self._attaching) for effect in self._refused(id, _stopping())]
                return refused + [effect for each in list(self.sessions.values()) for effect in self._closed(each, now)]
            case e.GiveUp(id):
                self._attaching.pop(id, None)
        session = self.sessions.get(event.session)
        return [] if session is None else self._of(session, event, now)

    def _of(self, session: Session, event: e.SessionEvent, now: float) -> list[e.SessionEffect]:
        match event:
            case e.Introduced():
                session.introduced = True
            case e.Allocated(_, owned):
                session.memory |= Memory.DAEMONS if owned else Memory.ENGINES
            case e.RegistrationBegun():
                session.registering = True
            case e.RegistrationOver(_, done, stopped):
                if done:
                    self._epochs.put(session.rank[:2], None)
                return self._changed(session, session.registration_over(done, stopped, now))
            case e.StreamEnded():
                return session.detach(now)
            case e.Died() | e.Leave() if session.state is State.KEPT:
                return session.give_back(now)
            case e.Died():
                return session.part(f"{session.name} is dead")
            case e.Leave():
                return session.part(f"{session.name} has left")
            case e.GiveUp() | e.Withdraw():
                keep = isinstance(event, e.Withdraw) or bool(session.follows)
                why = f"{session.name} has lost its session" if keep else f"{session.name} is gone"
                detached: list[e.SessionEffect] = [e.Detach(session.id, why)] if session.state is State.OPEN else []
                return [*detached, *self._retire(session, why, now, keep=keep)]
            case e.LeasesOver() if session.state is State.GONE:
                return self._retire(session, session.why, now)
            case e.StepOver(_, step, done):
                return self._changed(session, session.step_over(step, done, now))
        return []

    def _retire(self, session: Session, why: str, now: float, *, keep: bool = False) -> list[e.SessionEffect]:
        if session.state not in STANDING:
            return []
        del self._current[session.rank.engine_id]
        return self._changed(session, session.retire(why, now, keep=keep and not self._closing))

    def _changed(self, session: Session, effects: list[e.SessionEffect]) -> list[e.SessionEffect]:
        if any(isinstance(each, e.Over) for each in effects):
            del self.sessions[session.id]
        return effects

    def _late(self, session: Session, now: float) -> list[e.SessionEffect]:
        if session.due is None or session.due > now:
            return []
        match session.state:
            case State.LOST:
                return self._retire(session, f"{session.name} has lost its session", now, keep=True)
            case State.KEPT:
                return session.give_back(now)
            case _:
                return self._changed(session, session.step_late(now))

    def _closed(self, session: Session, now: float) -> list[e.SessionEffect]:
        session.keep = False
        return session.give_back(now) if session.state is State.KEPT else self._retire(session, "the daemon stops", now)

    # ---- engines that attach ----

    def _attached(self, now: float) -> list[e.SessionEffect]:
        effects: list[e.SessionEffect] = []
        for id, attaching in list(self._attaching.items()):
            while id in self._attaching and (done := self._step(id, attaching, now)) is not None:
                effects += done
        return effects

    def _step(self, id: str, attaching: Attaching, now: float) -> list[e.SessionEffect] | None:
        """None: it waits."""
        old, late = self.sessions.get(attaching.old), attaching.due is not None and attaching.due <= now
        match attaching.waits:
            case Waits.RESUMED:
                return self._resumed(id, attaching, now)
            case Waits.STREAM if old is None or old.state is not State.OPEN or late:
                return self._opened(id, attaching, now)
            case Waits.BEFORE if not any(each.state is State.RETIRING for each in self._of_engine(attaching.rank)):
                attaching.waits, attaching.due = Waits.ROOM, now + ROOM_S
                return []
            case Waits.ROOM if late or not any(each.state is State.FREEING for each in self.sessions.values()):
                del self._attaching[id]
                return [e.Attached(id)]
        return None

    def _resumed(self, id: str, attaching: Attaching, now: float) -> list[e.SessionEffect] | None:
        before = self._named(attaching.resume)
        if before is not None and before.state is State.RETIRING:
            return None
        if before is not None and before.state is State.STUCK:
            return self._refused(id, not_quiet())
        current = self._current.get(attaching.rank.engine_id)
        attaching.waits, attaching.old, attaching.due = Waits.STREAM, current.id if current else "", now + DETACH_S
        return []

    def _opened(self, id: str, attaching: Attaching, now: float) -> list[e.SessionEffect]:
        rank = attaching.rank
        old = self._current.get(rank.engine_id)
        if old is not None and old.state is State.OPEN:
            return self._refused(id, _is_attached(old))
        kept = [each for each in self._of_engine(rank) if each.state is State.KEPT]
        before = self._named(attaching.resume)
        if before not in kept or before.rank != rank:
            before = None
        if before is None and rank[:2] in self._epochs:
            return self._refused(id, _is_over(rank))
        effects: list[e.SessionEffect] = []
        if old is not None:  # to its end, even if the new engine is gone again meanwhile
            effects += self._retire(old, f"{old.name} started anew", now)
        session = self.sessions[id] = self._current[rank.engine_id] = Session(id, rank)
        effects.append(e.Open(id, rank, None if before is None else before.id))
        if before is not None:
            session.memory, session.follows = before.memory & Memory.DAEMONS, attaching.resume
            effects += self._changed(before, [e.Over(before.id)])
        effects += [effect for each in kept if each is not before for effect in each.give_back(now)]
        attaching.waits, attaching.due = Waits.BEFORE, None
        return effects

    def _named(self, resume: str) -> Session | None:
        """The session that is meant: its engine may know only the one before it."""
        return next((each for each in self.sessions.values() if resume and resume in (each.id, each.follows)), None)

    def _of_engine(self, rank: e.Rank) -> list[Session]:
        return [each for each in self.sessions.values() if each.rank.engine_id == rank.engine_id]

    def _refused(self, id: str, why: KvferryError) -> list[e.SessionEffect]:
        del self._attaching[id]
        return [e.Refused(id, why)]

    def is_open(self, id: str) -> bool:
        """The session stands: calls that name it are answered."""
        return id in self.sessions and self.sessions[id].state in STANDING

    def is_ending(self, id: str) -> bool:
        return id in self.sessions and self.sessions[id].state in (State.RETIRING, State.FREEING)

    def next_timer(self) -> float | None:
        times = [each.due for each in self.sessions.values()] + [each.due for each in self._attaching.values()]
        return min((each for each in times if each is not None), default=None)

    def check(self) -> None:
        standing = [each for each in self.sessions.values() if each.state in STANDING]
        assert {each.rank.engine_id: each for each in standing} == self._current and len(standing) == len(self._current)
        for id, session in self.sessions.items():
            assert session.id == id
            session.check()
        for attaching in self._attaching.values():
            assert (attaching.due is not None) == (attaching.waits in (Waits.STREAM, Waits.ROOM))

    def sizes(self) -> Sizes:
        return {
            "sessions": len(self.sessions),
            "current": len(self._current),
            "attaching": len(self._attaching),
            "epochs": len(self._epochs),
        }


def not_quiet() -> Conflict:
    why = "the session's reads or copies could not be stopped: they may still write"
    return Conflict("not_quiet", why, field="session", remedy="restart the daemon")


def _stopping() -> Unavailable:
    remedy = "attach again once another daemon serves"
    return Unavailable("draining", "the daemon stops, and opens no session any more", remedy=remedy)


def _is_attached(old: Session) -> Conflict:
    why = f"engine {old.rank.engine_id} (epoch {old.rank.epoch}) is attached to this daemon already"
    remedy = (
        "close the client that has the session: it may be one of your own that an error left open, which"
        " `async with` closes; give each rank a daemon of its own"
    )
    return Conflict("engine_attached", why, field="engine_id", value=old.rank.engine_id, remedy=remedy)


def _is_over(rank: e.Rank) -> Conflict:
    return Conflict(
        "epoch_reused", f"epoch {rank.epoch} of engine {rank.engine_id} is over", field="epoch", value=rank.epoch,
        remedy="use a new epoch for every start of the engine",
    )  # fmt: skip
