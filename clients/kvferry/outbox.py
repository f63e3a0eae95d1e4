"""Messages that wait for a stream to take them."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from google.protobuf.message import Message

M = TypeVar("M", bound=Message)
SEVERAL, SEVERAL_NBYTES = 256, 1 << 20
"""The most messages, and about the most bytes, that go out as one."""


class Outbox(Generic[M]):
    """Messages for one stream, in order. While one is on its way the next ones gather, and `take` returns all of them
    as one: many at once cost little more than one, and one alone waits for nobody."""

    def __init__(self, bundle: Callable[[list[M]], M], *, several: bool = False) -> None:
        """bundle: makes one message of several. several: the other side takes such a one; may be set later."""
        self._bundle, self.several = bundle, several
        self._waiting: OrderedDict[Callable[[], M | None], None] = OrderedDict()
        self._next: M | None = None
        """Taken already, and too large to go with those before it."""
        self.taken = 0
        """Messages so far."""
        self._taker: asyncio.Future[None] | None = None
        self._giver: asyncio.Future[None] | None = None
        self.over = False
        """Nothing new is taken."""
        self._feed: Callable[[], None] | None = None

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting) + (self._next is not None)

    def put(self, message: M) -> None:
        self.ask(lambda: message)

    def ask(self, compose: Callable[[], M | None]) -> None:
        """Call `compose` when its turn comes: once, however often this was asked before. It returns None where there is
        nothing to send any more. Ignored after `end`."""
        if not self.over:
            self._waiting[compose] = None
            self._wake()

    def settle(self, compose: Callable[[], M | None]) -> None:
        """Compose now what waits, if it does: whoever composes it is over, and is not kept."""
        if compose in self._waiting:
            del self._waiting[compose]
            if (message := compose()) is not None:
                self.put(message)

    def end(self) -> None:
        """Take nothing new. Messages that wait are still taken; then `take` returns None."""
        self.over = True
        self._wake()
        _settle(self._giver)

    def feed(self, pump: Callable[[], None]) -> None:
        """Call `pump` now, and whenever there is something: it pops the messages, one by one, and `take` returns
        None."""
        self._feed, self.several = pump, False
        _settle(self._taker)
        pump()

    async def until_fewer(self, than: int) -> None:
        """Return when fewer wait, or it is over. A single caller at a time."""
        while len(self) >= than and not self.over:
            self._giver = asyncio.get_running_loop().create_future()
            await self._giver

    def give_up(self) -> None:
        """End it, and forget what waits: the stream is over."""
        self._waiting.clear()
        self._next = None
        self.end()

    async def take(self) -> M | None:
        """The messages that wait, as soon as there are any. A single caller at a time. None: it is over, or they go
        elsewhere."""
        while self._feed is None:
            if (taken := self.pop()) is not None or self.over:
                return taken
            self._taker = asyncio.get_running_loop().create_future()
            await self._taker
        return None

    def pop(self) -> M | None:
        """The messages that wait now: one, or where the other side takes several, as many as fit into one."""
        popped = self._pop()
        if popped is not None:
            self.taken += 1
            _settle(self._giver)
        return popped

    def _wake(self) -> None:
        if self._feed is None:
            _settle(self._taker)
        else:
            self._feed()

    def _pop(self) -> M | None:
        taken: list[M] = []
        nbytes = 0
        while (self._next is not None or self._waiting) and len(taken) < SEVERAL:
            message = self._next if self._next is not None else self._waiting.popitem(last=False)[0]()
            self._next = None
            if message is None:
                continue
            if not self.several:
                return message
            nbytes += message.ByteSize()
            if taken and nbytes > SEVERAL_NBYTES:
                self._next = message
                break
            taken.append(message)
        return None if not taken else taken[0] if len(taken) == 1 else self._bundle(taken)


def _settle(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
