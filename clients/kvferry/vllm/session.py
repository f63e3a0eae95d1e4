"""A worker's orders to its daemon. It runs on the client's event loop: the worker does not wait for it."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, Queue
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from kvferry.blocking import BlockingEngineClient
from kvferry.engine import Unsettled
from kvferry.errors import KvferryError
from kvferry.handoff import lease_name
from kvferry.memory.fences import Fence
from kvferry.vllm.options import Options
from kvferry.vllm.step import Load, Publish

if TYPE_CHECKING:
    import torch

log = init_logger("vllm.kvferry.session")


class Before:
    """A point in a GPU's stream that all loads of a step wait for, by one thread."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event
        self._waiting: asyncio.Task[None] | None = None

    async def reached(self) -> None:
        if self._waiting is None:
            self._waiting = asyncio.create_task(asyncio.to_thread(self._event.synchronize))
        await asyncio.shield(self._waiting)


class End(enum.Enum):
    SENT = "nobody reads its blocks any more"
    ARRIVED = "its KV is there"
    FAILED = "nothing is written to its blocks any more, and its KV is not there"
    MIXED = "its KV was computed, at least in part, by weights that have been replaced: the daemon did not take it"
    UNPUBLISHED = "its KV cannot be read: the daemon did not take it, or has lost it"


class Session:
    """Called by the worker's thread; the work is done on the client's event loop.

    The worker's thread alone writes down which requests are published or loaded, in the order of its calls: the loop
    may come to the work late. Work that then finds another entry than its own, or none, has been taken back. Once said
    to the client, things are done in their order.
    """

    def __init__(self, daemon: BlockingEngineClient, options: Options) -> None:
        self._daemon = daemon
        self._options = options
        self._kept: dict[str, asyncio.Event] = {}
        """Requests that are published, each with what is set when the lease of its last publish has ended."""
        self._loading: dict[str, Load] = {}
        self._ends: Queue[tuple[str, End]] = Queue()
        self._together: list[Coroutine[Any, Any, None]] | None = None
        """The calls that were made inside `together` so far; None outside it."""

    @property
    def waiting(self) -> bool:
        """Whether the end of a load or of a lease is still to be told by `ended`."""
        return bool(self._loading or self._kept)

    def ended(self, wait_s: float) -> dict[End, set[str]]:
        """The requests that have ended in each way since the last call.

        wait_s: where nothing has ended yet, wait so long for the first.
        """
        ended: dict[End, set[str]] = {end: set() for end in End}
        with suppress(Empty):
            while True:
                request_id, end = self._ends.get(timeout=wait_s) if wait_s else self._ends.get_nowait()
                ended[end].add(request_id)
                wait_s = 0.0
                if end is End.SENT:
                    self._kept.pop(request_id, None)
                elif end in (End.ARRIVED, End.FAILED):
                    self._loading.pop(request_id, None)
        return ended

    @contextmanager
    def together(self) -> Iterator[None]:
        """Calls made inside this block begin in one turn of the client's event loop: the daemon gets them as one
        message and can do them as one piece of work."""
        self._together = []
        try:
            yield
        finally:
            works, self._together = self._together, None
            self._begin(works)

    def publish(self, publish: Publish, weights: str, after: Fence | None = None) -> None:
        """In the order of calls for each request. weights: the name of those that computed all of it. `after`: when the
        KV is in memory. Without a daemon it is dropped."""
        over = self._kept.setdefault(publish.request_id, asyncio.Event())
        self._start(self._publish(publish, weights, after, over))

    def hold(self, request_id: str) -> None:
        """Report the request, all of which is published, as sent when its lease has ended."""
        if (over := self._kept.get(request_id)) is not None:
            self._start(self._hold(request_id, over))
        else:
            log.error("request %s is to be held, and was not published", request_id)
            self._ends.put((request_id, End.SENT))

    def end_unread(self, request_id: str) -> None:
        """End its lease, which no reader will come for; it is reported as sent like any other that is held."""
        if (over := self._kept.get(request_id)) is not None:
            self._start(self._end_unread(request_id, over))

    def load(self, load: Load, before: Before | None = None) -> None:
        """Report the request as arrived when its KV is there, or when the load has failed and its blocks are safe.

        before: reached when no kernel of this engine writes to its blocks any more.
        """
        self._loading[load.request_id] = load
        self._start(self._load(load, before))

    def release(self, load: Load) -> None:
        self._start(self._receive(load))

    def refuse(self, request_id: str) -> None:
        self._ends.put((request_id, End.FAILED))

    def cancel(self, request_id: str) -> None:
        """The load is not needed any more: end it early. It is reported as any other."""
        if (load := self._loading.pop(request_id, None)) is not None:
            self._start(self._daemon.client.abort(load.origin.request_id))

    def revoke(self, request_id: str) -> None:
        """When this returns, no read of the request's blocks can succeed any more. Raises KvferryError."""
        if self._kept.pop(request_id, None) is not None:
            self._daemon.call(self._daemon.client.withdraw(lease_name(request_id)))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        if self._together is None:
            self._begin([work])
        else:
            self._together.append(work)

    def _begin(self, works: list[Coroutine[Any, Any, None]]) -> None:
        """In this order."""
        if works:
            self._daemon.start(self._all(works))

    async def _all(self, works: list[Coroutine[Any, Any, None]]) -> None:
        await asyncio.gather(*map(self._logged, works))

    async def _logged(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except KvferryError as error:  # without a daemon this was logged when it went
            (log.warning if self._daemon.alive else log.debug)("%s", error)
        except Exception:
            log.exception("kvferry's connector failed")

    async def _publish(self, publish: Publish, weights: str, after: Fence | None, over: asyncio.Event) -> None:
        try:
            if self._kept.get(publish.request_id) is not over:
                return  # revoked meanwhile
            lease = await self._daemon.client.publish(
                lease_name(publish.request_id), publish.tables, publish.num_tokens, digest=publish.digest,
                metadata=publish.metadata, more=not publish.last, after=after, ttl_s=self._options.lease_ttl_s,
                lease=publish.lease, withdraw=publish.last, weights=weights,
            )  # fmt: skip
            if publish.last:
                await lease.ended()
        except KvferryError as error:
            if publish.last and error.code != "aborted":  # aborted: revoked before it was sent
                mixed = error.code == "mixed_weights"
                self._ends.put((publish.request_id, End.MIXED if mixed else End.UNPUBLISHED))
            if isinstance(error, Unsettled):
                await error.quiesced()
            raise
        finally:
            if publish.last:
                over.set()

    async def _hold(self, request_id: str, over: asyncio.Event) -> None:
        await over.wait()
        if self._kept.get(request_id) is over:  # not revoked meanwhile
            self._ends.put((request_id, End.SENT))

    async def _end_unread(self, request_id: str, over: asyncio.Event) -> None:
        if not over.is_set():
            await self._daemon.client.abort(lease_name(request_id))

    async def _load(self, load: Load, before: Before | None) -> None:
        end = End.FAILED
        try:
            if before is not None:
                await before.reached()
            if self._loading.get(load.request_id) is load:  # not cancelled meanwhile
                await self._receive(load)
                end = End.ARRIVED
        except KvferryError as error:
            error.message = f"request {load.request_id} was not read: {error.message}"
            raise
        finally:
            self._ends.put((load.request_id, end))

    async def _receive(self, load: Load) -> None:
        try:
            await self._daemon.client.receive(
                load.origin.request_id, load.tables, load.tokens,
                source=load.origin.source, deadline_s=self._options.load_timeout_s, digest=load.origin.digest,
                attempt=load.attempt, zero=True,
            )  # fmt: skip
        except Unsettled as error:
            with suppress(KvferryError):  # the client is closed: the engine stops
                await error.quiesced()
            raise
