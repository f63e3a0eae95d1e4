"""A reader that has chunks packed and never says that it has read them, so that a source's slots stay taken."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from fleet import TIMEOUT_S, ByHand, peer_stub
from ranks import TestEngine

from kvferry.manifest import Manifest
from kvferry.tables import Tables
from kvferry.v1 import layout_pb2, peer_pb2
from kvferry.wire import manifest_to_proto, tables_from_proto
from kvferryd.staging.share import packs, share_of

CHUNK = 16 << 10
SLOTS = 3
"""As many of four as one direction may have."""
READING = 1


@dataclass
class Hog:
    """Speaks to rank 0 of `source` as a daemon with the manifest `own` would. `opening`: a good one."""

    by_hand: ByHand
    opening: peer_pb2.PackOpen

    async def pack(self, **said: object) -> None:
        """About the reading that is open, and its first packing unless another is named."""
        told = {"reading": READING, "packing": 1} | said
        await self.by_hand.say(pack=peer_pb2.Pack(**told))  # type: ignore[arg-type]

    async def hears(self) -> peer_pb2.PackReply:
        reply = await asyncio.wait_for(self.by_hand.call.read(), TIMEOUT_S)
        assert isinstance(reply, peer_pb2.ReadReply)
        assert reply.HasField("pack"), reply
        return reply.pack

    async def packed(self, chunks: int, **said: object) -> list[peer_pb2.Packed]:
        """Say this and hear of so many chunks that are packed."""
        await self.pack(**said)
        packed: list[peer_pb2.Packed] = []
        async with asyncio.timeout(TIMEOUT_S):
            while len(packed) < chunks:
                reply = await self.hears()
                assert not reply.HasField("problem"), reply
                packed += reply.packed
        return packed

    @asynccontextmanager
    async def holding(self, slots: int = SLOTS) -> AsyncIterator[list[peer_pb2.Packed]]:
        """Slots are packed for it inside this block."""
        packed = await self.packed(slots, open=self.opening, want=range(slots))
        try:
            yield packed
        finally:
            self.by_hand.call.cancel()


@asynccontextmanager
async def hog(source: TestEngine, own: Manifest, request_id: str, tokens: int) -> AsyncIterator[Hog]:
    """It has a lease of its own open."""
    _, blocks = source.filled(tokens)
    await source.publish(request_id, blocks, tokens)
    manifests = [rank.manifest for rank in source.ranks]
    async with peer_stub(source.daemons[0]) as stub:
        reader = peer_pb2.Reader(engine_id="hog", epoch="1", rank=0, world_size=1)
        by_hand = ByHand(stub, peer_pb2.ReadOpening(engine_id=source.engine_id, epoch=source.epoch, reader=reader))
        lease = (await by_hand.open(request_id, READING)).update
        paired = await stub.Pair(
            peer_pb2.PairRequest(
                engine_id=source.engine_id,
                epoch=source.epoch,
                sources=[manifest_to_proto(manifest) for manifest in manifests],
                destination=manifest_to_proto(own),
            )
        )
        opening = peer_pb2.PackOpen(
            word=lease.word,
            version=lease.version,
            pairing=paired.pairing,
            tokens=layout_pb2.TokenRange(start=0, stop=tokens),
            states=True,
            chunk_nbytes=CHUNK,
        )
        wants(opening, manifests, own, tables_from_proto(lease.tables), tokens)
        try:
            yield Hog(by_hand, opening)
        finally:
            by_hand.call.cancel()


def wants(opening: peer_pb2.PackOpen, sources: Sequence[Manifest], own: Manifest, tables: Tables, tokens: int) -> None:
    """Everything, into blocks that need not exist: only the shape of its tables is told."""
    paged, state = own.groups
    for group, blocks in ((paged, -(-tokens // paged.block_size)), (state, 1)):
        opening.tables[group.name].CopyFrom(peer_pb2.TableShape(first_token=0, blocks=blocks))
    chunks = packs(share_of(sources, own, 0), 0, tables, opening)
    opening.chunks, opening.nbytes = len(chunks), sum(chunk.nbytes for chunk in chunks)
