"""The handshake with all ranks of a peer: who they are, the plan between us, and all that the first transfer needs."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence

from kvferry.errors import Conflict, KvferryError, PeerFailed, Unavailable
from kvferry.protocol.peers_events import Home
from kvferry.protocol.peers_homes import taken_by
from kvferryd.aio import Tasks, all_over, to_the_end
from kvferryd.config import Config
from kvferryd.copy import mapped, sample
from kvferryd.engine import Engine
from kvferryd.memory.node import NodeDir
from kvferryd.observe import logs
from kvferryd.peers.contact import LOST
from kvferryd.peers.introduce import Introductions
from kvferryd.peers.peer import PeerEngine, PeerRank
from kvferryd.plan import Plan, plan
from kvferryd.plan.cost import COSTS, cheapest
from kvferryd.staging.share import prepare_scatter
from kvferryd.transport.metadata import Metadata, parse
from kvferryd.transport.read import TransportError
from kvferryd.transport.screen import START_S, Screen

log = logs.get(__name__)
COMPILE_S = 20.0
"""The time that a source has to compile its kernels, beside the usual time to answer."""
LARGE = 1 << 30
"""Bytes of a request beside which what a way takes at all does not count."""
STEPS = 12
"""Steps of a handshake, each of which may take a connect timeout."""
NO_WAY = "NIXL_ERR_BACKEND"
"""NIXL's word where UCX finds no way to the peer at all: no route, or no transport that both have."""
OVER = frozenset({"unknown_engine", *LOST})
"""Codes with which a handshake is answered where the engine is no more."""


class Handshakes:
    """The handshakes of all engines of ours. `screen` tries metadata for them."""

    def __init__(
        self, config: Config, introductions: Introductions, screen: Screen, node: NodeDir | None = None
    ) -> None:
        self._config, self._introductions, self.screen, self._node = config, introductions, screen, node

    @property
    def within_s(self) -> float:
        """The longest that one may take. Each step has a bound of its own: this is for what hangs in spite of it."""
        return STEPS * self._config.connect_timeout_s + 2 * START_S + COMPILE_S

    async def shake(
        self, engine: Engine, engine_id: str, address: str, in_the_way: Callable[[Home], Home | None],
        over: Callable[[Home], None], undoing: Tasks,
    ) -> PeerEngine:  # fmt: skip
        """The peer, ready to be read from; what was made of it is undone where this fails or is cancelled.

        in_the_way: whose the engine id is, if it is another's. over: called when that one is over. undoing: has the
        task that undoes, which goes on where this is cancelled meanwhile. Raises KvferryError.
        """
        await engine.roster.until_whole(self._config.connect_timeout_s)  # its ranks read as one by the roster's key
        asked: list[PeerRank] = []
        """The ranks that have answered, whatever comes of it."""
        peer: PeerEngine | None = None
        try:
            took_s: defaultdict[str, float] = defaultdict(float)
            with took(took_s, "asking"):
                first, told = await self._introductions.ask(engine, engine_id, address)
            asked.append(first)
            if told.get(first.rank) != address:
                # The daemon at the address of an order only names the ranks: each is read where its roster has it.
                asked.remove(first)
                first.let_go()
            whole = sorted(told) == list(range(len(told))) and len(told) == first.manifest.world_size
            others = [rank for rank in told if first not in asked or rank != first.rank] if whole else []
            with took(took_s, "asking"):
                answers = await self._introductions.ask_all(engine, engine_id, [told[rank] for rank in others], asked)
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
            if (before := in_the_way(home)) is not None:  # in one epoch an engine never moves
                if before.epoch == home.epoch or await self._lives(engine, engine_id, before):
                    raise taken_by(engine_id, before)
                over(before)
            with took(took_s, "planning"):
                planned = await asyncio.to_thread(plan, [rank.manifest for rank in ranks.values()], engine.manifest)
            if await asyncio.to_thread(self._wants_staging, engine, planned):
                with took(took_s, "arenas"):
                    await self._have_arenas(engine, engine_id, planned, ranks, asked)
            peer = PeerEngine(engine_id, first.manifest.epoch, ranks, planned, engine, took_s)
            await self._ready(peer)
        except BaseException:
            await all_over([undoing.spawn(_undo(peer, asked))])
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
        """Let both sides have one, if the ranks that are read may. A rank that made one is another PeerRank."""
        before = [ranks[number] for number in planned.reads_from if ranks[number].staging is None]
        addresses = [rank.address for rank in before]
        answers = await self._introductions.ask_all(engine, engine_id, addresses, asked, staging=True)
        for old, (new, _) in zip(before, answers, strict=True):
            if new.manifest != old.manifest:
                why, remedy = f"engine {engine_id} started anew", "prefill the request again"
                raise Conflict("stale_epoch", why, field="source.epoch", value=new.manifest.epoch, remedy=remedy)
            ranks[new.rank] = new
            asked.remove(old)
            old.let_go()
        if all(ranks[number].staging for number in planned.reads_from):
            await engine.need_arena(self._config.connect_timeout_s)

    async def _lives(self, engine: Engine, engine_id: str, home: Home) -> bool:
        """Whether any of its daemons still holds the engine in that epoch."""

        async def lives(address: str) -> bool:
            try:
                rank, _ = await self._introductions.ask(engine, engine_id, address)
            except KvferryError as error:
                return error.code not in OVER
            rank.let_go()
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
            await rank.mapped.map(peer.own, self._config.connect_timeout_s, self._node)

    async def _prepare_copies(self, peer: PeerEngine, read: Sequence[PeerRank]) -> None:
        engine, planned = peer.own, peer.plan
        engine.session.check_open()  # or its memory is gone
        own = engine.addresses
        with took(peer.took_s, "kernels"):
            if engine.runner is not None and not peer.unmapped:
                await engine.runner.prepare(mapped(sample(planned), peer.mapped_addresses(), own))
            if engine.arena is not None and (peer.unmapped or self._config.way == "staged"):
                await asyncio.gather(*(self._pair(rank, peer) for rank in read if rank.staging))
                await prepare_scatter(engine.arena, planned, own)

    async def _pair(self, rank: PeerRank, peer: PeerEngine) -> None:
        """The first staged transfer tries again if this fails."""
        try:
            await peer.pair(rank, self._config.connect_timeout_s + COMPILE_S)
        except KvferryError as error:
            log.info("not staged yet", engine_id=peer.engine_id, rank=rank.rank, why=str(error))

    async def _while_it_lives(self, rank: PeerRank, peer: PeerEngine, work: Awaitable[None]) -> None:
        """Errors of NIXL about a peer that has gone meanwhile do not say what is wrong."""
        name = rank.agent_name
        try:
            await work
        except (TransportError, PeerFailed) as problem:
            error: KvferryError = problem
            now, _ = await self._introductions.ask(peer.own, peer.engine_id, rank.address)
            now.let_go()
            if now.agent_name != name:
                raise PeerFailed(
                    "peer_lost", f"engine {peer.engine_id} was registered anew at {rank.address} meanwhile",
                    field="address", value=rank.address, remedy="try again",
                ) from None  # fmt: skip
            if error.code == "peer_unreachable" or NO_WAY in str(error.value):
                error = _apart(rank)
            rank.channel.contact.met(unread=error)
            raise error from None

    async def _try(self, rank: PeerRank, metadata: Metadata, peer: PeerEngine) -> None:
        with took(peer.took_s, "screening"):
            await self.screen.check(metadata, rank.readable, self._config.connect_timeout_s)

    async def _load(self, rank: PeerRank, metadata: Metadata, peer: PeerEngine) -> None:
        """Make the rank readable: load its metadata, and pay for the wire-up now."""
        agent = peer.own.agent
        rank.agent_name = metadata.alias
        with took(peer.took_s, "loading"):
            try:
                await agent.add_peer(metadata)
            except TransportError:
                raise
            except BaseException:  # cut off: the agent's thread loads it all the same
                peer.loaded.append(rank.agent_name)
                raise
        peer.loaded.append(rank.agent_name)
        if rank.rank in peer.plan.reads_from:
            try:
                with took(peer.took_s, "first read"):
                    async with asyncio.timeout(self._config.connect_timeout_s):
                        await agent.warm(rank.agent_name, rank.readable[0])
            except TimeoutError:
                raise _apart(rank) from None


@contextlib.contextmanager
def took(seconds: defaultdict[str, float], step: str) -> Iterator[None]:
    """Add what happens inside to the time of a step."""
    began = time.monotonic()
    try:
        yield
    finally:
        seconds[step] += time.monotonic() - began


async def _undo(peer: PeerEngine | None, asked: Sequence[PeerRank]) -> None:
    try:
        if peer is not None:
            await peer.unload()
    finally:
        for rank in asked:
            rank.let_go()


def _apart(rank: PeerRank) -> PeerFailed:
    why = f"the daemon at {rank.address} answers, and NIXL does not connect to its memory"
    remedy = "look at the fabric between the two: UCX's ports, its devices and transports (`kvferry doctor` on both)"
    if rank.ucx:
        why += f": over TCP UCX listens there at {rank.ucx}"
        remedy += "; reads need a way to that address without NAT, or another interface there (NET_DEVICES in ucx)"
    return PeerFailed("peer_unreachable", why, field="address", value=rank.address, remedy=remedy)
