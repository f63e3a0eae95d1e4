"""The engine client for engines without an event loop: the same calls, from any thread.

    client = BlockingEngineClient.connect(socket, engine_id="decode", epoch=epoch)
    region = client.allocate(nbytes)
    client.register(manifest)
    pending = client.receive("req-1", tables, source=source)    # a concurrent.futures.Future
    pending.result(timeout=60).metadata

One thread of its own runs the asynchronous client. Close it, or use it as a context manager.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Any, TypeVar

from kvferry.engine import EngineClient, Lease, Received
from kvferry.errors import KvferryError
from kvferry.fences import Fence
from kvferry.manifest import Manifest
from kvferry.memory import CudaMemory, CudaRegion, SharedRegion, VmmMemory
from kvferry.schemas import LeaseState, SourceBody
from kvferry.tables import Tables

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
CALL_S = 30.0
"""How long a call may take that does not wait for another party."""
END_S = 5.0
"""How long those who wait are given to hear that the session is closed."""


class BlockingLease:
    """What was published under one request id."""

    def __init__(self, lease: Lease, ended: Future[LeaseState]) -> None:
        self.request_id = lease.request_id
        self.ended = ended
        """Resolves to RELEASED, EXPIRED or REVOKED: the blocks may be reused. Fails as `Lease.ended` does, and when the
        daemon goes away."""


class BlockingEngineClient:
    """One engine rank's session with its daemon. Make it with `connect`, end it with `close`."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvferry-client", daemon=True)
        self._thread.start()
        self._client: EngineClient | None = None
        self._leases: dict[str, BlockingLease] = {}

    @classmethod
    def connect(
        cls, socket: str, *, engine_id: str, epoch: str, rank: int = 0, world_size: int = 1, timeout_s: float = 10.0
    ) -> BlockingEngineClient:
        """As `EngineClient.connect`."""
        blocking = cls()
        try:
            blocking._client = blocking.call(
                EngineClient.connect(
                    socket, engine_id=engine_id, epoch=epoch, rank=rank, world_size=world_size, timeout_s=timeout_s
                ),
                timeout_s + 1,
            )
        except BaseException:
            blocking.close()
            raise
        return blocking

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
        return self.call(self.client.allocate(nbytes, region))

    def adopt(self, shared: SharedRegion | CudaMemory | VmmMemory) -> None:
        self.call(self.client.adopt(shared))

    def register(self, manifest: Manifest) -> tuple[str, ...]:
        return self.call(self.client.register(manifest))

    def fence(self, stream: int | torch.cuda.Stream, device: int = 0) -> Fence:
        """As `EngineClient.fence`: the calling thread gives the stream its fence before this returns."""
        if self.client.fences is None:
            self.open_fences(device if isinstance(stream, int) else stream.device.index)
        assert self.client.fences is not None
        return self.client.fences.after(stream, device)

    def open_fences(self, device: int = 0) -> None:
        """As `EngineClient.open_fences`."""
        self.call(self.client.open_fences(device))

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
    ) -> BlockingLease:
        """As `EngineClient.publish`; `ended` of the lease is a future."""
        lease = self.call(
            self.client.publish(
                request_id, tables, num_tokens, more=more, metadata=metadata, ttl_s=ttl_s, readers=readers, after=after
            )
        )
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
    ) -> Future[Received]:
        """As `EngineClient.receive`, at once: the future has the outcome.

        Cancelling it aborts the transfer; another receive of the request begins when that one's blocks are safe.
        """
        return self.start(
            self.client.receive(
                request_id, tables, tokens, source=source, deadline_s=deadline_s, priority=priority, way=way
            )
        )

    def abort(self, request_id: str) -> None:
        self.call(self.client.abort(request_id))

    def close(self) -> None:
        """End the session and the thread. Idempotent. What still waits fails with KvferryError (`session_closed`)."""
        if self._loop.is_closed():
            return
        client, self._client = self._client, None
        try:
            self.call(_end(client))
        finally:
            self._stop()

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

    def call(self, work: Coroutine[Any, Any, T], timeout_s: float = CALL_S) -> T:
        """The same, and wait for its result. Raises KvferryError: `deadline`, `session_closed`."""
        future = self.start(work)
        try:
            return future.result(timeout_s)
        except CancelledError:
            raise _closed() from None
        except TimeoutError:
            future.cancel()
            raise KvferryError(
                "deadline", f"the daemon did not answer within {timeout_s:g} s", remedy="see the daemon's log"
            ) from None


async def _end(client: EngineClient | None) -> None:
    """Close the client and let every call that waited tell its caller so."""
    if client is not None:
        await client.close()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        await asyncio.wait(others, timeout=END_S)


def _closed() -> KvferryError:
    return KvferryError("session_closed", "the session is closed", remedy="connect again")
