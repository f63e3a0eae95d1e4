"""The engines of this daemon: who is attached, in which epoch, and what is theirs."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from kvferry.errors import KvferryError
from kvferry.manifest import Manifest
from kvferry.process import Process
from kvferry.v1 import engine_pb2
from kvferryd import logs
from kvferryd.config import Config
from kvferryd.engine import Engine, made
from kvferryd.fences import Fences
from kvferryd.leases.lease import Lease
from kvferryd.memory import Files, Provider, Region

log = logs.get(__name__)
DETACH_S, RETIRE_S = 0.5, 10.0
DYING_S = 10.0
"""A process that is killed closes its sockets first and is dead some time later: with much GPU memory, seconds. An
engine that lives uses none of its blocks meanwhile, for its client has it wait for our word."""
KEPT_S = 30.0
"""How long the memory of an engine that has lost its session waits for it to attach again."""
MAX_WORLD_SIZE = 4096
EPOCHS = 4096
"""Registered epochs remembered, so that none is registered twice."""


@dataclass(slots=True)
class _Kept:
    """The regions of a session that has ended, for the next session of the same engine."""

    owner: tuple[str, str, int, int]
    regions: dict[int, Region]
    process: Process | None
    expiry: asyncio.TimerHandle

    def take(self) -> dict[int, Region]:
        """The caller's from now on."""
        regions, self.regions = self.regions, {}
        self.close()
        return regions

    def close(self) -> None:
        self.expiry.cancel()
        if self.process is not None:
            self.process.close()
        for region in self.regions.values():
            region.close()


class Engines:
    """All engines of the daemon, by id. Owns them: `close` retires every one."""

    def __init__(
        self,
        config: Config,
        memory: Provider,
        on_lease_end: Callable[[Engine, Lease], None],
        on_detach: Callable[[Engine, str], None],
        before_retire: Callable[[Engine, str], Awaitable[None]],
    ) -> None:
        """on_lease_end: a lease of the engine has ended. on_detach: its session has. before_retire: its agent is about
        to be closed."""
        self._config, self._memory = config, memory
        self._on_lease_end, self._on_detach, self._before_retire = on_lease_end, on_detach, before_retire
        self._engines: dict[str, Engine] = {}
        self._sessions: dict[str, Engine] = {}
        self._epochs: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._kept: dict[str, _Kept] = {}
        self._retiring: dict[str, asyncio.Task[None]] = {}
        self._settling: set[asyncio.Task[None]] = set()
        self._stuck: set[str] = set()

    def __iter__(self) -> Iterator[Engine]:
        return iter(self._engines.values())

    def __len__(self) -> int:
        return len(self._engines)

    async def attach(self, engine_id: str, epoch: str, rank: int, world_size: int, resume: str = "") -> Engine:
        """A new session. What there was of this engine before is retired first.

        resume: a session of the same engine and epoch, whose daemon-owned regions go on in this one.
        """
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
        if resume:
            await self.end(resume)
        old = self._engines.get(engine_id)
        if old is not None and old.attached:  # an engine that starts anew may be faster than the end of its old stream
            if old.process is not None and old.process.dead:
                self._died(old)
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
        owner = (engine_id, epoch, rank, world_size)
        resumed = resume in self._kept and self._kept[resume].owner == owner
        if (engine_id, epoch) in self._epochs and not resumed:
            raise KvferryError(
                "epoch_reused",
                f"epoch {epoch} of engine {engine_id} is over",
                field="epoch",
                value=epoch,
                remedy="use a new epoch for every start of the engine",
            )
        engine = Engine(
            engine_id, epoch, rank, world_size, self._config, lambda lease: self._lease_ended(engine, lease)
        )
        if resumed:
            engine.regions, engine.resumed = self._kept.pop(resume).take(), True
        for session in [session for session, kept in self._kept.items() if kept.owner[0] == engine_id]:
            self._kept.pop(session).close()
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

    def introduce(self, session: str, process: Process | None) -> None:
        """A process has named this session, and is ours to close. The first is the engine's: its client says so as soon
        as it has attached. Raises KvferryError (`unknown_session`)."""
        try:
            engine = self.of_session(session)
            if engine.process is None and process is not None:
                engine.process, process = process, None
                engine.process.watch(lambda: self._died(engine))
        finally:
            if process is not None:
                process.close()

    def stream_ended(self, engine: Engine) -> None:
        """The stream of an engine's session has ended. Whether the engine is dead, its process tells."""
        if engine.attached:
            self._detach(engine, f"the session of engine {engine.engine_id} has ended")
            task = asyncio.create_task(self._settle(engine))
            self._settling.add(task)
            task.add_done_callback(self._settling.discard)

    async def _settle(self, engine: Engine) -> None:
        if engine.process is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(engine.died.wait(), DYING_S)
        if not engine.gone:
            await self._withdraw(engine)

    async def end(self, session: str, *, leave: bool = False) -> None:
        """End the session. Nothing of it is read or written any more when this returns, but for the leases of an engine
        that leaves. Idempotent. Raises KvferryError (`not_quiet`) when that cannot be had."""
        engine = self._sessions.get(session)
        if engine is not None and leave:
            self._part(engine, f"engine {engine.engine_id} has left")
        elif engine is not None:
            await self._withdraw(engine)
        if session in self._retiring:
            await asyncio.shield(self._retiring[session])
        if session in self._stuck:
            raise KvferryError(
                "not_quiet",
                "the session's NIXL agent could not be stopped: its reads may still write",
                field="session",
                remedy="restart the daemon",
            )

    async def _withdraw(self, engine: Engine) -> None:
        """The session has ended, and for all we know the engine lives: it may write to its blocks as soon as it knows
        that nobody reads them."""
        why = f"engine {engine.engine_id} has lost its session"
        self._detach(engine, why)
        await asyncio.shield(self.retire_soon(engine, why, keep=True))

    def _detach(self, engine: Engine, why: str) -> None:
        if engine.attached and not engine.retired.is_set():
            engine.detach()
            log.info("engine detached", engine_id=engine.engine_id, epoch=engine.epoch, leases=len(engine.leases))
            self._on_detach(engine, why)

    def _died(self, engine: Engine) -> None:
        engine.died.set()
        self._part(engine, f"engine {engine.engine_id} is dead")

    def _part(self, engine: Engine, why: str) -> None:
        if engine.gone or engine.retired.is_set():
            return
        self._detach(engine, why)
        engine.part(why)
        if not len(engine.leases):
            self.retire_soon(engine, why)

    def _lease_ended(self, engine: Engine, lease: Lease) -> None:
        self._on_lease_end(engine, lease)
        if engine.gone and not len(engine.leases) and not engine.retired.is_set():
            self.retire_soon(engine, f"engine {engine.engine_id} is gone and its last lease has ended")

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

    def retire_soon(self, engine: Engine, reason: str, *, keep: bool = False) -> asyncio.Task[None]:
        """Close everything of the engine. keep: its daemon-owned regions wait for it to attach again."""
        task = self._retiring.get(engine.session)
        if task is None:
            task = self._retiring[engine.session] = asyncio.create_task(self._retire(engine, reason, keep))
            task.add_done_callback(lambda _: self._retiring.pop(engine.session))
        return task

    async def _retire(self, engine: Engine, reason: str, keep: bool) -> None:
        self._sessions.pop(engine.session, None)
        if self._engines.get(engine.engine_id) is engine:
            del self._engines[engine.engine_id]
        await self._before_retire(engine, reason)
        regions = await engine.retire(reason, keep=keep)
        if engine.stuck:
            self._stuck.add(engine.session)
        process, engine.process = engine.process, None
        if regions:
            self._keep_for_resume(engine, regions, process)
        elif process is not None:
            process.close()

    def _keep_for_resume(self, engine: Engine, regions: dict[int, Region], process: Process | None) -> None:
        def give_back() -> None:
            self._kept.pop(engine.session).close()

        expiry = asyncio.get_running_loop().call_later(KEPT_S, give_back)
        owner = (engine.engine_id, engine.epoch, engine.rank, engine.world_size)
        self._kept[engine.session] = _Kept(owner, regions, process, expiry)
        if process is not None:
            process.watch(give_back)

    async def close(self) -> None:
        for task in self._settling:
            task.cancel()
        tasks = [self.retire_soon(engine, "the daemon stops") for engine in list(self)]
        if pending := [*tasks, *self._retiring.values()]:
            await asyncio.wait(pending, timeout=RETIRE_S)
        for kept in self._kept.values():
            kept.close()
