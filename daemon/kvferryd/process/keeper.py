"""`kvferry keep`: the daemon's parent, which starts it again when it dies, and holds what outlives it: GPU memory and
the history.

A second daemon stands by: it has imported everything and waits for its turn, so that none of the imports is waited for
when the first one dies. Nothing of NIXL, gRPC or a peer comes into this process; it hears its own daemons only.
`kvferry.protocol.keeper` decides; here are the processes, the signals and the sockets.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence

from kvferry.output import LOST, Writer, event
from kvferry.protocol import keeper
from kvferry.protocol import keeper_events as e
from kvferryd.process.held import Held

LOADED, SERVING = "loaded", "serving"
"""Messages of a daemon about itself."""
READY = b"READY=1"
"""Sent to NOTIFY_SOCKET, once, when the first daemon serves: systemd listens there, or `kvferry run`."""
MOST = 4096
"""Bytes of a message."""
HELP = """\
usage: kvferry keep [the flags of `kvferry serve`: `kvferry serve --help`]

Runs `kvferry serve` as its child and starts it again when it dies. Host memory of an engine outlives a daemon anyway;
under a keeper GPU memory does too. The engine attaches again by itself: what was under way has failed, nothing else.
Where one after the other dies within 5 s the next one waits, 4 s at most; nobody listens meanwhile.

SIGTERM, SIGINT   the daemon drains and stops, and so does the keeper; a second one stops both at once. An upgrade
                  under way ends there
SIGHUP            another daemon is loaded, of the code and the settings that are there now; then the one that serves
                  drains, stops, and is followed by it. If the new one does not load, the one that serves stays. It may
                  come at any time, and again.

examples:
  kvferry keep --device cuda:0 --engine-socket /run/kvferry/engine.sock
  pip install --upgrade kvferry && pkill -HUP -f 'kvferry kee[p]'     an upgrade under living engines, by all keepers"""


class Daemon:
    """A process and our end of its channel, whose end the daemon does not outlive. drain_s: as it has said."""

    def __init__(self, arguments: Sequence[str]) -> None:
        """Raises OSError: no process, no descriptor, or no interpreter while it is replaced."""
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.ExitStack() as undo, theirs:
            undo.callback(self.channel.close)
            command = ["-P", "-m", "kvferryd", "serve", f"--keeper={theirs.fileno()}", *arguments]
            self._process = subprocess.Popen(  # noqa: S603  # ourselves
                [sys.executable, *command],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,  # a terminal's Ctrl-C is ours to hand on
            )
            undo.pop_all()
        self.pid, self.drain_s = self._process.pid, keeper.LOADS_S

    def signal(self, number: int) -> None:
        """Not through Popen, which would reap it behind our back. Until we reap it the number is its own."""
        os.kill(self.pid, number)

    def reaped(self, status: int) -> None:
        self._process.returncode = status


class Keeper:
    def __init__(self, arguments: Sequence[str]) -> None:
        """Signals are heard before the first daemon is started."""
        self._arguments = arguments
        self._starter = os.environ.pop("NOTIFY_SOCKET", "")
        self._json = False
        self._log = Writer(2, lambda lost: self._line(f"{LOST}: {lost}"))
        self._selector = selectors.DefaultSelector()
        self._held = Held(self._selector, self._report)
        self._files = [os.memfd_create(f"kvferry-{name}", os.MFD_CLOEXEC) for name in ("peers", "history")]
        """Files that each daemon has in its turn: what it has met and done, for the next one. Nothing is read of them
        here."""
        self._daemons: dict[int, Daemon] = {}
        self._machine, self._events = keeper.Keeper(), deque[e.KeeperEvent]()
        self._status: int | None = None
        told, telling = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(telling)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGHUP])  # `kvferry run` has kept it back until now
        self._selector.register(told, selectors.EVENT_READ, lambda: self._signalled(os.read(told, MOST)))
        self._feed(e.Begin())

    def run(self) -> int:
        """Until the daemon was told to stop, or never served; returns its exit status."""
        self._held.load()
        while self._status is None:
            due = self._machine.next_timer()
            for key, _ in self._selector.select(None if due is None else max(0.0, due - time.monotonic())):
                key.data()
            self._feed(e.Tick())
        self._log.flush()
        return self._status

    def _feed(self, event: e.KeeperEvent) -> None:
        """Events that effects cause are fed when all effects of this one have been carried out."""
        self._events.append(event)
        while self._events:
            for effect in self._machine.on(self._events.popleft(), time.monotonic()):
                self._do(effect)

    def _do(self, effect: e.KeeperEffect) -> None:
        match effect:
            case e.Start(number):
                self._start(number)
            case e.Turn(number, why):
                if number in self._daemons:
                    _say(self._daemons[number].channel, why, *self._files)
            case e.Signal(number, which):
                if number in self._daemons:
                    self._daemons[number].signal(which)
            case e.Ready():
                _notify(self._starter)
            case e.Report(what) | e.Stays(_, what):
                self._report(what)
            case e.End(status):
                self._status = status if status >= 0 else 128 - status

    def _start(self, number: int) -> None:
        try:
            daemon = Daemon(self._arguments)
        except OSError as error:
            self._events.append(e.NotStarted(number, str(error)))
            return
        self._daemons[number] = daemon
        self._selector.register(daemon.channel, selectors.EVENT_READ, lambda: self._heard(number, daemon))

    def _heard(self, number: int, daemon: Daemon) -> None:
        said = _received(daemon.channel)
        if said:
            self._says(number, daemon, said)
        else:
            self._selector.unregister(daemon.channel)
            daemon.channel.close()

    def _says(self, number: int, daemon: Daemon, said: bytes) -> None:
        match json.loads(said):
            case {"log_format": form, "drain_timeout_s": drain_s}:
                self._json, daemon.drain_s = form == "json", float(drain_s)
            case "loaded":
                self._feed(e.Loaded(number, daemon.drain_s))
            case "serving":
                self._feed(e.Serves(number))
            case {"device": str(device), "nbytes": int(nbytes)}:
                self._held.allocate(device, nbytes, functools.partial(_say, daemon.channel))

    def _signalled(self, numbers: bytes) -> None:
        for number in numbers:
            if number == signal.SIGCHLD:
                self._reap()
            else:
                self._feed(e.Upgrade() if number == signal.SIGHUP else e.Stop(number))

    def _reap(self) -> None:
        """Also what dead daemons left behind: as a container's first process we are its parent."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended[0], os.waitstatus_to_exitcode(ended[1])
                for number in [number for number, daemon in self._daemons.items() if daemon.pid == pid]:
                    daemon = self._daemons.pop(number)
                    daemon.reaped(status)
                    while said := _received(daemon.channel):  # perhaps that it served
                        self._says(number, daemon, said)
                    self._feed(e.Died(number, status, how_ended(status)))

    def _report(self, what: str) -> None:
        self._log.put(self._line(what))

    def _line(self, what: str) -> str:
        """As the daemons log."""
        line = f"kvferry keep: {what}"
        return event(line, "warning", __name__) if self._json else line


def _received(channel: socket.socket) -> bytes:
    """A message; empty when there is none, as either end is closed."""
    try:
        return channel.recv(MOST, socket.MSG_DONTWAIT)
    except OSError:
        return b""


def _say(channel: socket.socket, said: object, *files: int) -> None:
    with contextlib.suppress(OSError):  # the daemon is dead: so SIGCHLD says
        socket.send_fds(channel, [json.dumps(said).encode()], files)


def _notify(address: str) -> None:
    """As sd_notify does."""
    if address:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told, contextlib.suppress(OSError):
            told.sendto(READY, address.replace("@", "\0", 1) if address[0] == "@" else address)


def how_ended(status: int) -> str:
    return f"it was ended by {signal.Signals(-status).name}" if status < 0 else f"it ended with status {status}"


def main(argv: Sequence[str]) -> int:
    if {"-h", "--help"} & {*argv}:
        print(HELP)
        return 0
    return Keeper(argv).run()
