"""`kvferry keep`: the daemon's parent, which starts it again when it dies and holds the GPU memory that outlives it.

A second daemon stands by: it has imported everything and waits for its turn, so that none of the imports is waited for
when the first one dies. Nothing of NIXL, gRPC or a peer comes into this process; it hears its own daemons only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from kvferry.errors import KvferryError
from kvferryd.observe.foreign import LOST, Writer, event

LOADED, SERVING = "loaded", "serving"
"""What a daemon says of itself."""
READY = b"READY=1"
"""Sent to NOTIFY_SOCKET, once, when the first daemon serves: systemd listens there, or `kvferry run`."""
MOST = 4096
"""Bytes of a message."""
LASTED_S = 5.0
"""A daemon that has served for so long does not count as one that dies at once."""
PAUSES_S = (0.0, 0.0, 0.5, 1.0, 2.0, 4.0)
"""Before the next daemon's turn, by how many in a row have died before LASTED_S."""
STANDBYS_APART_S = 10.0
"""Between the starts of two that stand by, where the first has died: one that does not load must not take a core."""
LOADS_S = 120.0
"""The longest that a daemon may take to load, once one has served: torch and Triton from a cold disk take a minute.
Nobody would follow the one that serves, or replace it, while another hangs."""
HELP = """\
usage: kvferry keep [the flags of `kvferry serve`]

Runs `kvferry serve` as its child and starts it again when it dies. Host memory of an engine outlives a daemon anyway;
under a keeper GPU memory does too. The engine attaches again by itself: what was under way has failed, nothing else.
Where one after the other dies within 5 s the next one waits, 4 s at most; nobody listens meanwhile.

SIGTERM, SIGINT   the daemon drains and stops, and so does the keeper; a second one stops both at once. An upgrade
                  under way ends there
SIGHUP            another daemon is loaded, of the code and the settings that are there now; then the one that serves
                  drains, stops, and is followed by it. If the new one does not load, the one that serves stays.

examples:
  kvferry keep --device cuda:0 --engine-socket /run/kvferry/engine.sock
  pip install --upgrade kvferry && pkill -HUP -f 'kvferry kee[p]'     an upgrade under living engines, by all keepers"""


@dataclasses.dataclass(eq=False)
class Daemon:
    """One start of it. `since`: when engines could attach; None before and after. `loading`: it has not said that it is
    loaded, and may still. `told`: to stop, as another one follows. Times: of the monotonic clock."""

    process: subprocess.Popen[bytes]
    channel: socket.socket
    started: float
    since: float | None = None
    loading: bool = True
    told: bool = False

    def signal(self, number: int) -> None:
        """Not through Popen, which would reap it behind our back. Until we reap it the number is its own."""
        os.kill(self.process.pid, number)


class Deaths:
    """How long to wait before the next daemon's turn."""

    in_a_row = 0
    """That did not last."""

    def pause_s(self, lasted_s: float) -> float:
        """Another has died, which had served for so long."""
        self.in_a_row = 0 if lasted_s >= LASTED_S else self.in_a_row + 1
        return PAUSES_S[min(self.in_a_row, len(PAUSES_S) - 1)]


class Keeper:
    def __init__(self, arguments: Sequence[str]) -> None:
        self._arguments = arguments
        self._starter = os.environ.pop("NOTIFY_SOCKET", "")
        self._selector = selectors.DefaultSelector()
        self._served = self._stopping = self._upgrading = self._json = False
        self._wished = False
        """An upgrade was asked for while the daemon whose turn it is did not serve yet: it comes when it does."""
        self._log = Writer(2, lambda lost: self._line(f"{LOST}: {lost}"))
        self._status: int | None = None
        self._deaths = Deaths()
        self._next_turn: tuple[float, str] | None = None
        """When the next daemon's turn is, and what became of the one before: none serves now."""
        self._standby: Daemon | None = None
        self._loads_s = LOADS_S
        """Twice as long after each daemon that was killed for it: disks may be slow."""
        self._next_standby: float | None = None
        """When another one is started, since the last one has died."""
        self._current = self._started()
        self._turn(self._current, "")

    def run(self) -> int:
        """Until the daemon was told to stop, or never served; returns its exit status."""
        told, telling = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(telling)
        self._selector.register(told, selectors.EVENT_READ, lambda: self._signalled(os.read(told, MOST)))
        from kvferry.memory import cuda  # now: later an upgrade may have put another version in its place

        self._gpu = cuda.device
        self._reap()  # what ended before its signal was heard
        while self._status is None:
            for key, _ in self._selector.select(self._left_s()):
                key.data()
            now = time.monotonic()
            if self._next_turn is not None and self._next_turn[0] <= now:
                self._follow()
            if self._next_standby is not None and self._next_standby <= now:
                self._stand_by()
            for daemon in self._hanging():
                if daemon.started + self._loads_s <= now:
                    self._report(f"a daemon has not loaded within {self._loads_s:g} s: it is killed")
                    self._loads_s, daemon.loading = 2 * self._loads_s, False
                    daemon.signal(signal.SIGKILL)
        self._log.flush()
        return self._status

    def _start(self, otherwise: str) -> Daemon | None:
        """Another daemon; None where none can be started now, which is reported with what happens otherwise."""
        try:
            return self._started()
        except OSError as error:  # no process, no descriptor, or no interpreter while it is replaced
            self._report(f"no daemon can be started now ({error}): {otherwise}")
            return None

    def _started(self) -> Daemon:
        """Raises OSError. A daemon whose channel is closed ends by itself."""
        with contextlib.ExitStack() as undo:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            undo.callback(ours.close)
            with theirs:
                command = ["-P", "-m", "kvferryd", "serve", f"--keeper={theirs.fileno()}", *self._arguments]
                process = subprocess.Popen(  # noqa: S603  # ourselves
                    [sys.executable, *command],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    process_group=0,  # a terminal's Ctrl-C is ours to hand on
                )
            daemon = Daemon(process, ours, time.monotonic())
            self._selector.register(ours, selectors.EVENT_READ, lambda: self._heard(daemon))
            undo.pop_all()
        return daemon

    def _turn(self, daemon: Daemon, why: str) -> None:
        """why: what became of the one before, in words."""
        with contextlib.suppress(OSError):  # it is dead: so SIGCHLD says
            daemon.channel.send(json.dumps(why).encode())

    def _heard(self, daemon: Daemon) -> None:
        said = _received(daemon.channel)
        if not said:
            self._selector.unregister(daemon.channel)
            daemon.channel.close()
        else:
            self._says(daemon, said)

    def _says(self, daemon: Daemon, said: bytes) -> None:
        match json.loads(said):
            case {"log_format": form}:
                self._json = form == "json"
            case "loaded":
                self._loads_s, daemon.loading = LOADS_S, False
                if self._upgrading and daemon is self._standby and not self._current.told:
                    self._current.told = True
                    self._current.signal(signal.SIGTERM)
            case "serving":
                daemon.loading = False
                if not self._served:
                    _notify(self._starter)
                daemon.since, self._served = time.monotonic(), True
                if self._wished:
                    self._upgrade()
                self._stand_by()
            case {"device": str(device), "nbytes": int(nbytes)}:
                self._allocate(daemon, device, nbytes)

    def _allocate(self, daemon: Daemon, device: str, nbytes: int) -> None:
        """The answer brings a descriptor: the memory is freed when nobody has it open any more."""
        try:
            gpu = self._gpu(device)
            with contextlib.ExitStack() as undo:
                address = gpu.alloc(nbytes)
                free = functools.partial(gpu.free, address)
                undo.callback(free)
                exported = gpu.export(address)
                held, given = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                undo.callback(held.close)
                with given:
                    self._selector.register(held, selectors.EVENT_READ, lambda: self._let_go(held, free))
                    undo.pop_all()
                    told = dataclasses.asdict(exported) | {"handle": exported.handle.hex()}
                    self._say(daemon, told, given.fileno())
        except KvferryError as error:
            self._say(daemon, {"code": error.code, "message": error.message})
        except OSError as error:
            message = f"the keeper has no descriptor left to hold {nbytes} bytes with: {error}"
            self._say(daemon, {"code": "out_of_memory", "message": message})

    def _say(self, daemon: Daemon, said: object, *files: int) -> None:
        with contextlib.suppress(OSError):
            socket.send_fds(daemon.channel, [json.dumps(said).encode()], files)

    def _let_go(self, held: socket.socket, free: Callable[[], None]) -> None:
        if not _received(held):
            self._selector.unregister(held)
            held.close()
            try:
                free()
            except KvferryError as error:  # in a broken context: other engines' memory and the daemon stay
                self._report(f"memory that nobody holds any more cannot be freed: {error.message}")

    def _signalled(self, numbers: bytes) -> None:
        for number in numbers:
            if number == signal.SIGCHLD:
                self._reap()
            elif number == signal.SIGHUP:
                self._upgrade()
            else:
                first, self._stopping = not self._stopping, True
                self._end_standby()
                if self._next_turn is not None:
                    self._ended(self._current.process.returncode)
                elif not (first and self._current.told):  # it drains already, and a second signal ends that
                    self._current.signal(number)

    def _upgrade(self) -> None:
        self._wished = self._next_turn is None and self._current.since is None
        if not self._stopping and not self._upgrading and (self._next_turn or self._current.since is not None):
            new = self._start("the one that serves stays" if self._next_turn is None else "the next one's turn comes")
            if new is not None:
                self._upgrading = self._next_turn is None
                self._end_standby()
                self._standby = new

    def _stand_by(self) -> None:
        again = f"another one that stands by is tried again in {STANDBYS_APART_S:g} s"
        self._standby, self._next_standby = self._standby or self._start(again), None
        if self._standby is None:
            self._next_standby = time.monotonic() + STANDBYS_APART_S

    def _end_standby(self) -> None:
        self._next_standby = None
        if self._standby is not None:
            self._standby.signal(signal.SIGKILL)
            self._standby = None

    def _reap(self) -> None:
        """Also what dead daemons left behind: as a container's first process we are its parent."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended[0], os.waitstatus_to_exitcode(ended[1])
                if pid == self._current.process.pid and self._next_turn is None:
                    self._current.process.returncode = status
                    while said := _received(self._current.channel):  # perhaps that it served
                        self._says(self._current, said)
                    self._current_ended(status)
                elif self._standby is not None and pid == self._standby.process.pid:
                    self._standby.process.returncode = status
                    self._next_standby, self._standby = self._standby.started + STANDBYS_APART_S, None
                    if self._upgrading and self._current.told:
                        self._report(f"the new daemon is dead ({how_ended(status)}): another one is loaded")
                    elif self._upgrading:
                        self._upgrading = False
                        self._report(f"the new daemon does not load ({how_ended(status)}): the one that serves stays")
                    else:
                        self._report(f"the daemon that stood by is dead ({how_ended(status)}): another one is loaded")

    def _current_ended(self, status: int) -> None:
        if self._stopping or not self._served:
            self._end_standby()
            self._ended(status)
            return
        why, pause_s, now = how_ended(status), 0.0, time.monotonic()
        if self._upgrading:
            why = "it was upgraded"
        elif pause_s := self._deaths.pause_s(0.0 if self._current.since is None else now - self._current.since):
            times = f"{self._deaths.in_a_row} daemons in a row have not lasted {LASTED_S:g} s"
            self._report(f"{times}; of the last one: {why}. The next one's turn is in {pause_s:g} s")
        self._upgrading, self._current.since, self._current.loading = False, None, False
        self._next_turn = now + pause_s, why

    def _hanging(self) -> list[Daemon]:
        """Those that may hang while they load. The first of all is its supervisor's matter."""
        return [each for each in (self._current, self._standby) if self._served and each is not None and each.loading]

    def _left_s(self) -> float | None:
        """Until something is to be started, or killed; None when nothing is."""
        times = [*(self._next_turn or ())[:1], *filter(None, [self._next_standby])]
        times += [daemon.started + self._loads_s for daemon in self._hanging()]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _follow(self) -> None:
        assert self._next_turn is not None
        pause_s = PAUSES_S[-1]
        new = self._standby or self._start(f"nobody serves; it is tried again in {pause_s:g} s")
        if new is None:
            self._next_turn = time.monotonic() + pause_s, self._next_turn[1]
            return
        why, self._next_turn = self._next_turn[1], None
        self._current, self._standby, self._next_standby = new, None, None
        self._turn(self._current, why)

    def _ended(self, status: int) -> None:
        """The keeper ends as its daemon has."""
        self._status = status if status >= 0 else 128 - status

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
