"""Starts the processes of a plan, hands on signals, ends all of it in order."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kvferry.errors import KvferryError, Unavailable
from kvferryd.commands.ask import at
from kvferryd.observe.foreign import LONGEST, LOST, Writer, as_json, event
from kvferryd.process.keeper import READY, how_ended
from kvferryd.run.engines import shown
from kvferryd.run.family import end, living, tied
from kvferryd.run.plan import Daemon, Plan
from kvferryd.run.shared import Watch, remove

FAILED = 2
START_S = 300.0
"""The longest that daemons may take until all serve: torch and Triton from a cold disk take a minute, several more."""
AGAIN_S = 5.0
"""Between the second signal to a process that was told to stop, and its death."""
LEFT_S = 5.0
"""How long what an engine has left behind may take."""
LONGEST_DRAIN_S = 3600.0
"""That a daemon can be asked to drain in one call."""
BEYOND_DRAIN_S = 10.0
"""How much longer than its drain a daemon may take to stop."""
RUN, ENGINE = "run", "engine"


class Child:
    """A process with a name. `ended` has its status. `close` it."""

    def __init__(self, name: str, process: subprocess.Popen[bytes]) -> None:
        self.name, self.process = name, process
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[int] = self._loop.create_future()
        self._pidfd = os.pidfd_open(process.pid)
        self._loop.add_reader(self._pidfd, self._has_ended)

    def _has_ended(self) -> None:
        self._loop.remove_reader(self._pidfd)
        self.ended.set_result(self.process.wait())

    def signal(self, number: int) -> None:
        if not self.ended.done():
            self.process.send_signal(number)

    def close(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)


class Output:
    """Lines of processes, each with the name of its process before it, or in it where lines are JSON."""

    def __init__(self, names: Iterable[str], *, as_json: bool) -> None:
        self._width, self._as_json = max(map(len, names)), as_json
        self._writer = Writer(1, lambda lost: self._named(RUN, f"{LOST}: {lost}"))
        self._open = 0
        self._closed = asyncio.Event()

    def say(self, what: str, level: str = "info") -> None:
        self._writer.put(self._named(RUN, event(what, level, __name__) if self._as_json else what))

    def follow(self, name: str, descriptor: int) -> None:
        """Until its last writer has gone; then it is closed."""
        loop, held = asyncio.get_running_loop(), bytearray()
        self._open += 1

        def read() -> None:
            data = os.read(descriptor, LONGEST)
            held.extend(data or b"\n" * bool(held))
            *whole, rest = held.split(b"\n")
            if len(rest) >= LONGEST:
                whole, rest = [*whole, rest], bytearray()
            held[:] = rest
            for line in whole:
                self._writer.put(self._named(name, line.decode(errors="replace").rstrip("\r")))
            if not data:
                loop.remove_reader(descriptor)
                os.close(descriptor)
                self._open -= 1
                self._closed.set()

        loop.add_reader(descriptor, read)

    async def end(self, longest_s: float = 1.0) -> None:
        """Wait until all is written."""
        try:
            async with asyncio.timeout(longest_s):
                while self._open:
                    self._closed.clear()
                    await self._closed.wait()
        except TimeoutError:
            pass
        await asyncio.to_thread(self._writer.flush)

    def _named(self, name: str, line: str) -> str:
        if not self._as_json:
            return f"{name:<{self._width}} | {line}"
        return f'{{"process": {json.dumps(name)}, {as_json(line)[1:]}'


class Launcher:
    """folder: of this run."""

    def __init__(self, plan: Plan, folder: Path, environment: Mapping[str, str]) -> None:
        self._plan, self._folder, self._environment = plan, folder, environment
        self._children: list[Child] = []
        self._keepers: list[Child] = []
        self._engine: Child | None = None

    async def run(self) -> int:
        """Until the engine has ended, or a signal, or the death of a keeper, has ended it; returns the status."""
        loop = asyncio.get_running_loop()
        self._told: asyncio.Future[int] = loop.create_future()
        self._hurried: asyncio.Future[int] = loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled, number)
        loop.add_signal_handler(signal.SIGHUP, self._upgrade)
        loop.add_signal_handler(signal.SIGCHLD, lambda: self._left())  # reaps orphans
        names = [*(_name(daemon) for daemon in self._plan.daemons), ENGINE, RUN]
        self._output = Output(names, as_json=self._plan.daemons[0].config.log_format == "json")
        with ExitStack() as opened:
            self._opened = opened
            self._watch_memory()
            try:
                return await self._runs()
            finally:
                await self._end()

    async def _runs(self) -> int:
        serving = asyncio.create_task(_served([self._keep(daemon) for daemon in self._plan.daemons]))
        await self._first(START_S, serving, self._told, *self._endings())
        if lost := self._lost():
            how = how_ended(lost.ended.result()).removeprefix("it ")
            return self._failed(f"{lost.name} {how} before it served: its lines say why")
        if self._told.done():
            return 128 + self._told.result()
        if not serving.done():
            return self._failed(f"not all daemons serve after {START_S:g} s: their lines say what they wait for")
        self._say("all daemons serve: the engine starts")
        environment = {"PYTHONUNBUFFERED": "1", **self._environment, **self._plan.environment}
        self._engine = self._start(ENGINE, self._plan.engine, environment)
        await self._first(None, self._told, *self._endings())
        if lost := self._lost():
            how = how_ended(lost.ended.result()).removeprefix("it ")
            return self._failed(f"the keeper of {lost.name} {how}: all else ends, too")
        if not self._engine.ended.done():
            await self._drain()
        await self._stop(self._plan.engine_stop_s, self._engine)
        status = self._engine.ended.result()
        self._say(f"the engine {how_ended(status).removeprefix('it ')}")
        return status if status >= 0 else 128 - status

    def _keep(self, daemon: Daemon) -> socket.socket:
        """Start a keeper; it says here that its daemon serves."""
        address = str(self._folder / f"serving-{daemon.rank}")
        told = self._opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK))
        told.bind(address)
        # -P: a file of the folder that we are in is no module.
        command = [sys.executable, "-P", "-m", "kvferryd", "keep", *daemon.flags]
        environment = {**self._environment, "NOTIFY_SOCKET": address}
        self._keepers.append(self._start(_name(daemon), command, environment))
        return told

    def _start(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> Child:
        read, written = os.pipe()
        try:
            process = subprocess.Popen(  # noqa: S603  # ourselves, and what the user has named
                tied(command), stdin=subprocess.DEVNULL, stdout=written, stderr=written, env=environment,
                process_group=0,
            )  # fmt: skip
        finally:
            os.close(written)
        self._output.follow(name, read)
        child = Child(name, process)
        self._opened.callback(child.close)
        self._children.append(child)
        self._say(f"{name} is process {process.pid}: {shown(command)}")
        return child

    def _watch_memory(self) -> None:
        loop, watch = asyncio.get_running_loop(), Watch(memory_of(self._folder), lambda: living(os.getpid()))
        self._opened.callback(watch.close)
        if watch.fd >= 0:
            loop.add_reader(watch.fd, watch.made)
            self._opened.callback(loop.remove_reader, watch.fd)

    def _endings(self) -> list[asyncio.Future[int]]:
        return [child.ended for child in self._children]

    def _lost(self) -> Child | None:
        """A keeper that has ended, which none does by itself."""
        return next((keeper for keeper in self._keepers if keeper.ended.done()), None)

    async def _first(self, longest_s: float | None, *waited: asyncio.Future[Any]) -> None:
        await asyncio.wait(waited, timeout=longest_s, return_when=asyncio.FIRST_COMPLETED)

    def _signalled(self, number: int) -> None:
        if not self._told.done():
            self._told.set_result(number)
        elif not self._hurried.done():
            self._hurried.set_result(number)
            self._say("a second signal: nothing is waited for any more")

    def _upgrade(self) -> None:
        for keeper in self._keepers:
            keeper.signal(signal.SIGHUP)

    async def _drain(self) -> None:
        """No daemon takes more work; until what is published has been read."""
        assert self._engine is not None
        self._say(f"the daemons drain, for at most {self._plan.drain_s:g} s")
        drained = asyncio.create_task(self._all_drained())
        await self._first(None, drained, self._hurried, *self._endings())
        drained.cancel()

    async def _all_drained(self) -> None:
        async with asyncio.TaskGroup() as daemons:
            for daemon in self._plan.daemons:
                daemons.create_task(self._drained(daemon))

    async def _drained(self, daemon: Daemon) -> None:
        try:
            async with at(daemon.config, daemon.config.url) as asked:
                await asked.drain(min(self._plan.drain_s, LONGEST_DRAIN_S))
        except (KvferryError, OSError) as error:
            self._say(f"{_name(daemon)} cannot be drained: {error}", "warning")

    async def _stop(self, patience_s: float, *children: Child) -> None:
        """Tell them to stop; tell them again, and kill them, when they take too long or a second signal has come."""
        for wait_s, number in ((patience_s, signal.SIGTERM), (AGAIN_S, signal.SIGTERM), (None, signal.SIGKILL)):
            left = [child for child in children if not child.ended.done()]
            if not left:
                return
            for child in left:
                if number == signal.SIGKILL:
                    self._say(f"{child.name} has not stopped: it is killed", "warning")
                child.signal(number)
            ended = asyncio.gather(*(child.ended for child in left))
            hurry = [self._hurried] if wait_s == patience_s else []
            await self._first(wait_s, ended, *hurry)

    async def _end(self) -> None:
        """The engine, what it has left, then the daemons, which drain."""
        if self._engine is not None:
            await self._stop(self._plan.engine_stop_s, self._engine)
            await asyncio.to_thread(end, self._left, LEFT_S)
        await self._stop(self._plan.drain_s + BEYOND_DRAIN_S, *self._keepers)
        await asyncio.to_thread(end, self._left, LEFT_S)
        await self._output.end()

    def _left(self) -> set[int]:
        """Descendants that are neither our children nor below them: what a child that has ended has left."""
        return living(os.getpid(), spared={child.process.pid for child in self._children if not child.ended.done()})

    def _failed(self, why: str) -> int:
        self._say(str(Unavailable("daemon_ended", why)), "error")
        return FAILED

    def _say(self, what: str, level: str = "info") -> None:
        self._output.say(what, level)


async def _served(telling: Iterable[socket.socket]) -> None:
    """Until each keeper has said that its daemon serves."""
    for told in telling:
        await asyncio.get_running_loop().sock_recv(told, len(READY))


def _name(daemon: Daemon) -> str:
    return f"daemon-{daemon.rank}"


def memory_of(folder: Path) -> Path:
    """The notes of `Watch` in a run's folder."""
    return folder / "memory"


def left(folder: Path) -> None:
    """Take away a run's folder, with the sockets in it, and the shared memory that is noted there."""
    remove(memory_of(folder))
    shutil.rmtree(folder, ignore_errors=True)


def launched(plan: Plan, folder: Path, environment: Mapping[str, str]) -> int:
    """Run it; returns the status."""
    return asyncio.run(Launcher(plan, folder, environment).run())
