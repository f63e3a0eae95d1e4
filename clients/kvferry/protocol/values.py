"""The values of the source side: readers, publishes, leases as readers see them, accounts of leases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import NamedTuple, TypeAlias

from kvferry.errors import KvferryError
from kvferry.protocol.frozen import frozen
from kvferry.protocol.states import LeaseState
from kvferry.tables import Tables

Sizes: TypeAlias = Mapping[str, int]
"""How much a machine keeps, by collection."""
Trace: TypeAlias = tuple[str, str]
"""traceparent and x-request-id of a request, as its router gave them; empty where there is none."""
UNTRACED: Trace = ("", "")
ReaderEngine: TypeAlias = tuple[str, str, int, bytes]


@frozen
class ReaderId:
    """A rank of a reading engine. Readers are equal only if their keys are: names prove nothing."""

    engine_id: str
    epoch: str
    rank: int
    world_size: int
    key: bytes = field(default=b"", repr=False)
    host: str = field(default="", compare=False)
    """The address that it calls from."""

    @property
    def engine(self) -> ReaderEngine:
        """Equal for all ranks of one engine."""
        return self.engine_id, self.epoch, self.world_size, self.key


class Reading(NamedTuple):
    """An opening of a lease: `number` is never used again on its stream, and a stream never in a daemon's life."""

    stream: int
    number: int


@frozen
class Publication:
    """A publish: tokens [0, num_tokens) are in these blocks."""

    tables: Tables
    num_tokens: int
    metadata: bytes
    more: bool
    digest: bytes = b""
    """Names what was computed; equal in every publish of one lease."""
    weights: str = ""
    """The name of the weights that computed it."""


@frozen
class Terms:
    """The terms of one lease, from its first publish on. word: drawn by chance, never 0; it holds while the lease
    does."""

    request_id: str
    number: int
    word: int
    ttl_s: float
    readers: int
    created_at: float = 0.0
    """Seconds since 1970, for its record."""


@frozen
class View:
    """A lease as a reader sees it: what was published last, and how many publishes that were."""

    terms: Terms
    said: Publication
    version: int
    fenced_s: float = 0.0
    """From that publish until readers saw it: its fence, and those before it."""

    @property
    def known_by(self) -> tuple[int, int]:
        """Equal for the same publish of the same lease, and for no other."""
        return self.terms.word, self.version


class Times(NamedTuple):
    """Seconds from a lease's first publish until a rank had it open, until all that it wanted was packed, and until it
    closed it. None where that was not, or is not yet."""

    opened: float | None = None
    packed: float | None = None
    closed: float | None = None


NEVER = Times()


@frozen
class Reader:
    """How one rank stands that reads a lease, or has. state: reading, read, left."""

    who: ReaderId
    state: str
    nbytes: int
    attempt: int
    times: Times


@frozen
class Account:
    """All that is told of a lease. An ended one is remembered as its account, whose size does not grow with its
    readers."""

    request_id: str
    number: int
    state: LeaseState
    num_tokens: int
    weights: str
    expected: int
    open: int
    """Readers that are there."""
    closed: int
    """Ranks that have read."""
    created_at: float
    age_s: float
    """Until now, or its end."""
    shown_s: float | None
    """From its first publish until readers saw the last one, its fence reached; None before."""
    expires_in_s: float | None
    """None while somebody reads it, and once it has ended."""
    reason: str
    """Why it ended, if it was not read."""
    problem: KvferryError | None
    """Why it was revoked, where nobody asked for that."""
    nbytes: int
    readers: tuple[Reader, ...]
    trace: Trace

    @property
    def ended_at(self) -> float | None:
        return self.created_at + self.age_s if self.state.ended else None
