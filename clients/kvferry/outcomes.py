"""How publishes and receives end, as an engine is told."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TypeAlias

from kvferry.errors import KvferryError
from kvferry.schemas import LeaseState
from kvferry.v1 import engine_pb2

EARLY = 16
"""Ends kept of a request whose own transfer is not known yet; more are those of transfers long over."""

Ended: TypeAlias = tuple[engine_pb2.TransferEnded, asyncio.Future[None]]
"""How a transfer ended, and when its blocks are safe."""


@dataclass(frozen=True, slots=True)
class Received:
    """A transfer that is done: the tokens [first, last) are in the destination blocks."""

    request_id: str
    transfer_id: str
    nbytes: int
    tokens: tuple[int, int]
    metadata: bytes


class TransferFailed(KvferryError):
    """A transfer that failed or was aborted. The blocks hold nothing of use.

    They may be reused only once `quiesced()` has returned: a timeout or an error is not quiescence.
    """

    def __init__(self, problem: KvferryError, state: str, quiesced: asyncio.Future[None]) -> None:
        super().__init__(
            problem.code,
            problem.message,
            field=problem.field,
            value=problem.value,
            remedy=problem.remedy,
            refusals=problem.refusals,
        )
        self.state = state
        self._quiesced = quiesced

    @property
    def blocks_safe(self) -> bool:
        return self._quiesced.done() and self._quiesced.exception() is None

    async def quiesced(self) -> None:
        """Wait until no read can write to the blocks any more. Raises KvferryError when the daemon goes away first."""
        await asyncio.shield(self._quiesced)


@dataclass(slots=True, eq=False)
class Lease:
    """What was published under one request id. Its blocks belong to readers until `ended()` returns."""

    request_id: str
    _ended: asyncio.Future[LeaseState] = field(repr=False)

    async def ended(self) -> LeaseState:
        """RELEASED (all expected readers have read), EXPIRED or REVOKED.

        Raises KvferryError (`fence_timeout`) when the fence of a publish was not reached: the lease is revoked.
        """
        return await asyncio.shield(self._ended)


@dataclass(slots=True, eq=False)
class Receiving:
    """A receive under way. Its end is that of its own transfer: one before it, of the same request, may end late."""

    ended: asyncio.Future[Ended]
    transfer_id: str = ""
    leaving: asyncio.Task[None] | None = None
    """The end of a receive that was cancelled."""
    _early: dict[str, Ended] = field(default_factory=dict)
    """What ended before the daemon's reply said which transfer is meant."""

    def named(self, transfer_id: str) -> None:
        self.transfer_id = transfer_id
        early = self._early.get(transfer_id)
        self._early.clear()
        if early is not None:
            self.hear(*early)

    def hear(self, event: engine_pb2.TransferEnded, quiesced: asyncio.Future[None]) -> None:
        if not self.transfer_id:
            self._early[event.transfer_id] = event, quiesced
            if len(self._early) > EARLY:
                del self._early[next(iter(self._early))]
        elif self.transfer_id == event.transfer_id and not self.ended.done():
            self.ended.set_result((event, quiesced))
