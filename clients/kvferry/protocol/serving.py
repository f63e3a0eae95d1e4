"""A reader's stream at the source: the leases that it reads, and what it is still to be told of each.

Nothing grows for a reader that does not read its replies. A lease shows its latest state in place of those before it,
and announcements that find too many others waiting are dropped, since a reader can always ask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

from kvferry.errors import KvferryError, Malformed
from kvferry.protocol import events as e
from kvferry.protocol import packing_events as p
from kvferry.protocol.leases import Leases
from kvferry.protocol.packing import Packing
from kvferry.protocol.values import ReaderId, Reading, Sizes, View

ANNOUNCEMENTS = 64
"""Announcements that may wait for one reader."""
Effects = list[e.SourceEffect]


@dataclass(slots=True)
class _Opened:
    """A lease as this reader follows it, until it closes it or is told of its end."""

    asked: e.Ask
    waits: bool = False
    """It is to be told that the lease is still to come."""
    view: View | None = None
    """The last that the lease has shown, while it holds."""
    untold: bool = False
    """The reader does not have that view yet."""
    problem: KvferryError | None = None
    """It is to be told; then the reading is over."""
    over: KvferryError | None = None
    """Why the lease does not hold, where the reader is not told: all that it wants is packed."""
    packing: Packing | None = None
    packed_at: float | None = None
    """When all was packed that its last packing wanted."""


class Serving:
    def __init__(self, leases: Leases, stream: int, who: ReaderId, most: int, *, announcing: bool = False) -> None:
        """most: readings that may be open. announcing: the reader may be told of leases that it did not ask for."""
        self._leases, self.stream, self.who, self.most, self.announcing = leases, stream, who, most, announcing
        self._opened: dict[int, _Opened] = {}
        self._announced: dict[int, View] = {}
        """Leases that the reader may want next, by their words."""
        self.read = self.nbytes = 0
        """Leases and bytes that were read, as the reader says."""

    def __len__(self) -> int:
        """Readings."""
        return len(self._opened)

    def on(self, event: e.ServingEvent, now: float) -> Effects:
        """Raises KvferryError for a message that no reader of ours sends: the stream is over."""
        match event:
            case e.Connect():
                self._leases.listen(self.stream, self.announcing)
                return []
            case e.Disconnect():
                self._leases.listen(self.stream, False)
                left = (e.Leave(Reading(self.stream, number)) for number in list(self._opened))
                return [effect for each in left for effect in self._leave(each, now)]
            case e.Ask():
                return self._ask(event, now)
            case e.Pack():
                return self._pack(event)
            case e.Leave():
                self.read += event.complete and event.nbytes > 0
                self.nbytes += event.nbytes
                return self._leave(event, now)
            case _:
                assert_never(event)

    # ---- by its leases ----

    def wait(self, number: int) -> Effects:
        """The lease is still to come."""
        opened = self._opened[number]
        opened.waits = True
        return [e.Speak(opened.asked.reading)]

    def show(self, number: int, view: View) -> Effects:
        opened = self._opened[number]
        opened.view, opened.untold = view, opened.asked.known != view.known_by
        speak: Effects = [e.Speak(opened.asked.reading)] if opened.untold else []
        return speak + _begun(opened)

    def over(self, number: int, why: KvferryError) -> Effects:
        """The lease cannot be read any more, or never could."""
        opened = self._opened[number]
        opened.view, opened.untold, opened.waits = None, False, False
        if opened.packing is not None and opened.packing.whole:
            opened.over = why
            return []  # its packed chunks stay as good as they were
        opened.problem = why
        return [*_ended(opened), e.Speak(opened.asked.reading)]

    def announce(self, view: View) -> Effects:
        if len(self._announced) >= ANNOUNCEMENTS:
            return []
        self._announced[view.terms.word] = view
        return [e.Speak(Reading(self.stream, 0))]

    def withdraw(self, word: int) -> None:
        """The lease of this word has ended: an announcement of it need not be sent any more."""
        self._announced.pop(word, None)

    # ---- by its reader ----

    def packing(self, at: p.At) -> Packing | None:
        opened = self._opened.get(at.reading.number)
        packing = opened.packing if opened is not None else None
        return packing if packing is not None and packing.at == at else None

    def take(self, number: int) -> e.Told | None:
        """The next thing to tell of a reading, an announcement for 0; None where nothing is left to tell."""
        if not number:
            return e.Announcement(self._announced.pop(next(iter(self._announced)))) if self._announced else None
        opened = self._opened.get(number)
        if opened is None:
            return None
        if opened.problem is not None:
            del self._opened[number]
            return e.Problem(opened.problem)
        opened.waits, waits = False, opened.waits
        if opened.untold and opened.view is not None:
            opened.untold = False
            return e.Update(opened.view)
        if waits:
            return e.Unpublished()
        return opened.packing.take() if opened.packing is not None else None

    def _ask(self, asked: e.Ask, now: float) -> Effects:
        reading = asked.reading
        if reading.number in self._opened or len(self._opened) >= self.most:
            why = f"it is open already, or {len(self._opened)} readings are too many"
            remedy = "number readings from 1, and close those that are over"
            raise Malformed("malformed_read", why, field="open.reading", value=reading.number, remedy=remedy)
        self._opened[reading.number] = _Opened(asked)
        if asked.refused is not None:
            return self.over(reading.number, asked.refused)
        return self._leases.open(asked, self.who, now)

    def _pack(self, said: e.Pack) -> Effects:
        opened = self._opened.get(said.reading.number)
        if opened is None or opened.problem is not None:
            return []
        ended = _ended(opened)
        if opened.over is not None:
            opened.problem, opened.over = opened.over, None
            return [*ended, e.Speak(said.reading)]
        opened.packing = Packing(said)
        return ended + _begun(opened)

    def _leave(self, left: e.Leave, now: float) -> Effects:
        opened = self._opened.pop(left.reading.number, None)
        if opened is None:
            return self._leases.close(left, self.who, left, now, None)
        ended = _ended(opened)
        return ended + self._leases.close(left, self.who, opened.asked, now, opened.packed_at)

    def check(self) -> None:
        for number, opened in self._opened.items():
            assert opened.asked.reading == (self.stream, number)
            assert opened.problem is None or opened.packing is None, "it packs, and is over"
            assert not opened.untold or opened.view is not None
            assert opened.view is None or not (opened.over or opened.problem), "the lease is over, and its tables stay"
            if opened.packing is not None:
                opened.packing.check()
        assert len(self._opened) <= self.most and len(self._announced) <= ANNOUNCEMENTS

    def sizes(self) -> Sizes:
        sizes = {"opened": len(self._opened), "announced": len(self._announced)}
        for opened in self._opened.values():
            for name, size in opened.packing.sizes().items() if opened.packing is not None else ():
                sizes[name] = sizes.get(name, 0) + size
        return sizes


def _begun(opened: _Opened) -> Effects:
    """Begin its packing, if it packs and there is something to pack."""
    if opened.packing is None or opened.view is None:
        return []
    return opened.packing.begin(opened.view)


def _ended(opened: _Opened) -> Effects:
    """It packs nothing more."""
    packing, opened.packing = opened.packing, None
    if packing is None:
        return []
    opened.packed_at = packing.packed_at
    return packing.end()
