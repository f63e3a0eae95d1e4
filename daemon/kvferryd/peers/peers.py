"""The engines that this daemon reads from: handshaken once, kept warm, forgotten when they are stale."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import defaultdict
from collections.abc import Awaitable, Iterator, Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from cachetools import LRUCache

from kvferry import __version__
from kvferry.errors import Conflict, KvferryError, Malformed, PeerFailed, Unavailable
from kvferry.manifest import Manifest
from kvferry.manifest.model import MOST
from kvferry.rpc import PROTOCOL_MAX, PROTOCOL_MIN
from kvferry.v1 import layout_pb2, peer_pb2
from kvferry.wire import layout_digest, manifest_from_proto
from kvferryd.aio import Tasks, to_the_end
from kvferryd.config import Config
from kvferryd.copy import mapped, sample
from kvferryd.ending import Step, ended
from kvferryd.engine import Engine
from kvferryd.engine.registry import MAX_WORLD_SIZE
from kvferryd.observe import logs
from kvferryd.observe.metrics import Metrics
from kvferryd.peers.certificates import Certificates
from kvferryd.peers.channels import Channel, Channels
from kvferryd.peers.contact import LOST, asking
from kvferryd.peers.peer import Home, PeerEngine, PeerRank, Staging
from kvferryd.plan import Plan, plan
from kvferryd.plan.cost import COSTS, cheapest
from kvferryd.staging.arena import SLOT_ALIGN
from kvferryd.staging.share import prepare_scatter
from kvferryd.transport.metadata import Metadata, parse
from kvferryd.transport.read import Span, TransportError
from kvferryd.transport.screen import Screen

log = logs.get(__name__)
UNLOAD_S = 5.0
COMPILE_S = 20.0
"""What a source may take to compile its kernels, beside the usual time to answer."""
LARGE = 1 << 30
"""Bytes of a request beside which what a way takes at all does not count."""
IDLE_S = 3600.0
"""A peer not read from for so long is forgotten when the next handshake is made; one that is gone at any rate."""
NAMES = 64
"""Addresses in orders by which an engine is known, beside those of its ranks. Another one is asked who it is."""
HOMES = 4096
"""Engines whose daemons are remembered after they are forgotten as peers."""
FORGOTTEN = 64
"""Engines that are listed, where they do not answer, after they are forgotten as peers."""
OVER = frozenset({"unknown_engine", *LOST})
"""What a handshake is answered with where the engine is no more."""


class _Flight(NamedTuple):
    """A handshake under way."""

    engine: Engine
    engine_id: str
    address: str
    ordered: bool


class Peers:
    """Handshakes, one per (our engine, peer engine) at a time. Owns the channels, and the screen for NIXL metadata."""

    def __init__(self, config: Config, metrics: Metrics, certificates: Certificates | None = None) -> None:
        self._config, self._metrics = config, metrics
        self.channels = Channels(config, certificates)
        self._screen = Screen()
        self._known: dict[tuple[Engine, str], PeerEngine] = {}
        self._shaking: dict[_Flight, asyncio.Task[PeerEngine]] = {}
        self._preparing, self._unloading = Tasks(), Tasks()
        self._homes: LRUCache[tuple[Engine, str], Home] = LRUCache(HOMES)
        """Whose an engine id is: a stranger may answer to it as well."""
        self._presumed: LRUCache[tuple[Engine, str], None] = LRUCache(HOMES)
        """Those of which no order has named the address."""
        self._forgotten: LRUCache[tuple[Engine, str], Home] = LRUCache(FORGOTTEN)
        self._layouts: WeakValueDictionary[bytes, Manifest] = WeakValueDictionary()
        """By what an engine's name is not part of."""

    def __iter__(self) -> Iterator[PeerEngine]:
        return iter(list(self._known.values()))

    @property
    def held_up(self) -> str:
        """Why no handshake goes on for now; empty where they do."""
        return self._screen.held_up

    def expect(self) -> None:
        """An engine is there that may read: do now what its next handshake would wait for."""
        self._preparing.spawn(self._screen.prepare())

    async def meet(self, engine: Engine, address: str) -> PeerEngine:
        """Whatever engine the daemon at this address serves, before any order names it. Raises KvferryError."""
        rank, told = await self._ask(engine, "", address)
        await rank.close()
        # At its rank 0: then all of its ranks' daemons lead to the same handshake.
        return await self.get(engine, rank.manifest.engine_id, told.get(0, address), ordered=False)

    async def get(
        self, engine: Engine, engine_id: str, address: str, epoch: str = "", *, ordered: bool = True
    ) -> PeerEngine:
        """The peer engine, from memory or by a handshake that concurrent callers share.

        ordered: an order names this engine at this address. Raises KvferryError: `peer_unreachable`, `unknown_engine`,
        `engine_taken`, `stale_epoch`, `protocol`, ...
        """
        if engine_id == engine.engine_id:
            raise Malformed(
                "own_engine", f"engine {engine_id} is to read from itself", field="source.engine_id", value=engine_id,
                remedy="its blocks are at hand: copy them in the engine",
            )  # fmt: skip
        known = self._known.get((engine, engine_id))
        current = known is not None and not known.lost and (not epoch or known.epoch == epoch)
        if known is not None and current and address in known.addresses:
            known.used_at = time.monotonic()
            if ordered:
                self._presumed.pop((engine, engine_id), None)
            return known
        # Known elsewhere, in another epoch, or with a daemon that has gone: only the engine can say what holds now.
        peer = await self._share(_Flight(engine, engine_id, address, ordered))
        if ordered:
            self._presumed.pop((engine, engine_id), None)
        if epoch and peer.epoch != epoch:
            raise Conflict(
                "stale_epoch", f"engine {engine_id} is in epoch {peer.epoch}", field="source.epoch", value=epoch,
                remedy="prefill the request again: what that epoch held is gone",
            )  # fmt: skip
        return peer

    async def use(self, engine: Engine, engine_id: str, address: str, epoch: str = "") -> PeerEngine:
        """As `get`; its names stay loaded and its memory stays mapped until `leave`."""
        while (peer := await self.get(engine, engine_id, address, epoch)).stale:
            pass  # forgotten between the end of its handshake and this turn: the next `get` shakes hands anew
        peer.users += 1
        return peer

    async def _share(self, flight: _Flight) -> PeerEngine:
        """One handshake for all who want it. An order joins one that nobody has ordered, too, and begins its own where
        that fails: it has more time, and the engine's id passes to what it names."""
        other = flight._replace(ordered=not flight.ordered)
        if flight not in self._shaking and other in self._shaking:
            try:
                return await asyncio.shield(self._shaking[other])
            except KvferryError:
                if not flight.ordered:
                    raise
        if flight not in self._shaking:
            shaking = self._shaking[flight] = asyncio.create_task(self._shake(*flight[:3], ordered=flight.ordered))
            shaking.add_done_callback(lambda task: self._shaken(flight, task))
        return await asyncio.shield(self._shaking[flight])

    def _shaken(self, flight: _Flight, task: asyncio.Task[PeerEngine]) -> None:
        del self._shaking[flight]
        if not task.cancelled():
            task.exception()  # retrieved: every caller may have given up

    async def _shake(self, engine: Engine, engine_id: str, address: str, *, ordered: bool = True) -> PeerEngine:
        began, outcome, key = time.monotonic(), "ok", (engine, engine_id)
        try:
            peer = await self._handshake(engine, engine_id, address, ordered=ordered)
            if engine.session.retired.is_set():
                await self._unload(peer)
                raise Unavailable("engine_gone", f"engine {engine.engine_id} was retired during the handshake")
            if taken := self._in_the_way(key, peer.home, ordered=ordered):  # of a handshake that was quicker
                await self._unload(peer)
                raise _taken(engine_id, taken)
            if key not in self._homes and not ordered:
                self._presumed[key] = None
        except KvferryError as error:
            outcome = error.code
            raise
        finally:
            self._metrics.handshake(outcome, time.monotonic() - began)
            self.expect()
        self._metrics.known(engine_id)
        took_ms = {step: round(1e3 * seconds, 1) for step, seconds in peer.took_s.items()}
        log.info(
            "peer met", engine_id=engine_id, epoch=peer.epoch, ranks=len(peer.ranks), unmapped=peer.unmapped,
            took_ms=took_ms | {"total": round(1e3 * (time.monotonic() - began), 1)},
        )  # fmt: skip
        for rank in peer.ranks.values():
            rank.channel.contact.met()
        before = self._known.get(key)
        self._known[key] = peer
        self._homes[key] = peer.home
        for rank in peer.ranks.values():
            if rank.mapping is not None:
                rank.mapping.add_done_callback(lambda _: self._memory_gone(peer))
        if before is not None:
            if before.home == peer.home:
                room = len(peer.ranks) + NAMES - len(peer.addresses)
                peer.addresses |= set(itertools.islice(before.addresses - peer.addresses, room))
            self.forget(before)
        self._forget_idle(engine)
        return peer

    def _forget_idle(self, engine: Engine) -> None:
        """Peers that are gone for good leave no trace: a fleet replaces its pods for as long as this daemon runs."""
        since = time.monotonic() - IDLE_S
        for peer in self:
            if peer.own is engine and not peer.users and (peer.used_at < since or peer.gone):
                self.forget(peer)

    async def _handshake(self, engine: Engine, engine_id: str, address: str, *, ordered: bool) -> PeerEngine:
        await engine.until_whole(self._config.connect_timeout_s)  # its ranks read as one by the roster's key
        asked: list[PeerRank] = []
        """The ranks that have answered, whatever comes of it."""
        peer: PeerEngine | None = None
        try:
            took_s: defaultdict[str, float] = defaultdict(float)
            with took(took_s, "asking"):
                first, told = await self._ask(engine, engine_id, address)
            asked.append(first)
            if told.get(first.rank) != address:
                # Whoever answers at the address of an order only names the ranks: each is read where its roster has it.
                asked.remove(first)
                await first.close()
            whole = sorted(told) == list(range(len(told))) and len(told) == first.manifest.world_size
            others = [rank for rank in told if first not in asked or rank != first.rank] if whole else []
            with took(took_s, "asking"):
                answers = await self._ask_all(engine, engine_id, [told[rank] for rank in others], asked)
            whole = whole and all(members == told for _, members in answers)
            ranks = {rank.rank: rank for rank in sorted(asked, key=lambda rank: rank.rank)}
            epochs = {rank.manifest.epoch for rank in asked}
            if not whole or len(epochs) > 1 or set(ranks) != set(told):
                raise Unavailable(
                    "roster_incomplete",
                    f"engine {engine_id} is not whole: of {first.manifest.world_size} ranks {sorted(told)[:64]} are "
                    f"named, not all in the same way, or not in one epoch: {sorted(epochs)}",
                    field="source.engine_id", value=engine_id,
                    remedy="wait until all its daemons run with one roster and all its ranks registered in one epoch",
                )  # fmt: skip
            home = Home(epochs.pop(), tuple(rank.address for rank in ranks.values()))
            await self._check_home(engine, engine_id, home, ordered=ordered)
            with took(took_s, "planning"):
                planned = await asyncio.to_thread(plan, [rank.manifest for rank in ranks.values()], engine.manifest)
            if await asyncio.to_thread(self._wants_staging, engine, planned):
                with took(took_s, "arenas"):
                    await self._have_arenas(engine, engine_id, planned, ranks, asked)
            addresses = {address, *(rank.address for rank in asked)}
            peer = PeerEngine(engine_id, first.manifest.epoch, ranks, planned, engine, addresses, took_s)
            await self._ready(peer)
        except BaseException:
            if peer is not None:
                await self._unload(peer)
            await asyncio.gather(*(rank.close() for rank in asked))
            raise
        return peer

    def _wants_staging(self, engine: Engine, planned: Plan) -> bool:
        """On host memory, where an arena is made when it is needed: whether a large request would be staged."""
        able = self._config.way == "auto" and (engine.arena is not None or engine.make_arena is not None)
        if not able or engine.kind != "host":
            return False
        return cheapest(COSTS["host"], ("direct", "staged"), LARGE / planned.mean_run, LARGE) == "staged"

    async def _have_arenas(
        self, engine: Engine, engine_id: str, planned: Plan, ranks: dict[int, PeerRank], asked: list[PeerRank]
    ) -> None:
        """Let both sides have one, if the ranks that are read may. Those that made one are another PeerRank."""
        before = [ranks[number] for number in planned.reads_from if ranks[number].staging is None]
        addresses = [rank.address for rank in before]
        answers = await self._ask_all(engine, engine_id, addresses, asked, staging=True)
        for old, (new, _) in zip(before, answers, strict=True):
            if new.manifest != old.manifest:
                why, remedy = f"engine {engine_id} started anew", "prefill the request again"
                raise Conflict("stale_epoch", why, field="source.epoch", value=new.manifest.epoch, remedy=remedy)
            ranks[new.rank] = new
            asked.remove(old)
            await old.close()
        if all(ranks[number].staging for number in planned.reads_from):
            await engine.need_arena(self._config.connect_timeout_s)

    def _in_the_way(self, key: tuple[Engine, str], home: Home, *, ordered: bool) -> Home | None:
        """Whose the engine id is, if it is another's. What only answered when it was asked who it is gives way to what
        an order names."""
        if ordered and key in self._presumed:
            return None
        before: Home | None = self._homes.get(key)
        return None if before is None or before.addresses == home.addresses else before

    async def _check_home(self, engine: Engine, engine_id: str, home: Home, *, ordered: bool) -> None:
        """The engine id is this one's: nobody else had it, or that engine is over. In one epoch an engine never moves.

        Raises KvferryError (`engine_taken`).
        """
        before = self._in_the_way((engine, engine_id), home, ordered=ordered)
        if before is None:
            return
        if before.epoch == home.epoch or await self._lives(engine, engine_id, before):
            raise _taken(engine_id, before)
        if self._homes.get((engine, engine_id)) == before:
            del self._homes[engine, engine_id]

    async def _lives(self, engine: Engine, engine_id: str, home: Home) -> bool:
        """Whether any of its daemons still holds the engine in that epoch."""

        async def lives(address: str) -> bool:
            try:
                rank, _ = await self._ask(engine, engine_id, address)
            except KvferryError as error:
                return error.code not in OVER
            await rank.close()
            return rank.manifest.epoch == home.epoch

        return any(await asyncio.gather(*map(lives, home.addresses)))

    async def _ready(self, peer: PeerEngine) -> None:
        """Make every rank readable, and the first transfer as fast as the next."""
        read, metadata = [peer.ranks[number] for number in peer.plan.reads_from], {}
        for number, rank in peer.ranks.items():
            metadata[number] = await asyncio.to_thread(parse, rank.agent_name, rank.metadata)
        await to_the_end(
            [
                *(self._map(rank, peer) for rank in read),
                *(
                    self._while_it_lives(rank, peer, self._try(rank, metadata[rank.rank], peer))
                    for rank in peer.ranks.values()
                ),
            ]
        )
        # After the mapping: what is held open UCX need not map for each descriptor.
        loading = (
            self._while_it_lives(rank, peer, self._load(rank, metadata[rank.rank], peer))
            for rank in peer.ranks.values()
        )
        await to_the_end([*loading, self._prepare_copies(peer, read)])
        for rank in peer.ranks.values():
            rank.stream.check()  # open from now on: leases are announced, and its end is the peer's

    async def _map(self, rank: PeerRank, peer: PeerEngine) -> None:
        with took(peer.took_s, "mapping"):
            await rank.map(peer.own, self._config.connect_timeout_s)

    async def _prepare_copies(self, peer: PeerEngine, read: Sequence[PeerRank]) -> None:
        engine, planned = peer.own, peer.plan
        engine.session.check_open()  # or its memory is gone
        own = engine.addresses
        with took(peer.took_s, "kernels"):
            if engine.runner is not None and not peer.unmapped:
                await engine.runner.prepare(mapped(sample(planned), peer.mapped_addresses(), own))
            if engine.arena is not None and (peer.unmapped or self._config.way == "staged"):
                await asyncio.gather(*(self._pair(rank, planned) for rank in read if rank.staging))
                await prepare_scatter(engine.arena, planned, own)

    async def _pair(self, rank: PeerRank, planned: Plan) -> None:
        """What fails here is tried again by the first staged transfer."""
        try:
            await rank.pair(planned, self._config.connect_timeout_s + COMPILE_S)
        except KvferryError as error:
            log.info("not staged yet", engine_id=rank.manifest.engine_id, rank=rank.rank, why=str(error))

    async def _while_it_lives(self, rank: PeerRank, peer: PeerEngine, work: Awaitable[None]) -> None:
        """What NIXL says of a peer that has gone meanwhile is not what is wrong with it."""
        name = rank.agent_name
        try:
            await work
        except (TransportError, PeerFailed) as problem:
            error: KvferryError = problem
            now, _ = await self._ask(peer.own, peer.engine_id, rank.address)
            await now.close()
            if now.agent_name != name:
                raise PeerFailed(
                    "peer_lost", f"engine {peer.engine_id} was registered anew at {rank.address} meanwhile",
                    field="address", value=rank.address, remedy="try again",
                ) from None  # fmt: skip
            if error.code == "peer_unreachable":
                error = _apart(rank.address)
            rank.channel.contact.met(unread=error)
            raise error from None

    async def _try(self, rank: PeerRank, metadata: Metadata, peer: PeerEngine) -> None:
        with took(peer.took_s, "screening"):
            await self._screen.check(metadata, rank.readable, self._config.connect_timeout_s)

    async def _load(self, rank: PeerRank, metadata: Metadata, peer: PeerEngine) -> None:
        """Make the rank readable: load its metadata, and pay for the wire-up now."""
        agent = peer.own.agent
        with took(peer.took_s, "loading"):
            await agent.add_peer(metadata)
        rank.agent_name = metadata.alias
        peer.loaded.append(rank.agent_name)
        if rank.rank in peer.plan.reads_from:
            try:
                with took(peer.took_s, "first read"):
                    async with asyncio.timeout(self._config.connect_timeout_s):
                        await agent.warm(rank.agent_name, rank.readable[0])
            except TimeoutError:
                raise _apart(rank.address) from None

    def _memory_gone(self, peer: PeerEngine) -> None:
        if not peer.stale:
            log.info("peer's memory is gone", engine_id=peer.engine_id, epoch=peer.epoch)
            self.forget(peer)

    async def _ask_all(
        self, engine: Engine, engine_id: str, addresses: Sequence[str], asked: list[PeerRank], *, staging: bool = False
    ) -> list[tuple[PeerRank, dict[int, str]]]:
        """All of them to the end: one that answers after another has failed is in `asked` as well, to be closed."""
        asking_all = (self._ask(engine, engine_id, address, staging=staging) for address in addresses)
        answers = await asyncio.gather(*asking_all, return_exceptions=True)
        asked += [answer[0] for answer in answers if not isinstance(answer, BaseException)]
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    async def _ask(
        self, engine: Engine, engine_id: str, address: str, *, staging: bool = False
    ) -> tuple[PeerRank, dict[int, str]]:
        """The rank that answers at this address, and where the engine's ranks are, as it says. engine_id: empty for the
        only engine there. staging: it should have an arena."""
        request = peer_pb2.HandshakeRequest(
            protocol_min=PROTOCOL_MIN, protocol_max=PROTOCOL_MAX, version=__version__, engine_id=engine_id,
            staging=staging,
        )  # fmt: skip
        channel = self.channels.open(address)
        try:
            async with asking(channel.contact):
                reply = await channel.stub.Handshake(request, timeout=self._config.connect_timeout_s)
            _check_size(reply, address)
            manifest = await asyncio.to_thread(self._manifest, reply.manifest)
            rank = _rank(reply, manifest, channel, engine, engine_id or manifest.engine_id)
            return rank, {each.rank: each.address for each in reply.members}
        except BaseException:
            await channel.close()
            raise

    def _manifest(self, told: layout_pb2.Manifest) -> Manifest:
        """Most engines of a fleet differ by their names alone: the rest is read, checked and kept once. Raises
        ManifestError."""
        key = layout_digest(told)
        like = self._layouts.get(key)
        manifest = manifest_from_proto(told) if like is None else like.of_engine(told.engine_id, told.epoch)
        self._layouts[key] = manifest  # the newest: it will be there for longest
        return manifest

    async def renew(self) -> None:
        """Shake hands anew with everybody, by what proves us now. Transfers under way go on where they read."""
        await asyncio.gather(*map(self._renew, self))

    async def _renew(self, peer: PeerEngine) -> None:
        try:
            await self._shake(peer.own, peer.engine_id, peer.home.addresses[0])
        except KvferryError as error:
            log.info("peer forgotten", engine_id=peer.engine_id, why=str(error))
            self.forget(peer)

    async def manifests(self, engine: Engine) -> dict[int, Manifest | KvferryError]:
        """Of every rank of an engine of ours; why not, where its daemon does not tell."""

        async def manifest(rank: int, address: str) -> Manifest | KvferryError:
            if rank == engine.rank:
                return engine.manifest
            try:
                told, _ = await self._ask(engine, engine.engine_id, address)
            except KvferryError as error:
                return error
            await told.close()
            return told.manifest

        members = dict(engine.members)
        return dict(zip(members, await asyncio.gather(*itertools.starmap(manifest, members.items())), strict=True))

    def forget(self, peer: PeerEngine) -> None:
        """Drop a peer engine that is stale or was asked to be forgotten. The next order shakes hands anew.
        Idempotent."""
        key = peer.own, peer.engine_id
        if self._known.get(key) is peer:
            del self._known[key]
            if key in self._homes:
                self._forgotten[key] = peer.home
        if not peer.stale:
            peer.stale = True
            self._unload_unused(peer)

    def leave(self, peer: PeerEngine) -> None:
        """A transfer is quiet: its use of the peer ends. Its names stay loaded until then (see `PeerEngine.users`)."""
        peer.users -= 1
        if peer.stale:
            self._unload_unused(peer)

    def _unload_unused(self, peer: PeerEngine) -> None:
        if not peer.users:
            self._unloading.spawn(self._unload(peer))

    async def _unload(self, peer: PeerEngine) -> None:
        for rank in peer.ranks.values():
            await rank.unmap()
        await asyncio.gather(*(rank.close() for rank in peer.ranks.values()))
        names, peer.loaded = peer.loaded, []
        await to_the_end(peer.own.agent.remove_peer(name) for name in names)

    def unbind(self, engine_id: str) -> bool:
        """Whoever answers to this engine id next is its owner. Whether anybody was."""
        bound = [key for key in self._homes if key[1] == engine_id]
        for key in bound:
            del self._homes[key]
            self._presumed.pop(key, None)
        return bool(bound)

    async def forget_engine(self, engine: Engine) -> None:
        """Our own engine is retired, its agent with it: nothing to unload."""
        while keys := [key for key in self._known if key[0] is engine]:  # a handshake may end meanwhile
            peers = [self._known.pop(key) for key in keys]
            for peer in peers:
                peer.stale = True
            closing = (Step("close a peer", rank.close) for peer in peers for rank in peer.ranks.values())
            await asyncio.gather(*(ended([step], **engine.session.about) for step in closing))
        kept: tuple[LRUCache[tuple[Engine, str], Any], ...] = (self._homes, self._forgotten, self._presumed)
        for every in kept:
            for key in [key for key in every if key[0] is engine]:
                del every[key]

    def forgotten(self) -> Iterator[tuple[str, Home]]:
        """The engines that were known and are not any more, with where they were."""
        return (
            (key[1], home) for key, home in list(self._forgotten.items())
            if key in self._homes and key not in self._known
        )  # fmt: skip

    def of_engine(self, engine_id: str) -> list[PeerEngine]:
        """The peer engine with this id, as each engine of ours knows it."""
        return [peer for (_, known), peer in self._known.items() if known == engine_id]

    async def close(self) -> None:
        for task in [*self._shaking.values(), *self._preparing]:
            task.cancel()
        if self._unloading:
            await asyncio.wait(self._unloading, timeout=UNLOAD_S)
        await self._screen.close()
        await self.channels.close()


@contextlib.contextmanager
def took(seconds: defaultdict[str, float], step: str) -> Iterator[None]:
    """Add what happens inside to the time of a step."""
    began = time.monotonic()
    try:
        yield
    finally:
        seconds[step] += time.monotonic() - began


def _apart(address: str) -> PeerFailed:
    why = f"the daemon at {address} answers, and NIXL does not connect to its memory"
    remedy = "look at the fabric between the two: UCX's ports, its devices and transports (`kvferry doctor` on both)"
    return PeerFailed("peer_unreachable", why, field="address", value=address, remedy=remedy)


def _taken(engine_id: str, home: Home) -> Conflict:
    why = f"engine {engine_id} is that of {', '.join(home.addresses)}, in epoch {home.epoch}"
    remedy = "give every engine an id of its own; DELETE /v1/peers/ENGINE_ID lets another daemon have this one"
    return Conflict("engine_taken", why, field="source.engine_id", value=engine_id, remedy=remedy)


def _check_size(reply: peer_pb2.HandshakeReply, address: str) -> None:
    """Before anything is made of it. Raises KvferryError (`malformed_handshake`)."""
    for name, most in {"regions": MOST["regions"], "members": MAX_WORLD_SIZE}.items():
        if (count := len(getattr(reply, name))) > most:
            why, remedy = f"peer {address} answered with more than {most} {name}", "see what listens there"
            raise PeerFailed("malformed_handshake", why, field=name, value=count, remedy=remedy)


def _rank(
    reply: peer_pb2.HandshakeReply, manifest: Manifest, channel: Channel, engine: Engine, engine_id: str
) -> PeerRank:
    """The rank that answered, as `engine` reads it. Raises KvferryError (`protocol`)."""

    def wrong(what: str, field: str, value: object) -> Conflict:
        remedy = f"this daemon speaks protocol {PROTOCOL_MIN} to {PROTOCOL_MAX}: run the same version on both sides"
        return Conflict("protocol", f"peer {channel.address} {what}", field=field, value=value, remedy=remedy)

    if not PROTOCOL_MIN <= reply.protocol <= PROTOCOL_MAX:
        raise wrong(f"chose protocol {reply.protocol}", "protocol", reply.protocol)
    if manifest.engine_id != engine_id:
        raise wrong(f"answered for engine {manifest.engine_id}", "engine_id", engine_id)
    regions, staging = {region.id: _span(region) for region in reply.regions}, None
    if reply.HasField("staging"):
        staging = Staging(_span(reply.staging), reply.staging.slot_nbytes)
        if not SLOT_ALIGN <= staging.slot_nbytes <= staging.span.nbytes:
            raise wrong("has no sensible staging slots", "staging.slot_nbytes", staging.slot_nbytes)
    # A strict daemon tells where its staging slots are, and nothing else.
    for region in manifest.regions if regions or staging is None else ():
        if region.id not in regions or regions[region.id].nbytes < region.nbytes:
            raise wrong(f"gave no address for region {region.id}", "regions", region.id)
    reader = reader_of(engine, engine_id)
    opening = peer_pb2.ReadOpening(
        engine_id=engine_id, epoch=manifest.epoch, reader=reader, several=True, agent_name=reply.agent_name
    )
    told = reply.protocol, reply.version, reply.agent_name, reply.agent_metadata
    slow = any(region.slow for region in reply.regions)
    return PeerRank(channel, manifest, *told, regions, opening, staging, slow, reply.several)


def reader_of(engine: Engine, source: str) -> peer_pb2.Reader:
    """As whom our engine reads the leases of engine `source`."""
    return peer_pb2.Reader(**engine.session.rank._asdict(), key=engine.reader_key(source))


def _span(told: peer_pb2.RegionAddress | peer_pb2.Staging) -> Span:
    kind = "cuda" if told.kind == layout_pb2.MEMORY_KIND_CUDA else "host"
    return Span(told.address, told.nbytes, kind, told.device)
