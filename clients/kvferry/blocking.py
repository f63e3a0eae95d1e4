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
import inspect
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from kvferry.engine import EngineClient, Lease, Received, TransferFailed
from kvferry.errors import Conflict, Deadline, KvferryError, Unavailable
from kvferry.manifest import Manifest
from kvferry.memory import CudaMemory, CudaRegion, SharedRegion, VmmMemory
from kvferry.memory.fences import Fence, Fences
from kvferry.rpc import UNREACHABLE
from kvferry.schemas import LeaseState
from kvferry.session import CALL_S, session_closed

if TYPE_CHECKING:
    import torch

P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F")
END_S = 5.0
"""How long `close` waits until every call that was under way has failed with `session_closed`. Then it cancels them."""
AGAIN_S = 5.0
"""How long one attempt to attach again waits for a daemon."""
PAUSE_S = 1.0
"""Between the beginnings of two attempts. The first may be refused by the daemon that is just ending."""


class BlockingLease:
    """A lease published under one request id."""

    def __init__(self, lease: Lease, ended: Future[LeaseState]) -> None:
        self.request_id, self.lease = lease.request_id, lease
        self.ended = ended
        """Resolves to RELEASED, EXPIRED or REVOKED: the blocks may be reused. Fails as `Lease.ended` does."""


class Begun(Future[T]):
    """The outcome of a coroutine on a client's loop. A callback of a future runs on that loop's thread: there `result`
    and `exception` of one that is not done would wait for themselves, and raise KvferryError (`call_in_callback`)."""

    def __init__(self, loop: asyncio.AbstractEventLoop, thread: threading.Thread, work: Coroutine[Any, Any, T]) -> None:
        super().__init__()
        self._loop, self._thread = loop, thread
        self._task: asyncio.Task[T] | None = None
        loop.call_soon_threadsafe(self._begin, work)

    def _begin(self, work: Coroutine[Any, Any, T]) -> None:
        self._task = self._loop.create_task(work)
        self._task.add_done_callback(self._settle)

    def result(self, timeout: float | None = None) -> T:
        self._check_thread()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._check_thread()
        return super().exception(timeout)

    def cancel(self) -> bool:
        """Cancel the coroutine too."""
        cancelled = super().cancel()
        self._cancel_work()
        return cancelled

    def _cancel_work(self) -> None:
        with suppress(RuntimeError):  # the client is closed, and the future has ended
            self._loop.call_soon_threadsafe(lambda: self._task and self._task.cancel())

    def _check_thread(self) -> None:
        if not self.done():
            _check_thread(self._thread)

    def _settle(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            super().cancel()
        if not self.set_running_or_notify_cancel():
            return
        if (error := task.exception()) is not None:
            self.set_exception(error)
        else:
            self.set_result(task.result())


class Receipt(Begun[Received]):
    """The outcome of a receive: Received, or what `EngineClient.receive` raises."""

    def cancel(self) -> bool:
        """Abort the transfer. The future ends later, with TransferFailed in state `aborted`: the blocks may be reused
        once its `quiesced()` has returned. Returns False, as the future is not cancelled yet."""
        self._cancel_work()
        return False

    def _settle(self, task: asyncio.Task[Received]) -> None:
        try:
            self.set_result(task.result())
        except asyncio.CancelledError as cancelled:
            nothing_begun: asyncio.Future[None] = self._loop.create_future()
            nothing_begun.set_result(None)
            aborted = Conflict("aborted", "the receive was cancelled")
            self.set_exception(cancelled.__cause__ or TransferFailed(aborted, "aborted", nothing_begun))
        except BaseException as error:  # noqa: BLE001  raised where the result is asked for
            self.set_exception(error)


def _parameters_of(
    method: Callable[Concatenate[EngineClient, P], object],
) -> Callable[[Callable[..., T]], Callable[Concatenate[BlockingEngineClient, P], T]]:
    """For a method that passes all its arguments on to `method`: it is seen with the parameters of that one."""

    def named(function: Callable[..., T]) -> Callable[Concatenate[BlockingEngineClient, P], T]:
        of, own = inspect.signature(method), inspect.signature(function)
        function.__signature__ = of.replace(return_annotation=own.return_annotation)  # type: ignore[attr-defined]  # for inspect
        return function

    return named


class _MemoryGone(Unavailable):
    """No other daemon can be given the cache."""


class BlockingEngineClient:
    """An engine rank's session with its daemon. Make it with `connect`, end it with `close`."""

    def __init__(self, socket: str, attach: Callable[..., Awaitable[EngineClient]]) -> None:
        """attach: EngineClient.connect for this rank; it still takes timeout_s and resume."""
        self._daemon, self._attach = f"the daemon on {socket}", attach
        self._loop = asyncio.new_event_loop()
        self._over = False
        self._thread = threading.Thread(target=self._run, name="kvferry-client", daemon=True)
        self._gone = threading.Event()
        """The loop is closed. (A thread that `join` was interrupted for is taken for ended while it runs.)"""
        self._thread.start()
        self._giving = threading.Lock()
        self._ending: Future[None] | None = None
        """Once there is one nothing is given to the loop any more; the lock is held for both."""
        self._client: EngineClient | None = None
        self._staying: asyncio.Task[None] | None = None
        self._failed: EngineClient | None = None
        """Its session could not be taken up, and the daemon keeps all of the memory for the next."""
        # The next daemon is given all that this one was given: it is noted in the turn that hears of it, and under the
        # lock.
        self._noting = asyncio.Lock()
        self._address = ""
        self._allocated: list[SharedRegion | CudaRegion] = []
        self._adopted: list[SharedRegion | CudaMemory | VmmMemory] = []
        self._manifest: Manifest | None = None
        self._fences_of: int | None = None

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

        say: attach again whenever the session has ended, until `close`, and report it in words to this function. Until
        then calls fail; then `client` is another one, which knows nothing of what was published before.
        """
        attach = partial(
            EngineClient.connect, socket, engine_id=engine_id, epoch=epoch, rank=rank, world_size=world_size,
            call_timeout_s=call_timeout_s,
        )  # fmt: skip
        blocking = cls(socket, attach)
        try:
            blocking.call(blocking._open(timeout_s, say))
        except BaseException:
            blocking.close()
            raise
        return blocking

    def _run(self) -> None:
        """The thread: it ends with `_end`, whoever waits for that."""
        while not self._over:
            try:
                self._loop.run_forever()
            except BaseException as error:  # noqa: BLE001  a callback of a caller's has raised SystemExit
                self._loop.call_exception_handler({"message": "a callback failed", "exception": error})
        self._loop.close()
        self._gone.set()

    async def _open(self, timeout_s: float, say: Callable[[str], None] | None) -> None:
        self._client = client = await self._attach(timeout_s=timeout_s)
        self._address = client.peer_address
        if say is not None:
            self._staying = asyncio.create_task(self._stay(client, partial(self._say, say)))

    def _say(self, say: Callable[[str], None], words: str) -> None:
        """An engine that cannot be told attaches again all the same."""
        try:
            say(words)
        except BaseException as error:  # noqa: BLE001  SystemExit too would end the loop
            self._loop.call_exception_handler({"message": "kvferry's `say` failed", "exception": error})

    async def _stay(self, client: EngineClient, say: Callable[[str], None]) -> None:
        while True:
            await client.closed.wait()
            say(f"{self._daemon} has gone: nothing is published or received until there is one again")
            await client.over.wait()
            failures: Counter[str] = Counter()
            newest, before = client, client
            while client is before:
                next_at = self._loop.time() + PAUSE_S
                try:
                    newest = await self._attach(timeout_s=AGAIN_S, resume=newest)
                    await self._take_up(newest, before)
                    client = newest
                    await before.close()
                except _MemoryGone as error:
                    say(str(error))
                    return
                except Exception as error:  # noqa: BLE001  this process may lack a descriptor, for example
                    code = error.code if isinstance(error, KvferryError) else type(error).__name__
                    failures[code] += 1
                    if code != UNREACHABLE and failures[code] == 2:  # a daemon that is gone was reported before
                        say(f"this engine is not attached to {self._daemon} yet: {error}")
                    await asyncio.sleep(next_at - self._loop.time())  # no event tells when the daemon will accept it
            say(f"{self._daemon} is there again; what was published before is lost")

    async def _take_up(self, client: EngineClient, before: EngineClient) -> None:
        """The session after `before`, which is over: the daemon gets the manifest and new fences, and a new daemon the
        memory too. It is `client` before it is registered: a publish waits until it is. A session that fails can be
        resumed where it has all of the memory."""
        has_all = client.resumed
        try:
            async with self._noting:
                if client.peer_address != self._address:
                    raise Conflict(
                        "address_changed",
                        "the daemon is back with another address than the one that readers are told",
                        field="advertise",
                        value=client.peer_address,
                        remedy=f"let it advertise {self._address}, or start the engine again",
                    )
                for region in self._allocated if not client.resumed else ():
                    if isinstance(region, CudaRegion) and not region.outlives_daemon:
                        message = "the cache lies in GPU memory of a daemon that has gone, which no other can be given"
                        remedy = "start the engine again, beside a daemon with a keeper (kvferry keep) or node_dir"
                        raise _MemoryGone("memory_gone", message, field="region", value=region.id, remedy=remedy)
                    await client.adopt(region, again=True)
                has_all = True
                for memory in self._adopted:
                    await client.adopt(memory)
                if self._fences_of is not None:
                    await client.open_fences(self._fences_of)
                self._client = client
                if self._manifest is not None:
                    await client.register(self._manifest)
        except BaseException as error:
            self._client = before
            goes_on = has_all and isinstance(error, Exception)
            self._failed = client if goes_on else None
            await client.close(leave=not goes_on)
            raise
        self._failed = None

    @property
    def client(self) -> EngineClient:
        if self._client is None:
            raise session_closed()
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
        return self.call(self._noted(lambda: self.client.allocate(nbytes, region), self._allocated.append))

    def adopt(self, shared: SharedRegion | CudaMemory | VmmMemory) -> None:
        self.call(self._noted(lambda: self.client.adopt(shared), lambda _: self._adopted.append(shared)))

    def register(self, manifest: Manifest) -> tuple[str, ...]:
        def note(_: object) -> None:
            self._manifest = manifest

        return self.call(self._noted(lambda: self.client.register(manifest), note))

    def fence(self, stream: int | torch.cuda.Stream, device: int = 0) -> Fence:
        """As `EngineClient.fence`: the calling thread gives the stream its fence before this returns."""
        index = device if isinstance(stream, int) else stream.device.index
        return (self.client.fences or self.open_fences(index)).after(stream, device)

    def written(self, stream: torch.cuda.Stream) -> Fence | None:
        """A fence to publish `after`, for all that the stream was given until now; None when it had to be waited
        for."""
        try:
            return self.fence(stream)
        except KvferryError:  # too many are pending, or there is no daemon to take them
            stream.synchronize()
            return None

    def open_fences(self, device: int = 0) -> Fences:
        """As `EngineClient.open_fences`."""

        def note(_: object) -> None:
            self._fences_of = device

        return self.call(self._noted(lambda: self.client.open_fences(device), note))

    async def _noted(self, give: Callable[[], Coroutine[Any, Any, T]], note: Callable[[T], None]) -> T:
        """The result of what gives the daemon something, once that is noted for the next one."""
        async with self._noting:
            result = await give()
            note(result)
            return result

    @_parameters_of(EngineClient.publish)
    def publish(self, *args: Any, **named: Any) -> BlockingLease:
        """As `EngineClient.publish`; `ended` of the lease is a future."""
        lease = self.call(self.client.publish(*args, **named))
        return BlockingLease(lease, self.start(lease.ended()))

    @_parameters_of(EngineClient.receive)
    def receive(self, *args: Any, **named: Any) -> Receipt:
        """As `EngineClient.receive`, at once: the future has the outcome.

        Cancelling it aborts the transfer; another receive of the request begins when that one's blocks are safe.
        """
        return self._give(self.client.receive(*args, **named), self._receipt)

    def _receipt(self, receive: Coroutine[Any, Any, Received]) -> Receipt:
        return Receipt(self._loop, self._thread, receive)

    def replace_weights(self, weights: str) -> None:
        """As `EngineClient.replace_weights`; also while there is no daemon."""
        self.call(self.client.replace_weights(weights))

    def abort(self, request_id: str) -> None:
        self.call(self.client.abort(request_id))

    def close(self) -> None:
        """End the session and the thread. Idempotent. Calls that still wait fail with KvferryError
        (`session_closed`). A caller that is interrupted does not stop the end. Raises KvferryError
        (`call_in_callback`)."""
        _check_thread(self._thread)
        with self._giving:
            if self._ending is None:
                self._ending = asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        if not self._gone.wait(3 * CALL_S):
            message = f"the client's thread has not ended within {3 * CALL_S:g} s: a callback holds it up"
            remedy = "let callbacks of futures return at once"
            raise Deadline("deadline", message, field="thread", value=self._thread.name, remedy=remedy)
        if self._ending.done():
            self._thread.join(CALL_S)
            self._ending.result()

    async def _end(self) -> None:
        """Close the client, wait until every call has ended, and stop the loop."""
        try:
            if self._staying is not None:
                self._staying.cancel()
                await asyncio.wait([self._staying], timeout=END_S)
            client, self._client = self._client, None
            if client is not None:
                await client.close()
            if self._failed is not None:
                await self._failed._session.leave()
            for patient in (True, False):
                with suppress(TimeoutError):
                    async with asyncio.timeout(END_S):
                        while others := asyncio.all_tasks() - {asyncio.current_task()}:  # they may have begun others
                            if not patient:
                                for other in others:
                                    other.cancel()
                            await asyncio.wait(others)
        finally:
            self._loop.call_soon(self._stop)  # behind it the future of this is done

    def _stop(self) -> None:
        self._over = True
        self._loop.stop()

    def __enter__(self) -> BlockingEngineClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the client's loop, where `client` may be used. Earlier coroutines run first."""
        return self._give(work, lambda work: Begun(self._loop, self._thread, work))

    def _give(self, work: Coroutine[Any, Any, T], give: Callable[[Coroutine[Any, Any, T]], F]) -> F:
        with self._giving:
            if self._ending is None:
                return give(work)
        work.close()
        raise session_closed()

    def call(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """The same, and wait for its result. timeout_s: for work without a deadline of its own, which the calls of
        `client` have. Raises KvferryError: `deadline`, `session_closed`, `call_in_callback`."""
        try:
            _check_thread(self._thread)
        except KvferryError:
            work.close()
            raise
        return self._result(self.start(work), timeout_s)

    def _result(self, future: Future[T], timeout_s: float | None) -> T:
        try:
            return future.result(timeout_s)
        except CancelledError:
            raise session_closed() from None
        except TimeoutError:
            future.cancel()
            message = f"{self._daemon} did not answer within {timeout_s:g} s"
            raise Deadline("deadline", message, remedy="see the daemon's log") from None
        except BaseException:
            future.cancel()  # this thread was interrupted: nobody waits for it any more
            raise


def _check_thread(thread: threading.Thread) -> None:
    """Raises KvferryError (`call_in_callback`) on a client's own thread, which would wait for itself."""
    if threading.current_thread() is thread:
        message = "a blocking call in a callback of a future would wait for itself: this thread runs the calls"
        remedy = "call from another thread, or begin the call with `start` and give that future a callback"
        raise Conflict("call_in_callback", message, field="thread", value=thread.name, remedy=remedy)
