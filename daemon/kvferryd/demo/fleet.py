"""Real processes for a demo or a test: daemons, reference engines, a proxy. The maker of a Fleet closes it.

    async with Fleet() as fleet:
        ranks = fleet.daemons("decode", 3)
        engine = fleet.engine("decode", tp=3, layout="HND", block_size=24, daemons=ranks)
        await fleet.ready(*ranks, engine, timeout_s=60)

Every process has a process group of its own, a log file, and ends with the fleet: on `close`, and when the process
that made the fleet is killed.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import os
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn, TypeVar

import httpx

from kvferry.errors import Full, Internal
from kvferryd.aio import together

HOST = "127.0.0.1"
PORTS = range(18000, 32000)
"""Below the range from which Linux takes the ports of outgoing connections, so that none of those takes ours."""
POLL_S = 0.1
STOP_S = 6.0
PR_SET_PDEATHSIG = 1
S = TypeVar("S", bound="Service")
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True, eq=False)
class Service:
    """One process. `url`: where it serves HTTP. `path`: answers 200 when it is up."""

    name: str
    url: str
    path: str
    process: subprocess.Popen[bytes]
    log: Path

    def tail(self, lines: int = 15) -> str:
        """The end of its log."""
        try:
            text = self.log.read_text(errors="replace")
        except OSError:
            return "(no log)"
        return "\n".join(text.splitlines()[-lines:]) or "(its log is empty)"

    def signal(self, number: signal.Signals) -> None:
        """To its whole process group; to nobody once it was waited for: from then on the number may be another's."""
        if self.process.returncode is None:
            os.killpg(self.process.pid, number)

    def until_ended(self, timeout_s: float) -> bool:
        """Whether it ends by then. Its number stays its own: it is not waited for."""
        if self.process.returncode is not None:
            return True
        ended, poll = os.pidfd_open(self.process.pid), select.poll()
        try:
            poll.register(ended, select.POLLIN)
            return bool(poll.poll(timeout_s * 1000))
        finally:
            os.close(ended)


@dataclass(frozen=True, slots=True, eq=False)
class DaemonService(Service):
    """`peer`: host:port for other daemons. `socket`: where the engine finds it."""

    peer: str
    socket: Path


class ServiceError(Internal):
    """A process of the fleet ended, or did not come up in time. `service` says which."""

    def __init__(self, code: str, message: str, service: Service) -> None:
        super().__init__(code, message, field="log", value=service.log, remedy="read its log")
        self.service = service


class Fleet:
    """directory: for sockets and logs; a temporary one, removed by `close`, where none is given."""

    popen: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen
    """Starts a process; tests start many, and have a quicker one."""

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = directory or Path(tempfile.mkdtemp(prefix="kvferry-"))
        self.services: list[Service] = []
        self.keep_logs = directory is not None
        self._ports: list[socket.socket] = []
        """A claim on each port that was given out, until `close`."""

    async def __aenter__(self) -> Fleet:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def daemon(
        self, name: str, *, roster: DaemonService | None = None, flags: Sequence[str] = (), kept: bool = False
    ) -> DaemonService:
        """Start `kvferry serve` on the CPU, or `kvferry keep`. `roster`: rank 0's daemon; none for rank 0 itself."""
        rest, peer = (f"{HOST}:{self.free_port()}" for _ in range(2))
        path = self.directory / f"{name}.sock"
        command = [
            "keep" if kept else "serve", "--rest", rest, "--peer", peer, "--engine-socket", str(path),
            "--roster", roster.peer if roster else peer, "--device", "cpu", "--log-format", "json",
            "--arena-mb", "16", "--drain-timeout-s", "0", *flags,
        ]  # fmt: skip
        process, log = self._start(name, _kvferry(command))
        return self._add(DaemonService(name, f"http://{rest}", "/healthz", process, log, peer=peer, socket=path))

    def daemons(
        self, name: str, count: int, *, flags: Sequence[str] = (), devices: Sequence[str] = (), kept: bool = False
    ) -> list[DaemonService]:
        """A daemon per rank, rank 0 first. devices: of each rank; the CPU where none are named."""
        started: list[DaemonService] = []
        for rank in range(count):
            placed = ("--device", devices[rank], *flags) if devices else flags
            roster = started[0] if started else None
            started.append(self.daemon(f"{name}-{rank}", roster=roster, flags=placed, kept=kept))
        return started

    def again(self, service: S, command: str = "") -> S:
        """Start what has ended once more, as it was: its addresses, its flags; a daemon with its socket, or by
        `command`, serve or keep."""
        assert isinstance(service.process.args, list)
        arguments = [command if command and each in ("serve", "keep") else each for each in service.process.args]
        process, log = self._start(service.name, arguments)
        self.services.remove(service)
        return self._add(replace(service, process=process, log=log))

    def engine(
        self,
        engine_id: str,
        *,
        tp: int = 1,
        layout: str = "NHD",
        block_size: int = 16,
        num_blocks: int = 512,
        preset: str = "demo",
        seed: int = 0,
        daemons: Sequence[DaemonService] = (),
        flags: Sequence[str] = (),
    ) -> Service:
        """Start a reference engine; without daemons it stands alone."""
        port = self.free_port()
        sockets = [part for daemon in daemons for part in ("--daemon", str(daemon.socket))]
        command = [
            sys.executable, "-m", "kvferry.reference", "serve", "--preset", preset, "--seed", str(seed),
            "--tp", str(tp), "--layout", layout, "--block-size", str(block_size), "--num-blocks", str(num_blocks),
            "--port", str(port), "--engine-id", engine_id, *sockets, *flags,
        ]  # fmt: skip
        process, log = self._start(f"engine-{engine_id}", command)
        return self._add(Service(f"engine {engine_id}", f"http://{HOST}:{port}", "/health", process, log))

    def proxy(
        self,
        prefill: Service | str,
        decode: Service | str,
        *,
        prefill_daemons: Sequence[DaemonService] = (),
        decode_daemons: Sequence[DaemonService] = (),
        order: str = "engine",
        flags: Sequence[str] = (),
    ) -> Service:
        """Start `kvferry proxy` before one prefill and one decode engine, by URL where they are none of this fleet's,
        and, where named, their ranks' daemons."""
        port = self.free_port()
        first, second = (each if isinstance(each, str) else each.url for each in (prefill, decode))
        command = [
            sys.executable, "-m", "kvferry.proxy", "--listen", f"{HOST}:{port}", "--order", order,
            "--prefill", ",daemon=".join([first, *(daemon.url for daemon in prefill_daemons)]),
            "--decode", ",daemon=".join([second, *(daemon.url for daemon in decode_daemons)]), *flags,
        ]  # fmt: skip
        process, log = self._start("proxy", command)
        return self._add(Service("proxy", f"http://{HOST}:{port}", "/healthz", process, log))

    async def ready(self, *services: Service, timeout_s: float, path: str | None = None) -> None:
        """Wait until all answer 200 (at `path`, or where each says that it is up).

        Raises ServiceError as soon as one of them has exited, or when `timeout_s` has passed.
        """
        deadline = time.monotonic() + timeout_s
        async with httpx.AsyncClient(timeout=2.0, trust_env=False) as http:
            await together(_up(http, each, path or each.path, deadline) for each in services)

    async def watch(self) -> NoReturn:
        """Raises ServiceError when the first process ends; otherwise waits for ever: cancel it."""
        for service in self.ended():
            raise _ended(service)
        loop = asyncio.get_running_loop()
        end: asyncio.Future[Service] = loop.create_future()

        def ended(service: Service) -> None:
            if not end.done():
                end.set_result(service)

        watched = {os.pidfd_open(service.process.pid): service for service in self.services}
        try:
            for fd, service in watched.items():
                loop.add_reader(fd, ended, service)
            raise _ended(await end)
        finally:
            for fd in watched:
                loop.remove_reader(fd)
                os.close(fd)

    def ended(self) -> list[Service]:
        """Services whose process is gone."""
        return [service for service in self.services if service.until_ended(0)]

    def close(self) -> None:
        """End every process, at most STOP_S politely, then by force; remove the directory unless logs are kept."""
        for service in reversed(self.services):
            if service.process.returncode is None:
                os.kill(service.process.pid, signal.SIGTERM)  # not its group: an engine ends its own workers
        deadline = time.monotonic() + STOP_S
        for service in self.services:
            service.until_ended(max(0.0, deadline - time.monotonic()))
        for service in self.services:
            service.signal(signal.SIGKILL)  # also what a process left behind in its group
            service.process.wait()
        self.services.clear()
        while self._ports:
            self._ports.pop().close()
        if not self.keep_logs:
            shutil.rmtree(self.directory, ignore_errors=True)

    def free_port(self, *beside: int) -> int:
        """A port that nobody listens on, and that no fleet on this host is given before this one is closed. beside: so
        far from it are others of which the same holds."""
        for port in random.sample(PORTS, len(PORTS)):
            claims = [_claimed(port + each) for each in (0, *beside)]
            self._ports += filter(None, claims)
            if None not in claims:
                return port
        raise Full("no_free_port", f"no port of {PORTS} is free", remedy="end what listens on them")

    def _start(self, name: str, command: Sequence[str]) -> tuple[subprocess.Popen[bytes], Path]:
        log = next(path for path in self._logs(name) if not path.exists())
        with log.open("wb") as output:
            process = type(self).popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment(),
                start_new_session=True,
                preexec_fn=_end_with_parent if threading.current_thread() is threading.main_thread() else None,
            )
        return process, log

    def _logs(self, name: str) -> Iterator[Path]:
        yield self.directory / f"{name}.log"
        yield from (self.directory / f"{name}-{n}.log" for n in itertools.count(2))

    def _environment(self) -> dict[str, str]:
        """Ours, without settings that are meant for a daemon of the user's own; what is left lying goes with us."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("KVFERRY_")}
        # Each process gets a single thread: a dozen processes on few cores only get in each other's way.
        ours = {"NIXL_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        return inherited | ours | {"TMPDIR": str(self.directory)}

    def _add(self, service: S) -> S:
        self.services.append(service)
        return service


def _kvferry(arguments: Sequence[str]) -> list[str]:
    """`kvferry ...` of this very installation, wherever its script lies."""
    return [sys.executable, "-c", "import sys; from kvferryd.commands.cli import main; sys.exit(main())", *arguments]


def _end_with_parent() -> None:
    """In the child: end when the thread that started it ends, even by SIGKILL."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _claimed(port: int) -> socket.socket | None:
    """A socket of whose abstract name there is one on this host: the port is no other fleet's while it is open. None
    where it has an owner, or somebody listens there."""
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0kvferry-fleet-port-{port}")
        with socket.socket() as probe:
            probe.bind((HOST, port))
    except OSError:
        claim.close()
        return None
    return claim


def _ended(service: Service) -> ServiceError:
    status = service.process.wait(STOP_S)
    return ServiceError("process_ended", f"{service.name} ended with status {status}", service)


async def _up(http: httpx.AsyncClient, service: Service, path: str, deadline: float) -> None:
    said = "no answer"
    while True:
        if service.until_ended(0):
            raise _ended(service)
        try:
            response = await http.get(service.url + path)
            if response.status_code == 200:
                return
            said = f"{response.status_code} {response.text[:200]}"
        except httpx.HTTPError as error:
            said = str(error) or type(error).__name__
        if time.monotonic() >= deadline:
            raise ServiceError("not_ready", f"{service.name} was not up in time: {said}", service)
        # Another process can only be asked again: there is no event to wait for.
        await asyncio.sleep(POLL_S)
