"""Threads, futures that others settle, and several steps at once, on an event loop. Tasks and timers are made here, so
that each has an owner; tests/unit/test_one_owner.py lists the files that make their own still.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from kvferry.errors import KvferryError
from kvferryd.observe import logs

log = logs.get(__name__)
T = TypeVar("T")

QUIET_S, BUSY_S, NOTED_S, NOTES_S, NOTES, GATHERED_S = 2e-3, 1e-2, 0.2, 5e-4, 1024, 0.2
"""Notes: the pause before them, in which the next request may come, and that until a busy loop is looked at again; how
long they wait for one that is not busy; how much of a turn they may take; how many may wait; how long what they have
gathered waits."""
FEW = 8192
"""Segments or runs that are cut or expanded on the loop: half a millisecond at most. More take several, which others
would wait for; these are not worth the way to a thread and back."""


def beside(rows: int, work: Callable[[], T]) -> asyncio.Future[T]:
    """The result of `work` on so many rows of tables: by a thread, or done already where they are few."""
    loop = asyncio.get_running_loop()
    if rows > FEW:
        return loop.run_in_executor(None, work)
    worked: asyncio.Future[T] = loop.create_future()
    try:
        worked.set_result(work())
    except Exception as error:  # noqa: BLE001  raised where the result is awaited, as from a thread
        worked.set_exception(error)
    return worked


def carry_out(effects: Iterable[T], do: Callable[[T], None], **about: object) -> None:
    """Do the effects of a machine in their order. An effect that fails stops no other. about: more for its line."""
    for effect in effects:
        try:
            do(effect)
        except Exception:
            log.exception("an effect failed", step=type(effect).__name__, **about)


def when_done(future: asyncio.Future[T], then: Callable[[asyncio.Future[T]], object]) -> None:
    """Call `then` with the future: now if it is done, and not only at the loop's next turn."""
    if future.done():
        then(future)
    else:
        future.add_done_callback(then)


def settle(future: asyncio.Future[T], result: T | None = None, *, error: KvferryError | None = None) -> None:
    """Settle `future`: at once on its own loop, soon from any thread; nothing if it is settled, or its loop closed."""
    loop = future.get_loop()
    if asyncio._get_running_loop() is loop:
        _settle(future, result, error)
    elif not loop.is_closed():
        loop.call_soon_threadsafe(_settle, future, result, error)


def submit(
    hand_over: Callable[[Callable[[], None]], None], work: Callable[[], T], typed: Callable[[Exception], KvferryError]
) -> asyncio.Future[T]:
    """Hand `work` over to a thread. The future gets its result, or its error, which `typed` makes a KvferryError."""
    future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    def run() -> None:
        try:
            result = work()
        except Exception as error:  # noqa: BLE001  NIXL's, Triton's and torch's are of many kinds
            settle(future, error=typed(error))
        else:
            settle(future, result)

    hand_over(run)
    return future


async def made_on(
    hand_over: Callable[[Callable[[], None]], object], make: Callable[[], T], end: Callable[[T], None]
) -> T:
    """Call `make` on the thread of `hand_over`, and return its result. If the caller is cancelled
    first, the thread calls `end` with it, even when the loop has closed by then."""
    there: concurrent.futures.Future[T] = concurrent.futures.Future()

    def work() -> None:
        try:
            made = make()
        except Exception as error:  # noqa: BLE001  raised where it is awaited
            with contextlib.suppress(concurrent.futures.InvalidStateError):
                there.set_exception(error)
            return
        try:
            there.set_result(made)
        except concurrent.futures.InvalidStateError:  # cancelled
            end(made)

    hand_over(work)
    try:
        return await asyncio.wrap_future(there)
    except asyncio.CancelledError:
        if not there.cancel() and there.exception() is None:
            hand_over(lambda: end(there.result()))
        raise


class Worker:
    """A thread that does one piece of work after another; it starts with the first. `close` it: where its work hangs,
    `close` still returns after `timeout_s`, and the process can exit."""

    def __init__(self, name: str, begin: Callable[[], None] = lambda: None, end: Callable[[], None] = lambda: None):
        """begin, end: called on the thread, before and after all work."""
        self._begin, self._end = begin, end
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def put(self, work: Callable[[], None] | None) -> None:
        """None ends the thread: work that is put after that is never done."""
        self._inbox.put(work)
        if self._thread.ident is None:
            self._thread.start()

    async def close(self, timeout_s: float) -> bool:
        """Whether all is done within so many seconds, and the thread has ended. Idempotent."""
        self._inbox.put(None)
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join, timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        self._begin()
        while (work := self._inbox.get()) is not None:
            try:
                work()
            except Exception:
                log.exception("a thread's work broke; it goes on with the next", thread=self._thread.name)
        self._end()


def _settle(future: asyncio.Future[T], result: T | None, error: KvferryError | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
        future.exception()  # retrieved: its waiter may have been cancelled
    else:
        future.set_result(result)  # type: ignore[arg-type]  # None where T is None


async def all_over(futures: Collection[asyncio.Future[None]]) -> None:
    """When all are done. A wait that is cut off leaves them as they are: `await` and `gather` would cancel them, and
    what is cancelled is done."""
    if futures:
        await asyncio.wait(futures)


async def all_done(futures: Sequence[asyncio.Future[Any]]) -> None:
    """When all are done; raises what the first that fails raises. In the same turn where they are done already."""
    if not all(future.done() for future in futures):
        await asyncio.gather(*futures)
    for future in futures:
        future.result()


async def together(steps: Iterable[Coroutine[None, None, None]]) -> None:
    """All at once; the first failure ends the others, and is raised when they have ended."""
    # Not a TaskGroup: before Python 3.13 one whose child failed leaves the task's count of cancellations raised
    # (cpython gh-116720), and a deadline that passes later looks like an abort.
    every = list(steps)
    if len(every) == 1:
        await every[0]
        return
    async with running(every) as tasks:
        await asyncio.gather(*tasks)


async def unless(work: Coroutine[None, None, None], watches: Iterable[Coroutine[None, None, None]]) -> None:
    """The work, unless one of the watches fails first: that ends it, and is raised. Watches that go on are ended."""
    every = [work, *watches]
    if len(every) == 1:
        await work
        return
    async with running(every) as tasks:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in reversed(tasks):
            if task.done():
                task.result()


@contextlib.asynccontextmanager
async def running(steps: Iterable[Coroutine[Any, Any, T]]) -> AsyncIterator[list[asyncio.Task[T]]]:
    """Tasks of the steps. Tasks that are left at the end are cancelled, and have ended before the caller goes on."""
    tasks = [asyncio.create_task(step) for step in steps]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def to_the_end(steps: Iterable[Coroutine[None, None, None]]) -> None:
    """All at once, and all of them to their end, for what must not be cut off; then the first failure is raised."""
    for failed in await asyncio.gather(*steps, return_exceptions=True):
        if failed is not None:
            raise failed


async def uncut(work: Coroutine[Any, Any, T], unwanted: Callable[[T], Coroutine[None, None, None]]) -> T:
    """The result of work that must not be cut off. If the caller is cancelled first, the work ends all the same, and
    `unwanted` ends its result before the caller goes on."""
    task = asyncio.create_task(work)

    async def end() -> None:
        await asyncio.wait([task])
        if not task.cancelled() and task.exception() is None:
            await unwanted(task.result())

    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([asyncio.create_task(end())])
        raise


class Tasks(set["asyncio.Task[Any]"]):
    """Work that outlasts whoever started it, until it has ended."""

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self.add(task)
        task.add_done_callback(self.discard)
        return task

    async def end(self) -> None:
        """Cancel them all, and return when they have ended."""
        for task in self:
            task.cancel()
        if self:
            await asyncio.wait(self)


class Timer:
    """Rings once, at the time for which it was set last, by the loop's clock."""

    def __init__(self, ring: Callable[[], object]) -> None:
        self._ring = ring
        self._handle: asyncio.TimerHandle | None = None

    def set(self, at: float | None) -> None:
        """None: it does not ring."""
        if self._handle is not None:
            if self._handle.when() == at:
                return
            self._handle.cancel()
            self._handle = None
        if at is not None:
            self._handle = asyncio.get_running_loop().call_at(at, self._rings)

    def ring_by(self, at: float | None) -> None:
        """Set it, unless it rings earlier already: it may ring too early, and is not set anew each time."""
        if self._handle is None or at is None or at < self._handle.when():
            self.set(at)

    def _rings(self) -> None:
        self._handle = None
        self._ring()


class Notes:
    """Lines, metrics and records of requests that are over. They are written when nothing is `busy`, or NOTED_S later,
    and little at a time. GATHERED_S later `written` writes what was gathered; `flush` does all of it at once."""

    def __init__(self, busy: Callable[[], bool], written: Callable[[], None] = lambda: None) -> None:
        self._busy, self._written = busy, written
        self._notes: deque[Callable[[], None]] = deque()
        self._since = 0.0
        """When the first of them came."""
        self._timer: asyncio.TimerHandle | None = None
        self._gathered = Timer(written)

    def add(self, note: Callable[[], None]) -> None:
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._since, self._timer = loop.time(), loop.call_later(QUIET_S, self._write)
        self._notes.append(note)

    def __len__(self) -> int:
        return len(self._notes)

    def flush(self) -> None:
        while self._notes:
            self._write_one()
        self._gathered.set(None)
        self._written()

    def _write(self) -> None:
        loop, until, pause_s = asyncio.get_running_loop(), time.monotonic() + NOTES_S, BUSY_S
        if not self._busy() or loop.time() - self._since > NOTED_S or len(self._notes) > NOTES:
            pause_s = QUIET_S
            while self._notes and (time.monotonic() < until or len(self._notes) > NOTES):
                self._write_one()
            self._gathered.ring_by(loop.time() + GATHERED_S)
        self._timer = loop.call_later(pause_s, self._write) if self._notes else None

    def _write_one(self) -> None:
        try:
            self._notes.popleft()()
        except Exception:
            log.exception("a note broke")  # the request is over all the same
