"""Many requests of different names, one after another: what a daemon keeps of them stays within its bounds."""

from __future__ import annotations

import pytest
from bounds import OF_SEVERAL_RANKS, REMEMBERED, UNDER_WAY, Kept
from stepped import Daemon, manifest_of, stepping

from kvferry.protocol import events as e
from kvferry.protocol import leases, parts, requests
from kvferry.protocol.attempts import Attempt
from kvferry.protocol.values import ReaderId, Reading
from kvferry.tables import BlockTable
from kvferryd.aio import NOTED_S
from kvferryd.leases.leases import Leases
from kvferryd.transfers.order import Order, Reservation

SOURCE, READER = "127.0.0.1:7001", "127.0.0.1:7002"
REMEMBER = 4
TTL_S = 20.0
ENDS = ("own", "ordered", "aborted", "expired", "revoked", "lost", "early")


@pytest.mark.parametrize("way", ["direct", "staged"])
def test_what_is_kept_of_many_requests_is_bounded(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    monkeypatch.setattr(leases, "TOMBSTONES", REMEMBER)
    for each in (parts, requests):
        monkeypatch.setattr(each, "ATTEMPTS", REMEMBER)
    seen: set[str] = set()
    with stepping() as world:
        settings = {"way": way, "history": 4, "max_transfers": 8, "max_leases": 8}
        source = Daemon(world, SOURCE, manifest_of("prefill", heads=2), {0: SOURCE}, **settings)
        reader = Daemon(world, READER, manifest_of("decode", heads=2), {0: READER}, **settings)

        def check(*, at_rest: bool = False) -> None:
            for daemon in (source, reader):
                kept = Kept(daemon, others=1)
                seen.update(kept.sizes)
                assert not list(kept.too_many(at_rest=at_rest))

        def run() -> None:
            steps = 0
            while world.step(steps):
                steps += 1
                if steps % 10 == 2:
                    check()
            for daemon in (source, reader):
                while daemon.engine.session.events.pop() is not None:
                    """Engines take what they are told."""
            check()

        jobs = reader.ferry.jobs
        for number in range((REMEMBER + 2) * len(ENDS)):
            request_id, end, held = f"r-{number}", ENDS[number % len(ENDS)], source.engine.leases
            reservation, order = Reservation({"full": BlockTable.of([0, 1])}, None), Order("prefill", SOURCE)
            late = Order("prefill", SOURCE, deadline_s=TTL_S)
            match end:
                case "own" | "ordered" | "expired" | "revoked":
                    source.publish(request_id, range(2))
                case "lost":
                    world.loop.call(held.on, e.Lose(((request_id, 1), (f"{request_id} too", 1))))
                case "early":
                    world.loop.call(_closes_early, held, request_id)
            match end:
                case "own" | "lost":
                    reader.receive(request_id, 1, [0, 1], order)
                case "ordered":
                    reader.at(jobs.order, reader.engine, request_id, order, {0: reservation}, order_id=request_id)
                    reader.at(jobs.order, reader.engine, f"{request_id} waits", late, number=1 + number)
                case "aborted" | "early":
                    reader.receive(request_id, 1, [0, 1], order)
                    run()
                    reader.at(jobs.abort, reader.engine, request_id, "a test")
                    reader.at(
                        jobs.abort_attempt,
                        reader.engine,
                        f"{request_id} too",
                        Attempt(1 + number),
                        "a test",
                        failed=False,
                    )
                case "expired":
                    world.loop.pass_time(TTL_S + 1.0)
                case "revoked":
                    world.loop.call(held.revoke, request_id, "preempted")
            run()
        world.loop.pass_time(TTL_S + 2 * NOTED_S)
        run()
        world.loop.pass_time(TTL_S)
        check(at_rest=True)
    if way == "staged":  # has all that the other way has
        assert seen | OF_SEVERAL_RANKS == UNDER_WAY.keys() | REMEMBERED.keys(), "a row for what no daemon has"


def _closes_early(held: Leases, request_id: str) -> None:
    """A stranger closes it before its publish."""
    held.on(e.Connect(0, ReaderId("decode", "1", 0, 2)))
    held.on(e.Leave(Reading(0, 0), request_id, 1, complete=True))
    held.on(e.Disconnect(0))
