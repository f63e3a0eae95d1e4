"""The task, the waits and the result that every path shares."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.errors import KvferryError
from kvferry.schemas import Awaited, Wait
from kvferry.tables import Tables
from kvferryd.copy.copying import Copying
from kvferryd.engine import Engine
from kvferryd.paths.source import SourceReader
from kvferryd.peers.peer import PeerEngine
from kvferryd.plan import Bound
from kvferryd.transport.read import Descriptors, Read

LEAST_S = 1e-3
"""A shorter wait is not kept: a transfer of a peer that is known has a dozen of them."""
ARENA = "the own staging arena"
MOST = 8
"""Waits of one transfer that are kept, the longest: each source rank may be one."""


class PathName(enum.StrEnum):
    """How runs are moved. The setting and the order's field are called `way`."""

    MAPPED = "mapped"
    STAGED = "staged"
    DIRECT = "direct"


class Transport(enum.StrEnum):
    """The carrier of the bytes, as records name it."""

    UCX = "UCX"
    CUDA_IPC = "cuda_ipc"
    """A copy of the reader's, from memory that is mapped there."""


Flight = Read | Copying
"""Something that may write to a transfer's blocks, until it is `quiet`."""


@dataclass(frozen=True, slots=True)
class Moved:
    """The result of a move. The bytes of `packed` ranks are proven: the source packed all of them while its lease held,
    and kept them until they were read. The bytes of the other ranks are proven by the lease's validity word alone.
    """

    ranks: frozenset[int]
    """Source ranks that bytes were read from."""
    descriptors: int = 0
    packed: frozenset[int] = frozenset()
    failed: KvferryError | None = None
    """Why other ranks were not read, which went by announcements: each may be read once more."""


class Waits:
    """The waits of one rank's part of a transfer: at whom, since when, and for how long.

    At most one wait goes on at a time. Waits for the same thing add up to one.
    """

    def __init__(self, now: float) -> None:
        self.what: Awaited | None = Awaited.ORDER
        """The wait that goes on; of either half it is the order until both are there."""
        self.on = ""
        """At whom, where that is known before its end."""
        self._before = self._since = now
        """When the wait before began, and this one."""
        self._kept: dict[tuple[Awaited, str, str], tuple[float, float]] = {}
        """When each began first, and its seconds."""

    def turn(self, what: Awaited | None, now: float, on: str = "") -> bool:
        """This one goes on now, by the monotonic clock. Whether the one before is worth to be kept: `keep` it."""
        self._before = self._since
        self._since, self.what, self.on = now, what, on
        return self.last_s >= LEAST_S

    @property
    def last_s(self) -> float:
        """The length of the wait before this one."""
        return self._since - self._before

    def keep(self, what: Awaited, on: str, part: str = "") -> None:
        """on: a name that is there already. part: of it, which took the longest."""
        since, seconds = self._kept.get((what, on, part), (self._before, 0.0))
        self._kept[what, on, part] = since, seconds + self._since - self._before
        if len(self._kept) > MOST:
            del self._kept[min(self._kept, key=lambda each: self._kept[each][1])]

    def told(self, created_at: float, began: float) -> list[Wait]:
        """The longest first. created_at, began: the transfer's beginning in Unix time, and by the monotonic clock."""
        waits = [
            Wait(what=what, on=on, part=part, began_at=round(created_at + since - began, 3), ms=round(1e3 * seconds, 3))
            for (what, on, part), (since, seconds) in self._kept.items()
        ]
        return sorted(waits, key=lambda wait: -wait.ms)


@dataclass(frozen=True, slots=True)
class Move:
    """Bytes to be moved for one transfer: of these tokens, and of the states if `states`, into these tables.

    `flights`: a path adds everything that may write to the blocks as soon as it exists, so that the transfer knows of
    it if the move fails or is cancelled. `deadline`: on the loop's clock. `waits`: of the transfer, for a path to note
    its own.
    """

    bound: Bound
    tables: Tables
    tokens: tuple[int, int]
    states: bool
    engine: Engine
    peer: PeerEngine
    readers: Sequence[SourceReader]
    priority: int
    deadline: float
    flights: list[Flight]
    waits: Waits

    @property
    def ranks(self) -> frozenset[int]:
        """Source ranks that bytes are read from."""
        return frozenset(rank for rank, nbytes in self.bound.nbytes_by_rank.items() if nbytes)

    def read(self, peer: str, local: Descriptors, remote: Descriptors, local_type: str, remote_type: str) -> Read:
        """Begin a read. It is among the flights before anything else can fail."""
        read = self.engine.agent.read(peer, local, remote, local_type, remote_type, self.priority)
        self.flights.append(read)
        return read
