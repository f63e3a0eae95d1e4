"""One packing: the chunks that a reader wants of a lease, gathered into slots of the arena and kept until they are
read.

    wanted --AskSlot--> asked --Copy--> copying --Keep--> held --GiveBack--> read

The lease must hold until the last chunk is gathered: a packed slot stays whole whatever becomes of the blocks. A chunk
is said to be packed only if its copy has ended, and the lease with it in force: a packing ends with its lease, unless
all that the reader wants is packed by then.
"""

from __future__ import annotations

from collections import deque
from typing import TypeAlias, assert_never

from kvferry.errors import Deadline, KvferryError, Malformed
from kvferry.protocol import packing_events as p
from kvferry.protocol.events import Pack, Speak
from kvferry.protocol.values import Sizes, View

IDLE_S = 30.0
"""How long slots are held for a reader that says nothing: it has a slot of its own to read into."""
KEPT_S = 0.5
"""A packed slot keeps its bytes so long, even if the stream breaks or the engine goes. A reader that has read within
this time of its request need not ask whether they were replaced (a round trip: 0.3 ms and more)."""
GATHERS = 2
"""Copies of one packing at once: the next is launched while one is reported. The first runs alone, since launching
another would delay its report."""
UNREAD = 64
"""The most chunks that may be wanted and not yet read. Each takes one of the reader's slots, and our own readers use 8.
Until the request is published, nothing else bounds how many chunks a reader may ask for."""
OPENED, CUTTING, CUT, OVER = "opened", "cutting", "cut", "over"
Effects: TypeAlias = list["p.ArenaEffect | p.SetIdle | Speak"]


class Packing:
    """It has its slots until it says GiveBack, and has none once it is over."""

    def __init__(self, said: Pack) -> None:
        self.at = p.At(said.reading, said.packing)
        self._chunks, self._last, self._asked_for = said.chunks, said.last, said.wanted
        self._stage = OPENED
        self._begun: set[int] = set()
        """Chunks that were wanted, ever."""
        self._wanted: deque[int] = deque()
        self._asked: set[int] = set()
        self._copying: dict[int, p.Slot] = {}
        self._held: dict[int, p.Slot] = {}
        self._packed = self._read = 0
        self._patience: float | None = None
        """How long the reader may hold slots and say nothing. None: nobody will look."""
        self._news: p.Packed | None = None
        """What the reader is still to be told."""

    @property
    def whole(self) -> bool:
        """Whether all is packed that the reader wants of the lease."""
        return self._stage == CUT and self._last and self._packed == self._chunks

    def begin(self, view: View) -> Effects:
        """Pack what is wanted of this view of the lease; not anew of a later one."""
        if self._stage != OPENED:
            return []
        self._stage = CUTTING
        return [p.Cut(self.at, self._asked_for, view)]

    def on(self, event: p.PackingEvent, now: float) -> Effects:
        if self._stage == OVER:
            return []
        match event:
            case p.Want():
                return self._want(event, now)
            case p.WasCut(_, problem):
                if problem is not None:
                    return self.end(problem)
                self._stage = CUT
                return self._go_on()
            case p.Lent(_, chunk, slot, problem):
                self._asked.remove(chunk)
                if problem is not None:
                    return self.end(problem)
                self._copying[chunk] = slot
                return [p.Copy(self.at, chunk, slot)]
            case p.Copied(_, chunk, problem):
                return self.end(problem) if problem is not None else self._copied(chunk, now)
            case p.GoOn():
                return self._go_on()
            case _:
                assert_never(event)

    def idle(self, now: float) -> Effects:
        """It may be time to end it; what was said meanwhile has given the reader more."""
        held, until, self._patience = len(self._held), self._patience or now, None
        if not held:
            return []
        if now < until:
            return self._wait_until(until)
        return self.end(Deadline("deadline", f"the reader held {held} slots for {IDLE_S:g} s and sent nothing"))

    def end(self, problem: KvferryError | None = None) -> Effects:
        """Pack nothing more. problem: told to the reader, in place of what it has not been told."""
        if self._stage == OVER:
            return []
        self._stage, self._news = OVER, None
        effects: Effects = [p.ForgoSlot(self.at, chunk) for chunk in self._asked]
        effects += [p.GiveBack(self.at, slot) for slot in self._copying.values()]
        effects += [p.GiveBack(self.at, slot, kept=True) for slot in self._held.values()]
        for chunks in (self._begun, self._wanted, self._asked, self._copying, self._held):
            chunks.clear()
        effects += [p.SetIdle(self.at.reading, None), p.Forget(self.at)]
        return effects + self._tell(p.Packed(self.at, problem=problem)) if problem is not None else effects

    def take(self) -> p.Packed | None:
        """All that is to be told, as one."""
        news, self._news = self._news, None
        return news

    def _want(self, said: p.Want, now: float) -> Effects:
        for chunk in said.want:
            if chunk in self._begun or not 0 <= chunk < self._chunks:
                return self.end(self._malformed("want", chunk))
            if len(self._begun) - self._read >= UNREAD:
                why, remedy = f"{UNREAD} chunks are wanted and not read", "say read of those that were packed"
                return self.end(Malformed("malformed_pack", why, field="want", value=chunk, remedy=remedy))
            self._begun.add(chunk)
            self._wanted.append(chunk)
        effects: Effects = []
        for chunk in said.read:
            if chunk not in self._held:
                return effects + self.end(self._malformed("read", chunk))
            self._read += 1
            effects.append(p.GiveBack(self.at, self._held.pop(chunk)))
        if said.vouch:
            if self._stage != CUT or self._read < self._chunks:
                why = f"{self._chunks - self._read} chunks are not read yet"
                return effects + self.end(Malformed("malformed_pack", why, field="vouch", value=True))
            effects += self._tell(p.Packed(self.at, vouched=True))
        if self._held:
            effects += self._wait_until(now + IDLE_S)
        return effects + self._go_on()

    def _go_on(self) -> Effects:
        effects: Effects = []
        at_once = GATHERS if self._packed else 1
        while self._stage == CUT and self._wanted and len(self._asked) + len(self._copying) < at_once:
            chunk = self._wanted.popleft()
            self._asked.add(chunk)
            effects.append(p.AskSlot(self.at, chunk))
        return effects

    def _copied(self, chunk: int, now: float) -> Effects:
        slot = self._held[chunk] = self._copying.pop(chunk)
        self._packed += 1
        effects: Effects = [p.Keep(self.at, slot, now + KEPT_S), *self._tell(p.Packed(self.at, ((chunk, slot),)))]
        effects += self._wait_until(now + IDLE_S)
        return [*effects, p.GoOnLater(self.at)] if self._wanted else effects

    def _tell(self, news: p.Packed) -> Effects:
        before, self._news = self._news, news
        if before is not None:
            chunks, vouched = before.chunks + news.chunks, before.vouched or news.vouched
            self._news = p.Packed(self.at, chunks, vouched, news.problem)
        return [Speak(self.at.reading)]

    def _wait_until(self, at: float) -> Effects:
        watched, self._patience = self._patience is not None, at
        return [] if watched else [p.SetIdle(self.at.reading, at)]

    def _malformed(self, field: str, chunk: int) -> KvferryError:
        remedy = f"want each of the {self._chunks} chunks once, and say read of those that were packed"
        return Malformed("malformed_pack", "it cannot be named here", field=field, value=chunk, remedy=remedy)

    def check(self) -> None:
        stages = [set(self._wanted), self._asked, set(self._copying), set(self._held)]
        assert sum(map(len, stages)) + self._read == len(self._begun) or self._stage == OVER
        assert all(each <= self._begun for each in stages), "a chunk that is not wanted"
        assert self._packed == len(self._held) + self._read or self._stage == OVER
        slots = [*self._copying.values(), *self._held.values()]
        assert len(set(slots)) == len(slots), "one slot for two chunks"
        assert len(self._asked) + len(self._copying) <= GATHERS and len(self._begun) - self._read <= UNREAD
        assert self._stage == CUT or not (self._asked or slots)

    def sizes(self) -> Sizes:
        kept = {"begun": self._begun, "wanted": self._wanted, "asked": self._asked, "held": self._held}
        return {name: len(each) for name, each in kept.items()} | {"copying": len(self._copying)}
