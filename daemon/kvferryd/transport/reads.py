"""Reads that take turns: posted chunk by chunk, and asked for until NIXL says that they are over."""

from __future__ import annotations

import heapq
import itertools
import time
from typing import Any

from kvferryd import logs
from kvferryd.aio import settle
from kvferryd.transport.read import Read, TransportError, typed

log = logs.get(__name__)

IN_FLIGHT = 2
"""Posts of one read that may be under way at once."""
STUCK_S = 1.0
"""A request of which NIXL says that something is wrong, but not that it is over, is asked for so seldom: it tends to
stay so, and NIXL writes a line each time."""


class Reads:
    """Driven by one thread at a time, which lends it NIXL's agent."""

    def __init__(self) -> None:
        self._to_post: list[tuple[int, int, Read]] = []
        self._waiting: list[Read] = []
        self._order = itertools.count()

    def begin(self, read: Read) -> None:
        if read.chunks:
            heapq.heappush(self._to_post, (-read.priority, next(self._order), read))
        elif read.in_flight:
            self._waiting.append(read)
        else:
            _finish(read)

    @property
    def to_post(self) -> bool:
        """There is something to do at once."""
        return bool(self._to_post)

    @property
    def newest(self) -> float | None:
        """When the last post was made of those under way; None where none is."""
        return max((posted for read in self._waiting for _, posted in read.in_flight), default=None)

    def advance(self, nixl: Any) -> None:
        """Post one chunk of the next read in turn, then ask after those under way."""
        if self._to_post:
            _, _, read = heapq.heappop(self._to_post)
            if not read.abandoned:
                post(nixl, read)
            if read.in_flight:
                self._waiting.append(read)
            else:
                self._requeue(read)
        now = time.monotonic()
        for read in self._waiting[:]:
            if now < read.ask_at:
                continue
            _poll(nixl, read)
            if len(read.in_flight) < IN_FLIGHT and (read.chunks or not read.in_flight):
                self._waiting.remove(read)
                self._requeue(read)

    def any_from(self, peer: str) -> bool:
        """Whether a read from this peer is not quiet."""
        return any(read.peer == peer for read in (*self._waiting, *(read for _, _, read in self._to_post)))

    def drain(self) -> list[Read]:
        """All of them, without their handles: the caller destroys NIXL's agent next."""
        found = [*self._waiting, *(read for _, _, read in self._to_post)]
        self._waiting.clear()
        self._to_post.clear()
        for read in found:
            read.in_flight.clear()
        return found

    def _requeue(self, read: Read) -> None:
        """Behind the others of its priority, so that reads share the agent chunk by chunk."""
        if read.abandoned or read.done.done():
            read.chunks.clear()
        self.begin(read)


def post(nixl: Any, read: Read) -> None:
    """Post the next chunk. What NIXL has not finished by then is in `in_flight`; errors are stored in `problem`."""
    start, stop = read.chunks.popleft()
    began = time.monotonic()
    try:
        handle = nixl.initialize_xfer(
            "READ",
            nixl.get_xfer_descs(read.local[start:stop], read.local_type),
            nixl.get_xfer_descs(read.remote[start:stop], read.remote_type),
            read.peer,
        )
    except Exception as error:  # noqa: BLE001  see typed
        _fail(read, typed(error, read.peer))  # nothing was posted
        return
    try:
        state = nixl.transfer(handle)
    except Exception as error:  # noqa: BLE001  see typed
        why = typed(error, read.peer)
        _fail(read, why)
        # Some descriptors may be on their way: the handle is asked until it says that they are not.
        state = "ERR" if why.code == "peer_lost" else "PROC"
    _fail_if_error(read, state)
    now = time.monotonic()
    read.seconds += now - began
    if state == "PROC":
        read.in_flight.append((handle, now))
    else:
        _release(nixl, handle)
        read.at_once = state == "DONE" and not read.chunks and not read.in_flight


def _finish(read: Read) -> None:
    """NIXL has nothing of it any more."""
    if read.abandoned and read.problem is None:
        read.problem = TransportError("abandoned", "the read was given up")
    settle(read.quiet)  # first: a thread can be held up between the two, and what is done is quiet
    settle(read.done, error=read.problem)


def _poll(nixl: Any, read: Read) -> None:
    for entry in read.in_flight[:]:
        handle, posted = entry
        try:
            state = nixl.check_xfer_state(handle)
        except Exception as error:  # noqa: BLE001  see typed
            why = typed(error, read.peer)
            _fail(read, why)
            if why.code != "peer_lost":
                read.ask_at = time.monotonic() + STUCK_S
                continue  # proves nothing: only DONE or a lost connection do
            state = "ERR"
        _fail_if_error(read, state)
        if state != "PROC":
            read.in_flight.remove(entry)
            read.seconds += time.monotonic() - posted
            _release(nixl, handle)


def _fail_if_error(read: Read, state: str) -> None:
    """NIXL raises where something is wrong; should it only say so, that is no success either."""
    if state == "ERR":
        _fail(read, typed(RuntimeError("the request ended in state ERR"), read.peer))


def _fail(read: Read, why: TransportError) -> None:
    """Tell it now; more of it may still arrive."""
    read.chunks.clear()
    if read.problem is None:
        read.problem = why
        settle(read.done, error=why)


def _release(nixl: Any, handle: Any) -> None:
    try:
        nixl.release_xfer_handle(handle)
    except Exception as error:  # noqa: BLE001  a handle that cannot be freed is a leak, not a failed read
        log.warning("a NIXL handle could not be released", error=str(error))
