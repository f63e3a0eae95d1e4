"""Two engines, a request between them that has come into a state, and what holds whatever happens to it then.

    scene = await stack.enter_async_context(scened(daemons, TCP_DIRECT))
    async with scene.brought("reading", deadline_s=5) as request:      # the source's daemon stands still meanwhile
        scene.reader.daemons[0].signal(signal.SIGKILL)
        await request.goes_on()
        await scene.ended(request)
        await scene.reader.revived(scene.daemons)
    await scene.holds(request)                                         # the one common check

Every engine is a process of its own for each rank (remote.py). Over TCP a read takes time: the source's process has to
send the bytes, and while it stands still, a read has begun and does not end.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
from fleet import TIMEOUT_S, Daemons, until
from hosts import Host, daemons_apart
from pair import all_in
from ranks import HND, NHD, Blocks, Shape
from remote import Remote, remote
from slots import gauge
from victim import OWN_FAULT
from wire import TCP, asked_for_bytes

from kvferry.errors import KvferryError
from kvferry.router import RouterClient
from kvferry.schemas import OrderBody, TransferRecord, TransferState
from kvferryd.aio import together
from kvferryd.demo.fleet import DaemonService, ServiceError
from stopping import stepped, stopped

BLOCK, COUNT = 1024, 48
TOKENS = BLOCK * COUNT
"""28 MB of KV: a read that a source sends in many turns."""
SMALL = BLOCK
TRIES = 40
"""To see what is over in a moment."""
STATES = ("waiting", "connecting", "reading", "verifying", "not quiet")
"""not quiet: the transfer was aborted, and its read may still write."""
GRACE_S = 5.0
"""A request's end may come this much after its deadline, and no more."""
KEPT_FILES, KEPT_THREADS = 24, 4
"""UCX closes no connection of a peer that is met anew while both live; gRPC starts threads as it needs them."""
IN_UCX = re.compile(r"\b(?:uc[pst]_\w+\.(?:c|h|inl)|stubs\.c):\d+ +(?:Fatal|Assertion)")
"""The last words of UCX, as in `ucp_request.inl:356  Fatal: unexpected error: Endpoint timeout`."""
GAUGES = ("quarantined_bytes", "staging_used_bytes", "live_readers", "queue_depth")
"""Zero once a daemon has come to rest."""


_scenes = itertools.count(1)


@dataclass(frozen=True)
class Setting:
    """The setting of a scene. `heads`: of the source's and the reader's ranks. `axes`: of both. `apart`: on two
    hosts."""

    name: str
    flags: tuple[str, ...] = ()
    heads: tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]] = (((0, 6),), ((0, 6),))
    axes: tuple[str, ...] = NHD
    apart: bool = False

    def shapes(self) -> list[Shape]:
        return [Shape(heads, self.axes, block_size=BLOCK, num_blocks=COUNT + 1) for heads in self.heads]


UCX = (TCP[0], f"{TCP[1]} KEEPALIVE_INTERVAL=2s")
DIRECT = Setting("direct", (*UCX, "--way", "direct"))
STAGED = Setting("staged", (*UCX, "--way", "staged"))
RANKS = Setting("two-ranks", (*UCX, "--way", "direct"), (((0, 3), (3, 6)), ((0, 2), (2, 6))), HND)
"""The reader's rank 1 reads from both ranks of the source, its rank 0 from one. A head's tokens lie together: runs of
16 kB."""
APART = Setting("two-hosts", ("--way", "direct"), apart=True)


@dataclass(frozen=True)
class Held:
    """Things that a daemon holds of its process: none of them may grow."""

    files: int
    threads: int
    regions: int
    """Mappings of shared memory that it has made or adopted."""

    @classmethod
    def of(cls, daemon: DaemonService) -> Held:
        process = psutil.Process(daemon.process.pid)
        maps = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
        shared = sum("/memfd:kvferry" in line or "/dev/shm/" in line for line in maps)
        return cls(process.num_fds(), process.num_threads(), shared)

    def within(self, other: Held) -> bool:
        return (
            self.files <= other.files + KEPT_FILES
            and self.threads <= other.threads + KEPT_THREADS
            and self.regions <= other.regions
        )


@dataclass(eq=False)
class Side:
    """An engine: a daemon and a process for each rank."""

    name: str
    shape: Shape
    daemons: list[DaemonService]
    engines: list[Remote] = field(default_factory=list)
    routers: list[RouterClient] = field(default_factory=list)
    _lives: AsyncExitStack = field(default_factory=AsyncExitStack)
    _epochs: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    async def start(self) -> None:
        """All ranks of the engine, in a new epoch; those of the one before are killed."""
        await self._lives.aclose()
        epoch = str(next(self._epochs))
        ranks = [remote(daemon, self.name, self.shape, epoch, rank) for rank, daemon in enumerate(self.daemons)]
        self.engines = list(await asyncio.gather(*map(self._lives.enter_async_context, ranks)))

    async def revived(self, daemons: Daemons) -> None:
        """Start again all of it that has died, and its engine with it."""
        dead = [daemon for daemon in self.daemons if daemon.process.poll() is not None]
        for daemon in dead:
            self.daemons[self.daemons.index(daemon)] = daemons.fleet.again(daemon)
        starting = [daemons.fleet.ready(*self.daemons, timeout_s=TIMEOUT_S)]
        if dead or any(engine.process.returncode is not None for engine in self.engines):
            starting.append(self.start())  # an engine waits for its daemon
        await together(starting)

    async def close(self) -> None:
        await self._lives.aclose()
        await asyncio.gather(*(router.close() for router in self.routers))


@dataclass(eq=False)
class Request:
    """A request of the scene. `seed`: of its KV. `goes_on`: until it is awaited the source's daemon stands still."""

    request_id: str
    tokens: int
    seed: int
    deadline_s: float
    blocks: Blocks
    """At both ends."""
    receives: list[asyncio.Task[int]] = field(default_factory=list)
    """By rank."""
    readers: list[Remote] = field(default_factory=list)
    goes_on: Callable[[], Awaitable[None]] = field(default=lambda: asyncio.sleep(0))
    ends: list[str] = field(default_factory=list)
    """How each rank's part ended: done, or a code."""
    said: list[str] = field(default_factory=list)
    """The same, in words."""
    late_s: list[float] = field(default_factory=list)
    """How long after GRACE_S the receives came that were so late."""

    def begun(self, receives: Sequence[asyncio.Task[int]]) -> None:
        """Their ends are due from now on."""
        now = asyncio.get_running_loop().time
        due = now() + self.deadline_s + GRACE_S
        self.receives = list(receives)
        for receiving in receives:
            receiving.add_done_callback(lambda _: self.late_s.extend([now() - due] if now() > due else []))


@dataclass(eq=False)
class Scene:
    setting: Setting
    daemons: Daemons
    source: Side
    reader: Side
    far: Host | None
    broken: bool = False
    """A test has failed on it."""
    killed: set[int] = field(default_factory=set)
    """Processes of daemons, by the test."""
    may_abort: set[int] = field(default_factory=set)
    """Processes of sources whose reader has died in the middle of a read: UCX may end them."""
    casualties: list[str] = field(default_factory=list)
    """Daemons that nobody killed: UCX ended them."""
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    _leases: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    _attempts: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    _held: dict[int, Held] = field(default_factory=dict)
    """Keyed by process: after its first request."""

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.source, self.reader

    def side(self, name: str) -> Side:
        return self.source if name == "source" else self.reader

    # ---- a request comes into a state ----

    @asynccontextmanager
    async def brought(self, state: str, deadline_s: float) -> AsyncIterator[Request]:
        """A request that is in this state; whatever stands still for it goes on with the block at the latest."""
        async with AsyncExitStack() as standing:
            match state:
                case "waiting":
                    request = await self.published(TOKENS, deadline_s)
                    self.receive(request, ordered=False)
                    await self._is_in(request, TransferState.WAITING)
                case "connecting":
                    request = self.request(TOKENS, deadline_s)
                    self.receive(request)
                    await self._is_in(request, TransferState.CONNECTING)
                case "reading":
                    request = await self._reads(standing, deadline_s)
                case "verifying":
                    request = await self._verifies(standing, deadline_s)
                case _:
                    request = await self._reads(standing, deadline_s)
                    await until(partial(asked_for_bytes, self.source.daemons[-1]), "the source is asked for bytes")
                    record = await self._record(request)
                    await self.reader.routers[-1].abort_transfer(record.transfer_id)
                    assert await self.quarantined(), "it was quiet at once"
            request.goes_on = standing.aclose
            try:
                yield request
            finally:
                for receiving in request.receives:
                    receiving.cancel()

    async def _reads(self, standing: AsyncExitStack, deadline_s: float) -> Request:
        """A request that is being read while its source stands still: it was announced before the one that has been
        read last."""
        request = await self.published(TOKENS, deadline_s)
        after = self.request(SMALL, TIMEOUT_S, COUNT)
        await self.publish(after)
        self.receive(after)
        await asyncio.gather(*after.receives)
        standing.enter_context(stopped(self.source.daemons[-1].process.pid))
        self.receive(request)
        await all_in(self.reader.routers[-1:], request.request_id, TransferState.READING)
        return request

    async def _verifies(self, standing: AsyncExitStack, deadline_s: float) -> Request:
        """A request with its source stopped while its last rank reads whether the lease held."""
        for _ in range(TRIES):
            request = await self.published(SMALL, deadline_s)
            async with AsyncExitStack() as trying:
                step = trying.enter_context(stepped(self.source.daemons[-1].process.pid))
                self.receive(request)
                while not request.receives[-1].done():
                    records = await self._records(request)
                    if records and records[-1].ranks[-1].state is TransferState.VERIFYING:
                        await standing.enter_async_context(trying.pop_all())
                        return request
                    step()
            await asyncio.gather(*request.receives)
        raise AssertionError(f"in {TRIES} tries no request was seen while it was verified")

    async def published(self, tokens: int, deadline_s: float) -> Request:
        request = self.request(tokens, deadline_s)
        await self.publish(request)
        return request

    def request(self, tokens: int, deadline_s: float, first_block: int = 0) -> Request:
        """In the blocks from `first_block` on: all requests that are under way alone have the same."""
        number = next(self._numbers)
        blocks = Blocks(tuple(range(first_block, first_block + -(-tokens // BLOCK))), first_block)
        return Request(f"{self.setting.name}-{number}", tokens, number, deadline_s, blocks)

    async def publish(self, request: Request, **more: float) -> None:
        """more: for `EngineClient.publish`."""
        more = {"lease": next(self._leases)} | more
        await asyncio.gather(*(self.publish_at(rank, request, **more) for rank in self.source.engines))

    async def publish_at(self, rank: Remote, request: Request, **more: float) -> None:
        await rank.publish(request.request_id, request.blocks, request.tokens, request.seed, **more)

    def receive(self, request: Request, *, ordered: bool = True) -> None:
        """On every rank. ordered: the engine names the source itself."""
        request.readers = self.reader.engines
        request.begun([asyncio.create_task(each) for each in self.receives(request, ordered=ordered)])

    def receives(self, request: Request, *, ordered: bool) -> list[Coroutine[Any, Any, int]]:
        """Calls of `receive` of each rank, not begun."""
        source = self.source.engines[0].source() if ordered else None
        more = {"deadline_s": request.deadline_s, "attempt": next(self._attempts)}
        return [rank.receive(request.request_id, request.blocks, source, **more) for rank in self.reader.engines]

    async def order(self, request: Request) -> None:
        """As a router does, which may find nobody there."""
        deadline_ms = round(1000 * request.deadline_s)  # an order that comes after the end waits for another attempt
        source = self.source.engines[0].source()
        body = OrderBody(request_id=request.request_id, source=source, deadline_ms=deadline_ms)
        with contextlib.suppress(KvferryError):
            await self.reader.routers[0].order(body)

    async def _records(self, request: Request) -> list[TransferRecord]:
        return await self.reader.routers[-1].transfers(request.request_id)

    async def _record(self, request: Request) -> TransferRecord:
        return (await self._records(request))[-1]

    async def _is_in(self, request: Request, state: TransferState) -> None:
        for router in self.reader.routers:

            async def arrived(router: RouterClient = router) -> bool:
                return any(each.state is state for each in await router.transfers(request.request_id))

            await until(arrived, f"{request.request_id} is {state}")

    # ---- and its end ----

    async def noticed(self, request: Request, victim: str) -> None:
        """Everybody knows of the end but the victim, which may not be able to tell."""
        async with asyncio.timeout(request.deadline_s + GRACE_S):
            if victim != "reader engine":
                await asyncio.wait(request.receives)
            if victim != "reader daemon":
                for router in self.reader.routers:
                    await until(lambda router=router: _over(router, request.request_id), "its record ends")

    async def ended(self, request: Request) -> None:
        """Every rank's part ends by its deadline. An engine that cannot tell is not asked: its daemon's record is."""
        async with asyncio.timeout(request.deadline_s + TIMEOUT_S):
            outcomes = await asyncio.gather(*request.receives, return_exceptions=True)
        assert not request.late_s, f"later than {GRACE_S} s after its deadline by {request.late_s} s"
        for outcome in outcomes:
            assert isinstance(outcome, KvferryError | int), outcome
        request.said = list(map(repr, outcomes))
        request.ends = [each.code if isinstance(each, KvferryError) else "done" for each in outcomes]

    def aborts(self) -> None:
        """The source may, with its reader."""
        self.may_abort.update(daemon.process.pid for daemon in self.source.daemons)

    async def quarantined(self) -> bool:
        return any([await gauge_of(daemon, "quarantined_bytes") for daemon in self.reader.daemons])

    # ---- what holds in the end ----

    def dead(self) -> list[DaemonService]:
        return [daemon for side in self.sides for daemon in side.daemons if daemon.process.poll() is not None]

    async def revived(self) -> None:
        """All that has died is started again. UCX may end those that `may_abort` (docs/reliability.md); any other death
        that is not the test's is a fault."""
        for daemon in self.dead():
            if daemon.process.pid not in self.killed:
                by_ucx = daemon.process.pid in self.may_abort and is_ucx(daemon)
                assert by_ucx, f"{daemon.name} ended with status {daemon.process.returncode}: {daemon.tail()}"
                self.casualties.append(daemon.name)
        try:
            for side in self.sides:
                await side.revived(self.daemons)
        except (ServiceError, KvferryError):
            if not self.dead():
                raise
            await self.revived()  # another one of them

    async def holds(self, request: Request) -> None:
        """The one check after everything: what is done is right and stays so, the next request is served into the same
        blocks, and no daemon holds more than before."""
        await self.settled(request)
        try:
            await self.serves()
        except (AssertionError, KvferryError):
            if not self.dead():  # UCX may notice late that a peer has died
                raise
            await self.revived()
            await self.serves()
        await self.at_rest()

    async def settled(self, request: Request) -> None:
        """It has ended: what is done is right, the blocks of what is not are free in the end, and nobody holds it."""
        assert not set(request.ends) & {"internal", "protocol"}, request.said
        if request.readers is self.reader.engines:  # an engine that was started anew has no block left
            for engine, end in zip(request.readers, request.ends, strict=True):
                await self._is_quiet(request, engine, end)
        await self._forget(request)

    async def serves(self) -> None:
        """A request of its own, from publish to the last byte."""
        request = await self.published(TOKENS, TIMEOUT_S)
        self.receive(request)
        await self.ended(request)
        assert request.ends == ["done"] * len(self.reader.engines), request.said
        for rank in self.reader.engines:
            assert await rank.differs(request.blocks, request.tokens, request.seed) == ""

    async def at_rest(self) -> None:
        """Nothing is under way any more, and processes hold what they held before."""
        for side in self.sides:
            for daemon, router in zip(side.daemons, side.routers, strict=True):
                await until(lambda router=router: idle(router), f"{daemon.name} has come to rest")
                for name in GAUGES:
                    await until(
                        lambda name=name, daemon=daemon: _is_zero(daemon, name), f"{name} of {daemon.name} is 0"
                    )
                held = self._held.setdefault(daemon.process.pid, Held.of(daemon))
                await until(lambda daemon=daemon, held=held: _within(daemon, held), f"{daemon.name} holds {held} again")
                faults = [line for line in daemon.log.read_text().splitlines() if OWN_FAULT.search(line)]
                assert not faults, faults

    async def _is_quiet(self, request: Request, engine: Remote, end: str) -> None:
        """The bytes of a done request are right; the blocks of any other are safe in the end."""
        if end == "done":
            assert await engine.differs(request.blocks, request.tokens, request.seed) == "", "done, and wrong"
        else:
            await asyncio.wait_for(engine.quiesced(request.request_id), TIMEOUT_S)

    async def _forget(self, request: Request) -> None:
        """A router that gives a request up says so at both ends."""
        for router in (self.source.routers[0], self.reader.routers[0]):
            with contextlib.suppress(KvferryError):
                await router.abort_request(request.request_id)


def is_ucx(daemon: DaemonService) -> bool:
    """Whether UCX has ended this daemon."""
    return daemon.process.poll() == -signal.SIGABRT and IN_UCX.search(daemon.tail(60)) is not None


async def idle(router: RouterClient) -> bool:
    """No lease, no transfer, and no engine but the one that is attached."""
    moving = [record for record in await router.transfers() if not record.state.ended]
    return not moving and not await router.leases() and [each.attached for each in await router.engines()] == [True]


async def _over(router: RouterClient, request_id: str) -> bool:
    return all(record.state.ended for record in await router.transfers(request_id))


async def _is_zero(daemon: DaemonService, name: str) -> bool:
    return await gauge_of(daemon, name) == 0


async def _within(daemon: DaemonService, held: Held) -> bool:
    return Held.of(daemon).within(held)


async def gauge_of(daemon: DaemonService, name: str) -> float:
    async with httpx.AsyncClient(trust_env=False) as http:
        return await gauge(http, daemon, f"kvferry_{name}")


@asynccontextmanager
async def scened(daemons: Daemons, setting: Setting, far: Host | None = None) -> AsyncIterator[Scene]:
    """Both engines are there, and have moved something."""
    name = f"{setting.name}-{next(_scenes)}"
    services: Sequence[list[DaemonService]]
    if setting.apart:
        assert far is not None
        near, remote_ = await daemons_apart(daemons, far, name, *setting.flags)
        services = [[remote_], [near]]  # the test asks here while the line is down
    else:
        services = await asyncio.gather(
            *(
                daemons.start(f"{name}-{side}", len(heads), *setting.flags)
                for side, heads in zip(("source", "reader"), setting.heads, strict=True)
            )
        )
    sides = [
        Side(f"{name}-{i}", shape, own) for i, (shape, own) in enumerate(zip(setting.shapes(), services, strict=True))
    ]
    for side in sides:
        side.routers = [RouterClient(daemon.url) for daemon in side.daemons]
    try:
        await asyncio.gather(*(side.start() for side in sides))
        scene = Scene(setting, daemons, sides[0], sides[1], far)
        await scene.serves()
        await scene.at_rest()
        yield scene
    finally:
        await asyncio.gather(*(side.close() for side in sides))
