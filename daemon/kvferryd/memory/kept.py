"""The daemon's end of its keeper, `kvferryd.process.keeper`."""

from __future__ import annotations

import ctypes
import json
import signal
import socket
import threading

from kvferry.errors import Full, Unavailable
from kvferry.file import File
from kvferry.memory.cuda import Exported
from kvferryd.process.keeper import LOADED, MOST, SERVING

ANSWER_S = 60.0
"""How long the keeper may take to allocate: the first time it makes its context on the GPU."""
PR_SET_PDEATHSIG = 1


class Keeper:
    """Owns the descriptor by which the keeper is reached; it ends with the process."""

    def __init__(self, fd: int) -> None:
        """This process dies with its keeper. Call it on the main thread."""
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        self._channel = socket.socket(fileno=fd)
        self._channel.set_inheritable(False)
        self._lock = threading.Lock()
        self.peers: File | None = None
        self.history: File | None = None
        """Peers that were met, and what was done: the daemon before has written them for this one, and this one writes
        them for the next. They are there from `turn` on."""

    def turn(self, log_format: str, drain_timeout_s: float) -> str:
        """Wait until this daemon is the one to serve: what became of the one before it, or nothing if it is the first.
        The keeper logs as this daemon does, and gives it so long to drain.

        Raises EOFError when the keeper is gone.
        """
        self._say({"log_format": log_format, "drain_timeout_s": drain_timeout_s})
        self._say(LOADED)
        said, files, _, _ = socket.recv_fds(self._channel, MOST, 2, socket.MSG_CMSG_CLOEXEC)
        if not said:
            raise EOFError
        self.peers, self.history = [*map(File, files), None, None][:2]
        return str(json.loads(said))

    def serving(self) -> None:
        self._say(SERVING)

    def allocate(self, device: str, nbytes: int) -> tuple[Exported, File]:
        """GPU memory that is not cleared, and the file, which the caller closes, that keeps it: it is freed when
        nobody has that open any more. Raises KvferryError (`out_of_memory`, `cuda_failed`)."""
        with self._lock:
            try:
                self._channel.settimeout(ANSWER_S)
                self._say({"device": device, "nbytes": nbytes})
                said, files, _, _ = socket.recv_fds(self._channel, MOST, 1, socket.MSG_CMSG_CLOEXEC)
                told = json.loads(said)
            except (OSError, ValueError) as error:
                self._channel.close()  # or a late answer would be taken for that of the next question
                message, remedy = f"the keeper does not answer: {error}", "start `kvferry keep` again"
                raise Unavailable("keeper_gone", message, field="device", value=device, remedy=remedy) from None
        if not files:
            remedy = "free memory on this GPU, or ask for fewer bytes"
            raise Full(told["code"], told["message"], field="nbytes", value=nbytes, remedy=remedy)
        return Exported(**told | {"handle": bytes.fromhex(told["handle"])}), File(files[0])

    def _say(self, what: object) -> None:
        self._channel.send(json.dumps(what).encode())
