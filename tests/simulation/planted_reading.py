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
    return bool(part._wanted.rank and not isinstance(part._first, tuple) and not part._wanted.lease)


def no_words(effects: Any, part: Progress, *_: Any) -> Any:
    if isinstance(part.do, t.Prove):
        part.do = replace(part.do, words=frozenset())
    return effects


def not_bound(told: Any, part: Progress, *_: Any) -> Any:
    part._told = False
    return told


def newest(wanted: Any, epoch: str, readings: Any, told: Any) -> Any:
    return epoch, max(each.seen.lease for each in readings.values())


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


def none_announced(part: Progress, now: float, proven: Any = Progress._proven) -> Any:
    """Rank 0 is then asked neither at the start nor at the end."""
    part.announced = any(each.announced for each in part.readings.values())
    return proven(part, now)


PLANTED: dict[str, tuple[Any, str, Any]] = {
    "ranks do not compare their leases": (Progress, "_proven", done_uncompared),
    "rank 0 is not asked": (Progress, "_ask_first", no_effects),
    "what is confirmed counts as not announced": (Progress, "_proven", none_announced),
    "a lease's number is taken for its name": (Progress, "_needs_first", property(named_by_number)),
    "source ranks are read of two leases": (transfer, "one_lease", newest),
    "words are not looked at": changed(Progress, "_moved", no_words),
    "rank 0 reads another lease than it has told of": changed(Progress, "first", not_bound),
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
}
