"""The values of an engine's book: what it keeps of calls and leases, and why it refuses."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvferry.errors import Conflict, Deadline, KvferryError, Malformed, Unavailable
from kvferry.protocol import book_events as e
from kvferry.protocol.kept import Latest

LOST = 4096
"""The most leases that a daemon is told to be lost."""
CUT = 1 << 16
"""Requests that are known to have been published in part when the weights were replaced."""
EARLY = 32
"""Events kept of a request whose own transfer is not known yet; those before them are of transfers long over."""


class Start:
    """A start of the engine, on one rank: all that outlives a session."""

    def __init__(self) -> None:
        self.leases, self.attempts = itertools.count(1), itertools.count(1)
        """Numbers for those that the engine leaves to the book."""
        self.weights = ""
        self.cut: Latest[str, None] = Latest(CUT)
        self.lost: deque[tuple[str, int]] = deque(maxlen=LOST)
        """(request, number) of leases that nobody can read, and no daemon knows of: the LOST newest."""

    def cut_all(self, request_ids: Iterable[str]) -> None:
        for request_id in sorted(request_ids):
            self.cut.put(request_id, None)


@dataclass(slots=True, eq=False)
class Lease:
    held: e.Held
    number: int
    more: bool = False
    taken: bool = False
    """The daemon has taken a publish of it."""
    calls: int = 0
    """Publishes that are not answered."""
    over: bool = False


@dataclass(slots=True, eq=False)
class Call:
    """told: its end, or nobody waits for it. aborted: by the engine, after it. lease: the one that it publishes. why:
    what it is refused for when its lease is withdrawn."""

    said: e.Said
    number: int = 0
    weights: str = ""
    """The engine's, when it called."""
    told: bool = False
    aborted: bool = False
    lease: Lease | None = None
    why: KvferryError | None = None

    @property
    def request_id(self) -> str:
        """Empty where the call is for no request."""
        return getattr(self.said, "request_id", "")


@dataclass(slots=True, eq=False)
class Receive(Call):
    """It is the request's own until it has ended, or given up, until it is quiet."""

    transfer_id: str = ""
    over: bool = False
    safe: bool = False
    given_up: bool = False
    early: deque[e.TransferOver | e.BlocksSafe] = field(default_factory=lambda: deque(maxlen=EARLY))


def in_part(leases: Mapping[tuple[str, int], Lease], waiting: Iterable[Call], settling: Iterable[Call]) -> set[str]:
    """Requests of which more follows what was published, or is to be, or may have been. settling: nobody knows."""
    more = {request_id: lease.more for (request_id, _), lease in leases.items()}
    more |= {of.request_id: of.said.more for of in waiting if isinstance(of.said, e.Publish)}
    return {of.request_id for of in settling if _more(of)} | {name for name, follows in more.items() if follows}


def _more(publish: Call) -> bool:
    assert isinstance(publish.said, e.Publish)
    return publish.said.more


def registering() -> KvferryError:
    why, remedy = "the engine's cache is still being registered: nothing was sent", "see the daemon's log"
    return Deadline("deadline", why, field="call_timeout_s", remedy=remedy)


def number_required(field: str, request_id: str, ranks: int) -> KvferryError:
    why = f"request {request_id} has no number of its {field}, and this engine has {ranks} ranks"
    remedy = f"give `{field}` from a counter of the engine, the same on all ranks"
    return Malformed("number_required", why, field=field, value=0, remedy=remedy)


def mixed_weights(request_id: str, weights: str) -> KvferryError:
    why = f"a part of request {request_id} was published before the weights were replaced"
    remedy = "abort the request and compute it again, or name the weights that computed all of it"
    return Conflict("mixed_weights", why, field="weights", value=weights, remedy=remedy)


def aborted(request_id: str) -> KvferryError:
    return Conflict("aborted", f"request {request_id} was aborted")


def pending(request_id: str) -> KvferryError:
    why = f"request {request_id} is being received already, or was and is not quiet"
    remedy = "wait for it, or abort it first"
    return Conflict("receive_pending", why, field="request_id", value=request_id, remedy=remedy)


def other_weights(request_id: str, weights: str) -> KvferryError:
    why = f"request {request_id} was received for weights {weights!r}, which have been replaced"
    remedy = "receive it anew; its prefill must have the same weights"
    return Conflict("other_weights", why, field="weights", value=weights, remedy=remedy)


def daemon_gone() -> KvferryError:
    why = "the session has ended, and with it the lease: nobody reads it any more"
    return Unavailable("daemon_gone", why, remedy="connect again, and publish anew what is still to be read")
