"""An engine that this daemon reads from, as one engine of ours knows it since the handshake.

A rank's GPU memory is mapped at the handshake where that is possible, probed before it is used, and unmapped when its
engine ends.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

import grpc

from kvferry.errors import LONGEST, Conflict, KvferryError, shorten
from kvferry.manifest import Manifest
from kvferry.memory import CudaRegion, cuda
from kvferry.protocol.peers import Peer
from kvferry.protocol.peers_events import Home
from kvferry.v1 import engine_pb2, peer_pb2, peer_pb2_grpc
from kvferry.wire import manifest_to_proto
from kvferryd.aio import beside
from kvferryd.copy.runner import Runner
from kvferryd.ending import Step, ended
from kvferryd.engine import Engine
from kvferryd.engine.registration import COMPONENT_AS
from kvferryd.memory import Probe
from kvferryd.observe import logs
from kvferryd.peers.channels import Channel
from kvferryd.peers.contact import asking
from kvferryd.peers.reader_stream import ReaderStream
from kvferryd.plan import Plan
from kvferryd.transport.read import Span

log = logs.get(__name__)
LATELY = 100
"""Transfers of which a peer's median and its slowest hundredth are made."""
TRIES = 3
"""What an engine writes while its adopted memory is probed makes a probe fail that would not the next time."""


@dataclass(frozen=True, slots=True)
class Staging:
    """A peer's staging arena, which it packs slot by slot."""

    span: Span
    slot_nbytes: int


@dataclass(slots=True, eq=False)
class PeerRank:
    """One rank of a peer engine: its manifest, and how to read from it."""

    channel: Channel
    manifest: Manifest
    protocol: int
    version: str
    agent_name: str
    metadata: bytes
    regions: dict[int, Span]
    opening: peer_pb2.ReadOpening
    """The first message of a stream of its leases: it says who we are."""
    staging: Staging | None = None
    slow: bool = False
    """A direct read of its memory is slow."""
    several: bool = False
    """It takes several requests in one."""
    pairing: str = ""
    """The peer's name for the plan between us; empty until it has planned."""
    bytes_read: int = 0
    transfers: int = 0
    path: str = ""
    """Of the last transfer."""
    lately: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=LATELY))
    """Of each of the last transfers: its milliseconds without waits, and bytes a second while they moved."""
    mapped: dict[int, CudaRegion] = field(default_factory=dict)
    """Its regions in this process, where they are mapped."""
    unmapped: str = ""
    """Why they are not."""
    mapping: grpc.aio.UnaryStreamCall[peer_pb2.MapRequest, peer_pb2.MapReply] | None = None
    """Open while anything is mapped. Its end means that the memory is gone, or that nobody can tell any more."""
    _held: list[CudaRegion] = field(default_factory=list)
    """The staging arena, so that UCX need not map it for each descriptor."""
    _runner: Runner | None = None
    _stream: ReaderStream | None = None

    @property
    def address(self) -> str:
        return self.channel.address

    @property
    def readable(self) -> list[Span]:
        """What it lets us read."""
        regions = [self.regions[id] for id in sorted(self.regions)]
        return [*regions, self.staging.span] if self.staging else regions

    @property
    def stub(self) -> peer_pb2_grpc.PeerAsyncStub:
        return self.channel.stub

    @property
    def stream(self) -> ReaderStream:
        """Its leases, as we read them. When it has ended the rank is `lost`: the next handshake makes another one."""
        if self._stream is None:
            self._stream = ReaderStream(self.stub, self.channel.contact, self.opening, several=self.several)
        return self._stream

    @property
    def connected(self) -> bool:
        """Whether a stream is open: gRPC ends it within 20 s when the source is silent."""
        return self._stream is not None and not self._stream.over

    @property
    def lost(self) -> bool:
        """Whether the source has ended the stream. Another daemon, with other memory, may answer at its address now."""
        return self._stream is not None and self._stream.over

    async def map(self, engine: Engine, timeout_s: float) -> None:
        """Map what can be mapped for this engine of ours, and keep why the rest cannot."""
        if engine.runner is None:
            self.unmapped = engine.unmapped
            return
        self._runner = engine.runner
        try:
            for _ in range(TRIES):
                await self.unmap()  # what a first try has left
                async with asyncio.timeout(timeout_s):
                    if await self._map(engine.runner, strict=engine.strict):
                        break
        except (KvferryError, TimeoutError) as error:
            await self.unmap()
            self.unmapped = str(error) or f"{self.address} did not say how to map its memory"
        if self.unmapped:
            log.info("peer not mapped", engine_id=self.manifest.engine_id, rank=self.rank, why=self.unmapped)

    async def _map(self, runner: Runner, *, strict: bool) -> bool:
        """Whether a second try would end as this one. Raises KvferryError when the rank does not answer."""
        manifest = self.manifest
        self.mapping = self.stub.Map(peer_pb2.MapRequest(engine_id=manifest.engine_id, epoch=manifest.epoch))
        async with asking(self.channel.contact):
            reply = await self.mapping.read()
        if not isinstance(reply, peer_pb2.MapReply):
            raise Conflict("stale_epoch", f"engine {manifest.engine_id} ended")
        if reply.HasField("slots"):
            try:
                self._held.append(await runner.open(_exported(reply.slots), 0))
            except KvferryError as error:  # another host's, or a GPU that is hidden from us: UCX cannot map it either
                log.debug("arena not held", address=self.address, why=str(error))
        self.unmapped = "this daemon is strict" if strict else shorten(reply.refusal, LONGEST)
        try:
            if not self.unmapped:
                await self._map_regions(runner, {region.id: region for region in reply.regions})
        except KvferryError as error:
            regions, self.mapped = self.mapped, {}
            await self._give_up(regions.values())
            self.unmapped = f"{error.message} ({error.code} {error.value})"
            return error.code != "probe_failed"
        return True

    async def _map_regions(self, runner: Runner, offered: Mapping[int, peer_pb2.MappableRegion]) -> None:
        for wanted in self.manifest.regions:
            region = offered.get(wanted.id)
            if region is None or region.nbytes < wanted.nbytes:
                raise Conflict("not_mappable", f"region {wanted.id} of the source is {wanted.kind} memory")
            if region.refusal:
                raise Conflict("not_mappable", f"region {wanted.id} of the source: {region.refusal}")
            probe = Probe(region.probe_offset, region.probe)
            self.mapped[wanted.id] = await runner.open(_exported(region.allocation), region.nbytes, probe)

    async def unmap(self) -> None:
        """Nothing may read from what was mapped any more. Idempotent."""
        if self.mapping is not None:
            self.mapping.cancel()
            self.mapping = None
        every, self.mapped, self._held = [*self.mapped.values(), *self._held], {}, []
        await self._give_up(every)

    async def _give_up(self, every: Iterable[CudaRegion]) -> None:
        if self._runner is not None and (mapped := list(every)):
            try:
                await self._runner.unmap(mapped)
            except KvferryError as error:  # closed: it has unmapped by itself
                log.debug("unmap", error=str(error))

    def let_go(self) -> None:
        """It was only asked who it is: nothing else of it is open."""
        self.channel.close()

    async def close(self) -> None:
        """Nothing reads over NIXL from it any more. What is mapped stays (see `unmap`), but its end is not watched."""
        if self.mapping is not None:
            self.mapping.cancel()
        try:
            if self._stream is not None:
                await self._stream.close()
        finally:
            self.channel.close()

    @property
    def rank(self) -> int:
        return self.manifest.rank


@dataclass(slots=True, eq=False)
class PeerEngine:
    """A peer engine as one engine of ours sees it: all ranks, and the plan between the two."""

    engine_id: str
    epoch: str
    ranks: dict[int, PeerRank]
    plan: Plan
    own: Engine
    """Our engine that reads from it."""
    took_s: defaultdict[str, float]
    """The steps of the handshake with it, those of all ranks together."""
    loaded: list[str] = field(default_factory=list)
    """NIXL names loaded into our engine's agent."""
    place: Peer | None = None
    """Its machine's knowledge of it; None until it is kept."""
    _plan_told: asyncio.Future[peer_pb2.PairRequest] | None = None
    """The plan as all ranks are told of it, once any was."""

    @property
    def users(self) -> int:
        """Transfers that read or may still be written to: the names stay loaded until they are quiet."""
        return self.place.users if self.place is not None else 0

    @property
    def addresses(self) -> set[str]:
        """Addresses by which it is known."""
        return self.place.addresses if self.place is not None else set()

    @property
    def stale(self) -> bool:
        return self.place is not None and self.place.stale

    @property
    def home(self) -> Home:
        return Home(self.epoch, tuple(self.ranks[rank].address for rank in sorted(self.ranks)))

    @property
    def lost(self) -> bool:
        """Whether a daemon of it has gone since the handshake, which may be with another by now in the same epoch; or
        it knows our engine by a roster that is over."""
        key = self.own.reader_key(self.engine_id)
        return any(rank.lost or rank.opening.reader.key != key for rank in self.ranks.values())

    @property
    def unmapped(self) -> dict[int, str]:
        """Why the memory of a rank that is read is not mapped."""
        return {rank: why for rank in self.plan.reads_from if (why := self.ranks[rank].unmapped)}

    def mapped_addresses(self) -> dict[tuple[int, int], int]:
        """Where (rank, region) begins in this process."""
        return {(number, id): each.address for number, rank in self.ranks.items() for id, each in rank.mapped.items()}

    async def pair(self, rank: PeerRank, timeout_s: float, forgotten: str = "") -> str:
        """Have this rank plan as we did, once: both ends then know what a staging slot carries. Its name for the plan,
        which others may find forgotten meanwhile. forgotten: a name that it does not know any more. Raises
        KvferryError."""
        if rank.pairing not in ("", forgotten):
            return rank.pairing
        if forgotten:
            log.info("plan forgotten by its source", engine_id=self.engine_id, rank=rank.rank)
        if self._plan_told is None:  # written once for all ranks, and not by the loop where that takes long
            manifests = *self.plan.sources.values(), self.plan.destination
            self._plan_told = beside(COMPONENT_AS * sum(len(each.components) for each in manifests), self._plan_to_tell)
        request = await asyncio.shield(self._plan_told)
        async with asking(rank.channel.contact):
            reply = await rank.stub.Pair(request, timeout=timeout_s)
        rank.pairing = reply.pairing
        return reply.pairing

    def _plan_to_tell(self) -> peer_pb2.PairRequest:
        sources = [manifest_to_proto(source) for source in self.plan.sources.values()]
        destination = manifest_to_proto(self.plan.destination)
        return peer_pb2.PairRequest(
            engine_id=self.engine_id, epoch=self.epoch, sources=sources, destination=destination
        )

    async def close(self) -> None:
        """Nothing reads from it any more, and our engine's agent, which unloads every peer, is closed."""
        await asyncio.gather(
            *(ended([Step("close a peer", rank.close)], **self._about) for rank in self.ranks.values())
        )

    async def unload(self) -> None:
        """Nothing reads from it any more. Each step is taken, whatever has become of the others."""
        ranks, names = self.ranks.values(), self.loaded
        self.loaded = []
        await ended((Step("unmap a peer", rank.unmap) for rank in ranks), **self._about)
        await self.close()
        await ended((Step("unload a peer", partial(self.own.agent.remove_peer, name)) for name in names), **self._about)

    @property
    def _about(self) -> dict[str, object]:
        return {"engine_id": self.own.engine_id, "peer": self.engine_id}


def _exported(given: engine_pb2.CudaAllocation) -> cuda.Exported:
    return cuda.Exported(given.handle, given.offset, given.allocation_nbytes, given.device_uuid)
