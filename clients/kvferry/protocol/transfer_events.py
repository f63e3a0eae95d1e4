"""Events, tasks (`Do`) and effects of the machine of an attempt: frozen values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import TypeAlias

from kvferry.errors import KvferryError
from kvferry.protocol import reading as r
from kvferry.protocol.frozen import frozen
from kvferry.protocol.reading import Computed
from kvferry.protocol.states import TransferState

LeaseId: TypeAlias = tuple[str, int]
"""(the epoch of the source's engine, the lease's number)."""
STALE = frozenset({
    "stale_epoch", "stale_instance", "unknown_engine", "transport_failed", "peer_unreachable", "peer_lost",
    "proof_failed",
})  # fmt: skip
"""Errors after which a peer is no longer what it was at the handshake: hands are shaken anew."""
Range: TypeAlias = tuple[int, int]
"""Global tokens [first, last)."""


@frozen
class Wanted:
    """rank: this one's. epoch, lease: as the order names them; empty and 0 for any. tokens: None for all that is
    published. sums: checksums are compared before it is done."""

    request_id: str
    rank: int = 0
    epoch: str = ""
    lease: int = 0
    computed: Computed = field(default_factory=Computed)
    tokens: Range | None = None
    sums: bool = False


# ---- what it is told ----


@frozen
class Match:
    """Order and reservation are there."""

    wanted: Wanted


@frozen
class Met:
    """Hands are shaken. read: source ranks that are read, each with what it has announced. others: with nothing to
    read. grain: tokens that are moved together, but for the last."""

    epoch: str
    read: Mapping[int, r.Seen | None]
    others: Iterable[int] = ()
    grain: int = 1


@frozen
class Told:
    """A source rank says this."""

    rank: int
    event: r.ReadingEvent


@frozen
class Moved:
    """A move has ended. nbytes: by source rank. packed: ranks whose bytes are proven by packing. failed: why others
    were not read, which went by announcements."""

    nbytes: Mapping[int, int] = field(default_factory=dict)
    packed: frozenset[int] = frozenset()
    failed: KvferryError | None = None


@frozen
class Drained:
    """Nothing of before is written any more."""


@frozen
class Proven:
    """All words that were to be whole are whole."""


@frozen
class Compared:
    """Checksums are equal."""


@frozen
class Failed:
    """It has failed, whatever was to be done."""

    why: KvferryError


@frozen
class Led:
    """Rank 0 reads this lease: the order that it has handed on names it, or it says so once it is done."""

    first: LeaseId


@frozen
class Stop:
    """aborted: it does not fail."""

    why: KvferryError
    aborted: bool = False


@frozen
class Quiet:
    """The attempt has ended, and nothing can be written any more."""


TransferEvent: TypeAlias = Match | Met | Told | Moved | Drained | Proven | Compared | Failed | Led | Stop | Quiet

# ---- what is to be done ----


@frozen
class Meet:
    """Shake hands."""


@frozen
class Listen:
    """Until `do` is something else."""


@frozen
class Move:
    """tokens: without source ranks of which all is there. states: with the states, which go last."""

    tokens: Range
    states: bool
    without: frozenset[int]


@frozen
class Drain:
    """Abandon what may still write, and wait for it."""


@frozen
class Prove:
    """words: source ranks whose word must be whole."""

    words: frozenset[int]


@frozen
class Compare:
    """Compare checksums of these tokens, and of the states."""

    tokens: Range


@frozen
class Finish:
    """The verdict. lease, tokens: what was read; None where the attempt is not done, as `problem` says."""

    state: TransferState
    lease: LeaseId | None = None
    tokens: Range | None = None
    problem: KvferryError | None = None


@frozen
class Past:
    """An attempt of which nothing goes on any more, as it is told. announced: it went by announcements."""

    lease: LeaseId | None
    nbytes: int
    tokens: Range | None
    announced: bool


Do: TypeAlias = Meet | Listen | Move | Drain | Prove | Compare | Finish

# ---- what it says meanwhile ----


@frozen
class Say:
    """To one source rank."""

    rank: int
    effect: r.ReadingEffect


@frozen
class Forget:
    """The peer is no longer what it was at the handshake."""


TransferEffect: TypeAlias = Say | Forget
