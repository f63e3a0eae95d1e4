"""How publishes and receives end."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TypeVar

from google.protobuf.message import Message

from kvferry.errors import Caused, KvferryError
from kvferry.schemas import LeaseState
from kvferry.v1 import engine_pb2

T = TypeVar("T")


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


class Unsettled(Caused):
    """A call that failed while its blocks may still be read or written. Reuse them once `quiesced()` has returned."""

    def __init__(self, problem: KvferryError, quiesced: asyncio.Future[None]) -> None:
        super().__init__(problem)
        self._quiesced = quiesced

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


class TransferFailed(Unsettled):
    """A transfer that failed or was aborted. The blocks hold nothing of use.

    They may be reused only once `quiesced()` has returned: a timeout or an error is not quiescence.
    """

    def __init__(self, problem: KvferryError, state: str, quiesced: asyncio.Future[None]) -> None:
        super().__init__(problem, quiesced)
        self.state = state


@dataclass(slots=True, eq=False)
class Lease:
    """A lease published under one request id. Its blocks belong to readers until `ended()` returns."""

    request_id: str
    number: int
    """The lease's number, as readers may name it (`SourceBody.lease`)."""
    _ended: asyncio.Future[LeaseState] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future(), repr=False
    )

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


class Pending:
    """A command of the engine's until its end is told, and after that while its blocks are in doubt."""

    def __init__(self, kind: str, request: Message) -> None:
        """kind: the field of `Command`."""
        self.kind, self.request = kind, request
        self.named, self.told = asyncio.Event(), asyncio.Event()
        """A receive has been taken; the end is known. (An event wakes its task in the same turn: a shield does not.)"""
        self.end: KvferryError | engine_pb2.TransferEnded | None = None
        self.problem: KvferryError | None = None
        """Why what has arrived is of no use."""
        self.lease: Lease | None = None
        self.quiet: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def tell(self, end: KvferryError | engine_pb2.TransferEnded | None = None) -> None:
        self.end = end
        self.named.set()
        self.told.set()

    def settle(self, unknown: KvferryError | None = None) -> None:
        """unknown: why it will never be known whether the blocks are quiet."""
        if unknown is None:
            self.quiet.set_result(None)
        else:
            refuse(self.quiet, unknown)


def refuse(waiting: asyncio.Future[T], why: KvferryError) -> None:
    """Fail a future that may have no waiter."""
    waiting.set_exception(why)
    waiting.exception()  # marks it as retrieved: asyncio logs nothing
