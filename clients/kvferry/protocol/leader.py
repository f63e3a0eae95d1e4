"""Rank 0 of an engine: it hands orders on, gathers the ends of the other ranks, and tells them its own."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import assert_never

from kvferry.errors import KvferryError
from kvferry.protocol import leader_events as e
from kvferry.protocol.kept import Alarms
from kvferry.protocol.values import Sizes

GRACE_S = 0.5
"""How long after the deadline another rank may still say why it failed."""
AGAIN_S = (0.05, 1.0)
"""First and longest pause before a rank that cannot be reached is asked or told again."""
TOLD_AGAIN = 1024
"""So many refusals may wait to be told again; more are told once."""
Effects = list[e.Effect]


@dataclass(slots=True, eq=False)
class _Rank:
    instance: str = ""
    pause: float = AGAIN_S[0]
    lost: KvferryError | None = None
    """Why it cannot be reached, until it is."""
    over: bool = False


@dataclass(slots=True, eq=False)
class _Led:
    """An order as it is handed on."""

    event: e.Lead
    ranks: dict[int, _Rank]
    asked: bool = False
    given_up: bool = False
    told: bool = False


@dataclass(slots=True, eq=False)
class _Tell:
    rank: int
    end: e.End
    until: float
    refusal: bool
    pause: float = field(default=AGAIN_S[0])


class Leader:
    """A rank that cannot be reached goes on, so it is asked again, for as long as it has the same daemon. The ends of
    this rank are told until they are heard, or until the other part has ended by its own deadline."""

    def __init__(self) -> None:
        self._led: dict[int, _Led] = {}
        self._tells: dict[int, _Tell] = {}
        self._numbers = itertools.count(1)
        """Of tells."""
        self._alarms: Alarms[int] = Alarms()

    def next_timer(self) -> float | None:
        return self._alarms.next()

    def on(self, event: e.Event, now: float) -> Effects:
        match event:
            case e.Lead():
                assert event.part not in self._led
                self._led[event.part] = _Led(event, {rank: _Rank() for rank in event.ranks})
                self._alarms.set(event.part, event.until + GRACE_S)
                return [e.Gather(event.part)]
            case e.GaveUp(part, code, failed):
                led = self._led.get(part)
                if led is None:
                    return []
                led.given_up = True
                return self._give_up(led, code, failed=failed)
            case e.Whole() | e.Incomplete() | e.Heard() | e.Unheard() | e.Again():
                led = self._led[event.part]
                return self._settled(led, self._of_part(led, event))
            case e.Refused(end, ranks, until):
                again = sum(tell.refusal for tell in self._tells.values()) < TOLD_AGAIN
                return [self._tell(rank, end, until if again else now, refusal=True) for rank in ranks]
            case e.Told(number, lost):
                return self._told(number, now, lost=lost)
            case e.Tick():
                return [each for part in self._alarms.due(now) for each in self._late(self._led[part])]
            case _:
                assert_never(event)

    def _of_part(self, led: _Led, event: e.Whole | e.Incomplete | e.Heard | e.Unheard | e.Again) -> Effects:
        assert led.asked is not isinstance(event, e.Whole | e.Incomplete)
        match event:
            case e.Whole(_, instances):
                led.asked = True
                if led.given_up:  # no other rank has the order: there is nothing to end
                    return [each for rank in led.ranks for each in self._close(led, rank, None)]
                for rank, known in led.ranks.items():
                    known.instance = instances.get(rank, "")
                return [e.Ask(event.part, rank) for rank in led.ranks]
            case e.Incomplete(_, why):
                told = self._give_up(led, why.code, failed=True)  # ranks that have reserved wait for the order
                return told + [each for rank in led.ranks for each in self._close(led, rank, why)]
        known = led.ranks[event.rank]
        assert not known.over
        match event:
            case e.Heard(part, rank, done, code):
                known.lost, known.over = None, done is not None
                return [e.StopOwn(part, rank, code)] if done is False else []
            case e.Unheard(part, rank, why, lost):
                if not lost:
                    return self._close(led, rank, why)
                known.lost, pause = why, known.pause
                known.pause = min(2 * pause, AGAIN_S[1])
                return [e.Pause(part, rank, pause)]
            case e.Again(part, rank, instance):
                assert known.lost is not None
                if led.given_up or instance != known.instance:
                    return self._close(led, rank, known.lost)
                return [e.Ask(part, rank)]
            case _:
                assert_never(event)

    def _close(self, led: _Led, rank: int, why: KvferryError | None) -> Effects:
        if led.ranks[rank].over:
            return []
        led.ranks[rank].over = True
        closed: Effects = [e.Close(led.event.part, rank, why)]
        return closed if why is None else [*closed, e.StopOwn(led.event.part, rank, why.code)]

    def _give_up(self, led: _Led, code: str, *, failed: bool) -> Effects:
        """The other ranks need not go on."""
        if led.told:
            return []
        led.told, of = True, led.event
        end = e.End(of.at, of.request_id, of.attempt, code, failed)
        return [self._tell(rank, end, of.until, refusal=False) for rank, known in led.ranks.items() if not known.over]

    def _late(self, led: _Led) -> Effects:
        effects = self._give_up(led, "deadline", failed=True)
        for rank, known in led.ranks.items():
            if known.lost is not None:
                effects += self._close(led, rank, known.lost)
            elif not known.over:
                known.over = True
                effects += [e.Late(led.event.part, rank), e.StopOwn(led.event.part, rank, "deadline")]
        return self._settled(led, effects)

    def _settled(self, led: _Led, effects: Effects) -> Effects:
        """Forget what is over."""
        part = led.event.part
        if not all(known.over for known in led.ranks.values()):
            return effects
        del self._led[part]
        self._alarms.drop(part)
        return [*effects, e.Finished(part)]

    # ---- what is told ----

    def _tell(self, rank: int, end: e.End, until: float, *, refusal: bool) -> e.Tell:
        number = next(self._numbers)
        self._tells[number] = _Tell(rank, end, until, refusal)
        return e.Tell(number, rank, end)

    def _told(self, number: int, now: float, *, lost: bool) -> Effects:
        tell = self._tells[number]
        if not lost or now + tell.pause >= tell.until:
            del self._tells[number]
            return []
        pause, tell.pause = tell.pause, min(2 * tell.pause, AGAIN_S[1])
        return [e.Tell(number, tell.rank, tell.end, pause)]

    def check(self) -> None:
        for part, led in self._led.items():
            assert led.event.part == part and led.ranks and not all(known.over for known in led.ranks.values())
            assert led.told or not led.given_up
        assert len(self._alarms) == len(self._led)

    def sizes(self) -> Sizes:
        return {"led": len(self._led), "told": len(self._tells), "alarms": self._alarms.entries}
