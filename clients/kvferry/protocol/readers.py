"""The readers of one lease, present and past.

An engine has read a lease when all its ranks have closed it complete in one attempt. A higher attempt takes back what
the ranks have read in lower ones; so does the first one that somebody else counts, as the daemon of the engine's rank 0
does for orders that bring their tables, and the next daemon anew. Thousands may read one lease, so all is counted, and
nothing is looked up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvferry.errors import Conflict, Full
from kvferry.protocol import events as e
from kvferry.protocol.kept import Latest
from kvferry.protocol.values import NEVER, Reader, ReaderEngine, ReaderId, Reading, Sizes, Times

Finished = dict[ReaderId, tuple[int, str, int, float]]
"""Ranks that have read, without opening the lease: the attempt of each, who counts that, its bytes, and when."""
MAX_READERS = 4096
"""Ranks that one lease remembers as readers."""


@dataclass(slots=True)
class _Place:
    """How one rank stands. by: who counts the attempt. reading: by which it reads now."""

    attempt: int
    by: str
    reading: Reading | None = None
    read: bool = False
    nbytes: int = 0
    times: Times = NEVER


class Readers:
    def __init__(self, request_id: str, since: float) -> None:
        """since: the lease's first publish."""
        self._request_id, self._since = request_id, since
        self._places: dict[ReaderId, _Place] = {}
        self._read: Counter[ReaderEngine] = Counter()
        """Ranks of each engine that have read, in its newest attempt."""
        self._newest: Latest[tuple[ReaderEngine, str], int] = Latest(MAX_READERS)
        """The highest attempt of each engine that has read or reads, or has left, by who counts it."""
        self._counts: Latest[ReaderEngine, str] = Latest(MAX_READERS)
        """The `by` of the attempt that each engine is in."""
        self.live = self.closed = self.whole = self.nbytes = 0
        """Ranks that read now; ranks that have read; engines of which all ranks have; bytes that were read in all."""

    def open(self, who: ReaderId, reading: Reading, attempt: int, by: str = "", *, now: float) -> None:
        """Raises KvferryError: `already_reading`, `full`."""
        place = self._places.get(who)
        if place is not None and place.reading is not None:
            why = f"{who.engine_id} rank {who.rank} reads request {self._request_id} already"
            remedy = "wait for that read to end"
            raise Conflict("already_reading", why, field="request_id", value=self._request_id, remedy=remedy)
        self._add(who, _Place(attempt, by, reading, times=Times(now - self._since)))

    def close(self, who: ReaderId, left: e.Leave, now: float, packed_at: float | None = None) -> None:
        """The reader goes. packed_at: when all that it wanted was."""
        self.nbytes += left.nbytes
        place = self._places[who]
        place.reading = None
        self.live -= 1
        place.nbytes = left.nbytes
        packed = None if packed_at is None else packed_at - self._since
        place.times = Times(place.times.opened, packed, now - self._since)
        self._go_on(who, place, left.attempt, left.by)
        if left.complete and self._is_newest(who, place):
            self._count(who, place, read=True)
        if not place.read:
            del self._places[who]

    def finish(self, who: ReaderId, attempt: int, by: str = "", *, nbytes: int, now: float) -> None:
        """A rank that does not have it open has read it: it had nothing to read, or was quick with an announcement.

        Raises KvferryError: `full`.
        """
        place = self._places.get(who)
        if place is None:
            place = self._add(who, _Place(attempt, by))
        self.nbytes += nbytes
        place.nbytes = max(nbytes, place.nbytes)
        place.times = place.times._replace(closed=max(0.0, now - self._since))
        self._go_on(who, place, attempt, by)
        if self._is_newest(who, place):
            self._count(who, place, read=True)

    def live_readings(self) -> list[Reading]:
        return [place.reading for place in self._places.values() if place.reading is not None] if self.live else []

    def reads(self, who: ReaderId) -> bool:
        """Whether this rank has it open."""
        place = self._places.get(who)
        return place is not None and place.reading is not None

    def finish_all(self, ranks: Finished) -> Finished:
        """Ranks that have it open, by another reading, are left."""
        for who in [who for who in ranks if not self.reads(who)]:
            attempt, by, nbytes, at = ranks.pop(who)
            try:
                self.finish(who, attempt, by, nbytes=nbytes, now=at)
            except Full:
                continue
        return ranks

    def others_than(self, who: ReaderId) -> bool:
        """Whether an engine other than that of `who` reads."""
        return any(it.reading is not None and each.engine != who.engine for each, it in self._places.items())

    def __iter__(self) -> Iterator[Reader]:
        for who, place in self._places.items():
            state = "read" if place.read else "left" if place.reading is None else "reading"
            yield Reader(who, state, place.nbytes, place.attempt, place.times)

    def _is_newest(self, who: ReaderId, place: _Place) -> bool:
        """Whether its engine is in this attempt."""
        newest = self._newest.get((who.engine, place.by)) or 0
        return place.by == self._counts.get(who.engine) and place.attempt >= newest

    def _go_on(self, who: ReaderId, place: _Place, attempt: int, by: str) -> None:
        """The rank is in this attempt by now."""
        if place.by != by or place.attempt < attempt:
            self._count(who, place, read=False)
            place.attempt, place.by = attempt, by
        self._go_by(who, place)

    def _add(self, who: ReaderId, place: _Place) -> _Place:
        before = self._places.get(who)
        if before is None and len(self._places) >= MAX_READERS:
            why = f"request {self._request_id} has {MAX_READERS} readers already"
            raise Full("full", why, value=MAX_READERS)
        if before is not None:
            self._count(who, before, read=False)
        self._places[who] = place
        self.live += place.reading is not None
        self._go_by(who, place)
        return place

    def _go_by(self, who: ReaderId, place: _Place) -> None:
        """The engine is in this attempt by now, if that is new: what its ranks have read in others is read anew."""
        attempt, by = place.attempt, place.by
        newest = self._newest.get((who.engine, by))
        if newest is not None and attempt <= newest:
            return
        self._newest.put((who.engine, by), attempt)
        self._counts.put(who.engine, by)
        if not self._read[who.engine]:
            return
        for rank in range(who.world_size):
            other = replace(who, rank=rank)
            before = self._places.get(other)
            if before is not None:
                self._count(other, before, read=False)

    def _count(self, who: ReaderId, place: _Place, *, read: bool) -> None:
        if place.read == read:
            return
        place.read = read
        ranks, by = self._read, 1 if read else -1
        was_whole = ranks[who.engine] >= who.world_size
        ranks[who.engine] += by
        self.closed += by
        self.whole += (ranks[who.engine] >= who.world_size) - was_whole
        if not ranks[who.engine]:
            del ranks[who.engine]

    def check(self) -> None:
        """All counts are those that the places give."""
        read = Counter(who.engine for who, place in self._places.items() if place.read)
        assert self.live == sum(place.reading is not None for place in self._places.values())
        assert self.closed == read.total() and dict(self._read) == dict(read)
        assert self.whole == sum(count >= engine[2] for engine, count in read.items())
        attempts = {(who.engine, place.attempt, place.by) for who, place in self._places.items() if place.read}
        assert len(attempts) == len(read), "an engine has read in one attempt"
        assert all(place.reading is None or not place.read for place in self._places.values())

    def sizes(self) -> Sizes:
        return {
            "readers": len(self._places),
            "engines read": len(self._read),
            "attempts": len(self._newest),
            "counted by": len(self._counts),
        }
