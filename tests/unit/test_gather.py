"""The source's side of a staged transfer, without a daemon: what it holds for a reader, and for how long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
from caches import HND, attention, cache, table
from test_arena import Gate, Memory
from test_channels_of_ranks import first_of

from kvferry.errors import KvferryError
from kvferry.manifest import Manifest
from kvferry.protocol.lease import lease_ended
from kvferry.protocol.values import Publication, Terms, View
from kvferry.v1 import peer_pb2
from kvferry.wire import manifest_to_proto
from kvferryd import aio
from kvferryd.copy import Chunk
from kvferryd.leases import gather
from kvferryd.leases.gather import UNREAD, Gather, Gatherer
from kvferryd.plan import PlanRefused
from kvferryd.staging.arena import Arena, Use
from kvferryd.staging.copies import HostCopies
from kvferryd.staging.share import PAIRINGS, Pairings, packs, pairing_of, share_of, wanting

pytestmark = pytest.mark.anyio
CHUNK = 4096
SOURCE, READER = cache(*attention(dim=64)), cache(*attention(dim=64, order=HND), engine="decode")
TABLES = {"full": table(2, 0, 3, 1)}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "KEPT_S", 0.0)


@pytest.fixture
async def arena() -> AsyncIterator[Arena]:
    arena = Arena(Memory(), HostCopies())  # type: ignore[arg-type]
    yield arena
    await arena.close()


@pytest.fixture
def view() -> View:
    return View(Terms("r", 1, word=7, ttl_s=60, readers=1), Publication(TABLES, 16, b"", more=False), 1)


@pytest.fixture
def chunks() -> list[Chunk]:
    return packs(share_of([SOURCE], READER, 0), 0, TABLES, wanting(TABLES, (0, 16), states=True, chunk_nbytes=CHUNK))


class Reader:
    """One gather of the whole lease, and its replies."""

    def __init__(self, gatherer: Gatherer, opening: peer_pb2.PackOpen) -> None:
        self.gather = Gather(gatherer, 1, opening, self._on_pending)
        self.packed: list[peer_pb2.Packed] = []
        self.vouched = False
        self.problem = ""
        self._heard = asyncio.Event()

    def says(self, **said: object) -> None:
        self.gather.on_message(peer_pb2.Pack(**said))  # type: ignore[arg-type]

    def _on_pending(self) -> None:
        asyncio.get_running_loop().call_soon(self._take)  # as the stream does, when there is room

    def _take(self) -> None:
        said = self.gather.take()
        assert said is not None
        self.packed += said.packed
        self.vouched = self.vouched or said.vouched
        self.problem = said.problem.code
        self._heard.set()

    async def until(self, holds: Callable[[], object]) -> None:
        async with asyncio.timeout(60):
            while not holds():
                self._heard.clear()
                await self._heard.wait()

    async def has(self, chunks: int) -> None:
        await self.until(lambda: len(self.packed) >= chunks)

    async def refused(self) -> str:
        await self.until(lambda: self.problem)
        return self.problem


@pytest.fixture
def pool() -> np.ndarray:
    return np.zeros(SOURCE.regions[0].nbytes, dtype=np.uint8)


@pytest.fixture
async def readers(view: View, chunks: list[Chunk], pool: np.ndarray) -> Readers:
    """Of the lease, all of it; whose packing has not begun. What is named is changed in what they say."""
    pairings = Pairings()
    await pairings.add("a plan", SOURCE, [SOURCE], READER)
    opening = wanting(TABLES, (0, 16), states=True, chunk_nbytes=CHUNK)
    opening.MergeFrom(
        peer_pb2.PackOpen(
            word=view.terms.word,
            version=1,
            pairing="a plan",
            chunks=len(chunks),
            nbytes=sum(chunk.nbytes for chunk in chunks),
        )
    )

    def made(arena: Arena, **change: Any) -> Reader:
        said_instead = peer_pb2.PackOpen()
        said_instead.MergeFrom(opening)
        said_instead.MergeFrom(peer_pb2.PackOpen(**change))
        return Reader(Gatherer(SOURCE, {0: pool.ctypes.data}, arena, pairings), said_instead)

    return made


Readers = Callable[..., Reader]


@pytest.fixture
async def reader(readers: Readers, arena: Arena, view: View) -> Reader:
    reader = readers(arena)
    reader.gather.begin(view)
    return reader


async def test_a_slot_is_held_until_its_chunk_was_read(arena: Arena, reader: Reader, chunks: list[Chunk]) -> None:
    assert len(chunks) > 1
    reader.says(want=[0])
    await reader.has(1)
    assert reader.packed[0].nbytes == chunks[0].nbytes
    assert arena.used_nbytes == arena.slot_nbytes
    reader.says(read=[0])
    assert arena.used_nbytes == 0


async def test_what_is_wanted_before_the_lease_is_found_is_packed_then(
    arena: Arena, readers: Readers, view: View
) -> None:
    reader = readers(arena)
    reader.says(want=[0])
    reader.says(want=[1])
    assert arena.used_nbytes == 0
    reader.gather.begin(view)
    await reader.has(2)
    assert [packed.chunk for packed in reader.packed] == [0, 1]


async def test_wants_that_are_not_read_are_bounded_whatever_the_reader_says_that_there_is(
    arena: Arena, readers: Readers, view: View
) -> None:
    """Its request may never be published: until then nobody knows how many chunks there are."""
    within, beyond = readers(arena, chunks=(1 << 32) - 1), readers(arena, chunks=(1 << 32) - 1)
    within.says(want=range(UNREAD))
    beyond.says(want=range(UNREAD + 1))
    assert await beyond.refused() == "malformed_pack"
    within.gather.begin(view)
    assert await within.refused() == "cut_differs", "what is wanted within the bound waits for the lease"


async def test_chunks_that_were_read_do_not_count_as_wanted(
    reader: Reader, chunks: list[Chunk], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gather, "UNREAD", 1)
    for index in range(len(chunks)):
        reader.says(want=[index])
        await reader.has(index + 1)
        reader.says(read=[index])
    assert not reader.problem


async def test_a_large_table_is_bound_beside_the_loop(
    arena: Arena, readers: Readers, view: View, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aio, "FEW", 0)
    reader = readers(arena)
    reader.gather.begin(view)
    reader.says(want=[0])
    assert arena.used_nbytes == 0
    await reader.has(1)


async def test_what_was_packed_stays_for_a_while_whatever_becomes_of_the_stream(
    arena: Arena, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gather, "KEPT_S", 0.2)
    began = asyncio.get_running_loop().time()
    reader.says(want=[0])
    await reader.has(1)
    assert reader.packed[0].kept_ms == 200
    reader.gather.end()
    assert arena.used_nbytes == arena.slot_nbytes
    engine = first_of()
    engine.arena = arena
    await engine.close()
    assert asyncio.get_running_loop().time() - began >= 0.2, "nor does its memory go"


async def test_the_source_vouches_for_slots_that_were_read_late_but_not_after_its_arena_was_closed(
    arena: Arena, readers: Readers, view: View, chunks: list[Chunk]
) -> None:
    every = range(len(chunks))
    for closed in (False, True):
        reader = readers(arena)
        reader.gather.begin(view)
        for chunk in every:
            reader.says(want=[chunk], read=range(chunk - 1, chunk) if chunk else ())
            await reader.has(chunk + 1)
        if closed:
            await arena.close()
        reader.says(read=[every[-1]], vouch=True)
        await reader.until(lambda reader=reader: reader.vouched or reader.problem)
        assert (reader.vouched, reader.problem) == ((False, "arena_closed") if closed else (True, ""))


async def test_a_reader_that_holds_slots_and_says_nothing_loses_them(
    arena: Arena, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader.says(want=[0, 1])
    await reader.has(2)
    monkeypatch.setattr(gather, "IDLE_S", 0.05)
    reader.says()
    assert await reader.refused() == "deadline"
    assert arena.used_nbytes == 0


async def test_slots_are_back_when_the_reader_goes_without_a_word(arena: Arena, reader: Reader) -> None:
    reader.says(want=[0, 1])
    await reader.has(2)
    reader.gather.end()
    assert arena.used_nbytes == 0


async def test_a_packing_that_waits_for_a_slot_waits_no_longer_when_it_ends(
    arena: Arena, readers: Readers, view: View
) -> None:
    lent = [await arena.take(Use.PACKED) for _ in range(arena.most)]
    one, other = readers(arena), readers(arena)
    for reader in (one, other):
        reader.gather.begin(view)
        reader.says(want=[0])
    assert arena.waiting == 2
    one.gather.end()
    arena.give_back(lent.pop())
    await other.has(1)
    assert (one.packed, arena.waiting) == ([], 0)
    other.gather.end()
    for slot in lent:
        arena.give_back(slot)
    assert arena.used_nbytes == 0


async def test_nothing_is_packed_of_a_lease_that_has_ended(arena: Arena, reader: Reader) -> None:
    reader.gather.lease_over(lease_ended("r", "revoked"))
    reader.says(want=[0])
    assert await reader.refused() == "lease_ended"
    assert (reader.packed, arena.used_nbytes) == ([], 0)


@pytest.mark.parametrize("more", [False, True], ids=["all is packed", "one chunk is not"])
async def test_what_was_packed_while_the_lease_held_stays_good(
    arena: Arena, view: View, chunks: list[Chunk], readers: Readers, more: bool
) -> None:
    reader = readers(arena)
    wanted = range(len(chunks) - more)
    reader.gather.begin(view)
    reader.says(want=wanted)
    await reader.has(len(wanted))
    reader.gather.lease_over(lease_ended("r", "revoked"))
    if more:
        assert await reader.refused() == "lease_ended"
    else:
        reader.says(read=wanted, vouch=True)
        await reader.until(lambda: reader.vouched)
    assert arena.used_nbytes == 0


async def test_a_lease_that_ends_during_the_last_gather_is_not_packed(view: View, readers: Readers) -> None:
    gate = Gate()
    arena = Arena(Memory(), HostCopies(gate.copy))  # type: ignore[arg-type]
    reader = readers(arena)
    reader.gather.begin(view)
    reader.says(want=[0])
    await asyncio.to_thread(gate.begun.wait, 5)
    reader.gather.lease_over(lease_ended("r", "revoked"))
    gate.let_go.set()
    assert await reader.refused() == "lease_ended"
    await arena.close()
    assert (reader.packed, arena.used_nbytes) == ([], 0)


async def test_a_slot_that_is_gathered_into_comes_back_only_when_that_has_ended(view: View, readers: Readers) -> None:
    gate = Gate()
    arena = Arena(Memory(), HostCopies(gate.copy))  # type: ignore[arg-type]
    reader = readers(arena)
    reader.gather.begin(view)
    reader.says(want=[0])
    await asyncio.to_thread(gate.begun.wait, 5)
    reader.gather.end()
    assert arena.used_nbytes == arena.slot_nbytes
    gate.let_go.set()
    async with asyncio.timeout(60):
        slots = [await arena.take(Use.PACKED) for _ in range(arena.most)]
    assert (len(slots), reader.packed) == (arena.most, [])
    await arena.close()


async def test_a_gather_that_breaks_is_told_to_the_reader(view: View, readers: Readers) -> None:
    def breaks(batches: object) -> None:
        raise ValueError

    arena = Arena(Memory(), HostCopies(breaks))  # type: ignore[arg-type]
    reader = readers(arena)
    reader.gather.begin(view)
    reader.says(want=[0])
    assert await reader.refused() == "copy_failed"
    assert arena.used_nbytes == 0
    await arena.close()


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
    with pytest.raises(KvferryError) as caught:
        pairings.get("0")
    assert caught.value.code == "unknown_pairing"


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
        with pytest.raises(KvferryError) as caught:
            await Pairings().add("", SOURCE, sources, READER)
        assert caught.value.code == "protocol"
    with pytest.raises(PlanRefused):
        await Pairings().add("", SOURCE, [SOURCE], cache(*attention(layers=[7]), engine="decode"))


async def test_a_copy_that_cannot_begin_ends_the_gather_with_a_reason(
    readers: Readers, arena: Arena, view: View, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No thread can be started: nobody else would see an error of a callback."""

    def start(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(arena.copies, "start", start)
    reader = readers(arena)
    reader.gather.begin(view)
    reader.says(want=[0])
    assert await reader.refused() == "internal"
    assert not arena.used_nbytes
