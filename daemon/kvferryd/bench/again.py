"""The first request after a daemon was killed and the one that stood by has taken over, beside later ones.

    kvferry bench again

Two engines on host memory, each with a daemon under a keeper. In each round one of the two daemons is killed; when
both say that they are ready a request is timed as the reader sees it, and later ones after it. Between rounds the next
daemon that stands by is loaded.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import signal
import time
import uuid
from statistics import median

from kvferry.blocking import BlockingEngineClient
from kvferry.memory import SharedRegion
from kvferry.router import RouterClient
from kvferry.schemas import SourceBody, TransferRecord
from kvferry.tables import BlockTable
from kvferryd.bench.first import HOST, HOST_TOKENS, TOKENS
from kvferryd.bench.gpu_cases import NHD, Cache
from kvferryd.demo.fleet import DaemonService, Fleet

ROUNDS, LATER = 5, 12
UP_S = 60.0
SETTLE_S = 5.0
"""A daemon that dies sooner is taken for one that does not last; the next one is loaded meanwhile."""


class _Side:
    """An engine, and its daemon under a keeper."""

    def __init__(self, name: str, daemon: DaemonService) -> None:
        self.name, self.daemon, self._said = name, daemon, queue.Queue[str]()
        self.client = BlockingEngineClient.connect(
            str(daemon.socket), engine_id=name, epoch="1", timeout_s=UP_S, say=self._said.put
        )
        cache = Cache(HOST, NHD, HOST_TOKENS)
        region = self.client.allocate(cache.nbytes)
        assert isinstance(region, SharedRegion)
        self.client.register(cache.manifest(name, "1", "host"))

    def killed(self) -> None:
        """Until its engine is attached to the next daemon."""
        lines = [json.loads(line) for line in self.daemon.log.read_text().splitlines() if '"event": "serving"' in line]
        os.kill(lines[-1]["pid"], signal.SIGKILL)
        while "there again" not in self._said.get(timeout=UP_S):
            pass


def main() -> int:
    """Print the table; 0 always: the ratios are for docs/benchmarks.md."""
    asyncio.run(_measure())
    return 0


async def _measure() -> None:
    print("| killed | round | ready again s | first ms | later p50 | max | first later than others by | path, before |")
    print("|" + "---|" * 8)
    async with Fleet() as fleet:
        daemons = [fleet.daemon(name, kept=True) for name in ("source", "reader")]
        await fleet.ready(*daemons, timeout_s=UP_S)
        source, reader = (_Side(daemon.name, daemon) for daemon in daemons)
        before = [await _take(source, reader) for _ in range(1 + LATER)]
        for side in (source, reader):
            for number in range(ROUNDS):
                await asyncio.sleep(SETTLE_S)
                began = time.perf_counter()
                side.killed()
                await _ready(daemons)
                ready_s = time.perf_counter() - began
                first, *later = [await _take(source, reader) for _ in range(1 + LATER)]
                took = [ms for ms, _ in later]
                print(
                    f"| {side.name} | {number} | {ready_s:.2f} | {first[0]:.1f} | {median(took):.1f} | {max(took):.1f} "
                    f"| {first[0] - median(took):.1f} | {first[1].path}, {before[-1][1].path} |", flush=True,
                )  # fmt: skip
        for side in (source, reader):
            side.client.close()


async def _ready(daemons: list[DaemonService]) -> None:
    async with asyncio.timeout(UP_S):
        for daemon in daemons:
            async with RouterClient(daemon.url) as router:
                while not (await router.ready()).ready:  # noqa: ASYNC110  another process's
                    await asyncio.sleep(0.005)


async def _take(source: _Side, reader: _Side) -> tuple[float, TransferRecord]:
    """(milliseconds, record) of a request."""
    request_id, blocks = uuid.uuid4().hex, {"full": BlockTable.of(range(TOKENS // NHD.block))}
    source.client.publish(request_id, blocks, TOKENS)
    named = SourceBody(engine_id=source.name, address=source.daemon.peer)
    began = time.perf_counter()
    received = reader.client.receive(request_id, blocks, (0, TOKENS), source=named).result(UP_S)
    ms = 1e3 * (time.perf_counter() - began)
    async with RouterClient(reader.daemon.url) as router:
        return ms, await router.transfer(received.transfer_id)


if __name__ == "__main__":
    main()
