"""The task and the result that every path shares."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.errors import KvferryError
from kvferry.tables import Tables
from kvferryd.copy.copying import Copying
from kvferryd.engine import Engine
from kvferryd.paths.source import SourceReader
from kvferryd.peers.peer import PeerEngine
from kvferryd.plan import Bound
from kvferryd.transport.read import Descriptors, Read


class PathName(enum.StrEnum):
    """How runs are moved. The setting and the order's field are called `way`."""

    MAPPED = "mapped"
    STAGED = "staged"
    DIRECT = "direct"

    @property
    def transport(self) -> str:
        """The carrier of the bytes, as records name it."""
        return "cuda_ipc" if self is PathName.MAPPED else "UCX"


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


@dataclass(frozen=True, slots=True)
class Move:
    """Bytes to be moved for one transfer: of these tokens, and of the states if `states`, into these tables.

    `flights`: a path adds everything that may write to the blocks as soon as it exists, so that the transfer knows of
    it if the move fails or is cancelled. `deadline`: on the loop's clock.
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

    @property
    def ranks(self) -> frozenset[int]:
        """Source ranks that bytes are read from."""
        return frozenset(rank for rank, nbytes in self.bound.nbytes_by_rank.items() if nbytes)

    def read(self, peer: str, local: Descriptors, remote: Descriptors, local_type: str, remote_type: str) -> Read:
        """Begin a read. It is among the flights before anything else can fail."""
        read = self.engine.agent.read(peer, local, remote, local_type, remote_type, self.priority)
        self.flights.append(read)
        return read
