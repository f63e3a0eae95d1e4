"""How an engine rank speaks to the daemon beside it.

    client = await EngineClient.connect("/run/kvferry/engine.sock", engine_id="prefill", epoch=epoch)
    region = await client.allocate(nbytes)              # daemon-owned: outlives a crash of the engine
    await client.register(manifest)                     # what lies where in it
    lease = await client.publish("req-1", tables, num_tokens=813, metadata=b"...")
    await lease.ended()                                 # the blocks may be reused

    received = await other.receive("req-1", tables, source=SourceBody(engine_id="prefill", address="10.0.0.1:7411"))

The session lives as long as the client: when the process dies the daemon knows at once.
`kvferry.blocking` has the same for engines without an event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import TYPE_CHECKING

from kvferry import __version__, cuda, cuda_vmm
from kvferry.errors import KvferryError
from kvferry.fences import Fence, Fences
from kvferry.manifest import Manifest
from kvferry.memory import CudaMemory, CudaRegion, SharedRegion, VmmMemory, open_cuda_region, open_region
from kvferry.outcomes import Lease, Received, Receiving, TransferFailed
from kvferry.rpc import PROTOCOL_MAX, PROTOCOL_MIN
from kvferry.schemas import LeaseState, SourceBody
from kvferry.session import Session, refuse
from kvferry.tables import Tables
from kvferry.v1 import engine_pb2, layout_pb2
from kvferry.wire import manifest_to_proto, problem_from_proto, tables_to_proto

if TYPE_CHECKING:
    import torch

__all__ = ["EngineClient", "Lease", "Received", "TransferFailed"]

LEAVE_S = 5.0
"""How long a receive that is cancelled waits for its transfer to end and its blocks to be safe."""


class EngineClient:
    """One engine rank's session with its daemon. Make it with `connect`, end it with `close`."""

    def __init__(self, socket: str, epoch: str) -> None:
        self.epoch = epoch
        self._session = Session(socket, self._hear, self._end)
        self._leases: dict[str, Lease] = {}
        self._receives: dict[str, Receiving] = {}
        self._unsafe: dict[str, asyncio.Future[None]] = {}
        self._opening = asyncio.Lock()
        self.fences: Fences | None = None
        """Once `open_fences` has returned."""
        self.peer_address = ""
        self.device = ""
        self.closed = self._session.closed
        """Set when the session has ended, from either side."""
        self.draining = asyncio.Event()
        """Set when the daemon asks for no new work."""

    @classmethod
    async def connect(
        cls, socket: str, *, engine_id: str, epoch: str, rank: int = 0, world_size: int = 1, timeout_s: float = 10.0
    ) -> EngineClient:
        """Open the session. Waits for the daemon to come up, at most `timeout_s`.

        `epoch` is one value for all ranks of one start of the engine: nothing of an older epoch is ever read.
        Raises KvferryError: `unreachable`, `deadline`, `protocol`, or what the daemon refuses.
        """
        client = cls(socket, epoch)
        try:
            async with asyncio.timeout(timeout_s):
                await client._attach(engine_id, epoch, rank, world_size)
        except TimeoutError:
            await client.close()
            raise KvferryError(
                "unreachable",
                f"no daemon answered on {socket} within {timeout_s:g} s",
                field="socket",
                value=socket,
                remedy="start `kvferry serve`, or give the engine_socket it listens on",
            ) from None
        except BaseException:
            await client.close()
            raise
        return client

    async def _attach(self, engine_id: str, epoch: str, rank: int, world_size: int) -> None:
        attach = engine_pb2.AttachRequest(
            protocol_min=PROTOCOL_MIN,
            protocol_max=PROTOCOL_MAX,
            client=f"kvferry/{__version__}",
            engine_id=engine_id,
            epoch=epoch,
            rank=rank,
            world_size=world_size,
        )
        attached = await self._session.attach(attach)
        self.peer_address, self.device = attached.peer_address, attached.device

    async def allocate(self, nbytes: int, region: int = 0) -> SharedRegion | CudaRegion:
        """Daemon-owned memory, zeroed, mapped here: on the daemon's GPU, or host memory where it has none.

        It is registered with NIXL once, by the daemon.
        """
        memory = await self._session.call(
            self._session.stub.Allocate,
            engine_pb2.AllocateRequest(session=self._session.id, region=region, nbytes=nbytes),
        )
        if memory.WhichOneof("kind") == "cuda":
            given = memory.cuda
            return await asyncio.to_thread(
                open_cuda_region,
                given.handle,
                given.offset,
                memory.nbytes,
                given.allocation_nbytes,
                given.device_uuid,
                region,
            )
        file = await self._session.fetch(memory.handed.ticket)
        try:
            opened = open_region(file, memory.nbytes, region, memory.handed.offset)
        finally:
            os.close(file)
        await asyncio.to_thread(opened.populate)
        return opened

    async def adopt(self, shared: SharedRegion | CudaMemory | VmmMemory) -> None:
        """Hand over memory that this engine allocated and goes on owning: `memfd_region(...)` or `cuda_memory(...)`.

        The daemon gives it back when the session ends; until then it must not be freed.
        """
        memory = engine_pb2.Memory(region=shared.id, nbytes=shared.nbytes)
        if isinstance(shared, CudaMemory):
            exported = shared.exported
            memory.cuda.CopyFrom(
                engine_pb2.CudaAllocation(
                    handle=exported.handle,
                    offset=exported.offset,
                    allocation_nbytes=exported.allocation_nbytes,
                    device_uuid=exported.device_uuid,
                )
            )
        elif isinstance(shared, VmmMemory):
            memory.vmm.CopyFrom(await self._hand_over_vmm(shared))
        else:
            ticket = await self._session.hand_over([shared.file])
            memory.handed.CopyFrom(engine_pb2.HandedFile(ticket=ticket, offset=shared.offset))
        await self._session.call(
            self._session.stub.Adopt, engine_pb2.AdoptRequest(session=self._session.id, memory=memory)
        )

    async def register(self, manifest: Manifest) -> tuple[str, ...]:
        """Describe the cache. Returns what the daemon wants a person to know about it. Raises ManifestError."""
        reply = await self._session.call(
            self._session.stub.Register,
            engine_pb2.RegisterRequest(session=self._session.id, manifest=manifest_to_proto(manifest)),
        )
        return tuple(reply.notes)

    async def fence(self, stream: int | torch.cuda.Stream, device: int = 0) -> Fence:
        """A point in a CUDA stream, behind the last write of KV: give it to `publish` as `after`, and wait for nothing.

        stream: torch's, or a cudaStream_t of this process's GPU number `device`. Raises KvferryError: `fence_on_host`,
        `stream_capturing`, `too_many_fences`, and what `hand_over` raises at the first time.
        """
        if self.fences is None:
            await self.open_fences(device if isinstance(stream, int) else stream.device.index)
        assert self.fences is not None
        return self.fences.after(stream, device)

    async def open_fences(self, device: int = 0) -> Fences:
        """Share the page that fences are made of with the daemon, and let this process's GPU number `device` write it.

        The first `fence` does so; do it before, as it takes milliseconds and may wait for work on the GPU. Idempotent.
        """
        if self.device == "cpu":
            raise KvferryError(
                "fence_on_host",
                "this engine's memory is host memory, which no stream writes",
                field="stream",
                value=self.device,
                remedy="publish when the writes have returned, without `after`",
            )
        async with self._opening:
            if self.fences is None:
                fences = Fences()
                try:
                    await asyncio.to_thread(fences.register, cuda.device(f"cuda:{device}"))
                    ticket = await self._session.hand_over([fences.file])
                    await self._session.call(
                        self._session.stub.OpenFences,
                        engine_pb2.OpenFencesRequest(session=self._session.id, ticket=ticket),
                    )
                except BaseException:
                    fences.close()
                    raise
                fences.handed()
                self.fences = fences
            return self.fences

    async def _hand_over_vmm(self, shared: VmmMemory) -> engine_pb2.CudaAllocations:
        allocations = cuda_vmm.export(shared.device, shared.address, shared.nbytes)
        try:
            ticket = await self._session.hand_over(allocations.files)
        finally:
            allocations.close()
        return engine_pb2.CudaAllocations(
            ticket=ticket, nbytes=allocations.nbytes, offset=allocations.offset, device_uuid=shared.device.uuid
        )

    async def publish(
        self,
        request_id: str,
        tables: Tables,
        num_tokens: int,
        *,
        more: bool = False,
        metadata: bytes = b"",
        ttl_s: float = 0.0,
        readers: int = 0,
        after: Fence | None = None,
        digest: bytes = b"",
    ) -> Lease:
        """The KV of tokens [0, num_tokens) is in these blocks, written and visible to other processes.

        That is a promise: synchronise the stream that writes it first, or give its `fence` as `after`; then readers see
        nothing of this publish, and of later ones, before the fence is reached. When it is not reached within the
        daemon's fence_timeout_s the lease is revoked, and `ended()` raises `fence_timeout`.

        more: further tokens follow in later calls with longer tables (progressive). metadata: at most 64 KiB, handed to
        the reader as it is. ttl_s, readers: 0 for the daemon's default and for one reading engine. digest: names what
        was computed, at most 64 bytes; a reader that expects another digest is refused (`other_prompt`).
        """
        known = self._leases.get(request_id)
        lease = known or Lease(request_id, asyncio.get_running_loop().create_future())
        self._leases[request_id] = lease
        try:
            await self._session.command(
                publish=engine_pb2.PublishRequest(
                    request_id=request_id,
                    tables=tables_to_proto(tables),
                    num_tokens=num_tokens,
                    more=more,
                    metadata=metadata,
                    ttl_s=ttl_s,
                    readers=readers,
                    digest=digest,
                    after=None if after is None else engine_pb2.Fence(word=after.word, value=after.value),
                )
            )
        except BaseException:
            if known is None and self._leases.get(request_id) is lease:
                del self._leases[request_id]
            raise
        if lease._ended.done():
            return lease
        return self._leases.setdefault(request_id, lease)  # a publish beside this one may have been refused

    async def receive(
        self,
        request_id: str,
        tables: Tables,
        tokens: tuple[int, int] | None = None,
        *,
        source: SourceBody | None = None,
        deadline_s: float = 0.0,
        priority: int = 0,
        way: str = "",
        digest: bytes = b"",
        attempt: int = 0,
    ) -> Received:
        """Reserve these blocks for the request and wait for its KV.

        tokens: global range to move; None for all that is published, which the tables must then hold. source: where to
        read from; None when a router orders it. way: auto, direct, staged or mapped instead of what the daemon is
        configured to do; only with a source. digest: what the source must have published with; empty is not checked.
        attempt: counts the attempts at this request from 1, equal on all ranks; 0 lets the daemon count. Raises
        TransferFailed, or KvferryError when the reservation is refused. When this call is cancelled it aborts the
        transfer, and ends when the blocks are safe, at most 5 s later.
        """
        request = engine_pb2.ReceiveRequest(
            request_id=request_id, tables=tables_to_proto(tables), deadline_s=deadline_s, priority=priority, way=way,
            digest=digest, attempt=attempt,
        )  # fmt: skip
        if tokens is not None:
            request.tokens.CopyFrom(layout_pb2.TokenRange(start=tokens[0], stop=tokens[1]))
        if source is not None:
            request.source.CopyFrom(
                engine_pb2.Source(engine_id=source.engine_id, address=source.address, epoch=source.epoch or "")
            )
        while (before := self._receives.get(request_id)) is not None:
            if before.leaving is None:
                raise KvferryError(
                    "receive_pending",
                    f"request {request_id} is being received already",
                    field="request_id",
                    value=request_id,
                    remedy="wait for it, or abort it first",
                )
            await asyncio.wait([before.leaving])
        replying = self._session.say(receive=request)
        receiving = self._receives[request_id] = Receiving(asyncio.get_running_loop().create_future())
        try:
            receiving.named((await self._session.answer(replying)).receive.transfer_id)
            event, quiesced = await asyncio.shield(receiving.ended)
        except asyncio.CancelledError:
            receiving.leaving = asyncio.create_task(self._leave(request_id, receiving, replying))
            await asyncio.shield(receiving.leaving)
            raise
        finally:
            if receiving.leaving is None:
                del self._receives[request_id]
        if event.state != "done":
            raise TransferFailed(problem_from_proto(event.problem), event.state, quiesced)
        return Received(
            request_id, event.transfer_id, event.nbytes, (event.tokens.start, event.tokens.stop), event.metadata
        )

    async def _leave(self, request_id: str, receiving: Receiving, replying: asyncio.Future[engine_pb2.Answer]) -> None:
        """End the transfer of a receive that was cancelled. Until then the request is not received again."""
        try:
            with contextlib.suppress(KvferryError, TimeoutError):
                async with asyncio.timeout(LEAVE_S):
                    # An abort before that would find nothing.
                    receiving.named((await self._session.answer(replying)).receive.transfer_id)
                    if not receiving.ended.done():
                        await self.abort(request_id)
                    _, quiesced = await receiving.ended
                    await asyncio.shield(quiesced)
        finally:
            del self._receives[request_id]

    async def abort(self, request_id: str) -> None:
        """End the request's transfer and revoke its lease on this rank. Idempotent."""
        await self._session.command(abort=engine_pb2.EngineAbortRequest(request_id=request_id))

    async def close(self) -> None:
        """End the session. Leases on daemon-owned memory stay readable until they are read or expire.

        What still waits, and every call from now on, raises KvferryError (`session_closed`).
        """
        await self._session.close()
        if self.fences is not None:
            self.fences.close()

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _hear(self, event: engine_pb2.Event) -> None:
        match event.WhichOneof("kind"):
            case "transfer_ended":
                receiving = self._receives.get(event.transfer_ended.request_id)
                if receiving is not None:
                    receiving.hear(event.transfer_ended, self._quiescence(event.transfer_ended))
            case "blocks_safe":
                quiesced = self._unsafe.pop(event.blocks_safe.transfer_id, None)
                if quiesced is not None and not quiesced.done():
                    quiesced.set_result(None)
            case "lease_ended":
                lease = self._leases.pop(event.lease_ended.request_id, None)
                if lease is not None and not lease._ended.done():
                    if event.lease_ended.HasField("problem"):
                        refuse(lease._ended, problem_from_proto(event.lease_ended.problem))
                    else:
                        lease._ended.set_result(LeaseState(event.lease_ended.state))
            case "draining":
                self.draining.set()

    def _quiescence(self, event: engine_pb2.TransferEnded) -> asyncio.Future[None]:
        quiesced: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if event.blocks_safe:
            quiesced.set_result(None)
        else:
            quiesced = self._unsafe.setdefault(event.transfer_id, quiesced)
        return quiesced

    def _end(self, why: KvferryError) -> None:
        """There is no session any more: nothing that waits for its events will hear of them."""
        for receiving in self._receives.values():
            refuse(receiving.ended, why)
        for quiesced in self._unsafe.values():
            refuse(quiesced, why)
        for lease in self._leases.values():
            refuse(lease._ended, why)
        self._leases.clear()
        self._unsafe.clear()
