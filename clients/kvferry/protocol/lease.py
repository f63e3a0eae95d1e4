"""A lease: a request's published blocks on one engine rank, from its first publish to its end."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice

from kvferry.errors import Conflict, Full, KvferryError
from kvferry.protocol.readers import Readers
from kvferry.protocol.states import LeaseState, moved
from kvferry.protocol.values import UNTRACED, Account, Publication, Sizes, Terms, View
from kvferry.tables import BlockTable

MAX_FENCED = 512
"""Publishes of one request that wait for fences."""
REMEMBERED = 32
"""The most readers that are named of a lease that has ended."""
NOTHING = BlockTable.of([])
UNSEEN = Publication({}, 0, b"", more=True)


@dataclass(slots=True)
class _Queued:
    """A publish that readers have not seen. fence: None once it is reached."""

    said: Publication
    fence: int | None
    at: float
    problem: KvferryError | None = None


class Lease:
    """It changes by `Leases` alone."""

    def __init__(self, terms: Terms, now: float) -> None:
        self.terms, self.since, self.expires_at = terms, now, now
        self.state = LeaseState.PUBLISHING
        self.shown, self.version, self.shown_at, self.fenced_s = UNSEEN, 0, now, 0.0
        """The last publish that readers see, how many they have seen, since when, and how long its fence took."""
        self.queued: deque[_Queued] = deque()
        self.readers = Readers(terms.request_id, now)
        self.awaited = self.announced = False
        """Whether readers waited for the first publish; whether the lease was announced."""
        self.trace = UNTRACED
        """The trace of the reader that came last."""
        self.reason, self.problem = "", None

    problem: KvferryError | None
    """Why it was revoked, where nobody asked for that."""

    @property
    def request_id(self) -> str:
        return self.terms.request_id

    @property
    def number(self) -> int:
        return self.terms.number

    @property
    def more(self) -> bool:
        """Whether readers will see more of it."""
        return self.state is LeaseState.PUBLISHING

    @property
    def view(self) -> View:
        return View(self.terms, self.shown, self.version, self.fenced_s)

    @property
    def published(self) -> Publication:
        """The last that was published. Readers see it when its fence, and those before it, are reached."""
        return self.queued[-1].said if self.queued else self.shown

    @property
    def all_read(self) -> bool:
        """Whether as many engines as expected have read with all their ranks, and nobody is reading."""
        return not (self.more or self.readers.live) and self.readers.whole >= self.terms.readers

    def over(self) -> KvferryError:
        """Why a reader cannot read it any more."""
        return why_over(self)

    def refusal(self, said: Publication) -> KvferryError | None:
        """Why this cannot be published after what is there: `already_published`, `published_less`,
        `published_blocks_moved`, `published_other_prompt`, `full`."""
        before, request = self.published, f"request {self.request_id}"
        if not before.more:
            why = f"{request} was published whole already"
            remedy = "use more=True for every publish but the last, or another request id"
            return Conflict("already_published", why, field="request_id", value=self.request_id, remedy=remedy)
        if said.num_tokens < before.num_tokens:
            why = f"{request} had {before.num_tokens} tokens published already"
            remedy = "published tokens cannot be taken back: abort the request"
            return Conflict("published_less", why, field="num_tokens", value=said.num_tokens, remedy=remedy)
        if said.digest != before.digest:
            why, remedy = f"{request} had another digest before", "publish one prompt under one request id"
            return Conflict("published_other_prompt", why, field="digest", value=said.digest.hex(), remedy=remedy)
        if len(self.queued) >= MAX_FENCED:
            why = f"{MAX_FENCED} publishes of {request} wait for fences"
            remedy = "publish less often, or when the stream has been synchronised"
            return Full("full", why, field="after", value=MAX_FENCED, remedy=remedy)
        for name, table in before.tables.items():  # readers may be reading what was published before
            now, count = said.tables.get(name, NOTHING), len(table.block_ids)
            if count and BlockTable(now.block_ids[:count], now.first_token) != table:
                why, field = f"{request} had other blocks of group {name} published already", f"tables.{name}.block_ids"
                value = f"{now.block_ids[:count].tolist()} from token {now.first_token}"
                remedy = "append blocks only; what was published stays in its blocks until the lease ends"
                return Conflict("published_blocks_moved", why, field=field, value=value, remedy=remedy)
        return None

    def queue(self, said: Publication, fence: int | None, now: float) -> None:
        """To be shown after the publishes before it."""
        self.queued.append(_Queued(said, fence, now))
        self.expires_at = now + self.terms.ttl_s

    def fence_over(self, fence: int, problem: KvferryError | None) -> None:
        for each in self.queued:
            if each.fence == fence:
                each.fence, each.problem = None, problem

    def show_next(self, now: float) -> KvferryError | None:
        """Readers see what was published next. Or why they never will."""
        next = self.queued.popleft()
        if next.problem is not None:
            return next.problem
        self.shown, self.fenced_s = next.said, now - next.at
        self.version += 1
        self.expires_at, self.shown_at = now + self.terms.ttl_s, now
        if not next.said.more:
            self.state = moved(self.state, LeaseState.PUBLISHED)
        return None

    def end(self, state: LeaseState, reason: str, problem: KvferryError | None) -> list[int]:
        """The fences that nobody waits for any more."""
        self.state = moved(self.state, state)
        self.reason, self.problem = reason, problem
        fences = [each.fence for each in self.queued if each.fence is not None]
        self.queued.clear()
        return fences

    def account(self, now: float) -> Account:
        """With all readers while it lives, and only the first of them once it has ended."""
        ended, terms = self.state.ended, self.terms
        readers = tuple(islice(self.readers, REMEMBERED if ended else None))
        shown_s = self.shown_at - self.since if self.version else None
        left_s = None if ended or self.readers.live else max(0.0, self.expires_at - now)
        return Account(
            terms.request_id, terms.number, self.state, self.shown.num_tokens, self.shown.weights, terms.readers,
            self.readers.live, self.readers.closed, terms.created_at, now - self.since, shown_s, left_s,
            self.reason, self.problem, self.readers.nbytes, readers, self.trace,
        )  # fmt: skip

    def check(self) -> None:
        self.readers.check()
        assert not self.state.ended, "it is kept as its account only"
        assert self.terms.word, "a word is never 0"
        assert not self.queued or self.queued[0].fence is not None or self.queued[0].problem, "it can be shown"
        assert not self.all_read, "a lease that all have read is over"
        assert self.more == (self.version == 0 or self.shown.more)

    def sizes(self) -> Sizes:
        return {**self.readers.sizes(), "queued": len(self.queued)}


def lease_ended(request_id: str, why: str, number: int = 0) -> KvferryError:
    """The error for a lease that cannot be read any more, or never could. number: its own; 0 where none is known."""
    which = f"lease {number}" if number else "the lease"
    why, remedy = f"{which} of request {request_id} is {why}", "prefill the request again"
    return Conflict("lease_ended", why, field="request_id", value=request_id, remedy=remedy)


def why_over(ended: Lease | Account) -> KvferryError:
    if ended.problem is not None:
        return ended.problem.kept()
    why = f"{ended.state.value}{f': {ended.reason}' if ended.reason else ''}"
    return lease_ended(ended.request_id, why, ended.number)
