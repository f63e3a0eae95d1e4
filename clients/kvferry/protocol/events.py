"""All that the machines of the source side are told, and all that they say: frozen values."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from kvferry.errors import KvferryError
from kvferry.protocol import packing_events as p
from kvferry.protocol.frozen import frozen
from kvferry.protocol.values import UNTRACED, Account, Publication, ReaderId, Reading, Terms, Trace, View

# ---- from the engine that publishes ----


class Publish(NamedTuple):
    """A new lease, or more tokens of the one of this number; its terms are then those of its first publish. fence: a
    number that no other has, where readers may see it only when that fence is reached."""

    terms: Terms
    said: Publication
    fence: int | None = None


class FenceOver(NamedTuple):
    """The fence of a publish is reached; or never will be: problem."""

    request_id: str
    fence: int
    problem: KvferryError | None = None


class Refuse(NamedTuple):
    """It is not published. Readers that wait for it, or come for it, are told why; not if that lease is there, or a
    later one."""

    request_id: str
    number: int
    why: KvferryError


class Lose(NamedTuple):
    """(request, number) of leases of the session before this one, or that could not be published since."""

    leases: tuple[tuple[str, int], ...]


class Revoke(NamedTuple):
    """End a lease whatever its readers do; they will find that it did not hold."""

    request_id: str
    reason: str


class GiveUp(NamedTuple):
    """End a lease for one that was to read it: not while another engine reads it, or waits for its publish."""

    request_id: str
    reason: str
    who: ReaderId


class ReplaceWeights(NamedTuple):
    """End every lease that other weights than these computed."""

    weights: str
    reason: str


class Shut(NamedTuple):
    """Nothing more will be published: end every lease and every wait for one. keep_whole: not what is published whole,
    which may still be read."""

    reason: str
    keep_whole: bool = False


@frozen
class Tick:
    """Time has passed."""


# ---- from one reader's stream ----


class Connect(NamedTuple):
    """announcing: the reader may be told of leases that it did not ask for."""

    stream: int
    who: ReaderId
    announcing: bool = False


class Disconnect(NamedTuple):
    """Nothing of it is read any more."""

    stream: int


class Ask(NamedTuple):
    """The reader opens a lease. lease: its number, 0 for whichever there is. known: of the announcement that the reader
    goes by. refused: why the message cannot be taken. by: who counts the attempt; empty for the reading engine."""

    reading: Reading
    request_id: str
    lease: int = 0
    attempt: int = 0
    known: tuple[int, int] = (0, 0)
    trace: Trace = UNTRACED
    refused: KvferryError | None = None
    by: str = ""


class Pack(NamedTuple):
    """The reader opens a packing of this reading. It ends the one before. chunks: how many it expects. last: it wants
    nothing else of the lease. wanted: handed on to `Cut`."""

    reading: Reading
    packing: int
    chunks: int
    last: bool
    wanted: object = None


class Leave(NamedTuple):
    """The reader closes a reading, or with number 0 a lease that it has not opened. complete: it has read all that it
    wanted. attempt: that it is in by now. by: as of Ask."""

    reading: Reading
    request_id: str = ""
    lease: int = 0
    complete: bool = False
    nbytes: int = 0
    attempt: int = 0
    trace: Trace = UNTRACED
    by: str = ""


# ---- to the shell ----


class HoldWord(NamedTuple):
    """Set the lease's word, before anybody is shown the lease."""

    word: int


class ClearWord(NamedTuple):
    """First of all that an end does: a reader that goes on must not find the word whole."""

    word: int


class CancelFence(NamedTuple):
    fence: int


class LeaseEnded(NamedTuple):
    """Its engine is told."""

    account: Account


class Served(NamedTuple):
    """A reader has read so many bytes, as it says."""

    engine_id: str
    nbytes: int


class Speak(NamedTuple):
    """There is something to tell: `take` it when the stream's turn comes, until nothing is left. Number 0: an
    announcement."""

    reading: Reading


# ---- what a reader is told ----


class Update(NamedTuple):
    view: View


class Announcement(NamedTuple):
    view: View


@frozen
class Unpublished:
    pass


class Problem(NamedTuple):
    """The reading is over."""

    why: KvferryError


LeasesEvent: TypeAlias = Publish | FenceOver | Refuse | Lose | Revoke | GiveUp | ReplaceWeights | Shut | Tick
ServingEvent: TypeAlias = Connect | Disconnect | Ask | Pack | Leave
SourceEvent: TypeAlias = LeasesEvent | ServingEvent
SourceEffect: TypeAlias = HoldWord | ClearWord | CancelFence | LeaseEnded | Served | Speak | p.PackingEffect
Told: TypeAlias = Update | Announcement | Unpublished | Problem | p.Packed
