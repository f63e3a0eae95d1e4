"""What the packings of one reader's stream want done (kvferry.protocol.packing): chunks cut, slots of the arena asked
for, copies launched, and their ends reported."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import assert_never

from kvferry.errors import Conflict, Internal, KvferryError, Malformed
from kvferry.manifest import Manifest
from kvferry.manifest.model import MOST
from kvferry.protocol import packing
from kvferry.protocol import packing_events as p
from kvferry.protocol.values import View
from kvferry.tables import Tables
from kvferry.v1 import peer_pb2
from kvferry.wire import problem_to_proto
from kvferryd.aio import beside, when_done
from kvferryd.copy import Chunk
from kvferryd.copy.runner import Copying
from kvferryd.observe import logs
from kvferryd.plan import Plan
from kvferryd.staging.arena import SLOT_ALIGN, Arena, Slot, Use
from kvferryd.staging.share import Pairings, packs

log = logs.get(__name__)


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


class Packer:
    """Carries out what a stream's packings say, and tells `on` how it went. A packing that is over has given back all
    its slots by then."""

    def __init__(self, gatherer: Gatherer, on: Callable[[p.PackingEvent], object]) -> None:
        self._gatherer, self._on = gatherer, on
        self._chunks: dict[p.At, Sequence[Chunk]] = {}
        self._cutting: dict[p.At, asyncio.Future[list[Chunk]]] = {}
        """A reader may give the numbers of one that is over to the next."""
        self._asked: dict[tuple[p.At, int], asyncio.Future[Slot]] = {}
        """Until a copy into the slot is wanted."""
        self._slots: dict[p.Slot, Slot] = {}
        """By index: those that are copied into, or hold what was."""
        self._copies: dict[p.Slot, Copying] = {}
        """By the slot that they copy into."""

    def do(self, effect: p.ArenaEffect) -> None:
        match effect:
            case p.AskSlot(at, chunk):
                self._ask(at, chunk)
            case p.Copy(at, chunk, slot):
                self._copy(at, chunk, slot)
            case p.Keep(_, slot, until):
                self._arena.keep(self._slots[slot], until)
            case p.GiveBack(_, slot, kept):
                self._give_back(slot, kept=kept)
            case p.Cut(at, wanted, view):
                assert isinstance(wanted, peer_pb2.PackOpen)
                self._cut(at, wanted, view)
            case p.ForgoSlot(at, chunk):
                asked = self._asked.pop((at, chunk))
                if not asked.cancel() and not asked.exception():
                    self._arena.give_back(asked.result())
            case p.GoOnLater(at):
                asyncio.get_running_loop().call_soon(self._on, p.GoOn(at))
            case p.Forget(at):
                self._chunks.pop(at, None)
                self._cutting.pop(at, None)
            case _:
                assert_never(effect)

    def reply(self, packed: p.Packed) -> peer_pb2.PackReply:
        reply = peer_pb2.PackReply(packing=packed.at.number, vouched=packed.vouched)
        for chunk, slot in packed.chunks:
            nbytes, address = self._chunks[packed.at][chunk].nbytes, self._slots[slot].address
            reply.packed.add(chunk=chunk, address=address, nbytes=nbytes, kept_ms=int(1e3 * packing.KEPT_S))
        if packed.problem is not None:
            reply.problem.CopyFrom(problem_to_proto(packed.problem))
        return reply

    @property
    def _arena(self) -> Arena:
        assert self._gatherer.arena is not None  # or nothing would have been cut
        return self._gatherer.arena

    def _cut(self, at: p.At, opening: peer_pb2.PackOpen, view: View) -> None:
        self._chunks[at] = ()
        try:
            cutting = self._gatherer.cutting(opening, view, self._gatherer.slot_nbytes())
            cut = beside(sum(shape.blocks for shape in opening.tables.values()), cutting)
        except Exception as error:  # noqa: BLE001  of one packing; the stream has others
            self._on(p.WasCut(at, _told(error)))
        else:
            self._cutting[at] = cut
            when_done(cut, functools.partial(self._was_cut, at))

    def _was_cut(self, at: p.At, cut: asyncio.Future[list[Chunk]]) -> None:
        if cut.cancelled() or self._cutting.get(at) is not cut:
            return
        del self._cutting[at]
        if problem := cut.exception():
            self._on(p.WasCut(at, _told(problem)))
        else:
            self._chunks[at] = cut.result()
            self._on(p.WasCut(at))

    def _ask(self, at: p.At, chunk: int) -> None:
        try:
            asked = self._asked[at, chunk] = self._arena.ask(Use.PACKED)
        except KvferryError as error:
            self._on(p.Lent(at, chunk, problem=error))
        else:
            when_done(asked, functools.partial(self._lent, at, chunk))

    def _lent(self, at: p.At, chunk: int, asked: asyncio.Future[Slot]) -> None:
        if asked.cancelled() or self._asked.get((at, chunk)) is not asked:
            return  # forgone
        if problem := asked.exception():
            del self._asked[at, chunk]
            self._on(p.Lent(at, chunk, problem=_told(problem)))
        else:
            self._on(p.Lent(at, chunk, asked.result().index))

    def _copy(self, at: p.At, chunk: int, slot: p.Slot) -> None:
        work, self._slots[slot] = self._chunks[at][chunk], self._asked.pop((at, chunk)).result()
        gather = functools.partial(work.gather, self._gatherer.regions, self._slots[slot].address)
        try:
            copying = self._copies[slot] = self._arena.copies.start(work.nbytes, gather)
        except Exception as error:  # noqa: BLE001  nobody else would see an error of a callback
            self._on(p.Copied(at, chunk, _told(error)))
        else:
            copying.done.add_done_callback(functools.partial(self._copied, at, chunk, slot, copying))

    def _copied(self, at: p.At, chunk: int, slot: p.Slot, copying: Copying, done: asyncio.Future[None]) -> None:
        if self._copies.get(slot) is not copying:
            return  # its slot has been given back
        del self._copies[slot]
        problem = done.exception()
        self._on(p.Copied(at, chunk, _told(problem) if problem is not None else None))

    def _give_back(self, slot: p.Slot, *, kept: bool) -> None:
        lent, copying = self._slots.pop(slot), self._copies.pop(slot, None)
        if copying is not None:
            copying.abandon()
            self._arena.give_back(lent, copying.quiet)
        elif kept:
            self._arena.give_back_kept(lent)
        else:
            self._arena.give_back(lent)


def _told(error: BaseException) -> KvferryError:
    """As the reader is told of it."""
    if isinstance(error, KvferryError):
        return error.kept()
    log.error("a packing broke", exc_info=error)
    return Internal("internal", f"the source failed: {type(error).__name__}")
