"""Messages about an attempt that is over arrive when the request is tried again: the new attempt goes on.

The rank 0 that is late is played here, against rank 1 of the decode engine, with the key that the real one has given.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
from fleet import Daemons, Tap, peer_stub, refusal, tap, until
from pair import MANY, TOKENS, Pair, half_published, is_in, prefilled
from ranks import HND, Shape, TestEngine

from kvferry.errors import KvferryError
from kvferry.router import RouterClient
from kvferry.schemas import TransferState
from kvferry.v1 import engine_pb2, peer_pb2, peer_pb2_grpc

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


async def test_an_order_and_an_abort_of_the_attempt_before_leave_the_next_alone(
    pair: Pair, rank_1: peer_pb2_grpc.PeerAsyncStub, request_id: str
) -> None:
    before, source = pair.decode.next_attempt(), pair.prefill.source()
    receiving = asyncio.create_task(
        pair.decode.outcomes(request_id, pair.decode.take(TOKENS), source=source, attempt=before)
    )
    for router in pair.routers:
        await until(lambda router=router: is_in(router, request_id, TransferState.CONNECTING), "it waits")
    await asyncio.gather(*(rank.client.abort(request_id) for rank in pair.decode.ranks))
    await receiving
    theirs = await half_published(pair, request_id)
    receiving = asyncio.create_task(pair.decode.receive(request_id, pair.decode.take(MANY), source=source))
    for router in pair.routers:
        await until(lambda router=router: is_in(router, request_id, TransferState.READING), "it reads")
    assert (await refusal(rank_1.Order([ordered(pair, request_id, before)]).read())).code in OVER
    assert (await rank_1.Abort(ended(request_id, before))).transfers_ended == 0
    await pair.prefill.publish(request_id, theirs, MANY)
    assert [received.tokens for received in await receiving] == [(0, MANY)] * 2


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
