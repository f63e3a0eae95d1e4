"""A worker's session with its daemon, on an event loop in a thread of its own: the worker itself never waits for it."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from vllm.logger import init_logger

from kvferry.engine import EngineClient, Lease, TransferFailed
from kvferry.errors import KvferryError
from kvferry.vllm.options import Options
from kvferry.vllm.step import Load, Publish

log = init_logger("vllm.kvferry.session")
T = TypeVar("T")
CALL_S = 30.0
"""How long the worker waits for its daemon where it must: at the start, and before it reuses blocks of a live lease."""


class Event(Protocol):
    """A CUDA event, or nothing to wait for."""

    def synchronize(self) -> None: ...


@dataclass(slots=True, eq=False)
class Kept:
    """One request's lease. Its end is reported when it has one and the scheduler waits for it."""

    queue: asyncio.Queue[tuple[Publish, Event | None]] = field(default_factory=asyncio.Queue)
    task: asyncio.Task[None] | None = None
    held: bool = False


class Session:
    """Make it with `connect`, end it with `close`. `sent`, `arrived` and `failed` are for the worker to empty."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._kept: dict[str, Kept] = {}
        self._loading: dict[str, str] = {}
        self.sent: deque[str] = deque()
        self.arrived: deque[str] = deque()
        self.failed: deque[str] = deque()
        """Those of `arrived` that hold nothing of use, told before."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvferry-session", daemon=True)
        self._thread.start()
        self.client: EngineClient

    @classmethod
    def connect(cls, options: Options, socket: str, engine_id: str, epoch: str, rank: int, world_size: int) -> Session:
        """Waits for the daemon, at most connect_timeout_s. Raises KvferryError."""
        session = cls(options)
        timeout_s = options.connect_timeout_s
        opening = EngineClient.connect(
            socket, engine_id=engine_id, epoch=epoch, rank=rank, world_size=world_size, timeout_s=timeout_s
        )
        try:
            session.client = session.call(opening, timeout_s + CALL_S)
        except BaseException:
            session._stop()
            raise
        return session

    def call(self, work: Coroutine[Any, Any, T], timeout_s: float = CALL_S) -> T:
        """Run it on the loop and wait. Raises KvferryError (`deadline`)."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            raise KvferryError(
                "deadline", f"the daemon did not answer in {timeout_s:g} s", remedy="see the daemon's log"
            ) from None

    def publish(self, publish: Publish, ready: Event | None = None) -> None:
        """In the order of calls for each request; `ready`: when the KV is in memory."""
        self._loop.call_soon_threadsafe(self._enqueue, publish, ready)

    def hold(self, request_id: str) -> None:
        """Report the request in `sent` once nobody reads its blocks any more."""
        self._loop.call_soon_threadsafe(self._hold, request_id)

    def load(self, load: Load) -> None:
        """Report the request in `arrived` when its KV is there, or never will be and its blocks are safe."""
        self._loading[load.request_id] = load.origin.request_id
        self._start(self._load(load))

    def release(self, load: Load) -> None:
        self._start(self._receive(load))

    def cancel(self, request_id: str) -> None:
        """The load will not be needed: it is reported as any other, sooner."""
        if (remote := self._loading.get(request_id)) is not None:
            self._start(self.client.abort(remote))

    def revoke(self, request_id: str) -> None:
        """When this returns no read of the request's blocks will be taken for whole. Raises KvferryError."""
        self.call(self._revoke(request_id))

    def close(self) -> None:
        """What is published stays readable until it is read or expires."""
        try:
            self.call(self._end())
        finally:
            self._stop()

    async def _end(self) -> None:
        await self.client.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            await asyncio.wait(others, timeout=5.0)

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CALL_S)
        self._loop.close()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(_logged(work), self._loop)

    def _enqueue(self, publish: Publish, ready: Event | None) -> None:
        kept = self._kept.setdefault(publish.request_id, Kept())
        kept.queue.put_nowait((publish, ready))
        if kept.task is None:
            kept.task = asyncio.create_task(_logged(self._keep(publish.request_id, kept)))

    def _hold(self, request_id: str) -> None:
        kept = self._kept.setdefault(request_id, Kept())
        kept.held = True
        if kept.task is None or kept.task.done():
            self._report(request_id, kept)

    def _report(self, request_id: str, kept: Kept) -> None:
        if kept.held and self._kept.get(request_id) is kept:
            del self._kept[request_id]
            self.sent.append(request_id)

    async def _keep(self, request_id: str, kept: Kept) -> None:
        try:
            lease = await self._publish(kept)
            state = await lease.ended()
            log.debug("the lease of request %s is %s", request_id, state)
        finally:
            self._report(request_id, kept)

    async def _publish(self, kept: Kept) -> Lease:
        while True:
            publish, ready = await kept.queue.get()
            if ready is not None:
                await asyncio.to_thread(ready.synchronize)
            lease = await self.client.publish(
                publish.request_id,
                publish.tables,
                publish.num_tokens,
                more=not publish.last,
                metadata=publish.metadata,
                ttl_s=self._options.lease_ttl_s,
            )
            if publish.last:
                return lease

    async def _revoke(self, request_id: str) -> None:
        kept = self._kept.pop(request_id, None)
        if kept is not None and kept.task is not None:
            kept.task.cancel()
        with suppress(asyncio.CancelledError):
            if not self.client.closed.is_set():  # a daemon that is gone serves no reader
                await self.client.abort(request_id)

    async def _load(self, load: Load) -> None:
        whole = False
        try:
            await self._receive(load)
            whole = True
        finally:
            if not whole:
                self.failed.append(load.request_id)
            self._loading.pop(load.request_id, None)
            self.arrived.append(load.request_id)

    async def _receive(self, load: Load) -> None:
        try:
            await self.client.receive(
                load.origin.request_id,
                load.tables,
                load.tokens,
                source=load.origin.source,
                deadline_s=self._options.load_timeout_s,
            )
        except TransferFailed as error:
            with suppress(KvferryError):  # the daemon is gone, and its reads with it
                await error.quiesced()
            raise


async def _logged(work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except KvferryError as error:
        log.warning("%s", error)
    except Exception:
        log.exception("kvferry's connector failed")
        raise
