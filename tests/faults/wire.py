"""Two daemons between which reads take time.

On one machine UCX reads with CMA, where a read is over inside the post: nothing is ever in flight, no block is ever in
quarantine. Over TCP the source's process has to send the bytes: while it stands still, a read has begun and does not
end.

    async with tcp_pair(daemons, "a") as pair:                  # daemons: the fixture
        kv, blocks, lease = await pair.published(request_id)
        receive = pair.reader.receive(request_id, reserved, source=pair.source.source())
        async with pair.stopped_in_mid_read(request_id, receive) as receiving:
            ...                                                 # `reading`, and the source's daemon stands still
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
from fleet import TCP_ALONE, TIMEOUT_S, Daemons, under_way
from pair import is_in
from ranks import TOKEN_NBYTES, Blocks, Kv, Shape, TestEngine
from slots import gauge
from stopping import stepped

from kvferry.engine import Lease
from kvferry.router import RouterClient
from kvferry.schemas import TransferState
from kvferryd.demo.fleet import DaemonService

T = TypeVar("T")
TCP = ("--ucx", f"TLS={TCP_ALONE} NET_DEVICES=lo")
"""A daemon's flags: no CMA and no shared memory. Both sides need them."""
BIG = Shape.tp(1, block_size=1024, num_blocks=128)
"""75 MB of KV in 768 runs of 98 kB."""
TOKENS = 48 << 10
"""Of one big request: 48 blocks of BIG, 28 MB. Two of them fit, and a small one."""
NBYTES = TOKENS * TOKEN_NBYTES


@dataclass
class TcpPair:
    """One rank each: `source` publishes, `reader` receives. Their clients live in this process."""

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
        kv, blocks = Kv.random(tokens), self.source.take(tokens)
        self.source.write(kv, blocks)
        (lease,) = await self.source.publish(request_id, blocks, tokens)
        return kv, blocks, lease

    @asynccontextmanager
    async def stopped_in_mid_read(
        self, request_id: str, receive: Coroutine[Any, Any, T]
    ) -> AsyncIterator[asyncio.Task[T]]:
        """Inside the block `receive` is a task that has begun to read, and the source's daemon stands still."""
        pid = self.source_daemon.process.pid
        async with under_way(receive) as receiving:
            with stepped(pid) as step:
                async with asyncio.timeout(TIMEOUT_S):
                    while not await is_in(self.reader_router, request_id, TransferState.READING):
                        assert not receiving.done(), "it was over already"
                        step()
                yield receiving

    async def quarantined(self) -> float:
        """Bytes that the reader's daemon holds back, as it says in its metrics."""
        async with httpx.AsyncClient(trust_env=False) as http:
            return await gauge(http, self.reader_daemon, "kvferry_quarantined_bytes")


@asynccontextmanager
async def tcp_pair(daemons: Daemons, name: str, *flags: str, shape: Shape = BIG) -> AsyncIterator[TcpPair]:
    """Two fresh daemons over TCP, `flags` for both, an engine at each. The reader has read from the source once: what
    is tested next is a read and not a handshake."""
    (source_daemon,), (reader_daemon,) = await asyncio.gather(
        daemons.start(f"{name}-source", 1, *TCP, *flags), daemons.start(f"{name}-reader", 1, *TCP, *flags)
    )
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
