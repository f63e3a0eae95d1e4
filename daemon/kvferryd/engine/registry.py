"""The sessions of this daemon's engines: attaching, dying, and the memory kept for the next session."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence

from cachetools import LRUCache

from kvferry.errors import Conflict, KvferryError, Malformed, NotFound
from kvferry.manifest import Manifest
from kvferry.process import Process
from kvferry.protocol.values import Account
from kvferry.v1 import engine_pb2
from kvferryd.aio import Tasks
from kvferryd.config import Config
from kvferryd.ending import Step, ended, tried
from kvferryd.engine.fences import Fences
from kvferryd.engine.registration import Engine, OnLeaseEnd, check, make
from kvferryd.engine.session import Rank, Session
from kvferryd.leases.leases import OnServed
from kvferryd.memory import Files, Provider, Region
from kvferryd.memory.unfreed import Unfreed
from kvferryd.observe import logs

log = logs.get(__name__)
DETACH_S, RETIRE_S = 0.5, 10.0
DYING_S = 10.0
"""A killed process closes its sockets first and is dead some time later: with much GPU memory, seconds. If the engine
lives, its client leaves the blocks alone until the daemon has answered."""
KEPT_S = 30.0
"""How long the memory of an engine that has lost its session waits for it to attach again."""
MAX_WORLD_SIZE = 4096
EPOCHS = 4096
"""Registered epochs remembered, so that none is registered twice."""


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
        self._current: dict[str, Session] = {}
        """By engine."""
        self._by_id: dict[str, Session] = {}
        """Also those being retired, those whose regions are kept, and the stuck, whose memory must not be freed."""
        self._epochs: LRUCache[tuple[str, str], None] = LRUCache(EPOCHS)
        self._freeing = Tasks()
        """Memory that waited for a session and is given back."""
        self.unfreed = Unfreed()

    @property
    def sessions(self) -> list[Session]:
        """One for each engine, whether it has registered or not."""
        return list(self._current.values())

    def __iter__(self) -> Iterator[Engine]:
        """Those that are registered."""
        return iter([session.engine for session in self.sessions if session.engine is not None])

    async def attach(self, rank: Rank, resume: str = "") -> Session:
        """A new session. What there was of this engine before is retired first.

        resume: a session of the same rank and epoch, whose daemon-owned regions go on in this one.
        """
        _check(rank)
        if resume:
            await self.end(resume)
        old = await self._ended(rank.engine_id)
        kept = [each for each in self._by_id.values() if each.expiry and each.rank.engine_id == rank.engine_id]
        before = next((each for each in kept if each.id == resume and each.rank == rank), None)
        if before is None and rank[:2] in self._epochs:
            raise Conflict(
                "epoch_reused", f"epoch {rank.epoch} of engine {rank.engine_id} is over", field="epoch",
                value=rank.epoch, remedy="use a new epoch for every start of the engine",
            )  # fmt: skip
        session = Session(rank, before, self.unfreed)
        session.most_events += self._config.max_leases + 2 * self._config.max_transfers
        for each in kept:
            self._give_back(each)
        self._current[rank.engine_id] = self._by_id[session.id] = session
        try:
            if old is not None:  # to its end, even if the new engine is gone again meanwhile
                await asyncio.shield(self._retire_soon(old, f"engine {rank.engine_id} started anew"))
            if self._freeing:  # there may be no room for both
                await asyncio.wait(self._freeing, timeout=RETIRE_S)
        except BaseException:
            session.detached.set()
            self._retire_soon(session, f"engine {rank.engine_id} is gone")
            raise
        return session

    async def _ended(self, engine_id: str) -> Session | None:
        """The session there is of this engine. Raises KvferryError (`engine_attached`) while the engine lives in it."""
        old = self._current.get(engine_id)
        if old is not None and old.attached:
            if old.process is not None and old.process.dead:
                self._died(old)
            with contextlib.suppress(TimeoutError):  # its old stream may end a little after its new start
                await asyncio.wait_for(old.detached.wait(), DETACH_S)
            old = self._current.get(engine_id)
        if old is not None and old.attached and not old.retired.is_set():
            why = f"engine {engine_id} (epoch {old.rank.epoch}) is attached to this daemon already"
            remedy = (
                "close the client that has the session: it may be one of your own that an error left open, which"
                " `async with` closes; give each rank a daemon of its own"
            )
            raise Conflict("engine_attached", why, field="engine_id", value=engine_id, remedy=remedy)
        return old

    def introduce(self, session_id: str, process: Process | None) -> None:
        """A process has named this session, and is ours to close. The first is the engine's: its client says so as soon
        as it has attached. Raises KvferryError (`unknown_session`)."""
        try:
            session = self.of_session(session_id)
            if session.process is None and process is not None:
                session.process, process = process, None
                session.process.watch(lambda: self._died(session))
        finally:
            if process is not None:
                process.close()

    def of_session(self, id: str) -> Session:
        """Raises KvferryError (`unknown_session`)."""
        session = self._by_id.get(id)
        if session is None or session.retiring is not None:
            raise NotFound(
                "unknown_session", "the session is not known or has ended", field="session",
                remedy="attach first, and keep the stream of events open",
            )  # fmt: skip
        return session

    def get(self, engine_id: str | None) -> Engine:
        """The registered engine of this id; of None the only one. Raises KvferryError (`unknown_engine`)."""
        ready = [engine for engine in self if not engine.session.retired.is_set()]
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
        registering = session.registering = asyncio.get_running_loop().create_future()
        try:
            session.engine = await make(
                session, manifest, self._config, self._memory, self._lease_ended, self._on_served
            )
        finally:
            session.registering = None
            registering.set_result(None)
        self._epochs[session.rank[:2]] = None
        return session.engine

    async def adopt(self, session: Session, memory: engine_pb2.Memory, files: Files) -> None:
        """Memory of the engine's own; `files` are those that it was handed over with, and are closed."""

        def adopted() -> Region:
            with files as numbers:
                return self._memory.adopt(memory, numbers)

        try:
            await session.add(memory.region, memory.nbytes, adopted)
        except KvferryError:
            files.close()
            raise

    def open_fences(self, session: Session, files: Files) -> None:
        """The page of words that the engine's streams write, once for each session; the files are closed."""
        with files as numbers:
            if session.fences is not None:
                why = f"engine {session.rank.engine_id} has opened its fences already"
                raise Conflict("fences_open", why, field="ticket", remedy="use the page that was handed over first")
            session.fences = Fences(numbers)

    def stream_ended(self, session: Session) -> None:
        """The engine's process tells within DYING_S whether the engine is dead."""
        if session.attached:
            self._detach(session, f"the session of engine {session.rank.engine_id} has ended")

            def lost() -> None:
                if not session.gone:
                    self._withdraw(session)

            wait_s = 0.0 if session.process is None else DYING_S
            asyncio.get_running_loop().call_later(wait_s, lost)

    async def end(self, id: str, *, leave: bool = False) -> None:
        """End the session. Nothing of it is read or written any more when this returns, but for the leases of an engine
        that leaves. Idempotent. Raises KvferryError (`not_quiet`) when the agent cannot be stopped."""
        session = self._by_id.get(id)
        if session is None:
            return
        if leave:
            self._part(session, f"engine {session.rank.engine_id} has left")
        else:
            self._withdraw(session)
        if session.retiring is not None:
            await asyncio.shield(session.retiring)
        if session.stuck:
            raise Conflict(
                "not_quiet", "the session's reads or copies could not be stopped: they may still write",
                field="session", remedy="restart the daemon",
            )  # fmt: skip

    def _withdraw(self, session: Session) -> None:
        """The session has ended, and for all we know the engine lives: it may write to its blocks as soon as it knows
        that nobody reads them."""
        why = f"engine {session.rank.engine_id} has lost its session"
        self._detach(session, why)
        self._retire_soon(session, why, keep=True)

    def _detach(self, session: Session, why: str) -> None:
        if session.attached and not session.retired.is_set():
            session.detached.set()
            session.events.end()
            log.info("engine detached", why=why, **session.about)
            if session.engine is not None:
                with tried("end its transfers", **session.about):
                    self._on_detach(session.engine, why)

    def _died(self, session: Session) -> None:
        self._part(session, f"engine {session.rank.engine_id} is dead")

    def _part(self, session: Session, why: str) -> None:
        """The engine is dead or has left. What it published whole in memory of ours stays readable until it is read or
        expires."""
        if session.gone or session.retired.is_set():
            return
        self._detach(session, why)
        session.gone = True
        if session.engine is not None:
            with tried("end its leases", **session.about):
                if any(not region.owned for region in session.regions.values()):
                    session.engine.leases.revoke_all(f"{why}, and owned its memory")
                else:
                    session.engine.leases.revoke_all(why, keep_whole=True)
        if not session.has_leases:
            self._retire_soon(session, why)

    def _lease_ended(self, engine: Engine, account: Account) -> None:
        session = engine.session
        with tried("tell of the end of a lease", request_id=account.request_id, **session.about):
            self._on_lease_end(engine, account)
        if session.gone and not session.has_leases:
            self._retire_soon(session, f"engine {engine.engine_id} is gone and its last lease has ended")

    def _retire_soon(self, session: Session, reason: str, *, keep: bool = False) -> asyncio.Task[None]:
        """Close everything of the session. keep: its daemon-owned regions wait for its engine to attach again."""
        if session.retiring is None:
            session.retiring = asyncio.create_task(self._retire(session, reason, keep))
        return session.retiring

    async def _retire(self, session: Session, reason: str, keep: bool) -> None:
        if self._current.get(session.rank.engine_id) is session:
            del self._current[session.rank.engine_id]
        if session.engine is not None:
            await ended(self._before_retire(session.engine, reason), **session.about)
        await session.retire(reason, keep=keep)
        if session.regions and not session.stuck:
            session.expiry = asyncio.get_running_loop().call_later(KEPT_S, self._give_back, session)
            if session.process is not None:
                with tried("watch its process", **session.about):
                    session.process.watch(lambda: self._give_back(session))
        else:
            self._forget(session)

    def _forget(self, session: Session) -> None:
        """Unless it is stuck: then its engine must not be told that it is over."""
        if not session.stuck:
            self._by_id.pop(session.id, None)
        if session.process is not None:
            with tried("close its process", **session.about):
                session.process.close()

    def _give_back(self, session: Session) -> None:
        if session.expiry is not None:
            session.expiry.cancel()
        self._forget(session)
        self._freeing.spawn(session.free(keep=False))

    async def close(self) -> None:
        for session in self.sessions:
            self._retire_soon(session, "the daemon stops")
        if retiring := [session.retiring for session in self._by_id.values() if session.retiring]:
            await asyncio.wait(retiring, timeout=RETIRE_S)
        for session in [session for session in self._by_id.values() if session.expiry]:
            self._give_back(session)
        if self._freeing:
            await asyncio.wait(self._freeing, timeout=RETIRE_S)


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
