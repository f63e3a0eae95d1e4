"""The transcripts of tests/simulation, played by a daemon: its client publishes, and readers speak gRPC."""

from __future__ import annotations

import asyncio
import itertools
import re
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from fleet import SPOKEN, TIMEOUT_S, ByHand, peer_stub
from lives import engine_on
from ranks import Shape, TestEngine

from kvferry.engine import Lease
from kvferry.v1 import layout_pb2, peer_pb2, peer_pb2_grpc
from kvferry.wire import announced_as, manifest_from_proto, manifest_to_proto, tables_from_proto
from kvferryd.demo.fleet import DaemonService
from kvferryd.staging.arena import SLOT_ALIGN
from kvferryd.staging.share import packs, share_of, wanting

sys.path.append(str(Path(__file__).parents[1] / "simulation"))
from transcript import TRANSCRIPTS, play, update

pytestmark = pytest.mark.anyio
ONE, MOST = Shape.tp(1, num_blocks=64), 30
EXPIRED = re.compile(r"lease (\d+) of (\w+) is expired")
"""Leases whose time to live is short. No other ends by it, however long a line takes."""


class Reader:
    """The words that a reader hears, in order."""

    def __init__(self, stub: peer_pb2_grpc.PeerAsyncStub, name: str, engine: TestEngine) -> None:
        who = peer_pb2.Reader(engine_id=name, epoch="1", rank=0, world_size=1)
        self.hand = ByHand(stub, peer_pb2.ReadOpening(engine_id=engine.engine_id, epoch=engine.epoch, reader=who))
        self._heard: list[peer_pb2.ReadReply] = []
        self.updates: dict[int, peer_pb2.LeaseUpdate] = {}
        self.packed: dict[int, peer_pb2.PackOpen] = {}

    async def hears(self, reading: int, announced: str = "") -> peer_pb2.ReadReply:
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                for reply in self._heard:
                    if reply.announced.request_id == announced and reply.reading == reading:
                        self._heard.remove(reply)
                        return reply
                told = await self.hand.call.read()
                assert isinstance(told, peer_pb2.ReadReply), "the stream is over"
                self._heard += told.several.replies if told.HasField("several") else (told,)


class Daemon:
    def __init__(
        self, stub: peer_pb2_grpc.PeerAsyncStub, met: layout_pb2.Manifest, engine: TestEngine, request_id: str,
        transcript: str,
    ) -> None:  # fmt: skip
        """met: the engine, as it was met."""
        self._stub, self._met, self._engine = stub, met, engine
        self._name = lambda name: f"{request_id}-{name}"
        self._blocks = {name: engine.take(MOST) for name in "rs"}
        self._short = {(name, int(lease)) for lease, name in EXPIRED.findall(transcript)}
        self._leases: dict[tuple[str, int], Lease] = {}
        self._readers: dict[str, Reader] = {}
        self._packings = itertools.count(1)
        self._packing: dict[tuple[str, int], tuple[int, int]] = {}

    def _reader(self, who: str) -> Reader:
        if who not in self._readers:
            self._readers[who] = Reader(self._stub, who, self._engine)
        return self._readers[who]

    async def publishes(self, name: str, lease: int, tokens: int, *, more: bool, readers: int) -> None:
        client, tables = self._engine.ranks[0].client, self._blocks[name].tables()
        ttl_s = 0.3 if (name, lease) in self._short else TIMEOUT_S
        self._leases[name, lease] = await client.publish(
            self._name(name), tables, tokens, more=more, ttl_s=ttl_s, readers=readers, lease=lease
        )

    async def revokes(self, name: str) -> None:
        await self._engine.ranks[0].client.abort(self._name(name))

    async def engine_hears(self, name: str, lease: int) -> str:
        async with asyncio.timeout(TIMEOUT_S):
            return (await self._leases[name, lease].ended()).value

    async def opens(self, who: str, reading: int, name: str, lease: int) -> None:
        opening = peer_pb2.LeaseOpen(reading=reading, request_id=self._name(name), lease=lease)
        await self._reader(who).hand.say(open=opening)

    async def hears(self, who: str, reading: int) -> str:
        reader = self._reader(who)
        reply = await reader.hears(reading)
        if reply.HasField("update"):
            reader.updates[reading] = reply.update
            return update(reply.update.lease, reply.update.num_tokens, more=reply.update.more)
        if reply.HasField("pack"):
            count = len(reply.pack.packed)
            while count and count < self._packing[who, reading][1]:
                count += len((await reader.hears(reading)).pack.packed)
            return reply.pack.problem.code or ("vouched" if reply.pack.vouched else "all is packed")
        return "unpublished" if reply.HasField("unpublished") else reply.problem.code

    async def is_told(self, who: str, name: str) -> str:
        told = (await self._reader(who).hears(0, announced_as(self._name(name)))).announced.update
        return update(told.lease, told.num_tokens, more=told.more)

    async def closes(self, who: str, reading: int, name: str, lease: int, *, complete: bool) -> None:
        closing = peer_pb2.LeaseClose(reading=reading, lease=lease, complete=complete)
        if name:
            closing.request_id = self._name(name)
        await self._reader(who).hand.say(close=closing)

    async def packs(self, who: str, reading: int) -> None:
        """The reader has the same shape, and wants two chunks at most."""
        source, told = manifest_from_proto(self._met), self._reader(who).updates[reading]
        own = source.of_engine(who, "1")
        pairing = await self._stub.Pair(
            peer_pb2.PairRequest(
                engine_id=source.engine_id, epoch=source.epoch, sources=[self._met], destination=manifest_to_proto(own)
            )
        )
        tables, span = tables_from_proto(told.tables), (0, told.num_tokens)
        whole = packs(share_of([source], own, 0), 0, tables, wanting(tables, span, states=True, chunk_nbytes=1 << 20))
        half = -(-sum(chunk.nbytes for chunk in whole) // 2 // SLOT_ALIGN) * SLOT_ALIGN
        opening = wanting(tables, span, states=True, chunk_nbytes=half)
        chunks = packs(share_of([source], own, 0), 0, tables, opening)
        nbytes = sum(chunk.nbytes for chunk in chunks)
        opening.MergeFrom(
            peer_pb2.PackOpen(
                word=told.word, version=told.version, pairing=pairing.pairing, chunks=len(chunks), nbytes=nbytes
            )
        )
        number = next(self._packings)
        self._packing[who, reading] = number, len(chunks)
        pack = peer_pb2.Pack(reading=reading, packing=number, open=opening, want=range(len(chunks)))
        await self._reader(who).hand.say(pack=pack)

    async def has_read(self, who: str, reading: int) -> None:
        number, chunks = self._packing[who, reading]
        pack = peer_pb2.Pack(reading=reading, packing=number, read=range(chunks), vouch=True)
        await self._reader(who).hand.say(pack=pack)

    async def parts(self, who: str) -> None:
        self._readers.pop(who).hand.call.cancel()

    def part_all(self) -> None:
        for reader in self._readers.values():
            reader.hand.call.cancel()


@pytest.mark.parametrize("transcript", TRANSCRIPTS.values(), ids=TRANSCRIPTS)
async def test_a_daemon_plays_it(transcript: str, near: DaemonService, stack: AsyncExitStack, request_id: str) -> None:
    engine, _ = await engine_on(stack, f"told-{request_id}", near, ONE)
    stub = await stack.enter_async_context(peer_stub(near))
    asked = peer_pb2.HandshakeRequest(**SPOKEN, engine_id=engine.engine_id, staging=True)
    daemon = Daemon(stub, (await stub.Handshake(asked)).manifest, engine, request_id, transcript)
    stack.callback(daemon.part_all)
    await play(transcript, daemon)
