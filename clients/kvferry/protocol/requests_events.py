"""All that the machine of requests is told, and all that it says: frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any, Protocol, TypeAlias

from kvferry.errors import KvferryError
from kvferry.protocol.attempts import Attempt, ReadingRank
from kvferry.protocol.claims import Blocks
from kvferry.protocol.frozen import frozen


class Order(Protocol):
    """The source to read from, as far as the machine looks at it."""

    @property
    def engine_id(self) -> str: ...
    @property
    def address(self) -> str: ...
    @property
    def leader(self) -> str: ...
    @property
    def lease_id(self) -> object | None: ...
    def same_source(self, other: Any) -> bool: ...
    def naming(self, other: Any) -> Any: ...


@frozen
class Reservation:
    """The blocks to write on this rank. said: how the blocks are to be written, compared only. blocks: that are
    written. weights: the name of those that the engine has now."""

    said: object
    blocks: Blocks = field(compare=False)
    weights: str = field(default="", compare=False)


# ---- from routers, engines and other ranks ----


@frozen
class Ordered:
    """A router's order, on rank 0.

    number: of the attempt; 0 for the one under way, or else the next. brought: what came with it for each rank;
    reservation: this rank's of those. said: all that the order says, for knowing it again by its id. closed: why the
    engine takes no new transfers.
    """

    at: ReadingRank
    request_id: str
    order: Order
    number: int = 0
    brought: Mapping[int, object] = field(default_factory=dict)
    reservation: Reservation | None = None
    order_id: str = ""
    said: object = None
    closed: KvferryError | None = None


@frozen
class Reserved:
    """An engine's reservation for the attempt of this number; with the order, if the engine names the source.
    deadline_s: the engine's own."""

    at: ReadingRank
    request_id: str
    attempt: Attempt
    reservation: Reservation
    order: Order | None = None
    deadline_s: float | None = None
    closed: KvferryError | None = None


@frozen
class Handed:
    """Rank 0 hands on an order. reservation: came with it."""

    at: ReadingRank
    request_id: str
    attempt: Attempt
    order: Order
    reservation: Reservation | None = None
    closed: KvferryError | None = None


@frozen
class Unfit:
    """A reservation or an order for this attempt cannot be taken as it is."""

    at: ReadingRank
    request_id: str
    attempt: Attempt
    why: KvferryError


@frozen
class EndedElsewhere:
    """This attempt has ended on another rank. failed: it did not abort but fail."""

    at: ReadingRank
    request_id: str
    attempt: Attempt
    failed: bool
    why: str


@frozen
class Abort:
    """End the request's attempts."""

    at: ReadingRank
    request_id: str
    why: str


@frozen
class AbortPart:
    """End this attempt on all ranks."""

    part: int
    why: str


# ---- from the daemon ----


@frozen
class HandBack:
    """The engine drains: its orders that wait for a reservation go back to their routers."""

    at: ReadingRank
    why: KvferryError


@frozen
class Led:
    """This instance of rank 0's daemon leads from now on: ends are gathered by no other."""

    at: ReadingRank
    leader: str


@frozen
class ReplaceWeights:
    at: ReadingRank
    weights: str


@frozen
class Shut:
    """The engine is gone or retired."""

    at: ReadingRank
    why: KvferryError


@frozen
class Left:
    """Nothing more is reserved in this life of the engine."""

    at: ReadingRank


# ---- from transfers ----


@frozen
class Ended:
    """The part of this rank. problem: None where it is done. over: those of all ranks have; else `Over` comes later."""

    part: int
    problem: KvferryError | None = None
    over: bool = False


@frozen
class Over:
    """The parts of all ranks have ended."""

    part: int


@frozen
class Quiet:
    """The part has ended, and nothing can be written any more."""

    part: int


# ---- to the shell ----


@frozen
class Begin:
    """A transfer begins, under this number."""

    part: int
    at: ReadingRank
    request_id: str
    attempt: Attempt
    deadline_s: float | None = None


@frozen
class TakeOrder:
    """handed: by rank 0."""

    part: int
    order: Order
    handed: bool = False


@frozen
class NameSource:
    """The order, with the lease that the engine names."""

    part: int
    order: Order


@frozen
class Follow:
    """Rank 0 has handed on this order, too, to a transfer that has its own."""

    part: int
    order: Order


@frozen
class TakeReservation:
    part: int
    attempt: Attempt
    reservation: Reservation


@frozen
class Meet:
    """The order waits: shake hands with its source meanwhile."""

    part: int


@frozen
class HandOn:
    """Hand the order on to the other ranks, with the attempt's number, and to each what came with it for that rank."""

    part: int
    brought: Mapping[int, object]


@frozen
class Stop:
    part: int
    failed: bool
    why: KvferryError


@frozen
class TellEnded:
    """Tell the other ranks that this one's part was not done."""

    part: int


@frozen
class TellRefused:
    """Tell the other ranks that this one takes no part in the attempt."""

    at: ReadingRank
    request_id: str
    attempt: Attempt
    why: KvferryError


@frozen
class Appeared:
    """The request has an attempt more, or one less to wait for."""

    request_id: str


@frozen
class Forgotten:
    part: int


@frozen
class OneFewer:
    """Waiters for a drain look again."""


@frozen
class Taken:
    """The answer to an order or a reservation. new: the order was not known."""

    part: int
    new: bool = True


@frozen
class Refused:
    """The answer to what is refused as this rank's end of its attempt."""

    why: KvferryError


Event: TypeAlias = (
    Ordered | Reserved | Handed | Unfit | EndedElsewhere | Abort | AbortPart | HandBack | Led | ReplaceWeights | Shut
    | Left | Ended | Over | Quiet
)  # fmt: skip
Effect: TypeAlias = (
    Begin | TakeOrder | NameSource | Follow | TakeReservation | Meet | HandOn | Stop | TellEnded | TellRefused
    | Appeared | Forgotten | OneFewer | Taken | Refused
)  # fmt: skip
