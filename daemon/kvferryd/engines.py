"""The engines of this daemon: who is attached, in which epoch, and what is theirs."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator

from kvferry.errors import KvferryError
from kvferry.manifest import Manifest
from kvferry.v1 import engine_pb2
from kvferryd.config import Config
from kvferryd.engine import Engine, made
from kvferryd.fences import Fences
from kvferryd.leases.lease import Lease
from kvferryd.memory import Files, Provider, Region

DETACH_S, RETIRE_S = 0.5, 10.0
MAX_WORLD_SIZE = 4096
EPOCHS = 4096
"""Registered epochs remembered, so that none is registered twice."""


class Engines:
    """All engines of the daemon, by id. Owns them: `close` retires every one."""

    def __init__(
        self,
        config: Config,
        memory: Provider,
        on_lease_end: Callable[[Engine, Lease], None],
        before_retire: Callable[[Engine, str], Awaitable[None]],
    ) -> None:
        self._config, self._memory = config, memory
        self._on_lease_end, self._before_retire = on_lease_end, before_retire
        self._engines: dict[str, Engine] = {}
        self._sessions: dict[str, Engine] = {}
        self._epochs: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._retiring: set[asyncio.Task[None]] = set()

    def __iter__(self) -> Iterator[Engine]:
        return iter(self._engines.values())

    def __len__(self) -> int:
        return len(self._engines)

    async def attach(self, engine_id: str, epoch: str, rank: int, world_size: int) -> Engine:
        """A new session. An engine of the same id and another epoch that has gone is retired first."""
        if not engine_id or not epoch or len(engine_id) > 256 or len(epoch) > 256:
            raise KvferryError(
                "malformed_attach",
                "engine_id and epoch must be given, at most 256 characters each",
                field="engine_id, epoch",
                value=f"{engine_id!r}, {epoch!r}",
                remedy="use a new epoch for every start",
            )
        if rank >= world_size or world_size > MAX_WORLD_SIZE:
            raise KvferryError(
                "rank_out_of_range",
                f"rank {rank} does not exist in a world of {world_size}, or the world is too large",
                field="rank",
                value=rank,
                remedy=f"ranks count from 0 to world_size - 1; world_size is at most {MAX_WORLD_SIZE}",
            )
        old = self._engines.get(engine_id)
        if old is not None and old.attached:  # an engine that starts anew may be faster than the end of its old stream
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(old.detached.wait(), DETACH_S)
            old = self._engines.get(engine_id)
        if old is not None and old.attached and not old.retired.is_set():
            raise KvferryError(
                "engine_attached",
                f"engine {engine_id} (epoch {old.epoch}) is attached to this daemon already",
                field="engine_id",
                value=engine_id,
                remedy="one daemon serves one rank: give each rank its own daemon",
            )
        if (engine_id, epoch) in self._epochs:
            raise KvferryError(
                "epoch_reused",
                f"epoch {epoch} of engine {engine_id} is over",
                field="epoch",
                value=epoch,
                remedy="use a new epoch for every start of the engine",
            )
        engine = Engine(
            engine_id, epoch, rank, world_size, self._config, lambda lease: self._on_lease_end(engine, lease)
        )
        self._engines[engine_id] = engine
        self._sessions[engine.session] = engine
        if old is not None:
            try:
                # To its end, even if the new engine is gone again meanwhile.
                await asyncio.shield(self.retire_soon(old, f"engine {engine_id} started anew"))
            except asyncio.CancelledError:
                engine.attached = False
                self.retire_soon(engine, f"engine {engine_id} is gone")
                raise
        return engine

    async def register(self, engine: Engine, manifest: Manifest) -> None:
        """Make the engine's memory readable by peers. Its epoch cannot be used again."""
        await engine.register(manifest, self._config, self._memory)
        self._epochs[engine.engine_id, engine.epoch] = None
        while len(self._epochs) > EPOCHS:
            self._epochs.popitem(last=False)

    def of_session(self, session: str) -> Engine:
        engine = self._sessions.get(session)
        if engine is None or engine.retired.is_set():
            raise KvferryError(
                "unknown_session",
                "the session is not known or has ended",
                field="session",
                remedy="attach first, and keep the stream of events open",
            )
        return engine

    def get(self, engine_id: str | None) -> Engine:
        """The registered engine of this id; of None the only one. Raises KvferryError (`unknown_engine`)."""
        ready = [engine for engine in self if engine.registered]
        if engine_id is None and len(ready) == 1:
            return ready[0]
        for engine in ready:
            if engine.engine_id == engine_id:
                return engine
        known = ", ".join(sorted(engine.engine_id for engine in ready)) or "none"
        raise KvferryError(
            "unknown_engine",
            f"engine {engine_id} is not registered here" if engine_id else f"{len(ready)} engines are registered here",
            field="engine_id",
            value=engine_id or "",
            remedy=f"registered on this daemon: {known}",
        )

    async def allocate(self, engine: Engine, region: int, nbytes: int) -> engine_pb2.Memory:
        """Memory of the daemon's own, for this engine."""
        self._check_new(engine, region, nbytes)
        allocated = await self._keep(engine, region, lambda: self._memory.allocate(nbytes))
        return allocated.exported(region)

    async def adopt(self, engine: Engine, memory: engine_pb2.Memory, files: Files) -> None:
        """Memory of the engine's own; `files` are those that it was handed over with, and are closed."""

        def adopted() -> Region:
            with files as numbers:
                return self._memory.adopt(memory, numbers)

        try:
            self._check_new(engine, memory.region, memory.nbytes)
        except KvferryError:
            files.close()
            raise
        await self._keep(engine, memory.region, adopted)

    def open_fences(self, engine: Engine, files: Files) -> None:
        """The page of words that the engine's streams write, once for each session; the files are closed."""
        with files as numbers:
            if engine.fences is not None:
                raise KvferryError(
                    "fences_open",
                    f"engine {engine.engine_id} has opened its fences already",
                    field="ticket",
                    remedy="use the page that was handed over first",
                )
            engine.fences = Fences(numbers)

    async def _keep(self, engine: Engine, id: int, make: Callable[[], Region]) -> Region:
        """Only if the session still stands when the region is made."""
        engine.allocating.add(id)
        try:
            region = await made(make)
        finally:
            engine.allocating.discard(id)
        if engine.retired.is_set() or not engine.attached:
            region.close()
            raise KvferryError("session_closed", f"the session of engine {engine.engine_id} has ended")
        engine.regions[id] = region
        return region

    def _check_new(self, engine: Engine, region: int, nbytes: int) -> None:
        if nbytes <= 0:
            raise KvferryError(
                "malformed_region",
                "a region has no bytes",
                field="nbytes",
                value=nbytes,
                remedy="ask for at least one byte",
            )
        if region in engine.regions or region in engine.allocating or engine.manifest is not None:
            raise KvferryError(
                "region_taken",
                f"region {region} exists, or the engine has registered already",
                field="region",
                value=region,
                remedy="allocate each region once, before registering",
            )

    async def retire(self, engine: Engine, reason: str) -> None:
        self._sessions.pop(engine.session, None)
        if self._engines.get(engine.engine_id) is engine:
            del self._engines[engine.engine_id]
        await self._before_retire(engine, reason)
        await engine.retire(reason)

    def retire_soon(self, engine: Engine, reason: str) -> asyncio.Task[None]:
        task = asyncio.create_task(self.retire(engine, reason))
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)
        return task

    async def close(self) -> None:
        for engine in list(self):
            await self.retire(engine, "the daemon stops")
        if self._retiring:
            await asyncio.wait(self._retiring, timeout=RETIRE_S)
