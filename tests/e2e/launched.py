"""`kvferry run` and `kvferry host` in a test: its processes by what they are, and whether anything of it is left."""

from __future__ import annotations

import itertools
import re
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from kvferryd.demo.fleet import HOST, Fleet, Service, _kvferry
from kvferryd.run.daemons import APART

WAIT_S = 120.0


@dataclass(eq=False)
class Launched:
    """service: the first process. rest, peer: of the first daemon. url: where the engine of `kvferry run` serves. made:
    what is to be gone at the end."""

    fleet: Fleet
    service: Service
    rest: int
    peer: int
    ranks: int
    url: str = ""
    made: list[Path] = field(default_factory=list)
    shared: set[Path] = field(default_factory=set)
    """Memory with a name that its processes have."""
    seen: set[psutil.Process] = field(default_factory=set)

    @property
    def said(self) -> str:
        return self.service.log.read_text(errors="replace")

    def says(self, what: str) -> None:
        """Wait until it has said so."""
        ended = self.service.process.poll
        self.eventually(lambda: what in self.said or ended() is not None, f"it says {what!r}")
        assert what in self.said, self.service.tail(60)

    @property
    def first(self) -> psutil.Process:
        """Which the user knows."""
        return psutil.Process(self.service.process.pid)

    @property
    def second(self) -> psutil.Process:
        """Which does the work."""
        (second,) = self.first.children()
        return second

    def child(self, name: str) -> psutil.Process:
        """As the log names it: daemon-0 for the keeper of rank 0, engine."""
        self.says(f"{name} is process")
        found = re.findall(rf"{name} is process (\d+)", self.said)
        return psutil.Process(int(found[-1]))

    def serving(self, rank: int = 0) -> psutil.Process:
        """The daemon that serves now."""
        return psutil.Process(self.served(rank)[-1])

    def served(self, rank: int = 0) -> list[int]:
        """The daemons that have come to serve."""
        return [*map(int, re.findall(rf"daemon-{rank} .* serving .*\bpid=(\d+)", self.said))]

    def look(self) -> None:
        """Note all that lives of it now."""
        self.seen |= {self.first, *self.first.children(recursive=True)}
        for process in self.seen:
            self.shared |= {*map(Path, re.findall(r"/dev/shm/[^\s]+(?=\n)", _maps(process)))}

    def wait(self) -> int:
        self.eventually(lambda: self.service.process.poll() is not None, "it has ended")
        return self.service.process.returncode

    def eventually(self, holds: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not holds():
            assert time.monotonic() < deadline, f"never: {what}\n{self.service.tail(60)}"
            time.sleep(0.02)

    def leaves_nothing(self) -> None:
        """No process, no socket, no port, no shared memory. The daemons' memory has no name: it is gone with them."""
        self.eventually(lambda: not any(map(_lives, self.seen)), "all its processes have ended")
        self.fleet.services.remove(self.service)
        assert not (memory := [path for path in self.shared if path.exists()]), memory
        made = {*map(Path, re.findall(r"=(/\S*kvferry-run-[^/]+)/engine-", self.said)), *self.made}
        assert not (left := [path for path in made if path.exists()]), left
        for port, rank in itertools.product((self.rest, self.peer), range(self.ranks)):
            assert _free(port + rank * APART), f"port {port + rank * APART} is taken\n{self.service.tail(60)}"


def launched(
    fleet: Fleet,
    command: Sequence[str],
    *,
    ranks: int = 1,
    flags: Sequence[str] = (),
    port: int = 0,
    path: str = "/health",
    device: str = "cpu",
) -> Launched:
    """Start it. command: the engine's, with `{port}` for its port. device: or it is left to `kvferry run`."""
    rest, peer, port = _base(fleet, ranks), _base(fleet, ranks), port or fleet.free_port()
    own = ["run", f"--rest={HOST}:{rest}", f"--peer={HOST}:{peer}", "--arena-mb=16", *flags]
    own += [f"--device={device}"] if device else []
    words = [word.replace("{port}", str(port)) for word in command]
    process, log = fleet._start("run", _kvferry([*own, "--", *words]))
    service = fleet._add(Service("kvferry run", f"http://{HOST}:{port}", path, process, log))
    return Launched(fleet, service, rest, peer, ranks, service.url)


def hosted(fleet: Fleet, folder: Path, count: int, *flags: str) -> Launched:
    """Start `kvferry host` for host memory."""
    rest, peer = _base(fleet, count), _base(fleet, count)
    own = ["host", f"--rest={HOST}:{rest}", f"--peer={HOST}:{peer}", "--arena-mb=16", f"--cpu={count}"]
    process, log = fleet._start("host", _kvferry([*own, f"--folder={folder}", *flags]))
    service = fleet._add(Service("kvferry host", f"http://{HOST}:{rest}", "/healthz", process, log))
    made = [folder / f"cpu-{number}{suffix}" for number in range(count) for suffix in (".sock", ".sock.fd", ".json")]
    return Launched(fleet, service, rest, peer, count, made=made)


def refused(command: Sequence[str], of: str = "run") -> str:
    """The words of a command that does not start."""
    done = subprocess.run(_kvferry([of, *command]), capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 2, done
    return done.stderr


def _base(fleet: Fleet, ranks: int) -> int:
    """The port of rank 0."""
    return fleet.free_port(*(rank * APART for rank in range(1, ranks)))


def _maps(process: psutil.Process) -> str:
    try:
        return Path(f"/proc/{process.pid}/maps").read_text()
    except OSError:  # it has ended
        return ""


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
