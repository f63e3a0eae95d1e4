"""Reads that take turns: posted chunk by chunk, and asked for until NIXL says that they are over."""

from __future__ import annotations

import heapq
import itertools
import time
from typing import Any, Protocol

from kvferry.errors import KvferryError
from kvferryd import logs
from kvferryd.transport.read import Read, TransportError, typed

log = logs.get(__name__)

IN_FLIGHT = 2
"""Posts of one read that may be under way at once."""


class Settle(Protocol):
    """`settle` or `settle_now`: who drives reads from the event loop settles their futures at once."""

    def __call__(self, future: Any, result: None = None, *, error: KvferryError | None = None) -> None: ...


class Reads:
    """Driven by one thread at a time, which lends it NIXL's agent."""

    def __init__(self, settle: Settle) -> None:
        self._settle = settle
        self._to_post: list[tuple[int, int, Read]] = []
        self._waiting: list[Read] = []
        self._order = itertools.count()

    def begin(self, read: Read) -> None:
        if read.chunks:
            heapq.heappush(self._to_post, (-read.priority, next(self._order), read))
        else:
            self._finish(read)

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
                self._post(nixl, read)
            if read.in_flight:
                self._waiting.append(read)
            else:
                self._requeue(read)
        for read in self._waiting[:]:
            self._poll(nixl, read)
            if len(read.in_flight) < IN_FLIGHT and (read.chunks or not read.in_flight):
                self._waiting.remove(read)
                self._requeue(read)

    def drain(self) -> list[Read]:
        """All of them, which nobody drives any more and NIXL knows nothing of."""
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
        if read.chunks:
            heapq.heappush(self._to_post, (-read.priority, next(self._order), read))
        elif read.in_flight:
            self._waiting.append(read)
        else:
            self._finish(read)

    def _post(self, nixl: Any, read: Read) -> None:
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
            self._fail(read, error)  # nothing was posted
            return
        try:
            state = nixl.transfer(handle)
        except Exception as error:  # noqa: BLE001  see typed
            self._fail(read, error)
            # Some descriptors may be on their way: the handle is asked until it says that they are not.
            state = "ERR" if typed(error, read.peer).code == "peer_lost" else "PROC"
        self._believe(read, state)
        now = time.monotonic()
        read.seconds += now - began
        if state == "PROC":
            read.in_flight.append((handle, now))
        else:
            self._release(nixl, handle)

    def _poll(self, nixl: Any, read: Read) -> None:
        for entry in read.in_flight[:]:
            handle, posted = entry
            try:
                state = nixl.check_xfer_state(handle)
            except Exception as error:  # noqa: BLE001  see typed
                self._fail(read, error)
                if typed(error, read.peer).code != "peer_lost":
                    continue  # proves nothing: only DONE or a lost connection do
                state = "ERR"
            self._believe(read, state)
            if state != "PROC":
                read.in_flight.remove(entry)
                read.seconds += time.monotonic() - posted
                self._release(nixl, handle)

    def _believe(self, read: Read, state: str) -> None:
        """NIXL raises where something is wrong; should it only say so, that is no success either."""
        if state == "ERR":
            self._fail(read, RuntimeError("the request ended in state ERR"))

    def _release(self, nixl: Any, handle: Any) -> None:
        try:
            nixl.release_xfer_handle(handle)
        except Exception as error:  # noqa: BLE001  a handle that cannot be freed is a leak, not a failed read
            log.warning("a NIXL handle could not be released", error=str(error))

    def _fail(self, read: Read, error: Exception) -> None:
        read.chunks.clear()
        self._settle(read.done, error=typed(error, read.peer))

    def _finish(self, read: Read) -> None:
        if read.abandoned:
            self._settle(read.done, error=TransportError("abandoned", "the read was given up"))
        self._settle(read.done)
        self._settle(read.quiet)
