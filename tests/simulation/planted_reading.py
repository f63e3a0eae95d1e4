"""Faults that are planted in the machines of the reading side, one line each; the simulator has to find every one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from planted import changed, no_effects, nothing, without

from kvferry.protocol import reading as r
from kvferry.protocol import transfer
from kvferry.protocol import transfer_events as t
from kvferry.protocol.reading import Computed, Following
from kvferry.protocol.transfer import Progress


def ignoring(kind: type) -> Callable[..., Any]:
    """Events of this kind are not heard."""

    def on(following: Following, event: Any, now: float, on: Any = Following.on) -> Any:
        return [] if isinstance(event, kind) else on(following, event, now)

    return on


def done_uncompared(part: Progress, *_: Any) -> Any:
    part.do = part._verdict()
    return []


def named_by_number(part: Progress) -> bool:
    """A number alone is taken for the whole name of a lease."""
    return bool(part._wanted.rank and part._first is None and not part._wanted.lease)


def no_words(effects: Any, part: Progress, *_: Any) -> Any:
    if isinstance(part.do, t.Prove):
        part.do = replace(part.do, words=frozenset())
    return effects


def as_complete(effects: list[Any], *_: Any) -> list[Any]:
    return [
        replace(each, effect=replace(each.effect, complete=True))
        if isinstance(each, t.Say) and isinstance(each.effect, r.Close)
        else each
        for each in effects
    ]


def first_only(following: Following, seen: Any, hear: Any = Following._hear) -> None:
    if not following._told_of:
        hear(following, seen)


def only_what_is_read(effects: list[Any], part: Progress, *_: Any) -> list[Any]:
    return [each for each in effects if each.rank in part.readings]


def deaf(part: Progress, event: Any, now: float, on: Any = Progress.on) -> Any:
    return [] if isinstance(event, t.Led) and part.awaits_first else on(part, event, now)


def meet_once(part: Progress, met: t.Met, now: float, meet: Any = Progress._meet) -> Any:
    part._met = 1
    return meet(part, met, now)


def from_the_first(part: Progress, now: float, go_on: Any = Progress._go_on) -> Any:
    """The wanted tokens begin later."""
    if part._pass.at == part._pass.first:
        part._pass = r.Pass(0, 0)
    return go_on(part, now)


def unended(part: Progress, event: Any, now: float, on: Any = Progress.on) -> Any:
    if part.state.ended and isinstance(event, t.Stop):
        part.do = t.Finish(part.state, problem=event.why)
    return on(part, event, now)


def as_failed(part: Progress, why: Any, now: float, *, finish: Any = Progress._finish, **_: Any) -> Any:
    return finish(part, why, now)


def words_of_what_is_read(effects: Any, part: Progress, *_: Any) -> Any:
    if isinstance(part.do, t.Prove):
        part.do = replace(part.do, words=part.do.words & set(part._pass.read))
    return effects


def met_before(part: Progress, why: Any, now: float, fail: Any = Progress._fail) -> Any:
    part._met = 2
    return fail(part, why, now)


def unopened(part: Progress, why: Any, now: float, fail: Any = Progress._fail) -> Any:
    part._opened = False
    return fail(part, why, now)


def at_the_end(part: Progress, now: float, go_on: Any = Progress._go_on) -> Any:
    if any(each.seen.more for each in part.readings.values()):
        return part._await_more(now)
    return go_on(part, now)


def for_all(effects: Any, part: Progress, *_: Any) -> Any:
    if isinstance(part.do, t.Listen) and part._awaited:
        part._awaited = {rank for rank, each in part.readings.items() if each.seen.more}
    return effects


def nothing_whole(part: Progress, now: float, agree: Any = Progress._agree) -> Any:
    part._whole.clear()
    return agree(part, now)


def with_sums(part: Progress, now: float, proven: Any = Progress._proven) -> Any:
    part.wanted = replace(part._wanted, sums=True)
    return proven(part, now)


def unasked(part: Progress) -> bool:
    """It waits for rank 0, whatever the engine has named."""
    return part._wanted.rank > 0 and part._first is None


PLANTED: dict[str, tuple[Any, str, Any]] = {
    "ranks do not compare their leases": (Progress, "_proven", done_uncompared),
    "what rank 0 says at the end is not heard": (Progress, "on", deaf),
    "a lease's number is taken for its name": (Progress, "_needs_first", property(named_by_number)),
    "words are not looked at": changed(Progress, "_moved", no_words),
    "what failed was read": changed(Progress, "_give_up", as_complete),
    "what ended is left open": changed(Progress, "_give_up", without(t.Say)),
    "ranks with nothing to read do not close": changed(Progress, "_leave", only_what_is_read),
    "nothing is closed": (Progress, "_leave", no_effects),
    "a second update is lost": (Following, "_hear", first_only),
    "what was announced is not asked again": (Following, "on", ignoring(r.AskAgain)),
    "a rank that is behind is not asked": (Following, "on", ignoring(r.AskFor)),
    "a lost stream is not noticed": (Following, "on", ignoring(r.Over)),
    "what was announced is never opened": (Following, "on", ignoring(r.Due)),
    "weights are not compared": (Computed, "check", nothing),
    "a daemon that started anew is taken for the one before": changed(Progress, "_give_up", without(t.Forget)),
    "hands are shaken only once": (Progress, "_meet", meet_once),
    "what was never published is wanted, and done": (transfer, "check_published", nothing),
    "what has ended is stopped again": (Progress, "on", unended),
    "what is aborted has failed": (Progress, "_finish", as_failed),
    "the word of a rank of which nothing is read is not looked at": changed(Progress, "_moved", words_of_what_is_read),
    "hands are not shaken again": (Progress, "_fail", met_before),
    "what was announced is not asked when it fails": (Progress, "_fail", unopened),
    "nothing is read before all is published": (Progress, "_go_on", at_the_end),
    "what is over is waited for": (Progress, "_check_goes_on", nothing),
    "ranks that are not behind are waited for": changed(Progress, "_await_more", for_all),
    "what is whole is read again": (Progress, "_agree", nothing_whole),
    "sums are compared that nobody wants": (Progress, "_proven", with_sums),
    "rank 0 is waited for, whatever is named": (Progress, "_needs_first", property(unasked)),
    "tokens before those that are wanted are read": (Progress, "_go_on", from_the_first),
}
