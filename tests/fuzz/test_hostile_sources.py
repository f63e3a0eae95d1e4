"""A source that answers what no daemon of ours answers: whoever reads from it fails with a reason, and lives on.

Its NIXL metadata is the real one: tests/faults/test_hostile_metadata.py is about the other.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator

import pytest
from fleet import SPOKEN, peer_stub, serving, until
from hostile import Hostile
from target import Target

from kvferry.engine import Received
from kvferry.errors import KvferryError
from kvferry.schemas import PeerRequest
from kvferry.v1 import peer_pb2, peer_pb2_grpc
from kvferry.wire import tables_to_proto

pytestmark = pytest.mark.anyio
counts = pytest.mark.parametrize("count", [25, pytest.param(120, marks=pytest.mark.long)])
KEPT = ("agent_name", "agent_metadata")
WAYS = ("direct", "staged", "auto")


class Impostor(peer_pb2_grpc.PeerServicer):
    """`said` is the real source's handshake, at this address. Changes in it and in all else are up to chance."""

    def __init__(self, target: Target, making: Hostile) -> None:
        self._target, self._making = target, making
        self.said = peer_pb2.HandshakeReply()
        self.honest = 0.0
        """How often an answer is right."""

    def _answer(self, good: peer_pb2.ReadReply) -> peer_pb2.ReadReply:
        if self._making.rng.random() < self.honest:
            return good
        return self._making.message(peer_pb2.ReadReply, good)

    async def Handshake(self, request: peer_pb2.HandshakeRequest, context: object) -> peer_pb2.HandshakeReply:
        if self._making.rng.random() < self.honest:
            return self.said
        changed = self._making.message(peer_pb2.HandshakeReply, self.said)
        for name in KEPT:
            setattr(changed, name, getattr(self.said, name))
        return changed

    async def Map(self, request: peer_pb2.MapRequest, context: object) -> AsyncIterator[peer_pb2.MapReply]:
        yield self._making.message(peer_pb2.MapReply, peer_pb2.MapReply(refusal="host memory"))

    async def Pair(self, request: peer_pb2.PairRequest, context: object) -> peer_pb2.PairReply:
        return self._making.message(peer_pb2.PairReply, peer_pb2.PairReply(pairing="x"))

    async def Abort(self, request: peer_pb2.AbortRequest, context: object) -> peer_pb2.AbortReply:
        return peer_pb2.AbortReply()

    async def Read(
        self, requests: AsyncIterator[peer_pb2.ReadRequest], context: object
    ) -> AsyncIterator[peer_pb2.ReadReply]:
        blocks = self._target.friend.take(20)
        update = peer_pb2.LeaseUpdate(
            tables=tables_to_proto(blocks.tables()), num_tokens=20, word=1, version=1, lease=1,
            word_address=self.said.regions[0].address,
        )  # fmt: skip
        async for request in requests:
            if request.HasField("open"):
                yield self._answer(peer_pb2.ReadReply(reading=request.open.reading, update=update))
            elif request.HasField("pack"):
                packed = peer_pb2.Packed(chunk=0, address=self.said.staging.address, nbytes=4096, kept_ms=500)
                reply = peer_pb2.PackReply(packing=request.pack.packing, packed=[packed])
                yield self._answer(peer_pb2.ReadReply(reading=request.pack.reading, pack=reply))


@counts
async def test_answers_of_a_source(attacked: Target, rng: random.Random, count: int) -> None:
    making = Hostile(rng)
    service = Impostor(attacked, making)
    async with peer_stub(attacked.friend.daemons[0]) as stub, serving(service) as address:
        asked = peer_pb2.HandshakeRequest(**SPOKEN, engine_id=attacked.friend.engine_id)
        service.said = await stub.Handshake(asked)
        service.said.members[0].address = address
        making.known = {
            "address": [*attacked.forbidden.addresses, attacked.silent, address],
            "engine_id": [attacked.friend.engine_id, attacked.engine.engine_id],
            "reading": [0, 1, 2], "word": [1], "block_ids": [0, 1, 2, 31, 32, 33], "lease": [0, 1, 2],
        }  # fmt: skip
        await attacked.router.forget_peer(attacked.friend.engine_id)
        for n in range(count):
            service.honest = 0.0 if n % 2 else 0.7
            await fails_with_a_reason(attacked, address, f"hostile-{n}", WAYS[n % 3])
            attacked.loaded += 1
            await forgotten(attacked)

        async def the_real_one_is_met() -> bool:
            await forgotten(attacked)  # an attempt given up just now may have given the id to the impostor
            with contextlib.suppress(KvferryError):
                await attacked.router.prewarm(
                    PeerRequest(engine_id=attacked.friend.engine_id, address=attacked.friend.address)
                )
                return True
            return False

        await until(the_real_one_is_met, "the id is the real one's again")


async def forgotten(target: Target) -> None:
    for peer in await target.router.peers():
        await target.router.forget_peer(peer.engine_id)


async def fails_with_a_reason(target: Target, address: str, request_id: str, way: str) -> None:
    client = target.engine.ranks[0].client
    source = target.friend.source().model_copy(update={"address": address})
    try:
        await target.router.prewarm(PeerRequest(engine_id=source.engine_id, address=address))
        received = await client.receive(
            request_id, target.engine.take(20).tables(), (0, 20), source=source, way=way, deadline_s=2
        )
        assert isinstance(received, Received)
        code = "done"
    except KvferryError as error:
        code = error.code
    target.said[code] += 1
    assert code != "internal", request_id
