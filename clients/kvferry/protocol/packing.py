"""A packing: the chunks that a reader wants of a lease, gathered into slots of the arena and kept until they are read.

    wanted --Gather--> gathering --Gathered--> packed --GiveBack--> read

The lease must hold until the last chunk is gathered: a packed slot stays whole whatever becomes of the blocks. A chunk
is said to be packed only if its copy has ended, and the lease with it in force: a packing ends with its lease, unless
all that the reader wants is packed by then.
"""

from __future__ import annotations

from collections import deque
from typing import assert_never

from kvferry.errors import Deadline, KvferryError, Malformed
from kvferry.protocol import packing_events as p
from kvferry.protocol.events import Pack, SourceEffect, Speak
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
Effects = list[SourceEffect]


class Packing:
    """Its chunks have slots until it says GiveBack of them, and none once it says Forget."""

    def __init__(self, said: Pack) -> None:
        self.at = p.At(said.reading, said.packing)
        self._said, self._chunks = said, said.chunks
        self._stage = OPENED
        self._begun: set[int] = set()
        """Chunks that were wanted, ever."""
        self._wanted: deque[int] = deque()
        self._gathering: set[int] = set()
        self._untold: list[int] = []
        """Chunks that are packed, of which the reader does not know yet."""
        self._held: set[int] = set()
        """Chunks that the reader knows to be packed, and has not read."""
        self._packed = self._read = 0
        self.packed_at: float | None = None
        """When the last of its chunks was packed."""
        self._patience: float | None = None
        """How long the reader may hold slots and say nothing. None: nobody will look."""
        self._vouched = False
        self._problem: KvferryError | None = None
        """Both are still to be told."""

    @property
    def whole(self) -> bool:
        """Whether all is packed that the reader wants of the lease."""
        return self._stage == CUT and self._said.last and self._packed == self._chunks

    def begin(self, view: View) -> Effects:
        """Pack what is wanted of this view of the lease; not anew of a later one."""
        if self._stage != OPENED:
            return []
        self._stage = CUTTING
        return [p.Cut(self.at, self._said.wanted, view)]

    def on(self, event: p.PackingEvent, now: float) -> Effects:
        match event:
            case p.Want():
                return [] if self._stage == OVER else self._want(event, now)
            case p.Gathered(_, chunk, problem):
                self._gathering.remove(chunk)
                return self.end(problem) if problem is not None else self._gathered(chunk, now)
            case p.WasCut(_, problem):
                assert self._stage == CUTTING, "nothing is cut"
                if problem is not None:
                    return self.end(problem)
                self._stage = CUT
                return self._go_on([])
            case p.Idle():
                return self._idle(now)
            case _:
                assert_never(event)

    def end(self, problem: KvferryError | None = None) -> Effects:
        """Pack nothing more. problem: told to the reader, in place of what it has not been told."""
        if self._stage == OVER:
            return []
        self._stage, self._vouched, self._problem = OVER, False, problem
        for chunks in (self._begun, self._wanted, self._gathering, self._untold, self._held):
            chunks.clear()
        return [p.Forget(self.at)] if problem is None else [p.Forget(self.at), Speak(self.at.reading)]

    def take(self) -> p.Packed | None:
        """All that is to be told, as one."""
        if not (self._untold or self._vouched or self._problem):
            return None
        told = p.Packed(self.at, tuple(self._untold), self._vouched, self._problem)
        self._held.update(self._untold)
        self._untold.clear()
        self._vouched, self._problem = False, None
        return told

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
                return self.end(self._malformed("read", chunk))
            self._held.remove(chunk)
            self._read += 1
            effects.append(p.GiveBack(self.at, chunk))
        if said.vouch:
            if self._stage != CUT or self._read < self._chunks:
                why = f"{self._chunks - self._read} chunks are not read yet"
                return self.end(Malformed("malformed_pack", why, field="vouch", value=True))
            self._vouched = True
            effects.append(Speak(self.at.reading))
        if self._held or self._untold:
            self._wait_until(now + IDLE_S, effects)
        return self._go_on(effects)

    def _go_on(self, effects: Effects, *, behind: bool = False) -> Effects:
        at_once = GATHERS if self._packed else 1
        while self._wanted and self._stage == CUT and len(self._gathering) < at_once:
            chunk = self._wanted.popleft()
            self._gathering.add(chunk)
            effects.append(p.Gather(self.at, chunk, behind))
        return effects

    def _gathered(self, chunk: int, now: float) -> Effects:
        self._untold.append(chunk)
        self._packed += 1
        if self._packed == self._chunks:
            self.packed_at = now
        effects: Effects = [Speak(self.at.reading)]
        self._wait_until(now + IDLE_S, effects)
        return self._go_on(effects, behind=True)

    def _wait_until(self, at: float, effects: Effects) -> None:
        if self._patience is None:
            effects.append(p.SetIdle(self.at, at))
        self._patience = at

    def _idle(self, now: float) -> Effects:
        """It may be time to end it; what was said meanwhile has given the reader more."""
        held, until, self._patience = len(self._held) + len(self._untold), self._patience or now, None
        if not held:
            return []
        if now >= until:
            return self.end(Deadline("deadline", f"the reader held {held} slots for {IDLE_S:g} s and sent nothing"))
        effects: Effects = []
        self._wait_until(until, effects)
        return effects

    def _malformed(self, field: str, chunk: int) -> KvferryError:
        remedy = f"want each of the {self._chunks} chunks once, and say read of those that were packed"
        return Malformed("malformed_pack", "it cannot be named here", field=field, value=chunk, remedy=remedy)

    def check(self) -> None:
        stages = [set(self._wanted), self._gathering, set(self._untold), self._held]
        assert sum(map(len, stages)) + self._read == len(self._begun) or self._stage == OVER
        assert len(set().union(*stages)) == sum(map(len, stages)) and all(each <= self._begun for each in stages)
        assert self._packed == len(self._untold) + len(self._held) + self._read or self._stage == OVER
        assert len(self._gathering) <= GATHERS and len(self._begun) - self._read <= UNREAD
        assert self._stage == CUT or not (self._gathering or self._untold or self._held)

    def sizes(self) -> Sizes:
        kept = {"begun": self._begun, "wanted": self._wanted, "gathering": self._gathering, "untold": self._untold}
        return {name: len(each) for name, each in kept.items()} | {"held": len(self._held)}
