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
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

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
"""Tokens of one big request: 48 blocks of BIG, 28 MB. Two of them fit, and a small one."""
NBYTES = TOKENS * TOKEN_NBYTES
TRIES = 40
"""To see what is over in a moment."""


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
        has been published. A busy machine may let a read end in one step: then another request is tried."""
        for number in range(TRIES):
            name = f"{request_id}-{number}"
            kv, _, _ = await self.published(name)
            async with AsyncExitStack() as standing:
                receiving = await standing.enter_async_context(under_way(receive(name)))
                step = standing.enter_context(stepped(self.source_daemon.process.pid))
                if await self._reads(name, receiving, step):
                    yield MidRead(name, kv, receiving)
                    return
        raise AssertionError(f"in {TRIES} tries no request was seen while it was read")

    async def _reads(self, request_id: str, receiving: asyncio.Task[Any], step: Callable[[], None]) -> bool:
        """False if it has been read before anybody saw it."""
        async with asyncio.timeout(TIMEOUT_S):
            while not await is_in(self.reader_router, request_id, TransferState.READING):
                if receiving.done():
                    await receiving
                    return False
                step()
        return True

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
