"""An engine rank as a source, fed by hand: its machines, readers that speak to them, and time that a test moves."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, TypeVar

from staged_world import stand

from kvferry.errors import KvferryError
from kvferry.protocol import events as e
from kvferry.protocol.lease import Lease
from kvferry.protocol.source import Source
from kvferry.protocol.states import LeaseState
from kvferry.protocol.values import Account, Publication, ReaderId, Reading, Terms
from kvferry.tables import BlockTable

TABLES = {"full": BlockTable.of([4, 7])}
READER, ANOTHER = ReaderId("decode", "1", 0, 1), ReaderId("decode-b", "1", 0, 1)
LONG_S = 60.0
E = TypeVar("E")


def rank_of(rank: int, of: int, engine: str = "decode", epoch: str = "1") -> ReaderId:
    return ReaderId(engine, epoch, rank, of)


class ByEvents:
    """Every event is checked: what the machines promise to each other, and the order of the effects of an end."""

    def __init__(self, limit: int = 8) -> None:
        self.source, self.now = Source(limit), 0.0
        self.said: list[e.SourceEffect] = []
        self.words: set[int] = set()
        """Words that stand."""
        self._word: dict[tuple[str, int], int] = {}
        """The word of each lease."""
        self._numbers = itertools.count(1)

    def on(self, event: e.SourceEvent) -> list[e.SourceEffect]:
        effects = self.source.on(event, self.now)
        if isinstance(event, e.Publish):
            self._word.setdefault((event.terms.request_id, event.terms.number), event.terms.word)
        for effect in effects:
            match effect:
                case e.HoldWord() | e.ClearWord():
                    stand(self.words, effect)
                case e.LeaseEnded(account):
                    assert self._word[account.request_id, account.number] not in self.words, (
                        "told while its word stands"
                    )
        self.said += effects
        self.source.check()
        return effects

    def all(self, kind: Callable[..., E]) -> list[E]:
        return [each for each in self.said if isinstance(each, kind)]  # type: ignore[arg-type]

    @property
    def ended(self) -> list[Account]:
        return [each.account for each in self.all(e.LeaseEnded)]

    def publish(
        self, request_id: str = "r", num_tokens: int = 8, *, more: bool = False, number: int = 0, readers: int = 1,
        ttl_s: float = LONG_S, fence: int | None = None, **said: Any,
    ) -> int:  # fmt: skip
        """Its number: that of the lease that is there, or the next."""
        held = self.source.leases.get(request_id)
        number = number or (held.number if held is not None else self.source.leases.newest(request_id) + 1)
        told: dict[str, Any] = {"tables": TABLES, "metadata": b""} | said
        terms = Terms(request_id, number, next(self._numbers), ttl_s, readers)
        self.on(e.Publish(terms, Publication(num_tokens=num_tokens, more=more, **told), fence))
        return number

    def revoke(self, request_id: str = "r", reason: str = "a test") -> bool:
        return any(isinstance(each, e.LeaseEnded) for each in self.on(e.Revoke(request_id, reason)))

    def wait(self, seconds: float) -> None:
        """Time passes, and the shell's timer rings as it should."""
        until = self.now + seconds
        while (at := self.source.next_timer()) is not None and at <= until:
            self.now = max(self.now, at)
            self.on(e.Tick())
        self.now = until

    def lease(self, request_id: str = "r") -> Lease:
        """A lease that is held."""
        lease = self.source.leases.get(request_id)
        assert lease is not None
        return lease

    def account(self, request_id: str = "r") -> Account:
        """The account of its last lease, held or not."""
        lease = self.source.leases.get(request_id)
        if lease is not None:
            return lease.account(self.now)
        return next(each for each in self.source.leases.ended() if each.request_id == request_id)

    def state(self, request_id: str = "r") -> LeaseState:
        state = self.source.leases.state_of(request_id)
        assert state is not None
        return state

    def reader(self, who: ReaderId = READER, *, announcing: bool = False) -> Speaker:
        return Speaker(self, who, announcing=announcing)

    def read(self, who: ReaderId = READER, request_id: str = "r", *, complete: bool = True) -> None:
        """A reader comes for it, reads and goes."""
        reader = self.reader(who)
        reader.closes(reader.opens(request_id), complete=complete)
        reader.goes()

    def finish(self, who: ReaderId = READER, request_id: str = "r", lease: int = 1, attempt: int = 0) -> None:
        """A reader that has not opened it closes it."""
        reader = self.reader(who)
        reader.finishes(request_id, lease, attempt=attempt)
        reader.goes()


class Speaker:
    """A reader's stream, as the reader uses it."""

    def __init__(self, source: ByEvents, who: ReaderId, *, announcing: bool = False) -> None:
        self.source, self.stream = source, next(source._numbers)
        self._numbers = itertools.count(1)
        source.on(e.Connect(self.stream, who, announcing))

    def opens(self, request_id: str = "r", **asked: Any) -> int:
        """The reading's number."""
        number = next(self._numbers)
        self.source.on(e.Ask(Reading(self.stream, number), request_id, **asked))
        return number

    def closes(self, reading: int, *, complete: bool = True, **left: Any) -> None:
        self.source.on(e.Leave(Reading(self.stream, reading), complete=complete, **left))

    def finishes(self, request_id: str = "r", lease: int = 1, **left: Any) -> None:
        finished = e.Leave(Reading(self.stream, 0), complete=True, **left)
        self.source.on(finished._replace(request_id=request_id, lease=lease))

    def hears(self, reading: int = 1) -> e.Told | None:
        return self.source.source.take(Reading(self.stream, reading))

    def sees(self, reading: int = 1) -> tuple[int, int, bool]:
        """(version, tokens, more) of an update."""
        told = self.hears(reading)
        assert isinstance(told, e.Update)
        return told.view.version, told.view.said.num_tokens, told.view.said.more

    def refused(self, reading: int = 1) -> KvferryError:
        told = self.hears(reading)
        assert isinstance(told, e.Problem)
        return told.why

    def waits(self, reading: int = 1) -> bool:
        """It is told, once, that the lease is still to come."""
        return isinstance(self.hears(reading), e.Unpublished)

    def goes(self) -> None:
        self.source.on(e.Disconnect(self.stream))
