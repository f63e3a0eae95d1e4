"""How the ranks of one engine find each other: what the seed keeps (`Rosters`), and how a rank stays a member
(`Joinings`)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import assert_never

from kvferry.errors import Conflict, KvferryError, Malformed
from kvferry.protocol import roster_events as e
from kvferry.protocol.kept import Alarms, Latest
from kvferry.protocol.session_events import Rank
from kvferry.protocol.values import Sizes

KEPT_OUT = 256
"""Ranks of which is remembered why they may not join."""
AGAIN_S = (0.1, 2.0)
"""First and longest pause before joining again."""


@dataclass(frozen=True, slots=True, eq=False)
class _Roster:
    """An engine in one epoch, for as long as any of its ranks is there."""

    world_size: int
    streams: dict[int, tuple[int, e.Member]] = field(default_factory=dict)
    """Rank and member of each open stream, in their order; a rank's streams are of one start."""
    places: dict[int, str] = field(default_factory=dict)
    """The address from which each rank has joined: it comes from nowhere else, also after it has left."""

    def members(self) -> e.Members:
        """The last stream of a rank speaks for it."""
        return dict(self.streams.values())

    def told(self) -> e.Tell:
        return e.Tell(tuple(self.streams), self.members())


class Rosters:
    """The rosters that one seed keeps. A rank is a member for as long as any stream of its daemon is open."""

    def __init__(self) -> None:
        self._rosters: dict[tuple[str, str], _Roster] = {}
        """Keyed by engine and epoch."""
        self._of: dict[int, tuple[str, str]] = {}
        """By stream."""
        self._kept_out: Latest[tuple[str, int], str] = Latest(KEPT_OUT)
        """Why the last joining of a rank, by engine and number, came to nothing."""

    def refusal(self, rank: Rank, address: str) -> KvferryError | None:
        """Why this rank may not join from this address: `rank_taken`, `malformed_member`."""
        engine_id, epoch, number, world_size = rank
        roster = self._rosters.get((engine_id, epoch)) or _Roster(world_size)
        if world_size != roster.world_size or number >= world_size:
            return Malformed(
                "malformed_member", f"rank {number} of {world_size} is none of engine {engine_id}",
                field="member", value=number, remedy="ranks count from 0 to world_size - 1, which is the same for all",
            )  # fmt: skip
        taken = roster.places.get(number, address)
        if taken == address:
            return None
        why, remedy = f"rank {number} of engine {engine_id} has joined from {taken}", "give every rank its own daemon"
        return Conflict("rank_taken", why, field="rank", value=number, remedy=f"{remedy} and number")

    def why_missing(self, engine_id: str, epoch: str, rank: int) -> str:
        """Why this rank has not joined, as far as that is known here: it has tried; empty where not."""
        for (joined, other), roster in self._rosters.items():
            if joined == engine_id and other != epoch and rank in roster.members():
                return f"rank {rank} has joined from {roster.places[rank]} in epoch {other}, and this one is in {epoch}"
        why = self._kept_out.get((engine_id, rank))
        return f"rank {rank} was not let in: {why}" if why else ""

    def keep_out(self, engine_id: str, rank: int, why: KvferryError) -> None:
        """The rank has called, and may not join."""
        self._kept_out.put((engine_id, rank), str(why))

    def join(self, stream: int, rank: Rank, member: e.Member) -> e.Tell:
        """The rank's daemon has opened this stream, and may join."""
        assert self.refusal(rank, member.address) is None
        self._of[stream] = rank.engine_id, rank.epoch
        roster = self._rosters.setdefault(self._of[stream], _Roster(rank.world_size))
        roster.places[rank.rank] = member.address
        self._kept_out.pop((rank.engine_id, rank.rank))
        for other, (number, before) in list(roster.streams.items()):
            if number == rank.rank and before.instance != member.instance:  # its daemon has started anew since
                del roster.streams[other]
        roster.streams[stream] = rank.rank, member
        return roster.told()

    def leave(self, stream: int) -> e.Tell:
        """The stream is over."""
        key = self._of.pop(stream)
        roster = self._rosters.get(key)
        if roster is None or roster.streams.pop(stream, None) is None:
            return e.Tell((), {})
        if not roster.streams:
            del self._rosters[key]
        return roster.told()

    def check(self) -> None:
        for key, roster in self._rosters.items():
            assert roster.streams and all(self._of[stream] == key for stream in roster.streams)
            assert all(roster.places[rank] == member.address for rank, member in roster.streams.values())
            starts = {(rank, member.instance) for rank, member in roster.streams.values()}
            assert len(starts) == len(roster.members()) <= len(roster.places) <= roster.world_size

    def sizes(self) -> Sizes:
        return {"rosters": len(self._rosters), "streams": len(self._of), "kept out": len(self._kept_out)}


@dataclass(slots=True, eq=False)
class _Joining:
    holds: bool = False
    pause: float = AGAIN_S[0]


class Joinings:
    """An engine's joinings of its roster. A renewal adds one, and ends those before it once it holds or has had its
    time: no rank is missed meanwhile, and the last word holds."""

    def __init__(self, within_s: float) -> None:
        """within_s: the time of a renewal."""
        self._within_s = within_s
        self._joinings: dict[int, _Joining] = {}
        """Joinings that are wanted, in the order in which they came."""
        self._numbers = itertools.count(1)
        self._again: Alarms[int] = Alarms()
        self._late: Alarms[int] = Alarms()
        self._why: KvferryError | None = None
        """Why the last that ended did."""

    def next_timer(self) -> float | None:
        return min((at for each in (self._again, self._late) if (at := each.next()) is not None), default=None)

    def on(self, event: e.MemberEvent, now: float) -> list[e.MemberEffect]:
        match event:
            case e.Renew():
                number = next(self._numbers)
                self._joinings[number] = _Joining()
                self._late.set(number, now + self._within_s)
                return [e.Begin(number)]
            case e.Told(number, members):
                joining = self._joinings[number]
                joining.holds, joining.pause = True, AGAIN_S[0]
                self._late.drop(number)
                return [*self._end_before(number), e.Know(members)]
            case e.Ended(number, why):
                joining = self._joinings[number]
                self._again.set(number, now + joining.pause)
                joining.holds, joining.pause = False, min(2 * joining.pause, AGAIN_S[1])
                self._why = why
                return list(self._alone())
            case e.Tick():
                effects: list[e.MemberEffect] = [e.Begin(number) for number in self._again.due(now)]
                for number in self._late.due(now):
                    effects += self._end_before(number)
                return [*effects, *self._alone()] if any(isinstance(each, e.End) for each in effects) else effects
            case _:
                assert_never(event)

    def _end_before(self, number: int) -> Iterator[e.End]:
        for earlier in [each for each in self._joinings if each < number]:
            del self._joinings[earlier]
            self._again.drop(earlier)
            self._late.drop(earlier)
            yield e.End(earlier)

    def _alone(self) -> Iterator[e.Alone]:
        if self._why is not None and not any(each.holds for each in self._joinings.values()):
            yield e.Alone(self._why)

    def check(self) -> None:
        assert max(len(self._again), len(self._late)) <= len(self._joinings)

    def sizes(self) -> Sizes:
        return {"joinings": len(self._joinings), "alarms": self._again.entries + self._late.entries}
