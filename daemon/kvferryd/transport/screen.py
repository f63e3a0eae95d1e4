"""Peers' NIXL metadata is loaded, connected and read from once in other processes first, which may die of it.

A process tries all that it is given beside each other, and says of each as soon as it knows: a peer whose fabric is
silent is given its time and takes nobody else's. Only a process that has had no other peer speaks against one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvferry.errors import Full
from kvferryd.aio import Tasks, Timer, settle, uncut
from kvferryd.transport import screening
from kvferryd.transport.metadata import Metadata, malformed
from kvferryd.transport.read import Span, TransportError, nixl_failed
from kvferryd.transport.screening import ASKED, DIED, FINE, LATE, READY

START_S = 60.0
"""The longest that a process may take to find a place and to come up, which takes seconds on a busy machine."""
LOADS = 128
"""Peers that one process loads in all: UCX closes a connection, at both ends, only when one of their processes ends."""
MOST = 1024
"""Peers that may wait at a time."""
PROCESSES = 8
"""Processes at a time, of 60 MB each. The newest takes all that come; others end with the peers that are still
silent, or have one suspect each."""
RESTS_S = 10.0
"""A process that nobody has asked for so long makes way for a fresh one: its connections end with it."""
SOON_S = 5.0
"""A process that has not taken a question by then may hang in another peer's metadata: the next is given it, and has as
long as the peer."""
ENDS_S = 5.0
"""How long a process may take to end that is killed."""
IN_USE = "all processes that try peers' metadata are in use"
READING = 0.8
"""The part of the time for an answer in which a process reads. In the rest it can say which peers are late."""


class Screen:
    """Owns the processes: the first is started by `prepare` or when it is needed. `close` it."""

    def __init__(self) -> None:
        self._waiting, self._closed = 0, False
        self._places = asyncio.Semaphore(PROCESSES)
        self._processes: set[_Process] = set()
        self._common: _Process | None = None
        """Takes all peers that come."""
        self._tasks = Tasks()
        self._next: asyncio.Task[_Process] | None = None
        """Starts the next process: once for all callers, each of which may leave."""
        self._rest = Timer(self._renew)

    @property
    def held_up(self) -> str:
        """Why no peer is tried for now; empty where they are."""
        return IN_USE if self._next is not None and self._places.locked() else ""

    async def prepare(self) -> None:
        """Start a process now, so that the next `check` need not wait: half a second. `check` meets a failure again."""
        with contextlib.suppress(TransportError):
            await self._for_all()

    async def check(self, metadata: Metadata, spans: Sequence[Span], timeout_s: float) -> None:
        """Load it and read a byte of each span of host memory.

        timeout_s: for the peer's answers, from when a process has taken the question; another process, for a peer of
        which the first has died, has as long again.

        Raises Full (`screen_full`). TransportError: `malformed_metadata` where a process died of it, `peer_unreachable`
        where it did not answer in time, `transport_failed` with what NIXL said.
        """
        if self._waiting >= MOST:
            why, remedy = "too many peers are being met for the first time", "try again when their handshakes are over"
            raise Full("screen_full", why, field="peers", value=MOST, remedy=remedy)
        rows = [(span.address, 1, 0) for span in spans if span.kind == "host"]
        question = [READING * timeout_s, metadata.alias, metadata.blob.hex(), rows]
        self._waiting += 1
        try:
            said, final = await self._ask(question, timeout_s, alone=False)
            if not final and said not in (FINE, LATE):
                said, _ = await self._ask(question, timeout_s, alone=True)
        finally:
            self._waiting -= 1
        if said == LATE:
            raise TransportError("peer_unreachable", "NIXL did not connect to the peer", value=timeout_s)
        if said == DIED:
            raise malformed("the process that tried it died of it")
        if said != FINE:
            raise nixl_failed(said, said)

    async def _ask(self, question: list[Any], timeout_s: float, *, alone: bool) -> tuple[str, bool]:
        """(what a process says of it, whether that process has had no other). A process that dies, or hangs in another
        peer's metadata, before it takes the question tells nothing of this peer: another is asked, once."""
        for soon_s in (min(SOON_S, timeout_s), timeout_s):
            process = await (self._start() if alone else self._for_all())
            try:
                said = await process.ask(question, soon_s, timeout_s)
            finally:
                if process.spent:
                    await self._let_go(process)
                self._rest.set(asyncio.get_running_loop().time() + RESTS_S)
            if said is not None:
                return said, process.given == 1
        raise TransportError("transport_failed", "the process that tries peers' metadata dies before it tries any")

    def _renew(self) -> None:
        """The end of a question that is still asked sets the timer anew."""
        if self._common is not None and not self._common.trying:
            self._common.spoiled = True
            self._tasks.spawn(self.prepare())

    async def _for_all(self) -> _Process:
        if self._common is not None and not self._common.spoiled:
            return self._common
        if self._next is None:
            self._next = self._tasks.spawn(self._start_next())
        return await asyncio.shield(self._next)

    async def _start_next(self) -> _Process:
        try:
            if self._common is not None and self._common.spent:
                await self._let_go(self._common)
            self._common = await self._start()
            return self._common
        finally:
            self._next = None

    async def _start(self) -> _Process:
        """Waits for a place: every process ends by its peers' deadlines. Raises TransportError (`transport_failed`)."""
        until = asyncio.get_running_loop().time() + START_S
        if self._closed:
            raise TransportError("transport_failed", "the daemon stops")
        try:
            async with asyncio.timeout_at(until):
                await self._places.acquire()
        except TimeoutError:
            remedy = "see which peers do not answer"
            raise TransportError("transport_failed", IN_USE, value=PROCESSES, remedy=remedy) from None
        try:
            process = await _started(until)
        except BaseException:
            self._places.release()
            raise
        self._processes.add(process)
        return process

    async def _let_go(self, process: _Process) -> None:
        """Once; its place is another's then."""
        if process in self._processes:
            self._processes.remove(process)
            self._places.release()
            await process.end()

    async def close(self) -> None:
        """Nothing is started any more."""
        self._closed = True
        self._rest.set(None)
        await self._tasks.end()
        self._common = None
        for process in list(self._processes):
            await self._let_go(process)


class _Trial(NamedTuple):
    """A peer in a process. asked: whether the process has the question, or has died without it."""

    asked: asyncio.Future[bool]
    answer: asyncio.Future[str]


class _Process:
    """A process, and the peers that it tries. given: how many it has had. spoiled: it takes no others, as a failed
    load may have left anything behind in it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process, self._stdin, self._stdout = process, process.stdin, process.stdout
        self.given, self.spoiled = 0, False
        self._trials: dict[int, _Trial] = {}
        self._tasks = Tasks()
        self._reading = self._tasks.spawn(self._read())

    @property
    def trying(self) -> bool:
        return bool(self._trials)

    @property
    def spent(self) -> bool:
        """The process has nobody waiting for it, now or later."""
        return self.spoiled and not self.trying

    async def ask(self, question: list[Any], soon_s: float, timeout_s: float) -> str | None:
        """The process's word of a peer, DIED where it has died of it or of another; None where it did not take the
        question within `soon_s`."""
        if self._reading.done():
            return None
        create_future = asyncio.get_running_loop().create_future
        number, trial = self.given, _Trial(create_future(), create_future())
        self.given += 1
        self._trials[number] = trial
        said: str | None = None
        try:
            with contextlib.suppress(ConnectionError):  # it has died, as `_read` will find
                self._stdin.write(json.dumps([number, *question]).encode() + b"\n")
            await asyncio.wait([trial.asked], timeout=soon_s)
            if trial.asked.done() and trial.asked.result():
                await asyncio.wait([trial.answer], timeout=timeout_s)
                said = trial.answer.result() if trial.answer.done() else LATE
            return said
        finally:
            del self._trials[number]
            self.spoiled |= said != FINE or self.given >= LOADS

    async def _read(self) -> None:
        with contextlib.suppress(ValueError):  # it has died in a line
            while line := await self._stdout.readline():
                number, said = json.loads(line)
                if (trial := self._trials.get(number)) is None:
                    continue  # its asker has gone
                if said == ASKED:
                    settle(trial.asked, True)
                else:
                    settle(trial.answer, str(said))
        self.spoiled = True
        for trial in self._trials.values():
            settle(trial.asked, False)
            settle(trial.answer, DIED)

    async def end(self) -> None:
        await _killed(self._process)
        await self._tasks.end()


async def _killed(process: asyncio.subprocess.Process) -> None:
    """A process that is in the kernel may end later than that."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ENDS_S):
                await process.wait()


async def _started(until: float) -> _Process:
    """until: by the loop's clock. Raises TransportError (`transport_failed`)."""
    # Python 3.11 waits for ever when this is cancelled before the pipes are connected. It takes milliseconds.
    creating = asyncio.create_subprocess_exec(
        sys.executable, "-m", screening.__name__, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"UCX_HANDLE_ERRORS": "none"},
    )  # fmt: skip
    try:
        process = await uncut(creating, _killed)
    except OSError as error:
        why = f"the process that tries peers' metadata cannot be started: {error}"
        remedy = "raise the daemon's limits (descriptors, memory, processes)"
        raise TransportError("transport_failed", why, remedy=remedy) from None
    assert process.stdout is not None
    said = b""
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                said = await process.stdout.readline()
    finally:
        if said.decode().strip() != READY:  # else the next metadata would be taken for what it died of
            await _killed(process)
    if said.decode().strip() != READY:
        raise TransportError("transport_failed", "the process that tries peers' metadata did not start")
    return _Process(process)
