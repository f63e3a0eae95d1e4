"""Handshakes under way, one for each place that is asked, and those that wait for each."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import NamedTuple

from kvferry.errors import Full
from kvferry.protocol import peers_events as e
from kvferry.protocol.kept import Alarms
from kvferry.protocol.values import Sizes

ASKINGS = 1024
"""Handshakes under way at a time."""


class Waiting(NamedTuple):
    """renews: the number of the peer that is asked anew, 0 for none. first: the handshake has begun after the caller
    came, so the caller goes by whatever comes of it."""

    wanted: e.Get
    renews: int = 0
    first: bool = False


@dataclass(slots=True, eq=False)
class Asking:
    number: int
    place: e.Place
    ordered: bool
    """An order has begun it."""
    waiting: dict[e.Asker, Waiting] = field(default_factory=dict)


class Askings:
    def __init__(self, within_s: float) -> None:
        """within_s: the longest that a handshake may take."""
        self.within_s = within_s
        self._numbers = itertools.count(1)
        self._at: dict[e.Place, Asking] = {}
        self._by_number: dict[int, Asking] = {}
        self._of: dict[e.Asker, Asking] = {}
        self.bounds: Alarms[int] = Alarms()

    def join(self, waiting: Waiting, now: float) -> Asking | None:
        """Wait for the handshake of the place: the one that is under way; or a new one, which is returned.

        Raises KvferryError (`too_many_peers`).
        """
        wanted, begun = waiting.wanted, None
        place = wanted.engine_id, wanted.address
        asking = self._at.get(place)
        if asking is None:
            if len(self._at) >= ASKINGS:
                why, remedy = f"{ASKINGS} handshakes are under way", "try again when those of silent daemons are over"
                raise Full("too_many_peers", why, field="address", value=wanted.address, remedy=remedy)
            asking = begun = self._at[place] = Asking(next(self._numbers), place, wanted.ordered)
            self._by_number[asking.number] = asking
            self.bounds.set(asking.number, now + self.within_s)
            waiting = waiting._replace(first=True)
        asking.waiting[wanted.asker] = waiting
        self._of[wanted.asker] = asking
        return begun

    def get(self, number: int) -> Asking | None:
        return self._by_number.get(number)

    def give_up(self, asker: e.Asker) -> None:
        asking = self._of.pop(asker, None)
        if asking is not None:
            del asking.waiting[asker]

    def end(self, number: int) -> Asking | None:
        """None where it has ended already."""
        asking = self._by_number.pop(number, None)
        if asking is not None:
            self.bounds.drop(number)
            del self._at[asking.place]
            for asker in asking.waiting:
                del self._of[asker]
        return asking

    def end_late(self, now: float) -> list[Asking]:
        """End the handshakes whose time is over."""
        return [asking for number in self.bounds.due(now) if (asking := self.end(number)) is not None]

    def end_all(self) -> list[Asking]:
        return [asking for number in list(self._by_number) if (asking := self.end(number)) is not None]

    def check(self) -> None:
        assert self._at == {asking.place: asking for asking in self._by_number.values()}
        assert self._of == {asker: asking for asking in self._at.values() for asker in asking.waiting}
        assert len(self.bounds) == len(self._at), "a handshake has no bound"

    def sizes(self) -> Sizes:
        return {"askings": len(self._at), "numbers": len(self._by_number), "waiting": len(self._of),
                "bounds": self.bounds.entries}  # fmt: skip
