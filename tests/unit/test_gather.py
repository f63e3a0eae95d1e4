"""The source's side of a staged transfer, without a daemon: what one stream's packings have done, and for how long
their slots are lent. kvferry.protocol.packing decides what is packed, and when (tests/simulation)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from alone import first_of
from caches import HND, array, attention, cache, table
from test_arena import Gate, Memory

from kvferry.manifest import Manifest
from kvferry.manifest.model import MOST
from kvferry.protocol import packing
from kvferry.protocol.events import Pack
from kvferry.protocol.packing import UNREAD, Packing
from kvferry.protocol.packing_events import At, Cut, Forget, Gathered, Want, WasCut
from kvferry.protocol.values import Publication, ReaderId, Reading, Terms, View
from kvferry.tables import BlockTable
from kvferry.v1 import layout_pb2, peer_pb2
from kvferry.wire import manifest_to_proto
from kvferryd import aio
from kvferryd.copy import Chunk
from kvferryd.copy.copying import HostCopies
from kvferryd.leases import gather
from kvferryd.leases.gather import Gatherer, Packer
from kvferryd.leases.leases import Leases
from kvferryd.leases.stream import ServedStream
from kvferryd.plan import PlanRefused
from kvferryd.staging.arena import Arena, Slot, Use
from kvferryd.staging.share import PAIRINGS, Pairings, packs, pairing_of, share_of, wanting
from support import refused

pytestmark = pytest.mark.anyio
CHUNK = 4096
SOURCE, READER = cache(*attention(dim=64)), cache(*attention(dim=64, order=HND), engine="decode")
TABLES = {"full": table(2, 0, 3, 1)}
WHOLE = Publication(TABLES, 16, b"", more=False)


@pytest.fixture(autouse=True)
def nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "KEPT_S", 0.0)


@pytest.fixture
async def arena() -> AsyncIterator[Arena]:
    arena = Arena(Memory(), HostCopies())  # type: ignore[arg-type]
    yield arena
    await arena.close()


@pytest.fixture
def chunks() -> list[Chunk]:
    return packs(share_of([SOURCE], READER, 0), 0, TABLES, wanting(TABLES, (0, 16), states=True, chunk_nbytes=CHUNK))


class Reader:
    """A packing of a whole lease, on a stream of its own."""

    def __init__(self, gatherer: Gatherer, opening: peer_pb2.PackOpen) -> None:
        self.leases, self._opening = Leases("prefill", "1", lambda lease: None, 4), opening
        self.leases.publish("r", 1, WHOLE, ttl_s=60, readers=1)
        lease = self.leases.get("r")
        assert lease is not None
        opening.word = opening.word or lease.terms.word
        self._saying: asyncio.Queue[peer_pb2.ReadRequest] = asyncio.Queue()
        who, retired = ReaderId("decode", "1", 0, 1), asyncio.Event()
        self._served = ServedStream(self.leases, who, gatherer, retired, announcing=False)
        self.packed: list[peer_pb2.Packed] = []
        self._problem, self._heard = "", 0
        self._told = asyncio.Event()
        self._hearing = asyncio.create_task(self._hear())

    async def _said(self) -> AsyncIterator[peer_pb2.ReadRequest]:
        while True:
            yield await self._saying.get()

    async def _hear(self) -> None:
        async for reply in self._served.replies(self._said()):
            self.packed += reply.pack.packed
            self._problem = self._problem or reply.pack.problem.code
            self._heard += reply.unpublished
            self._told.set()

    def wants(self, chunks: Iterable[int]) -> None:
        pack = peer_pb2.Pack(reading=1, packing=1, want=chunks, open=self._opening)
        self._saying.put_nowait(peer_pb2.ReadRequest(pack=pack))

    async def _until(self, holds: Callable[[], object]) -> None:
        async with asyncio.timeout(60):
            while not holds():
                self._told.clear()
                await self._told.wait()

    async def has(self, chunks: int) -> None:
        await self._until(lambda: len(self.packed) >= chunks)

    async def refused(self) -> str:
        await self._until(lambda: self._problem)
        return self._problem

    async def is_heard(self) -> None:
        """The source has taken all that was said: it answers what is said last."""
        opening = peer_pb2.LeaseOpen(reading=2, request_id="to come")
        self._saying.put_nowait(peer_pb2.ReadRequest(open=opening))
        await self._until(lambda: self._heard)

    async def goes(self) -> None:
        self._hearing.cancel()
        await asyncio.wait([self._hearing])


@pytest.fixture
def pool() -> np.ndarray:
    return np.zeros(SOURCE.regions[0].nbytes, dtype=np.uint8)


Readers = Callable[..., Reader]


@pytest.fixture
async def readers(chunks: list[Chunk], pool: np.ndarray) -> AsyncIterator[Readers]:
    """They say what is named otherwise. All of them are gone at the end."""
    pairings, all_made = Pairings(), list[Reader]()
    await pairings.add("a plan", SOURCE, [SOURCE], READER)
    opening = wanting(TABLES, (0, 16), states=True, chunk_nbytes=CHUNK)
    nbytes = sum(chunk.nbytes for chunk in chunks)
    more = peer_pb2.PackOpen(request_id="r", version=1, pairing="a plan", chunks=len(chunks), nbytes=nbytes)
    opening.MergeFrom(more)

    def made(arena: Arena, **change: Any) -> Reader:
        said_instead = peer_pb2.PackOpen()
        said_instead.MergeFrom(opening)
        said_instead.MergeFrom(peer_pb2.PackOpen(**change))
        all_made.append(Reader(Gatherer(SOURCE, {0: pool.ctypes.data}, arena, pairings), said_instead))
        return all_made[-1]

    yield made
    for reader in all_made:
        await reader.goes()


# ---- what no reader of ours says ----


def opened(chunks: int) -> Packing:
    return Packing(Pack(Reading(1, 1), 1, chunks, last=True))


def problem_of(pack: Packing) -> str:
    told = pack.take()
    assert told is not None and told.problem is not None
    return told.problem.code


def cut(pack: Packing) -> None:
    pack.begin(View(Terms("r", 1, word=7, ttl_s=60, readers=1), WHOLE, 1))
    pack.on(WasCut(pack.at), 0.0)


def test_wants_that_are_not_read_are_bounded_whatever_the_reader_says_that_there_is() -> None:
    """Its request may never be published: until then nobody knows how many chunks there are."""
    pack = opened((1 << 32) - 1)
    pack.on(Want(pack.at, want=tuple(range(UNREAD))), 0.0)
    assert pack.take() is None
    pack.on(Want(pack.at, want=(UNREAD,)), 0.0)
    assert problem_of(pack) == "malformed_pack" and not any(pack.sizes().values())


def test_chunks_that_were_read_do_not_count_as_wanted() -> None:
    pack = opened(2 * UNREAD)
    cut(pack)
    for chunk in range(2 * UNREAD):
        pack.on(Want(pack.at, want=(chunk,)), 0.0)
        pack.on(Gathered(pack.at, chunk), 0.0)
        told = pack.take()
        assert told is not None and told.chunks == (chunk,)
        pack.on(Want(pack.at, read=(chunk,)), 0.0)


# ---- what is done for it ----


async def test_a_large_table_is_bound_beside_the_loop(
    arena: Arena, readers: Readers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aio, "FEW", 0)
    reader = readers(arena)
    reader.wants([0])
    await reader.has(1)


async def test_what_was_packed_stays_for_a_while_whatever_becomes_of_the_stream(
    arena: Arena, readers: Readers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "KEPT_S", 0.2)
    now, give_back, given_back = asyncio.get_running_loop().time, arena.give_back, list[float]()

    def noted(slot: Slot, *quiet: asyncio.Future[None]) -> None:
        given_back.append(now())
        give_back(slot, *quiet)

    monkeypatch.setattr(arena, "give_back", noted)
    began, reader = now(), readers(arena)
    reader.wants([0])
    await reader.has(1)
    assert reader.packed[0].kept_ms == 200
    await reader.goes()
    engine = first_of()
    engine.arena = arena
    await engine.close()
    (at,) = given_back
    assert at - began >= 0.2
    assert now() - began >= 0.2, "nor does its memory go"


async def test_a_packing_that_waits_for_a_slot_waits_no_longer_when_it_ends(arena: Arena, readers: Readers) -> None:
    lent = [await arena.take(Use.PACKED) for _ in range(arena.most)]
    one, other = readers(arena), readers(arena)
    for reader in (one, other):
        reader.wants([0])
        await reader.is_heard()
    assert arena.waiting == 2
    await one.goes()
    arena.give_back(lent.pop())
    await other.has(1)
    assert (one.packed, arena.waiting) == ([], 0)
    await other.goes()
    for slot in lent:
        arena.give_back(slot)
    assert arena.used_nbytes == 0


async def test_a_slot_that_is_gathered_into_comes_back_only_when_that_has_ended(readers: Readers) -> None:
    gate = Gate()
    arena = Arena(Memory(), HostCopies(gate.copy))  # type: ignore[arg-type]
    reader = readers(arena)
    reader.wants([0])
    await asyncio.to_thread(gate.begun.wait, 60)
    await reader.goes()
    assert arena.used_nbytes == arena.slot_nbytes
    gate.let_go.set()
    async with asyncio.timeout(60):
        slots = [await arena.take(Use.PACKED) for _ in range(arena.most)]
    assert (len(slots), reader.packed) == (arena.most, [])
    await arena.close()


async def test_a_gather_that_breaks_is_told_to_the_reader(readers: Readers) -> None:
    def breaks(batches: object) -> None:
        raise ValueError

    arena = Arena(Memory(), HostCopies(breaks))  # type: ignore[arg-type]
    reader = readers(arena)
    reader.wants([0])
    assert await reader.refused() == "copy_failed"
    assert arena.used_nbytes == 0
    await arena.close()


async def test_a_copy_that_cannot_begin_ends_the_packing_with_a_reason(
    readers: Readers, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No thread can be started: nobody else would see an error of a callback."""

    def start(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(arena.copies, "start", start)
    reader = readers(arena)
    reader.wants([0])
    assert await reader.refused() == "internal"
    assert not arena.used_nbytes


@pytest.mark.parametrize(
    ("code", "change"),
    [
        ("lease_changed", {"word": 1}), ("unknown_pairing", {"pairing": "another"}), ("lease_version", {"version": 9}),
        ("malformed_pack", {"chunk_nbytes": 1 << 30}), ("malformed_pack", {"chunk_nbytes": 1}),
        ("malformed_pack", {"tables": {str(group): peer_pb2.TableShape() for group in range(1 + MOST["groups"])}}),
        ("cut_differs", {"chunks": 7}), ("cut_differs", {"nbytes": 2}),
        ("tokens_unpublished", {"tokens": layout_pb2.TokenRange(start=0, stop=1000)}),
        ("malformed_tables", {"tokens": layout_pb2.TokenRange(start=9, stop=1)}),
    ],
)  # fmt: skip
async def test_chunks_that_cannot_be_cut_as_the_reader_has_are_refused(
    readers: Readers, arena: Arena, code: str, change: dict[str, Any]
) -> None:
    reader = readers(arena, **change)
    reader.wants([0])
    assert await reader.refused() == code
    assert not arena.used_nbytes and not arena.waiting


# ---- the plans of readers ----


async def test_a_plan_is_made_once_for_all_that_ask_for_it_at_once() -> None:
    pairings = Pairings()
    asking = (pairings.add("first", SOURCE, [SOURCE], READER) for _ in range(8))
    (first,) = set(await asyncio.gather(*asking))
    assert pairings.get("first") is first and not pairings._making


async def test_the_plans_that_are_kept_are_bounded() -> None:
    pairings = Pairings()
    for n in range(PAIRINGS + 1):
        await pairings.add(f"{n}", SOURCE, [SOURCE], READER)
    assert len(pairings) == PAIRINGS
    with refused("unknown_pairing"):
        pairings.get("0")


def test_a_pairing_is_named_by_all_but_whose_engine_it_is() -> None:
    def named(reader: Manifest) -> str:
        sources = [manifest_to_proto(SOURCE)]
        return pairing_of(peer_pb2.PairRequest(sources=sources, destination=manifest_to_proto(reader)))

    one = cache(*attention(), engine="decode")
    assert named(one) == named(one.of_engine("another", "in another epoch"))
    assert len({named(each) for each in (one, cache(*attention(dim=64)), cache(*attention(), rank=1, of=2))}) == 3


async def test_a_reader_that_sees_another_cache_than_there_is_is_refused() -> None:
    other = cache(*attention(dim=64, block=9))
    for sources in ([other], [], [SOURCE, SOURCE]):
        with refused("protocol"):
            await Pairings().add("", SOURCE, sources, READER)
    with pytest.raises(PlanRefused):
        await Pairings().add("", SOURCE, [SOURCE], cache(*attention(layers=[7]), engine="decode"))


async def test_a_packing_gets_no_chunks_of_one_that_had_its_numbers_before(
    arena: Arena, chunks: list[Chunk], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is cut on a thread, and ends meanwhile; the reader gives its numbers to the next."""
    cuts: list[asyncio.Future[list[Chunk]]] = [asyncio.get_running_loop().create_future() for _ in range(2)]
    waiting, told, pairings = iter(cuts), list[Any](), Pairings()
    monkeypatch.setattr(gather, "beside", lambda rows, work: next(waiting))
    await pairings.add("a plan", SOURCE, [SOURCE], READER)
    opening = wanting(TABLES, (0, 16), states=True, chunk_nbytes=CHUNK)
    opening.MergeFrom(peer_pb2.PackOpen(request_id="r", version=1, pairing="a plan", word=7))
    begin = Cut(At(Reading(1, 1), 1), opening, View(Terms("r", 1, word=7, ttl_s=60, readers=1), WHOLE, 1))
    leases = Leases("prefill", "1", lambda lease: None, 4)
    monkeypatch.setattr(leases, "pack", told.append)
    stream = ServedStream(
        leases, ReaderId("decode", "1", 0, 1), Gatherer(SOURCE, {}, arena, pairings), asyncio.Event(), announcing=False
    )
    for effect in (begin, Forget(begin.at), begin):
        stream.pack(effect)
    cuts[0].set_result(chunks[:1])
    await asyncio.sleep(0)
    assert told == []
    cuts[1].set_result(chunks)
    await asyncio.sleep(0)
    assert told == [WasCut(begin.at)]
    assert stream._packers[1]._chunks == chunks


@pytest.mark.parametrize("layers", [1, 600], ids=["few copies", "many copies"])
async def test_a_few_blocks_of_many_copies_are_cut_beside_the_loop(
    layers: int, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers in regions of their own are copies of their own, as where an engine has brought its own tensors."""
    blocks, loops, cut = aio.FEW // 600 + 1, list[Any](), gather._cut

    def cutting(*about: Any) -> list[Chunk]:
        loops.append(asyncio._get_running_loop())
        return cut(*about)

    monkeypatch.setattr(gather, "_cut", cutting)
    source, reader = (
        cache(
            *(array(layer=each, region=each, block=blocks, slot=8, head=1, dim=4) for each in range(layers)),
            engine=engine,
        )
        for engine in ("prefill", "decode")
    )
    tables, tokens, pairings = {"full": BlockTable.of(np.arange(blocks))}, (0, 8 * blocks), Pairings()
    chunks = packs(share_of([source], reader, 0), 0, tables, wanting(tables, tokens, states=True, chunk_nbytes=CHUNK))
    opening = wanting(tables, tokens, states=True, chunk_nbytes=CHUNK, chunks=chunks)
    opening.MergeFrom(peer_pb2.PackOpen(request_id="r", version=1, pairing="a plan", word=7))
    share = await pairings.add("a plan", source, [source], reader)
    assert len(share.copies) == layers
    said: asyncio.Queue[Any] = asyncio.Queue()
    view = View(Terms("r", 1, word=7, ttl_s=60, readers=1), Publication(tables, tokens[1], b"", more=False), 1)
    at = At(Reading(1, 1), 1)
    Packer(Gatherer(source, {}, arena, pairings), at, said.put_nowait).do(Cut(at, opening, view))
    assert await asyncio.wait_for(said.get(), 60) == WasCut(at)
    assert loops == [asyncio.get_running_loop() if layers == 1 else None]


async def test_what_a_reader_has_given_up_meanwhile_is_not_cut(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a reader that opens packing after packing has the daemon's threads cut all of them."""
    let_go, cuts = threading.Event(), list[Any]()
    monkeypatch.setattr(aio, "FEW", 0)

    def cutting(*about: Any) -> list[Chunk]:
        cuts.append(about)
        return []

    monkeypatch.setattr(gather, "_cut", cutting)
    loop, alone = asyncio.get_running_loop(), ThreadPoolExecutor(1)
    loop.set_default_executor(alone)

    def hold() -> None:
        assert let_go.wait(60)

    holding = asyncio.create_task(asyncio.to_thread(hold))
    await asyncio.sleep(0)
    opening, pairings = wanting(TABLES, (0, 16), states=True, chunk_nbytes=CHUNK), Pairings()
    pairings._known["a plan"] = share_of([SOURCE], READER, 0)
    opening.MergeFrom(peer_pb2.PackOpen(request_id="r", version=1, pairing="a plan", word=7))
    said, view = list[Any](), View(Terms("r", 1, word=7, ttl_s=60, readers=1), WHOLE, 1)
    packers = [Packer(Gatherer(SOURCE, {}, arena, pairings), At(Reading(1, 1), at), said.append) for at in (1, 2)]
    for each in packers:
        each.do(Cut(each.at, opening, view))
    packers[0].do(Forget(packers[0].at))
    let_go.set()
    await holding
    await asyncio.to_thread(int)
    alone.shutdown()
    loop.set_default_executor(ThreadPoolExecutor())
    assert (len(cuts), said) == (1, [WasCut(packers[1].at)])
