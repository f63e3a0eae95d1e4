"""The staging arena: registered once, cut into slots, lent to transfers in the order in which they ask.

A chunk on its way takes a slot on either side. The reader has its own before it asks the source for one, and neither
direction may take all slots: so a slot that is lent to be packed always waits for a read that can begin, and two
daemons that read from each other cannot starve each other.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from kvferry.errors import KvferryError
from kvferryd.copy import Batch
from kvferryd.memory import Region
from kvferryd.transport import Span

SLOT_NBYTES = {"host": 8 << 20, "cuda": 64 << 20}
"""By kind of memory. Over NVLink chunks of 67 MB are twice as fast as those of 17 (facts/gpu.md)."""
FEWEST = 4
"""A small arena has smaller slots rather than fewer."""
SLOT_ALIGN = 4096

T = TypeVar("T")
Copy = Callable[[Sequence[Batch]], object]
"""Runs batches and returns when all bytes have arrived: on host memory `copy.host.copy`; on a GPU a Copier's launch
and the wait for its stream. Called on one thread of the arena's."""


class Use(Enum):
    """What a slot is lent for."""

    PACKED = "packed"
    """A source gathers into it and a peer reads from it."""
    READ = "read"
    """A reader's NIXL READ writes into it, and a scatter reads from it."""


@dataclass(slots=True, eq=False)
class Slot:
    """`nbytes` bytes from `address`. `give_back` it once; what still writes or reads it must be over by then."""

    index: int
    address: int
    nbytes: int
    use: Use
    lent: bool = True


class Arena:
    """Owns the region and the thread that copies between it and the cache. `close` it after the agent."""

    def __init__(self, region: Region, copy: Copy) -> None:
        span = region.span
        self._region, self._copy = region, copy
        self.slot_nbytes = slot_nbytes(span)
        self._free = deque(range(span.nbytes // self.slot_nbytes))
        self.slots = len(self._free)
        self._lent = dict.fromkeys(Use, 0)
        self._waiting: deque[tuple[Use, asyncio.Future[Slot]]] = deque()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="staging")
        self._closed = False

    @property
    def span(self) -> Span:
        return self._region.span

    @property
    def used_nbytes(self) -> int:
        return sum(self._lent.values()) * self.slot_nbytes

    @property
    def waiting(self) -> int:
        """How many wait for a slot."""
        return len(self._waiting)

    @property
    def most(self) -> int:
        """Slots that one direction may take."""
        return self.slots - max(1, self.slots // 4)

    async def take(self, use: Use) -> Slot:
        """A slot, first come first served. The caller bounds the wait. Raises KvferryError (`arena_closed`)."""
        self._check_open()
        future: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()
        self._waiting.append((use, future))
        self._lend()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and not future.exception():
                self.give_back(future.result())
            else:
                self._waiting = deque(entry for entry in self._waiting if entry[1] is not future)
                self._lend()  # who waited behind it may have been held up by it alone
            raise

    @asynccontextmanager
    async def lend(self, use: Use) -> AsyncIterator[Slot]:
        slot = await self.take(use)
        try:
            yield slot
        finally:
            self.give_back(slot)

    def give_back(self, slot: Slot) -> None:
        """The slot is free. Idempotent."""
        if slot.lent:
            slot.lent = False
            self._lent[slot.use] -= 1
            self._free.append(slot.index)
            self._lend()

    def _lend(self) -> None:
        """To those who wait, in order; who may not have one now holds up its own direction only."""
        held_up: deque[tuple[Use, asyncio.Future[Slot]]] = deque()
        while self._waiting and self._free:
            use, future = self._waiting.popleft()
            if future.done():
                continue
            if self._lent[use] >= self.most:
                held_up.append((use, future))
                continue
            self._lent[use] += 1
            index = self._free.popleft()
            future.set_result(Slot(index, self.span.address + index * self.slot_nbytes, self.slot_nbytes, use))
        held_up.extend(self._waiting)
        self._waiting = held_up

    async def copy(self, batches: Sequence[Batch]) -> None:
        """Run the batches off the loop. Once begun it runs to its end, even if the caller is cancelled meanwhile."""
        await self.whole(lambda: self._copy(batches))

    async def whole(self, work: Callable[[], T]) -> T:
        """`work` on the arena's thread; returns, or raises CancelledError, only when it is over or never began."""
        self._check_open()
        running = asyncio.get_running_loop().run_in_executor(self._thread, work)
        cancelled = False
        while not running.done():
            try:
                await asyncio.wait([running])
            except asyncio.CancelledError:
                cancelled = True  # memory that a copy is still in must not be lent to others
        if cancelled:
            running.exception()  # retrieved
            raise asyncio.CancelledError
        return running.result()

    async def close(self, *, unmap: bool = True) -> None:
        """When the last copy is over: give the memory back, unless its agent may still write to it. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for _, future in self._waiting:
            if not future.done():
                future.set_exception(_closed())
                future.exception()
        self._waiting.clear()
        await asyncio.to_thread(self._thread.shutdown)
        if unmap:
            self._region.close()

    def _check_open(self) -> None:
        if self._closed:
            raise _closed()


def slot_nbytes(span: Span) -> int:
    """The usual size, or less where the arena is small. Raises KvferryError (`bad_config`)."""
    nbytes = min(SLOT_NBYTES[span.kind], span.nbytes // FEWEST // SLOT_ALIGN * SLOT_ALIGN)
    if nbytes < SLOT_ALIGN:
        raise KvferryError(
            "bad_config",
            f"a staging arena of {span.nbytes} bytes has no room for {FEWEST} slots",
            field="arena_mb",
            value=span.nbytes,
            remedy="raise arena_mb",
        )
    return nbytes


def _closed() -> KvferryError:
    return KvferryError("arena_closed", "the staging arena is closed: its engine is gone")
