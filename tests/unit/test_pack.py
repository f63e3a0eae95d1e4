"""The source's side of a staged transfer, without a daemon: what it holds for a reader, and for how long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest
from caches import HND, attention, cache, table
from test_arena import Gate, Memory

from kvferry.errors import KvferryError
from kvferry.schemas import LeaseState
from kvferry.v1 import peer_pb2
from kvferryd.copy import Chunk
from kvferryd.plan import PlanRefused
from kvferryd.transfer import pack
from kvferryd.transfer.arena import Arena
from kvferryd.transfer.copies import HostCopies
from kvferryd.transfer.lease import Lease, Leases, ReaderId
from kvferryd.transfer.pack import PAIRINGS, Packer, Pairings
from kvferryd.transfer.share import Wanted, packs, shapes, share_of

pytestmark = pytest.mark.anyio
SOURCE, READER = cache(*attention(dim=8)), cache(*attention(dim=8, order=HND), engine="decode")
TABLES = {"full": table(2, 0, 3, 1)}
Request = peer_pb2.PackRequest


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "KEPT_S", 0.0)


@pytest.fixture
async def arena() -> AsyncIterator[Arena]:
    arena = Arena(Memory(), HostCopies())  # type: ignore[arg-type]
    yield arena
    await arena.close()


@pytest.fixture
async def leases() -> Leases:
    return Leases("prefill", "1", lambda lease: None, 8)


@pytest.fixture
async def lease(leases: Leases) -> Lease:
    return leases.publish("r", TABLES, 16, more=False, metadata=b"", ttl_s=60, readers=1)


@pytest.fixture
def chunks() -> list[Chunk]:
    return packs(share_of([SOURCE], READER, 0), 0, TABLES, Wanted((0, 16), True, shapes(TABLES)), 256)


class Reader:
    """Says what a test wants said, and keeps what it hears."""

    def __init__(self, *requests: Request) -> None:
        self.requests = requests
        self.packed: list[peer_pb2.Packed] = []
        self.heard = asyncio.Event()

    async def hear(self, packed: peer_pb2.Packed) -> None:
        self.packed.append(packed)
        self.heard.set()

    async def says(self, *, then_nothing: bool = False, until: asyncio.Event | None = None) -> AsyncIterator[Request]:
        for request in self.requests:
            yield request
        if then_nothing:
            await (until or asyncio.Event()).wait()


@pytest.fixture
def pool() -> np.ndarray:
    return np.zeros(SOURCE.regions[0].nbytes, dtype=np.uint8)


async def test_a_slot_is_held_until_its_chunk_was_read(
    arena: Arena, lease: Lease, chunks: list[Chunk], pool: np.ndarray
) -> None:
    assert len(chunks) > 1
    reader = Reader()
    packer = Packer(arena, lease, chunks, {0: pool.ctypes.data}, reader.hear)
    running = asyncio.create_task(packer.run(Request(want=[0]), reader.says(then_nothing=True)))
    await asyncio.wait_for(reader.heard.wait(), 5)
    assert reader.packed[0].nbytes == chunks[0].nbytes
    assert arena.used_nbytes == arena.slot_nbytes
    packer._hear(Request(read=[0]))
    assert arena.used_nbytes == 0
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_what_was_packed_stays_for_a_while_whatever_becomes_of_the_stream(
    arena: Arena, lease: Lease, chunks: list[Chunk], pool: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack, "KEPT_S", 0.2)
    began, reader = asyncio.get_running_loop().time(), Reader()
    packer = Packer(arena, lease, chunks, {0: pool.ctypes.data}, reader.hear)
    running = asyncio.create_task(packer.run(Request(want=[0]), reader.says(then_nothing=True)))
    await asyncio.wait_for(reader.heard.wait(), 5)
    assert reader.packed[0].kept_ms == 200
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert arena.used_nbytes == arena.slot_nbytes
    await arena.close()
    assert asyncio.get_running_loop().time() - began >= 0.2, "nor does its memory go"


async def test_a_stream_whose_arena_was_closed_does_not_end_in_peace(
    arena: Arena, lease: Lease, chunks: list[Chunk], pool: np.ndarray
) -> None:
    reader = Reader()
    packer = Packer(arena, lease, chunks, {0: pool.ctypes.data}, reader.hear)
    half_closed = asyncio.Event()
    running = asyncio.create_task(packer.run(Request(want=[0]), reader.says(then_nothing=True, until=half_closed)))
    await asyncio.wait_for(reader.heard.wait(), 5)
    await arena.close()
    packer._hear(Request(read=[0]))
    half_closed.set()
    with pytest.raises(KvferryError) as caught:
        await asyncio.wait_for(running, 5)
    assert caught.value.code == "arena_closed"


async def test_a_reader_that_holds_slots_and_says_nothing_loses_them(
    arena: Arena, lease: Lease, chunks: list[Chunk], pool: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack, "PATIENCE_S", 0.05)
    reader = Reader()
    packer = Packer(arena, lease, chunks, {0: pool.ctypes.data}, reader.hear)
    with pytest.raises(KvferryError) as caught:
        await asyncio.wait_for(packer.run(Request(want=[0, 1]), reader.says(then_nothing=True)), 5)
    assert caught.value.code == "deadline"
    assert len(reader.packed) == 2
    assert arena.used_nbytes == 0


async def test_slots_are_back_when_the_reader_goes_without_a_word(
    arena: Arena, lease: Lease, chunks: list[Chunk], pool: np.ndarray
) -> None:
    reader = Reader()
    await Packer(arena, lease, chunks, {0: pool.ctypes.data}, reader.hear).run(Request(want=[0, 1]), reader.says())
    assert [packed.chunk for packed in reader.packed] == [0, 1]
    assert arena.used_nbytes == 0


async def test_nothing_is_packed_of_a_lease_that_has_ended(
    arena: Arena, leases: Leases, lease: Lease, chunks: list[Chunk], pool: np.ndarray
) -> None:
    leases.revoke("r", "for a test")
    reader = Reader()
    with pytest.raises(KvferryError) as caught:
        await Packer(arena, lease, chunks, {0: pool.ctypes.data}, reader.hear).run(Request(want=[0]), reader.says())
    assert (caught.value.code, reader.packed, arena.used_nbytes) == ("lease_ended", [], 0)


@pytest.mark.parametrize("more", [False, True], ids=["all is packed", "one chunk is not"])
async def test_a_reader_counts_as_through_when_all_is_packed_before_it_has_read(
    arena: Arena, leases: Leases, lease: Lease, chunks: list[Chunk], pool: np.ndarray, more: bool
) -> None:
    few, reader, who = chunks[:3], Reader(), ReaderId("decode", "1", 0, 1)
    with leases.reading(lease, who):
        packer = Packer(arena, lease, few, {0: pool.ctypes.data}, reader.hear, lambda: leases.packed(lease, who))
        wanted = range(len(few) - more)
        running = asyncio.create_task(packer.run(Request(want=wanted), reader.says(then_nothing=True)))
        async with asyncio.timeout(5):
            while len(reader.packed) < len(wanted):
                reader.heard.clear()
                await reader.heard.wait()
        assert arena.used_nbytes == len(wanted) * arena.slot_nbytes, "what it has not read stays in its slots"
        assert lease.state is (LeaseState.PUBLISHED if more else LeaseState.RELEASED)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert arena.used_nbytes == 0


async def test_a_lease_that_ends_during_the_last_gather_is_not_packed(
    leases: Leases, lease: Lease, chunks: list[Chunk], pool: np.ndarray
) -> None:
    gate, reader, packed = Gate(), Reader(), []
    arena = Arena(Memory(), HostCopies(gate.copy))  # type: ignore[arg-type]
    packer = Packer(arena, lease, chunks[:1], {0: pool.ctypes.data}, reader.hear, lambda: packed.append(1))
    running = asyncio.create_task(packer.run(Request(want=[0]), reader.says(then_nothing=True)))
    await asyncio.to_thread(gate.begun.wait, 5)
    leases.revoke("r", "for a test")
    gate.let_go.set()
    with pytest.raises(KvferryError) as caught:
        await asyncio.wait_for(running, 5)
    assert (caught.value.code, reader.packed, packed, arena.used_nbytes) == ("lease_ended", [], [], 0)
    await arena.close()


async def test_pairings_are_named_alike_planned_once_and_bounded() -> None:
    pairings = Pairings()
    first = await pairings.add(SOURCE, [SOURCE], READER, b"first")
    assert await pairings.add(SOURCE, [SOURCE], READER, b"first") == first
    for n in range(PAIRINGS):
        await pairings.add(SOURCE, [SOURCE], READER, b"%d" % n)
    with pytest.raises(KvferryError) as caught:
        pairings.get(first)
    assert caught.value.code == "unknown_pairing"


async def test_a_reader_that_sees_another_cache_than_there_is_is_refused() -> None:
    other = cache(*attention(dim=8, block=9))
    for sources in ([other], [], [SOURCE, SOURCE]):
        with pytest.raises(KvferryError) as caught:
            await Pairings().add(SOURCE, sources, READER, b"")
        assert caught.value.code == "protocol"
    with pytest.raises(PlanRefused):
        await Pairings().add(SOURCE, [SOURCE], cache(*attention(layers=[7]), engine="decode"), b"")
