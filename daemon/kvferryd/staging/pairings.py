"""The plans of those who read from this rank, by the names that they were told."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Sequence

from kvferry.errors import Conflict, NotFound
from kvferry.manifest import Manifest
from kvferryd.plan import Plan
from kvferryd.staging.share import share_of

PAIRINGS = 64
"""Plans kept. A reader whose plan is forgotten pairs again."""


class Pairings:
    """This rank's part of the plans of those who read from it."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, Plan] = OrderedDict()

    async def add(self, own: Manifest, sources: Sequence[Manifest], destination: Manifest, said: bytes) -> str:
        """Plan as the reader does; returns the plan's name. `said`: all of that as it came.

        Raises KvferryError (`protocol`) when the reader sees this rank otherwise than it is, PlanRefused.
        """
        if [source for source in sources if source.rank == own.rank] != [own]:
            raise Conflict(
                "protocol",
                f"the reader does not know rank {own.rank} of engine {own.engine_id} as it is",
                field="sources",
                value=sorted(source.rank for source in sources),
                remedy="shake hands again",
            )
        name = hashlib.sha256(said).hexdigest()
        if name not in self._known:
            self._known[name] = await asyncio.to_thread(share_of, sources, destination, own.rank)
            while len(self._known) > PAIRINGS:
                self._known.popitem(last=False)
        return name

    def get(self, name: str) -> Plan:
        """Raises KvferryError (`unknown_pairing`)."""
        if name not in self._known:
            raise NotFound(
                "unknown_pairing",
                "the plan of this pair of engines is not known, or was forgotten",
                field="pairing",
                value=name,
                remedy="pair again",
            )
        self._known.move_to_end(name)
        return self._known[name]
