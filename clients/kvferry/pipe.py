"""A session's pipe: its commands and events as frames on a Unix socket, beside the gRPC stream that is its life.

A message takes less time than on a stream of grpc.aio, where it goes by a thread of gRPC's and more turns of either
loop (docs/benchmarks.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from kvferry.errors import Malformed
from kvferry.memory.handover import LENGTH_NBYTES, framed
from kvferry.outbox import Outbox
from kvferry.rpc import MAX_MESSAGE

ROOM = 64 << 10
"""Bytes that may wait for the socket to take them; the rest stays in the outbox."""
TURN = 64
"""Messages that are taken in one turn of the loop."""
CLOSES_S = 2.0
"""How long the other end may take for what is left, when the outbox is over or the other end sends nothing more."""


class Pipe(asyncio.Protocol):
    """One end. From `begin` on it takes all that is put in the outbox, and closes when that has ended and is empty. The
    first message of a turn of the loop goes out at once; those that follow it go together, at its end.
    """

    def __init__(self, outbox: Outbox[Any], on_message: Callable[[bytes], None]) -> None:
        """on_message: gets each message that comes. An Exception that it raises is the `problem`, and ends the pipe."""
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """The connection is gone, and all that came has been taken."""
        self.problem: Exception | None = None
        self._outbox, self._on_message = outbox, on_message
        self._transport: asyncio.Transport | None = None
        self._room = True
        """The socket takes more."""
        self._turn: asyncio.Handle | None = None
        """The end of the turn in which something was written."""
        self._came = bytearray()
        self._held = False
        """Nothing is taken for now."""
        self._lost = False
        self._closes: asyncio.TimerHandle | None = None

    def abort(self) -> None:
        """End it now; what was not sent is lost. Idempotent, also before it is connected."""
        if self._transport is None:
            self._end()
        else:
            self._transport.abort()

    @property
    def connected(self) -> bool:
        """It has been; the outbox goes by it from then on."""
        return self._transport is not None

    def begin(self, transport: asyncio.Transport) -> None:
        """The connection is made, and the transport has the socket. (In `connection_made` uvloop has not: what closes
        there is closed once more, whoever has the number by then.)"""
        if self.over.done():
            transport.abort()
            return
        self._transport = transport
        transport.set_write_buffer_limits(high=ROOM)
        self._outbox.feed(self._pump)

    def hold(self) -> None:
        """Take nothing more until `go_on`, unless the connection is gone: nothing follows then."""
        if not self._held and not self._lost:
            self._pause()

    def _pause(self) -> None:
        self._held = True
        if self._transport is not None:
            self._transport.pause_reading()

    def go_on(self) -> None:
        self._held = False
        if self._transport is not None:
            self._transport.resume_reading()
        self._take()

    # ---- asyncio's calls ----

    def data_received(self, data: bytes) -> None:
        self._came += data
        self._take()

    def pause_writing(self) -> None:
        self._room = False

    def resume_writing(self) -> None:
        self._room = True
        self._pump()

    def eof_received(self) -> None:  # the transport closes then, when all is written
        self._expire()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost, self._room, self._held = True, False, False
        if self._closes is not None:
            self._closes.cancel()
        self._take()

    def _expire(self) -> None:
        if self._closes is None and not self._lost:
            self._closes = asyncio.get_running_loop().call_later(CLOSES_S, self.abort)

    def _end(self) -> None:
        if not self.over.done():
            self.over.set_result(None)

    # ---- what comes ----

    def _take(self) -> None:
        at = 0
        for _ in range(TURN):
            if self._held or self.problem is not None or (message := self._frame(at)) is None:
                break
            at += LENGTH_NBYTES + len(message)
            try:
                self._on_message(message)
            except Exception as problem:  # noqa: BLE001  told by whoever waits for the end
                self._fail(problem)
        else:
            if not self._held:
                self._pause()
                asyncio.get_running_loop().call_soon(self.go_on)
        del self._came[:at]
        if self._lost and not self._held:
            self._end()

    def _frame(self, at: int) -> bytes | None:
        """The message that begins there; None while it has not come whole."""
        if len(self._came) < (start := at + LENGTH_NBYTES):
            return None
        length = int.from_bytes(self._came[at:start], "big")
        if length > MAX_MESSAGE:
            why, remedy = "a message is too long", f"at most {MAX_MESSAGE} bytes, behind 4 bytes of length"
            self._fail(Malformed("malformed_stream", why, field="length", value=length, remedy=remedy))
            return None
        return bytes(self._came[start : start + length]) if len(self._came) >= start + length else None

    def _fail(self, problem: Exception) -> None:
        self.problem = problem
        self._came.clear()
        self.abort()

    # ---- what goes ----

    def _pump(self) -> None:
        if self._outbox.over:
            self._expire()
        if self._turn is None and self._room and self._write():
            self._turn = asyncio.get_running_loop().call_soon(self._turned)

    def _turned(self) -> None:
        self._turn = None
        if self._outbox.over or len(self._outbox):  # put meanwhile, or more than there was room for
            self._pump()

    def _write(self) -> bool:
        """Whether there was something."""
        assert self._transport is not None
        going = bytearray()
        while len(going) < ROOM and (message := self._outbox.pop()) is not None:
            going += framed(message)
        if going:
            self._transport.write(bytes(going))
        elif self._outbox.over:
            self._room = False
            self._transport.close()
        return bool(going)
