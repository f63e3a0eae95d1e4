"""How the ranks of one engine find each other: every rank's daemon joins at a seed and holds the stream open.

The seed gives the roster's key to the daemon that answers at the address with which a rank joins. What comes with the
key comes from a rank of the same engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from cachetools import LRUCache

from kvferry.errors import Conflict, Forbidden, KvferryError, Malformed, shorten
from kvferry.rpc import PROTOCOL_MAX, PROTOCOL_MIN
from kvferry.v1 import peer_pb2
from kvferryd.aio import Tasks
from kvferryd.config import Config
from kvferryd.config.types import Wrong, is_loopback
from kvferryd.engine import Engine
from kvferryd.observe import logs
from kvferryd.peers import allow
from kvferryd.peers.channels import Channels

log = logs.get(__name__)
RETRY_S = (0.1, 2.0)
"""First and longest pause before joining again."""
KEPT_OUT = 256
"""Ranks of which is remembered why they may not join."""


class Member(NamedTuple):
    """A rank's daemon, as it says itself."""

    address: str
    draining: bool = False
    """It takes no new transfers."""
    rest: str = ""
    """The URL of its REST service."""
    instance: str = ""
    """Its start."""

    @classmethod
    def of(cls, told: peer_pb2.Member) -> Member:
        return cls(told.address, told.draining, told.rest, shorten(told.instance, 64))


@dataclass(frozen=True, slots=True, eq=False)
class _Joined:
    """One joining: the same rank may join again from the same address."""

    member: Member
    changed: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True, eq=False)
class _Ranks:
    """One engine in one epoch, for as long as any of its ranks is there."""

    world_size: int
    members: dict[int, _Joined] = field(default_factory=dict)
    places: dict[int, str] = field(default_factory=dict)
    """Where each rank has joined from: it comes from nowhere else, also after it has left."""

    def wake(self) -> None:
        for joined in self.members.values():
            joined.changed.set()


class Seed:
    """The seed's side: which ranks have joined, by (engine, epoch). A member is one as long as its stream is open."""

    def __init__(self) -> None:
        self._joined: dict[tuple[str, str], _Ranks] = {}
        self._kept_out: LRUCache[tuple[str, int], str] = LRUCache(KEPT_OUT)
        """Why the last joining of a rank, by engine and number, came to nothing."""
        self._secret = secrets.token_bytes(32)
        self._closed = False

    def close(self) -> None:
        """End every stream: those that the server cancels as it stops leave tracebacks behind."""
        self._closed = True
        for ranks in self._joined.values():
            ranks.wake()

    def key(self, engine_id: str, epoch: str) -> bytes:
        """What the daemons of this engine's ranks know, and nobody else."""
        return hmac.digest(self._secret, repr((engine_id, epoch)).encode(), hashlib.sha256)

    def check(self, engine_id: str, epoch: str, rank: int, world_size: int, address: str) -> None:
        """Whether this rank may join from this address. Raises KvferryError (`rank_taken`, `malformed_member`)."""
        ranks = self._joined.get((engine_id, epoch)) or _Ranks(world_size)
        if world_size != ranks.world_size or rank >= world_size:
            raise Malformed(
                "malformed_member", f"rank {rank} of {world_size} is none of engine {engine_id}",
                field="member", value=rank, remedy="ranks count from 0 to world_size - 1, which is the same for all",
            )  # fmt: skip
        taken = ranks.places.get(rank, address)
        if taken != address:
            raise Conflict(
                "rank_taken", f"rank {rank} of engine {engine_id} has joined from {taken}",
                field="rank", value=rank, remedy="give every rank its own daemon and number",
            )  # fmt: skip

    def why_missing(self, engine_id: str, epoch: str, rank: int) -> str:
        """Why this rank has not joined, as far as that is known here: it has tried, or was there; empty where not."""
        for (joined, other), ranks in self._joined.items():
            if joined == engine_id and other != epoch and rank in ranks.members:
                return f"rank {rank} has joined from {ranks.places[rank]} in epoch {other}, and this one is in {epoch}"
        if why := self._kept_out.get((engine_id, rank)):
            return f"rank {rank} was not let in: {why}"
        here = self._joined.get((engine_id, epoch))
        return f"rank {rank} was there, from {here.places[rank]}" if here and rank in here.places else ""

    def keep_out(self, engine_id: str, rank: int, why: KvferryError) -> None:
        """It has called, and may not join."""
        self._kept_out[engine_id, rank] = str(why)

    async def join(
        self, engine_id: str, epoch: str, rank: int, world_size: int, member: Member
    ) -> AsyncGenerator[dict[int, Member]]:
        """The members now and after every change. Closing the iterator leaves."""
        self.check(engine_id, epoch, rank, world_size, member.address)
        ranks = self._joined.setdefault((engine_id, epoch), _Ranks(world_size))
        ranks.places[rank] = member.address
        self._kept_out.pop((engine_id, rank), None)
        own = ranks.members[rank] = _Joined(member)
        try:
            ranks.wake()
            while not self._closed:
                own.changed.clear()
                yield {rank: joined.member for rank, joined in ranks.members.items()}
                await own.changed.wait()
        finally:
            if ranks.members.get(rank) is own:  # it may have joined again before this stream was seen to end
                del ranks.members[rank]
                if not ranks.members:
                    del self._joined[engine_id, epoch]
                ranks.wake()


class Roster:
    """The member's side: one task per engine of several ranks that keeps its members known, until `leave`."""

    def __init__(
        self, config: Config, channels: Channels, seed: Seed, instance: str, on_change: Callable[[Engine], None]
    ) -> None:
        """instance: of this daemon. on_change: called when it is known anew which daemons an engine's ranks have, and
        which of them are draining."""
        self._config, self._channels, self.seed, self._on_change = config, channels, seed, on_change
        self._instance, self._draining = instance, False
        self._rest: dict[Engine, dict[int, str]] = {}
        self._tasks: dict[Engine, asyncio.Task[None]] = {}
        self._telling = Tasks()
        self._renewing = asyncio.Lock()
        self._joining: dict[bytes, Engine] = {}
        """By the challenge that the seed has to repeat."""

    def follow(self, engine: Engine) -> asyncio.Event:
        """Join, and set the engine's members as they change. The event is set when it has joined."""
        joined = asyncio.Event()
        if engine.world_size > 1:
            if fault := self.fault(engine):
                log.warning("roster cannot be joined", engine_id=engine.engine_id, rank=engine.rank, why=fault)
            self._tasks[engine] = asyncio.create_task(self._follow(engine, joined), name=f"roster-{engine.engine_id}")
        return joined

    def rest(self, engine: Engine) -> dict[int, str]:
        """Where the REST service of each rank's daemon can be asked from this host, by rank."""
        here = {rank: url for rank, url in self._rest.get(engine, {}).items() if url and rank in engine.members}
        own = allow.split(self._config.advertise)[0]
        return {
            rank: url
            for rank, url in here.items()
            if not _of_loopback(url) or allow.split(engine.members[rank])[0] == own
        }

    def say_draining(self, draining: bool) -> None:
        """Tell the other ranks of every engine here whether this daemon takes new transfers."""
        self._draining = draining
        if self._tasks:
            self._telling.spawn(self.renew())

    async def renew(self) -> None:
        """Join again, by what proves us now and with what is to be said now. The last joining goes on
        meanwhile, so that no rank is missed. Renewals come one after another: the last word holds."""
        async with self._renewing:
            await asyncio.gather(*(self._renew(engine, task) for engine, task in self._tasks.items()))

    async def _renew(self, engine: Engine, before: asyncio.Task[None]) -> None:
        if self._tasks.get(engine) is not before:  # it has left
            return
        joined = self.follow(engine)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.connect_timeout_s):
                await joined.wait()
        before.cancel()
        await asyncio.wait([before])

    def fault(self, engine: Engine) -> str:
        """What is wrong with the setting where ranks are missing, and what to do; empty where nothing is."""
        seed = self._config.roster
        if not engine.missing_ranks() or (engine.rank == 0 and seed in (None, self._config.advertise)):
            return ""
        if seed in (None, self._config.advertise):
            what = "is not set" if seed is None else "is this daemon's own address"
            return f"roster {what}, and rank {engine.rank} finds no other: set it to the peer address of rank 0"
        try:
            allow.check(seed, self._config.allow_peers)
        except KvferryError as error:
            return f"roster: {error}"
        return ""

    async def _follow(self, engine: Engine, joined: asyncio.Event) -> None:
        pause = RETRY_S[0]
        while not engine.session.retired.is_set():
            try:
                async for members in self._members(engine):
                    engine.set_members(
                        {rank: member.address for rank, member in members.items()},
                        {rank: member.instance for rank, member in members.items()},
                        frozenset(rank for rank, member in members.items() if member.draining),
                    )
                    self._rest[engine] = {rank: member.rest for rank, member in members.items()}
                    self._on_change(engine)
                    joined.set()
                    pause = RETRY_S[0]
            except KvferryError as error:
                engine.unseeded = error.message
                log.warning("roster not joined", engine_id=engine.engine_id, seed=self._config.roster, error=str(error))
            await asyncio.sleep(pause)
            pause = min(2 * pause, RETRY_S[1])

    async def _members(self, engine: Engine) -> AsyncIterator[dict[int, Member]]:
        seed, own = self._config.roster, self._config.advertise
        ours = Member(own, self._draining, self._config.rest_url, self._instance)
        if seed is None or seed == own:
            engine.roster_key = self.seed.key(engine.engine_id, engine.epoch)
            async for members in self.seed.join(*engine.session.rank, ours):
                yield members
            return
        member = peer_pb2.Member(rank=engine.rank, epoch=engine.epoch, **ours._asdict())
        request = peer_pb2.JoinRequest(
            protocol_min=PROTOCOL_MIN, protocol_max=PROTOCOL_MAX, engine_id=engine.engine_id, member=member,
            world_size=engine.world_size, challenge=secrets.token_bytes(32),
        )  # fmt: skip
        self._joining[request.challenge] = engine
        try:
            async with self._channels.calling(seed) as stub:
                async for roster in stub.Join(request):
                    yield {each.rank: Member.of(each) for each in roster.members}
        finally:
            self._joining.pop(request.challenge, None)

    def admitted(self, request: peer_pb2.AdmitRequest) -> None:
        """The seed has answered our joining. Raises KvferryError (`not_joining`) where it is not ours."""
        engine = self._joining.get(request.challenge)
        if engine is None or (engine.engine_id, engine.epoch) != (request.engine_id, request.epoch):
            why, remedy = f"no rank of engine {request.engine_id} joins from here", "join with one's own address"
            raise Forbidden("not_joining", why, field="challenge", remedy=remedy)
        del self._joining[request.challenge]  # once
        engine.roster_key = request.key

    async def admit(self, request: peer_pb2.JoinRequest) -> None:
        """Give the key to the daemon at the member's address, if it is the one that joins. Raises KvferryError."""
        try:
            await self._admit(request)
        except KvferryError as error:
            self.seed.keep_out(request.engine_id, request.member.rank, error)
            raise

    async def _admit(self, request: peer_pb2.JoinRequest) -> None:
        member, engine_id = request.member, request.engine_id
        allow.check(member.address, self._config.allow_peers)
        self.seed.check(engine_id, member.epoch, member.rank, request.world_size, member.address)
        admission = peer_pb2.AdmitRequest(
            engine_id=engine_id, epoch=member.epoch, challenge=request.challenge,
            key=self.seed.key(engine_id, member.epoch),
        )  # fmt: skip
        async with self._channels.calling(member.address) as stub:
            await stub.Admit(admission, timeout=self._config.connect_timeout_s)

    async def close(self) -> None:
        """End what is said to other ranks. Their engines leave by themselves."""
        for task in self._telling:
            task.cancel()
        if self._telling:
            await asyncio.wait(self._telling)

    async def leave(self, engine: Engine) -> None:
        task = self._tasks.pop(engine, None)
        self._rest.pop(engine, None)
        if task is not None:
            task.cancel()
            await asyncio.wait([task])


def _of_loopback(url: str) -> bool:
    """Also of what is no URL of a daemon: nobody else is to ask there."""
    try:
        return is_loopback(url.partition("://")[2])
    except Wrong:
        return True
