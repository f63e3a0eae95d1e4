"""An engine's book: the events that it is fed, and the effects that it returns.

A call, a lease: whatever the caller knows them by. The book hands them back and looks at none.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from kvferry.errors import KvferryError
from kvferry.protocol.frozen import frozen

Call: TypeAlias = Any
Held: TypeAlias = Any
"""A lease, as the caller knows it."""


@frozen
class Publish:
    """More of a lease, or its first part. lease: its key if this begins it. number: 0 lets the book count. withdraw: a
    refusal withdraws earlier publishes too. current: the engine says that its present weights computed it."""

    call: Call
    lease: Held
    request_id: str
    number: int = 0
    more: bool = False
    withdraw: bool = False
    current: bool = True


@frozen
class Receive:
    """attempt: 0 lets the book count."""

    call: Call
    request_id: str
    attempt: int = 0


@frozen
class Abort:
    """The request's receive and lease are to end."""

    call: Call
    request_id: str


@frozen
class ReplaceWeights:
    call: Call
    weights: str


@frozen
class Probe:
    call: Call


Said: TypeAlias = Publish | Receive | Abort | ReplaceWeights | Probe


@frozen
class Leave:
    """The call is left: its time is over, or its caller was cancelled. A call that had been answered
    stands. Any other is refused, if it was not sent; or it is `Quiet` later, and nothing else is told of it."""

    call: Call


@frozen
class Answered:
    """The daemon has answered a command. problem: it did nothing. transfer_id: a receive's name."""

    id: int
    problem: KvferryError | None = None
    transfer_id: str = ""


@frozen
class LeaseOver:
    """end: told as it is."""

    request_id: str
    number: int
    end: object


@frozen
class TransferOver:
    """end: told as it is. done: its bytes have arrived. safe: nothing writes the blocks any more."""

    request_id: str
    transfer_id: str
    end: object
    done: bool
    safe: bool


@frozen
class BlocksSafe:
    request_id: str
    transfer_id: str


@frozen
class Register:
    """The cache is being described: what is said meanwhile waits."""


@frozen
class Registered:
    """The daemon has answered. lost: what it was told to be lost; nothing where it refused."""

    lost: tuple[tuple[str, int], ...] = ()


@frozen
class SessionLost:
    """The session has ended. Its daemon may go on reading and writing."""

    why: KvferryError


@frozen
class SessionOver:
    """Nothing of the session is read or written any more. unknown: why that will never be certain."""

    unknown: KvferryError | None = None


Event: TypeAlias = (
    Said | Leave | Answered | LeaseOver | TransferOver | BlocksSafe | Register | Registered | SessionLost | SessionOver
)


@frozen
class Send:
    """Put the call's command on the stream, with this id. number: of the lease or the attempt. lease: the one that is
    published."""

    call: Call
    id: int
    number: int = 0
    lease: Held = None


@frozen
class SendAbort:
    id: int
    request_id: str


@frozen
class Named:
    """The daemon has taken the receive."""

    call: Call


@frozen
class Taken:
    """The daemon has done what it was told."""

    call: Call


@frozen
class Refused:
    """Nothing was done; or what was done is undone."""

    call: Call
    why: KvferryError


@frozen
class Doubtful:
    """The session ended first. `Quiet` follows."""

    call: Call
    why: KvferryError


@frozen
class Ended:
    """A receive is over. problem: its bytes are of no use though they have arrived. `Quiet` follows."""

    call: Call
    end: object
    problem: KvferryError | None = None


@frozen
class Quiet:
    """Nothing reads or writes the call's blocks any more. unknown: why that will never be certain."""

    call: Call
    unknown: KvferryError | None = None


@frozen
class LeaseEnded:
    """The lease's blocks are not read any more, where `end` says so."""

    lease: Held
    end: object


Effect: TypeAlias = Send | SendAbort | Named | Taken | Refused | Doubtful | Ended | Quiet | LeaseEnded
