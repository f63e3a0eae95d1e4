"""Processes with names that one command starts, tells to stop, and ends: daemons under keepers, and engines."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from kvferry.errors import KvferryError, Unavailable
from kvferryd.commands.ask import at
from kvferryd.commands.doctor import CHECK, Level, findings
from kvferryd.process.keeper import how_ended
from kvferryd.run.daemons import Daemon
from kvferryd.run.engines import shown
from kvferryd.run.family import DIES_S, ENDS, UPGRADES, end, living, reap, tied
from kvferryd.run.output import Output
from kvferryd.run.shared import Watch, remove

FAILED = 2
START_S = 300.0
"""The longest that daemons may take until all serve: torch and Triton from a cold disk take a minute, several more."""
AGAIN_S = 5.0
"""Between the second signal to a process that was told to stop, and its death."""
LEFT_S = 5.0
"""How long what a process has left behind may take."""
BEYOND_DRAIN_S = 10.0
"""How much longer than its drain a daemon may take to stop."""


def check_daemons(daemons: Iterable[Daemon]) -> None:
    """Raises KvferryError for all that is in the way of their start."""
    if wrong := [each for daemon in daemons for each in _wrong(daemon)]:
        raise Unavailable("cannot_start", "\n  ".join(["the daemons cannot be started:", *wrong]))


def _wrong(daemon: Daemon) -> list[str]:
    """A line for each thing that is in the way of a daemon."""
    said = [f"{daemon.name}: {found.what} -> {found.remedy}" for found in findings(daemon.config, CHECK)
            if found.level is Level.WRONG]  # fmt: skip
    if any("nothing can listen" in each for each in said):
        said.append("beside another one on this host: --rest 127.0.0.1:7510 --peer 127.0.0.1:7511")
    return said


class Child:
    """A process. `ended` has its status. `close` it."""

    def __init__(self, name: str, process: subprocess.Popen[bytes]) -> None:
        self.name, self.process = name, process
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[int] = self._loop.create_future()
        self._pidfd = os.pidfd_open(process.pid)
        self._loop.add_reader(self._pidfd, self._has_ended)

    def _has_ended(self) -> None:
        self._loop.remove_reader(self._pidfd)
        self.ended.set_result(self.process.wait())

    @property
    def how(self) -> str:
        """It has ended: how, in words."""
        return how_ended(self.ended.result()).removeprefix("it ")

    def signal(self, number: int) -> None:
        if not self.ended.done():
            self.process.send_signal(number)

    def close(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)


class Kept(Child):
    """A keeper, with its daemon. `serving`: its first daemon serves."""

    def __init__(self, daemon: Daemon, process: subprocess.Popen[bytes], told: socket.socket) -> None:
        """told: where the keeper says that its daemon serves."""
        super().__init__(daemon.name, process)
        self.daemon, self._told = daemon, told
        self.serving: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(told, self._serves)

    def _serves(self) -> None:
        self._loop.remove_reader(self._told)
        self.serving.set_result(None)

    def close(self) -> None:
        self._loop.remove_reader(self._told)
        self._told.close()
        super().close()


class Children:
    """The children of this process. As a context: within it signals are handled; at its end all have ended.

    told: a signal has asked this process to end. hurried: a second one has.
    """

    def __init__(self, own: str, names: Iterable[str], folder: Path, environment: Mapping[str, str], *, as_json: bool):
        """own: this process's name. names: of those to come. folder: of this run."""
        loop = asyncio.get_running_loop()
        self.told: asyncio.Future[int] = loop.create_future()
        self.hurried: asyncio.Future[int] = loop.create_future()
        self._folder, self._environment = folder, environment
        self._output = Output(own, names, as_json=as_json)
        self._living: list[Child] = []
        self._opened = ExitStack()

    @property
    def kept(self) -> list[Kept]:
        return [child for child in self._living if isinstance(child, Kept)]

    @property
    def lost(self) -> list[Kept]:
        """Keepers that have ended, which none does by itself."""
        return [keeper for keeper in self.kept if keeper.ended.done()]

    @property
    def endings(self) -> list[asyncio.Future[int]]:
        return [child.ended for child in self._living]

    async def __aenter__(self) -> Children:
        loop = asyncio.get_running_loop()
        for number in ENDS:
            loop.add_signal_handler(number, self._signalled, number)
        loop.add_signal_handler(UPGRADES, self._upgrade)
        loop.add_signal_handler(signal.SIGCHLD, lambda: reap(spared=self._awaited()))  # orphans
        watch = Watch(memory_of(self._folder), lambda: living(os.getpid()))
        self._opened.callback(watch.close)
        if watch.fd >= 0:
            loop.add_reader(watch.fd, watch.made)
            self._opened.callback(loop.remove_reader, watch.fd)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Engines were stopped before: what they have left goes first, then the daemons, which drain."""
        with self._opened:
            await self.end_left()
            drain_s = max((each.daemon.config.drain_timeout_s for each in self.kept), default=0.0)
            await self.stop(drain_s + BEYOND_DRAIN_S, *self.kept)
            await self.end_left()
            for child in self._living:
                child.close()
            await self._output.end()

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> Child:
        """environment: what is added to ours."""
        self._living.append(child := Child(name, self._start(name, command, environment)))
        return child

    async def serve(self, daemons: Iterable[Daemon]) -> bool:
        """Start them; whether all serve. If not, `told` is done, or it is said why not."""
        serving = asyncio.gather(*(self.keep(daemon).serving for daemon in daemons))
        await self.first(START_S, serving, self.told, *self.endings)
        if lost := self.lost:
            self.failed(f"{lost[0].name} {lost[0].how} before it served: its lines say why")
        elif not serving.done() and not self.told.done():
            self.failed(f"not all daemons serve after {START_S:g} s: their lines say what they wait for")
        return serving.done() and not self.told.done() and not lost

    def keep(self, daemon: Daemon) -> Kept:
        """Start its keeper."""
        address = self._folder / f"serving-{daemon.name}"
        address.unlink(missing_ok=True)
        told = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        with ExitStack() as undo:
            undo.callback(told.close)
            told.bind(str(address))
            # -P: a file of the folder that we are in is no module.
            command = [sys.executable, "-P", "-m", "kvferryd", "keep", *daemon.flags]
            before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])  # until the keeper hears it
            try:
                process = self._start(daemon.name, command, {"NOTIFY_SOCKET": str(address)})
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            undo.pop_all()
        self._living.append(kept := Kept(daemon, process, told))
        return kept

    def _start(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        read, written = os.pipe()
        try:
            process = subprocess.Popen(  # noqa: S603  # ourselves, and what the user has named
                tied(command), stdin=subprocess.DEVNULL, stdout=written, stderr=written,
                env={**self._environment, **environment}, process_group=0,
            )  # fmt: skip
        except OSError:
            os.close(read)
            raise
        finally:
            os.close(written)
        self._output.follow(name, read)
        self.say(f"{name} is process {process.pid}: {shown(command)}")
        return process

    def forget(self, child: Child) -> None:
        """It has ended, and another one takes its place."""
        self._living.remove(child)
        child.close()

    async def first(self, longest_s: float | None, *waited: asyncio.Future[Any]) -> None:
        await asyncio.wait(waited, timeout=longest_s, return_when=asyncio.FIRST_COMPLETED)

    def _signalled(self, number: int) -> None:
        if not self.told.done():
            self.told.set_result(number)
        elif not self.hurried.done():
            self.hurried.set_result(number)
            self.say("a second signal: nothing is waited for any more")

    def _upgrade(self) -> None:
        for keeper in self.kept:
            keeper.signal(signal.SIGHUP)

    async def drain(self) -> None:
        """No daemon takes more work; until what is published has been read, a second signal, or the end of any."""
        longest_s = max(each.daemon.config.drain_timeout_s for each in self.kept)
        self.say(f"the daemons drain, for at most {longest_s:g} s")
        drained = asyncio.create_task(self._all_drained())
        await self.first(None, drained, self.hurried, *self.endings)
        drained.cancel()

    async def _all_drained(self) -> None:
        async with asyncio.TaskGroup() as daemons:
            for each in self.kept:
                daemons.create_task(self._drained(each.daemon))

    async def _drained(self, daemon: Daemon) -> None:
        try:
            async with at(daemon.config, daemon.config.url) as asked:
                await asked.drain(daemon.config.drain_timeout_s)
        except (KvferryError, OSError) as error:
            self.say(f"{daemon.name} cannot be drained: {error}", "warning")

    async def stop(self, patience_s: float, *children: Child) -> None:
        """Tell them to stop; tell them again, and kill them, when they take too long or a second signal has come. A
        process that the kernel does not end then is left."""
        for number, wait_s, hurry in (
            (signal.SIGTERM, patience_s, [self.hurried]), (signal.SIGTERM, AGAIN_S, []), (signal.SIGKILL, DIES_S, []),
        ):  # fmt: skip
            left = [child for child in children if not child.ended.done()]
            if not left:
                return
            for child in left:
                if number == signal.SIGKILL:
                    self.say(f"{child.name} has not stopped: it is killed", "warning")
                child.signal(number)
            ended = asyncio.gather(*(child.ended for child in left))
            await self.first(wait_s, ended, *hurry)
        for child in children:
            if not child.ended.done():
                self.say(f"{child.name} was killed and has not ended: it is left behind", "error")

    async def end_left(self, patience_s: float = LEFT_S) -> None:
        """End what ended children have left. No other one is to be started meanwhile."""
        if left := await asyncio.to_thread(end, self._left, patience_s):
            self.say(f"processes {sorted(left)} were killed and have not ended: they are left behind", "error")

    def _left(self) -> set[int]:
        """Descendants that are neither our children nor below them: what a child that has ended has left."""
        return living(os.getpid(), spared=self._awaited())

    def _awaited(self) -> set[int]:
        return {each.process.pid for each in self._living if not each.ended.done()}

    def failed(self, why: str) -> int:
        """Say so; returns the status."""
        self.say(str(Unavailable("daemon_ended", why)), "error")
        return FAILED

    def say(self, what: str, level: str = "info") -> None:
        self._output.say(what, level)


def memory_of(folder: Path) -> Path:
    """The notes of `Watch` in a run's folder."""
    made = folder / "memory"
    made.mkdir(exist_ok=True)
    return made


def left(folder: Path) -> None:
    """Take away a run's folder, with the sockets in it, and the shared memory that is noted there."""
    remove(folder / "memory")
    shutil.rmtree(folder, ignore_errors=True)
