"""Six daemons on loopback, four engines of random shapes, random requests, and everything goes wrong all the time.

`make soak` for ten minutes (SOAK=seconds), a minute in the gate; SOAK_SEED repeats the requests of a run. Every byte of
every request that is done is compared, at once and again before its blocks are given away. It ends with a table, after
Ctrl-C too.

Half of the daemons know TCP only, where a read takes time and a peer's death is noticed late; the others take what UCX
finds. Half of the engines compare checksums as they read. A single daemon is never killed: it meets all others.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import signal
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from fleet import TIMEOUT_S, Daemons, ended, under_way, until
from ranks import HEADS, STATE, Blocks, Kv, Shape, TestEngine
from scene import GAUGES, IN_UCX, UCX, Held, gauge_of, idle, is_ucx
from soaking import SECONDS, SEED
from victim import OWN_FAULT

from kvferry.engine import Lease, Unsettled
from kvferry.errors import KvferryError
from kvferry.outcomes import Received
from kvferry.router import RouterClient
from kvferry.schemas import OrderBody
from kvferry.session import CALL_S
from kvferryd.demo.fleet import DaemonService, Fleet, ServiceError
from stopping import stopped

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(SECONDS + 240)]


@dataclass(frozen=True)
class Kind:
    """An engine, whose shape is another one at each of its starts."""

    heads: tuple[tuple[tuple[int, int], ...], ...]
    """Heads that its ranks may hold."""
    flags: tuple[str, ...]
    """Flags of its daemons."""
    spared: bool = False
    """Its daemons are stopped, and never killed."""

    @property
    def checked(self) -> bool:
        return CHECKSUM in self.flags

    def shape(self, rng: random.Random) -> Shape:
        axes = (*rng.sample(("block", "slot", "head"), 3), "dim")
        size = rng.choice((5, 16, 24, 64, 256))
        return Shape(rng.choice(self.heads), axes=axes, block_size=size, num_blocks=HELD // size)


CHECKSUM = "--checksum"
PAIRS = (((0, 3), (3, 6)), ((0, 2), (2, 6)), ((0, 6), (0, 6)))
WHOLE = (((0, 6),),)
KINDS = {
    "two": Kind(PAIRS, (*UCX, CHECKSUM)),
    "twins": Kind(PAIRS, ()),
    "one": Kind(WHOLE, (CHECKSUM,)),
    "single": Kind(WHOLE, UCX, spared=True),
}
"""6 daemons in all."""
AT_ONCE = 12
LONGEST = 12_000
"""Tokens of a request, of 576 bytes each."""
HELD = 64_000
"""Tokens that a cache has room for."""
DEADLINES_S = (0.2, 5.0, 20.0, 20.0)
GRACE_S = 40.0
"""Seconds that a client adds to its deadline, and the machine to that. A receive that takes longer hangs."""
CALLS_S = 3 * CALL_S
"""A publish in two pieces, and what happens to the request: three calls. Anything that takes longer hangs."""
WAYS = ("direct", "staged", "auto")
FATES = ("", "", "", "", "", "cancel", "abort", "revoke", "withdraw", "duplicate")
CALM_S = (1.0, 5.0)
"""Between two troubles."""
START_S = 300.0
"""Seconds for the start of a daemon, on a machine that has other work: nothing is measured by it."""
NEVER_KILLED = "single"
GROWTH_MB = 128.0
"""The daemon that is never killed may grow by it, from when it is weighed until it is at rest: its history fills, the
buffers and keys of checksums (20 to 50 MB) come with the first that is asked for, and UCX keeps what it had for peers
that have died. In two minutes 77 MB were seen."""
SPREAD = 16
"""Daemons of equal work may differ by so many descriptors or threads, old and young ones."""


@dataclass(eq=False)
class Life:
    """A start of an engine: its blocks are given to one request at a time."""

    engine: TestEngine
    free: set[int]
    states: set[int]
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    @classmethod
    async def begin(cls, name: str, daemons: Sequence[DaemonService], shape: Shape) -> Life:
        every = range(shape.num_blocks)
        return cls(await TestEngine.start(name, daemons, shape), set(every), set(every))

    async def take(self, tokens: int, rng: random.Random) -> Blocks:
        count = -(-tokens // self.engine.shape.block_size)
        async with self.changed, asyncio.timeout(TIMEOUT_S):
            await self.changed.wait_for(lambda: len(self.free) >= count and bool(self.states))
            ids = rng.sample(sorted(self.free), count)
            self.free.difference_update(ids)
            return Blocks(tuple(ids), self.states.pop())

    async def give_back(self, blocks: Blocks) -> None:
        async with self.changed:
            self.free.update(blocks.ids)
            assert blocks.state is not None
            self.states.add(blocks.state)
            self.changed.notify_all()

    def wrong(self, kv: Kv, blocks: Blocks) -> int:
        """Elements of the request in these blocks that are not its KV."""
        shape, ranks = self.engine.shape, self.engine.ranks
        return sum(shape.wrong(number, rank.memory, kv, blocks) for number, rank in enumerate(ranks))


@dataclass
class Seen:
    ends: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """Outcomes by way."""
    nbytes: Counter[str] = field(default_factory=Counter)
    took_s: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """For each way, the seconds of each request that was done, from its reservation on."""
    wrong: list[str] = field(default_factory=list)
    hangs: list[str] = field(default_factory=list)
    troubles: Counter[str] = field(default_factory=Counter)

    def table(self, elapsed_s: float) -> str:
        heads = ("way", "requests", "done", "GiB", "MB/s", "p50, ms", "p99, ms", "ended otherwise")
        rows: list[Sequence[object]] = [heads, ["---"] * len(heads)]
        for way, ends in sorted(self.ends.items()):
            others = ", ".join(f"{count} {end}" for end, count in ends.most_common() if end != "done")
            gib, rate = self.nbytes[way] / 2**30, self.nbytes[way] / elapsed_s / 1e6
            p50, p99 = (f"{took_s * 1e3:.0f}" for took_s in np.percentile(self.took_s[way] or [0.0], (50, 99)))
            rows.append((way, ends.total(), ends["done"], f"{gib:.2f}", f"{rate:.1f}", p50, p99, others))
        troubles = ", ".join(f"{count} {name}" for name, count in self.troubles.most_common())
        return "\n".join(
            [
                *(f"| {' | '.join(map(str, row))} |" for row in rows),
                "",
                f"{elapsed_s:.0f} s, seed {SEED}; wrong: {len(self.wrong)}; hangs: {len(self.hangs)}",
                *self.wrong,
                *self.hangs,
                troubles,
            ]
        )


class Soak:
    def __init__(self, daemons: Daemons) -> None:
        self.daemons, self.seen = daemons, Seen()
        self.rng = random.Random(SEED)
        self.store = Kv.random(8 * LONGEST, SEED)
        self.services: dict[str, list[DaemonService]] = {}
        self.routers: dict[str, RouterClient] = {}
        self.lives: dict[str, Life] = {}
        self.killed: set[int] = set()
        self.ended_by_ucx: set[Path] = set()
        self.early_mb: dict[int, float] = {}
        """By process."""
        """Logs of daemons."""
        self.over = asyncio.Event()
        self._numbers = iter(range(1 << 62))

    async def start(self) -> None:
        started = await asyncio.gather(
            *(
                self.daemons.start(name, len(kind.heads[0]), *kind.flags, "--way", "staged")
                for name, kind in KINDS.items()
            )
        )
        self.services = dict(zip(KINDS, started, strict=True))
        for service in self.every():
            self.routers[service.name] = RouterClient(service.url)
        for name in KINDS:
            await self.begin(name)

    async def close(self) -> None:
        await asyncio.gather(*(life.engine.close() for life in self.lives.values()))
        await asyncio.gather(*(router.close() for router in self.routers.values()))

    def every(self) -> list[DaemonService]:
        return [service for services in self.services.values() for service in services]

    def router(self, life: Life) -> RouterClient:
        return self.routers[life.engine.daemons[0].name]

    # ---- requests ----

    async def requests(self) -> None:
        """Request after request, until it is over."""
        while not self.over.is_set():
            source, reader = self.rng.sample(sorted(self.lives), 2)
            await self.request(source, reader, self.rng.choice(FATES))

    async def request(self, source: str, reader: str, fate: str = "") -> None:
        """From publish to the last byte, or to whatever else becomes of it."""
        theirs, ours = self.lives[source], self.lives[reader]
        number, way, deadline_s = next(self._numbers), self.rng.choice(WAYS), self.rng.choice(DEADLINES_S)
        name, tokens = f"soak-{number}", round(LONGEST ** self.rng.random())
        kv = self.kv(tokens)
        try:
            published, reserved = await asyncio.gather(theirs.take(tokens, self.rng), ours.take(tokens, self.rng))
        except TimeoutError:  # the blocks have gone with their engine
            return
        leases: list[Lease] = []
        outcomes: list[Received | BaseException] = []
        row = f"{way}, checksums" if KINDS[reader].checked else way
        step, began = "publish", time.monotonic()
        try:
            receive = self.receive(theirs, ours, name, reserved, way, deadline_s, self.rng.random() < 0.5)
            async with under_way(asyncio.wait_for(receive, deadline_s + GRACE_S)) as receiving:
                try:
                    async with asyncio.timeout(CALLS_S):
                        leases = await self.publish(theirs, name, published, kv)
                        step = fate
                        await self.happens(fate, theirs, ours, name)
                except KvferryError as refused:
                    self.seen.ends[row][f"not published ({refused.code})"] += 1
                step = "receive"
                outcomes = await receiving
        except TimeoutError:
            took_s = time.monotonic() - began
            self.seen.hangs.append(f"{name} from {source} to {reader}, {way}, {fate}: {step} after {took_s:.0f} s")
            return
        self.note(name, row, outcomes, time.monotonic() - began)
        if outcomes and all(isinstance(outcome, Received) for outcome in outcomes):
            await self.compare(name, ours, kv, reserved)
        elif any(isinstance(outcome, BaseException) for outcome in outcomes):
            with contextlib.suppress(KvferryError):  # the orderer gives it up at both ends
                await self.router(theirs).abort_request(name)
        await asyncio.gather(
            self.reader_is_done(ours, reserved, outcomes), self.source_is_done(theirs, published, leases)
        )

    def kv(self, tokens: int) -> Kv:
        """Some of a store of chance: made anew for each request it would take more than all else here."""
        first = self.rng.randrange(self.store.tokens - tokens)
        state = self.rng.randbytes(self.store.state.nbytes)
        return Kv(self.store.paged[:, :, first : first + tokens], np.frombuffer(state, np.uint16).reshape(HEADS, STATE))

    async def publish(self, life: Life, name: str, blocks: Blocks, kv: Kv) -> list[Lease]:
        """Some whole, some in two pieces."""
        half = kv.tokens // 2 if self.rng.random() < 0.3 else 0
        life.engine.write(kv, blocks, (0, half), state=False)
        if half:
            await life.engine.publish(name, blocks, half, more=True, ttl_s=30.0)
        life.engine.write(kv, blocks, (half, kv.tokens))
        return await life.engine.publish(name, blocks, kv.tokens, ttl_s=30.0)

    async def receive(
        self, theirs: Life, ours: Life, name: str, blocks: Blocks, way: str, deadline_s: float, by_router: bool
    ) -> list[Received | BaseException]:
        source = theirs.engine.source()
        if not by_router:
            return await ours.engine.outcomes(name, blocks, source=source, way=way, deadline_s=deadline_s)
        body = OrderBody(request_id=name, source=source, way=way, deadline_ms=round(deadline_s * 1e3))  # type: ignore[arg-type]
        outcomes = asyncio.create_task(ours.engine.outcomes(name, blocks, deadline_s=deadline_s))
        try:
            with contextlib.suppress(KvferryError):  # then the reservation ends by its deadline
                await self.router(ours).order(body)
            return await outcomes
        finally:
            outcomes.cancel()

    async def happens(self, fate: str, theirs: Life, ours: Life, name: str) -> None:
        """To a request on its way."""
        if not fate:
            return
        await asyncio.sleep(self.rng.uniform(0, 0.08))
        with contextlib.suppress(KvferryError):  # it may be over
            match fate:
                case "cancel":
                    await asyncio.gather(*(rank.client.abort(name) for rank in ours.engine.ranks))
                case "abort":
                    await self.router(ours).abort_request(name)
                case "revoke":
                    await self.router(theirs).revoke_lease(name)
                case "withdraw":
                    await asyncio.gather(*(rank.client.abort(name) for rank in theirs.engine.ranks))
                case _:
                    await self.router(ours).order(OrderBody(request_id=name, source=theirs.engine.source()))

    def note(self, name: str, row: str, outcomes: list[Received | BaseException], took_s: float) -> None:
        failed = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        codes = {each.code if isinstance(each, KvferryError) else type(each).__name__ for each in failed}
        assert not codes & {"internal", "protocol", "checksum_mismatch"}, (name, failed)
        self.seen.ends[row]["+".join(sorted(codes)) or "done"] += 1
        if not failed:
            self.seen.took_s[row].append(took_s)
            self.seen.nbytes[row] += sum(each.nbytes for each in outcomes if isinstance(each, Received))

    async def compare(self, name: str, life: Life, kv: Kv, blocks: Blocks) -> None:
        for when in ("at once", "a little later"):
            if wrong := life.wrong(kv, blocks):
                self.seen.wrong.append(f"{name}: {wrong} elements, {when}")
            await asyncio.sleep(self.rng.uniform(0, 0.05))

    async def reader_is_done(self, life: Life, blocks: Blocks, outcomes: list[Received | BaseException]) -> None:
        """Its blocks are free when they are quiet on every rank."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                for outcome in outcomes:
                    if isinstance(outcome, Unsettled):
                        await outcome.quiesced()
        except TimeoutError:
            self.seen.hangs.append(f"blocks of {life.engine.engine_id} that are never quiet: {outcomes}")
            return
        except KvferryError:  # the session has ended: nothing is given to anybody in this life
            return
        await life.give_back(blocks)

    async def source_is_done(self, life: Life, blocks: Blocks, leases: list[Lease]) -> None:
        """Its blocks are free when their lease has ended on every rank; they hold other KV at once."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                for lease in leases:
                    await lease.ended()
        except TimeoutError:
            self.seen.hangs.append(f"a lease of {life.engine.engine_id} that does not end: {leases}")
            return
        except KvferryError:
            return
        if leases:
            life.engine.write(self.kv(len(blocks.ids) * life.engine.shape.block_size), blocks)
            await life.give_back(blocks)

    # ---- troubles ----

    async def troubles(self) -> None:
        while not self.over.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.over.wait(), self.rng.uniform(*CALM_S))
            name = self.rng.choice(sorted(self.lives))
            service = self.rng.choice(self.services[name])
            match self.rng.choice(
                ("stop", "leave") if KINDS[name].spared else ("kill", "end", "stop", "stop", "leave")
            ):
                case "stop":
                    with stopped(service.process.pid):
                        await asyncio.sleep(self.rng.uniform(0.1, 3.0))
                    self.seen.troubles["daemons stopped for a while"] += 1
                case "leave":
                    await self.begin_anew(name)
                    self.seen.troubles["engines restarted"] += 1
                case how:
                    self.killed.add(service.process.pid)
                    await ended(service, signal.SIGKILL if how == "kill" else signal.SIGTERM)
                    await self.revive(name)
                    self.seen.troubles["daemons killed" if how == "kill" else "daemons ended"] += 1
            await self.look_after()

    async def look_after(self) -> None:
        """UCX may end a daemon whose peer has died."""
        for name, services in self.services.items():
            for service in services:
                if service.process.poll() is not None and service.process.pid not in self.killed:
                    assert is_ucx(service), service.tail()
                    self.killed.add(service.process.pid)
                    self.ended_by_ucx.add(service.log)
                    self.seen.troubles["daemons that UCX ended with their peer"] += 1
                    await self.revive(name)

    async def revive(self, name: str) -> None:
        for index, service in enumerate(self.services[name]):
            if service.process.poll() is not None:
                self.services[name][index] = self.daemons.fleet.again(service)
        try:
            await self.daemons.fleet.ready(*self.services[name], timeout_s=START_S)
        except ServiceError as error:
            if not is_ucx(error.service):
                raise
            await self.revive(name)
            return
        await self.begin_anew(name)
        if name == NEVER_KILLED:
            self.weigh()

    def weigh(self) -> None:
        """The daemon that is never killed: after a quarter of the run, or where UCX has ended the one before."""
        (service,) = self.services[NEVER_KILLED]
        if service.process.poll() is None:  # else another one begins, and is weighed then
            self.early_mb[service.process.pid] = own_mb(service)

    async def begin_anew(self, name: str) -> None:
        old = self.lives[name]
        with contextlib.suppress(KvferryError):
            await old.engine.close()
        await self.begin(name)

    async def begin(self, name: str) -> None:
        """As a supervisor does: again, where it did not come up."""
        async with asyncio.timeout(START_S):
            while True:
                try:
                    self.lives[name] = await Life.begin(name, self.services[name], KINDS[name].shape(self.rng))
                except KvferryError as error:
                    self.seen.troubles[f"starts of an engine that failed ({error})"] += 1
                    await self.look_after()
                else:
                    return

    # ---- the end ----

    async def at_rest(self) -> None:
        for service in self.every():
            router = self.routers[service.name]
            await until(lambda router=router: idle(router), f"{service.name} has come to rest")
            for name in GAUGES:

                async def zero(service: DaemonService = service, name: str = name) -> bool:
                    return await gauge_of(service, name) == 0

                await until(zero, f"{name} of {service.name} is 0")

    async def roll_call(self) -> None:
        """Every engine reads from every other: then all daemons have the same connections."""
        for source in KINDS:
            for reader in KINDS:
                if source != reader:
                    await self.request(source, reader)

    def spread(self) -> dict[str, tuple[int, int]]:
        """Fewest and most of what daemons hold, old ones and young ones."""
        held = [Held.of(service) for service in self.every()]
        names = ("files", "threads", "regions")
        return {
            name: (min(getattr(each, name) for each in held), max(getattr(each, name) for each in held))
            for name in names
        }

    async def level(self) -> bool:
        return all(high - low <= SPREAD for low, high in self.spread().values())

    def faults(self) -> list[str]:
        """Lines that no daemon may ever write. UCX may, in the log of a daemon that it has ended."""
        return [
            line
            for log in self.daemons.fleet.directory.glob("*.log")
            for line in log.read_text().splitlines()
            if OWN_FAULT.search(line) and not (log in self.ended_by_ucx and IN_UCX.search(line))
        ]


def own_mb(daemon: DaemonService) -> float:
    """Memory that it shares with nobody: no cache, and no arena."""
    status = Path(f"/proc/{daemon.process.pid}/status").read_text()
    (kb,) = re.findall(r"^RssAnon:\s+(\d+) kB$", status, re.MULTILINE)
    return int(kb) / 1024


@asynccontextmanager
async def soaking(folder: Path) -> AsyncIterator[Soak]:
    async with Fleet(folder) as fleet, AsyncExitStack() as stack:
        soak = Soak(Daemons(fleet))
        stack.push_async_callback(soak.close)
        await soak.start()
        yield soak


async def test_six_daemons(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(f"\nsoaking for {SECONDS:.0f} s, seed {SEED}")
    async with soaking(tmp_path) as soak:
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, soak.over.set)
        began = time.monotonic()
        tasks = [asyncio.create_task(soak.requests()) for _ in range(AT_ONCE)]
        tasks.append(asyncio.create_task(soak.troubles()))
        await asyncio.wait(tasks, timeout=SECONDS / 4, return_when=asyncio.FIRST_EXCEPTION)
        soak.weigh()
        await asyncio.wait(tasks, timeout=SECONDS * 3 / 4, return_when=asyncio.FIRST_EXCEPTION)
        soak.over.set()
        await asyncio.wait(tasks)
        elapsed_s = time.monotonic() - began
        with capsys.disabled():
            print(soak.seen.table(elapsed_s), flush=True)
        await asyncio.gather(*tasks)
        await soak.look_after()
        await soak.roll_call()
        await soak.at_rest()
        await soak.look_after()
        await until(soak.level, "old and young daemons hold as much, when the processes that tried peers have made way")
        spread = soak.spread()

        (old,) = soak.services[NEVER_KILLED]
        early_mb = soak.early_mb[old.process.pid]
        with capsys.disabled():
            print("held by each daemon:", ", ".join(f"{low} to {high} {what}" for what, (low, high) in spread.items()))
            print(f"memory of the one that is never killed: {early_mb:.0f} MB, then {own_mb(old):.0f} MB")
        assert not soak.faults()
        assert not soak.seen.wrong
        assert not soak.seen.hangs
        assert all(ends["done"] for ends in soak.seen.ends.values())

        async def given_back() -> bool:
            return own_mb(old) < early_mb + GROWTH_MB

        await until(given_back, "a daemon at rest gives freed memory back")
