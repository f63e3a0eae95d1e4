"""Staging in the simulated world: the arena of one source rank with the copies into it, and one packing as its reader
follows it."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import TypeAlias

from violation import Violation

from kvferry.errors import Conflict
from kvferry.protocol import events as e
from kvferry.protocol import packing_events as p
from kvferry.protocol.packing import IDLE_S, KEPT_S
from kvferry.protocol.source import Source

SLOTS, JUNK, TOGETHER = 3, -1, 2
Wanted = tuple[int, tuple[tuple[int, ...], ...]]
"""The word of the lease that the reader means, and the blocks of each chunk, by their places in it."""
Key = tuple[p.At, int]
"""One chunk of a packing."""
Event: TypeAlias = e.SourceEvent | p.PackingEvent


@dataclass
class Copying:
    at: p.At
    chunk: int
    left: list[tuple[int, int]]
    """(place, block) of those that are not copied yet."""
    hangs: bool = False
    fails: bool = False
    abandoned: bool = False


@dataclass
class Sent:
    """A reader's message, with the slots of its chunks."""

    told: p.Packed
    slots: dict[int, int]


def fed(source: Source, event: Event, now: float) -> list[e.SourceEffect]:
    """The effects of an event, by the machine that takes it."""
    if isinstance(event, p.PackingEvent):
        packing = source.packing(event.at)
        return [] if packing is None else [*packing.on(event, now)]
    return [*source.on(event, now)]


def stand(words: set[int], effect: e.HoldWord | e.ClearWord) -> None:
    """Keep the words that stand in a source's memory."""
    if isinstance(effect, e.HoldWord):
        words.add(effect.word)
    else:
        words.remove(effect.word)


@dataclass
class Arena:
    """It does what packings say, each piece when the seed says so; and knows whose each slot is."""

    rng: random.Random
    free: list[int] = field(default_factory=lambda: list(range(SLOTS)))
    asked: deque[Key] = field(default_factory=deque)
    slots: dict[Key, int] = field(default_factory=dict)
    """The slots of chunks that are copied, or have been."""
    copies: dict[int, Copying] = field(default_factory=dict)
    kept: dict[int, float] = field(default_factory=dict)
    """Until when each slot keeps its bytes."""
    keeping: set[int] = field(default_factory=set)
    """Slots that were given back, but for their bytes."""
    taken: list[int] = field(default_factory=list)
    """By the daemon, for what it reads itself."""
    bytes: list[dict[int, int]] = field(default_factory=lambda: [{} for _ in range(SLOTS)])
    cuts: dict[p.At, list[list[tuple[int, int]]]] = field(default_factory=dict)
    """The chunks of each packing: (place, block)."""
    heard: dict[p.At, float] = field(default_factory=dict)
    """When its reader has said something, or one of its chunks was packed."""
    idle: dict[p.At, float] = field(default_factory=dict)
    """When a packing is to be told Idle."""
    arisen: list[p.PackingEvent] = field(default_factory=list)
    at_once: list[p.PackingEvent] = field(default_factory=list)
    """Told before anything else happens."""
    failing: float = 0.0
    """Share of the copies."""
    prompt: float = 0.6
    """How soon what has arisen is told."""

    def __post_init__(self) -> None:
        self.failing, self.prompt = self.rng.choice((0.02, 0.05, 0.2)), self.rng.choice((0.6, 0.6, 0.1))

    def do(self, effect: p.PackingEffect, now: float) -> None:
        match effect:
            case p.Cut(at, wanted, view):
                assert isinstance(wanted, tuple)
                if wanted[0] != view.terms.word:  # the reader went by an announcement that is out of date
                    self.arisen.append(p.WasCut(at, Conflict("lease_changed", "another lease is here by now")))
                    return
                ids = view.said.tables["full"].block_ids
                self.cuts[at] = [[(place, int(ids[place])) for place in chunk] for chunk in wanted[1]]
                self.arisen.append(p.WasCut(at))
            case p.Gather(at, chunk):
                self.asked.append((at, chunk))
                self.lend()
            case p.GiveBack(at, chunk):
                slot = self.slots.pop((at, chunk), None)
                if slot not in self.kept:
                    raise Violation("a slot is given back that holds nothing", f"{effect}")
                self._freed(slot)
            case p.SetIdle(at, when):
                self.idle[at] = when
            case p.Forget(at):
                for kept in (self.cuts, self.heard, self.idle):
                    kept.pop(at, None)
                self.asked = deque(key for key in self.asked if key[0] != at)
                for slot in [self.slots.pop(key) for key in list(self.slots) if key[0] == at]:
                    if slot in self.copies:
                        self.copies[slot].abandoned = True
                    elif now < self.kept.get(slot, now):
                        self.keeping.add(slot)
                    else:
                        self._freed(slot)

    def lend(self) -> None:
        while self.free and self.asked:
            key, slot = self.asked.popleft(), self.free.pop(self.rng.randrange(len(self.free)))
            self.slots[key], self.bytes[slot] = slot, {}
            at, chunk = key
            self.copies[slot] = Copying(at, chunk, list(self.cuts[at][chunk]), fails=self.rng.random() < self.failing)

    def copy(self, memory: list[int], now: float) -> bool:
        """One more block, or the end of a copy."""
        going = [slot for slot, copying in self.copies.items() if not copying.hangs]
        if not going:
            return False
        slot = self.rng.choice(going)
        copying = self.copies[slot]
        if copying.left:
            place, block = copying.left.pop(self.rng.randrange(len(copying.left)))
            self.bytes[slot][place] = JUNK if copying.fails else memory[block]
            return True
        del self.copies[slot]
        if copying.abandoned:
            self._freed(slot)
            return True
        self.kept[slot], self.heard[copying.at] = now + KEPT_S, now
        problem = Conflict("copy_failed", "the GPU is broken") if copying.fails else None
        self.at_once.append(p.Gathered(copying.at, copying.chunk, problem))
        return True

    def sent(self, told: p.Packed) -> Sent:
        slots = {chunk: self.slots.get((told.at, chunk), -1) for chunk in told.chunks}
        if not self.kept.keys() >= set(slots.values()):
            raise Violation("told of what is not packed", f"{told}")
        return Sent(told, slots)

    def take(self) -> None:
        """For what the daemon reads itself; or give those back."""
        if self.taken:
            self.free += self.taken
            self.taken = []
        else:
            self.taken, self.free = self.free[1:], self.free[:1]
        self.lend()

    def next_timer(self) -> float | None:
        return min(self.idle.values(), default=None)

    def pass_time(self, now: float) -> None:
        for at in [at for at, when in self.idle.items() if when <= now]:
            del self.idle[at]
            self.at_once.append(p.Idle(at))
        for slot in [slot for slot in self.keeping if self.kept[slot] <= now]:
            self.keeping.remove(slot)
            self._freed(slot)
        for (at, _), slot in self.slots.items():
            if slot in self.kept and now > self.heard[at] + IDLE_S:
                raise Violation("slots are held for a reader that says nothing", f"{at}")

    def come_to_rest(self) -> None:
        """Nothing is wanted any more: copies that hang end, and all slots are back."""
        self.failing, self.prompt = 0.0, 0.6
        for copying in self.copies.values():
            copying.hangs = False
        if self.taken:
            self.take()

    def check_empty(self) -> None:
        left = self.asked, self.slots, self.copies, self.keeping, self.cuts, self.idle, self.arisen
        if any(left) or len(self.free) != SLOTS:
            raise Violation("slots are left", f"{left}")

    def _freed(self, slot: int) -> None:
        if slot in self.free:
            raise Violation("a slot is free twice", f"{slot}")
        self.kept.pop(slot, None)
        self.bytes[slot] = {}
        self.free.append(slot)
        self.lend()


@dataclass
class Staging:
    """One packing as its reader follows it: at most TOGETHER chunks are wanted and not read."""

    at: p.At
    chunks: tuple[tuple[int, ...], ...]
    last: bool
    since: dict[int, float] = field(default_factory=dict)
    """When each chunk was wanted."""
    packed: dict[int, int] = field(default_factory=dict)
    """The slot of each."""
    bytes: dict[int, int] = field(default_factory=dict)
    read: set[int] = field(default_factory=set)
    in_time: bool = True
    asks: bool = False
    vouched: bool = False

    @property
    def all_packed(self) -> bool:
        return len(self.packed) == len(self.chunks)

    @property
    def proven(self) -> bool:
        return len(self.read) == len(self.chunks) and (self.in_time or self.vouched)

    def hear(self, sent: Sent) -> None:
        for chunk, slot in sent.slots.items():
            if chunk not in self.since or chunk in self.packed:
                raise Violation("packed what was not wanted", f"{sent}")
            self.packed[chunk] = slot
        self.vouched = self.vouched or sent.told.vouched

    def step(self, arena: Arena, rng: random.Random, now: float) -> p.Want | None:
        """What it does next, if it can do anything; and says by that."""
        at_hand = [chunk for chunk in self.packed if chunk not in self.read]
        if len(self.since) < min(len(self.chunks), len(self.read) + TOGETHER) and (not at_hand or rng.random() < 0.5):
            chunk = len(self.since)
            self.since[chunk] = now
            return p.Want(self.at, want=(chunk,))
        if at_hand:
            chunk = rng.choice(at_hand)
            missing = [place for place in self.chunks[chunk] if place not in self.bytes]
            if missing:
                self.bytes[missing[0]] = arena.bytes[self.packed[chunk]].get(missing[0], JUNK)
                return None
            self.read.add(chunk)
            self.in_time = self.in_time and now - self.since[chunk] < KEPT_S
            return p.Want(self.at, read=(chunk,))
        if len(self.read) == len(self.chunks) and not (self.in_time or self.asks):
            self.asks = True
            return p.Want(self.at, vouch=True)
        return None

    def progress(self) -> tuple[int, ...]:
        return len(self.since), len(self.packed), len(self.bytes), len(self.read), self.asks, self.vouched
