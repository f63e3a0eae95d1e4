"""How an engine rank speaks to the daemon beside it.

    async with await EngineClient.connect("/run/kvferry/engine.sock", engine_id="prefill", epoch=epoch) as client:
        region = await client.allocate(nbytes)          # daemon-owned: outlives a crash of the engine
        await client.register(manifest)                 # what lies where in it
        lease = await client.publish("req-1", tables, num_tokens=813, metadata=b"...")
        await lease.ended()                             # the blocks may be reused

    received = await other.receive("req-1", tables, source=SourceBody(engine_id="prefill", address="10.0.0.1:7411"))

The session lives as long as the client: when the process dies the daemon knows at once. When a session ends and both
live, the daemon revokes all leases, and nothing here says that blocks may be reused before it has.
`kvferry.blocking` has the same for engines without an event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, TypeVar

from kvferry import __version__
from kvferry.digest import check_weights
from kvferry.errors import Conflict, Deadline, KvferryError, Malformed, PeerFailed, Unavailable
from kvferry.handoff import Remembered
from kvferry.manifest import Manifest
from kvferry.memory import CudaMemory, CudaRegion, SharedRegion, VmmMemory, cuda, open_cuda_region, open_region
from kvferry.memory import vmm as cuda_vmm
from kvferry.memory.fences import Fence, Fences
from kvferry.outcomes import Lease, ReceiveCancelled, Received, Receiving, TransferFailed, Unsettled
from kvferry.rpc import PROTOCOL_MAX, PROTOCOL_MIN
from kvferry.schemas import LeaseState, SourceBody, TransferState
from kvferry.session import CALL_S, Sent, Session, refuse, settle
from kvferry.tables import Tables
from kvferry.v1 import engine_pb2, layout_pb2
from kvferry.wire import manifest_to_proto, problem_from_proto, tables_to_proto

if TYPE_CHECKING:
    import torch

__all__ = ["EngineClient", "Lease", "ReceiveCancelled", "Received", "TransferFailed", "Unsettled"]

E = TypeVar("E", LeaseState, TransferState)
LEAVE_S = 5.0
"""How long a receive that is cancelled waits for its transfer to end and its blocks to be safe."""
GRACE_S = 5.0
"""How long after the deadline of a receive the daemon may take to report its end."""
LOST = 4096
"""The most requests that a daemon is told to be lost."""
FILLED_PER_S, MOST_S = 512 << 20, 3600.0
"""At least so many bytes of new memory are filled, mapped and registered in a second; the longest that may take."""


class EngineClient:
    """One engine rank's session with its daemon. Make it with `connect`; as a context manager it ends with the block,
    also on an error, else with `close`."""

    def __init__(self, socket: str, epoch: str, call_timeout_s: float = CALL_S) -> None:
        self.epoch = epoch
        self._session = Session(socket, self._on_event, self._end, self._over, call_timeout_s)
        self._leases: dict[tuple[str, int], Lease] = {}
        """The key is (request, number). A lease that has ended is gone."""
        self._world_size = 1
        self._numbers = itertools.count(1)
        """Numbers for leases that the engine leaves to this client."""
        self._counted: dict[str, int] = {}
        """The last lease that this client has numbered, for each request."""
        self._attempts = itertools.count(1)
        """Numbers for receives that the engine leaves to this client."""
        self._receives: dict[str, Receiving] = {}
        """By request: under way, or given up and not quiet."""
        self._unquiet: dict[str, Receiving] = {}
        """By transfer: ended and not quiet."""
        self._opening = asyncio.Lock()
        self.fences: Fences | None = None
        """Once `open_fences` has returned."""
        self.peer_address = ""
        self.device = ""
        self._registering = asyncio.Lock()
        """Held by `register`; who publishes or receives waits for it."""
        self.weights = ""
        """The name of the engine's weights; empty for those that it registered with. See `replace_weights`."""
        self._cut: Remembered[None] = Remembered()
        """Requests of which a part was published when the weights were replaced."""
        self.lost: deque[tuple[str, int]] = deque(maxlen=LOST)
        """(request, number) of leases that nobody can read, at most the LOST newest: they ended with this session or
        with one that it resumes, or the session had ended when they were to be published. `register` tells the daemon,
        and clears it."""
        self.resumed = False
        """Whether the daemon still had the regions of the session that `resume` named."""
        self._deadline_s = 0.0
        self.closed = self._session.closed
        """Set when either side has ended the session: calls fail from then on."""
        self.over = self._session.over
        """Set once the daemon reads and writes nothing of the closed session any more. `close` always sets it."""
        self.draining = asyncio.Event()
        """Set while the daemon asks for no new work."""

    @classmethod
    async def connect(
        cls,
        socket: str,
        *,
        engine_id: str,
        epoch: str,
        rank: int = 0,
        world_size: int = 1,
        timeout_s: float = 10.0,
        call_timeout_s: float = CALL_S,
        resume: EngineClient | None = None,
    ) -> EngineClient:
        """Open the session. Waits for the daemon to come up, at most `timeout_s`.

        `epoch` is one value for all ranks of one start of the engine: nothing of an older epoch is ever read.
        call_timeout_s: how long the daemon may take to answer a call. resume: a client of this engine and epoch whose
        session has ended; see `resumed` and `lost`. Raises KvferryError: `unreachable`, `protocol`, or what the daemon
        refuses.
        """
        client = cls(socket, epoch, call_timeout_s)
        if resume is not None:
            client.lost, client.weights, client._cut = resume.lost, resume.weights, resume._cut
            client._numbers, client._attempts = resume._numbers, resume._attempts
        attach = engine_pb2.AttachRequest(
            protocol_min=PROTOCOL_MIN, protocol_max=PROTOCOL_MAX, client=f"kvferry/{__version__}",
            engine_id=engine_id, epoch=epoch, rank=rank, world_size=world_size, resume=resume.session if resume else "",
        )  # fmt: skip
        try:
            attached = await client._session.attach(attach, timeout_s)
        except BaseException:
            await client.close()
            raise
        client.peer_address, client.device, client.resumed = attached.peer_address, attached.device, attached.resumed
        client._deadline_s, client._world_size = attached.deadline_s, world_size
        return client

    @property
    def session(self) -> str:
        """The daemon's name for this session, to be given to `connect` as `resume`."""
        return self._session.id

    async def allocate(self, nbytes: int, region: int = 0) -> SharedRegion | CudaRegion:
        """Daemon-owned memory, zeroed, mapped here: on the daemon's GPU, or host memory where it has none.

        It is registered with NIXL once, by the daemon.
        """
        request = engine_pb2.AllocateRequest(session=self.session, region=region, nbytes=nbytes)
        memory = await self._session.call(self._session.stub.Allocate, request, _time_for(nbytes))
        if memory.WhichOneof("kind") == "cuda":
            given = memory.cuda
            place = given.handle, given.offset, memory.nbytes, given.allocation_nbytes, given.device_uuid
            mapped = await asyncio.to_thread(open_cuda_region, *place, region)
            if given.ticket:
                mapped.file = await self._session.fetch(given.ticket)
            return mapped
        file = await self._session.fetch(memory.handed.ticket)
        try:
            opened = open_region(file, memory.nbytes, region, memory.handed.offset)
        finally:
            os.close(file)
        await asyncio.to_thread(opened.populate)
        return opened

    async def adopt(self, shared: SharedRegion | CudaMemory | VmmMemory | CudaRegion, *, again: bool = False) -> None:
        """Hand over memory that this engine allocated and goes on owning: `memfd_region(...)` or `cuda_memory(...)`.

        The daemon gives it back when the session ends; until then it must not be freed. again: it is memory that
        `allocate` of a daemon that has gone returned; of GPUs only what `outlives_daemon`.
        """
        memory = engine_pb2.Memory(region=shared.id, nbytes=shared.nbytes, again=again)
        if isinstance(shared, CudaMemory | CudaRegion):
            memory.cuda.CopyFrom(engine_pb2.CudaAllocation(**asdict(shared.exported)))
            if isinstance(shared, CudaRegion):
                memory.cuda.ticket = await self._session.hand_over([shared.file])
        elif isinstance(shared, VmmMemory):
            allocations = cuda_vmm.export(shared.device, shared.address, shared.nbytes)
            try:
                ticket = await self._session.hand_over(allocations.files)
            finally:
                allocations.close()
            memory.vmm.CopyFrom(
                engine_pb2.CudaAllocations(
                    ticket=ticket, nbytes=allocations.nbytes, offset=allocations.offset, device_uuid=shared.device.uuid
                )
            )
        else:
            ticket = await self._session.hand_over([shared.file])
            memory.handed.CopyFrom(engine_pb2.HandedFile(ticket=ticket, offset=shared.offset))
        request = engine_pb2.AdoptRequest(session=self.session, memory=memory)
        await self._session.call(self._session.stub.Adopt, request)

    async def register(self, manifest: Manifest) -> tuple[str, ...]:
        """Describe the cache. Returns the daemon's notes about it, for people. Raises ManifestError.

        Meanwhile `publish` and `receive` wait, at most `call_timeout_s`. Who comes to read what is `lost` is refused at
        once.
        """
        request = engine_pb2.RegisterRequest(
            session=self.session, manifest=manifest_to_proto(manifest), weights=self.weights,
            lost=[engine_pb2.LostLease(request_id=request_id, lease=lease) for request_id, lease in self.lost],
        )  # fmt: skip
        timeout_s = _time_for(sum(region.nbytes for region in manifest.regions))
        async with self._registering:
            reply = await self._session.call(self._session.stub.Register, request, timeout_s)
        self.lost.clear()
        return tuple(reply.notes)

    async def fence(self, stream: int | torch.cuda.Stream, device: int = 0) -> Fence:
        """A point in a CUDA stream, behind the last write of KV: give it to `publish` as `after`, and wait for nothing.

        stream: torch's, or a cudaStream_t of this process's GPU number `device`. Raises KvferryError: `fence_on_host`,
        `stream_capturing`, `too_many_fences`, and what `hand_over` raises at the first time.
        """
        index = device if isinstance(stream, int) else stream.device.index
        return (self.fences or await self.open_fences(index)).after(stream, device)

    async def open_fences(self, device: int = 0) -> Fences:
        """Share the page that fences are made of with the daemon, and let this process's GPU number `device` write it.

        The first `fence` does so; do it before, as it takes milliseconds and may wait for work on the GPU. Idempotent.
        """
        if self.device == "cpu":
            message = "this engine's memory is host memory, which no stream writes"
            remedy = "publish when the writes have returned, without `after`"
            raise Malformed("fence_on_host", message, field="stream", value=self.device, remedy=remedy)
        async with self._opening:
            if self.fences is None:
                fences = Fences()
                try:
                    await asyncio.to_thread(fences.register, cuda.device(f"cuda:{device}"))
                    ticket = await self._session.hand_over([fences.file])
                    request = engine_pb2.OpenFencesRequest(session=self.session, ticket=ticket)
                    await self._session.call(self._session.stub.OpenFences, request)
                except BaseException:
                    fences.close()
                    raise
                fences.handed()
                self.fences = fences
            return self.fences

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
        weights: str | None = None,
        lease: int = 0,
        withdraw: bool = False,
    ) -> Lease:
        """The KV of tokens [0, num_tokens) is in these blocks, written and visible to other processes.

        That is a promise: synchronise the stream that writes it first, or give its `fence` as `after`; then readers see
        nothing of this publish, and of later ones, before the fence is reached. When it is not reached within the
        daemon's fence_timeout_s the lease is revoked, and `ended()` raises `fence_timeout`.

        more: further tokens follow in later calls with longer tables (progressive). metadata: at most 64 KiB,
        handed to the reader as it is. ttl_s, readers: 0 for the daemon's default and for one reading engine. digest:
        names what was computed, at most 64 bytes; a reader that expects another digest is refused (`other_prompt`).
        weights: what `weights` was when the first of these tokens was computed; None for what it is now. The
        publish is refused (`mixed_weights`) where they have been replaced since.
        lease: the number of this lease, from a counter of the engine's start, the same on all ranks; a higher one than
        before begins another lease of the request and ends the one before. 0 lets this client count, for an engine of
        one rank: a request that is published again after the end of its lease gets another number.

        Raises KvferryError when the daemon refuses it: what was published before it stays readable, or with `withdraw`
        nobody reads it any more. Unsettled when the daemon does not answer in time or the session ends first: it may be
        published, and is withdrawn; `quiesced()` waits until nobody reads it. It is withdrawn too
        when this call is cancelled.
        """
        request = engine_pb2.PublishRequest(
            request_id=request_id, tables=tables_to_proto(tables), num_tokens=num_tokens, more=more,
            metadata=metadata, ttl_s=ttl_s, readers=readers, digest=digest, lease=lease,
            weights=self.weights if weights is None else weights,
            after=None if after is None else engine_pb2.Fence(word=after.word, value=after.value),
        )  # fmt: skip
        if weights is None and request_id in self._cut:
            why = f"a part of request {request_id} was published before the weights were replaced"
            remedy = "abort the request and compute it again, or name the weights that computed all of it"
            raise Conflict("mixed_weights", why, field="weights", value=self.weights, remedy=remedy)
        await self._none_registers()
        return await self._publish(request, withdraw=withdraw)

    async def _publish(self, request: engine_pb2.PublishRequest, *, withdraw: bool) -> Lease:
        request_id, counted = request.request_id, not request.lease
        if counted:
            request.lease = self._number(request_id)
        key = request_id, request.lease
        known = self._leases.get(key)
        lease = known or Lease(*key, asyncio.get_running_loop().create_future())
        self._leases[key] = lease
        lease.more = request.more

        def forget(_: object = None) -> None:
            if known is None and self._leases.get(key) is lease:
                del self._leases[key]
                self._uncount(key)
            if self.closed.is_set():
                self.lost.append(key)

        try:
            await self._session.command(publish=request)
        except (Unsettled, asyncio.CancelledError) as error:
            try:  # revoke it behind the publish on the stream
                abort = self._session.send(abort=engine_pb2.EngineAbortRequest(request_id=request_id))
            except KvferryError:  # the session has ended
                forget()
                raise error from None
            abort.settled.add_done_callback(forget)  # not before: its end would be taken for that of the next one
            if isinstance(error, Unsettled):
                raise Unsettled(error, abort.settled) from None
            raise
        except KvferryError as error:
            forget()
            # The end of the one before came while this was on its way.
            if error.code == "lease_ended" and counted and self._leases.get(key) is not known:
                request.lease = 0
                return await self._publish(request, withdraw=withdraw)
            if withdraw and known is not None and not known.over:
                await self.withdraw(request_id)
            raise
        if lease.over:
            return lease
        return self._leases.setdefault(key, lease)  # a publish beside this one may have been refused

    def _number(self, request_id: str) -> int:
        """The number of the request's lease while it lasts, then of another. Raises KvferryError."""
        number = self._counted.get(request_id, 0)
        if (request_id, number) not in self._leases:
            number = self._counted[request_id] = self._next("lease", request_id, self._numbers)
        return number

    def _next(self, field: str, request_id: str, numbers: Iterator[int]) -> int:
        """The next number of a counter that only this rank has. Raises KvferryError (`number_required`)."""
        if self._world_size > 1:
            why = f"request {request_id} has no number of its {field}, and this engine has {self._world_size} ranks"
            remedy = f"give `{field}` from a counter of the engine, the same on all ranks"
            raise Malformed("number_required", why, field=field, value=0, remedy=remedy)
        return next(numbers)

    def _uncount(self, key: tuple[str, int]) -> None:
        if self._counted.get(key[0]) == key[1]:
            del self._counted[key[0]]

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
        zero: bool = False,
    ) -> Received:
        """Reserve these blocks for the request and wait for its KV.

        tokens: global range to move; None for all that is published, which the tables must then hold. source: where to
        read from; None when a router orders it. way: auto, direct, staged or mapped instead of what the daemon is
        configured to do; only with a source. digest: what the source must have published with; empty is not checked.
        attempt: the number of this attempt at the request, from a counter of the engine's start, the same on all ranks;
        a higher one than before ends that. 0 lets this client count, for an engine of one rank. zero: what the tokens
        leave of the blocks from the first token on is set to zero: behind the last one, and what the source has dropped
        of a sliding window.

        Raises TransferFailed, or KvferryError when the reservation is refused. The daemon keeps the deadline, which a
        router's order may move; when it does not answer GRACE_S after it, TransferFailed (`deadline`) says so.
        When this call is cancelled it aborts the transfer. It ends when the blocks are safe, or after LEAVE_S with
        ReceiveCancelled: then they are not, and `quiesced()` of that waits until they are.
        """
        request = engine_pb2.ReceiveRequest(
            request_id=request_id, tables=tables_to_proto(tables), deadline_s=deadline_s, priority=priority, way=way,
            digest=digest, attempt=attempt or self._next("attempt", request_id, self._attempts), weights=self.weights,
            zero=zero,
        )  # fmt: skip
        if tokens is not None:
            request.tokens.CopyFrom(layout_pb2.TokenRange(start=tokens[0], stop=tokens[1]))
        if source is not None:
            request.source.CopyFrom(engine_pb2.Source(**source.model_dump()))
        await self._none_registers()
        await self._none_before(request_id)
        sent = self._session.send(receive=request)
        receiving = self._receives[request_id] = Receiving()
        try:
            receiving.named((await self._session.answer(sent)).receive.transfer_id)
            event = await self._end_of(receiving, deadline_s or self._deadline_s)
        except asyncio.CancelledError:
            leaving = self._give_up(request_id, receiving, sent)
            with suppress(asyncio.CancelledError):  # impatience changes nothing for the blocks
                await asyncio.wait([leaving], timeout=LEAVE_S)
            cancelled = ReceiveCancelled(request_id, receiving.quiet)
            if not cancelled.blocks_safe:
                raise cancelled from None
            raise
        except Unsettled as error:
            self._give_up(request_id, receiving, sent)
            raise TransferFailed(error, "failed", receiving.quiet) from None
        except BaseException:  # refused: nothing was done
            self._leave(request_id)
            raise
        self._leave(request_id)
        if not receiving.quiet.done():
            self._unquiet[receiving.transfer_id] = receiving
        if event.state != "done":
            raise TransferFailed(problem_from_proto(event.problem), event.state, receiving.quiet)
        if request.weights != self.weights:  # replaced while its end was on its way here
            why = f"request {request_id} was received for weights {request.weights!r}, which have been replaced"
            remedy = "receive it anew; its prefill must have the same weights"
            other = Conflict("other_weights", why, field="weights", value=request.weights, remedy=remedy)
            raise TransferFailed(other, "failed", receiving.quiet)
        moved = event.tokens.start, event.tokens.stop
        return Received(request_id, event.transfer_id, event.nbytes, moved, event.metadata, event.lease)

    async def _none_registers(self) -> None:
        """Wait, for as long as a call may take, until `register` has returned. Raises KvferryError (`deadline`)."""
        try:
            async with asyncio.timeout(self._session.call_timeout_s), self._registering:
                pass
        except TimeoutError:
            why, remedy = "the engine's cache is still being registered: nothing was sent", "see the daemon's log"
            value = self._session.call_timeout_s
            raise Deadline("deadline", why, field="call_timeout_s", value=value, remedy=remedy) from None

    async def _none_before(self, request_id: str) -> None:
        """Wait, for as long as a call may take, until a receive of the request that was given up or aborted is gone."""
        before = self._receives.get(request_id)
        if before is not None and (before.leaving or before.aborted):
            with suppress(TimeoutError):
                async with asyncio.timeout(self._session.call_timeout_s):
                    await before.gone.wait()
        if request_id in self._receives:
            message = f"request {request_id} is being received already, or was and is not quiet"
            remedy = "wait for it, or abort it first"
            raise Conflict("receive_pending", message, field="request_id", value=request_id, remedy=remedy)

    def _leave(self, request_id: str) -> None:
        """The request may be received again."""
        self._receives.pop(request_id).gone.set()

    async def _end_of(self, receiving: Receiving, deadline_s: float) -> engine_pb2.TransferEnded:
        while receiving.end is None:
            try:
                async with asyncio.timeout(deadline_s):
                    await receiving.ended.wait()  # wakes this task in the same turn, as asyncio.wait or a shield do not
            except TimeoutError:
                # An order may have moved the deadline: the daemon keeps it, for as long as it is there to do so.
                await self._session.answer(self._session.send(probe=engine_pb2.Probe()), GRACE_S)
        if isinstance(receiving.end, KvferryError):
            raise receiving.end
        return receiving.end

    def _give_up(self, request_id: str, receiving: Receiving, sent: Sent) -> asyncio.Task[None]:
        """Nobody waits for this receive any more: abort its transfer. The task returned ends when it is quiet; until
        then the request cannot be received again."""

        async def left() -> None:
            with suppress(KvferryError):  # the session has ended, which will settle `quiet`
                answer = await sent.answered()  # before that the daemon has nothing to abort
                if answer.HasField("problem"):
                    receiving.quiet.set_result(None)
                    return
                receiving.named(answer.receive.transfer_id)
                if receiving.end is None:
                    self._session.send(abort=engine_pb2.EngineAbortRequest(request_id=request_id))
            await asyncio.wait([receiving.quiet])

        receiving.leaving = asyncio.create_task(left())
        receiving.leaving.add_done_callback(lambda _: self._leave(request_id))
        return receiving.leaving

    async def replace_weights(self, weights: str) -> None:
        """The engine's weights have been replaced, and are called `weights` from now on: one name on all its ranks, and
        on every engine that is to read what they compute; at most 256 characters.

        When this returns nobody can read what was published before; receives under way have failed (`other_weights`).
        Later publishes and receives carry the name, and are compared with the other side's before a byte moves. The
        cache, its memory and its registration stay. A request that was published in part is refused when more of it is
        published (`mixed_weights`), until it is aborted. Call it before the first token is computed by the new weights.

        Raises KvferryError (`malformed_weights`). Unsettled when the daemon does not answer in time: what was published
        may be readable until `quiesced()` returns; the name is the new one all the same.
        """
        check_weights(weights)
        if weights != self.weights:
            for (request_id, _), lease in self._leases.items():
                if lease.more:
                    self._cut[request_id] = None
        self.weights = weights
        await self._none_registers()
        try:
            await self._session.command(weights=engine_pb2.WeightsRequest(weights=weights))
        except Unsettled as error:
            if not self.closed.is_set():
                raise
            await error.quiesced()  # with the session ends all that was published in it

    async def abort(self, request_id: str) -> None:
        """End the request's transfer and revoke its lease on this rank. Idempotent.

        Raises Unsettled when the daemon does not answer in time or the session ends first.
        """
        self._cut.pop(request_id, None)
        if (receiving := self._receives.get(request_id)) is not None:
            receiving.aborted = True
        await self._session.command(abort=engine_pb2.EngineAbortRequest(request_id=request_id))

    async def withdraw(self, request_id: str) -> None:
        """`abort`, and return when nobody reads the request's blocks any more: they may be reused.

        Raises Unsettled when that is not known in twice `call_timeout_s`: the daemon lives and is silent.
        """
        try:
            await self.abort(request_id)
        except Unsettled as error:
            try:
                async with asyncio.timeout(self._session.call_timeout_s):
                    await error.quiesced()
            except TimeoutError:
                raise error from None

    async def close(self) -> None:
        """End the session: this engine does not touch its memory any more. Leases on daemon-owned memory stay readable
        until they are read or expire.

        What still waits, and every call from now on, raises KvferryError (`session_closed`).
        """
        await self._session.close()
        if self.fences is not None:
            self.fences.close()

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _on_event(self, event: engine_pb2.Event) -> None:
        match event.WhichOneof("kind"):
            case "transfer_ended" | "blocks_safe" as kind:
                told: engine_pb2.TransferEnded | engine_pb2.BlocksSafe = getattr(event, kind)
                if isinstance(told, engine_pb2.TransferEnded):
                    _end_of_kind(TransferState, told.state)
                receiving = self._unquiet.pop(told.transfer_id, None) or self._receives.get(told.request_id)
                if receiving is not None:
                    receiving.on_event(told)
            case "lease_ended":
                state = _end_of_kind(LeaseState, event.lease_ended.state)
                key = event.lease_ended.request_id, event.lease_ended.lease
                lease = self._leases.pop(key, None)
                self._uncount(key)
                if lease is not None and not lease._ended.done():
                    if event.lease_ended.HasField("problem"):
                        refuse(lease._ended, problem_from_proto(event.lease_ended.problem))
                    else:
                        lease._ended.set_result(state)
            case "draining":
                if event.draining.cancelled:
                    self.draining.clear()
                else:
                    self.draining.set()

    def _end(self, why: KvferryError) -> None:
        """The session has ended: receives under way have failed. Their blocks, and those of leases, are in doubt."""
        for receiving in self._receives.values():
            receiving.over(Unsettled(why, receiving.quiet))

    def _over(self, unknown: KvferryError | None) -> None:
        """Nothing of the session is read or written any more. unknown: why that will never be certain."""
        for receiving in (*self._receives.values(), *self._unquiet.values()):
            settle(receiving.quiet, unknown)
        message = "the session has ended, and with it the lease: nobody reads it any more"
        remedy = "connect again, and publish anew what is still to be read"
        over = unknown or Unavailable("daemon_gone", message, remedy=remedy)
        for lease in self._leases.values():
            refuse(lease._ended, over)
        self.lost.extend(self._leases)
        self._leases.clear()
        self._counted.clear()
        self._unquiet.clear()


def _end_of_kind(states: type[E], state: str) -> E:
    """The state in which something ended, as an event says. Raises KvferryError (`malformed_event`) for any other."""
    ends = {each.value: each for each in states if each.ended}
    if state not in ends:
        message, remedy = "the daemon told of an end that is not known", "run the engine and its daemon at one version"
        raise PeerFailed("malformed_event", message, field="state", value=state, remedy=remedy)
    return ends[state]


def _time_for(nbytes: int) -> float:
    return min(nbytes / FILLED_PER_S, MOST_S)
