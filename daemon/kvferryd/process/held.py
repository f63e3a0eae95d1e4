"""GPU memory that the keeper holds for its daemons, and for the engines beside them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import selectors
import socket
from collections.abc import Callable

from kvferry.errors import KvferryError


class Held:
    """Memory is freed when nobody has the descriptor open that came with it."""

    def __init__(self, selector: selectors.BaseSelector, report: Callable[[str], None]) -> None:
        self._selector, self._report = selector, report

    def load(self) -> None:
        """Import what allocates: now, as an upgrade may put another version in its place."""
        from kvferry.memory import cuda

        self._gpu = cuda.device

    def allocate(self, device: str, nbytes: int, say: Callable[..., None]) -> None:
        """say: takes the answer, and the descriptor that keeps the memory."""
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
                    say(dataclasses.asdict(exported) | {"handle": exported.handle.hex()}, given.fileno())
        except KvferryError as error:
            say({"code": error.code, "message": error.message})
        except OSError as error:
            message = f"the keeper has no descriptor left to hold {nbytes} bytes with: {error}"
            say({"code": "out_of_memory", "message": message})

    def _let_go(self, held: socket.socket, free: Callable[[], None]) -> None:
        """It is closed at the other end, where nobody ever says anything."""
        self._selector.unregister(held)
        held.close()
        try:
            free()
        except KvferryError as error:  # in a broken context: other engines' memory and the daemon stay
            self._report(f"memory that nobody holds any more cannot be freed: {error.message}")
