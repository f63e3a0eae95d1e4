"""How the ranks of one engine find each other, around the machines of `kvferry.protocol.roster`: every rank's daemon
joins at a seed and holds the stream open.

The seed gives the roster's key to the daemon that answers at the address with which a rank joins. The key proves that a
message comes from a rank of the same engine.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import itertools
import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import assert_never

from kvferry.errors import Forbidden, KvferryError, shorten
from kvferry.protocol import roster_events as e
from kvferry.protocol.roster import Joinings, Rosters
from kvferry.protocol.roster_events import Member, Members
from kvferry.protocol.session_events import Rank
from kvferry.rpc import PROTOCOL_MAX, PROTOCOL_MIN
from kvferry.v1 import peer_pb2
from kvferryd.aio import Tasks, Timer
from kvferryd.config import Config
from kvferryd.config.types import Wrong, is_loopback
from kvferryd.engine import Engine
from kvferryd.observe import logs
from kvferryd.peers import allow
from kvferryd.peers.channels import Channels
from kvferryd.peers.unreached import silent

log = logs.get(__name__)
FIRST = 2
"""Connect timeouts within which a seed answers a joining: it calls back first, which may take one."""


class Seed:
    """The seed's side: which ranks have joined. A member is one as long as its stream is open."""

    def __init__(self) -> None:
        self.rosters = Rosters()
        self._told: dict[int, asyncio.Queue[Members | None]] = {}
        """The next word for each stream; None for the end."""
        self._streams = itertools.count(1)
        self._secret = secrets.token_bytes(32)
        self._closed = False

    def close(self) -> None:
        """End every stream: those that the server cancels as it stops leave tracebacks behind."""
        self._closed = True
        for told in self._told.values():
            _put(told, None)

    def key(self, engine_id: str, epoch: str) -> bytes:
        """Known to the daemons of this engine's ranks alone."""
        return hmac.digest(self._secret, repr((engine_id, epoch)).encode(), hashlib.sha256)

    def check(self, rank: Rank, address: str) -> None:
        """Whether this rank may join from this address. Raises KvferryError (`rank_taken`, `malformed_member`)."""
        if (why := self.rosters.refusal(rank, address)) is not None:
            raise why

    def _tell(self, said: e.Tell) -> None:
        for stream in said.streams:
            _put(self._told[stream], said.members)

    async def join(self, rank: Rank, member: Member) -> AsyncGenerator[Members]:
        """The members now and after every change. Closing the iterator leaves."""
        self.check(rank, member.address)
        stream = next(self._streams)
        told = self._told[stream] = asyncio.Queue(1)
        self._tell(self.rosters.join(stream, rank, member))
        try:
            while not self._closed and (members := await told.get()) is not None:
                yield members
        finally:
            del self._told[stream]
            self._tell(self.rosters.leave(stream))


class _Place:
    """The place of one engine of ours in its roster, around its machine: the streams of its joinings."""

    def __init__(
        self, engine: Engine, within_s: float, members: Callable[[Engine], AsyncGenerator[Members]],
        know: Callable[[Engine, Members], None],
    ) -> None:  # fmt: skip
        """members: opens a stream. know: called when the members have changed."""
        self._engine, self._open, self._know = engine, members, know
        self._machine = Joinings(within_s)
        self._tasks = Tasks()
        self._streams: dict[int, asyncio.Task[None]] = {}
        """By joining."""
        self._timer = Timer(lambda: self.on(e.Tick()))

    def on(self, event: e.MemberEvent) -> None:
        effects = self._machine.on(event, asyncio.get_running_loop().time())
        self._timer.set(self._machine.next_timer())
        for effect in effects:
            match effect:
                case e.Begin(joining):
                    self._streams[joining] = self._tasks.spawn(self._join(joining))
                case e.End(joining):
                    self._streams.pop(joining).cancel()
                case e.Know(members):
                    self._know(self._engine, members)
                case e.Alone(why):
                    self._engine.roster.unseeded = why.message
                    log.warning("roster not joined", engine_id=self._engine.engine_id, error=str(why))
                case _:
                    assert_never(effect)

    async def _join(self, joining: int) -> None:
        why: KvferryError | None = None
        try:
            async with aclosing(self._open(self._engine)) as every:
                async for members in every:
                    self.on(e.Told(joining, members))
        except KvferryError as error:
            why = error.kept()
        except Exception:  # a consequence may fail: the engine needs its roster all the same
            log.exception("roster broke; it is joined again in a while", engine_id=self._engine.engine_id)
        self.on(e.Ended(joining, why))

    async def leave(self) -> None:
        await self._tasks.end()
        self._timer.set(None)


class Roster:
    """The member's side: each engine of several ranks has a place in its roster, until `leave`."""

    def __init__(
        self, config: Config, channels: Channels, seed: Seed, instance: str, on_change: Callable[[Engine], None]
    ) -> None:
        """instance: of this daemon. on_change: called when it is known anew which daemons an engine's ranks have, and
        which of them are draining."""
        self._config, self._channels, self.seed, self._on_change = config, channels, seed, on_change
        self._instance, self._draining = instance, False
        self._places: dict[Engine, _Place] = {}
        self._challenges: dict[bytes, Engine] = {}
        """The engine of each challenge that the seed has to repeat."""

    def follow(self, engine: Engine) -> None:
        """Join, and set the engine's members as they change."""
        if engine.world_size > 1 and not engine.session.retiring:
            if fault := self.fault(engine):
                log.info("roster is not whole yet", engine_id=engine.engine_id, rank=engine.rank, why=fault)
            place = _Place(engine, self._config.connect_timeout_s, self._members, self._know)
            self._places[engine] = place
            place.on(e.Renew())

    def rest(self, engine: Engine) -> dict[int, str]:
        """The REST address of each rank's daemon for this host, by rank."""
        own, members = self._config.advertise, engine.roster.members
        return {at: it.rest for at, it in members.items() if it.rest and for_host(it.rest, it.address, own)}

    def say_draining(self, draining: bool) -> None:
        """Tell the other ranks of every engine here whether this daemon takes new transfers."""
        self._draining = draining
        self.renew()

    def renew(self) -> None:
        """Join again, by what proves us now and with what is to be said now."""
        for place in self._places.values():
            place.on(e.Renew())

    def fault(self, engine: Engine) -> str:
        """The fault in the setting where ranks are missing, and its remedy; empty where there is none."""
        seed = self._config.roster
        if not engine.roster.missing:
            return ""
        if seed in (None, self._config.advertise):  # any daemon may keep the roster of all ranks: see `kvferry host`
            what = "is not set" if seed is None else "is this daemon's own address"
            why = f"roster {what}, and rank {engine.rank} finds no other: set it to one address for all ranks"
            return "" if engine.rank == 0 or engine.roster.members.keys() - {engine.rank} else why
        try:
            allow.check(seed, self._config.allow_peers)
        except KvferryError as error:
            return f"roster: {error}"
        return ""

    def _know(self, engine: Engine, members: Members) -> None:
        engine.roster.know(members)
        self._on_change(engine)

    async def _members(self, engine: Engine) -> AsyncGenerator[Members]:
        seed, own = self._config.roster, self._config.advertise
        ours = Member(own, self._draining, self._config.rest_url, self._instance)
        if seed is None or seed == own:
            engine.roster.key = self.seed.key(engine.engine_id, engine.epoch)
            async with aclosing(self.seed.join(engine.session.rank, ours)) as joined:
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
                    yield {each.rank: member_of(each) for each in roster.members}
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
        engine.roster.key = request.key

    async def admit(self, request: peer_pb2.JoinRequest) -> None:
        """Give the key to the daemon at the member's address, if it is the one that joins. Raises KvferryError."""
        try:
            await self._admit(request)
        except KvferryError as error:
            self.seed.rosters.keep_out(request.engine_id, request.member.rank, error)
            raise

    async def _admit(self, request: peer_pb2.JoinRequest) -> None:
        member, engine_id = request.member, request.engine_id
        allow.check(member.address, self._config.allow_peers)
        self.seed.check(Rank(engine_id, member.epoch, member.rank, request.world_size), member.address)
        admission = peer_pb2.AdmitRequest(
            engine_id=engine_id, epoch=member.epoch, challenge=request.challenge,
            key=self.seed.key(engine_id, member.epoch),
        )  # fmt: skip
        async with self._channels.calling(member.address) as stub:
            await stub.Admit(admission, timeout=self._config.connect_timeout_s)

    async def leave(self, engine: Engine) -> None:
        if (place := self._places.pop(engine, None)) is not None:
            await place.leave()


def member_of(told: peer_pb2.Member) -> Member:
    return Member(told.address, told.draining, told.rest, shorten(told.instance, 64))


def _put(told: asyncio.Queue[Members | None], members: Members | None) -> None:
    """In place of what was not told yet."""
    while not told.empty():
        told.get_nowait()
    told.put_nowait(members)


def for_host(url: str, address: str, own: str) -> bool:
    """Whether the REST service at this URL, of the daemon at `address`, may be reached from the host of `own`."""
    return not _of_loopback(url) or allow.split(address)[0] == allow.split(own)[0]


def _of_loopback(url: str) -> bool:
    """Also of what is no URL of a daemon: nobody else is to ask there."""
    try:
        return is_loopback(url.partition("://")[2])
    except Wrong:
        return True
