"""Mapping a peer's GPU memory: asked for at the handshake, tried before it is used, given up when its engine ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import grpc
import structlog

from kvferry.errors import Conflict, KvferryError, PeerFailed
from kvferry.memory import CudaRegion, cuda
from kvferry.v1 import engine_pb2, peer_pb2, peer_pb2_grpc
from kvferryd.copy import mapped, sample
from kvferryd.copy.runner import Runner
from kvferryd.memory import Probe
from kvferryd.peers.channels import asking
from kvferryd.plan import Plan

if TYPE_CHECKING:
    from kvferry.manifest import Manifest

log = structlog.get_logger()
TRIES = 3
"""What an engine writes while its adopted memory is probed makes a probe fail that would not the next time."""


class RankMapping:
    """One rank's memory, mapped for one engine of ours: its regions, which are read, and its staging arena, which is
    only held. The open stream tells when it is gone: then `close`."""

    def __init__(self, runner: Runner, *, slots_only: bool = False) -> None:
        """slots_only: a strict engine of ours maps no region."""
        self._runner = runner
        self.regions: dict[int, CudaRegion] = {}
        self.refusal = "this daemon is strict" if slots_only else ""
        """Why no region is mapped."""
        self._slots: list[CudaRegion] = []
        self._stream: grpc.aio.UnaryStreamCall[peer_pb2.MapRequest, peer_pb2.MapReply] | None = None

    async def open(self, stub: peer_pb2_grpc.PeerAsyncStub, address: str, manifest: Manifest, timeout_s: float) -> None:
        """Map what can be mapped, and say why the rest cannot. Raises KvferryError when the rank does not answer."""
        for tries_left in reversed(range(TRIES)):
            try:
                async with self._undone(), asyncio.timeout(timeout_s):
                    await self._open(stub, address, manifest, tries_left)
                return
            except TimeoutError:
                raise PeerFailed("peer_unreachable", f"{address} did not say how to map its memory") from None
            except KvferryError as error:
                if error.code != "probe_failed":
                    raise

    @asynccontextmanager
    async def _undone(self) -> AsyncIterator[None]:
        try:
            yield
        except BaseException:
            await self.close()
            raise

    async def _open(self, stub: peer_pb2_grpc.PeerAsyncStub, address: str, manifest: Manifest, tries_left: int) -> None:
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
        self.refusal = self.refusal or reply.refusal
        if self.refusal:
            return
        try:
            await self._map(manifest, {region.id: region for region in reply.regions})
        except KvferryError as error:
            if error.code == "probe_failed" and tries_left:
                raise
            await self._unmap_regions()
            self.refusal = f"{error.message} ({error.code} {error.value})"

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
            try:
                while await self._stream.read() is not grpc.aio.EOF:
                    pass
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return

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

    async def _unmap(self, every: Sequence[CudaRegion]) -> None:
        if every:
            try:
                await self._runner.unmap(every)
            except KvferryError as error:  # closed: it has unmapped by itself
                log.debug("unmap", error=str(error))


def exported_of(given: engine_pb2.CudaAllocation) -> cuda.Exported:
    return cuda.Exported(given.handle, given.offset, given.allocation_nbytes, given.device_uuid)


async def compile_kernels(runner: Runner, plan: Plan, sources: dict[tuple[int, int], int], own: dict[int, int]) -> None:
    """Let the first transfer find its kernels compiled."""
    await runner.prepare(mapped(sample(plan), sources, own))
