"""An engine that this daemon reads from, as one engine of ours knows it since the handshake."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from kvferry.manifest import Manifest
from kvferry.v1 import peer_pb2, peer_pb2_grpc
from kvferry.wire import manifest_to_proto
from kvferryd.engine import Engine
from kvferryd.peers.channels import Channel, asking
from kvferryd.peers.mapping import RankMapping
from kvferryd.peers.reader_stream import ReaderStream
from kvferryd.plan import Plan
from kvferryd.transport import Span


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
    pairing: str = ""
    """The peer's name for the plan between us; empty until it has planned."""
    bytes_read: int = 0
    transfers: int = 0
    _stream: ReaderStream | None = None

    @property
    def address(self) -> str:
        return self.channel.address

    @property
    def stub(self) -> peer_pb2_grpc.PeerAsyncStub:
        return self.channel.stub

    @property
    def stream(self) -> ReaderStream:
        """Its leases, as we read them. A stream that has ended is followed by another."""
        if self._stream is None or self._stream.over:
            self._stream = ReaderStream(self.stub, self.address, self.opening)
        return self._stream

    @property
    def lost(self) -> bool:
        """Whether the source has ended the stream. Another daemon, with other memory, may answer at its address now."""
        return self._stream is not None and self._stream.over

    async def pair(self, plan: Plan, timeout_s: float) -> None:
        """Have this rank plan as we did, once: both ends then know what a staging slot carries. Raises KvferryError."""
        request = peer_pb2.PairRequest(
            engine_id=self.manifest.engine_id,
            epoch=self.manifest.epoch,
            sources=[manifest_to_proto(source) for source in plan.sources.values()],
            destination=manifest_to_proto(plan.destination),
        )
        async with asking(self.address):
            self.pairing = (await self.stub.Pair(request, timeout=timeout_s)).pairing

    async def close(self) -> None:
        """Nothing reads from it any more."""
        if self._stream is not None:
            await self._stream.close()
        await self.channel.close()

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
    addresses: set[str]
    """Under which it is known: those of its ranks, and those that orders named."""
    loaded: list[str] = field(default_factory=list)
    """NIXL names loaded into our engine's agent."""
    users: int = 0
    """Transfers that read or may still be written to: the names stay loaded until they are quiet."""
    stale: bool = False
    used_at: float = field(default_factory=time.monotonic)
    mappings: dict[int, RankMapping] = field(default_factory=dict)
    """Of the ranks that are read, where something could be mapped."""
    unmapped: dict[int, str] = field(default_factory=dict)
    """Why the others could not."""
    watches: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def lost(self) -> bool:
        """Whether a daemon of it has gone since the handshake. The engine may be with another, in the same epoch."""
        return any(rank.lost for rank in self.ranks.values())

    def mapped_addresses(self) -> dict[tuple[int, int], int]:
        """Where (rank, region) begins in this process."""
        return {
            (rank, id): each.address for rank, mapping in self.mappings.items() for id, each in mapping.regions.items()
        }
