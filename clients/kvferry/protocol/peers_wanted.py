"""Places that are met before anybody waits for them, and again when they are known no more: the addresses that the
settings name, and the engines that were met before, by us or by the daemon before this one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from kvferry.errors import KvferryError
from kvferry.protocol.frozen import frozen
from kvferry.protocol.kept import Alarms
from kvferry.protocol.peers_events import Place
from kvferry.protocol.values import Sizes

AT_ONCE = 32
"""Places that are asked at a time. Places that have failed before take half of the room: their silence keeps no other
from being met."""
AGAIN_S = (1.0, 60.0)
"""The first and the longest pause before an address of the settings that cannot be met is tried again."""
BACK_S = (0.1, 2.0)
"""The same for an engine that was met, whose next daemon may be up at once."""
GONE_S = 60.0
"""An engine that was met and has not come back for so long is left to orders."""
HAD = 1024
"""Engines that were met. The one met last is kept for longest."""


@frozen
class _Failed:
    times: int
    """In a row."""
    since: float
    code: str


class Wanted:
    def __init__(self) -> None:
        self._named: dict[Place, None] = {}
        """The places that the settings name."""
        self._had: dict[str, str] = {}
        """The address of each engine that was met; the one met last comes last."""
        self._met: dict[Place, int] = {}
        """The peer that was met at each."""
        self._asked: dict[Place, bool] = {}
        """Places that are being met; whether each has failed before."""
        self._failed: dict[Place, _Failed] = {}
        self.resting: Alarms[Place] = Alarms()
        """Places that are not asked for now."""
        self._awaited: set[Place] = set()
        """Engines of the daemon before that were neither met nor missed yet."""

    def __iter__(self) -> Iterator[Place]:
        return chain(self._named, list(self._had.items()))

    def __contains__(self, place: Place) -> bool:
        return place in self._named or self._had.get(place[0]) == place[1]

    @property
    def had(self) -> list[Place]:
        """Engines that were met; the one met last comes last."""
        return list(self._had.items())

    @property
    def awaited(self) -> int:
        return len(self._awaited)

    @property
    def named(self) -> set[int]:
        """Peers that the settings name: they are never idle."""
        return {number for place, number in self._met.items() if place in self._named}

    # ---- what is wanted ----

    def want(self, addresses: Iterable[str]) -> None:
        before, self._named = self._named, {("", address): None for address in addresses}
        for place in before.keys() - self._named.keys():
            self._clear(place)

    def take_over(self, places: Iterable[Place]) -> None:
        for place in places:
            self._have(place)
            if place not in self._met:
                self._awaited.add(place)

    def met(self, place: Place, number: int) -> None:
        """An engine has been met, whoever wanted it."""
        self._have(place)
        self._clear(place)
        self._met[place] = number

    def _have(self, place: Place) -> None:
        engine_id, address = place
        if self._had.get(engine_id, address) != address:
            self.leave(engine_id)
        self._had.pop(engine_id, None)
        self._had[engine_id] = address
        while len(self._had) > HAD:
            self.leave(next(iter(self._had)))

    def leave(self, engine_id: str) -> None:
        """It is met when an order names it."""
        self._clear((engine_id, self._had.pop(engine_id, "")))

    def _clear(self, place: Place) -> None:
        self._met.pop(place, None)
        self._failed.pop(place, None)
        self.resting.drop(place)
        self._awaited.discard(place)

    def drop(self, number: int, now: float) -> None:
        """This peer is not known any more, or is lost."""
        for place in [place for place, each in self._met.items() if each == number]:
            del self._met[place]
            if place not in self._named:
                self.resting.set(place, now + BACK_S[0])

    # ---- asking ----

    def next(self, now: float) -> list[Place]:
        """The places to ask now: `found` or `failed` follows for each."""
        self.resting.due(now)
        again, asked = sum(self._asked.values()), list[Place]()
        for place in self:
            if len(self._asked) >= AT_ONCE:
                break
            if place in self._met or place in self._asked or place in self.resting:
                continue
            before = place in self._failed
            if before and again >= AT_ONCE // 2:
                continue
            again += before
            self._asked[place] = before
            asked.append(place)
        return asked

    def found(self, place: Place, number: int) -> None:
        del self._asked[place]
        if place in self:
            self._clear(place)
            self._met[place] = number

    def failed(self, place: Place, why: KvferryError, now: float) -> bool:
        """Whether it is for another reason than before."""
        del self._asked[place]
        self._awaited.discard(place)
        if place not in self or place in self._met:  # an order has met it meanwhile
            return False
        before, named = self._failed.get(place, _Failed(0, now, "")), place in self._named
        if now >= before.since + GONE_S and not named:
            self.leave(place[0])
            return False
        first_s, longest_s = AGAIN_S if named else BACK_S
        self.resting.set(place, now + min(longest_s, first_s * 2.0 ** min(before.times, 16)))
        self._failed[place] = _Failed(before.times + 1, before.since, why.code)
        return why.code != before.code

    def shut(self) -> None:
        self.want(())
        for engine_id in list(self._had):
            self.leave(engine_id)
        self._asked.clear()

    # ---- what must hold ----

    def check(self) -> None:
        assert len(self._asked) <= AT_ONCE and sum(self._asked.values()) <= AT_ONCE // 2
        every = set(self)
        assert self._met.keys() <= every and self._failed.keys() <= every and self._awaited <= every
        assert not self._met.keys() & self._failed.keys()
        assert not self._met.keys() & self._awaited

    def sizes(self) -> Sizes:
        return {"wanted": len(self._named), "had": len(self._had), "met": len(self._met), "asked": len(self._asked),
                "failed": len(self._failed), "resting": self.resting.entries,
                "awaited": len(self._awaited)}  # fmt: skip
