"""The contact with another daemon: when it answered last, and what it failed with since."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from types import TracebackType
from typing import TypeGuard

import grpc

from kvferry.errors import Caused, Kind, KvferryError, PeerFailed
from kvferry.rpc import SILENT, UNREACHABLE, error_of
from kvferryd.peers.unreached import unreached

LOST = frozenset({"peer_unreachable", "peer_lost", "proof_failed"})
"""Codes that say nothing of a daemon but that it did not answer."""


@dataclass(slots=True, eq=False)
class Contact:
    """A daemon elsewhere, by its address. Times are seconds since 1970."""

    address: str
    rank: tuple[str, int | None] = "", None
    """The engine and rank beside it, if it has been in the roster of an engine of ours; it keeps that when it goes."""
    expected: str = ""
    """The name for which its certificate must be; empty where it need not prove itself."""
    answered_at: float | None = None
    failures: int = 0
    """In a row."""
    error: KvferryError | None = None
    """The last one."""
    failed_at: float | None = None
    unread: KvferryError | None = None
    """Why its memory could not be read when it was met, though it answered."""

    @property
    def trouble(self) -> KvferryError | None:
        """The fault that keeps it from being read now; None where nothing is known to."""
        return self.error if self.failures else self.unread

    def answered(self) -> None:
        self.answered_at, self.failures = time.time(), 0

    def failed(self, why: KvferryError) -> None:
        self.failures += 1
        # A copy: `why` is raised further, and an error that is raised holds each frame that it passes through.
        self.error, self.failed_at = Caused(why), time.time()

    def met(self, unread: KvferryError | None = None) -> None:
        """It has answered a handshake. unread: why that came to nothing all the same."""
        self.unread = Caused(unread) if unread is not None else None
        if unread is not None:
            self.error, self.failed_at = self.unread, time.time()

    def forgive(self) -> None:
        """Its failures are not told any more."""
        self.failures, self.error, self.failed_at, self.unread = 0, None, None, None


class asking:  # noqa: N801  used like a function
    """Turn what gRPC raises inside into a KvferryError about this peer, and note whether it has answered; `ended` as
    for `error_of`."""

    def __init__(self, contact: Contact, ended: KvferryError | None = None) -> None:
        self._contact, self._ended = contact, ended
        self._began = 0.0

    async def __aenter__(self) -> None:
        self._began = time.monotonic()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, (grpc.aio.UsageError, grpc.aio.AioRpcError)) or _closed_under_us(error):
            # Its frames hold the call, and as long as the call lives a closed channel goes on dialling. An error may be
            # kept for long, so it must not hold those frames.
            error.__traceback__ = None
            del traceback
            problem = await self._problem(error)
            if problem.code in LOST:
                self._contact.failed(problem)
            else:
                self._contact.answered()
            raise problem from None
        if error is None or isinstance(error, KvferryError):
            self._contact.answered()

    async def _problem(self, error: BaseException) -> KvferryError:
        address = self._contact.address
        if not isinstance(error, grpc.aio.AioRpcError):  # a call on a closed channel
            return PeerFailed("peer_lost", f"the connection to {address} is closed", field="address", value=address)
        problem = error_of(error, f"peer {address}", self._ended)
        if problem.code not in (UNREACHABLE, SILENT):
            return of_peer(problem)
        took_s = time.monotonic() - self._began
        if known := await unreached(error, address, self._contact.expected, took_s):
            return known
        return PeerFailed(
            "peer_unreachable", problem.message, field=problem.field, value=problem.value, remedy=problem.remedy
        )


def _closed_under_us(error: BaseException | None) -> TypeGuard[asyncio.CancelledError]:
    """Whether gRPC has cancelled the call, as its channel was closed, and nobody has cancelled this task."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and not task.cancelling()


def of_peer(problem: KvferryError) -> KvferryError:
    """A problem as a peer told it. A fault inside the peer, or without a name, is no fault of this daemon's."""
    if problem.kind is not Kind.INTERNAL and problem.code != "internal":
        return problem
    return PeerFailed("peer_failed", f"the peer failed: {problem.message}", remedy="see the log of its daemon")
