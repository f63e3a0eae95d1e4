"""The owner of each engine id: a stranger may answer to the id as well."""

from __future__ import annotations

from collections.abc import Iterator

from kvferry.errors import Conflict
from kvferry.protocol.frozen import frozen
from kvferry.protocol.kept import Latest
from kvferry.protocol.peers_events import Home
from kvferry.protocol.values import Sizes

HOMES = 4096
"""Engines whose daemons are remembered after they are forgotten as peers."""
FORGOTTEN = 64
"""Engines that are listed, where they do not answer, after they are forgotten as peers."""


@frozen
class Owner:
    """presumed: no order has named where it is."""

    home: Home
    presumed: bool


class Homes:
    def __init__(self) -> None:
        self._owners: Latest[str, Owner] = Latest(HOMES)
        self._forgotten: Latest[str, Home] = Latest(FORGOTTEN)

    def __contains__(self, engine_id: str) -> bool:
        return engine_id in self._owners

    def in_the_way(self, engine_id: str, home: Home, *, ordered: bool) -> Home | None:
        """The owner of the id, if that is another engine. An engine that only answered when it was asked who it is
        gives way to one that an order names."""
        owner = self._owners.get(engine_id)
        if owner is None or owner.home.addresses == home.addresses or (ordered and owner.presumed):
            return None
        return owner.home

    def bind(self, engine_id: str, home: Home, *, ordered: bool) -> None:
        before = self._owners.get(engine_id)
        self._owners.put(engine_id, Owner(home, before.presumed if before is not None else not ordered))

    def unbind(self, engine_id: str) -> None:
        self._owners.pop(engine_id)

    def over(self, engine_id: str, home: Home) -> None:
        """No daemon there holds the engine any more."""
        owner = self._owners.get(engine_id)
        if owner is not None and owner.home == home:
            self.unbind(engine_id)

    def ordered(self, engine_id: str) -> None:
        """An order names where it is."""
        if (owner := self._owners.get(engine_id)) is not None and owner.presumed:
            self._owners.put(engine_id, Owner(owner.home, presumed=False))

    def is_presumed(self, engine_id: str) -> bool:
        """No order has named where it is, as far as is remembered."""
        owner = self._owners.get(engine_id)
        return owner is None or owner.presumed

    def forget(self, engine_id: str, home: Home) -> None:
        """It is no peer any more."""
        if engine_id in self._owners:
            self._forgotten.put(engine_id, home)

    def forgotten(self) -> Iterator[tuple[str, Home]]:
        """With where they were."""
        return ((name, home) for name, home in self._forgotten.items() if name in self._owners)

    def sizes(self) -> Sizes:
        return {name.strip("_"): len(kept) for name, kept in vars(self).items()}


def taken_by(engine_id: str, home: Home) -> Conflict:
    """The error for an engine id that is another's."""
    why = f"engine {engine_id} is that of {', '.join(home.addresses)}, in epoch {home.epoch}"
    remedy = "give every engine an id of its own; DELETE /v1/peers/ENGINE_ID lets another daemon have this one"
    return Conflict("engine_taken", why, field="source.engine_id", value=engine_id, remedy=remedy)
