"""The source's side of a staged transfer, as kvferry.protocol.packing decides it: chunks are cut, slots of the arena
asked for, copies launched, and their ends reported."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvferry.errors import Conflict, Internal, KvferryError, Malformed
from kvferry.manifest import Manifest
from kvferry.manifest.model import MOST
from kvferry.protocol import packing
from kvferry.protocol import packing_events as p
from kvferry.protocol.values import View
from kvferry.tables import Tables
from kvferry.v1 import peer_pb2
from kvferryd.aio import Timer, beside, when_done
from kvferryd.copy import Chunk
from kvferryd.copy.copying import Copying
from kvferryd.observe import logs
from kvferryd.plan import Plan
from kvferryd.staging.arena import SLOT_ALIGN, Arena, Slot, Use
from kvferryd.staging.share import Pairings, packs

log = logs.get(__name__)


@dataclass(frozen=True, slots=True)
class Gatherer:
    """Gathers from one registered engine's memory. `regions`: addresses."""

    own: Manifest
    regions: Mapping[int, int]
    arena: Arena | None
    pairings: Pairings

    def slot_nbytes(self) -> int:
        """Bytes of an arena's slot. Raises KvferryError (`no_arena`)."""
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
    """Carries out the effects of one packing, and tells `on` how they went."""

    def __init__(self, gatherer: Gatherer, at: p.At, on: Callable[[p.PackingEvent], object]) -> None:
        self.at, self._gatherer, self._on = at, gatherer, on
        self._chunks: Sequence[Chunk] = ()
        self._asked: dict[int, asyncio.Future[Slot]] = {}
        """Slots of chunks whose copy has not begun."""
        self._copies: dict[int, tuple[Slot, Copying]] = {}
        self._held: dict[int, Slot] = {}
        """Slots of chunks that are packed."""
        self._timer = Timer(lambda: on(p.Idle(at)))
        self._over = False

    def do(self, effect: p.PackingEffect) -> None:
        match effect:
            case p.Gather(_, chunk, behind):
                if behind:
                    asyncio.get_running_loop().call_soon(self._gather, chunk)
                else:
                    self._gather(chunk)
            case p.GiveBack(_, chunk):
                self._arena.give_back(self._held.pop(chunk))
            case p.Cut(_, wanted, view):
                assert isinstance(wanted, peer_pb2.PackOpen)
                self._cut(wanted, view)
            case p.SetIdle(_, when):
                self._timer.set(when)
            case p.Forget():
                self._end()

    def add_to(self, reply: peer_pb2.PackReply, chunks: Iterable[int]) -> None:
        """Chunks that are packed."""
        for chunk in chunks:
            nbytes, address = self._chunks[chunk].nbytes, self._held[chunk].address
            reply.packed.add(chunk=chunk, address=address, nbytes=nbytes, kept_ms=int(1e3 * packing.KEPT_S))

    @property
    def _arena(self) -> Arena:
        assert self._gatherer.arena is not None  # or nothing would have been cut
        return self._gatherer.arena

    def _cut(self, opening: peer_pb2.PackOpen, view: View) -> None:
        try:
            cutting = self._gatherer.cutting(opening, view, self._gatherer.slot_nbytes())
            copies = len(self._gatherer.pairings.get(opening.pairing).copies)
            blocks = sum(shape.blocks for shape in opening.tables.values())
            cut = beside(copies * blocks, lambda: [] if self._over else cutting())
        except Exception as error:  # noqa: BLE001  of one packing; the stream has others
            self._on(p.WasCut(self.at, _told(error)))
        else:
            when_done(cut, self._was_cut)

    def _was_cut(self, cut: asyncio.Future[list[Chunk]]) -> None:
        if cut.cancelled() or self._over:
            return
        if problem := cut.exception():
            self._on(p.WasCut(self.at, _told(problem)))
        else:
            self._chunks = cut.result()
            self._on(p.WasCut(self.at))

    def _gather(self, chunk: int) -> None:
        if self._over:
            return
        try:
            asked = self._asked[chunk] = self._arena.ask(Use.PACKED)
        except KvferryError as error:
            self._on(p.Gathered(self.at, chunk, error))
        else:
            when_done(asked, functools.partial(self._copy, chunk))

    def _copy(self, chunk: int, asked: asyncio.Future[Slot]) -> None:
        if self._asked.pop(chunk, None) is None:
            return  # forgone
        try:
            slot, work = asked.result(), self._chunks[chunk]
        except KvferryError as error:
            self._on(p.Gathered(self.at, chunk, error.kept()))
            return
        try:
            gather = functools.partial(work.gather, self._gatherer.regions, slot.address)
            copying = self._arena.copies.start(work.nbytes, gather)
        except Exception as error:  # noqa: BLE001  nobody else would see an error of a callback
            self._arena.give_back(slot)
            self._on(p.Gathered(self.at, chunk, _told(error)))
        else:
            self._copies[chunk] = slot, copying
            copying.done.add_done_callback(functools.partial(self._copied, chunk))

    def _copied(self, chunk: int, done: asyncio.Future[None]) -> None:
        if self._over:
            return
        slot = self._held[chunk] = self._copies.pop(chunk)[0]
        if problem := done.exception():
            self._on(p.Gathered(self.at, chunk, _told(problem)))
        else:
            self._arena.keep(slot, asyncio.get_running_loop().time() + packing.KEPT_S)
            self._on(p.Gathered(self.at, chunk))

    def _end(self) -> None:
        self._over = True
        self._timer.set(None)
        asked, self._asked = self._asked, {}
        for each in asked.values():
            if not each.cancel() and not each.exception():
                self._arena.give_back(each.result())
        for slot, copying in self._copies.values():
            copying.abandon()
            self._arena.give_back(slot, copying.quiet)
        for slot in self._held.values():
            self._arena.give_back_kept(slot)


def _told(error: BaseException) -> KvferryError:
    """As the reader is told of it."""
    if isinstance(error, KvferryError):
        return error.kept()
    log.error("a packing broke", exc_info=error)
    return Internal("internal", f"the source failed: {type(error).__name__}")
