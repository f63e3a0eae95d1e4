"""One rank of an engine: its session, its regions, and once registered its manifest, agent and leases.

There is one `Engine` for each epoch. It owns its regions and its NIXL agent: retiring it closes both, and with the
agent every read that could still touch the memory.
"""

from __future__ import annotations

import asyncio
import secrets
import uuid
from collections.abc import Callable

from kvferry import cuda
from kvferry.errors import KvferryError
from kvferry.manifest import Manifest, ManifestError
from kvferry.v1 import engine_pb2
from kvferryd import logs
from kvferryd.config import Config
from kvferryd.copy.runner import Runner
from kvferryd.fences import Fences
from kvferryd.leases.lease import Lease
from kvferryd.leases.leases import Leases
from kvferryd.memory import Provider, Region
from kvferryd.staging.arena import Arena
from kvferryd.staging.copies import GpuCopies, HostCopies
from kvferryd.staging.pairings import Pairings
from kvferryd.transport import Agent

log = logs.get(__name__)


class Engine:
    """One rank of an engine in one epoch, as this daemon knows it."""

    def __init__(
        self,
        engine_id: str,
        epoch: str,
        rank: int,
        world_size: int,
        config: Config,
        on_lease_end: Callable[[Lease], None],
    ) -> None:
        self.engine_id, self.epoch, self.rank, self.world_size = engine_id, epoch, rank, world_size
        self.session = secrets.token_urlsafe(16)
        self.attached = True
        self.events: asyncio.Queue[engine_pb2.Event | None] = asyncio.Queue()
        self.regions: dict[int, Region] = {}
        self.allocating: set[int] = set()
        self.manifest: Manifest | None = None
        self.agent: Agent | None = None
        self.agent_metadata = b""
        self.strict = config.strict
        self.arena: Arena | None = None
        self.pairings = Pairings()
        self.runner: Runner | None = None
        """Copies on the GPU of the engine's regions."""
        self.fences: Fences | None = None
        self.unmapped = "this engine's memory is host memory"
        """Why there is no runner."""
        self.members: dict[int, str] = {rank: config.advertise}
        self.members_changed = asyncio.Event()
        self.notes: tuple[str, ...] = ()
        self.detached = asyncio.Event()
        self.retired = asyncio.Event()
        self.leases = Leases(engine_id, epoch, on_lease_end, config.max_leases)

    @property
    def gpu(self) -> cuda.Device | None:
        """The GPU of its regions; None for host memory."""
        spans = [region.span for region in self.regions.values() if region.span.kind == "cuda"]
        return cuda.device(f"cuda:{spans[0].device}") if spans else None

    @property
    def registered(self) -> bool:
        return self.agent is not None and not self.retired.is_set()

    @property
    def whole(self) -> bool:
        """Whether the daemons of all ranks are known."""
        return not self.missing_ranks()

    def set_members(self, members: dict[int, str]) -> None:
        self.members = members
        self.members_changed.set()
        self.members_changed = asyncio.Event()

    async def until_whole(self) -> None:
        """Wait until all ranks are known. The caller bounds the wait."""
        while not self.whole:
            await self.members_changed.wait()

    def missing_ranks(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank not in self.members]

    def tell(self, event: engine_pb2.Event) -> None:
        if self.attached:
            self.events.put_nowait(event)

    async def register(self, manifest: Manifest, config: Config, memory: Provider) -> None:
        """Check the manifest against the session and its regions, and make its memory readable by peers.

        In strict exposure that is the staging arena alone.
        """
        if self.manifest is not None:
            raise KvferryError(
                "already_registered",
                f"engine {self.engine_id} registered in this session already",
                field="manifest",
                value=self.epoch,
                remedy="attach again with a new epoch to describe another cache",
            )
        for field in ("engine_id", "epoch", "rank", "world_size"):
            if getattr(manifest, field) != getattr(self, field):
                raise ManifestError(
                    "session_mismatch",
                    f"the manifest's {field} is not the session's {getattr(self, field)}",
                    field=field,
                    value=getattr(manifest, field),
                    remedy="describe the rank that was attached",
                )
        for region in manifest.regions:
            held = self.regions.get(region.id)
            if held is None or held.span.nbytes < region.nbytes or held.span.kind != region.kind:
                have = "nothing" if held is None else f"{held.span.nbytes} bytes of {held.span.kind} memory"
                raise ManifestError(
                    "region_mismatch",
                    f"region {region.id} of the manifest is not what was allocated: there is {have}",
                    field=f"regions[{region.id}]",
                    value=f"{region.nbytes} bytes of {region.kind} memory",
                    remedy="allocate or adopt every region before registering",
                )
        # A fresh name for every agent: an agent's name is its identity (facts/nixl.md, 4).
        agent = Agent(f"kvferry-{uuid.uuid4().hex[:16]}", threads=config.nixl_threads, ucx=config.ucx, device=self.gpu)
        self.manifest = manifest
        arena: Arena | None = None
        try:
            await agent.start()
            await self._start_copies(config)
            arena = await self._made_arena(config, memory)
            self._check_session()  # else the regions below may be gone
            if arena is not None:
                await agent.register(arena.span)
            for region in manifest.regions if not config.strict else ():
                await agent.register(self.regions[region.id].span)
                if slow := self.regions[region.id].slow_source:
                    self.notes += (f"region {region.id}: {slow}",)
            await agent.register(self.leases.words.span)
            self.agent_metadata = await agent.metadata()
            self._check_session()
        except BaseException:
            self.manifest = None
            await self._close_copies()
            stopped = await agent.close()
            if arena is not None:
                await arena.close(unmap=stopped)
            raise
        self.agent, self.arena = agent, arena

    def _check_session(self) -> None:
        if self.retired.is_set():  # the session ended meanwhile
            raise KvferryError("session_closed", f"the session of engine {self.engine_id} has ended")

    async def _start_copies(self, config: Config) -> None:
        """Without them the engine can still be read and filled directly."""
        if self.gpu is not None:
            runner = Runner(self.gpu, config.programs)
            try:
                await runner.start()
            except KvferryError as error:
                self.unmapped = str(error)
                self.notes += (f"no mapped transfers: {error}",)
            else:
                self.runner = runner

    async def _made_arena(self, config: Config, memory: Provider) -> Arena | None:
        """None where staging is neither asked for nor to be had for nothing."""
        if not config.arena_mb or not (_must_stage(config) or (config.device != "cpu" and config.way == "auto")):
            return None
        try:
            if config.device != "cpu" and self.runner is None:
                raise KvferryError(
                    "no_copies",
                    f"nothing can be packed: {self.unmapped}",
                    field="device",
                    value=config.device,
                    remedy="install a CUDA build of torch (it brings Triton)",
                )
            region = await made(lambda: memory.allocate(config.arena_mb << 20))
        except KvferryError as error:
            if _must_stage(config):
                raise
            self.notes += (f"no staged transfers: {error}",)
            return None
        try:
            return Arena(region, GpuCopies(self.runner) if self.runner is not None else HostCopies())
        except BaseException:  # too small for its slots
            region.close()
            raise

    async def _close_copies(self) -> None:
        runner, self.runner = self.runner, None
        if runner is not None:
            await runner.close()

    def detach(self) -> None:
        """The engine is gone. What it published in memory of ours stays readable until read or expired."""
        self.attached = False
        self.detached.set()
        self.events.put_nowait(None)
        if any(not region.owned for region in self.regions.values()):
            self.leases.revoke_all(f"engine {self.engine_id} is gone and owned its memory")
        else:
            self.leases.revoke_unfinished(f"engine {self.engine_id} is gone")

    async def retire(self, reason: str) -> None:
        """Close everything. Nothing of this epoch is read or written afterwards. Idempotent."""
        if self.retired.is_set():
            return
        self.retired.set()
        self.leases.revoke_all(reason)
        self.events.put_nowait(None)
        if self.fences is not None:  # after the leases that wait for them
            await self.fences.close()
        await self._close_copies()
        stopped = self.agent is None or await self.agent.close()
        if self.arena is not None:  # before the regions: it copies from and into them
            await self.arena.close(unmap=stopped)
        if not stopped:
            log.error("the NIXL agent did not stop: its memory stays mapped", engine_id=self.engine_id)
            return
        for region in self.regions.values():
            region.close()
        self.regions.clear()


async def made(make: Callable[[], Region]) -> Region:
    """Filling a large file with pages, or mapping GPU memory, takes a while: on a thread. Not kept when the caller is
    cancelled."""
    task = asyncio.create_task(asyncio.to_thread(make))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(_close_unwanted)
        raise


def _close_unwanted(allocated: asyncio.Task[Region]) -> None:
    if allocated.exception() is None:
        allocated.result().close()


def _must_stage(config: Config) -> bool:
    return config.way == "staged" or config.strict
