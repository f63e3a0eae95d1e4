"""An engine rank's session: whether the engine lives, what it is told, and its memory."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from kvferry.errors import Conflict, KvferryError, Malformed, Unavailable
from kvferry.outbox import Outbox
from kvferry.pipe import Pipe
from kvferry.process import Process
from kvferry.protocol import session_events as protocol
from kvferry.protocol.session_events import Rank
from kvferry.v1 import engine_pb2
from kvferryd.aio import made_on
from kvferryd.ending import Step, ended, tried
from kvferryd.engine.fences import Fences
from kvferryd.memory import Region
from kvferryd.memory.unfreed import Unfreed
from kvferryd.observe import logs
from kvferryd.staging.arena import Arena

if TYPE_CHECKING:
    from kvferryd.engine.registration import Engine

log = logs.get(__name__)
T = TypeVar("T")
EVENTS = 1 << 14
"""The most events that wait for an engine to take them, beside those of all leases and transfers that end at once."""

MAX_KEY = 128
"""Characters of an idempotency key."""


class Session:
    """Owns the regions, the page of fences and what is registered. `take` takes the steps that close them, as
    `kvferry.protocol.sessions` says."""

    def __init__(self, rank: Rank, id: str = "", before: Session | None = None, unfreed: Unfreed | None = None) -> None:
        """before: a retired session that this one resumes. It takes over the regions. unfreed: takes those that cannot
        be given back."""
        self.unfreed = Unfreed() if unfreed is None else unfreed
        self.rank, self.id, self.resumed = rank, id, before is not None
        self.regions: dict[int, Region] = {}
        self._given: dict[str, tuple[object, Any]] = {}
        """Calls that were obeyed, and their results (regions, the engine), by their idempotency keys."""
        if before is not None:
            self.regions, before.regions = before.regions, {}
            kept = set(self.regions.values())
            self._given = {key: (call, given) for key, (call, given) in before._given.items() if given in kept}
        self._giving = asyncio.Lock()
        self.fences: Fences | None = None
        self.engine: Engine | None = None
        """The rank that is registered."""
        self.events = Outbox(_several)
        self.pipe: Pipe | None = None
        """Takes the events, once it is connected."""
        self.most_events = EVENTS
        self.overfull = asyncio.Event()
        """It takes too few of its events: it is told no more, and its stream is ended."""
        self.process: Process | None = None
        """The engine's; None until it has introduced itself, or where the kernel cannot say which one it is."""
        self.attached = True
        """Until the stream has ended, which does not tell what has become of the engine, or the engine is gone."""
        self.retiring = False
        """It retires: nothing new that would have to end is made for it."""
        self.retired = asyncio.Event()
        """Its transfers have ended: nothing more is begun in it."""
        self.ended = asyncio.Event()
        """Nothing of it is read or written any more, unless it is `held`."""
        self.stuck = False
        """Its agent or its copies could not be stopped: what they read and write is never known to be over."""
        self.held = False
        """Its memory stays, as what reads and writes it is not known to have stopped in time."""

    @property
    def about(self) -> dict[str, str]:
        """Named by each line of the log about it."""
        return {"engine_id": self.rank.engine_id, "epoch": self.rank.epoch}

    @property
    def has_leases(self) -> bool:
        return self.engine is not None and len(self.engine.leases) > 0

    def tell(self, event: engine_pb2.Event) -> None:
        if self.attached and not self.overfull.is_set():
            self.events.put(event)
            if len(self.events) > self.most_events:
                self.overfull.set()

    async def once(self, key: str, call: object, give: Callable[[], Awaitable[T]]) -> T:
        """The result of `give`, or of an earlier call of this key whose answer was lost. Calls wait for each other.

        call: the method and the arguments that its result depends on. A key stands for one call: results of two kinds
        never meet. Raises KvferryError (`session_closed`, `key_taken`, `malformed_key`).
        """
        if (length := len(key)) > MAX_KEY:
            remedy = f"at most {MAX_KEY} characters, for example a UUID; the same when the call is repeated"
            raise Malformed(
                "malformed_key", "the idempotency key is too long", field="idempotency_key",
                value=f"{length} characters", remedy=remedy,
            )  # fmt: skip
        async with self._giving:
            self.check_open()
            if key in self._given:
                before, known = self._given[key]
                if before != call:
                    raise Conflict(
                        "key_taken", "the idempotency key names a call of another method, or with other arguments",
                        field="idempotency_key", value=key,
                        remedy="give each call its own key, and repeat a call as it was",
                    )  # fmt: skip
                return cast(T, known)
            given = await give()
            if key:
                self._given[key] = call, given
            return given

    async def add(self, id: int, nbytes: int, make: Callable[[], Region]) -> Region:
        """A new region, for one call at a time. Only if the session still stands when it is made."""
        if nbytes <= 0:
            raise Malformed(
                "malformed_region", "a region needs at least one byte", field="nbytes", value=nbytes,
                remedy="ask for the bytes that the cache needs",
            )  # fmt: skip
        if self.engine is not None:
            raise Conflict(
                "region_taken", f"region {id} comes after the engine has registered", field="region", value=id,
                remedy="allocate each region before registering",
            )  # fmt: skip
        if (there := self.regions.get(id)) is not None:
            raise Conflict(
                "region_taken", f"region {id} exists, and has {there.span.nbytes} bytes: {nbytes} are asked for now",
                field="region", value=id,
                remedy="allocate each region once; a call that failed or was cancelled is repeated with the same size",
            )  # fmt: skip
        region = await self.made(make)
        try:
            self.check_open()
        except KvferryError:
            await self.give_back({f"region {id}": region})
            raise
        self.regions[id] = region
        return region

    @property
    def addresses(self) -> dict[int, int]:
        """The address of each region's first byte."""
        return {id: region.span.address for id, region in self.regions.items()}

    def check_open(self) -> None:
        """Raises KvferryError (`session_closed`)."""
        if self.retiring or not self.attached:
            raise Unavailable("session_closed", f"the session of engine {self.rank.engine_id} has ended")

    async def made(self, make: Callable[[], Region]) -> Region:
        """Filling a large file with pages, or mapping GPU memory, takes a while: on a thread. Not kept when the caller
        is cancelled."""
        loop = asyncio.get_running_loop()

        def free(region: Region) -> None:
            with self._freeing("memory", region):
                region.close()

        return await made_on(lambda work: loop.run_in_executor(None, work), make, free)

    async def give_back(self, regions: Mapping[str, Region]) -> None:
        """Close them, by name, on threads: to free what nobody else holds takes a third of a second for each GB.
        Regions that cannot be freed are logged, and stay in `unfreed`."""

        async def free(name: str, region: Region) -> None:
            with self._freeing(name, region):
                await asyncio.to_thread(region.close)

        await asyncio.gather(*(free(name, region) for name, region in regions.items()))

    @contextlib.contextmanager
    def _freeing(self, name: str, region: Region) -> Iterator[None]:
        with tried(f"free {name}", **self.about):
            try:
                yield
            except Exception as error:
                self.unfreed.hold(self.rank.engine_id, region, f"{name} could not be freed: {error}")
                raise

    async def take(self, step: protocol.Step, why: str, *, keep: bool) -> bool:
        """Whether it has succeeded. keep: leave the daemon-owned regions open."""
        takes: dict[protocol.Step, Callable[[], object]] = {
            protocol.Step.STOP: self._stopped,
            protocol.Step.FREE: partial(self.free, keep=keep),
        }
        if self.engine is not None:
            takes[protocol.Step.LEASES] = partial(self.engine.leases.revoke_all, why)
        if self.fences is not None:  # after the leases that wait for them
            takes[protocol.Step.FENCES] = self.fences.close
        return step not in takes or not await ended([Step(step.value, takes[step])], **self.about)

    def close(self) -> None:
        """Its engine's process is watched no more."""
        if self.process is not None:
            with tried("close its process", **self.about):
                self.process.close()

    def hold(self) -> None:
        """Its memory may still be read or written: it stays mapped."""
        self.held = True
        for id, region in self.regions.items():
            self.unfreed.hold(self.rank.engine_id, region, f"region {id} may still be read or written")

    async def _stopped(self) -> bool:
        return self.engine is None or await self.engine.close()

    async def stop(self, steps: Sequence[Step], arena: Callable[[], Arena | None]) -> bool:
        """Take the steps after which nothing of the engine is read or written any more, then give back its arena.
        Whether all have succeeded; if not, the session is `stuck`."""
        stuck, self.stuck = self.stuck, True  # as long as it is not known to have stopped
        stops = frozenset(step.name for step in steps)
        free = Step("free its arena", lambda: self._free_arena(arena()), needs=stops)
        if failed := sorted(stops & await ended([*steps, free], **self.about)):
            log.error("its reads or copies did not stop: its memory stays mapped", failed=failed, **self.about)
            if (left := arena()) is not None:
                self.unfreed.hold(self.rank.engine_id, left.region, "its arena may still be read or written")
        else:
            self.stuck = stuck
        return not failed

    async def _free_arena(self, arena: Arena | None) -> None:
        if arena is not None:
            await arena.until_not_kept()
            await self.give_back({"its arena": arena.region})

    async def free(self, *, keep: bool) -> None:
        """Give back the regions, once nothing reads or writes them. keep: but for the daemon-owned ones."""
        gone = [id for id, region in self.regions.items() if not (keep and region.owned)]
        for id in gone:
            self.unfreed.let_go(self.regions[id])
        await self.give_back({f"region {id}": self.regions.pop(id) for id in gone})


def _several(events: list[engine_pb2.Event]) -> engine_pb2.Event:
    return engine_pb2.Event(several=engine_pb2.Events(events=events))
