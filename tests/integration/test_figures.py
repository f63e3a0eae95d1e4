"""The words on a slow rank, a late publish and a peer that stands still say what happened."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

import httpx
import pytest
from fleet import Daemons, logged, under_way, until
from lives import fences_of
from pair import prewarmed, waits_for
from ranks import STATE_NBYTES, TOKEN_NBYTES, Kv, Shape, TestEngine
from test_metrics_say import metrics

from kvferry.engine import Lease, TransferFailed
from kvferry.router import RouterClient
from kvferry.schemas import (
    Awaited,
    LeaseState,
    OrderBody,
    PeerRecord,
    PeerState,
    TransferRecord,
    TransferState,
)  # fmt: skip
from kvferryd.explain.outcome import outcome_text
from stopping import stopped

pytestmark = pytest.mark.anyio
TOKENS = 64
NBYTES = TOKENS * TOKEN_NBYTES + STATE_NBYTES
STATES = ("waiting", "connecting", "reading", "verifying")


@dataclass
class Scene:
    """A prefill of one rank, a decode of two, and REST to their daemons."""

    prefill: TestEngine
    decode: TestEngine
    source: RouterClient
    routers: list[RouterClient]

    async def publish(self, request_id: str, tokens: int = TOKENS, **more: bool) -> Lease:
        blocks = self.prefill.take(TOKENS)
        self.prefill.write(Kv.random(TOKENS), blocks)
        return (await self.prefill.publish(request_id, blocks, tokens, **more))[0]

    async def order(self, request_id: str, deadline_ms: int | None = None) -> str:
        body = OrderBody(request_id=request_id, source=self.prefill.source(), deadline_ms=deadline_ms)
        return (await self.routers[0].order(body)).transfer_id

    async def record(self, request_id: str) -> TransferRecord:
        """The record of all ranks: an engine is told of the end before the other rank's daemon has said so here."""
        (record,) = await self.routers[0].transfers(request_id)
        return await self.routers[0].wait(record.transfer_id)

    async def until_waits_for(self, request_id: str, awaited: Awaited) -> None:
        router = self.routers[0]
        await until(lambda: waits_for(router, request_id, awaited), f"{request_id} waits for the {awaited}")

    async def peer(self, rank: int = 0) -> PeerRecord:
        """The prefill's only rank, as this rank of decode knows it."""
        found = await self.routers[rank].neighbours()
        (peer,) = [each for each in (*found.peers, *found.lost) if each.engine_id == "slow-prefill"]
        return peer


@pytest.fixture(scope="module")
async def scene(shared_daemons: Daemons) -> AsyncIterator[Scene]:
    sources, readers = await asyncio.gather(
        shared_daemons.start("slow-p"), shared_daemons.start("slow-d", 2, "--slow-ms", "1")
    )
    prefill, decode = await asyncio.gather(
        TestEngine.start("slow-prefill", sources, Shape.tp(1)), TestEngine.start("slow-decode", readers, Shape.tp(2))
    )
    source, *routers = (RouterClient(daemon.url) for daemon in (*sources, *readers))
    await prewarmed(prefill, routers)
    yield Scene(prefill, decode, source, routers)
    await asyncio.gather(prefill.close(), decode.close(), source.close(), *(router.close() for router in routers))


def assert_waited(record: TransferRecord, what: Awaited, on: str, said: str) -> None:
    """This was its longest wait, and its sentence says so."""
    wait = record.waited_longest
    assert wait is not None, record
    assert (wait.what, wait.on) == (what, on), record
    assert said in record.why_slow
    assert outcome_text(record, {}).splitlines()[2] == record.why_slow


def adds_up(phases_ms: dict[str, float]) -> bool:
    parts = sum(phases_ms.get(f"waiting_{half}", 0.0) for half in ("order", "reservation", "publish"))
    total = sum(phases_ms[state] for state in STATES)
    return abs(parts - phases_ms["waiting"]) < 0.1 and abs(total - phases_ms["total"]) < 0.1


async def test_a_requests_time_and_rate_are_those_of_its_slowest_rank_which_is_named(
    scene: Scene, request_id: str
) -> None:
    await scene.publish(request_id)
    blocks = scene.decode.take(TOKENS)
    async with under_way(scene.decode.receive(request_id, blocks)) as receiving:
        for router in scene.routers:
            await until(lambda router=router: router.transfers(request_id), "the reservation is there")

        with stopped(scene.decode.daemons[1].process.pid):
            transfer_id = await scene.order(request_id)

            async def rank_0_is_done() -> bool:
                (record,) = await scene.routers[0].transfers(request_id)
                fast = record.ranks[0]
                if fast.state is not TransferState.DONE:
                    return False
                since_ms = 1e3 * (time.time() - record.created_at) - fast.phases_ms["total"]
                return since_ms > 4 * max(each.ms for each in fast.waits)

            await until(rank_0_is_done, "rank 0 is done, and rank 1 is waited for, longer than for anything before")
            half = await scene.routers[0].transfer(transfer_id)
            assert (half.slowest_rank, half.state, half.took_ms) == (1, TransferState.WAITING, None)
        await receiving
    record = await scene.routers[0].wait(transfer_id)
    fast, slow = record.ranks
    assert record.slowest_rank == 1
    assert_waited(record, Awaited.RANK, "rank 1", "for rank 1 of engine slow-decode -> ")
    assert record.took_ms == slow.took_ms
    assert slow.took_ms > fast.took_ms > 0  # type: ignore[operator]
    assert (record.phases_ms, record.bytes_per_s) == (slow.phases_ms, slow.bytes_per_s)
    assert record.bytes == fast.bytes + slow.bytes == NBYTES
    for share in record.ranks:
        assert share.bytes_per_s == pytest.approx(1e3 * share.bytes / share.phases_ms["moving"], rel=0.01)
        assert adds_up(share.phases_ms)


async def test_a_late_publish_is_booked_as_waiting_for_the_publish(scene: Scene, request_id: str) -> None:
    async with httpx.AsyncClient(base_url=scene.routers[0].url, trust_env=False) as http:
        waited = ("kvferry_transfer_phase_seconds_sum", (("path", "direct"), ("phase", "waiting_publish")))
        before = (await metrics(http)).get(waited, 0.0)
        receiving = scene.decode.receive(request_id, scene.decode.take(TOKENS), source=scene.prefill.source())
        async with under_way(receiving) as received:
            await scene.until_waits_for(request_id, Awaited.PUBLISH)
            began = time.monotonic()
            assert (await metrics(http))["kvferry_transfers_waiting", (("waits_for", "publish"),)] == 1
            assert (await scene.routers[0].totals()).waiting["publish"] == 1
            late_ms = 1e3 * (time.monotonic() - began)
            await scene.publish(request_id)
            await received
        record = await scene.record(request_id)
        said = await metrics(http)
    for share in record.ranks:
        assert share.phases_ms["waiting"] >= share.phases_ms["waiting_publish"]
        assert adds_up(share.phases_ms)
    assert record.ranks[0].phases_ms["waiting_publish"] >= late_ms
    assert_waited(record, Awaited.PUBLISH, scene.prefill.daemons[0].peer, "for engine slow-prefill at ")
    assert 1e3 * (said[waited] - before) == pytest.approx(record.ranks[0].phases_ms["waiting_publish"], abs=0.01)
    assert said["kvferry_transfers_waiting", (("waits_for", "publish"),)] == 0


async def test_a_fence_that_is_late_is_told_apart_from_a_publish_that_is(scene: Scene, request_id: str) -> None:
    """Its source answers at once that there is nothing to read yet, and does not stand still."""
    fences, blocks = await fences_of(scene.prefill.ranks[0]), scene.prefill.take(TOKENS)
    scene.prefill.write(Kv.random(TOKENS), blocks)
    fence = fences.take()
    await scene.prefill.publish(request_id, blocks, TOKENS, after=fence)
    receiving = scene.decode.receive(request_id, scene.decode.take(TOKENS), source=scene.prefill.source())
    async with under_way(receiving) as received:
        await scene.until_waits_for(request_id, Awaited.PUBLISH)
        fences.reach(fence)
        await received
    fences.close()
    record = await scene.record(request_id)
    assert_waited(record, Awaited.FENCE, scene.prefill.daemons[0].peer, "for the fence of engine slow-prefill at ")
    assert adds_up(record.phases_ms) and record.phases_ms["waiting_publish"] > 0


async def test_waits_between_the_chunks_of_a_prefill_are_waits_for_the_publish(scene: Scene, request_id: str) -> None:
    blocks = scene.prefill.take(TOKENS)
    await scene.prefill.publish(request_id, blocks, 32, more=True)
    receiving = scene.decode.receive(request_id, scene.decode.take(TOKENS), source=scene.prefill.source())
    async with under_way(receiving) as received:
        await scene.until_waits_for(request_id, Awaited.PUBLISH)
        (record,) = await scene.routers[0].transfers(request_id)
        assert record.state is TransferState.READING
        await scene.prefill.publish(request_id, blocks, TOKENS)
        await received
    record = await scene.routers[0].wait(
        record.transfer_id
    )  # the engine is told before the other rank's daemon says so
    assert record.phases_ms["waiting_publish"] > 0
    assert adds_up(record.phases_ms)


async def test_a_source_that_does_not_answer_the_opening_is_named(scene: Scene, request_id: str) -> None:
    source = scene.prefill.daemons[0]
    blocks = scene.prefill.take(TOKENS)
    scene.prefill.write(Kv.random(TOKENS), blocks)
    asked_at = round(time.time(), 3)
    with stopped(source.process.pid):
        receiving = scene.decode.receive(request_id, scene.decode.take(TOKENS), source=scene.prefill.source())
        async with under_way(receiving) as received:
            await scene.until_waits_for(request_id, Awaited.LEASE)
            began = time.monotonic()
            async with under_way(scene.prefill.publish(request_id, blocks, TOKENS)) as published:
                await scene.until_waits_for(request_id, Awaited.LEASE)
                silent_ms = 1e3 * (time.monotonic() - began)
                source.signal(signal.SIGCONT)  # it answers, and has the publish at once
                await published
            await received
    record = await scene.record(request_id)
    assert_waited(record, Awaited.LEASE, source.peer, f"for the daemon at {source.peer} to answer")
    assert record.waited_longest is not None
    assert record.waited_longest.ms >= silent_ms
    # Rank 1 may begin before rank 0, which dates the record.
    assert asked_at <= record.waited_longest.began_at <= (record.ended_at or 0)
    peers = [await scene.peer(rank) for rank in (0, 1)]
    assert max(peer.phases["lease"].worst_ms for peer in peers) >= record.waited_longest.ms
    assert all(peer.phases["lease"].p99_ms == peer.phases["lease"].worst_ms for peer in peers)
    assert all(peer.phases["moving"].worst_ms > 0 for peer in peers)


async def test_a_slow_transfer_is_a_warning_with_the_reason(scene: Scene, request_id: str) -> None:
    await scene.publish(request_id)
    await scene.decode.receive(request_id, scene.decode.take(TOKENS), source=scene.prefill.source())
    for line in await logged(scene.decode.daemons[0], "slow transfer"):
        assert line["level"] == "warning"
        assert line["took_ms"] > 1
        assert {"request_id", "transfer_id", "rank", "source", "why_slow", "left_out"} <= set(line)


@pytest.mark.parametrize("late", [Awaited.ORDER, Awaited.RESERVATION])
async def test_what_was_waited_for_is_told_apart(scene: Scene, request_id: str, late: Awaited) -> None:
    await scene.publish(request_id)
    if late is Awaited.RESERVATION:
        transfer_id = await scene.order(request_id)
    async with under_way(scene.decode.receive(request_id, scene.decode.take(TOKENS))) as received:
        if late is Awaited.ORDER:
            await scene.until_waits_for(request_id, late)
            transfer_id = await scene.order(request_id)
        await received
    record = await scene.routers[0].wait(transfer_id)
    phases_ms = record.ranks[0].phases_ms  # another rank may have got its order before or after
    assert phases_ms[f"waiting_{late}"] == phases_ms["waiting"] > 0
    (waited,) = [each for each in record.ranks[0].waits if each.what is late]
    assert waited.ms == pytest.approx(phases_ms["waiting"], abs=0.01)
    assert waited.on == ("router" if late is Awaited.ORDER else "slow-decode")


async def test_the_error_at_the_deadline_says_what_did_not_come(scene: Scene, request_id: str) -> None:
    decode, source, names = scene.decode, scene.prefill.source(), [f"{request_id}-{i}" for i in range(3)]
    for unordered in await decode.outcomes(names[0], decode.take(TOKENS), deadline_s=0.2):
        says(unordered, "while waiting for the router's order")
        assert isinstance(unordered, TransferFailed) and (unordered.code, unordered.blocks_safe) == ("deadline", True)
    unreserved = await scene.routers[0].wait(await scene.order(names[1], deadline_ms=200))
    assert unreserved.state is TransferState.FAILED and unreserved.error is not None
    assert (unreserved.error.code, unreserved.error.value) == ("deadline", "200")
    assert "while waiting for the engine's reservation: slow-decode reserved no blocks" in unreserved.error.message
    assert unreserved.phases_ms["waiting_reservation"] > 0
    unpublished = await decode.outcomes(names[2], decode.take(TOKENS), source=source, deadline_s=3.0)
    says(unpublished[0], "while waiting for the publish of engine slow-prefill: none came")
    assert "deadline" in {each.code for each in unpublished if isinstance(each, TransferFailed)}


async def test_a_prefill_that_stopped_publishing_fails_with_an_error_that_says_so(
    scene: Scene, request_id: str
) -> None:
    await scene.publish(request_id, 32, more=True)
    blocks = scene.decode.take(TOKENS)
    for outcome in await scene.decode.outcomes(request_id, blocks, source=scene.prefill.source(), deadline_s=3.0):
        says(outcome, "the publish of engine slow-prefill: 32 tokens came, and none in the last", "prefill goes on")
    await scene.prefill.ranks[0].client.abort(request_id)


def says(outcome: object, why: str, remedy: str = "") -> None:
    """It failed at the deadline for this reason, if not because another rank did."""
    assert isinstance(outcome, TransferFailed)
    if outcome.code != "rank_failed":
        assert outcome.code == "deadline"
        assert why in str(outcome)
        assert remedy in outcome.remedy


async def test_a_source_daemon_that_stands_still_is_told_from_a_late_publish_and_listed(
    scene: Scene, request_id: str
) -> None:
    await moved(scene, f"{request_id}-before")
    before = [await scene.peer(rank) for rank in range(2)]
    assert [(peer.state, peer.failures) for peer in before] == [(PeerState.CONNECTED, 0)] * 2
    address = scene.prefill.daemons[0].peer
    with stopped(scene.prefill.daemons[0].process.pid):
        outcomes = await scene.decode.outcomes(
            request_id, scene.decode.take(TOKENS), source=scene.prefill.source(), deadline_s=1.0
        )
        for outcome in outcomes:
            says(outcome, f"while waiting for {address} to say whether engine slow-prefill has published it")
        # The rank whose deadline passed first: the other has ended because of it.
        first = next(
            i for i, each in enumerate(outcomes) if isinstance(each, TransferFailed) and each.code == "deadline"
        )
        answered_at = before[first].last_contact_at
        assert answered_at is not None
        peer = await scene.peer(first)
        assert (peer.state, peer.last_contact_at) == (PeerState.FAILING, answered_at)
        assert peer.failures > 0
        assert peer.last_error is not None
        ready = await scene.routers[first].ready()
        assert ready.ready  # for other sources
        assert [warning for warning in ready.warnings if address in warning]

        async def lost() -> bool:
            error = (await scene.peer(first)).last_error
            return error is not None and error.code in ("peer_unreachable", "peer_lost")

        await until(lost, "gRPC has noticed that the source stands still")
    await moved(scene, f"{request_id}-after")
    peer = await scene.peer(first)
    assert (peer.state, peer.failures) == (PeerState.CONNECTED, 0)
    assert peer.last_contact_at is not None
    assert peer.last_contact_at > answered_at
    assert not (await scene.routers[first].ready()).warnings


async def moved(scene: Scene, request_id: str) -> TransferRecord:
    lease = await scene.publish(request_id)
    await scene.decode.receive(request_id, scene.decode.take(TOKENS), source=scene.prefill.source())
    assert await lease.ended() is LeaseState.RELEASED
    return await scene.record(request_id)


async def test_a_peer_shows_its_median_and_the_way_it_was_read(scene: Scene, request_id: str) -> None:
    await moved(scene, request_id)
    peer = await scene.peer()
    assert peer.path == "direct"
    assert peer.p50_ms is not None and peer.bytes_per_s is not None
    assert peer.p50_ms > 0
    assert peer.bytes_per_s > 0
    assert peer.transfers > 0


async def test_a_source_shows_what_it_serves_and_has_served(scene: Scene, request_id: str) -> None:
    async with httpx.AsyncClient(base_url=scene.source.url, trust_env=False) as http:
        before = await metrics(http)
        record = await moved(scene, request_id)
        lease = await scene.publish(f"{request_id}-revoked")
        await scene.source.revoke_lease(f"{request_id}-revoked")
        assert await lease.ended() is LeaseState.REVOKED
        after = await metrics(http)
    ended = {each.request_id: each for each in await scene.source.leases(ended=2)}
    read, revoked = ended[request_id], ended[f"{request_id}-revoked"]
    assert (read.state, read.bytes, revoked.state, revoked.bytes) == (
        LeaseState.RELEASED,
        NBYTES,
        LeaseState.REVOKED,
        0,
    )
    assert sorted((each.engine_id, each.rank, each.state) for each in read.readers) == [
        ("slow-decode", 0, "read"),
        ("slow-decode", 1, "read"),
    ]
    assert [each.bytes for each in read.readers] == [share.bytes for share in record.ranks]
    assert read.ended_at is not None
    assert read.age_ms == pytest.approx(1e3 * (read.ended_at - read.created_at), abs=1)
    assert "by DELETE /v1/leases" in revoked.reason

    inbound = (await scene.source.neighbours()).inbound
    assert {(each.source, each.engine_id, each.rank) for each in inbound} == {
        ("slow-prefill", "slow-decode", 0),
        ("slow-prefill", "slow-decode", 1),
    }
    assert all(
        each.bytes >= share.bytes
        for each, share in zip(sorted(inbound, key=lambda it: it.rank), record.ranks, strict=True)
    )

    served = ("kvferry_served_bytes_total", (("reader_engine", "slow-decode"),))
    assert after[served] - before.get(served, 0.0) == NBYTES
    for state in ("released", "revoked"):
        assert (
            after["kvferry_leases_ended_total", (("state", state),)]
            - before["kvferry_leases_ended_total", (("state", state),)]
            == 1
        )
        assert after["kvferry_leases", (("state", state),)] - before["kvferry_leases", (("state", state),)] == 1
    assert ("kvferry_leases_ended_total", (("state", "expired"),)) in after
    (line,) = await logged(scene.prefill.daemons[0], "lease ended", request_id)
    assert "released" in line.values() and f"slow-decode/1 read {record.ranks[1].bytes}" in str(line)


async def test_a_rank_that_stands_still_makes_the_others_unready(scene: Scene) -> None:
    async def readiness(rank: int, ready: bool, reason: str = "") -> None:
        async def so() -> bool:
            said = await scene.routers[rank].ready()
            return said.ready is ready and all(reason in each for each in said.reasons)

        await until(so, f"rank {rank} is {'' if ready else 'not '}ready {reason}")

    still = scene.decode.daemons[1]
    with stopped(still.process.pid):
        await readiness(0, False, "the daemons of ranks [1] have not joined, or have gone")
        await readiness(0, False, f"rank 1 was at {still.peer} until ")
    await readiness(0, True)
    with stopped(scene.decode.daemons[0].process.pid):
        await readiness(1, False, "the daemon that keeps its roster does not answer")
    await readiness(1, True)


async def test_who_asks_for_changes_gets_what_is_under_way_and_what_has_ended_since(
    scene: Scene, stack: AsyncExitStack, request_id: str
) -> None:
    router, names = scene.routers[0], [f"{request_id}-{i}" for i in range(3)]
    await moved(scene, names[0])
    first = await router.changes()
    assert first.whole
    assert names[0] in [record.request_id for record in first.transfers]
    assert (await router.changes(first.cursor)).transfers == []

    waiting = await scene.order(names[1])
    second = await router.changes(first.cursor)
    assert ([record.request_id for record in second.transfers], second.whole) == ([names[1]], False)
    await moved(scene, names[2])
    third = await router.changes(second.cursor)
    assert [record.request_id for record in third.transfers] == names[1:]
    assert third.transfers[1].ended_at is not None
    await router.abort_transfer(waiting)

    async def over() -> bool:
        return (await router.transfer(waiting)).ended_at is not None

    await until(over, "both ranks have ended")
    fourth = await router.changes(third.cursor)
    assert [(record.request_id, record.state) for record in fourth.transfers] == [(names[1], TransferState.ABORTED)]
    assert fourth.transfers[0] == await router.transfer(waiting)
    assert [record.request_id for record in await router.transfers(limit=1)] == [names[2]]
    strange = await router.changes("00000000-9999")
    assert strange.whole
    assert len(strange.transfers) >= 3
