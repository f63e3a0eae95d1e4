"""The staging arena: registered once, cut into slots, lent to transfers in the order in which they ask.

A chunk on its way takes a slot on either side. A reader asks for a chunk only when it has a slot, or one whose scatter
has begun; a scatter waits for nothing but this daemon's own copies. Neither direction may take all slots. So a slot
that is lent to be packed always waits for a read that can begin, and two daemons that read from each other cannot
starve each other. A transfer keeps its slots from chunk to chunk only while nobody else waits for one (`sought`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from enum import StrEnum

from kvferry.errors import KvferryError, Malformed, Unavailable
from kvferryd.aio import Timer
from kvferryd.copy.runner import Copies
from kvferryd.memory import Region
from kvferryd.transport.read import Span

SLOT_NBYTES = {"host": 8 << 20, "cuda": 128 << 20}
"""Keyed by kind of memory. Over NVLink chunks of 134 MB are 1.5 times as fast as those of 67."""
FEWEST = 4
"""A small arena has smaller slots rather than fewer."""
SLOT_ALIGN = 4096


class Use(StrEnum):
    """The use for which a slot is lent."""

    PACKED = "packed"
    """A source gathers into it and a peer reads from it."""
    READ = "read"
    """A reader's NIXL READ writes into it, and a scatter reads from it."""


@dataclass(slots=True, eq=False)
class Slot:
    """A slot of the arena, from `address`. `give_back` it once; what still writes or reads it must be over by then."""

    index: int
    address: int
    use: Use
    lent: bool = True
    kept_until: float = 0.0
    """On the loop's clock: somebody was promised that the bytes stay until then."""


class Arena:
    """Owns the copies between the region and the cache. `close` it after the agent. Until it is closed, and while bytes
    are kept, the region must not be freed."""

    def __init__(self, region: Region, copies: Copies) -> None:
        self.region, self.span, self.copies = region, region.span, copies
        self.slot_nbytes = slot_nbytes(self.span)
        self._free = deque(range(self.span.nbytes // self.slot_nbytes))
        slots = len(self._free)
        self.most = slots - max(1, slots // 4)
        """Slots that one direction may take."""
        self._lent = dict.fromkeys(Use, 0)
        self._waiting: deque[tuple[Use, asyncio.Future[Slot]]] = deque()
        self._kept: set[Slot] = set()
        self.closed = False

    @property
    def used_nbytes(self) -> int:
        return sum(self._lent.values()) * self.slot_nbytes

    @property
    def waiting(self) -> int:
        """How many wait for a slot."""
        return len(self._waiting)

    def sought(self, use: Use) -> bool:
        """Whether a slot of this use, if it were given back now, would go to another that waits for one."""
        return any(
            not future.done() and (each is use or self._lent[each] < self.most) for each, future in self._waiting
        )

    def ask(self, use: Use) -> asyncio.Future[Slot]:
        """A slot, first come first served: done at once where one is free. Cancel it to wait no longer; what is done is
        to be given back. Raises KvferryError (`arena_closed`), and so does the future."""
        if self.closed:
            raise _closed()
        future: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()
        self._waiting.append((use, future))
        self._lend()
        if not future.done():
            future.add_done_callback(self._asked)
        return future

    async def take(self, use: Use) -> Slot:
        """`ask`, awaited. The caller bounds the wait."""
        future = self.ask(use)
        try:
            return await future
        except asyncio.CancelledError:
            if not future.cancelled() and not future.exception():
                self.give_back(future.result())
            raise

    def _asked(self, future: asyncio.Future[Slot]) -> None:
        if future.cancelled():
            self._waiting = deque(entry for entry in self._waiting if entry[1] is not future)
            self._lend()  # it alone may have held up those behind it

    def give_back(self, slot: Slot, quiet: asyncio.Future[None] | None = None) -> None:
        """The slot is free, or will be when the read into it is quiet. Idempotent."""
        if quiet is not None and not quiet.done():
            quiet.add_done_callback(lambda _: self.give_back(slot))
        elif slot.lent:
            slot.lent = False
            self._kept.discard(slot)
            self._lent[slot.use] -= 1
            self._free.append(slot.index)
            self._lend()

    def keep(self, slot: Slot, until: float) -> None:
        """The slot's bytes stay until then, even if the arena is closed meanwhile; unless it is given back."""
        slot.kept_until = until
        self._kept.add(slot)

    def give_back_kept(self, slot: Slot) -> None:
        """As soon as its bytes need no longer stay."""
        if asyncio.get_running_loop().time() < slot.kept_until:
            Timer(lambda: self.give_back(slot)).set(slot.kept_until)
        else:
            self.give_back(slot)

    def _lend(self) -> None:
        """First come, first served; a direction that has all it may have holds up only itself."""
        if not self._waiting or not self._free:
            return
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
            future.set_result(Slot(index, self.span.address + index * self.slot_nbytes, use))
        held_up.extend(self._waiting)
        self._waiting = held_up

    async def close(self) -> bool:
        """Lend no more slots. Whether the last copy is over. Idempotent."""
        self.closed = True
        for _, future in self._waiting:
            if not future.done():
                future.set_exception(_closed())
                future.exception()  # retrieved: nobody may be waiting
        self._waiting.clear()
        return await self.copies.close()

    async def until_not_kept(self) -> None:
        """Until no bytes need stay that somebody was promised."""
        left_s = max((slot.kept_until for slot in self._kept), default=0.0) - asyncio.get_running_loop().time()
        if left_s > 0:
            await asyncio.sleep(left_s)


def slot_nbytes(span: Span) -> int:
    """The usual size, or less where the arena is small. Raises KvferryError (`bad_config`)."""
    nbytes = min(SLOT_NBYTES[span.kind], span.nbytes // FEWEST // SLOT_ALIGN * SLOT_ALIGN)
    if nbytes < SLOT_ALIGN:
        why = f"a staging arena of {span.nbytes} bytes has no room for {FEWEST} slots"
        raise Malformed("bad_config", why, field="arena_mb", value=span.nbytes, remedy="raise arena_mb")
    return nbytes


def _closed() -> KvferryError:
    return Unavailable("arena_closed", "the staging arena is closed: its engine is gone")
