"""Messages about an attempt that is over arrive when the request is tried again: the new attempt goes on.

The rank that is late is played here, against rank 0 of the decode engine, with the key that the real one was given.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from fleet import Daemons, Tap, peer_stub, refusal, tap, until
from pair import MANY, TOKENS, Pair, all_wait, half_published, is_in, order, prefilled
from ranks import HND, Shape, TestEngine

from kvferry.engine import TransferFailed
from kvferry.router import RouterClient
from kvferry.schemas import TransferState
from kvferry.v1 import engine_pb2, layout_pb2, peer_pb2, peer_pb2_grpc

pytestmark = pytest.mark.anyio
KEY: list[bytes] = []
STALE = ("stale_attempt", "aborted")
"""`aborted` where rank 0 knows by then that the attempt has ended on another rank."""


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
async def rank_0(pair: Pair) -> AsyncIterator[peer_pb2_grpc.PeerAsyncStub]:
    async with peer_stub(pair.decode.daemons[0]) as stub:
        yield stub


@pytest.fixture(scope="module", autouse=True)
def key(pair: Pair, tapped: tuple[Tap, str]) -> Iterator[None]:
    KEY[:] = [tapped[0].roster_key()]
    yield
    KEY.clear()


def ordered(pair: Pair, request_id: str, attempt: int) -> peer_pb2.OrderRequest:
    """As rank 1 would hand it on."""
    source = pair.prefill.source()
    return peer_pb2.OrderRequest(
        engine_id="decode",
        request_id=request_id,
        source=engine_pb2.Source(engine_id=source.engine_id, address=source.address),
        rank=1,
        attempt=attempt,
        counted=True,
        key=KEY[0],
    )


def ended(request_id: str, attempt: int) -> peer_pb2.AbortRequest:
    return peer_pb2.AbortRequest(
        engine_id="decode", request_id=request_id, rank=1, attempt=attempt, reason="late", key=KEY[0]
    )


async def first_attempt(pair: Pair, request_id: str, **more: Any) -> None:
    """It ends on all ranks before it is ordered, or before anything is published."""
    receiving = asyncio.create_task(pair.decode.outcomes(request_id, pair.decode.take(TOKENS), **more))
    state = TransferState.CONNECTING if more else TransferState.WAITING
    for router in pair.routers:
        await until(lambda router=router: is_in(router, request_id, state), "it waits")
    await asyncio.gather(*(rank.client.abort(request_id) for rank in pair.decode.ranks))
    await receiving


async def test_an_order_and_an_abort_of_the_attempt_before_leave_the_next_alone(
    pair: Pair, rank_0: peer_pb2_grpc.PeerAsyncStub, request_id: str
) -> None:
    await first_attempt(pair, request_id, source=pair.prefill.source())
    theirs = await half_published(pair, request_id)
    receiving = asyncio.create_task(
        pair.decode.receive(request_id, pair.decode.take(MANY), source=pair.prefill.source())
    )
    for router in pair.routers:
        await until(lambda router=router: is_in(router, request_id, TransferState.READING), "it reads")
    late = rank_0.Order(ordered(pair, request_id, 1))
    assert (await refusal(late.read())).code in STALE
    await rank_0.Abort(ended(request_id, 1))
    await pair.prefill.publish(request_id, theirs, MANY)
    assert [received.tokens for received in await receiving] == [(0, MANY)] * 2


@pytest.mark.parametrize("abort_first", [False, True])
async def test_a_reservation_made_anew_does_not_take_the_order_of_the_attempt_before(
    pair: Pair, rank_0: peer_pb2_grpc.PeerAsyncStub, request_id: str, abort_first: bool
) -> None:
    await first_attempt(pair, request_id)
    receiving = asyncio.create_task(pair.decode.receive(request_id, pair.decode.take(TOKENS)))
    await all_wait(pair, request_id)
    if abort_first:
        await rank_0.Abort(ended(request_id, 1))
    late = rank_0.Order(ordered(pair, request_id, 1))
    assert (await refusal(late.read())).code in STALE
    await rank_0.Abort(ended(request_id, 1))
    await prefilled(pair, request_id)
    await order(pair, request_id)
    assert [received.tokens for received in await receiving] == [(0, TOKENS)] * 2


async def test_a_rank_that_does_not_know_that_it_tries_again_is_heard_all_the_same(pair: Pair, request_id: str) -> None:
    """As one whose daemon has forgotten the first attempt, or was started anew."""
    tables, ranks = pair.decode.take(TOKENS).tables(), pair.decode.ranks
    first = asyncio.create_task(ranks[0].client.receive(request_id, tables))
    await until(lambda: is_in(pair.routers[0], request_id, TransferState.WAITING), "it waits")
    await ranks[0].client.abort(request_id)
    with pytest.raises(TransferFailed):
        await first
    receiving = [asyncio.create_task(rank.client.receive(request_id, tables)) for rank in ranks]
    await all_wait(pair, request_id)
    await prefilled(pair, request_id)
    await order(pair, request_id, rank=1)
    assert [received.tokens for received in await asyncio.gather(*receiving)] == [(0, TOKENS)] * 2


async def test_a_rank_that_tries_again_is_not_answered_with_an_attempt_it_had_no_part_in(
    pair: Pair, rank_0: peer_pb2_grpc.PeerAsyncStub, request_id: str
) -> None:
    """Its first order never came here."""
    await aborted_at_rank_0(pair, request_id)
    following = rank_0.Order(ordered(pair, request_id, 2))
    assert not TransferState((await following.read()).state).ended
    tables, source = pair.decode.take(TOKENS), pair.prefill.source()
    receiving = asyncio.create_task(pair.decode.receive(request_id, tables, source=source))
    await prefilled(pair, request_id)
    assert [received.tokens for received in await receiving] == [(0, TOKENS)] * 2
    following.cancel()


async def test_a_rank_whose_first_order_comes_after_the_end_hears_of_it(
    pair: Pair, rank_0: peer_pb2_grpc.PeerAsyncStub, request_id: str
) -> None:
    await aborted_at_rank_0(pair, request_id)
    share = await rank_0.Order(ordered(pair, request_id, 1)).read()
    assert (share.state, share.transfer_state) == ("aborted", layout_pb2.TRANSFER_STATE_ABORTED)


async def aborted_at_rank_0(pair: Pair, request_id: str) -> None:
    """An attempt that only rank 0 handed on."""
    client, tables = pair.decode.ranks[0].client, pair.decode.take(TOKENS).tables()
    receiving = asyncio.create_task(client.receive(request_id, tables, source=pair.prefill.source()))
    for router in pair.routers:
        await until(
            lambda router=router: is_in(router, request_id, TransferState.WAITING, TransferState.CONNECTING), "it waits"
        )
    await client.abort(request_id)
    with pytest.raises(TransferFailed):
        await receiving
    for router in pair.routers:
        await until(lambda router=router: is_in(router, request_id, TransferState.ABORTED), "all ranks know of it")
