"""The source's side of a staged transfer: gather what a reader asks for into slots, and hold them until it has read.

The lease must hold until the last gather has ended, and no longer: what is in a slot is the reader's whatever becomes
of the blocks. So a reader that wants nothing later counts as one that has read as soon as all is packed.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

from kvferry.errors import KvferryError
from kvferry.manifest import Manifest
from kvferry.v1 import peer_pb2
from kvferryd.copy import Chunk
from kvferryd.plan import Plan
from kvferryd.transfer.arena import SLOT_ALIGN, Arena, Slot, Use
from kvferryd.transfer.lease import Lease
from kvferryd.transfer.share import Shape, Wanted, packs, share_of
from kvferryd.transfer.together import together

PAIRINGS = 64
"""Plans kept. A reader whose plan is forgotten pairs again."""
FEW = 4096
"""Blocks of a table that are bound on the loop: it is not worth the way to a thread."""
PATIENCE_S = 30.0
"""The longest time for which a slot is held for a reader that says nothing: it has a slot of its own to read into."""
KEPT_S = 0.5
"""For so long a packed slot holds its bytes, even if the stream breaks or the engine goes: a reader that has read
within this time of its asking need not hear how the stream ends (0.3 ms and more): they cannot have been replaced."""
GATHERS = 2
"""Of one stream at once: the next is launched while one is told."""


class Pairings:
    """This rank's part of the plans of those who read from it."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, Plan] = OrderedDict()

    async def add(self, own: Manifest, sources: Sequence[Manifest], destination: Manifest, said: bytes) -> str:
        """Plan as the reader does; returns the plan's name. `said`: all of that as it came.

        Raises KvferryError (`protocol`) when the reader sees this rank otherwise than it is, PlanRefused.
        """
        if [source for source in sources if source.rank == own.rank] != [own]:
            raise KvferryError(
                "protocol",
                f"the reader does not know rank {own.rank} of engine {own.engine_id} as it is",
                field="sources",
                value=sorted(source.rank for source in sources),
                remedy="shake hands again",
            )
        name = hashlib.sha256(said).hexdigest()
        if name not in self._known:
            self._known[name] = await asyncio.to_thread(share_of, sources, destination, own.rank)
            while len(self._known) > PAIRINGS:
                self._known.popitem(last=False)
        return name

    def get(self, name: str) -> Plan:
        """Raises KvferryError (`unknown_pairing`)."""
        if name not in self._known:
            raise KvferryError(
                "unknown_pairing",
                "the plan of this pair of engines is not known, or was forgotten",
                field="pairing",
                value=name,
                remedy="pair again",
            )
        self._known.move_to_end(name)
        return self._known[name]


async def chunks_of(opening: peer_pb2.PackOpen, share: Plan, own: Manifest, lease: Lease, arena: Arena) -> list[Chunk]:
    """The chunks that the reader expects, or an error that says why it may not have them. Raises KvferryError."""
    if not SLOT_ALIGN <= opening.chunk_nbytes <= arena.slot_nbytes:
        raise KvferryError(
            "malformed_pack",
            f"chunks of {opening.chunk_nbytes} bytes do not fit",
            field="chunk_nbytes",
            value=opening.chunk_nbytes,
            remedy=f"{SLOT_ALIGN} to {arena.slot_nbytes} bytes",
        )
    tokens = opening.tokens.start, opening.tokens.stop
    if tokens[1] > lease.num_tokens or (opening.states and lease.more):
        raise KvferryError(
            "tokens_unpublished",
            f"tokens up to {tokens[1]} are wanted but {lease.num_tokens} were published",
            field="tokens",
            value=f"{tokens[0]}:{tokens[1]}",
            remedy="wait for the publish",
        )
    shapes = {name: Shape(shape.first_token, shape.blocks) for name, shape in opening.tables.items()}
    wanted = Wanted(tokens, opening.states, shapes)
    tables = lease.versions.tables(opening.version)
    told = share, own.rank, tables, wanted, opening.chunk_nbytes
    few = sum(shape.blocks for shape in shapes.values()) <= FEW
    chunks = packs(*told) if few else await asyncio.to_thread(packs, *told)
    found = len(chunks), sum(chunk.nbytes for chunk in chunks)
    if found != (opening.chunks, opening.nbytes):
        raise KvferryError(
            "cut_differs",
            f"this rank would pack {found[0]} chunks of {found[1]} bytes",
            field="chunks, nbytes",
            value=f"{opening.chunks}, {opening.nbytes}",
            remedy="the two daemons plan differently: use the same version, or way = direct",
        )
    return chunks


class Packer:
    """One reader's stream. `run` returns when the reader has half-closed it; what it has read is back by then, and what
    it has not will be within KEPT_S.

    `on_packed` is called once, when every chunk has been gathered while the lease held.
    """

    def __init__(
        self,
        arena: Arena,
        lease: Lease,
        chunks: Sequence[Chunk],
        regions: Mapping[int, int],
        say: Callable[[peer_pb2.Packed], Awaitable[None]],
        on_packed: Callable[[], None] = lambda: None,
    ) -> None:
        self._arena, self._lease, self._chunks, self._regions, self._say = arena, lease, chunks, regions, say
        self._on_packed, self._left = on_packed, len(chunks)
        self._saying = asyncio.Lock()
        self._asked: asyncio.Queue[int | None] = asyncio.Queue()
        self._begun: set[int] = set()
        self._held: dict[int, Slot] = {}
        self._patience: asyncio.Timeout | None = None

    async def run(self, first: peer_pb2.PackRequest, requests: AsyncIterator[peer_pb2.PackRequest]) -> None:
        """Serve until the reader has all it wants. The caller bounds the whole of it. Raises KvferryError."""
        try:
            async with asyncio.timeout(None) as self._patience:
                self._hear(first)
                await together([self._listen(requests), *(self._work() for _ in range(GATHERS))])
        except TimeoutError:
            raise KvferryError(
                "deadline", f"the reader held {len(self._held)} slots for {PATIENCE_S:g} s and said nothing"
            ) from None
        finally:
            for slot in self._held.values():
                self._arena.give_back_kept(slot)
            self._held.clear()
        if self._arena.closed:  # a slot that was read late may have been gone
            raise KvferryError("arena_closed", "the staging arena was closed: its engine is gone")

    async def _listen(self, requests: AsyncIterator[peer_pb2.PackRequest]) -> None:
        async for request in requests:
            self._hear(request)
        for _ in range(GATHERS):
            self._asked.put_nowait(None)

    def _hear(self, request: peer_pb2.PackRequest) -> None:
        for chunk in request.want:
            if chunk in self._begun or chunk >= len(self._chunks):
                raise _malformed("want", chunk, len(self._chunks))
            self._begun.add(chunk)
            self._asked.put_nowait(chunk)
        for chunk in request.read:
            slot = self._held.pop(chunk, None)
            if slot is None:
                raise _malformed("read", chunk, len(self._chunks))
            self._arena.give_back(slot)
        self._be_patient()

    async def _work(self) -> None:
        while (index := await self._asked.get()) is not None:
            chunk = self._chunks[index]
            slot = await self._arena.take(Use.PACKED)
            try:
                self._check_held()  # it may have ended while this waited for a slot
                await self._arena.copies.copy(
                    chunk.nbytes, functools.partial(chunk.gather, self._regions, slot.address)
                )
                self._check_held()
            except BaseException:
                self._arena.give_back(slot)
                raise
            self._held[index] = slot
            self._arena.keep(slot, KEPT_S)
            self._be_patient()
            self._left -= 1
            if not self._left:
                self._on_packed()
            async with self._saying:  # gRPC takes one message at a time
                await self._say(
                    peer_pb2.Packed(chunk=index, address=slot.address, nbytes=chunk.nbytes, kept_ms=int(1e3 * KEPT_S))
                )

    def _check_held(self) -> None:
        """The seal tells the reader in the end; this tells it now, and gathers nothing that is not the lease's."""
        if self._lease.state.ended:
            raise self._lease.over()

    def _be_patient(self) -> None:
        assert self._patience is not None
        until = asyncio.get_running_loop().time() + PATIENCE_S
        self._patience.reschedule(until if self._held else None)


def _malformed(field: str, chunk: int, chunks: int) -> KvferryError:
    return KvferryError(
        "malformed_pack",
        f"chunk {chunk} cannot be named here",
        field=field,
        value=chunk,
        remedy=f"want each of the {chunks} chunks once, and say read of those that were packed",
    )
