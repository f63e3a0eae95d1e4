"""An engine that this daemon reads from, as one engine of ours knows it since the handshake."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import hmac
import time
from collections import defaultdict, deque
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter

from kvferry.manifest import Manifest
from kvferry.protocol.peers import Peer
from kvferry.protocol.peers_events import Home
from kvferry.v1 import peer_pb2, peer_pb2_grpc
from kvferry.wire import manifest_to_proto
from kvferryd.aio import beside
from kvferryd.ending import Step, ended
from kvferryd.engine import Engine
from kvferryd.engine.registration import COMPONENT_AS
from kvferryd.observe import logs
from kvferryd.peers.channels import Channel
from kvferryd.peers.contact import asking
from kvferryd.peers.mapped import MappedMemory
from kvferryd.peers.reader_stream import ReaderStream
from kvferryd.plan import Plan
from kvferryd.transport.read import Span

log = logs.get(__name__)
LATELY = 100
"""Transfers of which a peer's median and its slowest hundredth are made."""

PHASES = ("handshake", "lease", "publish", "fence", "pack", "moving", "verifying")
"""Phases of which a peer's times are kept: what was waited for at it, and what was done with it."""
NO_TIME = dict.fromkeys(PHASES, 0.0)
_spent = itemgetter(*PHASES)
MINUTES = 5
"""The worst of a phase is that of the last so many."""


@dataclass(frozen=True, slots=True)
class Staging:
    """A peer's staging arena, which it packs slot by slot."""

    span: Span
    slot_nbytes: int


@dataclass(slots=True, eq=False)
class Figures:
    """All that was read of a rank."""

    bytes_read: int = 0
    transfers: int = 0
    path: str = ""
    """The path of the last transfer."""
    lately: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=LATELY))
    """For each of the last transfers: its milliseconds without waits, and bytes a second while they moved."""
    phases: deque[tuple[float, ...]] = field(default_factory=lambda: deque(maxlen=LATELY))
    """For each of the last transfers, failed ones too: the milliseconds of PHASES."""
    worst: dict[int, tuple[float, ...]] = field(default_factory=dict)
    """Keyed by minute of the monotonic clock: the most milliseconds of each of PHASES."""

    def add(self, phases_ms: dict[str, float]) -> None:
        """A transfer has ended. phases_ms: of any names; those of PHASES that it has not took no time."""
        spent, minute = _spent(NO_TIME | phases_ms), int(time.monotonic() // 60)
        self.phases.append(spent)
        self.worst[minute] = tuple(map(max, self.worst.get(minute, spent), spent))
        if len(self.worst) > MINUTES:
            del self.worst[min(self.worst)]

    def worst_ms(self) -> tuple[float, ...]:
        """Each of PHASES, in the last MINUTES."""
        since = int(time.monotonic() // 60) - MINUTES
        return tuple(map(max, zip(*(ms for minute, ms in self.worst.items() if minute > since), strict=True)))


@dataclass(slots=True, eq=False)
class PeerRank:
    """A rank of a peer engine: its manifest, and how to read from it."""

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
    ucx: str = ""
    """The addresses at which UCX listens there for TCP, in its own words; empty for none, or where it says none."""
    rest: str = ""
    """The URL of its daemon's REST service, in its own words; empty where it does not say."""
    pairing: str = ""
    """The peer's name for the plan between us; empty until it has planned."""
    figures: Figures = field(default_factory=Figures)
    mapped: MappedMemory = field(init=False)
    _stream: ReaderStream | None = None

    def __post_init__(self) -> None:
        self.mapped = MappedMemory(self.channel, self.manifest, self.staging.span.nbytes if self.staging else 0)

    @property
    def address(self) -> str:
        return self.channel.address

    @property
    def readable(self) -> list[Span]:
        """The spans that it lets us read."""
        regions = [self.regions[id] for id in sorted(self.regions)]
        return [*regions, self.staging.span] if self.staging else regions

    @property
    def slots_here(self) -> int | None:
        """The address of its staging arena in this process; None where it is not mapped."""
        return self.mapped.slots.address if self.mapped.slots else None

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

    def let_go(self) -> None:
        """It was only asked who it is: nothing else of it is open."""
        self.channel.close()

    async def close(self) -> None:
        """Nothing reads over NIXL from it any more. Mapped memory stays, but its end is not watched."""
        self.mapped.hang_up()
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
        key = _reader_key(self.own.roster.key, self.engine_id)
        return any(rank.lost or rank.opening.reader.key != key for rank in self.ranks.values())

    @property
    def unmapped(self) -> dict[int, str]:
        """Why the memory of a rank that is read is not mapped."""
        return {rank: why for rank in self.plan.reads_from if (why := self.ranks[rank].mapped.refusal)}

    @property
    def unmapped_slots(self) -> dict[int, str]:
        """Why the staging arena of a rank that is read is not mapped."""
        read = ((number, self.ranks[number]) for number in self.plan.reads_from)
        return {number: why for number, rank in read if rank.staging and (why := rank.mapped.slots_refusal)}

    def mapped_addresses(self) -> dict[tuple[int, int], int]:
        """The address of (rank, region) in this process."""
        every = ((number, rank.mapped.regions) for number, rank in self.ranks.items())
        return {(number, id): each.address for number, regions in every for id, each in regions.items()}

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
        await ended((Step("unmap a peer", rank.mapped.unmap) for rank in ranks), **self._about)
        await self.close()
        await ended((Step("unload a peer", partial(self.own.agent.remove_peer, name)) for name in names), **self._about)

    @property
    def _about(self) -> dict[str, object]:
        return {"engine_id": self.own.engine_id, "peer": self.engine_id}


def as_reader(engine: Engine, source: str) -> peer_pb2.Reader:
    """The reader that this engine is to engine `source`, which knows all ranks of it as one reader by its key."""
    return peer_pb2.Reader(**engine.session.rank._asdict(), key=_reader_key(engine.roster.key, source))


@functools.lru_cache(maxsize=4096)  # every transfer asks
def _reader_key(roster_key: bytes, source: str) -> bytes:
    """Each source is given another."""
    return hmac.digest(roster_key, source.encode(), hashlib.sha256)
