"""Processes that belong to this one: what ties them, and how none of them is left.

`kvferry run` is two processes. The first, which the user knows, hands signals on to the second, which does the work.
When one of them is killed, the other one ends all that is left.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import suppress
from pathlib import Path
from types import FrameType

from kvferry.errors import Unavailable

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""SIGHUP is what a terminal sends when it is closed."""
UPGRADES = signal.SIGUSR1
ORPHANED_S = 10.0
"""How long what is left may take when its launcher was killed: each has been told to stop by `tied`."""
CLEANS_S = 5.0
"""How long what removes the shared memory of the dead may take."""
DIES_S = 10.0
"""How long the kernel may take to end a process that was killed: one that waits for a disk or a driver takes longer."""
LONGEST_FOLDER = 70
"""Bytes of a run's folder's path: vLLM makes sockets in it whose names have 36, and a socket's path has 107 at most."""
CLEANS = b"multiprocessing.resource_tracker"
"""In the command line of Python's process for that. It ends by itself when all are dead that it watches."""
TIE = """\
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 15)
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""


def tied(command: Sequence[str]) -> list[str]:
    """The same program, which is told to stop when this process ends, however it does."""
    return [sys.executable, "-I", "-S", "-c", TIE, str(os.getpid()), *command]


class Told(BaseException):
    """A signal asks this process to end."""

    def __init__(self, number: int, frame: FrameType | None = None) -> None:
        super().__init__(number)
        self.status = 128 + number


def guarded(prefix: str, work: Callable[[Path], int], leave: Callable[[Path], None]) -> int:
    """Do `work` in a child, and hand signals on to it; returns its status. It gets a new folder, whose name begins with
    `prefix`, and may be ended by `Told` until it handles signals itself. leave: takes away the folder, and what is
    noted in it; it is called however either process ends. Raises KvferryError (`no_folder`).

    Not to be called beside threads, as it forks.
    """
    folder = _folder(prefix)
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    first = os.getpid()
    others = living(first)  # descendants of the script that has become us
    handed_on = {*ENDS, UPGRADES}
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # nohup: the terminal may be closed
        handed_on.remove(signal.SIGHUP)
    # The first takes signals out of the kernel's hand one by one. With handlers one could come right before it waits,
    # and would be handed on after the wait.
    taken = {*handed_on, signal.SIGCHLD}
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # who has started us may have it ignored
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, taken)
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)  # a terminal's Ctrl-C is the first one's to hand on
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
        status = 1
        try:
            for number in handed_on:
                signal.signal(number, _told)
            signal.signal(UPGRADES, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, taken)
            if os.getppid() == first:
                status = work(folder)
        except Told as asked:
            status = asked.status
        finally:
            try:
                signal.pthread_sigmask(signal.SIG_BLOCK, handed_on)
                leave(folder)
                for stream in filter(None, (sys.stdout, sys.stderr)):  # None: it was closed when we began
                    with suppress(OSError):  # its reader has gone, or its disk is full
                        stream.flush()
            finally:
                os._exit(status)
    while not _has_ended(child):
        if (told := signal.sigwait(taken)) != signal.SIGCHLD:
            os.kill(child, told)
    for number in handed_on:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])  # until now its number was its own, for signals
    end(lambda: living(first, spared=others), ORPHANED_S)
    leave(folder)
    return status if status >= 0 else 128 - status


def _folder(prefix: str) -> Path:
    """A new one, in which sockets can be made."""
    remedy = "let it name a folder with a short path that this user may write to: TMPDIR=/tmp kvferry ..."

    def refused(why: str) -> Unavailable:
        value = os.environ.get("TMPDIR", "")
        return Unavailable("no_folder", f"no folder for sockets: {why}", field="TMPDIR", value=value, remedy=remedy)

    try:
        folder = Path(tempfile.mkdtemp(prefix=prefix))
    except OSError as error:
        raise refused(error.strerror or str(error)) from None
    if len(os.fsencode(folder)) > LONGEST_FOLDER:
        folder.rmdir()
        raise refused(f"the path of {folder} is longer than {LONGEST_FOLDER} bytes")
    return folder


def _has_ended(child: int) -> bool:
    """Its status is still to be taken then; that of orphans of ours is taken."""
    while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT | os.WNOHANG)) is not None:
        if ended.si_pid == child:
            return True
        os.waitpid(ended.si_pid, 0)
    return False


def _told(number: int, frame: FrameType | None) -> None:
    raise Told(number)


def end(left: Callable[[], Set[int]], patience_s: float) -> Set[int]:
    """Wait until none of them is left, or `patience_s` has passed; then kill them, those that clean up behind others
    last. Returns those that the kernel has not ended by then."""
    for longest_s, kills in ((patience_s, _nobody), (CLEANS_S, _no_cleaner), (DIES_S, _anybody)):
        deadline = time.monotonic() + longest_s
        while alive := left():
            _kill({*filter(kills, alive)}, left)
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            _await_one(alive, left_s)
    return alive


def _kill(pids: Set[int], left: Callable[[], Set[int]]) -> None:
    """Kill those that are left still: by now the number of one that has ended may be another process's. A descriptor
    keeps to the process that had the number when it was opened."""
    opened: dict[int, int] = {}
    try:
        for pid in pids:
            with suppress(OSError):  # it has ended; or no descriptor is left, and the next round opens the others
                opened[pid] = os.pidfd_open(pid)
        for pid in opened.keys() & left() if opened else ():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(opened[pid], signal.SIGKILL)
    finally:
        for each in opened.values():
            os.close(each)


def living(pid: int, spared: Set[int] = frozenset()) -> set[int]:
    """The descendants of a process that have not ended; without those of `spared`, and these."""
    children: dict[int, list[int]] = {}
    for each, (parent, ended) in _parents():
        if not ended:
            children.setdefault(parent, []).append(each)
    found, above = set[int](), [pid]
    while above:
        below = [each for each in children.get(above.pop(), ()) if each not in spared]
        found.update(below)
        above += below
    return found


def reap(spared: Set[int]) -> None:
    """Take the status of children of this process that have ended, but of those whose status is awaited."""
    for each, (parent, ended) in _parents():
        if ended and parent == os.getpid() and each not in spared:
            with suppress(ChildProcessError):
                os.waitpid(each, os.WNOHANG)


def _parents() -> Iterator[tuple[int, tuple[int, bool]]]:
    """(process, (its parent, whether it has ended)) of all that can be seen."""
    for path in Path("/proc").iterdir():
        if path.name.isdecimal():
            with suppress(OSError):  # it has gone meanwhile
                state, parent = (path / "stat").read_text().rpartition(")")[2].split()[:2]
                yield int(path.name), (int(parent), state in "ZX")


def _nobody(pid: int) -> bool:
    return False


def _no_cleaner(pid: int) -> bool:
    try:
        return CLEANS not in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return True


def _anybody(pid: int) -> bool:
    return True


def _await_one(pids: Set[int], longest_s: float) -> None:
    """Until one of them has ended."""
    poll, opened = select.poll(), []
    try:
        for pid in pids:
            try:
                opened.append(os.pidfd_open(pid))
            except OSError:  # it has ended
                return
            poll.register(opened[-1], select.POLLIN)
        poll.poll(longest_s * 1000)
    finally:
        for each in opened:
            os.close(each)
