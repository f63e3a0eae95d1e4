"""How the ranks of one engine find each other: every rank's daemon joins at a seed and holds the stream open."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field

from kvferry.errors import Conflict, KvferryError
from kvferry.rpc import PROTOCOL_MAX, PROTOCOL_MIN
from kvferry.v1 import peer_pb2
from kvferryd import logs
from kvferryd.config import Config
from kvferryd.engine import Engine
from kvferryd.peers.channels import Channels

log = logs.get(__name__)
RETRY_S = (0.1, 2.0)
"""First and longest pause before joining again."""


@dataclass(frozen=True, slots=True, eq=False)
class _Member:
    """One joining: the same rank may join again from the same address."""

    address: str
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class Seed:
    """The seed's side: which ranks have joined, by (engine, epoch). A member is one as long as its stream is open."""

    def __init__(self) -> None:
        self._members: defaultdict[tuple[str, str], dict[int, _Member]] = defaultdict(dict)

    async def join(self, engine_id: str, epoch: str, rank: int, address: str) -> AsyncGenerator[dict[int, str]]:
        """The members now and after every change. Closing the iterator leaves."""
        members = self._members[engine_id, epoch]
        if rank in members and members[rank].address != address:
            raise Conflict(
                "rank_taken", f"rank {rank} of engine {engine_id} has joined from {members[rank].address}",
                field="rank", value=rank, remedy="give every rank its own daemon and number",
            )  # fmt: skip
        own = members[rank] = _Member(address)
        try:
            _wake(members)
            while True:
                own.changed.clear()
                yield {rank: member.address for rank, member in members.items()}
                await own.changed.wait()
        finally:
            if members.get(rank) is own:  # it may have joined again before this stream was seen to end
                del members[rank]
                if not members:
                    del self._members[engine_id, epoch]
                _wake(members)


def _wake(members: dict[int, _Member]) -> None:
    for member in members.values():
        member.changed.set()


class Roster:
    """The member's side: one task per engine of several ranks that keeps its members known, until `leave`."""

    def __init__(self, config: Config, channels: Channels, seed: Seed) -> None:
        self._config, self._channels, self.seed = config, channels, seed
        self._tasks: dict[Engine, asyncio.Task[None]] = {}

    def follow(self, engine: Engine) -> None:
        """Join, and set the engine's members as they change."""
        if engine.world_size > 1:
            self._tasks[engine] = asyncio.create_task(self._follow(engine), name=f"roster-{engine.engine_id}")

    async def _follow(self, engine: Engine) -> None:
        pause = RETRY_S[0]
        while not engine.session.retired.is_set():
            try:
                async for members in self._members(engine):
                    engine.set_members(members)
                    pause = RETRY_S[0]
            except KvferryError as error:
                log.warning("roster not joined", engine_id=engine.engine_id, seed=self._config.roster, error=str(error))
            await asyncio.sleep(pause)
            pause = min(2 * pause, RETRY_S[1])

    async def _members(self, engine: Engine) -> AsyncIterator[dict[int, str]]:
        seed, own = self._config.roster, self._config.advertise
        if seed is None or seed == own:
            async for members in self.seed.join(engine.engine_id, engine.epoch, engine.rank, own):
                yield members
            return
        member = peer_pb2.Member(rank=engine.rank, address=own, epoch=engine.epoch)
        request = peer_pb2.JoinRequest(
            protocol_min=PROTOCOL_MIN, protocol_max=PROTOCOL_MAX, engine_id=engine.engine_id, member=member,
            world_size=engine.world_size,
        )  # fmt: skip
        async with self._channels.calling(seed) as stub:
            async for roster in stub.Join(request):
                yield {member.rank: member.address for member in roster.members}

    async def leave(self, engine: Engine) -> None:
        task = self._tasks.pop(engine, None)
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
