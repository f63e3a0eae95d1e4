"""What a rank has told its daemon of itself, so that it can be told to the next one."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.engine import EngineClient
from kvferry.errors import KvferryError
from kvferry.manifest import Manifest
from kvferry.memory import CudaMemory, CudaRegion, SharedRegion, VmmMemory


@dataclass(slots=True, eq=False)
class Attachment:
    """One rank of one start of an engine. `open` begins its first session, `again` those after it."""

    socket: str
    engine_id: str
    epoch: str
    rank: int = 0
    world_size: int = 1
    regions: list[SharedRegion | CudaRegion | CudaMemory | VmmMemory] = field(default_factory=list)
    manifest: Manifest | None = None
    fences_of: int | None = None
    """The GPU whose streams write fences, once there are any."""
    peer_address: str = ""

    async def open(self, timeout_s: float) -> EngineClient:
        """As `EngineClient.connect`."""
        client = await EngineClient.connect(
            self.socket,
            engine_id=self.engine_id,
            epoch=self.epoch,
            rank=self.rank,
            world_size=self.world_size,
            timeout_s=timeout_s,
        )
        self.peer_address = self.peer_address or client.peer_address
        return client

    async def again(self, timeout_s: float) -> EngineClient:
        """A session with the daemon that came after: it is handed the memory, told the manifest, given new fences.

        Nothing that was published before is there any more. Raises KvferryError: `memory_gone` when the memory was the
        last daemon's and cannot be handed over, `address_changed`, what `open` raises, what the daemon refuses.
        """
        for region in self.regions:
            if isinstance(region, CudaRegion):
                raise KvferryError(
                    "memory_gone",
                    "the cache lies in GPU memory of a daemon that has gone, which no other can be given",
                    field="region",
                    value=region.id,
                    remedy="start the engine again",
                )
        client = await self.open(timeout_s)
        try:
            if client.peer_address != self.peer_address:
                raise KvferryError(
                    "address_changed",
                    "the daemon is back with another address than the one that readers are told",
                    field="advertise",
                    value=client.peer_address,
                    remedy=f"let it advertise {self.peer_address}, or start the engine again",
                )
            for region in self.regions:
                assert not isinstance(region, CudaRegion)
                await client.adopt(region)
            if self.fences_of is not None:
                await client.open_fences(self.fences_of)
            if self.manifest is not None:
                await client.register(self.manifest)
        except BaseException:
            await client.close()
            raise
        return client
