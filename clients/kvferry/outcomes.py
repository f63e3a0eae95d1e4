"""How publishes and receives end."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from kvferry.errors import Caused, KvferryError
from kvferry.schemas import LeaseState
from kvferry.v1 import engine_pb2

EARLY = 32
"""Events kept of a request whose own transfer is not known yet; those before them are of transfers long over."""


@dataclass(frozen=True, slots=True)
class Received:
    """A transfer that is done: the tokens [first, last) are in the destination blocks."""

    request_id: str
    transfer_id: str
    nbytes: int
    tokens: tuple[int, int]
    metadata: bytes
    lease: int = 0
    """The number of the lease that was read."""


class _InDoubt:
    """An end of a call after which its blocks may still be read or written."""

    _quiesced: asyncio.Future[None]

    @property
    def blocks_safe(self) -> bool:
        """Whether the blocks are known to be quiet: they may be reused."""
        return self._quiesced.done() and self._quiesced.exception() is None

    async def quiesced(self) -> None:
        """Wait until nothing reads or writes the blocks any more: the daemon has confirmed it, or is known to be dead.

        There is no deadline. Raises KvferryError (`session_closed`) when the client is closed first: then it will never
        be known.
        """
        await asyncio.shield(self._quiesced)


class Unsettled(Caused, _InDoubt):
    """A call that failed while its blocks may still be read or written. Reuse them once `quiesced()` has returned."""

    def __init__(self, problem: KvferryError, quiesced: asyncio.Future[None]) -> None:
        super().__init__(problem)
        self._quiesced = quiesced


class TransferFailed(Unsettled):
    """A transfer that failed or was aborted. The blocks hold nothing of use.

    They may be reused only once `quiesced()` has returned: a timeout or an error is not quiescence.
    """

    def __init__(self, problem: KvferryError, state: str, quiesced: asyncio.Future[None]) -> None:
        super().__init__(problem, quiesced)
        self.state = state


class ReceiveCancelled(asyncio.CancelledError, _InDoubt):
    """A receive was cancelled, and its blocks may still be written. Reuse them once `quiesced()` has returned."""

    def __init__(self, request_id: str, quiesced: asyncio.Future[None]) -> None:
        super().__init__(f"the blocks of request {request_id} are not known to be quiet")
        self._quiesced = quiesced


@dataclass(slots=True, eq=False)
class Lease:
    """What was published under one request id. Its blocks belong to readers until `ended()` returns."""

    request_id: str
    number: int
    """The lease's number, as readers may name it (`SourceBody.lease`)."""
    _ended: asyncio.Future[LeaseState] = field(repr=False)
    more: bool = False
    """The last publish was only a part: more follows."""

    @property
    def over(self) -> bool:
        """Whether it has ended, in whatever way."""
        return self._ended.done()

    async def ended(self) -> LeaseState:
        """RELEASED (all expected readers have read), EXPIRED or REVOKED.

        Raises KvferryError when the lease ended in another way: `fence_timeout` when the fence of a publish was not
        reached; `daemon_gone` when the session has ended and the daemon is dead, or has confirmed that nothing of that
        session is read any more; `session_closed` when the client was closed: the blocks may still be read.
        """
        return await asyncio.shield(self._ended)


class Receiving:
    """A receive under way. Only events of its own transfer count: an earlier one of the same request may end late."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.ended = asyncio.Event()
        self.end: engine_pb2.TransferEnded | KvferryError | None = None
        """Set with `ended`: the daemon's last event, or the error that took its place."""
        self.quiet: asyncio.Future[None] = loop.create_future()
        self.transfer_id = ""
        self.leaving: asyncio.Task[None] | None = None
        """The end of a receive that was given up."""
        self.aborted = False
        """The engine has ended it; the daemon's answer is on its way."""
        self.gone = asyncio.Event()
        """Set when the request may be received again."""
        self._early: deque[engine_pb2.TransferEnded | engine_pb2.BlocksSafe] = deque(maxlen=EARLY)

    def named(self, transfer_id: str) -> None:
        """The daemon has replied with the id of this transfer."""
        self.transfer_id = transfer_id
        while self._early:
            self.on_event(self._early.popleft())

    def over(self, end: engine_pb2.TransferEnded | KvferryError) -> None:
        """How it has ended; only the first counts."""
        self.end = self.end or end
        self.ended.set()

    def on_event(self, event: engine_pb2.TransferEnded | engine_pb2.BlocksSafe) -> None:
        if not self.transfer_id:
            self._early.append(event)
        elif event.transfer_id == self.transfer_id:
            if isinstance(event, engine_pb2.TransferEnded):
                self.over(event)
                if not event.blocks_safe:
                    return
            if not self.quiet.done():
                self.quiet.set_result(None)
