"""Two daemons between which reads take time.

On one machine UCX reads with CMA, where a read is over inside the post: nothing is ever in flight, no block is ever in
quarantine. Over TCP the source's process has to send the bytes: while it stands still, a read has begun and does not
end.

    async with tcp_pair(daemons, "a") as pair:                  # daemons: the fixture
        def receive(published: str):
            return pair.reader.receive(published, reserved, source=pair.source.source())
        async with pair.stopped_in_mid_read(request_id, receive) as read:
            ...                                                 # `reading`, and the source's daemon stands still
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import httpx
from fleet import TCP_ALONE, TIMEOUT_S, Daemons, under_way, until
from pair import all_read
from ranks import TOKEN_NBYTES, Blocks, Kv, Shape, TestEngine
from slots import gauge

from kvferry.engine import Lease
from kvferry.router import RouterClient
from kvferryd.demo.fleet import DaemonService
from stopping import stopped

T = TypeVar("T")
TCP = ("--ucx", f"TLS={TCP_ALONE} NET_DEVICES=lo")
"""A daemon's flags: no CMA and no shared memory. Both sides need them."""
BIG = Shape.tp(1, block_size=1024, num_blocks=128)
"""75 MB of KV in 768 runs of 98 kB."""
TOKENS = 48 << 10
"""Tokens of one big request: 48 blocks of BIG, 28 MB. Two of them fit, and a small one."""
NBYTES = TOKENS * TOKEN_NBYTES


ESTABLISHED = "01"
PIDFD_GETFD = 438
"""The number of that call, on every processor."""


def of_ucx(source: DaemonService) -> Iterator[tuple[int, int]]:
    """(descriptor, bytes that lie unread) of each connection by which the source's bytes go."""
    process = Path(f"/proc/{source.process.pid}")
    own = {os.readlink(file): int(file.name) for file in (process / "fd").iterdir()}
    doors = {int(address.rpartition(":")[2]) for address in (source.peer, source.url)}
    for line in (process / "net" / "tcp").read_text().splitlines()[1:]:
        _, local, _, state, queues, _, _, _, _, inode, *_ = line.split()
        port, unread = int(local.rpartition(":")[2], 16), int(queues.rpartition(":")[2], 16)
        if state == ESTABLISHED and port not in doors and (descriptor := own.get(f"socket:[{inode}]")) is not None:
            yield descriptor, unread


async def asked_for_bytes(source: DaemonService) -> bool:
    """Whether a question lies unread at a source that stands still, on a connection of UCX."""
    return any(unread for _, unread in of_ucx(source))


def cut(source: DaemonService) -> None:
    """Break the connections by which the source's bytes go: its daemon lives, and its other connections stand."""
    process, libc = os.pidfd_open(source.process.pid), ctypes.CDLL(None, use_errno=True)
    ours = [libc.syscall(PIDFD_GETFD, process, descriptor, 0) for descriptor, _ in of_ucx(source)]
    os.close(process)
    assert ours and min(ours) >= 0, os.strerror(ctypes.get_errno())
    for descriptor in ours:  # all are held by now: as one breaks, the daemon closes others
        with socket.socket(fileno=descriptor) as connection, suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


@dataclass(frozen=True)
class MidRead(Generic[T]):
    """A request that is being read, and goes no further."""

    request_id: str
    kv: Kv
    receiving: asyncio.Task[T]


@dataclass
class TcpPair:
    """A rank each: `source` publishes, `reader` receives. Their clients live in this process."""

    source: TestEngine
    reader: TestEngine
    source_router: RouterClient
    reader_router: RouterClient

    @property
    def source_daemon(self) -> DaemonService:
        return self.source.daemons[0]

    @property
    def reader_daemon(self) -> DaemonService:
        return self.reader.daemons[0]

    async def published(self, request_id: str, tokens: int = TOKENS) -> tuple[Kv, Blocks, Lease]:
        """Random KV in the source's cache."""
        kv, blocks = self.source.filled(tokens)
        (lease,) = await self.source.publish(request_id, blocks, tokens)
        return kv, blocks, lease

    @asynccontextmanager
    async def stopped_in_mid_read(
        self, request_id: str, receive: Callable[[str], Coroutine[Any, Any, T]]
    ) -> AsyncIterator[MidRead[T]]:
        """Inside the block a request is being read, and the source's daemon stands still. `receive`: of a request that
        has been published. Its engine has met the source by then, and has heard of the request, which was announced
        before the one that it has received last: so the read begins while the source stands still."""
        await self.published(f"{request_id}-before")
        await receive(f"{request_id}-before")
        kv, _, _ = await self.published(request_id)
        await self.published(f"{request_id}-next")
        await receive(f"{request_id}-next")
        async with AsyncExitStack() as standing:
            receiving = await standing.enter_async_context(under_way(receive(request_id)))
            standing.enter_context(stopped(self.source_daemon.process.pid))
            await all_read(self.reader_router, request_id)
            await until(partial(asked_for_bytes, self.source_daemon), "the source is asked for bytes")
            yield MidRead(request_id, kv, receiving)

    async def quarantined(self) -> float:
        """Bytes that the reader's daemon holds back, as it says in its metrics."""
        async with httpx.AsyncClient(trust_env=False) as http:
            return await gauge(http, self.reader_daemon, "kvferry_quarantined_bytes")


@asynccontextmanager
async def tcp_pair(
    daemons: Daemons, name: str, *flags: str, shape: Shape = BIG, kept: bool = False
) -> AsyncIterator[TcpPair]:
    """Two fresh daemons over TCP, `flags` for both, an engine at each. The reader has read from the source once: what
    is tested next is a read and not a handshake. kept: the reader's is under a keeper."""
    source_daemon = daemons.fleet.daemon(f"{name}-source", flags=[*TCP, *flags])
    reader_daemon = daemons.fleet.daemon(f"{name}-reader", flags=[*TCP, *flags], kept=kept)
    await daemons.fleet.ready(source_daemon, reader_daemon, timeout_s=TIMEOUT_S)
    source, reader = await asyncio.gather(
        TestEngine.start(f"{name}-source", [source_daemon], shape),
        TestEngine.start(f"{name}-reader", [reader_daemon], shape),
    )
    async with RouterClient(source_daemon.url) as source_router, RouterClient(reader_daemon.url) as reader_router:
        pair = TcpPair(source, reader, source_router, reader_router)
        await pair.published(f"{name}-warm", shape.block_size)
        await reader.receive(f"{name}-warm", reader.take(shape.block_size), source=source.source())
        try:
            yield pair
        finally:
            await asyncio.gather(source.close(), reader.close())
