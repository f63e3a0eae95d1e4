"""The words that an engine's streams write, and waiting until one has its value (see kvferry.memory.fences).

A GPU's write to memory wakes nobody, so a thread looks, the less often the longer it has waited.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvferry.errors import Conflict, Malformed
from kvferry.memory.fences import NBYTES, WORDS, Fence
from kvferry.memory.handover import map_sealed
from kvferryd.aio import settle

SHORTEST_S, LONGEST_S = 20e-6, 1e-3
PATIENCE = 1 / 16
"""A fence is seen later than it is reached by at most this share of the wait."""
CLOSE_S = 5.0


@dataclass(slots=True, eq=False)
class _Wait:
    fence: Fence
    timeout_s: float
    began: float
    reached: asyncio.Future[None]


class Fences:
    """Owns the mapped page and a thread. `close` it."""

    def __init__(self, files: Sequence[int]) -> None:
        """Maps the one file, which the caller may close then. Raises KvferryError."""
        if len(files) != 1:
            value = f"{len(files)} files"
            raise Malformed("malformed_handover", "a page of fences is one file", field="ticket", value=value)
        self._map = map_sealed(files[0], NBYTES, prot=mmap.PROT_READ)
        self._words = np.frombuffer(self._map, dtype=np.uint64)
        self._inbox: queue.Queue[_Wait | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="fences", daemon=True)
        self._thread.start()

    def reached(self, fence: Fence, timeout_s: float) -> asyncio.Future[None]:
        """Done when it is; fails with KvferryError (`fence_timeout`) when it is not in time. Cancel it to wait no more.

        Raises KvferryError (`malformed_fence`).
        """
        if not (0 <= fence.word < WORDS and fence.value > 0):
            raise Malformed(
                "malformed_fence", f"a fence is one of {WORDS} words and a value above 0", field="after",
                value=f"word {fence.word}, value {fence.value}", remedy="pass on what EngineClient.fence returned",
            )  # fmt: skip
        reached: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._holds(fence):
            reached.set_result(None)
        else:
            self._inbox.put(_Wait(fence, timeout_s, time.monotonic(), reached))
        return reached

    async def close(self) -> None:
        """Stop looking, and unmap. Idempotent. Waits that are left are never told."""
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join, CLOSE_S)
        if not self._thread.is_alive():
            self._words = np.zeros(WORDS, dtype=np.uint64)
            self._map.close()

    def _holds(self, fence: Fence) -> bool:
        return int(self._words[fence.word]) >= fence.value

    def _run(self) -> None:
        waiting: list[_Wait] = []
        while True:
            with contextlib.suppress(queue.Empty):
                wait = self._inbox.get(timeout=_patience(waiting))
                if wait is None:
                    return
                waiting.append(wait)
            waiting = [wait for wait in waiting if not self._over(wait)]

    def _over(self, wait: _Wait) -> bool:
        if wait.reached.done():  # cancelled
            return True
        if self._holds(wait.fence):
            settle(wait.reached)
            return True
        if time.monotonic() - wait.began <= wait.timeout_s:
            return False
        why = f"the engine's stream did not reach the fence of a publish within {wait.timeout_s:g} s"
        remedy = "look for a hung or failed kernel in the engine, or raise fence_timeout_s"
        error = Conflict("fence_timeout", why, field="fence_timeout_s", value=wait.timeout_s, remedy=remedy)
        settle(wait.reached, error=error)
        return True


def _patience(waiting: Sequence[_Wait]) -> float | None:
    """Seconds until the next look; for ever with nothing to look for."""
    if not waiting:
        return None
    waited = time.monotonic() - waiting[-1].began
    return min(LONGEST_S, max(SHORTEST_S, PATIENCE * waited))
