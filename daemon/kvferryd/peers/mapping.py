"""Mapping a peer's GPU memory: asked for at the handshake, tried before it is used, given up when its engine ends."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import grpc

from kvferry.errors import Conflict, KvferryError, PeerFailed
from kvferry.manifest import Manifest
from kvferry.memory import cuda
from kvferry.v1 import engine_pb2, peer_pb2, peer_pb2_grpc
from kvferryd import logs
from kvferryd.copy.runner import Mapped, Runner
from kvferryd.memory import Probe
from kvferryd.peers.channels import asking

log = logs.get(__name__)
TRIES = 3
"""What an engine writes while its adopted memory is probed makes a probe fail that would not the next time."""


class RankMapping:
    """One rank's memory, mapped for one engine of ours: its regions, which are read, and its staging arena, which is
    only held. The open stream tells when it is gone: then `close`."""

    def __init__(self, runner: Runner, *, slots_only: bool = False) -> None:
        """slots_only: a strict engine of ours maps no region."""
        self._runner, self._slots_only = runner, slots_only
        self.regions: dict[int, Mapped] = {}
        self.refusal = ""
        """Why no region is mapped."""
        self._slots: list[Mapped] = []
        self._stream: grpc.aio.UnaryStreamCall[peer_pb2.MapRequest, peer_pb2.MapReply] | None = None

    async def open(self, stub: peer_pb2_grpc.PeerAsyncStub, address: str, manifest: Manifest, timeout_s: float) -> None:
        """Map what can be mapped, and say why the rest cannot. Raises KvferryError when the rank does not answer."""
        for _ in range(TRIES):
            try:
                async with asyncio.timeout(timeout_s):
                    probed = await self._open(stub, address, manifest)
            except TimeoutError:
                await self.close()
                raise PeerFailed("peer_unreachable", f"{address} did not say how to map its memory") from None
            except BaseException:
                await self.close()
                raise
            if probed:
                return

    async def _open(self, stub: peer_pb2_grpc.PeerAsyncStub, address: str, manifest: Manifest) -> bool:
        """Whether it is worth no second try."""
        await self.close()  # what a first try has left
        self._stream = stub.Map(peer_pb2.MapRequest(engine_id=manifest.engine_id, epoch=manifest.epoch))
        async with asking(address):
            reply = await self._stream.read()
        if not isinstance(reply, peer_pb2.MapReply):
            raise Conflict("stale_epoch", f"engine {manifest.engine_id} ended")
        if reply.HasField("slots"):
            try:
                self._slots.append(await self._runner.open(exported_of(reply.slots), 0))
            except KvferryError as error:  # another host's, or a GPU that is hidden from us: UCX cannot map it either
                log.debug("arena not held", address=address, why=str(error))
        self.refusal = "this daemon is strict" if self._slots_only else reply.refusal
        try:
            if not self.refusal:
                await self._map(manifest, {region.id: region for region in reply.regions})
        except KvferryError as error:
            await self._unmap_regions()
            self.refusal = f"{error.message} ({error.code} {error.value})"
            return error.code != "probe_failed"
        return True

    async def _map(self, manifest: Manifest, offered: Mapping[int, peer_pb2.MappableRegion]) -> None:
        for wanted in manifest.regions:
            region = offered.get(wanted.id)
            if region is None or region.nbytes < wanted.nbytes:
                raise Conflict("not_mappable", f"region {wanted.id} of the source is {wanted.kind} memory")
            if region.refusal:
                raise Conflict("not_mappable", f"region {wanted.id} of the source: {region.refusal}")
            self.regions[wanted.id] = await self._runner.open(
                exported_of(region.allocation), region.nbytes, Probe(region.probe_offset, region.probe)
            )

    async def ended(self) -> None:
        """Returns when the memory is gone, or nobody can tell any more."""
        if self._stream is not None:
            await self._stream.code()

    async def close(self) -> None:
        """Unmap. Nothing may read from it any more. Idempotent."""
        if self._stream is not None:
            self._stream.cancel()
        await self._unmap_regions()
        slots, self._slots = self._slots, []
        await self._unmap(slots)

    async def _unmap_regions(self) -> None:
        regions, self.regions = self.regions, {}
        await self._unmap(list(regions.values()))

    async def _unmap(self, every: Sequence[Mapped]) -> None:
        if every:
            try:
                await self._runner.unmap(every)
            except KvferryError as error:  # closed: it has unmapped by itself
                log.debug("unmap", error=str(error))


def exported_of(given: engine_pb2.CudaAllocation) -> cuda.Exported:
    return cuda.Exported(given.handle, given.offset, given.allocation_nbytes, given.device_uuid)
