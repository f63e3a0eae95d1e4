"""A daemon under attack, and what must hold after every attack."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

import grpc
import httpx
import psutil
from fleet import TIMEOUT_S, Daemons, memory_files, open_files, resident_mb, until
from ranks import Shape, TestEngine

from kvferry.router import RouterClient
from kvferry.rpc import PROBLEM_KEY
from kvferry.v1 import layout_pb2
from kvferryd.demo.fleet import DaemonService

T = TypeVar("T")
FLAGS = ("--allow-peers", "127.0.0.1", "--way", "staged", "--log-level", "error")
SHAPE = Shape.tp(1, num_blocks=32)
OWN_FAULT = re.compile(r'Traceback|"code": "internal"|never retrieved|was never awaited|Fatal|is pending')
GROWTH_MB = 96
"""Growth by caches, arenas of memory and the allocator. A leak of a whole message per case would be more."""
POOL = 8
"""Threads of pools, which come with the first burst of work and stay: the event loop's, gRPC's."""
KEPT_ALIVE = 3
"""Connections that a client keeps for its next request, and that are closed when they idle."""
WITHOUT_REASON = frozenset({grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED})
"""Codes of a call that waits: what it waits for need not come."""


@dataclass(frozen=True)
class Held:
    """Things that a process has and must give back."""

    files: int
    threads: int
    children: int
    regions: frozenset[int]

    @classmethod
    def by(cls, daemon: DaemonService) -> Held:
        process = psutil.Process(daemon.process.pid)
        children = len(process.children())
        return cls(open_files(daemon), process.num_threads(), children, frozenset(memory_files(daemon)))

    def within(self, before: Held) -> bool:
        return (
            self.files <= before.files + KEPT_ALIVE
            and self.threads <= before.threads + POOL
            and self.children <= before.children
            and self.regions <= before.regions
        )


class Forbidden:
    """Addresses of this machine that the daemon must not dial: whoever connects to one is remembered."""

    HOSTS = ("127.0.0.2", "localhost", "[::1]", "0.0.0.0", "[::]", "[::ffff:127.0.0.2]", "127.1", "2130706434", "*")

    def __init__(self) -> None:
        self.dialled: list[str] = []
        self.addresses: list[str] = []
        self._servers: list[asyncio.Server] = []

    async def __aenter__(self) -> Forbidden:
        for host in self.HOSTS:  # a port for each: what was dialled is known by where it arrives
            listener = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
            address = f"{host}:{listener.getsockname()[1]}"
            server = await asyncio.start_server(lambda _, writer, a=address: self._seen(a, writer), sock=listener)
            self._servers.append(server)
            self.addresses.append(address)
        return self

    def _seen(self, address: str, writer: asyncio.StreamWriter) -> None:
        self.dialled.append(address)
        writer.close()

    async def __aexit__(self, *_: object) -> None:
        for server in self._servers:
            server.close()


@dataclass
class Target:
    """`daemon` is attacked; `friend` is another daemon, with which it moves KV both ways."""

    daemon: DaemonService
    engine: TestEngine
    friend: TestEngine
    router: RouterClient
    forbidden: Forbidden
    silent: str
    """An address that may be dialled, and never says anything."""
    held: Held | None = None
    resident_mb: float = 0.0
    loaded: int = 0
    """How often a peer was loaded and forgotten: UCX closes the connection of each with the engine's agent only."""
    said: Counter[str] = field(default_factory=Counter)
    """How often the daemon answered with each code: what a run has reached."""

    async def ready(self) -> None:
        """Everything that is made at the first use is there: from now on nothing more stays."""
        await self._moves_kv()
        await self.settled()
        self.held, self.resident_mb = Held.by(self.daemon), resident_mb(self.daemon)

    async def judge(self, call: Awaitable[T], what: object) -> T | None:
        """Any answer is right but a fault of the daemon's own. `what` was said to it. None where it was refused."""
        refused, answer = None, None
        try:
            async with asyncio.timeout(TIMEOUT_S):
                answer = await call
        except grpc.RpcError as error:
            refused = error
        except TimeoutError:
            raise AssertionError(f"no answer in {TIMEOUT_S:g} s to {what!r}") from None
        if refused is None:
            self.said["ok"] += 1
            return answer
        problem = next((value for key, value in refused.trailing_metadata() or () if key == PROBLEM_KEY), None)
        if problem is not None:
            self.judge_problem(layout_pb2.Problem.FromString(problem), what)
        else:
            assert refused.code() in WITHOUT_REASON, f"{refused.code()} {refused.details()}, to {what!r}"
        return None

    def judge_problem(self, problem: layout_pb2.Problem, what: object) -> None:
        self.said[problem.code] += 1
        assert problem.code != "internal", f"{problem} was the answer to {what!r}"
        assert problem.kind != layout_pb2.PROBLEM_KIND_INTERNAL, f"{problem} was the answer to {what!r}"
        assert problem.code and problem.message, f"{problem} says nothing, to {what!r}"

    async def settled(self) -> None:
        async def nothing_is_left() -> bool:
            return not await self.router.leases() and all(each.state.ended for each in await self.router.transfers())

        await until(nothing_is_left, "every lease and every transfer ends")

    async def cleared(self) -> None:
        """End what was ordered and waits for a reservation that nobody makes."""
        for each in await self.router.transfers():
            if not each.state.ended:
                await self.router.abort_transfer(each.transfer_id)

    async def unharmed(self) -> None:
        """The common check."""
        assert self.daemon.process.poll() is None, self.daemon.tail()
        assert await self.router.healthy()
        await self.settled()
        await self._moves_kv()
        await self.settled()
        there = [each.engine_id for each in await self.router.engines()]
        assert there == [self.engine.engine_id], f"beside them: {there}"
        for daemon in (self.daemon, *self.friend.daemons):
            faults = [line for line in daemon.log.read_text().splitlines() if OWN_FAULT.search(line)]
            assert not faults, "\n".join(json.loads(line).get("exception", line) for line in faults[:3])
        assert self.forbidden.dialled == []
        before = self.held
        assert before is not None

        holds = before

        async def as_before() -> bool:
            nonlocal holds
            holds = Held.by(self.daemon)
            return replace(holds, files=holds.files - self.loaded).within(before)

        try:
            await until(as_before, "")
        except AssertionError:
            raise AssertionError(f"it holds {holds}, and held {before} before") from None
        grown = resident_mb(self.daemon) - self.resident_mb
        assert grown < GROWTH_MB, f"it holds {grown:.0f} MB more than before"

    async def _moves_kv(self) -> None:
        """Both ways, staged and direct."""
        for source, reader in ((self.engine, self.friend), (self.friend, self.engine)):
            for way in ("staged", "direct"):
                request_id = f"good-{uuid.uuid4().hex}"
                kv, blocks = source.filled(50)
                (lease,) = await source.publish(request_id, blocks, 50)
                await reader.gets(request_id, kv, source=source.source(), way=way)
                await lease.ended()


@asynccontextmanager
async def target_of(daemons: Daemons, *flags: str) -> AsyncIterator[Target]:
    async with AsyncExitStack() as stack:
        (daemon,), (beside,) = await asyncio.gather(
            daemons.start("target", 1, *FLAGS, *flags), daemons.start("friend", 1, *FLAGS, *flags)
        )
        engine, friend = await asyncio.gather(
            TestEngine.start("target", [daemon], SHAPE), TestEngine.start("friend", [beside], SHAPE)
        )
        stack.push_async_callback(engine.close)
        stack.push_async_callback(friend.close)
        router = await stack.enter_async_context(RouterClient(daemon.url))
        forbidden = await stack.enter_async_context(Forbidden())
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        target = Target(daemon, engine, friend, router, forbidden, f"127.0.0.1:{silent.getsockname()[1]}")
        await target.ready()
        yield target


@asynccontextmanager
async def answering(target: Target) -> AsyncIterator[None]:
    """/healthz is asked without a pause meanwhile: an event loop that stands still is noticed while it does."""

    async def ask() -> None:
        async with httpx.AsyncClient(base_url=target.daemon.url, trust_env=False, timeout=TIMEOUT_S) as http:
            while True:
                assert (await http.get("/healthz")).status_code == 200
                await asyncio.sleep(0.05)

    asking = asyncio.create_task(ask())
    try:
        yield
        assert not asking.done(), asking.exception()
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
