"""Faults that are planted in the machine of an engine's sessions."""

from __future__ import annotations

from typing import Any

from planted import Planted, changed, no_effects, nothing, without

from kvferry.protocol import session, sessions
from kvferry.protocol import session_events as e
from kvferry.protocol.session import Memory, Session, State
from kvferry.protocol.sessions import Sessions, Waits


def twice(effects: list[Any], *_: Any) -> list[Any]:
    return [*effects, *(each for each in effects if isinstance(each, (e.Ended, e.Detach)))]


def stops_at_a_failing_step(one: Session, now: float, go_on: Any = Session._go_on) -> Any:
    if one.failed:
        one.left.clear()
    return go_on(one, now)


def after_all(one: Session, now: float, go_on: Any = Session._go_on) -> Any:
    one.failed.clear()
    return go_on(one, now)


def without_waiting(one: Session, now: float, go_on: Any = Session._go_on) -> Any:
    one.registering = False
    return go_on(one, now)


def always_stopped(one: Session, done: bool, stopped: bool, now: float, over: Any = Session.registration_over) -> Any:
    return over(one, done, True, now)


def goes_on(machine: Sessions, event: Any, now: float, on: Any = Sessions._on) -> Any:
    """Engines are attached while the daemon stops."""
    closing, machine._closing = machine._closing, machine._closing and not isinstance(event, e.Attach)
    try:
        return on(machine, event, now)
    finally:
        machine._closing |= closing


def nobody_waits(machine: Sessions, id: str, attaching: Any, now: float, step: Any = Sessions._step) -> Any:
    if attaching.waits is Waits.BEFORE:
        attaching.waits, attaching.due = Waits.ROOM, now + sessions.ROOM_S
    return step(machine, id, attaching, now)


def beside(machine: Sessions, id: str, attaching: Any, now: float, opened: Any = Sessions._opened) -> Any:
    """An engine that lives is taken for one that is lost."""
    old = machine._current.get(attaching.rank.engine_id)
    if old is not None and old.state is State.OPEN:
        old.state, old.due = State.LOST, now
    return opened(machine, id, attaching, now)


def of_any_start(machine: Sessions, id: str, attaching: Any, now: float, opened: Any = Sessions._opened) -> Any:
    for each in machine.sessions.values():
        if each.state is State.KEPT and each.rank.engine_id == attaching.rank.engine_id:
            attaching.resume, each.rank = each.id, attaching.rank
    return opened(machine, id, attaching, now)


def foreign_kept(one: Session, why: str, part: Any = Session.part) -> Any:
    one.memory &= Memory.DAEMONS
    return part(one, why)


def dies_at_once(one: Session, now: float, detach: Any = Session.detach) -> Any:
    effects = detach(one, now)
    one.due = now if effects else one.due
    return effects


def never_given_back(one: Session, now: float) -> list[Any]:
    one.due = None
    return []


def lost_in_silence(session: Session, now: float, detach: Any = Session.detach) -> Any:
    return detach(session, now)[:0]


PLANTED: dict[str, Planted] = {
    "an engine that is lost is not detached": (Session, "detach", lost_in_silence),
    "an engine is told the end of its session twice": changed(Session, "_retired", twice),
    "an engine is not told the end of its session": changed(Session, "_retired", without(e.Ended)),
    "an engine is detached twice": changed(Session, "detach", twice),
    "a retirement stops at a failing step": (Session, "_go_on", stops_at_a_failing_step),
    "memory is freed though it may be read": (Session, "_go_on", after_all),
    "memory is freed under a registration": (Session, "_go_on", without_waiting),
    "memory is freed though a registration could not be stopped": (Session, "registration_over", always_stopped),
    "a session is opened though the daemon stops": (Sessions, "_on", goes_on),
    "a step that hangs is waited for": (Session, "step_late", no_effects),
    "a late step does not count": (sessions.Sessions, "_late", no_effects),
    "an engine attaches beside its session before": (Sessions, "_step", nobody_waits),
    "an engine that lives loses its session to another start": (Sessions, "_opened", beside),
    "memory goes on in another start": (Sessions, "_opened", of_any_start),
    "an epoch is registered twice": (sessions.Latest, "put", nothing),
    "leases outlive the engine that owns their memory": (Session, "part", foreign_kept),
    "leases of an engine that is gone are not waited for": changed(
        Session, "part", lambda effects, one, why: [*effects, *one.retire(why, 0.0, keep=False)] if effects else []
    ),
    "memory that waits is not freed": (Session, "give_back", never_given_back),
    "memory does not wait": (session, "KEPT_S", 0.0),
    "nobody is answered": (Sessions, "_attached", no_effects),
}
