"""Whole daemons in a world that takes one step at a time (stepwise.py), each with an engine that has registered."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np
import pytest
from caches import attention, cache
from stepwise import Process, World

from kvferry.manifest import Manifest
from kvferry.protocol.roster_events import Member
from kvferry.protocol.session_events import Rank
from kvferry.protocol.values import Publication
from kvferry.tables import BlockTable
from kvferry.v1 import engine_pb2
from kvferryd.api.callers import Callers
from kvferryd.api.peer import PeerService
from kvferryd.config import Config
from kvferryd.engine import Engine
from kvferryd.ferry import Ferry
from kvferryd.memory import Files
from kvferryd.observe.metrics import Metrics
from kvferryd.transfers.order import Order, Reservation
from kvferryd.transfers.transfer import Transfer

T = TypeVar("T")

BLOCKS, SLOTS, PIECE = 8, 2, 1024
"""Blocks of a cache, tokens of a block, bytes of a token and head in K or V."""
ARENA = 4 * 4096
KEY = b"k" * 32
"""The key of every engine's roster."""
METRICS = Metrics()


@contextlib.contextmanager
def stepping() -> Iterator[World]:
    """A world for one test."""
    world = World(ARENA)
    with pytest.MonkeyPatch.context() as patched:
        world.patch(patched)
        try:
            yield world
        finally:
            world.dispose()


class Daemon:
    """A daemon with its engine."""

    def __init__(self, world: World, address: str, manifest: Manifest, members: dict[int, str], **config: str) -> None:
        self.world, self.address = world, address
        self.memory = world.memory.take(manifest.regions[0].nbytes)
        self.memory[:] = np.random.default_rng(len(world.copies)).integers(0, 256, self.memory.size, dtype=np.uint8)
        self.process = world.processes[address] = Process(address)
        settings = Config(peer=address, **config)
        with world.within(self.process):
            self.ferry = Ferry(settings, METRICS)
            self.process.service = PeerService(self.ferry, Callers(settings.allow_peers, None))
            self.engine = world.loop.complete(self._registered(manifest))
        self.engine.roster.know({rank: Member(at) for rank, at in members.items()})
        self.engine.roster.key = KEY
        world.memory.keep(self.engine.leases.words._words)

    async def _registered(self, manifest: Manifest) -> Engine:
        registry = self.ferry.registry
        rank = Rank(manifest.engine_id, manifest.epoch, manifest.rank, manifest.world_size)
        session = await registry.attach(rank)
        self.ferry.memory.brought = self.memory  # type: ignore[attr-defined]
        await registry.adopt(session, engine_pb2.Memory(region=0, nbytes=self.memory.nbytes), Files())
        return await registry.register(session, manifest)

    def at(self, function: Callable[..., T], *args: Any, **more: Any) -> T:
        """Call in this process, then run until idle."""
        with self.world.within(self.process):
            return self.world.loop.call(function, *args, **more)

    def receive(
        self, request_id: str, attempt: int, blocks: Iterable[int], order: Order | None,
        tokens: tuple[int, int] | None = None,
    ) -> Transfer:  # fmt: skip
        """Reserve these blocks. order: where the engine names the source."""
        reservation = Reservation({"full": BlockTable.of([*blocks])}, tokens)
        return self.at(self.ferry.jobs.receive, self.engine, request_id, attempt, reservation, order, None)

    def publish(self, request_id: str, blocks: range, digest: bytes = b"", *, number: int = 0) -> None:
        """number: of the lease; 0 for the next one."""
        said = Publication({"full": BlockTable.of(list(blocks))}, SLOTS * len(blocks), b"", more=False, digest=digest)
        leases = self.engine.leases
        number = number or leases.source.leases.newest(request_id) + 1
        self.world.loop.call(leases.publish, request_id, number, said, ttl_s=20.0, readers=1)

    def forget_pairings(self) -> None:
        self.engine.pairings._known.clear()


def manifest_of(engine: str, *, rank: int = 0, of: int = 1, heads: int) -> Manifest:
    """The manifest of one rank of an engine that has `heads` heads in all."""
    each = heads // of
    layout = attention(heads=each, start=rank * each, total=heads, dim=PIECE // 2, slot=SLOTS, block=BLOCKS)
    return cache(*layout, engine=engine, rank=rank, of=of)
