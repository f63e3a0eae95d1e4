"""An engine rank's session: whether the engine lives, what it is told, and its memory."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from kvferry.errors import Conflict, KvferryError, Malformed, Unavailable
from kvferry.outbox import Outbox
from kvferry.process import Process
from kvferry.v1 import engine_pb2
from kvferryd.aio import made_on, to_the_end
from kvferryd.engine.fences import Fences
from kvferryd.memory import Region
from kvferryd.observe import logs

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

    def __init__(self, rank: Rank, before: Session | None = None) -> None:
        """before: a retired session that this one resumes. It takes over the regions."""
        self.rank, self.id, self.resumed = rank, secrets.token_urlsafe(16), before is not None
        self.regions: dict[int, Region] = {}
        if before is not None:
            self.regions, before.regions = before.regions, {}
        self.fences: Fences | None = None
        self.engine: Engine | None = None
        """What is registered."""
        self.registering: asyncio.Future[None] | None = None
        """While `engine` is made."""
        self.events = Outbox(_several)
        self.process: Process | None = None
        """The engine's; None until it has introduced itself, or where the kernel cannot say which one it is."""
        self.detached = asyncio.Event()
        """The stream has ended, or the engine is gone. The first does not tell what has become of the engine."""
        self.gone = False
        """The process is dead, or the engine has left: it will not touch its memory any more."""
        self.retired = asyncio.Event()
        """`retire` has begun."""
        self.retiring: asyncio.Task[None] | None = None
        self.expiry: asyncio.TimerHandle | None = None
        """Of the regions that are kept for the next session of the engine."""
        self.stuck = False
        """Its agent or its copies could not be stopped: what they read and write is never known to be over."""
        self._allocating: set[int] = set()

    @property
    def attached(self) -> bool:
        return not self.detached.is_set()

    @property
    def has_leases(self) -> bool:
        return self.engine is not None and len(self.engine.leases) > 0

    def tell(self, event: engine_pb2.Event) -> None:
        if self.attached:
            self.events.put(event)

    async def add(self, id: int, nbytes: int, make: Callable[[], Region]) -> Region:
        """A new region. Only if the session still stands when it is made."""
        if nbytes <= 0:
            raise Malformed(
                "malformed_region", "a region needs at least one byte", field="nbytes", value=nbytes,
                remedy="ask for the bytes that the cache needs",
            )  # fmt: skip
        if id in self.regions or id in self._allocating or self.registering is not None or self.engine is not None:
            raise Conflict(
                "region_taken", f"region {id} exists, or the engine has registered already", field="region", value=id,
                remedy="allocate each region once, before registering",
            )  # fmt: skip
        self._allocating.add(id)
        try:
            region = await made(make)
        finally:
            self._allocating.discard(id)
        try:
            self.check_open()
        except KvferryError:
            await give_back([region])
            raise
        self.regions[id] = region
        return region

    @property
    def addresses(self) -> dict[int, int]:
        """Where each region begins."""
        return {id: region.span.address for id, region in self.regions.items()}

    def check_open(self) -> None:
        """Raises KvferryError (`session_closed`)."""
        if self.retired.is_set() or not self.attached:
            raise Unavailable("session_closed", f"the session of engine {self.rank.engine_id} has ended")

    async def retire(self, reason: str, *, keep: bool) -> None:
        """Close everything, once. Nothing of it is read or written afterwards, unless it is `stuck`; then all memory
        stays mapped.

        keep: leave the daemon-owned regions open.
        """
        self.retired.set()
        self.events.end()
        if self.registering is not None:  # its end comes soon, and nothing may be unmapped under NIXL
            await asyncio.wait([self.registering])
        if self.engine is not None:
            self.engine.leases.revoke_all(reason)
        if self.fences is not None:  # after the leases that wait for them
            await self.fences.close()
        if self.engine is not None and not await self.engine.close():
            self.stuck = True
        if self.stuck:
            log.error("its reads or copies did not stop: its memory stays mapped", engine_id=self.rank.engine_id)
            return
        gone = [id for id, region in self.regions.items() if not (keep and region.owned)]
        await give_back([self.regions.pop(id) for id in gone])


def _several(events: list[engine_pb2.Event]) -> engine_pb2.Event:
    return engine_pb2.Event(several=engine_pb2.Events(events=events))


async def made(make: Callable[[], Region]) -> Region:
    """Filling a large file with pages, or mapping GPU memory, takes a while: on a thread. Not kept when the caller is
    cancelled."""
    loop = asyncio.get_running_loop()
    return await made_on(lambda work: loop.run_in_executor(None, work), make, lambda region: region.close())


async def give_back(regions: Iterable[Region]) -> None:
    """Close them on threads: to free what nobody else holds takes a third of a second for each GB."""
    await to_the_end(asyncio.to_thread(region.close) for region in regions)
