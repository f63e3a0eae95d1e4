"""How a scheduler that has nothing to compute waits for transfers."""

from __future__ import annotations

import os
import select
from concurrent.futures import Future
from typing import Any

AT_MOST_MS = 2
"""Then SGLang looks again: not everything that it waits for wakes it, and ranks above 0 get requests from rank 0."""


class Idle:
    """SGLang's scheduler asks its senders and receivers without a pause until one has ended. SGLang's own backends move
    bytes in its process, and need no more than its GIL; a daemon needs the core, too."""

    def __init__(self) -> None:
        self._woken, self._poll = os.eventfd(0, os.EFD_NONBLOCK), select.poll()
        self._poll.register(self._woken, select.POLLIN)

    def wake_after(self, work: Future[Any]) -> None:
        work.add_done_callback(lambda _: os.eventfd_write(self._woken, 1))

    def wait(self, *sockets: Any) -> None:
        """Until such work has ended, or a request comes on one of SGLang's sockets (None: there is none)."""
        for socket in filter(None, sockets):
            self._poll.register(socket, select.POLLIN)
        if (self._woken, select.POLLIN) in self._poll.poll(AT_MOST_MS):
            os.eventfd_read(self._woken)
