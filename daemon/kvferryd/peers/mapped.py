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
from kvferry.v1 import peer_pb2
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
    def __init__(self, channel: Channel, manifest: Manifest, slots_nbytes: int) -> None:
        """slots_nbytes: of the rank's staging arena; 0 for none."""
        self._channel, self._manifest, self._slots_nbytes = channel, manifest, slots_nbytes
        self.regions: dict[int, CudaRegion] = {}
        """The rank's regions in this process, where they are mapped."""
        self.refusal = ""
        """Why they are not."""
        self.slots: CudaRegion | None = None
        """Its staging arena in this process, where that is mapped."""
        self.slots_refusal = ""
        """Why it is not; empty where ours is host memory."""
        self.call: grpc.aio.UnaryStreamCall[peer_pb2.MapRequest, peer_pb2.MapReply] | None = None
        """Open while anything is mapped. After its end, treat the memory as gone."""
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
            self.refusal = self.slots_refusal = str(error) or late
        about = {"engine_id": self._manifest.engine_id, "rank": self._manifest.rank}
        if self.refusal:
            log.info("peer not mapped", **about, why=self.refusal)
        if self.slots_refusal:
            log.info("slots not mapped", **about, why=self.slots_refusal)

    async def _map(self, runner: Runner, *, strict: bool) -> bool:
        """Whether a second try would end as this one. Raises KvferryError when the rank does not answer."""
        manifest = self._manifest
        node = self._node.id if self._node is not None else ""
        request = peer_pb2.MapRequest(engine_id=manifest.engine_id, epoch=manifest.epoch, node=node, strict=strict)
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
        await self._map_slots(runner, reply)
        try:
            for id, region in offered.items():
                self.regions[id] = await _opened(runner, region, fetched.pop(id, None))
        except KvferryError as error:
            regions, self.regions = self.regions, {}
            await self._give_up(regions.values())
            self.refusal = _said(error)
            return error.code != "probe_failed"
        return True

    async def _map_slots(self, runner: Runner, reply: peer_pb2.MapReply) -> None:
        """NIXL reads them where they are not mapped."""
        offered, self.slots_refusal = reply.slots, ""
        try:
            if offered.refusal or not 0 < self._slots_nbytes <= offered.nbytes:
                raise Conflict("not_mappable", shorten(offered.refusal, LONGEST) or "it offers no such arena")
            fetched = await self._fetched(reply, {0: offered})
            self.slots = await _opened(runner, offered, fetched.get(0))
        except KvferryError as error:
            self.slots_refusal = _said(error)

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
        every, self.regions, self.slots = [*self.regions.values(), *filter(None, [self.slots])], {}, None
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


async def _opened(runner: Runner, offered: peer_pb2.MappableRegion, fetched: Fetched | None) -> CudaRegion:
    """fetched: its descriptors; None for memory with a handle. Raises KvferryError."""
    given = offered.allocation
    handle = cuda.Exported(given.handle, given.offset, given.allocation_nbytes, given.device_uuid)
    return await runner.open(fetched or handle, offered.nbytes, Probe(offered.probe_offset, offered.probe))
