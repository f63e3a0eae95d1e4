"""What a rank has told its daemon of itself, so that it can be told to the next one."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.engine import EngineClient
from kvferry.errors import Conflict, Unavailable
from kvferry.manifest import Manifest
from kvferry.memory import CudaMemory, CudaRegion, SharedRegion, VmmMemory
from kvferry.session import CALL_S


@dataclass(slots=True, eq=False)
class Attachment:
    """One rank of one start of an engine. `open` begins its first session, `again` those after it."""

    socket: str
    engine_id: str
    epoch: str
    rank: int = 0
    world_size: int = 1
    call_timeout_s: float = CALL_S
    allocated: list[SharedRegion | CudaRegion] = field(default_factory=list)
    """The daemon's own memory."""
    adopted: list[SharedRegion | CudaMemory | VmmMemory] = field(default_factory=list)
    manifest: Manifest | None = None
    fences_of: int | None = None
    """The GPU whose streams write fences, once there are any."""
    peer_address: str = ""

    async def open(self, timeout_s: float, resume: str = "") -> EngineClient:
        """As `EngineClient.connect`."""
        client = await EngineClient.connect(
            self.socket,
            engine_id=self.engine_id,
            epoch=self.epoch,
            rank=self.rank,
            world_size=self.world_size,
            timeout_s=timeout_s,
            call_timeout_s=self.call_timeout_s,
            resume=resume,
        )
        self.peer_address = self.peer_address or client.peer_address
        return client

    async def again(self, before: EngineClient, timeout_s: float) -> EngineClient:
        """A session after `before`, which is over: the daemon is told the manifest and given new fences. A daemon that
        came after the last one is handed its memory, too.

        Nothing that was published before is there any more. Raises KvferryError: `memory_gone` when the memory was the
        last daemon's and cannot be handed over, `address_changed`, what `open` raises, what the daemon refuses.
        """
        client = await self.open(timeout_s, before.session)
        try:
            if client.peer_address != self.peer_address:
                raise Conflict(
                    "address_changed",
                    "the daemon is back with another address than the one that readers are told",
                    field="advertise",
                    value=client.peer_address,
                    remedy=f"let it advertise {self.peer_address}, or start the engine again",
                )
            for region in self.adopted if client.resumed else self._handed_on():
                await client.adopt(region)
            if self.fences_of is not None:
                await client.open_fences(self.fences_of)
            if self.manifest is not None:
                await client.register(self.manifest)
        except BaseException:
            await client.close()
            raise
        return client

    def _handed_on(self) -> list[SharedRegion | CudaMemory | VmmMemory]:
        """All memory, as this engine's own: the daemon that made some of it has gone."""
        while self.allocated:
            region = self.allocated[-1]
            if isinstance(region, CudaRegion):
                raise Unavailable(
                    "memory_gone",
                    "the cache lies in GPU memory of a daemon that has gone, which no other can be given",
                    field="region",
                    value=region.id,
                    remedy="start the engine again",
                )
            self.adopted.append(region)
            self.allocated.pop()
        return self.adopted
