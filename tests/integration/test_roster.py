"""How the ranks of one engine find each other, and what readers and routers are told while they have not."""

from __future__ import annotations

import asyncio
import signal
from contextlib import AsyncExitStack

import pytest
from fleet import SPOKEN, Daemons, ended, logged, peer_stub, refusal, retired, until
from pair import Pair
from ranks import HND, Blocks, Rank, Shape, TestEngine, start_rank

from kvferry.engine import TransferFailed
from kvferry.router import DaemonError, RouterClient
from kvferry.schemas import OrderBody, PeerRequest, TransferState
from kvferry.v1 import peer_pb2
from kvferryd.demo.fleet import DaemonService
from stopping import stopped
from support import refused

pytestmark = pytest.mark.anyio
TP2 = Shape.tp(2, num_blocks=16)


@pytest.fixture(scope="module")
async def two(shared_daemons: Daemons) -> list[DaemonService]:
    return await shared_daemons.start("two", 2)


async def rank_of(stack: AsyncExitStack, engine_id: str, daemon: DaemonService, rank: int, epoch: str = "1") -> Rank:
    started = await start_rank(engine_id, daemon.socket, TP2, rank, epoch)
    stack.push_async_callback(started.client.close)
    return started


async def members(daemon: DaemonService, engine_id: str) -> dict[int, str]:
    async with RouterClient(daemon.url) as router:
        return next((each.members for each in await router.engines() if each.engine_id == engine_id), {})


async def test_every_rank_learns_of_all_ranks_from_the_seed(pair: Pair) -> None:
    for engine in (pair.prefill, pair.decode):
        everyone = {rank: daemon.peer for rank, daemon in enumerate(engine.daemons)}
        for daemon in engine.daemons:
            assert await members(daemon, engine.engine_id) == everyone


async def test_a_handshake_waits_for_a_rank_that_joins_late(
    pair: Pair, two: list[DaemonService], stack: AsyncExitStack
) -> None:
    first, second = two
    await rank_of(stack, "late", first, 0)
    shaking = asyncio.create_task(pair.routers[0].prewarm(PeerRequest(engine_id="late", address=first.peer)))
    await rank_of(stack, "late", second, 1)
    assert {(peer.rank, peer.address) for peer in await shaking} == {(0, first.peer), (1, second.peer)}
    assert await pair.routers[0].forget_peer("late")


async def test_a_handshake_names_the_ranks_that_are_missing(
    pair: Pair, two: list[DaemonService], stack: AsyncExitStack
) -> None:
    await rank_of(stack, "half", two[0], 0)
    with refused("roster_incomplete", DaemonError) as caught:
        await pair.routers[0].prewarm(PeerRequest(engine_id="half", address=two[0].peer))
    assert "ranks [1] of engine half" in caught.value.message
    async with RouterClient(two[0].url) as router:
        readiness = await router.ready()
    assert not readiness.ready
    assert "ranks [1]" in readiness.reasons[0]


async def test_rank_0_says_why_another_rank_is_not_there(
    daemons: Daemons, two: list[DaemonService], stack: AsyncExitStack
) -> None:
    first, second = two
    await retired(first, second)
    await rank_of(stack, "apart", first, 0, epoch="1")
    router = await stack.enter_async_context(RouterClient(first.url))

    async def says(why: str) -> None:
        async def so() -> bool:
            return any(why in reason for reason in (await router.ready()).reasons)

        await until(so, f"rank 0 says: {why}")

    await says("the daemons of ranks [1] have not joined")
    other = await start_rank("apart", second.socket, TP2, 1, "2")
    await says(f"rank 1 has joined from {second.peer} in epoch 2, and this one is in 1")
    await other.client.close()
    (stranger,) = await daemons.start("stranger", 1, "--advertise", "127.0.0.1:9", "--roster", first.peer)
    await rank_of(stack, "apart", stranger, 1, epoch="1")
    await says("rank 1 was not let in: nobody listens at 127.0.0.1:9: the connection was refused")


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ((), "roster is this daemon's own address, and rank 1 finds no other: set it to one address for all ranks"),
        (("--roster", "192.0.2.1:7411"), "roster: this daemon may not speak to 192.0.2.1:7411"),
    ],
)
async def test_a_roster_that_is_missing_or_forbidden_is_told_by_readyz_and_the_log(
    daemons: Daemons, two: list[DaemonService], stack: AsyncExitStack, flags: tuple[str, ...], why: str
) -> None:
    (daemon,) = await daemons.start("astray", 1, *flags) if flags else two[:1]
    await rank_of(stack, "astray", daemon, 1)
    async with RouterClient(daemon.url) as router:
        reasons = (await router.ready()).reasons
    assert any(reason.startswith(f"engine astray: {why}") for reason in reasons), reasons
    assert await logged(daemon, "roster is not whole yet")


@pytest.mark.parametrize("of", ["nobody", "silent"])
async def test_a_roster_that_cannot_be_joined_is_told_by_how_the_call_ended(
    daemons: Daemons, two: list[DaemonService], stack: AsyncExitStack, of: str
) -> None:
    """The calls of all doors end in the same words: unit/test_unreached.py."""
    roster, why = "127.0.0.1:9", "nobody listens at {}: the connection was refused"
    if of == "silent":
        (other,) = await daemons.start(of)
        roster, why = other.peer, "{} has not answered for "
        stack.enter_context(stopped(other.process.pid))
    (daemon,) = await daemons.start("misled", 1, "--roster", roster)
    await rank_of(stack, "misled", daemon, 1)
    router = await stack.enter_async_context(RouterClient(daemon.url))

    async def says_so() -> bool:
        return any(why.format(roster) in reason for reason in (await router.ready()).reasons)

    await until(says_so, f"/readyz says why {roster} is not joined")


async def test_an_order_for_an_engine_that_is_not_whole_fails_and_names_the_ranks(
    pair: Pair, two: list[DaemonService], stack: AsyncExitStack, request_id: str
) -> None:
    await retired(*two)
    rank = await rank_of(stack, "half-decode", two[0], 0)
    receiving = asyncio.create_task(rank.client.receive(request_id, Blocks((), None).tables(), attempt=1))
    async with RouterClient(two[0].url) as router:
        ordered = await router.order(OrderBody(request_id=request_id, source=pair.prefill.source()))
        record = await router.wait(ordered.transfer_id)
    assert record.state is TransferState.FAILED
    (missing,) = [share for share in record.ranks if share.rank == 1]
    assert missing.error
    assert missing.error.code == "roster_incomplete"
    assert "ranks [1]" in missing.error.message
    with pytest.raises(TransferFailed) as failed:
        await receiving
    # Its own part, which needs all ranks to shake hands, or the other's gives up first.
    assert failed.value.code in ("roster_incomplete", "rank_failed")


async def test_an_order_at_a_rank_that_has_no_rank_0_is_refused_and_names_it(
    pair: Pair, two: list[DaemonService], stack: AsyncExitStack, request_id: str
) -> None:
    await retired(*two)
    await rank_of(stack, "half-decode", two[1], 1)
    async with RouterClient(two[1].url) as router:
        with pytest.raises(DaemonError) as caught:
            await router.order(OrderBody(request_id=request_id, source=pair.prefill.source()))
        assert await router.transfers(request_id) == []
    assert caught.value.code == "roster_incomplete"
    assert "ranks [0]" in caught.value.message


async def test_two_engines_may_share_daemons_and_read_from_each_other(
    two: list[DaemonService], request_id: str
) -> None:
    await retired(two[0])
    one = await TestEngine.start("one", two, TP2)
    other = await TestEngine.start("other", two, Shape.tp(2, axes=HND, block_size=5, num_blocks=60))
    try:
        for source, reader in ((one, other), (other, one)):
            kv, blocks = source.filled(60)
            await source.publish(request_id, blocks, 60)
            await reader.gets(request_id, kv, source=source.source(1))
    finally:
        await one.close()
        await other.close()


async def test_a_rank_that_dies_leaves_and_the_next_start_is_whole_again(
    daemons: Daemons, two: list[DaemonService], stack: AsyncExitStack
) -> None:
    first, second = two[0], await daemons.start_rank("mortal", two[0])
    await rank_of(stack, "mortal", first, 0)
    await rank_of(stack, "mortal", second, 1)

    async def whole() -> bool:
        return len(await members(first, "mortal")) == 2

    async def alone() -> bool:
        return await members(first, "mortal") == {0: first.peer}

    await until(whole, "both ranks have joined")
    await stack.aclose()
    await retired(first, second)
    await rank_of(stack, "mortal", first, 0, epoch="2")
    await rank_of(stack, "mortal", second, 1, epoch="2")
    await until(whole, "both ranks have joined in the next epoch")
    second.signal(signal.SIGKILL)
    await until(alone, "the rank of the killed daemon has left")
    assert await ended(second, signal.SIGKILL) == -signal.SIGKILL


async def test_nobody_joins_with_an_address_that_may_not_be_dialled(two: list[DaemonService]) -> None:
    member = peer_pb2.Member(rank=0, address="192.0.2.1:7411", epoch="1")
    joining = peer_pb2.JoinRequest(**SPOKEN, engine_id="raw", member=member, world_size=3)
    async with peer_stub(two[0]) as stub:
        refused = await refusal(stub.Join(joining).read())
    assert refused.code == "address_not_allowed"
