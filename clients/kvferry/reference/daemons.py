"""One EngineClient per rank, driven as one: a request is published, received or aborted on every rank or on none."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from contextlib import suppress
from typing import TypeVar

from kvferry.engine import EngineClient, Lease, ReceiveCancelled, Received, Unsettled
from kvferry.errors import Caused, Internal, KvferryError, Malformed, Unavailable
from kvferry.handoff import Attempts, Origin
from kvferry.manifest import ModelInfo
from kvferry.memory import SharedRegion
from kvferry.reference.cache import CacheGeometry, describe
from kvferry.reference.config import EngineConfig, ModelConfig
from kvferry.tables import Tables

T = TypeVar("T")


class LoadFailed(Caused):
    """The KV of a request did not arrive on every rank. Its blocks may be reused once `quiesced()` has returned."""

    def __init__(self, cause: KvferryError, receives: Sequence[asyncio.Task[Received]]) -> None:
        super().__init__(cause)
        self._receives = receives

    async def quiesced(self) -> None:
        """Aborts what is still under way."""
        await asyncio.gather(*(_quiet(receive) for receive in self._receives))


class Daemons:
    """The sessions of one engine start. Make with `connect`, end with `close`."""

    def __init__(self, engine: EngineConfig, epoch: str, clients: Sequence[EngineClient]) -> None:
        self._engine = engine
        self._epoch = epoch
        self._clients = clients
        self._regions: list[SharedRegion] = []
        self._attempts = Attempts()

    @classmethod
    async def connect(cls, engine: EngineConfig, epoch: str) -> Daemons:
        timeout_s, clients = engine.daemon_timeout_s, list[EngineClient]()

        async def connect(rank: int, socket: str) -> EngineClient:
            client = await EngineClient.connect(
                socket, engine_id=engine.engine_id, epoch=epoch, rank=rank, world_size=engine.tp, timeout_s=timeout_s,
                call_timeout_s=timeout_s,
            )  # fmt: skip
            clients.append(client)
            return client

        try:
            return cls(engine, epoch, await _all(connect(*each) for each in enumerate(engine.daemons)))
        except BaseException:
            await asyncio.gather(*(client.close() for client in clients))
            raise

    @property
    def address(self) -> str:
        """host:port at which other daemons reach rank 0's; from there they find the other ranks."""
        return self._clients[0].peer_address

    async def allocate(self, model: ModelConfig, info: ModelInfo) -> list[tuple[str, int]]:
        """Daemon-owned memory for every rank, described by a manifest. Returns its files and offsets, by rank."""
        self._regions = await _all(self._allocate(rank, model, info) for rank in range(self._engine.tp))
        return [(region.path, region.offset) for region in self._regions]

    async def _allocate(self, rank: int, model: ModelConfig, info: ModelInfo) -> SharedRegion:
        client = self._clients[rank]
        region = await client.allocate(CacheGeometry.of(model, self._engine, rank).nbytes)
        if not isinstance(region, SharedRegion):
            raise Malformed(
                "wrong_memory_kind", "the reference engine computes on the CPU, its daemon runs beside a GPU",
                field="device", value=client.device, remedy="start the daemon with --device cpu",
            )  # fmt: skip
        manifest = describe(
            model, self._engine, rank, epoch=self._epoch, info=info, kind=region.kind, address=region.address
        )
        await client.register(manifest)
        return region

    async def publish(
        self, request_id: str, tables: Tables, num_tokens: int, *, more: bool, metadata: bytes, digest: bytes
    ) -> list[Lease]:
        ttl_s = self._engine.lease_ttl_s
        return await _all(
            client.publish(request_id, tables, num_tokens, more=more, metadata=metadata, ttl_s=ttl_s, digest=digest)
            for client in self._clients
        )

    async def receive(self, origin: Origin, tables: Tables, tokens: tuple[int, int]) -> Received:
        """Rank 0's result, when every rank has received. Raises LoadFailed with the first rank's reason."""
        attempt = self._attempts.next(origin)
        receives = [
            asyncio.create_task(
                client.receive(
                    origin.request_id, tables, tokens, source=origin.source, deadline_s=self._engine.load_timeout_s,
                    digest=origin.digest, attempt=attempt,
                )
            )
            for client in self._clients
        ]  # fmt: skip
        ended, _ = await asyncio.wait(receives, return_when=asyncio.FIRST_EXCEPTION)
        for receive in receives:
            if receive in ended and (error := receive.exception()) is not None:
                if not isinstance(error, KvferryError):
                    error = Internal("internal", f"receiving failed: {error!r}")
                raise LoadFailed(error, receives)
        return receives[0].result()

    async def abort(self, request_id: str) -> None:
        """End the request's transfer and lease on every rank. Idempotent. Returns when its blocks are quiet."""

        async def abort(client: EngineClient) -> None:
            try:
                await client.abort(request_id)
            except Unsettled as error:
                with suppress(KvferryError):  # the client is closed: the engine stops
                    await error.quiesced()

        await _all(abort(client) for client in self._clients)

    async def gone(self) -> KvferryError:
        """Returns when the first session has ended."""

        async def closed(rank: int, client: EngineClient) -> KvferryError:
            await client.closed.wait()
            socket = self._engine.daemons[rank]
            return Unavailable(
                "daemon_gone", f"the daemon of rank {rank} on {socket} ended the session", field="daemon", value=socket,
                remedy="start the engine again when its daemon is back",
            )  # fmt: skip

        return await next(asyncio.as_completed([closed(*each) for each in enumerate(self._clients)]))

    async def close(self) -> None:
        await asyncio.gather(*(client.close() for client in self._clients))
        for region in self._regions:
            region.close()


async def _all(calls: Iterable[Awaitable[T]]) -> list[T]:
    """Every rank's answer, when all have answered or failed; the first rank's error when one failed."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


async def _quiet(receive: asyncio.Task[Received]) -> None:
    """Until nothing can write to this rank's blocks: it has arrived, was never begun, or the daemon says so."""
    receive.cancel()
    await asyncio.wait([receive])
    try:
        error = receive.exception()
    except asyncio.CancelledError as cancelled:
        error = cancelled
    if isinstance(error, Unsettled | ReceiveCancelled):
        with suppress(KvferryError):  # the client is closed: the engine stops
            await error.quiesced()
