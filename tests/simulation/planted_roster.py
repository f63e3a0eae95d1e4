"""Faults that are planted in the machines of a roster."""

from __future__ import annotations

from typing import Any

from planted import Planted, changed, no_effects, nothing, without

from kvferry.protocol import roster_events as e
from kvferry.protocol.kept import Latest
from kvferry.protocol.roster import Joinings, Rosters, _Roster


def of_any_start(rosters: Rosters, stream: int, rank: Any, member: e.Member, join: Any = Rosters.join) -> Any:
    roster = rosters._rosters.get((rank.engine_id, rank.epoch))
    before = dict(roster.streams) if roster is not None else {}
    told = join(rosters, stream, rank, member)
    roster = rosters._rosters[rank.engine_id, rank.epoch]
    roster.streams.update({**before, **roster.streams})
    return told


def with_any_stream(rosters: Rosters, stream: int, leave: Any = Rosters.leave) -> Any:
    """A rank has left when one of its streams has."""
    roster = rosters._rosters.get(rosters._of[stream])
    if roster is not None and stream in roster.streams:
        rank = roster.streams[stream][0]
        for other in [each for each, (number, _) in roster.streams.items() if number == rank and each != stream]:
            del roster.streams[other]
    return leave(rosters, stream)


def unheard(rosters: Rosters, stream: int, leave: Any = Rosters.leave) -> Any:
    leave(rosters, stream)
    return e.Tell((), {})


def of_the_first(roster: _Roster) -> Any:
    return dict(reversed(roster.streams.values()))


def at_once(joinings: Joinings, event: e.MemberEvent, now: float, on: Any = Joinings.on) -> Any:
    effects = on(joinings, event, now)
    return [*joinings._end_before(max(joinings._joinings)), *effects] if isinstance(event, e.Renew) else effects


def not_again(joinings: Joinings, event: e.MemberEvent, now: float, on: Any = Joinings.on) -> Any:
    effects = on(joinings, event, now)
    if isinstance(event, e.Ended):
        joinings._again.drop(event.joining)
    return effects


def for_as_long_as_it_takes(joinings: Joinings, event: e.MemberEvent, now: float, on: Any = Joinings.on) -> Any:
    effects = on(joinings, event, now)
    if isinstance(event, e.Renew):
        joinings._late.drop(max(joinings._joinings))
    return effects


def whoever_holds(joinings: Joinings) -> Any:
    return [] if joinings._why is None else [e.Alone(joinings._why)]


PLANTED: dict[str, Planted] = {
    "nobody hears that a rank has left": (Rosters, "leave", unheard),
    "a rank that starts anew is there twice": (Rosters, "join", of_any_start),
    "a rank leaves with any of its streams": (Rosters, "leave", with_any_stream),
    "the first word of a rank holds": (_Roster, "members", of_the_first),
    "anybody is any rank": (Rosters, "refusal", nothing),
    "a rank that has joined is kept out": (Latest, "pop", nothing),
    "a renewal ends what holds": (Joinings, "on", at_once),
    "a joining that ends is the last": (Joinings, "on", not_again),
    "a renewal takes as long as it likes": (Joinings, "on", for_as_long_as_it_takes),
    "joinings gather": (Joinings, "_end_before", no_effects),
    "streams gather": changed(Joinings, "on", without(e.End)),
    "a rank that has joined is alone": (Joinings, "_alone", whoever_holds),
    "a rank that is alone does not know": (Joinings, "_alone", no_effects),
}
