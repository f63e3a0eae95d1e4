"""Measures what it costs a reader to know many peers, and a source to have many readers.

    kvferry bench peers [--peers 1000]

The first peer is an engine on a daemon of its own. The others share processes (`kvferryd.bench.crowd`), and nothing
else: each has its own NIXL agent, peer service and port. Everybody speaks TCP, as between hosts.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from statistics import median

from kvferry.engine import EngineClient
from kvferry.memory import SharedRegion
from kvferry.router import RouterClient
from kvferry.schemas import PeerRequest, SourceBody
from kvferry.tables import BlockTable
from kvferryd.bench import Options
from kvferryd.bench.child import child
from kvferryd.bench.crowd import BLOCK, BLOCKS, NBYTES, manifest
from kvferryd.demo.fleet import DaemonService, Fleet

EACH, AT_ONCE = 100, 32
ORDERS, WARM_UP = 200, 20
UP_S, ONE_S, IDLE_S = 120.0, 60.0, 5.0
TCP = {"TLS": "tcp", "NET_DEVICES": "lo"}
FLAGS = ("--connect-timeout-s", "60", "--ucx", " ".join(f"{name}={value}" for name, value in TCP.items()))
STEPS = "asking", "planning", "screening", "loading", "first read", "total"
AFTER = "RSS, MB", "files", "CPU when idle", "order to done", "its loop's CPU ms"
COLUMNS = "peers known", "ms to meet one", "CPU ms", *STEPS, *AFTER


def main(options: Options) -> int:
    """Print the tables; 0 always: the ratios are for docs/benchmarks.md."""
    asyncio.run(_measure(options.peers))
    return 0


async def _measure(count: int) -> None:
    async with Fleet() as fleet:
        reader_daemon, source_daemon = fleet.daemon("reader", flags=FLAGS), fleet.daemon("source", flags=FLAGS)
        await fleet.ready(reader_daemon, source_daemon, timeout_s=UP_S)
        async with (
            RouterClient(reader_daemon.url, timeout_s=ONE_S) as router,
            _engine(reader_daemon, "reader") as reader,
            _engine(source_daemon, "peer-0") as source,
        ):
            at = SourceBody(engine_id="peer-0", address=source.peer_address)
            known = _Known(reader_daemon, router, source, reader, at)
            print("load:", " ".join(f"{each:.0f}" for each in os.getloadavg()))
            print(f"| {' | '.join(COLUMNS)} |")
            print("|---" * len(COLUMNS) + "|")
            await known.meet("1", [at])
            with ExitStack() as first, ExitStack() as second:
                peers = await _crowd(first, count - 1)
                if count > 100:
                    await known.meet("100", peers[:99])
                await known.meet(str(count), peers[99:] if count > 100 else peers)
                again = await _crowd(second, count - 1)
                first.close()
                await known.meet("all but one again, in new epochs", again)
                for peer in again:
                    await router.forget_peer(peer.engine_id)
                await known.row("1, the others forgotten", [])
            await known.row("1, the others ended", [])
            await _source(known, source_daemon, count)
            print("load:", " ".join(f"{each:.0f}" for each in os.getloadavg()))


class _Known:
    """The peers that a reader knows, and their cost."""

    def __init__(
        self, daemon: DaemonService, router: RouterClient, source: EngineClient, reader: EngineClient, at: SourceBody
    ) -> None:
        self._daemon, self._router, self._source, self._reader, self._at = daemon, router, source, reader, at

    async def meet(self, what: str, peers: Sequence[SourceBody]) -> None:
        turns = asyncio.Semaphore(AT_ONCE)

        async def meet(peer: SourceBody) -> None:
            async with turns:
                await self._router.prewarm(PeerRequest(engine_id=peer.engine_id, address=peer.address))

        met, began, cpu_began_s = len(_met(self._daemon)), time.perf_counter(), _cpu_s(self._daemon)
        await asyncio.gather(*map(meet, peers))
        took = (time.perf_counter() - began) / len(peers), (_cpu_s(self._daemon) - cpu_began_s) / len(peers)
        parts = _met(self._daemon)[met:]
        steps = [median(part.get(step, 0.0) for part in parts) for step in STEPS]
        await self.row(what, [*(1e3 * each for each in took), *steps])

    async def row(self, what: str, meeting_ms: Sequence[float]) -> None:
        told = [f"{each:.1f}" for each in meeting_ms] or [""] * (len(STEPS) + 2)
        after = await self.after(self._daemon)
        print(f"| {what} | {' | '.join(told)} | {after} |", flush=True)

    async def after(self, daemon: DaemonService) -> str:
        """The cells of one daemon in the columns AFTER."""
        idle, (rss, files) = await _idle(daemon), _held(daemon)
        order_ms, loop_ms = await self._order_to_done(daemon)
        return f"{rss:.1f} | {files} | {idle:.1%} | {order_ms:.2f} | {loop_ms:.2f}"

    async def _order_to_done(self, daemon: DaemonService) -> tuple[float, float]:
        """Milliseconds, from the one source that is always known; those of a processor that the event loop of `daemon`
        takes for each, which do not depend on what else this machine does."""
        tables, took, began_s = {"full": BlockTable.of(range(BLOCKS))}, [], 0.0
        for number in range(WARM_UP + ORDERS):
            if number == WARM_UP:
                began_s = _loop_s(daemon)
            request_id = uuid.uuid4().hex
            await self._source.publish(request_id, tables, BLOCKS * BLOCK)
            began = time.perf_counter()
            await self._reader.receive(request_id, tables, (0, BLOCKS * BLOCK), source=self._at)
            took.append(time.perf_counter() - began)
        return 1e3 * median(took[WARM_UP:]), 1e3 * (_loop_s(daemon) - began_s) / ORDERS


async def _source(known: _Known, daemon: DaemonService, count: int) -> None:
    """The same source with one reader and with many."""
    print(f"\n| readers of one source | CPU ms to be met | {' | '.join(AFTER)} |")
    print("|" + "---|" * (2 + len(AFTER)))
    with ExitStack() as readers:
        for wanted in (0, count - 1):
            cpu_began_s = _cpu_s(daemon)
            await _crowd(readers, wanted, "peer-0", daemon.peer)
            met_ms = 1e3 * (_cpu_s(daemon) - cpu_began_s) / max(1, wanted)
            print(f"| {wanted + 1} | {met_ms:.1f} | {await known.after(daemon)} |", flush=True)


async def _crowd(stack: ExitStack, count: int, *source: str) -> list[SourceBody]:
    """So many peers in processes that end with `stack`, one process after the other: sources, or readers of one."""
    env, found = {f"UCX_{name}": value for name, value in TCP.items()}, []
    for first in range(1, count + 1, EACH):
        arguments = str(first), str(min(EACH, count + 1 - first)), *source
        said = await asyncio.to_thread(stack.enter_context, child("kvferryd.bench.crowd", *arguments, env=env))
        found += [SourceBody(**peer) for peer in said["peers"]]
    return found


@asynccontextmanager
async def _engine(daemon: DaemonService, engine_id: str) -> AsyncIterator[EngineClient]:
    epoch = uuid.uuid4().hex
    connecting = EngineClient.connect(str(daemon.socket), engine_id=engine_id, epoch=epoch, timeout_s=ONE_S)
    async with await connecting as client:
        region = await client.allocate(NBYTES)
        assert isinstance(region, SharedRegion)  # the daemon has no GPU
        await client.register(manifest(engine_id, epoch, region.address))
        yield client


def _met(daemon: DaemonService) -> list[dict[str, float]]:
    """Milliseconds by step, for each handshake so far."""
    lines = (json.loads(line) for line in daemon.log.read_text().splitlines() if line.startswith("{"))
    return [line["took_ms"] for line in lines if line["event"] == "peer met"]


def _held(daemon: DaemonService) -> tuple[float, int]:
    """(MB, descriptors) of the daemon itself."""
    status = Path(f"/proc/{daemon.process.pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024, len(os.listdir(f"/proc/{daemon.process.pid}/fd"))


async def _idle(daemon: DaemonService) -> float:
    """The share of a processor that an idle daemon takes."""
    began_s = _cpu_s(daemon)
    await asyncio.sleep(IDLE_S)
    return (_cpu_s(daemon) - began_s) / IDLE_S


def _loop_s(daemon: DaemonService) -> float:
    """CPU seconds of its event loop, which is its first thread."""
    pid = daemon.process.pid
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


def _cpu_s(daemon: DaemonService) -> float:
    """CPU seconds, user and system, of the daemon and of the processes that it has started."""
    pids, ticks = [daemon.process.pid, *_children(daemon)], 0
    for pid in pids:
        # After the name, which is in brackets and may hold anything: fields 14 to 17 of proc(5), from 3 on.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _children(daemon: DaemonService) -> Iterator[int]:
    for task in Path(f"/proc/{daemon.process.pid}/task").glob("*/children"):
        yield from map(int, task.read_text().split())
