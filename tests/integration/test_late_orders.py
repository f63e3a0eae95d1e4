"""Messages about an attempt that is over arrive when the request is tried again: the new attempt goes on.

The rank 0 that is late is played here, against rank 1 of the decode engine, with the key that the real one has given.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
from fleet import Daemons, Tap, peer_stub, refusal, tap, until
from pair import MANY, TOKENS, Pair, all_wait, half_published, is_in, order, prefilled
from ranks import HND, Shape, TestEngine

from kvferry.engine import TransferFailed
from kvferry.errors import KvferryError
from kvferry.router import RouterClient
from kvferry.schemas import Awaited, SourceBody, TransferState
from kvferry.v1 import engine_pb2, layout_pb2, peer_pb2, peer_pb2_grpc

pytestmark = pytest.mark.anyio
KEY: list[bytes] = []
OVER = ("stale_attempt", "aborted")
"""`aborted` where rank 1 knows by then that the attempt has ended on another rank."""


@pytest.fixture(scope="module")
async def tapped() -> AsyncIterator[tuple[Tap, str]]:
    async with tap() as tapped:
        yield tapped


@pytest.fixture(scope="module")
async def pair(shared_daemons: Daemons, tapped: tuple[Tap, str]) -> AsyncIterator[Pair]:
    """A pair of its own: what is said to rank 1 of the decode engine can be heard."""
    tapping, address = tapped
    (source,), (first,) = await shared_daemons.start("late-p"), await shared_daemons.start("late-d")
    second = await shared_daemons.start_rank("late-d-1", first, "--advertise", address)
    tapping.to = second.peer
    prefill = await TestEngine.start("prefill", [source], Shape.tp(1, num_blocks=320))
    decode = await TestEngine.start("decode", [first, second], Shape.tp(2, axes=HND, block_size=24, num_blocks=240))
    async with RouterClient(source.url) as theirs, RouterClient(first.url) as zero, RouterClient(second.url) as one:

        async def whole() -> bool:
            return (await one.ready()).ready and (await zero.ready()).ready

        await until(whole, "both ranks have joined")
        yield Pair(prefill, decode, [zero, one], [theirs])
    await asyncio.gather(prefill.close(), decode.close())


@pytest.fixture
async def rank_1(pair: Pair) -> AsyncIterator[peer_pb2_grpc.PeerAsyncStub]:
    async with peer_stub(pair.decode.daemons[1]) as stub:
        yield stub


@pytest.fixture(scope="module", autouse=True)
def key(pair: Pair, tapped: tuple[Tap, str]) -> Iterator[None]:
    KEY[:] = [tapped[0].roster_key()]
    yield
    KEY.clear()


def ordered(pair: Pair, request_id: str, attempt: int) -> peer_pb2.OrderRequest:
    """As rank 0 would hand it on."""
    source = pair.prefill.source()
    return peer_pb2.OrderRequest(
        engine_id="decode", request_id=request_id, attempt=peer_pb2.Attempt(number=attempt), key=KEY[0],
        source=engine_pb2.Source(engine_id=source.engine_id, address=source.address),
    )  # fmt: skip


def ended(request_id: str, attempt: int) -> peer_pb2.AbortRequest:
    numbered = peer_pb2.Attempt(number=attempt)
    return peer_pb2.AbortRequest(engine_id="decode", request_id=request_id, attempt=numbered, reason="late", key=KEY[0])


async def given_up(pair: Pair, request_id: str, source: SourceBody | None = None) -> int:
    """An attempt that ends on all ranks before it is ordered, or before anything is published; its number."""
    attempt, state = pair.decode.next_attempt(), TransferState.CONNECTING if source else TransferState.WAITING
    blocks = pair.decode.take(TOKENS)
    receiving = asyncio.create_task(pair.decode.outcomes(request_id, blocks, source=source, attempt=attempt))
    for router in pair.routers:
        await until(lambda router=router: is_in(router, request_id, state), "it waits")
    await asyncio.gather(*(rank.client.abort(request_id) for rank in pair.decode.ranks))
    await receiving
    return attempt


async def test_an_order_and_an_abort_of_the_attempt_before_leave_the_next_alone(
    pair: Pair, rank_1: peer_pb2_grpc.PeerAsyncStub, request_id: str
) -> None:
    before = await given_up(pair, request_id, pair.prefill.source())
    theirs = await half_published(pair, request_id)
    receiving = asyncio.create_task(
        pair.decode.receive(request_id, pair.decode.take(MANY), source=pair.prefill.source())
    )
    for router in pair.routers:
        await until(lambda router=router: is_in(router, request_id, TransferState.READING), "it reads")
    assert (await refusal(rank_1.Order([ordered(pair, request_id, before)]).read())).code in OVER
    assert (await rank_1.Abort(ended(request_id, before))).transfers_ended == 0
    await pair.prefill.publish(request_id, theirs, MANY)
    assert [received.tokens for received in await receiving] == [(0, MANY)] * 2


@pytest.mark.parametrize("abort_first", [False, True])
async def test_a_reservation_made_anew_does_not_take_the_order_of_the_attempt_before(
    pair: Pair, rank_1: peer_pb2_grpc.PeerAsyncStub, request_id: str, abort_first: bool
) -> None:
    before = await given_up(pair, request_id)
    receiving = asyncio.create_task(pair.decode.receive(request_id, pair.decode.take(TOKENS)))
    await all_wait(pair, request_id)
    if abort_first:
        await rank_1.Abort(ended(request_id, before))
    assert (await refusal(rank_1.Order([ordered(pair, request_id, before)]).read())).code in OVER
    assert (await rank_1.Abort(ended(request_id, before))).transfers_ended == 0
    await prefilled(pair, request_id)
    await order(pair, request_id)
    assert [received.tokens for received in await receiving] == [(0, TOKENS)] * 2


async def test_an_order_that_comes_before_its_reservation_waits_for_that_attempt(
    pair: Pair, rank_1: peer_pb2_grpc.PeerAsyncStub, request_id: str
) -> None:
    """It is not answered with the attempt that has ended here."""
    before = await given_up(pair, request_id)
    attempt = pair.decode.next_attempt()
    assert attempt > before
    following = rank_1.Order([ordered(pair, request_id, attempt)])
    assert (await following.read()).waits_for == Awaited.RESERVATION
    await prefilled(pair, request_id)
    tables, source = pair.decode.take(TOKENS), pair.prefill.source()
    received = await pair.decode.receive(request_id, tables, source=source, attempt=attempt)
    assert [each.tokens for each in received] == [(0, TOKENS)] * 2
    following.cancel()


async def test_a_rank_that_missed_an_attempt_takes_part_in_the_next(pair: Pair, request_id: str) -> None:
    """Rank 1 has not heard of the first one."""
    client, blocks = pair.decode.ranks[0].client, pair.decode.take(TOKENS)
    attempt = pair.decode.next_attempt()
    first = asyncio.create_task(client.receive(request_id, blocks.tables(), attempt=attempt))
    await until(lambda: is_in(pair.routers[0], request_id, TransferState.WAITING), "it waits")
    await client.abort(request_id)
    with pytest.raises(TransferFailed):
        await first
    receiving = asyncio.create_task(pair.decode.receive(request_id, blocks))
    await until(lambda: is_in(pair.routers[1], request_id, TransferState.WAITING), "the other rank has reserved")
    await prefilled(pair, request_id)
    await order(pair, request_id, rank=1)
    assert [received.tokens for received in await receiving] == [(0, TOKENS)] * 2


async def test_an_attempt_that_has_ended_elsewhere_does_not_begin_here_and_the_next_one_does(
    pair: Pair, rank_1: peer_pb2_grpc.PeerAsyncStub, request_id: str
) -> None:
    """Rank 0's end of it comes before rank 1's reservation and its order, which are told why."""
    attempt, blocks, source = pair.decode.next_attempt(), pair.decode.take(TOKENS), pair.prefill.source()
    assert (await rank_1.Abort(ended(request_id, attempt))).transfers_ended == 0
    with pytest.raises(KvferryError, match="has ended on another rank") as refused:
        await pair.decode.ranks[1].client.receive(request_id, blocks.tables(), source=source, attempt=attempt)
    assert refused.value.code == "aborted"
    assert (await refusal(rank_1.Order([ordered(pair, request_id, attempt)]).read())).code == "aborted"
    await prefilled(pair, request_id)
    received = await pair.decode.receive(request_id, blocks, source=source)
    assert [each.tokens for each in received] == [(0, TOKENS)] * 2


async def test_an_order_that_comes_again_after_the_end_moves_nothing(
    pair: Pair, rank_1: peer_pb2_grpc.PeerAsyncStub, request_id: str
) -> None:
    """It is answered with how its attempt has ended."""
    await prefilled(pair, request_id)
    attempt, blocks = pair.decode.next_attempt(), pair.decode.take(TOKENS)
    await pair.decode.receive(request_id, blocks, source=pair.prefill.source(), attempt=attempt)
    share = await rank_1.Order([ordered(pair, request_id, attempt)]).read()
    assert (share.rank, share.transfer_state) == (1, layout_pb2.TRANSFER_STATE_DONE)
    (record,) = await pair.routers[1].transfers(request_id)
    assert record.attempt == attempt
