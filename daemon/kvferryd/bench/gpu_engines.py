"""The engines that a GPU benchmark moves KV between, and the daemons beside them: a set of readers for each way.

A rank's cache is a torch tensor of int32 words, on a GPU or, where the same program is rehearsed without one, in host
memory. All engines live in this process, all daemons in processes of their own.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvferry.engine import EngineClient
from kvferry.errors import Internal, KvferryError
from kvferry.memory import cuda, cuda_memory, memfd_region
from kvferry.schemas import SourceBody
from kvferryd.aio import together
from kvferryd.bench.gpu_cases import NHD, Cache, Model, Pair
from kvferryd.demo.fleet import DaemonService, Fleet, Service, ServiceError

CONNECT_S, READY_S = 10.0, 60.0
SOURCE, READER = "bench-source", "bench-reader"
SMALLEST = Cache(Model(1, "k", 1, 128), NHD, 64)


@dataclass(slots=True)
class Rank:
    """`pool`: the cache. `release`: gives the memory back once the client is closed."""

    client: EngineClient
    pool: Any
    release: Callable[[], None]


@dataclass(slots=True)
class Engine:
    """All ranks of one engine start. Close it."""

    engine_id: str
    daemons: Sequence[DaemonService]
    ranks: list[Rank] = field(default_factory=list)

    @classmethod
    async def open(
        cls,
        engine_id: str,
        daemons: Sequence[DaemonService],
        caches: Sequence[Cache],
        gpus: Sequence[int],
        adopted: bool,
    ) -> Engine:
        """gpus: where each rank's cache is; empty for host memory. adopted: it is allocated here, not by the daemon."""
        engine, epoch = cls(engine_id, daemons[: len(caches)]), uuid.uuid4().hex
        made: dict[int, Rank] = {}

        async def rank(cache: Cache) -> None:
            client = await EngineClient.connect(
                str(daemons[cache.rank].socket), engine_id=engine_id, epoch=epoch, rank=cache.rank,
                world_size=len(caches), timeout_s=CONNECT_S,
            )  # fmt: skip
            try:
                bring = _adopt if adopted else _allocate
                pool, release = await bring(client, cache.nbytes, gpus[cache.rank] if gpus else None)
                await client.register(cache.manifest(engine_id, epoch, "cuda" if gpus else "host"))
                made[cache.rank] = Rank(client, pool, release)
            except BaseException:
                await client.close()
                raise

        try:
            await together(rank(cache) for cache in caches)
        finally:
            engine.ranks = [made[number] for number in sorted(made)]
            if len(made) < len(caches):
                await engine.close()
        return engine

    @property
    def source(self) -> SourceBody:
        return SourceBody(engine_id=self.engine_id, address=self.ranks[0].client.peer_address)

    def fill(self, caches: Sequence[Cache]) -> None:
        """Write the caches that a source holds."""
        for rank, cache in zip(self.ranks, caches, strict=True):
            cache.fill(rank.pool)
        self.synchronize()

    def wipe(self, value: int) -> None:
        for rank in self.ranks:
            rank.pool.fill_(value)
        self.synchronize()

    def synchronize(self) -> None:
        """Until what torch wrote is there for everybody."""
        import torch

        for rank in self.ranks:
            if rank.pool.is_cuda:
                torch.cuda.synchronize(rank.pool.device)

    async def close(self) -> None:
        """End the sessions, then give the memory back."""
        await asyncio.gather(*(rank.client.close() for rank in self.ranks))
        for rank in self.ranks:
            rank.pool = None
            rank.release()
        self.ranks.clear()


async def _allocate(client: EngineClient, nbytes: int, gpu: int | None) -> tuple[Any, Callable[[], None]]:
    import torch

    region = await client.allocate(nbytes)
    pool = region.tensor()
    assert pool.device.index == gpu
    return pool.view(torch.int32), region.close


async def _adopt(client: EngineClient, nbytes: int, gpu: int | None) -> tuple[Any, Callable[[], None]]:
    import torch

    if gpu is None:
        region = memfd_region(nbytes)
        region.populate()
        await client.adopt(region)
        return region.tensor().view(torch.int32), region.close
    pool = torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{gpu}")
    await client.adopt(cuda_memory(pool))
    return pool.view(torch.int32), torch.cuda.empty_cache


@dataclass(frozen=True, slots=True)
class Way:
    """`sources` and `readers`: daemons by rank; the sources may be those of the way `source` as well.

    refused: why none of it can be used.
    """

    name: str
    source: str
    sources: list[DaemonService]
    readers: list[DaemonService]
    refused: list[str] = field(default_factory=list)


class Stage:
    """Daemons for a number of ways, all started at once, on as many GPUs as there are."""

    def __init__(self, fleet: Fleet, gpus: tuple[cuda.Device, ...], source_ranks: int) -> None:
        self._fleet, self.gpus = fleet, gpus
        self._source_ranks = source_ranks
        self._sources: dict[tuple[str, ...], tuple[str, list[DaemonService]]] = {}
        self.ways: list[Way] = []

    def source_gpu(self, rank: int) -> int:
        """From four GPUs on every rank has its own; with fewer, sources are on the first, readers on the last."""
        return self.gpus[rank if len(self.gpus) >= 4 else 0].index

    def reader_gpu(self, rank: int) -> int:
        return self.gpus[len(self.gpus) - 1 - rank if len(self.gpus) >= 4 else -1].index

    def add(self, name: str, source_flags: tuple[str, ...], reader_flags: tuple[str, ...], readers: int) -> None:
        """Start what a way needs, with so many ranks of readers. Ways of equal source flags share their sources."""
        if source_flags not in self._sources:
            started = self._start(f"source-{name}", self._source_ranks, self.source_gpu, source_flags)
            self._sources[source_flags] = name, started
        started = self._start(f"reader-{name}", readers, self.reader_gpu, reader_flags)
        self.ways.append(Way(name, *self._sources[source_flags], started))

    def _start(self, name: str, ranks: int, gpu: Callable[[int], int], flags: tuple[str, ...]) -> list[DaemonService]:
        devices = [f"cuda:{gpu(rank)}" for rank in range(ranks)] if self.gpus else []
        return self._fleet.daemons(name, ranks, flags=flags, devices=devices)

    async def ready(self) -> None:
        """Wait until every daemon serves and has loaded what copies need; a way whose daemons do not is `refused`."""
        placed = {
            daemon: gpu(rank) if self.gpus else None
            for way in self.ways
            for gpu, daemons in ((self.source_gpu, way.sources), (self.reader_gpu, way.readers))
            for rank, daemon in enumerate(daemons)
        }
        problems = dict(zip(placed, await asyncio.gather(*map(self._warm, placed, placed.values())), strict=True))
        for way in self.ways:
            way.refused.extend(filter(None, (problems[daemon] for daemon in (*way.sources, *way.readers))))

    async def open(
        self, pair: Pair, ways: Sequence[Way]
    ) -> tuple[dict[str, Engine | BaseException], dict[str, Engine | BaseException]]:
        """The pair's engines, or why there is none: sources, filled, by `Way.source`, and readers by `Way.name`."""
        sources, readers = pair.sources(), pair.destinations()
        at_source, at_reader = (
            [gpu(rank) for rank in range(ranks)] if self.gpus else []
            for gpu, ranks in ((self.source_gpu, len(sources)), (self.reader_gpu, len(readers)))
        )

        async def source(way: Way) -> Engine:
            engine = await Engine.open(SOURCE, way.sources, sources, at_source, pair.adopted)
            engine.fill(sources)
            return engine

        distinct = {way.source: way for way in ways}
        async with asyncio.timeout(READY_S):
            opened = await asyncio.gather(
                *(source(way) for way in distinct.values()),
                *(Engine.open(READER, way.readers, readers, at_reader, False) for way in ways),
                return_exceptions=True,
            )
        names = [way.name for way in ways]
        return dict(zip(distinct, opened, strict=False)), dict(zip(names, opened[len(distinct) :], strict=True))

    async def _warm(self, daemon: DaemonService, gpu: int | None) -> str:
        """Why it cannot be used. The first engine makes a daemon import torch and Triton: 10 s."""
        try:
            await self._fleet.ready(daemon, timeout_s=READY_S)
            async with asyncio.timeout(READY_S):
                engine = await Engine.open("bench-warm", [daemon], [SMALLEST], [] if gpu is None else [gpu], False)
                await engine.close()
        except ServiceError as error:
            return f"{error.code}: {error.message}: {daemon.tail(1)}"
        except TimeoutError:
            return f"deadline: {daemon.name} did not register an engine within {READY_S:g} s"
        except KvferryError as error:
            return f"{error.code}: {error.message}"
        return ""


def cpu_s(services: Sequence[Service]) -> float:
    """Seconds of processor time that the processes have had so far, user and system. Raises KvferryError."""
    ticks = 0
    for service in services:
        if service.process.poll() is not None:
            raise Internal("process_ended", f"{service.name} has ended: {service.tail(1)}")
        # After the name, which is in brackets and may hold anything: fields 14 and 15 of proc(5), from 3 on.
        fields = Path(f"/proc/{service.process.pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
