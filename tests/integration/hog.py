"""A reader that has chunks packed and never says that it has read them, so that a source's slots stay taken."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
from fleet import TIMEOUT_S, ByHand, peer_stub
from ranks import Kv, TestEngine

from kvferry.manifest import Manifest
from kvferry.tables import Tables
from kvferry.v1 import layout_pb2, peer_pb2, peer_pb2_grpc
from kvferry.wire import manifest_to_proto, tables_from_proto
from kvferryd.transfer.share import Wanted, packs, share_of

CHUNK = 16 << 10
SLOTS = 3
"""As many of four as one direction may have."""


@dataclass
class Hog:
    """Speaks to rank 0 of `source` as a daemon with the manifest `own` would. `opening`: a good one."""

    stub: peer_pb2_grpc.PeerAsyncStub
    opening: peer_pb2.PackOpen

    def pack(self) -> grpc.aio.StreamStreamCall[peer_pb2.PackRequest, peer_pb2.Packed]:
        return self.stub.Pack(timeout=TIMEOUT_S)

    async def said(self, *requests: peer_pb2.PackRequest) -> list[peer_pb2.Packed]:
        """Say all of this, half-close, and hear what comes."""
        call = self.pack()
        for request in requests:
            await call.write(request)
        await call.done_writing()
        return [packed async for packed in call]

    @asynccontextmanager
    async def holding(self, slots: int = SLOTS) -> AsyncIterator[list[peer_pb2.Packed]]:
        """Slots are packed for it inside this block."""
        call = self.pack()
        await call.write(peer_pb2.PackRequest(open=self.opening, want=range(slots)))
        packed = []
        async with asyncio.timeout(TIMEOUT_S):
            while len(packed) < slots:
                packed.append(await call.read())
        assert all(isinstance(each, peer_pb2.Packed) for each in packed)
        try:
            yield packed
        finally:
            call.cancel()


@asynccontextmanager
async def hog(source: TestEngine, own: Manifest, request_id: str, tokens: int) -> AsyncIterator[Hog]:
    """It has a lease of its own open."""
    kv, blocks = Kv.random(tokens), source.take(tokens)
    source.write(kv, blocks)
    await source.publish(request_id, blocks, tokens)
    manifests = [rank.manifest for rank in source.ranks]
    async with peer_stub(source.daemons[0]) as stub:
        reader = peer_pb2.Reader(engine_id="hog", epoch="1", rank=0, world_size=1)
        by_hand = ByHand(stub, peer_pb2.ReadOpening(engine_id=source.engine_id, epoch=source.epoch, reader=reader))
        lease = (await by_hand.open(request_id)).update
        paired = await stub.Pair(
            peer_pb2.PairRequest(
                engine_id=source.engine_id,
                epoch=source.epoch,
                sources=[manifest_to_proto(manifest) for manifest in manifests],
                destination=manifest_to_proto(own),
            )
        )
        opening = peer_pb2.PackOpen(
            engine_id=source.engine_id,
            epoch=source.epoch,
            request_id=request_id,
            reader=reader,
            secret=lease.secret,
            pairing=paired.pairing,
            version=lease.version,
            tokens=layout_pb2.TokenRange(start=0, stop=tokens),
            states=True,
            chunk_nbytes=CHUNK,
        )
        wants(opening, manifests, own, tables_from_proto(lease.tables), tokens)
        try:
            yield Hog(stub, opening)
        finally:
            by_hand.call.cancel()


def wants(opening: peer_pb2.PackOpen, sources: Sequence[Manifest], own: Manifest, tables: Tables, tokens: int) -> None:
    """Everything, into blocks that need not exist: only the shape of its tables is told."""
    paged, state = own.groups
    for group, blocks in ((paged, -(-tokens // paged.block_size)), (state, 1)):
        opening.tables[group.name].CopyFrom(peer_pb2.TableShape(first_token=0, blocks=blocks))
    theirs = dict(opening.tables)
    wanted = Wanted((0, tokens), True, theirs)  # type: ignore[arg-type]  # has the same fields
    chunks = packs(share_of(sources, own, 0), 0, tables, wanted, CHUNK)
    opening.chunks, opening.nbytes = len(chunks), sum(chunk.nbytes for chunk in chunks)
