"""What it costs a reader to know many peers: to meet them, to keep them, to order from one beside them, to replace all.

    kvferry bench peers [--peers 1000]

The peers are engines of one rank on host memory, each with a NIXL agent of its own, EACH of them on a real daemon. They
share the gRPC connection to their daemon; all else is one for each peer.
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from kvferry.engine import EngineClient
from kvferry.manifest import ManifestBuilder, ModelInfo
from kvferry.memory import SharedRegion
from kvferry.router import RouterClient
from kvferry.schemas import PeerRequest, SourceBody
from kvferry.tables import BlockTable
from kvferryd.bench import Options
from kvferryd.bench.gpu_engines import cpu_s
from kvferryd.demo.fleet import DaemonService, Fleet

EACH = 50
AT_ONCE, REGISTER_AT_ONCE = 32, 4
ORDERS, WARM_UP = 60, 10
UP_S, ONE_S = 120.0, 60.0
BLOCKS, BLOCK, DIM = 16, 16, 64
PATIENT = ("--connect-timeout-s", "60")


class _Peer(NamedTuple):
    client: EngineClient
    source: SourceBody


def main(options: Options) -> int:
    """Print the table; 0 always: the ratios are for docs/benchmarks.md."""
    asyncio.run(_measure(options.peers))
    return 0


async def _measure(count: int) -> None:
    async with Fleet() as fleet:
        reader_daemon = fleet.daemon("reader", flags=PATIENT)
        sources = [fleet.daemon(f"sources-{n}", flags=PATIENT) for n in range(-(-count // EACH))]
        await fleet.ready(reader_daemon, *sources, timeout_s=UP_S)
        async with (
            RouterClient(reader_daemon.url, timeout_s=ONE_S) as router,
            _engine(reader_daemon, "reader") as reader,
        ):
            async with _engines(sources, count) as peers:
                await _meets(peers, reader_daemon, router, reader)
            async with _engines(sources, count) as peers:
                _row(f"all {count} again, in new epochs", reader_daemon, *await _meet_all(router, peers, reader_daemon))
            print("known when all of them are gone:", len(await router.peers()))


async def _meets(peers: Sequence[_Peer], daemon: DaemonService, router: RouterClient, reader: _Peer) -> None:
    print("| peers known | ms to meet one | of the reader's CPU | RSS, MB | descriptors | order to done, p50 ms |")
    print("|" + "---|" * 6)
    _row("none", daemon, 0.0, 0.0)
    known = 0
    for wanted in sorted({1, min(100, len(peers)), len(peers)}):
        took = await _meet_all(router, peers[known:wanted], daemon)
        known = wanted
        assert len(await router.peers()) == known
        _row(str(known), daemon, *took, await _order_to_done(peers[0], reader))


async def _meet_all(router: RouterClient, peers: Sequence[_Peer], daemon: DaemonService) -> tuple[float, float]:
    """Seconds for each: of the clock, and of the daemon's processor time."""
    turns = asyncio.Semaphore(AT_ONCE)

    async def meet(peer: _Peer) -> None:
        async with turns:
            await router.prewarm(PeerRequest(engine_id=peer.source.engine_id, address=peer.source.address))

    began, cpu_began_s = time.perf_counter(), cpu_s([daemon])
    await asyncio.gather(*map(meet, peers))
    return (time.perf_counter() - began) / len(peers), (cpu_s([daemon]) - cpu_began_s) / len(peers)


async def _order_to_done(source: _Peer, reader: _Peer) -> float:
    tables, took = {"full": BlockTable.of(range(BLOCKS))}, []
    for _ in range(WARM_UP + ORDERS):
        request_id = uuid.uuid4().hex
        await source.client.publish(request_id, tables, BLOCKS * BLOCK)
        began = time.perf_counter()
        await reader.client.receive(request_id, tables, (0, BLOCKS * BLOCK), source=source.source)
        took.append(time.perf_counter() - began)
    return 1e3 * median(took[WARM_UP:])


def _row(what: str, daemon: DaemonService, meet_s: float, cpu: float, order_ms: float | None = None) -> None:
    status = Path(f"/proc/{daemon.process.pid}/status").read_text()
    rss_mb = int(status.partition("VmRSS:")[2].split()[0]) / 1024
    files = len(os.listdir(f"/proc/{daemon.process.pid}/fd"))
    order = "" if order_ms is None else f"{order_ms:.2f}"
    print(f"| {what} | {1e3 * meet_s:.1f} | {1e3 * cpu:.1f} | {rss_mb:.0f} | {files} | {order} |", flush=True)


@asynccontextmanager
async def _engines(daemons: Sequence[DaemonService], count: int) -> AsyncIterator[list[_Peer]]:
    """Engines peer-0 and so on, in epochs of their own."""
    turns = asyncio.Semaphore(REGISTER_AT_ONCE)
    async with AsyncExitStack() as stack:

        async def one(number: int) -> _Peer:
            async with turns:
                return await stack.enter_async_context(_engine(daemons[number // EACH], f"peer-{number}"))

        yield await asyncio.gather(*map(one, range(count)))


@asynccontextmanager
async def _engine(daemon: DaemonService, engine_id: str) -> AsyncIterator[_Peer]:
    epoch = uuid.uuid4().hex
    connecting = EngineClient.connect(str(daemon.socket), engine_id=engine_id, epoch=epoch, timeout_s=ONE_S)
    async with await connecting as client:
        region = await client.allocate(BLOCKS * BLOCK * DIM)
        assert isinstance(region, SharedRegion)  # the daemon has no GPU
        manifest = ManifestBuilder(engine_id, epoch, ModelInfo(name="m", fingerprint="f"))
        manifest.region(0, "host", nbytes=region.nbytes, address=region.address)
        manifest.group("full", num_blocks=BLOCKS, block_size=BLOCK)
        keys = region.array().view(np.uint8)[: BLOCKS * BLOCK * DIM].reshape(BLOCKS, BLOCK, DIM)
        manifest.component("full", layer=0, name="k", array=keys, axes=("block", "slot", "dim"))
        await client.register(manifest.build())
        yield _Peer(client, SourceBody(engine_id=engine_id, address=client.peer_address))
