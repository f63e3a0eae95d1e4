"""An EngineClient per rank, driven as one: a request is published, received or aborted on every rank or on none."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Iterable, Sequence
from contextlib import AsyncExitStack, suppress
from typing import TypeVar

from kvferry.engine import EngineClient, Lease, Received, Unsettled
from kvferry.errors import Caused, Internal, KvferryError, Malformed, Unavailable
from kvferry.handoff import Origin
from kvferry.manifest import Manifest
from kvferry.memory import SharedRegion
from kvferry.reference.cache import CacheGeometry
from kvferry.reference.config import EngineConfig, ModelConfig
from kvferry.tables import Tables

log = logging.getLogger(__name__)
T = TypeVar("T")
OF_ANOTHER = frozenset({"rank_failed", "aborted"})
"""Codes that a rank gets for a failure that is not its own."""


class LoadFailed(Caused):
    """The KV of a request did not arrive on every rank. Its blocks may be reused once `quiesced()` has returned."""

    def __init__(self, cause: KvferryError, request_id: str, clients: Iterable[EngineClient]) -> None:
        super().__init__(cause)
        self._request_id, self._clients = request_id, clients

    async def quiesced(self) -> None:
        for client in self._clients:
            with suppress(KvferryError):  # the client is closed: the engine stops
                await client.quiesced(self._request_id)


class Daemons:
    """The sessions of one engine start. Make with `connect`, end with `close`."""

    def __init__(self, engine: EngineConfig, clients: Sequence[EngineClient], owned: AsyncExitStack) -> None:
        self._engine = engine
        self._clients = clients
        self._owned = owned
        self._attempts = itertools.count(1)
        self._leases = itertools.count(1)

    @classmethod
    async def connect(cls, engine: EngineConfig, epoch: str) -> Daemons:
        timeout_s, clients = engine.daemon_timeout_s, list[EngineClient]()
        async with AsyncExitStack() as owned:
            for rank, socket in enumerate(engine.daemons):
                client = await EngineClient.connect(
                    socket, engine_id=engine.engine_id, epoch=epoch, rank=rank, world_size=engine.tp,
                    timeout_s=timeout_s, call_timeout_s=timeout_s,
                )  # fmt: skip
                clients.append(await owned.enter_async_context(client))
            return cls(engine, clients, owned.pop_all())

    @property
    def address(self) -> str:
        """host:port at which other daemons reach rank 0's; from there they find the other ranks."""
        return self._clients[0].peer_address

    async def allocate(self, model: ModelConfig) -> list[tuple[str, int]]:
        """Daemon-owned memory for every rank. Returns its files and offsets, by rank."""
        files = []
        for rank, client in enumerate(self._clients):
            region = await client.allocate(CacheGeometry.of(model, self._engine, rank).nbytes)
            self._owned.callback(region.close)
            if not isinstance(region, SharedRegion):
                raise Malformed(
                    "wrong_memory_kind", "the reference engine computes on the CPU, its daemon runs beside a GPU",
                    field="device", value=client.device, remedy="start the daemon with --device cpu",
                )  # fmt: skip
            files.append((region.path, region.offset))
        return files

    async def register(self, manifests: Iterable[Manifest]) -> None:
        await _all(client.register(manifest) for client, manifest in zip(self._clients, manifests, strict=True))

    def next_lease(self) -> int:
        """The number of another lease."""
        return next(self._leases)

    async def publish(
        self, request_id: str, lease: int, tables: Tables, num_tokens: int, *, more: bool, metadata: bytes,
        digest: bytes,
    ) -> list[Lease]:  # fmt: skip
        ttl_s = self._engine.lease_ttl_s
        return await _all(
            client.publish(
                request_id, tables, num_tokens, more=more, metadata=metadata, ttl_s=ttl_s, digest=digest, lease=lease
            )
            for client in self._clients
        )  # fmt: skip

    async def receive(self, origin: Origin, tables: Tables, tokens: tuple[int, int]) -> Received:
        """Rank 0's result, when every rank has received. Raises LoadFailed with the reason of the first that failed by
        itself; of another rank's failure a rank may hear before the rank itself has said why."""
        deadline_s, attempt = self._engine.load_timeout_s, next(self._attempts)

        async def receive(client: EngineClient) -> Received | KvferryError:
            try:
                return await client.receive(
                    origin.request_id, tables, tokens, source=origin.source, deadline_s=deadline_s,
                    digest=origin.digest, attempt=attempt,
                )  # fmt: skip
            except KvferryError as error:
                if error.code in OF_ANOTHER:
                    return error  # the rank that failed raises the reason, by its deadline at the latest
                raise

        try:
            async with asyncio.TaskGroup() as ranks:  # a rank that fails by itself cancels the others
                receives = [ranks.create_task(receive(client)) for client in self._clients]
        except* KvferryError as failed:
            cause = failed.exceptions[0]
            assert isinstance(cause, KvferryError)
            error = LoadFailed(cause, origin.request_id, self._clients)
        except* Exception as broke:
            log.exception("receiving broke")
            why = f"receiving failed: {type(broke.exceptions[0]).__name__}"
            error = LoadFailed(Internal("internal", why), origin.request_id, self._clients)
        else:
            results = [ended.result() for ended in receives]
            told = [result for result in results if isinstance(result, KvferryError)]
            if not told:
                return next(result for result in results if isinstance(result, Received))
            error = LoadFailed(told[0], origin.request_id, self._clients)
        raise error

    async def abort(self, request_id: str) -> None:
        """End the request's transfer and lease on every rank. Idempotent. Returns when its blocks are quiet."""

        async def abort(client: EngineClient) -> None:
            with suppress(KvferryError):  # the client is closed: the engine stops
                with suppress(Unsettled):
                    await client.abort(request_id)
                await client.quiesced(request_id)

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
        await self._owned.aclose()


async def _all(calls: Iterable[Awaitable[T]]) -> list[T]:
    """Every rank's answer, when all have answered or failed; the first rank's error when one failed."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]
