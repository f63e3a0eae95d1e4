"""A member's way to keep its place in a roster, and what is left of that when its engine leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from alone import first_of, peer_served

from kvferry.protocol.roster_events import Member
from kvferry.v1 import peer_pb2, peer_pb2_grpc
from kvferryd.config import Config
from kvferryd.engine import Engine
from kvferryd.peers.channels import Channels
from kvferryd.peers.roster import Roster, Seed

pytestmark = pytest.mark.anyio
OWN = "127.0.0.1:7411"


class Seeding(peer_pb2_grpc.PeerServicer):
    """Lets the first joinings in, as many as it is told, and says nothing to those after them."""

    def __init__(self, let_in: int) -> None:
        self.let_in, self.open, self.called = let_in, 0, asyncio.Condition()
        self.joins = 0

    async def Join(self, request: Any, context: Any) -> AsyncIterator[peer_pb2.Roster]:
        self.joins += 1
        self.open += 1
        try:
            async with self.called:
                self.called.notify_all()
            if self.joins <= self.let_in:
                yield peer_pb2.Roster(members=[request.member])
            await asyncio.Event().wait()
        finally:
            self.open -= 1

    async def until(self, joins: int) -> None:
        async with self.called:
            await self.called.wait_for(lambda: self.joins >= joins)


@asynccontextmanager
async def a_roster(
    let_in: int, on_change: Callable[[Engine], None] = lambda engine: None, connect_timeout_s: float = 600.0
) -> AsyncGenerator[tuple[Roster, Engine, Seeding]]:
    seeding = Seeding(let_in)
    async with asyncio.timeout(60), peer_served(seeding) as address:
        config = Config(roster=address, advertise=OWN, connect_timeout_s=connect_timeout_s)
        channels = Channels(config)
        roster, engine = Roster(config, channels, Seed(), "instance", on_change), first_of("127.0.0.1:1")
        try:
            yield roster, engine, seeding
        finally:
            await roster.leave(engine)
            await channels.close()


def joinings() -> list[str]:
    names = (getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks())
    return [name for name in names if name == "_Place._join"]


async def test_no_joining_outlives_its_engine_that_leaves_during_a_renewal() -> None:
    joined = asyncio.Event()
    async with a_roster(let_in=1, on_change=lambda engine: joined.set()) as (roster, engine, seeding):
        roster.follow(engine)
        await joined.wait()
        roster.say_draining(True)
        await seeding.until(joins=2)
        assert len(joinings()) == 2
        await roster.leave(engine)
        assert joinings() == []


async def test_a_seed_that_takes_the_joining_and_says_nothing_is_asked_again_and_told_of() -> None:
    async with a_roster(let_in=0, connect_timeout_s=0.1) as (roster, engine, seeding):
        roster.follow(engine)
        await seeding.until(joins=2)
        assert "has not answered" in engine.roster.unseeded
        assert roster._channels.contact(roster._config.roster or "").failures


async def test_what_breaks_over_a_change_does_not_end_the_joining() -> None:
    changes, again = list[Engine](), asyncio.Event()

    def breaks_once(engine: Engine) -> None:
        changes.append(engine)
        if len(changes) == 1:
            raise RuntimeError("it breaks")
        again.set()

    async with a_roster(2, breaks_once) as (roster, engine, _):
        roster.follow(engine)
        await again.wait()
        assert len(changes) == 2 and engine.roster.members


@pytest.mark.parametrize("roster", [OWN, None])
async def test_any_daemon_may_keep_the_roster_of_all_ranks(roster: str | None) -> None:
    """The first one of `kvferry host` does, whatever the rank of its engine."""
    config, engine = Config(roster=roster, advertise=OWN), first_of("127.0.0.1:1", "127.0.0.1:2", rank=1)
    keeping = Roster(config, Channels(config), Seed(), "instance", lambda engine: None)
    engine.roster.know({1: Member(OWN)})
    assert "rank 1 finds no other: set it to one address for all ranks" in keeping.fault(engine)
    engine.roster.know({1: Member(OWN), 2: Member("127.0.0.1:2")})
    assert not keeping.fault(engine), "rank 0 has not come yet, and joins here as rank 2 did"
