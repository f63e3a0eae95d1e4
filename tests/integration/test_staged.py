"""Staged transfers between real daemons, whose arenas are so small that every transfer takes many chunks."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from fleet import Daemons, logged, until
from hog import hog
from pair import MANY, TOKENS, Pair, prefilled, waits_for, waits_longest
from ranks import HND, STATE_NBYTES, TOKEN_NBYTES, Kv, Shape, TestEngine
from slots import Outcomes, failed, gauge, idle, reading

from kvferry.router import RouterClient
from kvferry.schemas import Awaited, LeaseState, TransferState
from kvferryd.paths.move import ARENA

pytestmark = pytest.mark.anyio
FLAGS = ("--way", "staged", "--arena-mb", "1")
"""Four slots of 256 KiB, of which one direction may have three."""
PREFILL = Shape.tp(2, block_size=16, num_blocks=640)
DECODE = Shape.tp(3, axes=HND, block_size=24, num_blocks=480)


@pytest.fixture(scope="module")
async def staged(shared_daemons: Daemons) -> AsyncIterator[Pair]:
    prefill_daemons, decode_daemons = await asyncio.gather(
        shared_daemons.start("staged-p", 2, *FLAGS), shared_daemons.start("staged-d", 3, *FLAGS)
    )
    prefill, decode = await asyncio.gather(
        TestEngine.start("staged-prefill", prefill_daemons, PREFILL),
        TestEngine.start("staged-decode", decode_daemons, DECODE),
    )
    routers = [RouterClient(daemon.url) for daemon in (*decode_daemons, *prefill_daemons)]
    yield Pair(prefill, decode, routers[:3], routers[3:])
    await asyncio.gather(prefill.close(), decode.close(), *(router.close() for router in routers))


@pytest.fixture(autouse=True)
async def all_slots_are_back(staged: Pair) -> AsyncIterator[None]:
    yield
    await idle(staged.daemons)


async def moves(
    source: TestEngine, reader: TestEngine, router: RouterClient, request_id: str, tokens: int, *, behind: str = ""
) -> str:
    """Publish, receive, compare every byte; the way it went. behind: a request that is published and read in between:
    its lease comes by the same stream, behind the announcement of the other one."""
    kv, published = source.filled(tokens)
    leases = await source.publish(request_id, published, tokens, metadata=b"first")
    if behind:
        await moves(source, reader, router, behind, 1)
    received = await reader.gets(request_id, kv, source=source.source())
    assert [each.metadata for each in received] == [b"first"] * len(received)
    assert sum(each.nbytes for each in received) == tokens * TOKEN_NBYTES + STATE_NBYTES
    assert [await lease.ended() for lease in leases] == [LeaseState.RELEASED] * len(leases)
    (known,) = await router.transfers(request_id)
    record = await router.wait(known.transfer_id)
    assert record.state is TransferState.DONE
    return record.path


@pytest.mark.parametrize("tokens", [1, TOKENS, MANY])
async def test_every_byte_arrives_and_nothing_else_is_touched(staged: Pair, request_id: str, tokens: int) -> None:
    assert await moves(staged.prefill, staged.decode, staged.routers[0], request_id, tokens) == "staged"


async def test_what_was_packed_counts_as_served(staged: Pair, request_id: str) -> None:
    await moves(staged.prefill, staged.decode, staged.routers[0], request_id, TOKENS)
    leases = [lease for router in staged.prefill_routers for lease in await router.leases(ended=1)]
    assert [lease.request_id for lease in leases] == [request_id] * 2
    assert sum(lease.bytes for lease in leases) == TOKENS * TOKEN_NBYTES + STATE_NBYTES


async def test_a_reader_follows_a_prefill_chunk_by_chunk_and_the_state_comes_last(
    staged: Pair, request_id: str
) -> None:
    kv, blocks, source = Kv.random(MANY), staged.decode.take(MANY), staged.prefill.take(MANY)
    expected = staged.decode.snapshot()
    receiving = asyncio.create_task(staged.decode.receive(request_id, blocks, source=staged.prefill.source()))
    for start, stop in [(0, 50), (50, 51), (51, 3001), (3001, MANY)]:
        last = stop == MANY
        staged.prefill.write(kv, source, (start, stop), state=last)
        await staged.prefill.publish(request_id, source, stop, more=not last)
        staged.decode.write_into(expected, kv, blocks, (start, stop), state=last)

        async def arrived() -> bool:
            return not staged.decode.differences(expected)

        await until(arrived, f"tokens {start} to {stop} arrive")
    assert [each.tokens for each in await receiving] == [(0, MANY)] * 3


async def test_blocks_that_were_packed_for_a_reader_that_fails_are_packed_again_for_the_next(
    staged: Pair, request_id: str
) -> None:
    own = staged.decode.ranks[0].manifest
    async with hog(staged.prefill, own, request_id, 100) as slow:
        async with slow.holding(slow.opening.chunks):
            assert request_id in {lease.request_id for lease in await staged.prefill_routers[0].leases()}
        received = await staged.decode.receive(request_id, staged.decode.take(100), source=staged.prefill.source())
    assert [each.tokens for each in received] == [(0, 100)] * 3


@pytest.mark.parametrize(("first_token", "start"), [(24, 37), (168, 199), (0, 0)])
async def test_a_prefix_that_is_cached_is_not_touched(
    staged: Pair, request_id: str, first_token: int, start: int
) -> None:
    kv, _ = await prefilled(staged, request_id)
    blocks = staged.decode.take(TOKENS, first_token)
    await staged.decode.gets(request_id, kv, blocks, (start, TOKENS), source=staged.prefill.source())


async def test_sixteen_at_once_both_ways_share_a_few_slots(staged: Pair, request_id: str) -> None:
    there = [(staged.prefill, staged.decode, 600 - 20 * n, f"{request_id}-there-{n}") for n in range(8)]
    back = [(staged.decode, staged.prefill, 600 - 20 * n, f"{request_id}-back-{n}") for n in range(8)]
    written = []
    for source, reader, tokens, name in there + back:
        kv, published, reserved = Kv.random(tokens), source.take(tokens), reader.take(tokens)
        written.append((source, reader, kv, published, reserved, name))
        source.write(kv, published)
    expected = {id(engine): engine.snapshot() for engine in (staged.prefill, staged.decode)}
    for _, reader, kv, _, reserved, _ in written:
        reader.write_into(expected[id(reader)], kv, reserved)
    async with asyncio.timeout(60):
        await asyncio.gather(
            *(source.publish(name, published, kv.tokens) for source, _, kv, published, _, name in written),
            *(
                reader.receive(name, reserved, source=source.source())
                for source, reader, _, _, reserved, name in written
            ),
        )
    for engine in (staged.prefill, staged.decode):
        assert not engine.differences(expected[id(engine)])


async def test_a_source_without_an_arena_is_read_directly(staged: Pair, pair: Pair, request_id: str) -> None:
    assert await moves(pair.prefill, staged.decode, staged.routers[0], request_id, TOKENS) == "direct"
    assert await moves(staged.prefill, pair.decode, pair.routers[0], f"{request_id}-2", TOKENS) == "direct"


async def test_transfers_wait_for_slots_that_a_slow_reader_holds_and_metrics_say_so(
    staged: Pair, request_id: str
) -> None:
    async with httpx.AsyncClient(trust_env=False) as http, hogged(staged, request_id):
        daemon = staged.prefill.daemons[0]
        assert await gauge(http, daemon, "kvferry_staging_used_bytes") == 3 << 18
        receiving = asyncio.create_task(moves_all(staged, f"{request_id}-waits"))

        async def queued() -> bool:
            return await gauge(http, daemon, "kvferry_queue_depth") > 0

        await until(queued, "the transfer queues at the source")
        assert not receiving.done()
    assert await receiving == "staged"


async def test_what_is_aborted_on_its_way_leaves_no_slot_taken_and_blocks_that_are_safe(
    staged: Pair, request_id: str
) -> None:
    async with hogged(staged, request_id):
        receiving = await stuck(staged, staged.prefill, f"{request_id}-stuck")
        await staged.routers[0].abort_request(f"{request_id}-stuck")
        await failed(receiving, {"aborted", "rank_failed"})
    await idle(staged.daemons)
    assert await moves_all(staged, f"{request_id}-good") == "staged"


async def test_a_source_that_is_killed_on_the_way_fails_the_transfer_and_takes_no_slot_with_it(
    staged: Pair, daemons: Daemons, request_id: str
) -> None:
    (daemon,) = await daemons.start("staged-mortal", 1, *FLAGS)
    mortal = await TestEngine.start("staged-mortal", [daemon], Shape.tp(1, num_blocks=640))
    assert await moves(mortal, staged.decode, staged.routers[0], f"{request_id}-good", TOKENS) == "staged"
    async with hog(mortal, staged.decode.ranks[0].manifest, request_id, MANY) as greedy, greedy.holding():
        receiving = await stuck(staged, mortal, f"{request_id}-stuck")
        daemon.signal(signal.SIGKILL)
        await failed(receiving, {"peer_unreachable", "peer_lost", "rpc_failed", "rank_failed", "aborted"})
    await idle(staged.daemons)


async def test_a_reader_that_is_killed_on_the_way_gives_the_sources_slots_back(
    staged: Pair, daemons: Daemons, request_id: str
) -> None:
    (daemon,) = await daemons.start("staged-victim", 1, *FLAGS)
    reader = await TestEngine.start("staged-victim", [daemon], Shape.tp(1, num_blocks=640))
    _, source = staged.prefill.filled(MANY)
    await staged.prefill.publish(request_id, source, MANY)
    receiving = asyncio.create_task(reader.outcomes(request_id, reader.take(MANY), source=staged.prefill.source()))
    async with RouterClient(daemon.url) as router:
        await reading(router, request_id)
    daemon.signal(signal.SIGKILL)
    await receiving
    await idle(staged.daemons)


@pytest.fixture(scope="module")
async def warm(shared_daemons: Daemons) -> AsyncIterator[tuple[TestEngine, TestEngine]]:
    """A source and a reader of one rank each, with the stream between them open: the source announces its leases."""
    far, near = await asyncio.gather(*(shared_daemons.start(f"staged-{side}", 1, *FLAGS) for side in ("far", "near")))
    source = await TestEngine.start("staged-far", far, Shape.tp(1, num_blocks=640))
    reader = await TestEngine.start("staged-near", near, Shape.tp(1, axes=HND, block_size=24, num_blocks=480))
    async with RouterClient(near[0].url) as router:
        assert await moves(source, reader, router, "warm-up", TOKENS) == "staged"
    yield source, reader
    await idle([*near, *far])
    await asyncio.gather(source.close(), reader.close())


async def test_announced_leases_are_packed_in_the_message_that_opens_them(
    warm: tuple[TestEngine, TestEngine], request_id: str
) -> None:
    (source, reader), names = warm, {f"{request_id}-{tokens}": tokens for tokens in (1, MANY)}
    async with RouterClient(reader.daemons[0].url) as router:
        for name, tokens in names.items():
            assert await moves(source, reader, router, name, tokens, behind=f"{name}-behind") == "staged"
    ended = [await logged(reader.daemons[0], "transfer ended", name) for name in ("warm-up", *names)]
    assert [line["announced"] for (line,) in ended] == [False, True, True]


@asynccontextmanager
async def hogged(pair: Pair, request_id: str) -> AsyncIterator[None]:
    """All that prefill's rank 0 can pack at once is packed, and nobody reads it."""
    own = pair.decode.ranks[0].manifest
    async with hog(pair.prefill, own, f"{request_id}-hog", TOKENS) as greedy, greedy.holding():
        yield


async def stuck(pair: Pair, source: TestEngine, request_id: str, **more: float) -> asyncio.Task[Outcomes]:
    """A transfer that reads and waits for a slot of the source."""
    _, published = source.filled(MANY)
    await source.publish(request_id, published, MANY)
    blocks = pair.decode.take(MANY)
    receiving = asyncio.create_task(pair.decode.outcomes(request_id, blocks, source=source.source(), **more))
    await reading(pair.routers[0], request_id)
    return receiving


async def test_a_full_arena_is_named_by_whom_it_keeps_waiting(
    staged: Pair, warm: tuple[TestEngine, TestEngine], request_id: str
) -> None:
    """A transfer waits for the source to pack, and has all slots of this side meanwhile: another waits for them."""
    names, other, router = [f"{request_id}-pack", f"{request_id}-slot"], warm[0], staged.routers[0]
    await moves(other, staged.decode, router, f"{request_id}-met", MANY)
    (met,) = await router.transfers(f"{request_id}-met")
    async with hogged(staged, request_id):
        packs = await stuck(staged, staged.prefill, names[0])
        await until(lambda: waits_for(router, names[0], Awaited.PACK), "a chunk of the source is awaited")
        slot = await stuck(staged, other, names[1])
        for name, awaited in zip(names, (Awaited.PACK, Awaited.SLOT), strict=True):
            await waits_longest(router, name, awaited, met.phases_ms["total"])
    await asyncio.gather(packs, slot)
    pack, own = [await router.wait((await router.transfers(name))[0].transfer_id) for name in names]
    assert own.state is pack.state is TransferState.DONE
    waited = [next(each for each in record.ranks if each.rank == 0).waits[0] for record in (pack, own)]
    assert [(each.what, each.on) for each in waited] == [
        (Awaited.PACK, staged.prefill.daemons[0].peer),
        (Awaited.SLOT, ARENA),
    ]


async def moves_all(pair: Pair, request_id: str) -> str:
    return await moves(pair.prefill, pair.decode, pair.routers[0], request_id, TOKENS)
