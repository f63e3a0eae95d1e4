"""A registered engine rank: its cache, and what makes it readable by peers. It is made whole or not at all."""

from __future__ import annotations

import asyncio
import functools
import uuid
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field

from kvferry.errors import Conflict, KvferryError, Unavailable
from kvferry.manifest import Manifest, ManifestError
from kvferry.memory import cuda
from kvferry.protocol.roster_events import Member
from kvferry.protocol.values import Account
from kvferry.v1 import layout_pb2
from kvferry.wire import manifest_to_proto
from kvferryd.aio import beside
from kvferryd.config import Config
from kvferryd.copy import Move, cut, mapped, sample
from kvferryd.copy.copying import HostCopies
from kvferryd.copy.cuda import erase
from kvferryd.copy.runner import STAGING_FACTOR, Copies, Runner
from kvferryd.copy.sums import Sums
from kvferryd.ending import Step
from kvferryd.engine.membership import Membership
from kvferryd.engine.session import Session
from kvferryd.leases.leases import Leases, OnServed
from kvferryd.memory import Provider
from kvferryd.observe import logs
from kvferryd.plan import Plan, plan
from kvferryd.staging.arena import Arena
from kvferryd.staging.share import Pairings, prepare_gather, prepare_scatter
from kvferryd.transport.agent import Agent

log = logs.get(__name__)
NO_ARENA = "no staged transfers"
"""The first words of the note about a missing arena."""
COMPONENT_AS = 128
"""Rows that are cut in the time in which one component of a manifest is written (see `aio.FEW`)."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class Engine:
    """A rank of an engine in one session. Owns its agent, with which every read ends that could touch the memory."""

    session: Session
    roster: Membership
    manifest: Manifest
    agent: Agent
    agent_metadata: bytes
    leases: Leases
    sums: Sums
    strict: bool = False
    """Peers read staging slots only."""
    arena: Arena | None = None
    make_arena: MakeArena | None = None
    """How to have an arena once one is needed; None where there is one, or must be none."""
    runner: Runner | None = None
    """Copies on the GPU of the engine's regions."""
    unmapped: str = "this engine's memory is host memory"
    """Why there is no runner."""
    notes: tuple[str, ...] = ()
    copies: Copies = field(default_factory=HostCopies)
    """Into its regions, without an arena."""
    pairings: Pairings = field(default_factory=Pairings)
    weights: str = ""
    """The name of its present weights; empty for those of its manifest's fingerprint."""
    _described: asyncio.Future[layout_pb2.Manifest] | None = None
    """The result of `described`, once it was asked for."""
    _arena_task: asyncio.Task[None] | None = None

    @property
    def engine_id(self) -> str:
        return self.session.rank.engine_id

    @property
    def epoch(self) -> str:
        return self.session.rank.epoch

    @property
    def rank(self) -> int:
        return self.session.rank.rank

    @property
    def world_size(self) -> int:
        return self.session.rank.world_size

    @property
    def kind(self) -> str:
        """host or cuda."""
        return next(iter(self.session.regions.values())).span.kind

    @property
    def addresses(self) -> dict[int, int]:
        """The address of each region's first byte."""
        return self.session.addresses

    async def described(self) -> layout_pb2.Manifest:
        """Its manifest as peers are sent it: written once, and not by the loop where that takes long."""
        if self._described is None:
            write = functools.partial(manifest_to_proto, self.manifest)
            self._described = beside(COMPONENT_AS * len(self.manifest.components), write)
        return await asyncio.shield(self._described)

    async def need_arena(self, within_s: float) -> None:
        """Make the staging arena if there may be one: runs between this engine and a peer are too short to be read one
        by one. Without room for it the engine goes on without, with a note, until it is needed again. So it does when
        the arena is not there in time: it will be there for the next peer."""
        if self.make_arena is not None:
            if self._arena_task is None:
                self._arena_task = asyncio.create_task(self._have_arena(self.make_arena))
            making = self._arena_task
            await asyncio.wait([making], timeout=within_s)
            if making.done():
                making.result()

    async def _have_arena(self, make: MakeArena) -> None:
        arena, notes = None, tuple(note for note in self.notes if not note.startswith(NO_ARENA))
        try:
            arena = await make()
            self.agent_metadata = await self.agent.register(arena.span)
            self.arena, self.make_arena = arena, None
        except KvferryError as error:
            notes += (f"{NO_ARENA}: {error}",)
            if arena is not None:  # nothing has been packed into it
                await arena.close()
                await self.session.give_back({"its arena": arena.region})
        finally:
            self.notes, self._arena_task = notes, None

    async def close(self) -> bool:
        """Whether nothing reads or writes its memory any more."""
        first = [
            Step("make no arena", self._make_no_arena),
            Step("clear the words of its leases", self.leases.words.close),
        ]
        steps = [*first, *_stops(self.sums, self.copies, self.agent, lambda: self.arena)]
        return await self.session.stop(steps, lambda: self.arena)

    async def _make_no_arena(self) -> None:
        self.make_arena = None
        if self._arena_task is not None:
            await asyncio.wait([self._arena_task])


def check(session: Session, manifest: Manifest) -> None:
    """The session can register, and the manifest describes it. Raises KvferryError."""
    if session.engine is not None:
        raise Conflict(
            "already_registered", f"engine {session.rank.engine_id} registered in this session already",
            field="manifest", value=session.rank.epoch,
            remedy="attach again with a new epoch to describe another cache",
        )  # fmt: skip
    for name, expected in session.rank._asdict().items():
        if getattr(manifest, name) != expected:
            raise ManifestError(
                "session_mismatch", f"the manifest's {name} is not the session's {expected}", field=name,
                value=getattr(manifest, name), remedy="describe the rank that was attached",
            )  # fmt: skip
    for region in manifest.regions:
        held = session.regions.get(region.id)
        if held is None or held.span.nbytes < region.nbytes or held.span.kind != region.kind:
            have = "nothing" if held is None else f"{held.span.nbytes} bytes of {held.span.kind} memory"
            raise ManifestError(
                "region_mismatch",
                f"region {region.id} of the manifest is not what was allocated: there is {have}",
                field=f"regions[{region.id}]", value=f"{region.nbytes} bytes of {region.kind} memory",
                remedy="allocate or adopt every region before registering",
            )  # fmt: skip


MakeArena = Callable[[], Coroutine[None, None, Arena]]
OnLeaseEnd = Callable[[Engine, Account], None]


async def make(
    session: Session, manifest: Manifest, config: Config, memory: Provider, on_lease_end: OnLeaseEnd,
    on_served: OnServed,
) -> Engine:  # fmt: skip
    """Make the memory of the session's engine readable by peers: in strict exposure the staging arena alone.

    Raises KvferryError.
    """
    on_gpu = [region.span.device for region in session.regions.values() if region.span.kind == "cuda"]
    gpu = cuda.device(f"cuda:{on_gpu[0]}") if on_gpu else None
    must_stage = config.way == "staged" or config.strict
    may_stage = config.arena_mb > 0 and (must_stage or config.way == "auto")
    at_once = must_stage or config.device != "cpu"  # it costs host memory: then only when a peer needs it
    leases = Leases(
        manifest.engine_id, manifest.epoch, lambda account: on_lease_end(engine, account), config.max_leases, on_served
    )
    # A fresh name for every agent: an agent's name is its identity.
    agent = Agent(f"kvferry-{uuid.uuid4().hex[:16]}", threads=config.nixl_threads, device=gpu)
    sums = Sums(gpu, STAGING_FACTOR * config.programs)
    copies: Copies = HostCopies() if gpu is None else HostCopies(functools.partial(erase, gpu))
    runner: Runner | None = None
    arena: Arena | None = None
    unmapped, notes = "this engine's memory is host memory", []
    try:
        await agent.start()
        if gpu is not None:
            try:
                copies = runner = await Runner.started(gpu, config.programs)
            except KvferryError as error:  # it can still be read and filled directly
                unmapped = str(error)
                notes.append(f"no mapped transfers: {error}")
        if may_stage and at_once:
            try:
                arena = await _made_arena(session, config, memory, runner, unmapped)
            except KvferryError as error:
                if must_stage:
                    raise
                notes.append(f"{NO_ARENA}: {error}")
        session.check_open()  # else the regions below may be gone
        spans = [leases.words.span] if arena is None else [leases.words.span, arena.span]
        for region in manifest.regions if not config.strict else ():
            spans.append(session.regions[region.id].span)
            if slow := session.regions[region.id].slow_source:
                notes.append(f"region {region.id}: {slow}")
        metadata = await agent.register(*spans)
        agent.rehearse()
        await _rehearse(manifest, runner, arena, sums if config.checksum else None, session.addresses)
        session.check_open()
    except BaseException:
        await session.stop(_stops(sums, copies, agent, lambda: arena), lambda: arena)
        raise
    engine = Engine(
        session, Membership(session.rank, {manifest.rank: Member(config.advertise)}), manifest, agent, metadata,
        leases, sums, config.strict, arena,
        None if at_once or not may_stage else lambda: _made_arena(session, config, memory, None, unmapped),
        runner, unmapped, tuple(notes), copies,
    )  # fmt: skip
    return engine


async def _rehearse(
    manifest: Manifest, runner: Runner | None, arena: Arena | None, sums: Sums | None, addresses: Mapping[int, int]
) -> None:
    """Plan a copy to an engine of the same layout, and prepare the kernels that it needs, and its checksums: most peers
    are such engines, and nobody waits for it yet. Faults here fail, or do not, with a peer."""

    def planned() -> tuple[Plan, list[Move]]:
        own = plan([manifest], manifest)
        return own, sample(own) if own.mean_run else []

    try:
        own, moves = await asyncio.to_thread(planned)
        if runner is not None:
            sources = {(manifest.rank, id): address for id, address in addresses.items()}
            await runner.prepare(mapped(moves, sources, addresses))
            runner.prepare_usual()
        if arena is not None:
            await prepare_gather(arena, own, addresses)
            await prepare_scatter(arena, own, addresses)
        if sums is not None:
            chunk_nbytes = sums.chunk_nbytes
            await sums.of(lambda: cut(moves, chunk_nbytes), lambda chunk, at: chunk.collect(addresses, at))
    except KvferryError as error:
        log.info("not rehearsed", engine_id=manifest.engine_id, why=str(error))


async def _made_arena(
    session: Session, config: Config, memory: Provider, runner: Runner | None, unmapped: str
) -> Arena:
    if config.device != "cpu" and runner is None:
        raise Unavailable(
            "no_copies", f"nothing can be packed: {unmapped}", field="device", value=config.device,
            remedy="install a CUDA build of torch (it brings Triton)",
        )  # fmt: skip
    region = await session.made(lambda: memory.allocate(config.arena_mb << 20))
    try:
        return Arena(region, runner or HostCopies())
    except KvferryError:  # too small for its slots
        await session.give_back({"its arena": region})
        raise


def _stops(sums: Sums, copies: Copies, agent: Agent, arena: Callable[[], Arena | None]) -> list[Step]:
    """Ends, in this order: launched copies, reads, and the arena, which copies from and into the regions.
    Each says whether it has stopped."""

    async def close_arena() -> bool:
        made = arena()
        return made is None or await made.close()

    return [
        Step("close its checksums", sums.close), Step("close its copies", copies.close),
        Step("close its agent", agent.close), Step("close its arena", close_arena),
    ]  # fmt: skip
