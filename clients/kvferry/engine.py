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
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from google.protobuf.message import Message

from kvferry import __version__
from kvferry.digest import check_weights
from kvferry.errors import Deadline, KvferryError, Malformed, PeerFailed
from kvferry.file import File
from kvferry.manifest import Manifest
from kvferry.memory import (
    CudaMemory,
    CudaRegion,
    SharedRegion,
    VmmMemory,
    cuda,
    open_cuda_region,
    open_descriptor_region,
    open_region,
)
from kvferry.memory import vmm as cuda_vmm
from kvferry.memory.fences import Fence, Fences
from kvferry.outcomes import Lease, Pending, Received, TransferFailed, Unsettled, refuse
from kvferry.protocol import book_events as b
from kvferry.protocol.book import Book
from kvferry.protocol.book_values import aborted
from kvferry.rpc import PROTOCOL_MAX, PROTOCOL_MIN
from kvferry.schemas import LeaseState, SourceBody, TransferState
from kvferry.session import CALL_S, Session, check_size, session_closed
from kvferry.tables import Tables
from kvferry.threads import made
from kvferry.v1 import engine_pb2
from kvferry.wire import manifest_to_proto, problem_from_proto, request_of, tables_to_proto

if TYPE_CHECKING:
    import torch

__all__ = ["EngineClient", "Lease", "Received", "TransferFailed", "Unsettled"]

E = TypeVar("E", LeaseState, TransferState)
LEASE_ENDS = {state.value: state for state in LeaseState if state.ended}
TRANSFER_ENDS = {state.value: state for state in TransferState if state.ended}
T = TypeVar("T")
PAGE_S = 5.0
"""How long `close` waits for a GPU that still registers the page of fences."""
LEAVE_S = 5.0
"""How long a receive that is cancelled waits for its transfer to end and its blocks to be safe."""
GRACE_S = 2.5
"""How long after the deadline of a receive, and after each answer behind that, the daemon may be silent. The engine has
its end 5 s after the deadline at the latest: this is for the daemon, and the rest for a machine that is busy."""
PROBE_S = 0.5
"""The part of GRACE_S before the daemon is asked whether it is there."""
ANSWER_S = GRACE_S - PROBE_S
"""The rest, for its answer."""
TAKEN = frozenset({"region_taken", "already_registered"})
"""A daemon refuses by these a call that asks again, in another way, for what it has given."""
EXPORT = "export the memory"
FILLED_PER_S, MOST_S = 512 << 20, 3600.0
"""At least so many bytes of new memory are filled, mapped and registered in a second; the longest that may take."""


class EngineClient:
    """An engine rank's session with its daemon. Make it with `connect`; as a context manager it ends with the block,
    also on an error, else with `close`."""

    def __init__(self, socket: str, epoch: str, call_timeout_s: float, book: Book) -> None:
        self.epoch, self._book = epoch, book
        self._session = Session(socket, self._on_event, self._on_end, self._on_over, call_timeout_s)
        self._opening = asyncio.Lock()
        self._ending: asyncio.Task[None] | None = None
        self.fences: Fences | None = None
        """Once `open_fences` has returned."""
        self._page: Fences | None = None
        """The same, from its first call on. The daemon is given no other one in this session."""
        self.peer_address = ""
        self.device = ""
        self._registering = asyncio.Lock()
        self._unanswered: defaultdict[int | None, list[tuple[object, str]]] = defaultdict(list)
        """Calls that the daemon may have obeyed though their answers were lost, by region (None: `register`): the
        arguments and the idempotency key of each."""
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
        client = cls(socket, epoch, call_timeout_s, Book(world_size, resume._book if resume else None))
        if resume is not None:
            client._unanswered = resume._unanswered
        attach = request_of(
            engine_pb2.AttachRequest, protocol_min=PROTOCOL_MIN, protocol_max=PROTOCOL_MAX,
            client=f"kvferry/{__version__}", engine_id=engine_id, epoch=epoch, rank=rank, world_size=world_size,
            resume=resume.session if resume else "",
        )  # fmt: skip
        try:
            attached = await client._session.attach(attach, timeout_s)
        except BaseException:
            await client.close(leave=resume is None)
            raise
        client.peer_address, client.device, client.resumed = attached.peer_address, attached.device, attached.resumed
        client._deadline_s = attached.deadline_s
        if resume is not None:
            resume._session.followed = True
        return client

    @property
    def session(self) -> str:
        """The daemon's name for this session, to be given to `connect` as `resume`."""
        return self._session.id

    @property
    def weights(self) -> str:
        """The name of the engine's weights; empty for those that it registered with. See `replace_weights`."""
        return self._book.start.weights

    @property
    def lost(self) -> tuple[tuple[str, int], ...]:
        """(request, number) of leases that nobody can read, the newest ones: they ended with this session or with one
        that it resumes, or the session had ended when they were to be published. `register` tells the daemon, and
        forgets them."""
        return tuple(self._book.start.lost)

    async def allocate(self, nbytes: int, region: int = 0) -> SharedRegion | CudaRegion:
        """Daemon-owned memory, zeroed, mapped here: on the daemon's GPU, or host memory where it has none.

        It is registered with NIXL once, by the daemon. A call that has failed, or was cancelled, can be repeated.
        """
        with self._once(region, nbytes) as key:
            of = engine_pb2.AllocateRequest
            request = request_of(of, session=self.session, region=region, nbytes=nbytes, idempotency_key=key)
            memory = await self._session.call(self._session.stub.Allocate, request, _time_for(nbytes))
            ticket = memory.cuda.ticket or memory.handed.ticket or memory.vmm.ticket
            file = await self._session.fetch(ticket) if ticket else None
            on_gpu = memory.WhichOneof("kind") != "handed"
            map_it = partial(_map, memory, region, file)
            return await self._made("map the memory", map_it, _time_for(nbytes), _unmap, on_gpu=on_gpu)

    @contextmanager
    def _once(self, which: int | None, given: object) -> Iterator[str]:
        """The idempotency key of a call. A call that repeats a failed one has the same key: the daemon may have done
        it, and its answer was lost."""
        unanswered = self._unanswered[which]
        call = next((each for each in unanswered if each[0] == given), (given, uuid.uuid4().hex))
        if call in unanswered:
            unanswered.remove(call)
        try:
            yield call[1]
        except BaseException as error:
            if not (isinstance(error, KvferryError) and error.code in TAKEN):  # else an earlier one was obeyed
                unanswered.append(call)
            raise
        unanswered.clear()

    async def _made(
        self, what: str, make: Callable[[], T], more_s: float = 0.0, end: Callable[[T], object] = lambda _: None, *,
        on_gpu: bool,
    ) -> T:  # fmt: skip
        """Made by a thread, which may wait for a GPU where it is `on_gpu`. what: is done, in words. more_s: added to
        `call_timeout_s`. Raises KvferryError (`deadline`)."""
        timeout_s = self._session.call_timeout_s + more_s
        try:
            return await made(f"kvferry-{what.split()[0]}", make, timeout_s, end)
        except TimeoutError:
            why, remedy = "a GPU's driver holds it up", "let its work end, and call again; if it hangs, start anew"
            if not on_gpu:
                why, remedy = "the machine has other work", "call again when it has less, or raise call_timeout_s"
            message = f"this process could not {what} within {timeout_s:g} s: {why}"
            value = self._session.call_timeout_s
            raise Deadline("deadline", message, field="call_timeout_s", value=value, remedy=remedy) from None

    async def unmap(self, region: SharedRegion | CudaRegion) -> None:
        """`region.close()`, by a thread: it may wait for a GPU, and a loop would stand still. Idempotent.

        Raises KvferryError (`deadline`) when that takes more than `call_timeout_s`; the memory is unmapped at last.
        """
        await self._made("unmap the memory", region.close, on_gpu=isinstance(region, CudaRegion))

    async def adopt(self, shared: SharedRegion | CudaMemory | VmmMemory | CudaRegion, *, again: bool = False) -> None:
        """Hand over memory that this engine allocated and goes on owning: `memfd_region(...)` or `cuda_memory(...)`.

        The daemon gives it back when the session ends; until then it must not be freed. again: it is memory that
        `allocate` of a daemon that has gone returned; of GPUs only what `outlives_daemon`.
        A call that has failed, or was cancelled, can be repeated.
        """
        with self._once(shared.id, (id(shared), shared)) as key:
            memory = await self._handed_over(shared)
            memory.again = again
            request = engine_pb2.AdoptRequest(session=self.session, memory=memory, idempotency_key=key)
            await self._session.call(self._session.stub.Adopt, request)

    async def _handed_over(self, shared: SharedRegion | CudaMemory | VmmMemory | CudaRegion) -> engine_pb2.Memory:
        memory = engine_pb2.Memory(region=shared.id, nbytes=shared.nbytes)
        if isinstance(shared, CudaMemory):
            memory.cuda.CopyFrom(engine_pb2.CudaAllocation(**asdict(shared.exported)))
        elif isinstance(shared, CudaRegion):
            exported = await self._made(EXPORT, lambda: shared.exported, on_gpu=True)
            ticket = await self._session.hand_over([shared.file.fileno()])
            if isinstance(exported, cuda_vmm.Allocations):
                memory.vmm.CopyFrom(_by_descriptors(ticket, exported, shared.device))
            else:
                memory.cuda.CopyFrom(engine_pb2.CudaAllocation(**asdict(exported), ticket=ticket))
        elif isinstance(shared, VmmMemory):
            export = partial(cuda_vmm.export, shared.device, shared.address, shared.nbytes)
            allocations = await self._made(EXPORT, export, end=cuda_vmm.Allocations.close, on_gpu=True)
            try:
                ticket = await self._session.hand_over(allocations.files)
            finally:
                allocations.close()
            memory.vmm.CopyFrom(_by_descriptors(ticket, allocations, shared.device))
        else:
            ticket = await self._session.hand_over([shared.file.fileno()])
            memory.handed.CopyFrom(engine_pb2.HandedFile(ticket=ticket, offset=shared.offset))
        return memory

    async def register(self, manifest: Manifest) -> tuple[str, ...]:
        """Describe the cache. Returns the daemon's notes about it, for people. Raises ManifestError.

        Meanwhile `publish` and `receive` wait, at most `call_timeout_s`. Readers of what is `lost` are refused at once.
        """
        async with self._registering:
            self._on(b.Register())
            told: tuple[tuple[str, int], ...] = ()
            try:
                describe = partial(manifest_to_proto, manifest)  # 15 ms for 2,000 parts
                described = await self._made("describe the cache", describe, on_gpu=False)
                timeout_s = _time_for(sum(region.nbytes for region in manifest.regions))
                lost = self.lost
                request = engine_pb2.RegisterRequest(
                    session=self.session, manifest=described, weights=self.weights,
                    lost=[engine_pb2.LostLease(request_id=request_id, lease=lease) for request_id, lease in lost],
                )  # fmt: skip
                with self._once(None, manifest) as request.idempotency_key:
                    reply = await self._session.call(self._session.stub.Register, request, timeout_s)
                told = lost
            finally:
                self._on(b.Registered(told))
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
            if self._ending is not None:
                raise session_closed()
            if self.fences is None:
                page = self._page = self._page or Fences()
                await self._made(
                    "register the page of fences", lambda: page.register(cuda.device(f"cuda:{device}")), on_gpu=True
                )
                ticket = await self._session.hand_over([page.file.fileno()])
                request = engine_pb2.OpenFencesRequest(session=self.session, ticket=ticket)
                try:
                    await self._session.call(self._session.stub.OpenFences, request)
                except KvferryError as error:
                    if error.code != "fences_open":  # else an earlier call was answered too late
                        raise
                page.handed()
                self.fences = page
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

        The call promises that: synchronise the stream that writes it first, or give its `fence` as `after`; then
        readers see nothing of this publish, and of later ones, before the fence is reached. When it is not reached
        within the daemon's fence_timeout_s the lease is revoked, and `ended()` raises `fence_timeout`.

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
        published, and is withdrawn; `quiesced()` waits until nobody reads it. It is withdrawn too when this call is
        cancelled: then `quiesced(request_id)` of this client waits.
        """
        request = request_of(
            engine_pb2.PublishRequest, request_id=request_id, tables=tables_to_proto(tables), num_tokens=num_tokens,
            more=more, metadata=metadata, ttl_s=ttl_s, readers=readers, digest=digest, lease=lease,
            weights=self.weights if weights is None else weights,
            after=None if after is None else engine_pb2.Fence(word=after.word, value=after.value),
        )  # fmt: skip
        held, pending = Lease(request_id, lease), self._pending("publish", request)
        self._on(b.Publish(pending, held, request_id, lease, more, withdraw, weights is None))
        try:
            await self._answer(pending)
        except asyncio.CancelledError:
            if pending.told.is_set() and pending.end is None:  # it was taken in this very turn
                abort = self._pending("abort", engine_pb2.EngineAbortRequest(request_id=request_id))
                self._on(b.Abort(abort, request_id))
                self._on(b.Leave(abort))
            raise
        assert pending.lease is not None
        return pending.lease

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
        router's order may move; when it is silent for GRACE_S then, TransferFailed (`deadline`) says so, whatever
        `call_timeout_s` is.
        When this call is cancelled it aborts the transfer. It ends when the blocks are safe, or after LEAVE_S:
        `quiesced(request_id)` of this client waits until they are, also where a timeout or a group has cancelled it.
        """
        request = request_of(
            engine_pb2.ReceiveRequest, request_id=request_id, tables=tables_to_proto(tables), deadline_s=deadline_s,
            priority=priority, way=way, digest=digest, weights=self.weights, zero=zero,
            tokens=None if tokens is None else {"start": tokens[0], "stop": tokens[1]},
            source=source.model_dump() if isinstance(source, SourceBody) else source,
        )  # fmt: skip
        pending = self._pending("receive", request)
        self._on(b.Receive(pending, request_id, attempt))
        try:
            await self._end_of(pending, deadline_s or self._deadline_s)
        except asyncio.CancelledError as cancelled:
            self._on(b.Leave(pending))
            with suppress(asyncio.CancelledError):  # impatience changes nothing for the blocks
                await asyncio.wait([pending.quiet], timeout=LEAVE_S)
            # asyncio.timeout and TaskGroup know no subclass of CancelledError: its cause tells of the blocks.
            raise cancelled from TransferFailed(aborted(request_id), "aborted", pending.quiet)
        except Unsettled as error:
            raise TransferFailed(error, "failed", pending.quiet) from None
        event = pending.end
        assert isinstance(event, engine_pb2.TransferEnded)
        if event.state != "done":
            raise TransferFailed(problem_from_proto(event.problem), event.state, pending.quiet)
        if pending.problem is not None:
            raise TransferFailed(pending.problem, "failed", pending.quiet)
        moved = event.tokens.start, event.tokens.stop
        return Received(request_id, event.transfer_id, event.nbytes, moved, event.metadata, event.lease)

    async def _end_of(self, pending: Pending, deadline_s: float) -> None:
        """Raises KvferryError as `_answer`, and Unsettled where the daemon is silent for GRACE_S: after the deadline,
        or when it is asked again later."""
        now, bound = asyncio.get_running_loop().time, ("deadline_s", deadline_s)
        probe_at, patience_s = now() + deadline_s + PROBE_S, deadline_s + GRACE_S
        if patience_s < self._session.call_timeout_s:
            await self._answer(pending, patience_s, event=pending.named, bound=bound)
        else:  # also where it is no number: the daemon says so
            await self._answer(pending, event=pending.named)
        while not pending.told.is_set():
            try:
                async with asyncio.timeout_at(probe_at):
                    await pending.told.wait()
            except TimeoutError:
                # An order may have moved the deadline: the daemon keeps it, for as long as it is there to do so.
                await self._probe(pending, bound)
                probe_at = now() + PROBE_S
        if isinstance(pending.end, KvferryError):
            raise pending.end

    async def _probe(self, pending: Pending, bound: tuple[str, float]) -> None:
        """Raises Unsettled when the daemon says nothing in time. A daemon that refuses to answer is there."""
        try:
            await self._ask(probe=engine_pb2.Probe(), timeout_s=ANSWER_S, bound=bound)
        except Unsettled:
            if not pending.told.is_set():
                self._on(b.Leave(pending))
                raise
        except KvferryError:
            pass

    def _pending(self, kind: str, request: Message) -> Pending:
        """Raises KvferryError (`message_too_large`)."""
        check_size(request, kind)
        return Pending(kind, request)

    async def _ask(
        self, *, timeout_s: float | None = None, bound: tuple[str, float] | None = None, **command: Message
    ) -> None:
        """A command of which nothing is noted. Raises KvferryError as `_answer`."""
        ((kind, request),) = command.items()
        pending = self._pending(kind, request)
        self._on(b.Probe(pending))
        await self._answer(pending, timeout_s, bound=bound)

    async def _answer(
        self,
        pending: Pending,
        timeout_s: float | None = None,
        event: asyncio.Event | None = None,
        bound: tuple[str, float] | None = None,
    ) -> None:
        """Raises KvferryError with what the daemon refuses; Unsettled when it does not answer in time (`deadline`) or
        the session ends first. event: what is waited for instead of the end. bound: the field that set timeout_s, and
        its value; None for `call_timeout_s`."""
        field, value = bound or ("call_timeout_s", self._session.call_timeout_s)
        timeout_s = self._session.call_timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await (event or pending.told).wait()
        except TimeoutError:
            self._on(b.Leave(pending))
            if not pending.told.is_set():
                whom = self._session.whom
                message = f"{whom} did not answer within {timeout_s:.3g} s: the blocks are not known to be quiet"
                remedy = "wait for quiesced() before reusing the blocks; see the daemon's log"
                late = Deadline("deadline", message, field=field, value=value, remedy=remedy)
                raise Unsettled(late, pending.quiet) from None
        except asyncio.CancelledError:
            self._on(b.Leave(pending))
            raise
        if isinstance(pending.end, KvferryError):
            raise pending.end

    async def replace_weights(self, weights: str) -> None:
        """The engine's weights have been replaced, and are called `weights` from now on: one name on all its ranks, and
        on every engine that is to read what they compute; at most 256 characters.

        When this returns nobody can read what was published before; receives under way have failed (`other_weights`).
        Later publishes and receives carry the name, and are compared with the other side's before a byte moves. The
        cache, its memory and its registration stay. A request that was published in part is refused when more of it is
        published (`mixed_weights`), until it is aborted. Call it before the first token is computed by the new weights.

        Raises KvferryError (`malformed_weights`). Unsettled when the daemon does not answer in time, or the session has
        ended and it does not confirm that in time: what was published may be readable until `quiesced()` returns; the
        name is the new one all the same.
        """
        check_weights(weights)
        pending = self._pending("weights", engine_pb2.WeightsRequest(weights=weights))
        self._on(b.ReplaceWeights(pending, weights))
        try:
            await self._answer(pending)
        except Unsettled as error:
            if not self.closed.is_set():
                raise
            await self._quiet(error)  # with the session ends all that was published in it

    async def abort(self, request_id: str) -> None:
        """End the request's transfer and revoke its lease on this rank. Idempotent.

        Raises Unsettled when the daemon does not answer in time or the session ends first.
        """
        request = request_of(engine_pb2.EngineAbortRequest, request_id=request_id)
        pending = self._pending("abort", request)
        self._on(b.Abort(pending, request_id))
        await self._answer(pending)

    async def withdraw(self, request_id: str) -> None:
        """`abort`, and return when nobody reads the request's blocks any more: they may be reused.

        Raises Unsettled when that is not known in twice `call_timeout_s`: the daemon lives and is silent.
        """
        try:
            await self.abort(request_id)
        except Unsettled as error:
            await self._quiet(error)

    async def _quiet(self, error: Unsettled) -> None:
        """Wait for its blocks as long as for an answer. Raises it when they are not known to be quiet then."""
        try:
            async with asyncio.timeout(self._session.call_timeout_s):
                await error.quiesced()
        except TimeoutError:
            raise error from None

    async def quiesced(self, request_id: str) -> None:
        """Wait until nothing reads or writes the blocks of calls for the request that have failed or were cancelled:
        the daemon has confirmed it, or is known to be dead. Calls that go on are not waited for.

        There is no deadline. Raises KvferryError (`session_closed`) for a client that was closed before it was known.
        """
        for pending in self._book.left(request_id):
            await asyncio.shield(pending.quiet)
        if self._book.unknown is not None:
            raise self._book.unknown

    async def close(self, *, leave: bool = True) -> None:
        """End the session: this engine does not touch its memory any more. Leases on daemon-owned memory stay readable
        until they are read or expire. A caller that is cancelled does not stop the end. Idempotent.

        Calls that wait, and all from now on, raise KvferryError (`session_closed`). It ends within about 10 s, whatever
        the daemon and the GPU do.

        leave: False where the engine goes on: its leases end, and the daemon's memory waits for a client that resumes
        this one.
        """
        if self._ending is None:
            self._ending = asyncio.create_task(self._end(leave), name="kvferry-close")
        await asyncio.shield(self._ending)

    async def _end(self, leave: bool) -> None:
        try:
            await self._session.close(leave=leave)
        finally:
            if self._page is not None:
                await self._close_page(self._page)

    async def _close_page(self, page: Fences) -> None:
        """The GPU may hold its registration up: what is left then is reported, and its thread goes on."""
        try:
            await made("kvferry-close", page.close, PAGE_S)
        except TimeoutError:
            message = f"a GPU has not let go of the page of fences within {PAGE_S:g} s: it stays for the process's life"
            asyncio.get_running_loop().call_exception_handler({"message": message})
        except RuntimeError:  # the process exits, and the page goes with it
            pass

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _on(self, event: b.Event) -> None:
        for effect in self._book.on(event):
            match effect:
                case b.Send(pending, id, number, lease):
                    if lease is not None:
                        pending.lease, lease.number, pending.request.lease = lease, number, number
                    elif number:
                        pending.request.attempt = number
                    self._session.send(id, pending.kind, pending.request)
                case b.SendAbort(id, request_id):
                    self._session.send(id, "abort", engine_pb2.EngineAbortRequest(request_id=request_id))
                case b.Named(pending):
                    pending.named.set()
                case b.Taken(pending):
                    pending.tell()
                case b.Refused(pending, why):
                    pending.tell(why)
                    pending.settle()
                case b.Doubtful(pending, why):
                    pending.tell(Unsettled(why, pending.quiet))
                case b.Ended(pending, end, problem):
                    pending.problem = problem
                    pending.tell(end)
                case b.Quiet(pending, unknown):
                    pending.settle(unknown)
                case b.LeaseEnded(lease, KvferryError() as why):
                    refuse(lease._ended, why)
                case b.LeaseEnded(lease, state):
                    lease._ended.set_result(state)

    def _on_event(self, event: engine_pb2.Event) -> None:
        match event.WhichOneof("kind"):
            case "answer":
                answer = event.answer
                problem = problem_from_proto(answer.problem) if answer.HasField("problem") else None
                self._on(b.Answered(answer.id, problem, answer.receive.transfer_id))
            case "transfer_ended":
                over = event.transfer_ended
                done = _ended(TRANSFER_ENDS, over.state) is TransferState.DONE
                self._on(b.TransferOver(over.request_id, over.transfer_id, over, done, over.blocks_safe))
            case "blocks_safe":
                self._on(b.BlocksSafe(event.blocks_safe.request_id, event.blocks_safe.transfer_id))
            case "lease_ended":
                ended = event.lease_ended
                state = _ended(LEASE_ENDS, ended.state)
                end = problem_from_proto(ended.problem) if ended.HasField("problem") else state
                self._on(b.LeaseOver(ended.request_id, ended.lease, end))
            case "draining":
                if event.draining.cancelled:
                    self.draining.clear()
                else:
                    self.draining.set()

    def _on_end(self, why: KvferryError) -> None:
        self._on(b.SessionLost(why))

    def _on_over(self, unknown: KvferryError | None) -> None:
        self._on(b.SessionOver(unknown))


def _map(memory: engine_pb2.Memory, region: int, file: File | None) -> SharedRegion | CudaRegion:
    """Map here what the daemon has allocated. file: the memory's own, or by which a keeper holds that of a GPU."""
    if memory.WhichOneof("kind") == "vmm":
        shared = memory.vmm
        return open_descriptor_region(
            file or File(-1), shared.offset, memory.nbytes, sum(shared.nbytes), shared.device_uuid, region
        )
    if memory.WhichOneof("kind") == "cuda":
        given = memory.cuda
        place = given.handle, given.offset, memory.nbytes, given.allocation_nbytes, given.device_uuid
        on_gpu = open_cuda_region(*place, region)
        if file is not None:
            on_gpu.file = file
        return on_gpu
    with file or File(-1) as handed:
        mapped = open_region(handed.fileno(), memory.nbytes, region, memory.handed.offset)
    try:
        mapped.populate()
    except BaseException:
        mapped.close()
        raise
    return mapped


def _by_descriptors(ticket: str, given: cuda_vmm.Allocations, device: cuda.Device) -> engine_pb2.CudaAllocations:
    return engine_pb2.CudaAllocations(
        ticket=ticket, nbytes=given.nbytes, offset=given.offset, device_uuid=device.uuid
    )  # fmt: skip


def _unmap(mapped: SharedRegion | CudaRegion) -> None:
    """Let go of memory for which its caller waits no more."""
    mapped.close()


def _ended(ends: Mapping[str, E], state: str) -> E:
    """The state in which something ended, as an event says. Raises KvferryError (`malformed_event`) for any other."""
    if state not in ends:
        message, remedy = "the daemon told of an unknown kind of end", "run the engine and its daemon at one version"
        raise PeerFailed("malformed_event", message, field="state", value=state, remedy=remedy)
    return ends[state]


def _time_for(nbytes: int) -> float:
    return min(nbytes / FILLED_PER_S, MOST_S)
