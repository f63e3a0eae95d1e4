"""The memory of one rank of a peer in this process: mapped at the handshake where that is possible, probed before it is
used, and unmapped when its engine ends."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping

import grpc

from kvferry.errors import LONGEST, Conflict, KvferryError, shorten
from kvferry.manifest import Manifest
from kvferry.memory import CudaRegion, cuda
from kvferry.memory.handover import EXCHANGE_S, fetch
from kvferry.memory.vmm import Fetched
from kvferry.threads import made
from kvferry.v1 import engine_pb2, peer_pb2
from kvferryd.copy.runner import Runner
from kvferryd.engine import Engine
from kvferryd.memory import Probe
from kvferryd.memory.node import SOCKET, NodeDir
from kvferryd.observe import logs
from kvferryd.peers.channels import Channel
from kvferryd.peers.contact import asking

log = logs.get(__name__)
TRIES = 3
"""A probe fails where the engine writes to its adopted memory meanwhile, and may hold the next time."""


class MappedMemory:
    def __init__(self, channel: Channel, manifest: Manifest) -> None:
        self._channel, self._manifest = channel, manifest
        self.regions: dict[int, CudaRegion] = {}
        """The rank's regions in this process, where they are mapped."""
        self.refusal = ""
        """Why they are not."""
        self.call: grpc.aio.UnaryStreamCall[peer_pb2.MapRequest, peer_pb2.MapReply] | None = None
        """Open while anything is mapped. After its end, treat the memory as gone."""
        self._held: list[CudaRegion] = []
        """The staging arena, so that UCX need not map it for each descriptor."""
        self._runner: Runner | None = None
        self._node: NodeDir | None = None

    async def map(self, engine: Engine, timeout_s: float, node: NodeDir | None) -> None:
        """Map what can be mapped for this engine of ours, and keep why the rest cannot. node: where the daemons of this
        node hand descriptors to each other."""
        self._node = node
        if engine.runner is None:
            self.refusal = engine.unmapped
            return
        self._runner = engine.runner
        try:
            for _ in range(TRIES):
                await self.unmap()  # a first try may have left some
                async with asyncio.timeout(timeout_s):
                    if await self._map(engine.runner, strict=engine.strict):
                        break
        except (KvferryError, TimeoutError, RuntimeError) as error:  # the last: no thread can be started
            await self.unmap()
            late = f"{self._channel.address} did not say how to map its memory, or that took more than {timeout_s:g} s"
            self.refusal = str(error) or late
        if self.refusal:
            log.info("peer not mapped", engine_id=self._manifest.engine_id, rank=self._manifest.rank, why=self.refusal)

    async def _map(self, runner: Runner, *, strict: bool) -> bool:
        """Whether a second try would end as this one. Raises KvferryError when the rank does not answer."""
        manifest = self._manifest
        node = self._node.id if self._node is not None and not strict else ""
        request = peer_pb2.MapRequest(engine_id=manifest.engine_id, epoch=manifest.epoch, node=node)
        self.call = self._channel.stub.Map(request)
        async with asking(self._channel.contact):
            reply = await self.call.read()
        if not isinstance(reply, peer_pb2.MapReply):
            raise Conflict("stale_epoch", f"engine {manifest.engine_id} ended")
        self.refusal = "this daemon is strict" if strict else shorten(reply.refusal, LONGEST)
        try:
            offered = {} if self.refusal else self._wanted(reply)
            fetched = await self._fetched(reply, offered)
        except KvferryError as error:
            self.refusal, offered, fetched = _said(error), {}, {}
        if reply.HasField("slots"):
            try:
                self._held.append(await runner.open(_exported(reply.slots), 0))
            except KvferryError as error:  # another host's, or a GPU that is hidden from us: UCX cannot map it either
                log.debug("arena not held", address=self._channel.address, why=str(error))
        try:
            for id, region in offered.items():
                probe = Probe(region.probe_offset, region.probe)
                allocation = fetched.pop(id) if id in fetched else _exported(region.allocation)
                self.regions[id] = await runner.open(allocation, region.nbytes, probe)
        except KvferryError as error:
            regions, self.regions = self.regions, {}
            await self._give_up(regions.values())
            self.refusal = _said(error)
            return error.code != "probe_failed"
        return True

    def _wanted(self, reply: peer_pb2.MapReply) -> dict[int, peer_pb2.MappableRegion]:
        """The offer for each region that the manifest names. Raises KvferryError (`not_mappable`)."""
        offered = {region.id: region for region in reply.regions}
        for wanted in self._manifest.regions:
            region = offered.get(wanted.id)
            if region is None or region.nbytes < wanted.nbytes:
                raise Conflict("not_mappable", f"region {wanted.id} of the source is {wanted.kind} memory")
            if region.refusal:
                raise Conflict("not_mappable", f"region {wanted.id} of the source: {region.refusal}")
        return {wanted.id: offered[wanted.id] for wanted in self._manifest.regions}

    async def _fetched(
        self, reply: peer_pb2.MapReply, regions: Mapping[int, peer_pb2.MappableRegion]
    ) -> dict[int, Fetched]:
        """The descriptors of those regions that have any. Tickets are good for seconds: nothing else comes before.
        Raises KvferryError."""
        shared = {id: region.shared for id, region in regions.items() if region.HasField("shared")}
        if not shared:
            return {}
        if self._node is None or not re.fullmatch(SOCKET, reply.socket):
            raise Conflict("protocol", f"it offers descriptors at {reply.socket[:64]!r}", field="socket")
        path = str(self._node.folder / reply.socket)

        def fetch_all() -> dict[int, Fetched]:
            return {
                id: Fetched(
                    tuple(fetch(path, reply.session, given.ticket, len(given.nbytes))),
                    tuple(given.nbytes),
                    given.offset,
                )
                for id, given in shared.items()
            }

        return await made("kvferry-node", fetch_all, EXCHANGE_S)

    async def unmap(self) -> None:
        """Nothing may read from what was mapped any more. Idempotent."""
        self.hang_up()
        self.call = None
        every, self.regions, self._held = [*self.regions.values(), *self._held], {}, []
        await self._give_up(every)

    async def _give_up(self, every: Iterable[CudaRegion]) -> None:
        if self._runner is not None and (mapped := list(every)):
            try:
                await self._runner.unmap(mapped)
            except KvferryError as error:  # closed: it has unmapped by itself
                log.debug("unmap", error=str(error))

    def hang_up(self) -> None:
        """The end of the memory is not watched any more."""
        if self.call is not None:
            self.call.cancel()


def _said(error: KvferryError) -> str:
    return f"{error.message} ({error.code} {error.value})"


def _exported(given: engine_pb2.CudaAllocation) -> cuda.Exported:
    return cuda.Exported(given.handle, given.offset, given.allocation_nbytes, given.device_uuid)
