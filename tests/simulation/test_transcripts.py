"""The transcripts, played by the machines of the source side; and that of a whole request, on its page."""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict, deque

import numpy as np
import pytest
from staged_world import Event, fed
from transcript import TRANSCRIPTS, play, update
from whole_request import PAGE, SHOWN, WholeRequest

from kvferry.protocol import events as e
from kvferry.protocol import packing_events as p
from kvferry.protocol.source import Source
from kvferry.protocol.values import Publication, ReaderId, Reading, Terms
from kvferry.tables import BlockTable

CHUNKS = 2


class Machines:
    def __init__(self) -> None:
        self.source, self.now = Source(8), 0.0
        self._words, self._streams, self._packings = itertools.count(1), itertools.count(1), itertools.count(1)
        self._readers: dict[str, int] = {}
        self._told: defaultdict[tuple[str, int], deque[e.Told]] = defaultdict(deque)
        self._ended: dict[tuple[str, int], str] = {}
        self._packing: dict[tuple[str, int], p.At] = {}

    def on(self, event: Event) -> None:
        """The arena has slots for all, and copies at once."""
        arisen: deque[Event] = deque([event])
        while arisen:
            for effect in fed(self.source, arisen.popleft(), self.now):
                match effect:
                    case e.LeaseEnded(account):
                        self._ended[account.request_id, account.number] = account.state.value
                    case p.Cut(at):
                        arisen.append(p.WasCut(at))
                    case p.Gather(at, chunk):
                        arisen.append(p.Gathered(at, chunk))
                    case _:
                        pass
        self.source.check()

    async def publishes(self, name: str, lease: int, tokens: int, *, more: bool, readers: int) -> None:
        table = {"full": BlockTable(np.arange(tokens, dtype=np.int64))}
        terms = Terms(name, lease, next(self._words), 1.0, readers)
        self.on(e.Publish(terms, Publication(table, tokens, b"", more=more)))

    async def revokes(self, name: str) -> None:
        self.on(e.Revoke(name, "a transcript says so"))

    async def engine_hears(self, name: str, lease: int) -> str:
        while (name, lease) not in self._ended and (at := self.source.next_timer()) is not None:
            self.now = max(at, self.now)
            self.on(e.Tick())
        return self._ended.get((name, lease), "nothing")

    async def opens(self, who: str, reading: int, name: str, lease: int) -> None:
        self.on(e.Ask(Reading(self._stream(who), reading), name, lease))

    async def hears(self, who: str, reading: int) -> str:
        told = self._take(who, reading)
        match told:
            case e.Update(view):
                return update(view.terms.number, view.said.num_tokens, more=view.said.more)
            case e.Unpublished():
                return "unpublished"
            case e.Problem(why):
                return why.code
            case p.Packed(_, chunks, vouched, problem):
                while len(chunks) < CHUNKS and isinstance(more := self._take(who, reading), p.Packed):
                    chunks += more.chunks
                return problem.code if problem is not None else "vouched" if vouched else "all is packed"
            case _:
                return "nothing"

    async def is_told(self, who: str, name: str) -> str:
        told = self._take(who, 0)
        assert isinstance(told, e.Announcement) and told.view.terms.request_id == name
        return update(told.view.terms.number, told.view.said.num_tokens, more=told.view.said.more)

    async def closes(self, who: str, reading: int, name: str, lease: int, *, complete: bool) -> None:
        self.on(e.Leave(Reading(self._stream(who), reading), name, lease, complete))

    async def packs(self, who: str, reading: int) -> None:
        at = self._packing[who, reading] = p.At(Reading(self._stream(who), reading), next(self._packings))
        self.on(e.Pack(at.reading, at.number, CHUNKS, last=True))
        self.on(p.Want(at, want=tuple(range(CHUNKS))))

    async def has_read(self, who: str, reading: int) -> None:
        self.on(p.Want(self._packing[who, reading], read=tuple(range(CHUNKS)), vouch=True))

    async def parts(self, who: str) -> None:
        self.on(e.Disconnect(self._readers.pop(who)))

    def _stream(self, who: str) -> int:
        if who not in self._readers:
            stream = self._readers[who] = next(self._streams)
            self.on(e.Connect(stream, ReaderId(who, "1", 0, 1), announcing=True))
        return self._readers[who]

    def _take(self, who: str, reading: int) -> e.Told | None:
        return self.source.take(Reading(self._stream(who), reading))


@pytest.mark.parametrize("transcript", TRANSCRIPTS.values(), ids=TRANSCRIPTS)
def test_the_machines_play_it(transcript: str) -> None:
    machines = Machines()
    asyncio.run(play(transcript, machines))
    for stream in list(machines._readers.values()):
        machines.on(e.Disconnect(stream))
    assert not machines.source.sizes()["opened"] and not machines.source.sizes()["live"]


def test_the_page_shows_a_whole_request_as_it_goes() -> None:
    """If it differs: python tests/simulation/whole_request.py."""
    (shown,) = SHOWN.findall(PAGE.read_text(encoding="utf-8"))
    assert shown == WholeRequest().run()
