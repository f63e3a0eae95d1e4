"""Many transfers at once between four engines of different shapes: none lost, none mixed up, nothing left behind."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass

import numpy as np
import pytest
from fleet import Daemons, open_files, owned_regions, resident_mb, until
from ranks import HND, STATE_NBYTES, TOKEN_NBYTES, Blocks, Kv, Shape, TestEngine

from kvferry.router import DaemonError, RouterClient
from kvferry.schemas import LeaseState, OrderBody, TransferState
from kvferryd.demo.fleet import DaemonService
from support import refused

pytestmark = pytest.mark.anyio
AT_ONCE = 64
SHAPES = {
    "prefill-a": Shape.tp(1, block_size=16, num_blocks=600),
    "prefill-b": Shape.tp(1, axes=HND, block_size=7, num_blocks=1400),
    "decode-a": Shape.tp(1, axes=HND, block_size=24, num_blocks=400),
    "decode-b": Shape.tp(1, axes=("head", "block", "slot", "dim"), block_size=5, num_blocks=1900),
}
TOLERATED_MB = 24
"""Memory that allocators keep of a round. A round moves and forgets far more."""


@dataclass
class Crowd:
    engines: dict[str, TestEngine]
    routers: dict[str, RouterClient]

    def regions(self) -> list[int]:
        return [owned_regions(daemon) for daemon in self.daemons]

    @property
    def daemons(self) -> list[DaemonService]:
        return [engine.daemons[0] for engine in self.engines.values()]


@pytest.fixture(scope="module")
async def crowd(shared_daemons: Daemons) -> AsyncIterator[Crowd]:
    flags = ("--history", "20", "--max-transfers", "64")
    started = await asyncio.gather(*(shared_daemons.start(name, 1, *flags) for name in SHAPES))
    engines = await asyncio.gather(
        *(TestEngine.start(name, own, shape) for (name, shape), own in zip(SHAPES.items(), started, strict=True))
    )
    routers = [RouterClient(own[0].url) for own in started]
    yield Crowd(dict(zip(SHAPES, engines, strict=True)), dict(zip(SHAPES, routers, strict=True)))
    await asyncio.gather(*(each.close() for each in (*engines, *routers)))


@dataclass
class Request:
    request_id: str
    source: TestEngine
    reader: TestEngine
    kv: Kv
    published: Blocks
    reserved: Blocks

    async def prefill(self) -> list[LeaseState]:
        """Some whole, some in two pieces."""
        half = self.kv.tokens // 2 if self.kv.tokens % 3 == 0 else 0
        self.source.write(self.kv, self.published, (0, half), state=False)
        if half:
            await self.source.publish(self.request_id, self.published, half, more=True)
        self.source.write(self.kv, self.published, (half, self.kv.tokens))
        metadata = self.request_id.encode()
        leases = await self.source.publish(self.request_id, self.published, self.kv.tokens, metadata=metadata)
        return [await lease.ended() for lease in leases]

    async def decode(self, router: RouterClient | None) -> None:
        if router is None:
            (received,) = await self.reader.receive(self.request_id, self.reserved, source=self.source.source())
        else:
            order = router.order(OrderBody(request_id=self.request_id, source=self.source.source()))
            (received,), _ = await asyncio.gather(self.reader.receive(self.request_id, self.reserved), order)
        assert received.metadata == self.request_id.encode()
        assert received.nbytes == self.kv.tokens * TOKEN_NBYTES + STATE_NBYTES


async def a_round(crowd: Crowd, name: str) -> None:
    """64 requests, every prefill engine to every decode engine, half ordered by REST, half by the engine."""
    rng = np.random.default_rng(11)
    expected = {name: engine.snapshot() for name, engine in crowd.engines.items() if "decode" in name}
    requests = []
    pairs = itertools.cycle(itertools.product(("prefill-a", "prefill-b"), ("decode-a", "decode-b")))
    for n, (source, reader) in zip(range(AT_ONCE), pairs, strict=False):
        kv = Kv.random(int(rng.integers(1, 260)))
        mine, theirs = crowd.engines[reader], crowd.engines[source]
        requests.append(Request(f"{name}-{n}", theirs, mine, kv, theirs.take(kv.tokens), mine.take(kv.tokens)))
        mine.write_into(expected[reader], kv, requests[-1].reserved)

    async with asyncio.timeout(60):
        ends = await asyncio.gather(
            *(request.prefill() for request in requests),
            *(
                request.decode(crowd.routers[request.reader.engine_id] if n // 4 % 2 else None)
                for n, request in enumerate(requests)
            ),
        )
    assert ends[:AT_ONCE] == [[LeaseState.RELEASED]] * AT_ONCE
    for reader, memories in expected.items():
        assert not crowd.engines[reader].differences(memories)


async def at_rest(crowd: Crowd) -> None:
    for router in crowd.routers.values():

        async def idle(router: RouterClient = router) -> bool:
            live = [record for record in await router.transfers() if not record.state.ended]
            return not live and not await router.leases()

        await until(idle, "the daemons come to rest")


async def test_sixty_four_transfers_at_once_arrive_whole_and_leave_nothing_behind(crowd: Crowd) -> None:
    await a_round(crowd, "warm-up")
    await at_rest(crowd)
    files = [open_files(daemon) for daemon in crowd.daemons]
    memory = [resident_mb(daemon) for daemon in crowd.daemons]
    regions = crowd.regions()

    async def as_before() -> bool:
        return all(open_files(daemon) <= before for daemon, before in zip(crowd.daemons, files, strict=True))

    await a_round(crowd, "round")
    await at_rest(crowd)
    await until(as_before, f"{files} open files again")
    assert crowd.regions() == regions
    grown = [resident_mb(daemon) - before for daemon, before in zip(crowd.daemons, memory, strict=True)]
    assert max(grown) < TOLERATED_MB, grown

    for name, router in crowd.routers.items():  # the history is bounded
        records = await router.transfers()
        assert all(record.state is TransferState.DONE for record in records)
        assert len(records) <= (20 if "decode" in name else 0)


async def test_more_orders_than_the_daemon_takes_are_told_to_come_again(crowd: Crowd) -> None:
    router, source = crowd.routers["decode-a"], crowd.engines["prefill-a"].source()
    *taken, one_more = (OrderBody(request_id=f"too-many-{n}", source=source) for n in range(65))
    for body in taken:
        await router.order(body)
    with refused("full", DaemonError, status=429, retry_after_s=1.0):
        await router.order(one_more)
    for body in taken:
        await router.abort_request(body.request_id)
    await at_rest(crowd)
