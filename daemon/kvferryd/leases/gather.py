"""The source's side of a staged transfer: gather the chunks that a reader asks for into slots, and keep them until
read.

The lease must hold until the last gather has ended: a packed slot stays whole whatever becomes of the blocks.
"""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvferry.errors import Conflict, Deadline, Internal, KvferryError, Malformed, Unavailable
from kvferry.manifest import Manifest
from kvferry.manifest.model import MOST
from kvferry.protocol.values import View
from kvferry.tables import Tables
from kvferry.v1 import peer_pb2
from kvferry.wire import problem_to_proto
from kvferryd.aio import beside, when_done
from kvferryd.copy import Chunk
from kvferryd.observe import logs
from kvferryd.plan import Plan
from kvferryd.staging.arena import SLOT_ALIGN, Arena, Slot, Use
from kvferryd.staging.share import Pairings, packs

log = logs.get(__name__)
IDLE_S = 30.0
"""How long slots are kept for a reader that sends nothing: it has a slot of its own to read into."""
KEPT_S = 0.5
"""A packed slot keeps its bytes so long, even if the stream breaks or the engine goes. A reader that has read within
this time of its request need not ask whether they were replaced (a round trip: 0.3 ms and more)."""
GATHERS = 2
"""Gathers of one reading at once: the next is launched while one is reported. The first runs alone, since launching
another would delay its report."""
UNREAD = 64
"""The most chunks of one gather that may be wanted and not yet read. Each takes one of the reader's slots, and our own
readers use 8. Until the request is published, nothing else bounds how many chunks a reader may ask for."""


@dataclass(frozen=True, slots=True)
class Gatherer:
    """What one registered engine gathers from and into. `regions`: addresses."""

    own: Manifest
    regions: Mapping[int, int]
    arena: Arena | None
    pairings: Pairings

    def slot_nbytes(self) -> int:
        """Of the arena. Raises KvferryError (`no_arena`)."""
        if self.arena is None:
            raise Conflict("no_arena", "this daemon has no staging arena", field="arena_mb", remedy="read directly")
        return self.arena.slot_nbytes

    def cutting(self, opening: peer_pb2.PackOpen, view: View, most: int) -> Callable[[], list[Chunk]]:
        """Makes the chunks that the reader expects, of at most so many bytes; that may take long, and may be done on
        any thread.

        Raises KvferryError, as does what is returned, where the reader may not have them.
        """
        published = view.said
        if view.terms.word != opening.word:
            why, remedy = f"request {view.terms.request_id} has another lease by now", "open it, and go by its update"
            raise Conflict("lease_changed", why, field="word", value=opening.word, remedy=remedy)
        share = self.pairings.get(opening.pairing)
        if not SLOT_ALIGN <= opening.chunk_nbytes <= most:
            why, remedy = "chunks of this size do not fit", f"{SLOT_ALIGN} to {most} bytes"
            raise Malformed("malformed_pack", why, field="chunk_nbytes", value=opening.chunk_nbytes, remedy=remedy)
        if (groups := len(opening.tables)) > MOST["groups"]:
            why, remedy = "tables of more groups than a manifest may have", "name those of the destination"
            raise Malformed("malformed_pack", why, field="tables", value=groups, remedy=remedy)
        tokens = opening.tokens
        if tokens.stop > published.num_tokens or (opening.states and published.more):
            why, value = f"only tokens up to {published.num_tokens} were published", f"{tokens.start}:{tokens.stop}"
            raise Conflict("tokens_unpublished", why, field="tokens", value=value, remedy="wait for the publish")
        if not 1 <= opening.version <= view.version:
            why, remedy = f"publish {opening.version} is not there", "go by the lease's update"
            raise Conflict("lease_version", why, field="version", value=opening.version, remedy=remedy)
        return functools.partial(_cut, share, self.own.rank, published.tables, opening)


def _cut(share: Plan, rank: int, tables: Tables, opening: peer_pb2.PackOpen) -> list[Chunk]:
    chunks = packs(share, rank, tables, opening)
    found = len(chunks), sum(chunk.nbytes for chunk in chunks)
    if found != (opening.chunks, opening.nbytes):
        why, value = (
            f"this rank would pack {found[0]} chunks of {found[1]} bytes",
            f"{opening.chunks}, {opening.nbytes}",
        )
        remedy = "the two daemons plan differently: use the same version, or way = direct"
        raise Conflict("cut_differs", why, field="chunks, nbytes", value=value, remedy=remedy)
    return chunks


class Gather:
    """The chunks that one reading has packed. It has no task: every message, slot and finished gather moves it on.

    It takes messages at once, and packs from `begin` on, until `end` or `lease_over`. `end` gives its slots back: those
    that were read at once, the others within KEPT_S. `queue` is called when something is pending; problems are sent to
    the reader.
    """

    def __init__(self, gatherer: Gatherer, number: int, opening: peer_pb2.PackOpen, queue: Callable[[], None]):
        self._gatherer, self._opening, self._queue = gatherer, opening, queue
        self.number = number
        self._chunks: Sequence[Chunk] = ()
        """Once they are cut."""
        self._left = self._unread = opening.chunks
        self._wanted: deque[int] = deque()
        self._begun: set[int] = set()
        self._awaited: set[asyncio.Future[Slot]] = set()
        self._gathers = 0
        self._held: dict[int, Slot] = {}
        self._idle: asyncio.TimerHandle | None = None
        self._over = False
        self._pending: peer_pb2.PackReply | None = None

    def begin(self, view: View) -> None:
        """Pack what is wanted of this view of the lease."""
        if self._over:
            return
        try:
            cutting = self._gatherer.cutting(self._opening, view, self._gatherer.slot_nbytes())
            blocks = sum(shape.blocks for shape in self._opening.tables.values())
            when_done(beside(blocks, cutting), self._was_cut)
        except Exception as error:  # noqa: BLE001  of one packing; the stream has others
            self.end(error)

    def on_message(self, said: peer_pb2.Pack) -> None:
        """The chunks that the reader wants, and those that it has read. Ignored once this is over."""
        if self._over:
            return
        try:
            for chunk in said.want:
                if chunk in self._begun or chunk >= self._opening.chunks:
                    raise self._malformed("want", chunk)
                if self._count_unread() >= UNREAD:
                    why, remedy = f"{UNREAD} chunks are wanted and not read", "say read of those that were packed"
                    raise Malformed("malformed_pack", why, field="want", value=chunk, remedy=remedy)
                self._begun.add(chunk)
                self._wanted.append(chunk)
            for chunk in said.read:
                slot = self._held.pop(chunk, None)
                if slot is None:
                    raise self._malformed("read", chunk)
                self._unread -= 1
                self._arena.give_back(slot)
            if said.vouch:
                self._vouch()
        except KvferryError as error:
            self.end(error)
        else:
            self._restart_idle()
            self._advance()

    def lease_over(self, why: KvferryError) -> None:
        """What was packed while the lease held stays good; if that is not all, this is over."""
        if self._left:
            self.end(why)

    def take(self) -> peer_pb2.PackReply | None:
        """Everything pending, as one message."""
        reply, self._pending = self._pending, None
        return reply

    def end(self, problem: BaseException | None = None) -> None:
        """Pack nothing more. Idempotent. problem: sent to the reader."""
        if self._over:
            return
        self._over = True
        if self._idle is not None:
            self._idle.cancel()
        for slot in self._held.values():
            self._arena.give_back_kept(slot)
        self._held.clear()
        for awaited in self._awaited:
            awaited.cancel()
        if problem is not None and not isinstance(problem, KvferryError):
            log.error("gather broke", exc_info=problem)
            problem = Internal("internal", f"the source failed: {type(problem).__name__}")
        if problem is not None:
            self._reply().problem.CopyFrom(problem_to_proto(problem))

    @property
    def _arena(self) -> Arena:
        assert self._gatherer.arena is not None  # or nothing would have been cut
        return self._gatherer.arena

    def _was_cut(self, cut: asyncio.Future[list[Chunk]]) -> None:
        if problem := cut.exception():
            self.end(problem)
        else:
            self._chunks = cut.result()
            self._advance()

    def _advance(self) -> None:
        at_once = GATHERS if self._left < len(self._chunks) else 1
        while self._wanted and self._chunks and self._gathers < at_once and not self._over:
            try:
                lent = self._arena.ask(Use.PACKED)
            except KvferryError as error:
                self.end(error)
                return
            self._gathers += 1
            self._awaited.add(lent)
            when_done(lent, functools.partial(self._gather, self._wanted.popleft()))

    def _gather(self, index: int, lent: asyncio.Future[Slot]) -> None:
        self._awaited.discard(lent)
        if lent.cancelled():
            return
        if problem := lent.exception():
            self.end(problem)
            return
        chunk, slot = self._chunks[index], lent.result()
        try:
            self._check_held()  # it may have ended while this waited for a slot
            gather = functools.partial(chunk.gather, self._gatherer.regions, slot.address)
            gathering = self._arena.copies.start(chunk.nbytes, gather)
        except Exception as error:  # noqa: BLE001  nobody else would see an error of a callback
            self._arena.give_back(slot)
            self.end(error)
        else:
            gathering.done.add_done_callback(functools.partial(self._was_gathered, index, slot))

    def _was_gathered(self, index: int, slot: Slot, gathering: asyncio.Future[None]) -> None:
        try:
            gathering.result()
            self._check_held()
        except Exception as error:  # noqa: BLE001  nobody else would see an error of a callback
            self._arena.give_back(slot)
            self.end(error)
            return
        self._held[index] = slot
        self._arena.keep(slot, KEPT_S)
        self._reply().packed.add(
            chunk=index, address=slot.address, nbytes=self._chunks[index].nbytes, kept_ms=int(1e3 * KEPT_S)
        )
        self._gathers -= 1
        self._left -= 1
        self._restart_idle()
        # After the report: launching takes a while, and another gather is under way.
        asyncio.get_running_loop().call_soon(self._advance)

    def _count_unread(self) -> int:
        """Of the chunks that were wanted."""
        return len(self._begun) - (self._opening.chunks - self._unread)

    def _check_held(self) -> None:
        """Nothing is gathered, or reported as packed, unless the lease holds and the reader is there."""
        if self._over:
            raise Conflict("abandoned", "the gather is over")

    def _vouch(self) -> None:
        if self._unread or not self._chunks:
            raise Malformed("malformed_pack", f"{self._unread} chunks are not read yet", field="vouch", value=True)
        if self._arena.closed:  # a slot that was read late may have been gone
            raise Unavailable("arena_closed", "the staging arena was closed: its engine is gone")
        self._reply().vouched = True

    def _reply(self) -> peer_pb2.PackReply:
        """The next message, to be added to."""
        if self._pending is None:
            self._pending = peer_pb2.PackReply(packing=self.number)
            self._queue()
        return self._pending

    def _restart_idle(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
        self._idle = asyncio.get_running_loop().call_later(IDLE_S, self._on_idle) if self._held else None

    def _on_idle(self) -> None:
        held = len(self._held)
        self.end(Deadline("deadline", f"the reader held {held} slots for {IDLE_S:g} s and sent nothing"))

    def _malformed(self, field: str, chunk: int) -> KvferryError:
        remedy = f"want each of the {self._opening.chunks} chunks once, and say read of those that were packed"
        return Malformed("malformed_pack", "it cannot be named here", field=field, value=chunk, remedy=remedy)
