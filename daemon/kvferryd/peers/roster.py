"""How the ranks of one engine find each other: every rank's daemon joins at a seed and holds the stream open.

The seed gives the roster's key to the daemon that answers at the address with which a rank joins. What comes with the
key comes from a rank of the same engine.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
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
from kvferryd.peers.unreached import silent

log = logs.get(__name__)
RETRY_S = (0.1, 2.0)
"""First and longest pause before joining again."""
FIRST = 2
"""Connect timeouts within which a seed answers a joining: it calls back first, which may take one."""
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
    """An open stream of a rank. The rank may join again from the same address meanwhile."""

    member: Member
    changed: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True, eq=False)
class _Ranks:
    """One engine in one epoch, for as long as any of its ranks is there."""

    world_size: int
    joined: dict[int, list[_Joined]] = field(default_factory=dict)
    """The open streams of each rank, all of one daemon's start. The last that came speaks for it."""
    places: dict[int, str] = field(default_factory=dict)
    """Where each rank has joined from: it comes from nowhere else, also after it has left."""

    def members(self) -> dict[int, Member]:
        return {rank: streams[-1].member for rank, streams in self.joined.items()}

    def add(self, rank: int, own: _Joined) -> None:
        before = [each for each in self.joined.get(rank, ()) if each.member.instance == own.member.instance]
        self.joined[rank] = [*before, own]
        self.wake()

    def remove(self, rank: int, own: _Joined) -> None:
        left = [each for each in self.joined.get(rank, ()) if each is not own]
        if left:
            self.joined[rank] = left
        else:
            self.joined.pop(rank, None)
        self.wake()

    def wake(self) -> None:
        for streams in self.joined.values():
            for each in streams:
                each.changed.set()


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
            if joined == engine_id and other != epoch and rank in ranks.joined:
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
        own = _Joined(member)
        ranks.add(rank, own)
        try:
            while not self._closed:
                own.changed.clear()
                yield ranks.members()
                await own.changed.wait()
        finally:
            ranks.remove(rank, own)
            if not ranks.joined and self._joined.get((engine_id, epoch)) is ranks:
                del self._joined[engine_id, epoch]


class Roster:
    """The member's side: each engine of several ranks has a joining that keeps its members known, until `leave`.

    An engine's joinings are its own: a renewal adds one, and ends those before it once it holds or has had its time.
    """

    def __init__(
        self, config: Config, channels: Channels, seed: Seed, instance: str, on_change: Callable[[Engine], None]
    ) -> None:
        """instance: of this daemon. on_change: called when it is known anew which daemons an engine's ranks have, and
        which of them are draining."""
        self._config, self._channels, self.seed, self._on_change = config, channels, seed, on_change
        self._instance, self._draining = instance, False
        self._rest: dict[Engine, dict[int, str]] = {}
        self._joinings: dict[Engine, Tasks] = {}
        self._telling = Tasks()
        self._renewing = asyncio.Lock()
        self._challenges: dict[bytes, Engine] = {}
        """By the challenge that the seed has to repeat."""

    def follow(self, engine: Engine) -> asyncio.Event:
        """Join, and set the engine's members as they change. The event is set when it has joined, or has left."""
        joined = asyncio.Event()
        if engine.world_size > 1:
            if fault := self.fault(engine):
                log.info("roster is not whole yet", engine_id=engine.engine_id, rank=engine.rank, why=fault)
            self._joinings.setdefault(engine, Tasks()).spawn(self._follow(engine, joined))
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
        if self._joinings:
            self._telling.spawn(self.renew())

    async def renew(self) -> None:
        """Join again, by what proves us now and with what is to be said now. The last joining goes on
        meanwhile, so that no rank is missed. Renewals come one after another: the last word holds."""
        async with self._renewing:
            await asyncio.gather(*map(self._renew, list(self._joinings)))

    async def _renew(self, engine: Engine) -> None:
        before = list(self._joinings.get(engine, ()))
        if not before:  # it has left
            return
        joined = self.follow(engine)
        try:
            async with asyncio.timeout(self._config.connect_timeout_s):
                await joined.wait()
        except TimeoutError:
            log.info("roster not joined anew in time", engine_id=engine.engine_id, seed=self._config.roster)
        finally:
            for task in before:
                task.cancel()

    def fault(self, engine: Engine) -> str:
        """What is wrong with the setting where ranks are missing, and what to do; empty where nothing is."""
        seed = self._config.roster
        if not engine.missing_ranks():
            return ""
        if seed in (None, self._config.advertise):  # any daemon may keep the roster of all ranks: see `kvferry host`
            what = "is not set" if seed is None else "is this daemon's own address"
            why = f"roster {what}, and rank {engine.rank} finds no other: set it to one address for all ranks"
            return "" if engine.rank == 0 or engine.members.keys() - {engine.rank} else why
        try:
            allow.check(seed, self._config.allow_peers)
        except KvferryError as error:
            return f"roster: {error}"
        return ""

    async def _follow(self, engine: Engine, joined: asyncio.Event) -> None:
        pause = RETRY_S[0]
        try:
            while not engine.session.retired.is_set():
                try:
                    async with aclosing(self._members(engine)) as every:
                        async for members in every:
                            self._know(engine, members)
                            joined.set()
                            pause = RETRY_S[0]
                except KvferryError as error:
                    engine.unseeded = error.message
                    about = {"engine_id": engine.engine_id, "seed": self._config.roster}
                    log.warning("roster not joined", **about, error=str(error))
                except Exception:  # what a change has set off may fail: the engine needs its roster all the same
                    log.exception("roster broke; it is joined again in a while", engine_id=engine.engine_id)
                await asyncio.sleep(pause)
                pause = min(2 * pause, RETRY_S[1])
        finally:
            joined.set()

    def _know(self, engine: Engine, members: dict[int, Member]) -> None:
        engine.set_members(
            {rank: member.address for rank, member in members.items()},
            {rank: member.instance for rank, member in members.items()},
            frozenset(rank for rank, member in members.items() if member.draining),
        )
        self._rest[engine] = {rank: member.rest for rank, member in members.items()}
        self._on_change(engine)

    async def _members(self, engine: Engine) -> AsyncGenerator[dict[int, Member]]:
        seed, own = self._config.roster, self._config.advertise
        ours = Member(own, self._draining, self._config.rest_url, self._instance)
        if seed is None or seed == own:
            engine.roster_key = self.seed.key(engine.engine_id, engine.epoch)
            async with aclosing(self.seed.join(*engine.session.rank, ours)) as joined:
                async for members in joined:
                    yield members
            return
        member = peer_pb2.Member(rank=engine.rank, epoch=engine.epoch, **ours._asdict())
        request = peer_pb2.JoinRequest(
            protocol_min=PROTOCOL_MIN, protocol_max=PROTOCOL_MAX, engine_id=engine.engine_id, member=member,
            world_size=engine.world_size, challenge=secrets.token_bytes(32),
        )  # fmt: skip
        self._challenges[request.challenge] = engine
        within_s = FIRST * self._config.connect_timeout_s
        try:
            async with self._channels.calling(seed) as stub:
                rosters = aiter(stub.Join(request))
                async with asyncio.timeout(within_s):
                    roster = await anext(rosters, None)
                while roster is not None:
                    yield {each.rank: Member.of(each) for each in roster.members}
                    roster = await anext(rosters, None)
        except TimeoutError:
            problem = silent(seed, within_s)
            self._channels.contact(seed).failed(problem)
            raise problem from None
        finally:
            self._challenges.pop(request.challenge, None)

    def admitted(self, request: peer_pb2.AdmitRequest) -> None:
        """The seed has answered our joining. Raises KvferryError (`not_joining`) where it is not ours."""
        engine = self._challenges.get(request.challenge)
        if engine is None or (engine.engine_id, engine.epoch) != (request.engine_id, request.epoch):
            why, remedy = f"no rank of engine {request.engine_id} joins from here", "join with one's own address"
            raise Forbidden("not_joining", why, field="challenge", remedy=remedy)
        del self._challenges[request.challenge]  # once
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
        await self._telling.end()

    async def leave(self, engine: Engine) -> None:
        if (joinings := self._joinings.pop(engine, None)) is not None:
            await joinings.end()
        self._rest.pop(engine, None)


def _of_loopback(url: str) -> bool:
    """Also of what is no URL of a daemon: nobody else is to ask there."""
    try:
        return is_loopback(url.partition("://")[2])
    except Wrong:
        return True
