"""The engine client for engines without an event loop: the same calls, from any thread.

    client = BlockingEngineClient.connect(socket, engine_id="decode", epoch=epoch)
    region = client.allocate(nbytes)
    client.register(manifest)
    pending = client.receive("req-1", tables, source=source)    # a concurrent.futures.Future
    pending.result(timeout=60).metadata

One thread of its own runs the asynchronous client. Close it, or use it as a context manager. With `say` it attaches
again by itself when its daemon has gone and another is there.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from kvferry.attachment import Attachment
from kvferry.engine import EngineClient, Lease, ReceiveCancelled, Received, TransferFailed
from kvferry.errors import Conflict, Deadline, KvferryError, Unavailable
from kvferry.manifest import Manifest
from kvferry.memory import CudaMemory, CudaRegion, SharedRegion, VmmMemory
from kvferry.memory.fences import Fence
from kvferry.schemas import LeaseState, SourceBody
from kvferry.session import CALL_S
from kvferry.tables import Tables

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
END_S = 5.0
"""How long those who wait are given to hear that the session is closed."""
AGAIN_S = 5.0
"""How long one attempt to attach again waits for a daemon."""
REFUSED_S = 1.0
"""How long after a refusal the next attempt begins. The first may be the last word of the daemon that is going."""


class BlockingLease:
    """What was published under one request id."""

    def __init__(self, lease: Lease, ended: Future[LeaseState]) -> None:
        self.request_id = lease.request_id
        self.ended = ended
        """Resolves to RELEASED, EXPIRED or REVOKED: the blocks may be reused. Fails as `Lease.ended` does."""


class Receipt(Future[Received]):
    """What comes of a receive: Received, or what `EngineClient.receive` raises."""

    def __init__(self, loop: asyncio.AbstractEventLoop, receive: Coroutine[Any, Any, Received]) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self._loop = loop
        self._task: asyncio.Task[Received] | None = None
        loop.call_soon_threadsafe(self._begin, receive)

    def _begin(self, receive: Coroutine[Any, Any, Received]) -> None:
        self._task = self._loop.create_task(receive)
        self._task.add_done_callback(self._settle)

    def cancel(self) -> bool:
        """Abort the transfer. The future ends when that has been tried, with TransferFailed in state `aborted`: its
        blocks may be reused once `quiesced()` of that has returned. Never at once, so this returns False."""
        with suppress(RuntimeError):  # the client is closed, and so is this
            self._loop.call_soon_threadsafe(lambda: self._task and self._task.cancel())
        return False

    def _settle(self, task: asyncio.Task[Received]) -> None:
        quiesced: asyncio.Future[None] = self._loop.create_future()
        aborted = Conflict("aborted", "the receive was cancelled")
        try:
            self.set_result(task.result())
        except ReceiveCancelled as cancelled:
            self.set_exception(TransferFailed(aborted, "aborted", cancelled._quiesced))
        except asyncio.CancelledError:
            quiesced.set_result(None)
            self.set_exception(TransferFailed(aborted, "aborted", quiesced))
        except BaseException as error:  # noqa: BLE001  for whoever asks for the result
            self.set_exception(error)


class BlockingEngineClient:
    """One engine rank's session with its daemon. Make it with `connect`, end it with `close`."""

    def __init__(self, attachment: Attachment) -> None:
        self._attachment = attachment
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvferry-client", daemon=True)
        self._thread.start()
        self._client: EngineClient | None = None
        self._staying: asyncio.Task[None] | None = None
        self._leases: dict[str, BlockingLease] = {}

    @classmethod
    def connect(
        cls,
        socket: str,
        *,
        engine_id: str,
        epoch: str,
        rank: int = 0,
        world_size: int = 1,
        timeout_s: float = 10.0,
        call_timeout_s: float = CALL_S,
        say: Callable[[str], None] | None = None,
    ) -> BlockingEngineClient:
        """As `EngineClient.connect`.

        say: attach again whenever the session has ended, until `close`, and tell this function of it in words. Until
        then calls fail; then `client` is another one, that knows nothing of what was published before.
        """
        blocking = cls(Attachment(socket, engine_id, epoch, rank, world_size, call_timeout_s))
        try:
            blocking.call(blocking._open(timeout_s, say), timeout_s + 1)
        except BaseException:
            blocking.close()
            raise
        return blocking

    async def _open(self, timeout_s: float, say: Callable[[str], None] | None) -> None:
        self._client = client = await self._attachment.open(timeout_s)
        if say is not None:
            self._staying = asyncio.create_task(self._stay(client, say))

    async def _stay(self, client: EngineClient, say: Callable[[str], None]) -> None:
        where = f"the daemon on {self._attachment.socket}"
        while True:
            await client.closed.wait()
            say(f"{where} has gone: nothing is published or received until there is one again")
            await client.over.wait()
            refusals: Counter[str] = Counter()
            while client.closed.is_set():
                try:
                    before, self._client = client, await self._attachment.again(client, AGAIN_S)
                except KvferryError as error:
                    if error.code == "memory_gone":
                        say(str(error))
                        return
                    refusals[error.code] += 1
                    if error.code != "unreachable":  # that one has waited
                        if refusals[error.code] == 2:
                            say(f"{where} does not take this engine back yet: {error}")
                        await asyncio.sleep(REFUSED_S)  # another process can only be asked again
                else:
                    client = self._client
                    await before.close()
            say(f"{where} is there again; what was published before is lost")

    @property
    def client(self) -> EngineClient:
        if self._client is None:
            raise _closed()
        return self._client

    @property
    def peer_address(self) -> str:
        return self.client.peer_address

    @property
    def alive(self) -> bool:
        """Whether the session is open."""
        return self._client is not None and not self._client.closed.is_set()

    @property
    def draining(self) -> bool:
        return self.client.draining.is_set()

    def allocate(self, nbytes: int, region: int = 0) -> SharedRegion | CudaRegion:
        allocated = self.call(self.client.allocate(nbytes, region), None)
        self._attachment.allocated.append(allocated)
        return allocated

    def adopt(self, shared: SharedRegion | CudaMemory | VmmMemory) -> None:
        self.call(self.client.adopt(shared))
        self._attachment.adopted.append(shared)

    def register(self, manifest: Manifest) -> tuple[str, ...]:
        notes = self.call(self.client.register(manifest), None)
        self._attachment.manifest = manifest
        return notes

    def fence(self, stream: int | torch.cuda.Stream, device: int = 0) -> Fence:
        """As `EngineClient.fence`: the calling thread gives the stream its fence before this returns."""
        if self.client.fences is None:
            self.open_fences(device if isinstance(stream, int) else stream.device.index)
        assert self.client.fences is not None
        return self.client.fences.after(stream, device)

    def written(self, stream: torch.cuda.Stream) -> Fence | None:
        """What to publish `after` for all that the stream was given until now; None when it had to be waited for."""
        try:
            return self.fence(stream)
        except KvferryError:  # too many are pending, or there is no daemon to take them
            stream.synchronize()
            return None

    def open_fences(self, device: int = 0) -> None:
        """As `EngineClient.open_fences`."""
        self.call(self.client.open_fences(device))
        self._attachment.fences_of = device

    def publish(
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
    ) -> BlockingLease:
        """As `EngineClient.publish`; `ended` of the lease is a future."""
        lease = self.call(
            self.client.publish(
                request_id, tables, num_tokens, more=more, metadata=metadata, ttl_s=ttl_s, readers=readers, after=after,
                digest=digest,
            )
        )  # fmt: skip
        known = self._leases.get(request_id)
        if known is None or known.ended.done():
            known = self._leases[request_id] = BlockingLease(lease, self.start(lease.ended()))
            known.ended.add_done_callback(lambda _: self._leases.pop(request_id, None))
        return known

    def receive(
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
    ) -> Receipt:
        """As `EngineClient.receive`, at once: the future has the outcome.

        Cancelling it aborts the transfer; another receive of the request begins when that one's blocks are safe.
        """
        receive = self.client.receive(
            request_id, tables, tokens, source=source, deadline_s=deadline_s, priority=priority, way=way,
            digest=digest, attempt=attempt,
        )  # fmt: skip
        try:
            return Receipt(self._loop, receive)
        except RuntimeError:  # another thread has closed the client
            receive.close()
            raise _closed() from None

    def abort(self, request_id: str) -> None:
        self.call(self.client.abort(request_id))

    def close(self) -> None:
        """End the session and the thread. Idempotent. What still waits fails with KvferryError (`session_closed`)."""
        if self._loop.is_closed():
            return
        try:
            self.call(self._end())
        finally:
            self._stop()

    async def _end(self) -> None:
        """Close the client and let every call that waited tell its caller so."""
        if self._staying is not None:
            self._staying.cancel()
            await asyncio.wait([self._staying])
        client, self._client = self._client, None
        if client is not None:
            await client.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            await asyncio.wait(others, timeout=END_S)

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CALL_S)
        self._loop.close()

    def __enter__(self) -> BlockingEngineClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the client's loop, where `client` may be used. Those begun first run first."""
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:  # another thread has closed the client
            work.close()
            raise _closed() from None

    def call(self, work: Coroutine[Any, Any, T], timeout_s: float | None = 2 * CALL_S) -> T:
        """The same, and wait for its result. timeout_s: None for work that has a deadline of its own. Raises
        KvferryError: `deadline`, `session_closed`."""
        future = self.start(work)
        try:
            return future.result(timeout_s)
        except CancelledError:
            raise _closed() from None
        except TimeoutError:
            future.cancel()
            raise Deadline(
                "deadline", f"the daemon did not answer within {timeout_s:g} s", remedy="see the daemon's log"
            ) from None


def _closed() -> KvferryError:
    return Unavailable("session_closed", "the session is closed", remedy="connect again")
