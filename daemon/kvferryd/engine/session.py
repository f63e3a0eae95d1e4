"""An engine rank's session: whether the engine lives, what it is told, and its memory."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from kvferry.errors import Conflict, Malformed, Unavailable
from kvferry.process import Process
from kvferry.v1 import engine_pb2
from kvferryd import logs
from kvferryd.engine.fences import Fences
from kvferryd.memory import Region

if TYPE_CHECKING:
    from kvferryd.engine.registration import Engine

log = logs.get(__name__)


class Rank(NamedTuple):
    """One rank of one start of an engine."""

    engine_id: str
    epoch: str
    rank: int
    world_size: int


class Session:
    """Owns the regions, the page of fences and what is registered. `retire` closes them."""

    def __init__(self, rank: Rank, regions: dict[int, Region] | None = None) -> None:
        """regions: of a session before this one, which it resumes."""
        self.rank = rank
        self.id = secrets.token_urlsafe(16)
        self.resumed = regions is not None
        self.regions = regions or {}
        self.fences: Fences | None = None
        self.engine: Engine | None = None
        """What is registered."""
        self.registering = False
        self.events: asyncio.Queue[engine_pb2.Event | None] = asyncio.Queue()
        self.attached = True
        """The stream is open, and the engine's process is not known to be dead."""
        self.detached = asyncio.Event()
        self.process: Process | None = None
        """The engine's; None until it has introduced itself, or where the kernel cannot say which one it is."""
        self.died = asyncio.Event()
        self.gone = False
        """The process is dead, or the engine has left: it will not touch its memory any more."""
        self.retired = asyncio.Event()
        self.stuck = False
        """The agent could not be stopped: what it reads and writes is never known to be over."""
        self._allocating: set[int] = set()

    @property
    def has_leases(self) -> bool:
        return self.engine is not None and len(self.engine.leases) > 0

    def tell(self, event: engine_pb2.Event) -> None:
        if self.attached:
            self.events.put_nowait(event)

    async def add(self, id: int, nbytes: int, make: Callable[[], Region]) -> Region:
        """A new region. Only if the session still stands when it is made."""
        if nbytes <= 0:
            raise Malformed(
                "malformed_region",
                "a region has no bytes",
                field="nbytes",
                value=nbytes,
                remedy="ask for at least one byte",
            )
        if id in self.regions or id in self._allocating or self.registering or self.engine is not None:
            raise Conflict(
                "region_taken",
                f"region {id} exists, or the engine has registered already",
                field="region",
                value=id,
                remedy="allocate each region once, before registering",
            )
        self._allocating.add(id)
        try:
            region = await made(make)
        finally:
            self._allocating.discard(id)
        if not self.attached:
            region.close()
        self.check_open()
        self.regions[id] = region
        return region

    def check_open(self) -> None:
        """Raises KvferryError (`session_closed`)."""
        if self.retired.is_set() or not self.attached:
            raise Unavailable("session_closed", f"the session of engine {self.rank.engine_id} has ended")

    def detach(self) -> None:
        """The session has ended, which does not tell what has become of the engine."""
        self.attached = False
        self.detached.set()
        self.events.put_nowait(None)

    def part(self, why: str) -> None:
        """The engine is dead or has left. What it published whole in memory of ours stays readable until it is read or
        expires."""
        self.gone = True
        if self.engine is None:
            return
        if any(not region.owned for region in self.regions.values()):
            self.engine.leases.revoke_all(f"{why}, and owned its memory")
        else:
            self.engine.leases.revoke_all(why, keep_whole=True)

    async def retire(self, reason: str, *, keep: bool = False) -> dict[int, Region]:
        """Close everything. Nothing of it is read or written afterwards, unless it is `stuck`. Idempotent.

        keep: leave the daemon-owned regions open and return them.
        """
        if self.retired.is_set():
            return {}
        self.retired.set()
        self.events.put_nowait(None)
        if self.engine is not None:
            self.engine.leases.revoke_all(reason)
        if self.fences is not None:  # after the leases that wait for them
            await self.fences.close()
        if self.engine is not None and not await self.engine.close():
            self.stuck = True
            log.error("the NIXL agent did not stop: its memory stays mapped", engine_id=self.rank.engine_id)
            return {}
        kept = {id: region for id, region in self.regions.items() if keep and region.owned}
        for id, region in self.regions.items():
            if id not in kept:
                region.close()
        self.regions = {}
        return kept


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
