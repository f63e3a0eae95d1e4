"""The output of one command's processes, as one log."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterable

from kvferry.output import LONGEST, LOST, Writer, as_json, event


class Output:
    """Lines of processes, each with the name of its process before it, or in it where lines are JSON."""

    def __init__(self, own: str, names: Iterable[str], *, as_json: bool) -> None:
        """own: this process's name. names: of the others."""
        self._own, self._width, self._as_json = own, max(map(len, [own, *names])), as_json
        self._writer = Writer(1, lambda lost: self._named(own, f"{LOST}: {lost}"))
        self._open = 0
        self._closed = asyncio.Event()

    def say(self, what: str, level: str = "info") -> None:
        self._writer.put(self._named(self._own, event(what, level, __name__) if self._as_json else what))

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
