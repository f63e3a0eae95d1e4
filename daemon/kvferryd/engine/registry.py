"""The sessions of this daemon's engines: attaching, dying, and the memory kept for the next session."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from kvferry.errors import Conflict, KvferryError, Malformed, NotFound
from kvferry.manifest import Manifest
from kvferry.process import Process
from kvferry.protocol import session_events as e
from kvferry.protocol.session_events import Rank
from kvferry.protocol.sessions import Sessions, not_quiet
from kvferry.protocol.values import Account
from kvferry.v1 import engine_pb2
from kvferryd.aio import Tasks, Timer, carry_out, settle
from kvferryd.config import Config
from kvferryd.ending import Step, ended, tried
from kvferryd.engine.fences import Fences
from kvferryd.engine.registration import Engine, OnLeaseEnd, check, make
from kvferryd.engine.session import Session
from kvferryd.leases.leases import OnServed
from kvferryd.memory import Files, Provider, Region
from kvferryd.memory.unfreed import Unfreed
from kvferryd.observe import logs

log = logs.get(__name__)
RETIRE_S = 20.0
"""How long the sessions may take to retire when the daemon stops."""
MAX_WORLD_SIZE = 4096


class Engines:
    """All engines of the daemon. Owns their sessions: `close` retires every one."""

    def __init__(
        self,
        config: Config,
        memory: Provider,
        on_lease_end: OnLeaseEnd,
        on_served: OnServed,
        on_detach: Callable[[Engine, str], None],
        before_retire: Callable[[Engine, str], Sequence[Step]],
    ) -> None:
        """before_retire: what is to be done before the engine's agent is closed."""
        self._config, self._memory, self._on_served = config, memory, on_served
        self._on_lease_end, self._on_detach, self._before_retire = on_lease_end, on_detach, before_retire
        self._machine, self._arisen = Sessions(), deque[e.SessionEvent]()
        self._timer = Timer(lambda: self._feed(e.Tick()))
        self._acting = False
        self._fed = asyncio.Event()
        self._sessions: dict[str, Session] = {}
        """Includes sessions that end, that keep regions, and stuck ones, whose memory must not be freed."""
        self._attaching: dict[str, asyncio.Future[Session]] = {}
        self._steps = Tasks()
        self.unfreed = Unfreed()

    @property
    def sessions(self) -> list[Session]:
        """The session of each engine, whether it has registered or not."""
        return [session for session in self._sessions.values() if not session.retiring]

    def __iter__(self) -> Iterator[Engine]:
        """Registered engines."""
        return iter([session.engine for session in self.sessions if session.engine is not None])

    # ---- what the machine says ----

    def _feed(self, event: e.SessionEvent) -> None:
        """An event that comes while effects are carried out waits for them."""
        self._arisen.append(event)
        if self._acting:
            return
        self._acting = True
        try:
            while self._arisen:
                carry_out(self._machine.on(self._arisen.popleft(), asyncio.get_running_loop().time()), self._do)
        finally:
            self._acting = False
        self._timer.set(self._machine.next_timer())
        self._fed.set()

    def _do(self, effect: e.SessionEffect) -> None:
        match effect:
            case e.Open(id, rank, before):
                session = Session(rank, id, None if before is None else self._sessions[before], self.unfreed)
                session.most_events += self._config.max_leases + 2 * self._config.max_transfers
                self._sessions[id] = session
            case e.Attached(id):
                settle(self._attaching[id], self._sessions[id])
            case e.Refused(id, why):
                settle(self._attaching[id], error=why)
            case e.Take(id, step, why, keep):
                self._sessions[id].retiring = True
                self._steps.spawn(self._take(self._sessions[id], step, why, keep))
            case e.Over(id):
                self._sessions.pop(id).close()
            case _:
                self._tell(self._sessions[effect.session], effect)

    def _tell(self, session: Session, effect: e.Detach | e.EndLeases | e.Shut | e.Hold | e.Ended) -> None:
        match effect:
            case e.Detach(_, why):
                session.attached = False
                session.events.end()
                log.info("engine detached", why=why, **session.about)
                if session.engine is not None:
                    with tried("end its transfers", **session.about):
                        self._on_detach(session.engine, why)
            case e.EndLeases(id, why, keep_whole):
                if session.engine is not None:
                    with tried("end its leases", **session.about):
                        session.engine.leases.revoke_all(why, keep_whole=keep_whole)
                if not session.has_leases:
                    self._feed(e.LeasesOver(id))
            case e.Shut():
                session.retired.set()
                session.events.end()
            case e.Hold():
                session.hold()
            case e.Ended(_, stuck):
                if stuck:
                    session.close()
                session.ended.set()

    async def _take(self, session: Session, step: e.Step, why: str, keep: bool) -> None:
        done = True
        if step is not e.Step.TRANSFERS:
            done = await session.take(step, why, keep=keep)
        elif session.engine is not None:
            await ended(self._before_retire(session.engine, why), **session.about)
        self._feed(e.StepOver(session.id, step, done))

    # ---- engines ----

    async def attach(self, rank: Rank, resume: str = "") -> Session:
        """A new session. Anything of this engine from before is retired first.

        resume: a session of the same rank and epoch, whose daemon-owned regions go on in this one.
        """
        _check(rank)
        for session in self.sessions:
            if session.rank.engine_id == rank.engine_id and session.process is not None and session.process.dead:
                self._feed(e.Died(session.id))
        id = secrets.token_urlsafe(16)
        attached: asyncio.Future[Session] = asyncio.get_running_loop().create_future()
        self._attaching[id] = attached
        self._feed(e.Attach(id, rank, resume))
        try:
            return await attached
        except asyncio.CancelledError:
            self._feed(e.GiveUp(id))
            raise
        finally:
            del self._attaching[id]

    def introduce(self, session_id: str, process: Process | None) -> None:
        """A process has named this session, and is ours to close. The first is the engine's: its client says so as soon
        as it has attached. Raises KvferryError (`unknown_session`)."""
        try:
            session = self.of_session(session_id)
            if session.process is None and process is not None:
                session.process, process = process, None
                self._feed(e.Introduced(session_id))
                session.process.watch(lambda: self._feed(e.Died(session_id)))
        finally:
            if process is not None:
                process.close()

    def of_session(self, id: str) -> Session:
        """Raises KvferryError (`unknown_session`)."""
        if not self._machine.is_open(id):
            raise NotFound(
                "unknown_session", "the session is not known or has ended", field="session",
                remedy="attach first, and keep the stream of events open",
            )  # fmt: skip
        return self._sessions[id]

    def get(self, engine_id: str | None) -> Engine:
        """The registered engine of this id; of None the only one. Raises KvferryError (`unknown_engine`)."""
        ready = list(self)
        if engine_id is None and len(ready) == 1:
            return ready[0]
        for engine in ready:
            if engine.engine_id == engine_id:
                return engine
        known = ", ".join(sorted(engine.engine_id for engine in ready)) or "none"
        what = (
            f"engine {engine_id} is not registered here" if engine_id else f"{len(ready)} engines are registered here"
        )
        remedy = f"registered on this daemon: {known}"
        raise NotFound("unknown_engine", what, field="engine_id", value=engine_id or "", remedy=remedy)

    async def register(self, session: Session, manifest: Manifest) -> Engine:
        """Make the engine's memory readable by peers. Its epoch cannot be used again, but by a session that resumes."""
        check(session, manifest)
        self._feed(e.RegistrationBegun(session.id))
        try:
            session.engine = await make(
                session, manifest, self._config, self._memory, self._lease_ended, self._on_served
            )
        finally:
            self._feed(e.RegistrationOver(session.id, session.engine is not None, not session.stuck))
        return session.engine

    async def allocate(self, session: Session, id: int, nbytes: int) -> Region:
        return await self._add(session, id, nbytes, lambda: self._memory.allocate(nbytes, kept=True))

    async def adopt(self, session: Session, memory: engine_pb2.Memory, files: Files) -> None:
        """Memory of the engine's own; `files` are those that it was handed over with, and are closed."""

        def adopted() -> Region:
            with files as numbers:
                return self._memory.adopt(memory, numbers)

        try:
            await self._add(session, memory.region, memory.nbytes, adopted)
        except KvferryError:
            files.close()
            raise

    async def _add(self, session: Session, id: int, nbytes: int, make: Callable[[], Region]) -> Region:
        region = await session.add(id, nbytes, make)
        self._feed(e.Allocated(session.id, region.owned))
        return region

    def open_fences(self, session: Session, files: Files) -> None:
        """The page of words that the engine's streams write, once for each session; the files are closed."""
        with files as numbers:
            if session.fences is not None:
                why = f"engine {session.rank.engine_id} has opened its fences already"
                raise Conflict("fences_open", why, field="ticket", remedy="use the page that was handed over first")
            session.fences = Fences(numbers)

    def stream_ended(self, session: Session) -> None:
        """The engine's process tells soon whether the engine is dead."""
        self._feed(e.StreamEnded(session.id))

    async def end(self, id: str, *, leave: bool = False) -> None:
        """End the session. Nothing of it is read or written any more when this returns, but for the leases of an engine
        that leaves. Idempotent. Raises KvferryError (`not_quiet`) when the agent cannot be stopped."""
        if (session := self._sessions.get(id)) is None:
            return
        self._feed(e.Leave(id) if leave else e.Withdraw(id))
        if not self._machine.is_open(id):
            await session.ended.wait()
        if session.held:
            raise not_quiet()

    def _lease_ended(self, engine: Engine, account: Account) -> None:
        session = engine.session
        with tried("tell of the end of a lease", request_id=account.request_id, **session.about):
            self._on_lease_end(engine, account)
        if not session.has_leases:
            self._feed(e.LeasesOver(session.id))

    async def close(self) -> None:
        self._feed(e.Close())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RETIRE_S):
                while any(map(self._machine.is_ending, self._sessions)):
                    self._fed.clear()
                    await self._fed.wait()


def _check(rank: Rank) -> None:
    if not (0 < len(rank.engine_id) <= 256 and 0 < len(rank.epoch) <= 256):
        raise Malformed(
            "malformed_attach", "engine_id and epoch must be given, at most 256 characters each",
            field="engine_id, epoch", value=f"{rank.engine_id!r}, {rank.epoch!r}",
            remedy="use a new epoch for every start",
        )  # fmt: skip
    if rank.rank >= rank.world_size or rank.world_size > MAX_WORLD_SIZE:
        raise Malformed(
            "rank_out_of_range",
            f"rank {rank.rank} does not exist in a world of {rank.world_size}, or the world is too large",
            field="rank", value=rank.rank,
            remedy=f"ranks count from 0 to world_size - 1; world_size is at most {MAX_WORLD_SIZE}",
        )  # fmt: skip
