"""The engines that this daemon reads from: handshaken once, kept warm, forgotten when they are stale."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

from kvferry import __version__
from kvferry.errors import Conflict, KvferryError, Malformed, PeerFailed, Unavailable
from kvferry.rpc import PROTOCOL_MAX, PROTOCOL_MIN
from kvferry.v1 import layout_pb2, peer_pb2
from kvferry.wire import manifest_from_proto
from kvferryd import logs
from kvferryd.certificates import Certificates
from kvferryd.config import Config
from kvferryd.copy.chunks import ALIGN
from kvferryd.engine import Engine
from kvferryd.metrics import Metrics
from kvferryd.peers.channels import Channel, Channels, asking
from kvferryd.peers.mapping import RankMapping, compile_kernels
from kvferryd.peers.peer import PeerEngine, PeerRank, Staging
from kvferryd.peers.reader_stream import ReaderStream
from kvferryd.peers.staging import stage
from kvferryd.plan import plan
from kvferryd.transport import Agent, Span
from kvferryd.transport.metadata import parse
from kvferryd.transport.screen import Screen

log = logs.get(__name__)
UNLOAD_S = 5.0
IDLE_S = 3600.0
"""A peer not read from for so long is forgotten when the next handshake is made."""


class Peers:
    """Handshakes, one per (our engine, peer engine) at a time. Owns the channels, and the screen for NIXL metadata."""

    def __init__(self, config: Config, metrics: Metrics, certificates: Certificates | None = None) -> None:
        self._config, self._metrics = config, metrics
        self.channels = Channels(config, certificates)
        self._screen = Screen(config.ucx)
        self._known: dict[tuple[str, str, str], PeerEngine] = {}
        self._shaking: dict[tuple[str, str, str, str], asyncio.Task[PeerEngine]] = {}
        self._unloading: set[asyncio.Task[None]] = set()

    def __iter__(self) -> Iterator[PeerEngine]:
        return iter(list(self._known.values()))

    async def get(self, engine: Engine, engine_id: str, address: str, epoch: str = "") -> PeerEngine:
        """The peer engine, from memory or by a handshake that concurrent callers share.

        Raises KvferryError: `peer_unreachable`, `unknown_engine`, `stale_epoch`, `protocol`, PlanRefused, ...
        """
        if engine_id == engine.engine_id:
            raise Malformed(
                "own_engine",
                f"engine {engine_id} is to read from itself",
                field="source.engine_id",
                value=engine_id,
                remedy="its blocks are at hand: copy them in the engine",
            )
        key = (engine.engine_id, engine.epoch, engine_id)
        known = self._known.get(key)
        current = known is not None and not known.lost and (not epoch or known.epoch == epoch)
        if known is not None and current and address in known.addresses:
            known.used_at = time.monotonic()
            return known
        # Known elsewhere, in another epoch, or with a daemon that has gone: only the engine can say what holds now.
        flight = (*key, address)
        shaking = self._shaking.get(flight)
        if shaking is None:
            shaking = self._shaking[flight] = asyncio.create_task(self._shake(engine, engine_id, address))
            shaking.add_done_callback(lambda task: self._shaken(flight, task))
        peer = await asyncio.shield(shaking)
        if epoch and peer.epoch != epoch:
            raise Conflict(
                "stale_epoch",
                f"engine {engine_id} is in epoch {peer.epoch}",
                field="source.epoch",
                value=epoch,
                remedy="prefill the request again: what that epoch held is gone",
            )
        return peer

    def _shaken(self, flight: tuple[str, str, str, str], task: asyncio.Task[PeerEngine]) -> None:
        del self._shaking[flight]
        if not task.cancelled():
            task.exception()  # retrieved: every caller may have given up

    async def _shake(self, engine: Engine, engine_id: str, address: str) -> PeerEngine:
        began, outcome = time.monotonic(), "ok"
        try:
            peer = await self._handshake(engine, engine_id, address)
            if engine.retired.is_set():
                await self._unload(peer)
                raise Unavailable("engine_gone", f"engine {engine.engine_id} was retired during the handshake")
        except KvferryError as error:
            outcome = error.code
            raise
        finally:
            self._metrics.handshake(outcome, time.monotonic() - began)
        key = (engine.engine_id, engine.epoch, engine_id)
        before = self._known.get(key)
        self._known[key] = peer
        peer.watches += [asyncio.create_task(self._watch(peer, mapping)) for mapping in peer.mappings.values()]
        if before is not None:
            if before.epoch == peer.epoch:
                peer.addresses |= before.addresses
            self.forget(before)
        self._forget_idle(engine)
        return peer

    def _forget_idle(self, engine: Engine) -> None:
        """Peers that are gone for good leave no trace: a fleet replaces its pods for as long as this daemon runs."""
        for (own, epoch, _), peer in list(self._known.items()):
            idle = not peer.users and time.monotonic() - peer.used_at > IDLE_S
            if idle and (own, epoch) == (engine.engine_id, engine.epoch):
                self.forget(peer)

    async def _handshake(self, engine: Engine, engine_id: str, address: str) -> PeerEngine:
        asked: list[PeerRank] = []
        try:
            return await self._meet(engine, engine_id, address, asked)
        except BaseException:
            await asyncio.gather(*(rank.close() for rank in asked))
            raise

    async def _meet(self, engine: Engine, engine_id: str, address: str, asked: list[PeerRank]) -> PeerEngine:
        """`asked`: the ranks that have answered, whatever comes of it."""
        first, members = await self._ask(engine, engine_id, address)
        asked.append(first)
        others = [self._ask(engine, engine_id, member.address) for member in members if member.rank != first.rank]
        # All of them to the end: one that answers after another has failed is closed with the rest.
        answers = await asyncio.gather(*others, return_exceptions=True)
        asked += [answer[0] for answer in answers if not isinstance(answer, BaseException)]
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        ranks = {rank.rank: rank for rank in asked}
        epochs = {rank.manifest.epoch for rank in ranks.values()}
        missing = set(range(first.manifest.world_size)) - set(ranks)
        if len(epochs) > 1 or missing:
            raise Unavailable(
                "roster_incomplete",
                f"engine {engine_id} is not whole: ranks {sorted(missing)} are missing, epochs {sorted(epochs)}",
                field="source.engine_id",
                value=engine_id,
                remedy="wait until all its daemons run with one roster and all its ranks registered in one epoch",
            )
        manifests = [ranks[rank].manifest for rank in sorted(ranks)]
        planned = await asyncio.to_thread(plan, manifests, engine.manifest)
        addresses = {address, *(rank.address for rank in ranks.values())}
        peer = PeerEngine(engine_id, first.manifest.epoch, ranks, planned, engine, addresses)
        try:
            for rank in sorted(ranks):
                if rank in planned.reads_from:
                    # First: what is held open UCX need not map for each descriptor.
                    await self._map(engine, ranks[rank], peer)
                await self._load(engine.agent, ranks[rank], peer)
            if engine.runner is not None and not peer.unmapped:
                await compile_kernels(engine.runner, planned, peer.mapped_addresses(), engine.addresses)
            if engine.arena is not None and (peer.unmapped or self._config.way == "staged"):
                await stage(peer, engine.arena, self._config.connect_timeout_s)
        except BaseException:
            await self._unload(peer)
            raise
        return peer

    async def _load(self, agent: Agent, rank: PeerRank, peer: PeerEngine) -> None:
        """Make the rank readable: load its metadata, and pay for the wire-up now."""
        metadata = parse(rank.agent_name, rank.metadata)
        readable = [rank.regions[id] for id in sorted(rank.regions)]
        if rank.staging:
            readable.append(rank.staging.span)
        await self._screen.check(metadata, readable, self._config.connect_timeout_s)
        await agent.add_peer(metadata)
        rank.agent_name = metadata.alias
        peer.loaded.append(rank.agent_name)
        if rank.rank in peer.plan.reads_from:
            try:
                async with asyncio.timeout(self._config.connect_timeout_s):
                    await agent.warm(rank.agent_name, readable[0])
            except TimeoutError:
                raise PeerFailed(
                    "peer_unreachable",
                    f"NIXL did not connect to {rank.address}",
                    field="address",
                    value=rank.address,
                    remedy="check the fabric between the two daemons and the ucx settings",
                ) from None

    async def _map(self, engine: Engine, rank: PeerRank, peer: PeerEngine) -> None:
        """Map the rank's memory if it can be done; otherwise keep why not."""
        if engine.runner is None:
            peer.unmapped[rank.rank] = engine.unmapped
            return
        mapping = RankMapping(engine.runner, slots_only=engine.strict)
        try:
            await mapping.open(rank.stub, rank.address, rank.manifest, self._config.connect_timeout_s)
        except KvferryError as error:
            mapping.refusal = str(error)
        else:
            peer.mappings[rank.rank] = mapping
        if mapping.refusal:
            peer.unmapped[rank.rank] = mapping.refusal
            log.info("peer not mapped", engine_id=peer.engine_id, rank=rank.rank, why=mapping.refusal)

    async def _watch(self, peer: PeerEngine, mapping: RankMapping) -> None:
        await mapping.ended()
        if not peer.stale:
            log.info("peer's memory is gone", engine_id=peer.engine_id, epoch=peer.epoch)
            self.forget(peer)

    async def _ask(self, engine: Engine, engine_id: str, address: str) -> tuple[PeerRank, list[peer_pb2.Member]]:
        channel = self.channels.open(address)
        try:
            return await self._ask_over(channel, engine, engine_id)
        except BaseException:
            await channel.close()
            raise

    async def _ask_over(
        self, channel: Channel, engine: Engine, engine_id: str
    ) -> tuple[PeerRank, list[peer_pb2.Member]]:
        address = channel.address
        request = peer_pb2.HandshakeRequest(
            protocol_min=PROTOCOL_MIN, protocol_max=PROTOCOL_MAX, version=__version__, engine_id=engine_id
        )
        async with asking(address):
            reply = await channel.stub.Handshake(request, timeout=self._config.connect_timeout_s)
        if not PROTOCOL_MIN <= reply.protocol <= PROTOCOL_MAX:
            raise Conflict(
                "protocol",
                f"peer {address} chose protocol {reply.protocol}",
                field="protocol",
                value=reply.protocol,
                remedy=f"this daemon speaks {PROTOCOL_MIN} to {PROTOCOL_MAX}",
            )
        manifest = manifest_from_proto(reply.manifest)
        if manifest.engine_id != engine_id:
            raise Conflict(
                "protocol",
                f"peer {address} answered for engine {manifest.engine_id}",
                field="engine_id",
                value=engine_id,
            )
        regions = {
            region.id: Span(region.address, region.nbytes, _kind(region.kind), region.device)
            for region in reply.regions
        }
        staging = _staging(reply, address) if reply.HasField("staging") else None
        # A strict daemon tells where its staging slots are, and nothing else.
        for region in manifest.regions if regions or staging is None else ():
            if region.id not in regions or regions[region.id].nbytes < region.nbytes:
                raise Conflict(
                    "protocol",
                    f"peer {address} gave no address for region {region.id}",
                    field="regions",
                    value=region.id,
                )
        reader = peer_pb2.Reader(
            engine_id=engine.engine_id, epoch=engine.epoch, rank=engine.rank, world_size=engine.world_size
        )
        opening = peer_pb2.ReadOpening(engine_id=engine_id, epoch=manifest.epoch, reader=reader)
        rank = PeerRank(
            address,
            manifest,
            reply.protocol,
            reply.version,
            reply.agent_name,
            reply.agent_metadata,
            regions,
            channel,
            reader,
            ReaderStream(channel.stub, address, opening),
            staging,
        )
        return rank, list(reply.members)

    def forget(self, peer: PeerEngine) -> None:
        """Drop a peer engine that is stale or was asked to be forgotten. The next order shakes hands anew.
        Idempotent."""
        key = (peer.own.engine_id, peer.own.epoch, peer.engine_id)
        if self._known.get(key) is peer:
            del self._known[key]
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
            task = asyncio.create_task(self._unload(peer))
            self._unloading.add(task)
            task.add_done_callback(self._unloading.discard)

    async def _unload(self, peer: PeerEngine) -> None:
        for mapping in peer.mappings.values():
            await mapping.close()
        await asyncio.gather(*(rank.close() for rank in peer.ranks.values()))
        names, peer.loaded = peer.loaded, []
        if not peer.own.retired.is_set():
            for name in names:
                await peer.own.agent.remove_peer(name)

    async def forget_engine(self, engine: Engine) -> None:
        """Our own engine is retired, its agent with it: nothing to unload."""
        for key in [key for key in self._known if key[:2] == (engine.engine_id, engine.epoch)]:
            peer = self._known.pop(key)
            peer.stale = True
            for watch in peer.watches:
                watch.cancel()
            await asyncio.gather(*(rank.close() for rank in peer.ranks.values()))

    def of_engine(self, engine_id: str) -> list[tuple[str, PeerEngine]]:
        """(our engine's id, peer) of every peer engine with this id."""
        return [(key[0], peer) for key, peer in self._known.items() if key[2] == engine_id]

    async def close(self) -> None:
        for task in list(self._shaking.values()):
            task.cancel()
        if self._unloading:
            await asyncio.wait(self._unloading, timeout=UNLOAD_S)
        await self._screen.close()
        await self.channels.close()


def _kind(kind: layout_pb2.MemoryKind.ValueType) -> str:
    return "cuda" if kind == layout_pb2.MEMORY_KIND_CUDA else "host"


def _staging(reply: peer_pb2.HandshakeReply, address: str) -> Staging:
    said = reply.staging
    if not ALIGN <= said.slot_nbytes <= said.nbytes:
        raise Conflict(
            "protocol",
            f"peer {address} has no sensible staging slots",
            field="staging.slot_nbytes",
            value=said.slot_nbytes,
        )
    return Staging(Span(said.address, said.nbytes, _kind(said.kind), said.device), said.slot_nbytes)
