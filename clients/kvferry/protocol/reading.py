"""A source rank as one attempt reads it: the lease by which it goes, and what the source is asked.

The source may have announced the lease. Then reading goes by the announcement at once, and the lease is opened beside
it: with the first message that there is, or OPEN_AFTER_S later. The source answers only if it holds something else by
now. It is asked once more, `AskAgain`, where the announcement turns out to be out of date.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TypeAlias, assert_never

from kvferry.errors import Conflict, KvferryError, PeerFailed
from kvferry.protocol.frozen import frozen
from kvferry.tables import Tables

OPEN_AFTER_S = 0.02
"""How long a reader goes by an announcement before it opens the lease, so that the lease does not expire under a long
read. A short read is over by then, and costs its source one message."""


@frozen
class Seen:
    """A lease as its source has told of it. lease: its number. version: counts its publishes."""

    lease: int = 0
    version: int = 0
    word: int = 0
    word_address: int = 0
    num_tokens: int = 0
    more: bool = True
    digest: bytes = b""
    weights: str = ""
    metadata: bytes = b""
    tables: Tables = field(default_factory=dict, compare=False)
    fenced_s: float = 0.0
    """From that publish until its source showed it: its fence, and those before it."""


UNSEEN = Seen()


@frozen
class Computed:
    """The prompt and the weights that a lease must have been computed of and by.

    digest: of the prompt; empty is not checked. weights: their name, always compared: an empty one is a name, too.
    """

    digest: bytes = b""
    weights: str = ""

    def fits(self, seen: Seen) -> bool:
        return seen.weights == self.weights and (not self.digest or seen.digest == self.digest)

    def check(self, seen: Seen, request_id: str, rank: int) -> None:
        """Raises KvferryError: `other_weights`, also where the prompt is another, too; `other_prompt`."""
        if seen.weights != self.weights:
            why = (
                f"rank {rank} of the source computed request {request_id} by weights {seen.weights!r}, and this engine "
                f"has {self.weights!r} ('': those that it registered with)"
            )
            remedy = "replace the weights on both sides, under one name, and prefill the request again"
            raise Conflict("other_weights", why, field="weights", value=seen.weights, remedy=remedy)
        if self.digest and seen.digest != self.digest:
            how = "for another prompt than this one" if seen.digest else "without a digest of its prompt"
            why = f"request {request_id} was published {how}"
            remedy = "hand kv_transfer_params on with the prompt that they were made for, and with its LoRA adapter"
            raise Conflict("other_prompt", why, field="digest", value=seen.digest.hex(), remedy=remedy)


# ---- what it is told ----


@frozen
class Begin:
    """announced: what the source has announced of the lease that is wanted."""

    announced: Seen | None = None


@frozen
class Due:
    """OPEN_AFTER_S has passed, or there is a message with which the lease can be opened."""


@frozen
class Update:
    """opening: which one the source answers."""

    opening: int
    seen: Seen


@frozen
class Unpublished:
    opening: int


@frozen
class Over:
    """No update follows: the source has ended the reading, or its stream is lost."""

    opening: int
    why: KvferryError


@frozen
class Gathered:
    """The source gathers by what was announced, so it still has that."""


@frozen
class Read:
    nbytes: int


@frozen
class AskAgain:
    """Go by the source's own answer: the one it has given, if that is wanted and has not ended since, or a new one."""


@frozen
class AskFor:
    """Read the lease of this number, which another rank of the source has told of."""

    lease: int


@frozen
class Leave:
    """The reading is over. complete: all that was wanted has been read."""

    complete: bool


ReadingEvent: TypeAlias = Begin | Due | Update | Unpublished | Over | Gathered | Read | AskAgain | AskFor | Leave


# ---- what it says ----


@frozen
class OpenLater:
    """Tell it `Due` at that time, unless it has opened the lease before."""

    at: float


@frozen
class Open:
    """known: (word, version) of what the source need not tell."""

    opening: int
    lease: int
    known: tuple[int, int]


@frozen
class Close:
    """opening: 0 for a lease that was never opened."""

    opening: int
    lease: int
    complete: bool
    nbytes: int


ReadingEffect: TypeAlias = OpenLater | Open | Close
Effects = list[ReadingEffect]


class Following:
    def __init__(self, rank: int, request_id: str, named: int, wanted: Computed) -> None:
        """named: the lease's number; 0 for whichever the source has."""
        self.rank, self.request_id, self.named, self.wanted = rank, request_id, named, wanted
        self.seen = UNSEEN
        """The lease by which it is read."""
        self.announced = False
        """It goes by an announcement, which the source has not confirmed."""
        self.awaits_publish = False
        """The source has not got the lease yet."""
        self.problem: KvferryError | None = None
        """Why no update follows."""
        self.nbytes = 0
        """Read of it so far."""
        self.opening = 0
        """Counts how often it was opened."""
        self.due = False
        """It is still to be opened."""
        self._fresh: Seen | None = None
        """The newest update that was not taken. An update includes all earlier ones."""
        self._told_of = 0
        """The lease of this opening, as its first update said."""

    def on(self, event: ReadingEvent, now: float) -> Effects:
        match event:
            case Begin(announced):
                # An announcement of another prompt, or by other weights, may be out of date: ask the source.
                if announced is None or not self.wanted.fits(announced):
                    return self._open()
                self.seen, self.announced, self.due = announced, True, True
                return [OpenLater(now + OPEN_AFTER_S)]
            case Due():
                return self._open() if self.due else []
            case Update(opening, seen):
                if opening == self.opening and self.problem is None:
                    self._hear(seen)
            case Unpublished(opening):
                self.awaits_publish |= opening == self.opening
            case Over(opening, why):
                if opening == self.opening and self.problem is None:
                    self.problem = why
            case Gathered():
                self.announced = False
            case Read(nbytes):
                self.nbytes += nbytes
            case AskAgain():
                self.announced = False
                ended = self.problem is not None and self.problem.code == "lease_ended"  # there may be another since
                told = self._fresh is not None and self.wanted.fits(self._fresh)
                return self._open_anew() if ended or (not told and self.problem is None) else []
            case AskFor(lease):
                self.named, self.announced = lease, False
                return self._open_anew()
            case Leave(complete):
                self.due, number = False, self.seen.lease or self.named
                return self._close(complete, number) if self.opening or complete else []
            case _:
                assert_never(event)
        return []

    def take(self) -> bool:
        """Whether it goes by a newer update from now on. Raises KvferryError: `other_prompt`, `other_weights`, or why
        none follows."""
        seen, self._fresh = self._fresh, None
        if seen is None:
            self.check_goes_on()
            return False
        self.wanted.check(seen, self.request_id, self.rank)
        self.seen, self.awaits_publish = seen, False
        return True

    def check_goes_on(self) -> None:
        """Raises KvferryError where the source has ended it, or is lost."""
        if self.problem is not None:
            raise self.problem.kept()

    def _hear(self, seen: Seen) -> None:
        if seen.lease and self._told_of in (0, seen.lease):
            self._fresh, self._told_of = seen, seen.lease
            return
        after = f"after lease {self._told_of}" if self._told_of else "which is no number"
        why = f"source rank {self.rank} told of lease {seen.lease} of request {self.request_id}, {after}"
        remedy = "see what listens there: a reading is of one lease, which its source's engine has numbered from 1"
        self.problem = PeerFailed("malformed_update", why, field="lease", value=seen.lease, remedy=remedy)

    def _open(self) -> Effects:
        self.opening, self.due, self._told_of = self.opening + 1, False, 0
        return [Open(self.opening, self.named, (self.seen.word, self.seen.version))]

    def _open_anew(self) -> Effects:
        closed = self._close(complete=False, lease=self.seen.lease) if self.opening else []
        self.seen, self.nbytes, self._fresh, self.problem, self.awaits_publish = UNSEEN, 0, None, None, False
        return closed + self._open()

    def _close(self, complete: bool, lease: int) -> Effects:
        return [Close(self.opening, lease, complete, self.nbytes)]

    def check(self) -> None:
        assert not self.announced or self.seen.version, "it goes by an announcement, and has none"
        assert not self.due or self.announced or self.opening == 0
        assert self._fresh is None or self._fresh.lease == self._told_of


@dataclass(slots=True)
class Pass:
    """A reading of the lease, from all source ranks that are not whole."""

    at: int
    first: int
    read: Counter[int] = field(default_factory=Counter)
    """Bytes by source rank."""
    unpacked: set[int] = field(default_factory=set)
    """Source ranks of which bytes are not proven by packing."""
