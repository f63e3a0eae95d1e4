"""The answer to a handshake, and the NIXL metadata in it, may be anything. No bytes of it harm the daemon that asked
or the real peer."""

from __future__ import annotations

import contextlib
import os
import random
import struct
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager

import grpc
import pytest
from fleet import SPOKEN, Daemons, peer_stub
from lives import engine_on, reads_from

from kvferry.errors import KvferryError
from kvferry.manifest.model import MOST
from kvferry.schemas import PeerRequest
from kvferry.v1 import peer_pb2, peer_pb2_grpc
from kvferryd.demo.fleet import DaemonService
from kvferryd.engine.registry import MAX_WORLD_SIZE
from kvferryd.staging.arena import SLOT_ALIGN
from kvferryd.transport.metadata import LENGTH, parse
from kvferryd.transport.read import TransportError

pytestmark = pytest.mark.anyio
Reply = peer_pb2.HandshakeReply
SEED = random.randrange(1 << 32)
ANY, WELL_FORMED = (300, 40) if os.environ.get("HYPOTHESIS_PROFILE") == "ci" else (20, 10)
"""Mutations of any byte, and of those that only UCX looks at: all of them in the gate, others each time."""


class Impostor(peer_pb2_grpc.PeerServicer):
    """Answers as the real daemon does, but for the metadata."""

    answers = sys.maxsize
    """Then it is gone."""

    def __init__(self, said: peer_pb2.HandshakeReply) -> None:
        self._said, self.metadata, self.name = said, said.agent_metadata, said.agent_name

    def moves_to(self, address: str) -> None:
        """Say that the engine's only rank is here."""
        del self._said.members[1:]
        self._said.members[0].address = address

    async def Handshake(
        self, request: peer_pb2.HandshakeRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> peer_pb2.HandshakeReply:
        self.answers -= 1
        if self.answers < 0:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "it is gone")
        said = peer_pb2.HandshakeReply()
        said.CopyFrom(self._said)
        said.agent_metadata, said.agent_name = self.metadata, self.name
        return said


@asynccontextmanager
async def impostor(said: peer_pb2.HandshakeReply) -> AsyncIterator[tuple[Impostor, str]]:
    server, service = grpc.aio.server(), Impostor(said)
    peer_pb2_grpc.add_PeerServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield service, f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@pytest.fixture(scope="module")
async def both(daemons: Daemons) -> tuple[DaemonService, DaemonService]:
    """The daemon that is impersonated, and the one that asks."""
    (theirs,), (ours,) = await daemons.start("source"), await daemons.start("reader")
    return theirs, ours


def inner(blob: bytes) -> list[range]:
    """Ranges of the bytes that NIXL hands to UCX as they are: the worker's address, and the key of each descriptor."""
    start = blob.index(b"|c") + 2
    found = [range(start + 8, start + 8 + LENGTH.unpack_from(blob, start)[0])]
    at = blob.index(b"|n", blob.index(b"nixlSDList")) + 2 + 8 + 8 + 1
    while at + 8 < len(blob):
        (length,) = LENGTH.unpack_from(blob, at)
        found.append(range(at + 8 + 24, at + 8 + length))
        at += 8 + length + 1
    return found


def mutated(blob: bytes, rng: random.Random, places: list[range]) -> bytes:
    changed = bytearray(blob)
    for _ in range(rng.choice([1, 1, 2, 4, 8])):
        at = rng.choice(rng.choice(places))
        changed[at] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256), changed[at] ^ (1 << rng.randrange(8))])
    return bytes(changed)


def malformed(blob: bytes) -> Iterator[bytes]:
    """Blobs that NIXL's own reader takes at their word."""
    yield b""
    yield b"nixlSerDes|"
    yield blob[: len(blob) // 2]
    yield blob + b"x"
    yield blob.replace(b"bknd" + struct.pack("<Q", 3) + b"UCX", b"bknd" + struct.pack("<Q", 3) + b"GDS")
    yield blob.replace(b"|t" + struct.pack("<QI", 4, 0), b"|t" + struct.pack("<QI", 4, 77))
    for tag in (b"Agent", b"Conns", b"|c", b"MemSection|nixlSecElms", b"nixlDList", b"|n"):
        at = blob.index(tag) + len(tag)
        for length in (0, 1, 1 << 31, (1 << 64) - 1, (1 << 64) - at):
            yield blob[:at] + struct.pack("<Q", length) + blob[at + 8 :]
    count = blob.index(b"|n") + 2 + 8
    for number in (0, 1 << 20, 1 << 40, (1 << 64) - 1):
        yield blob[:count] + struct.pack("<Q", number) + blob[count + 8 :]
    for key in inner(blob)[1:]:  # UCX's: a map of memory domains, the type of memory, the domains' keys
        yield blob[: key.start] + b"\xff" * 8 + blob[key.start + 8 :]
        for memory_type in (3, 67, 255):
            yield blob[: key.start + 8] + bytes([memory_type]) + blob[key.start + 9 :]


async def test_metadata_that_no_agent_wrote_is_refused_and_the_real_peer_is_read(
    both: tuple[DaemonService, DaemonService], stack: AsyncExitStack, record_property: Callable[[str, object], None]
) -> None:
    record_property("seed", SEED)
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    theirs, ours = both
    source, _ = await engine_on(stack, "source", theirs)
    reader, router = await engine_on(stack, "reader", ours)
    async with peer_stub(theirs) as stub:
        said = await stub.Handshake(peer_pb2.HandshakeRequest(**SPOKEN, engine_id="source"))
    good = said.agent_metadata
    async with impostor(said) as (service, address):
        service.moves_to(address)

        async def dial(metadata: bytes) -> str:
            service.metadata = metadata
            try:
                await router.prewarm(PeerRequest(engine_id="source", address=address))
            except KvferryError as error:
                return error.code
            finally:
                assert ours.process.poll() is None, f"seed {SEED}, {metadata!r}: {ours.tail()}"
            await router.forget_peer("source")
            return "loaded"

        for metadata in malformed(good):
            assert await dial(metadata) == "malformed_metadata", metadata
        service.name = "another"
        assert await dial(good) == "malformed_metadata"
        service.name = said.agent_name
        for _ in range(ANY):
            metadata = mutated(good, rng, [range(len(good))])
            with contextlib.suppress(TransportError):
                parse(said.agent_name, metadata)
                continue  # nothing that NIXL itself reads is wrong with it: the next loop
            assert await dial(metadata) == "malformed_metadata", metadata
        told = {await dial(mutated(good, rng, inner(good))) for _ in range(WELL_FORMED)}
        assert told <= {"loaded", "malformed_metadata", "transport_failed", "peer_unreachable", "peer_lost"}
        assert await dial(good) == "loaded"
    await reads_from(reader, source, "r")


def with_regions(reply: Reply) -> None:
    reply.regions.extend([peer_pb2.RegionAddress()] * MOST["regions"])


def with_members(reply: Reply) -> None:
    reply.members.extend([peer_pb2.Member()] * MAX_WORLD_SIZE)


def with_small_slots(reply: Reply) -> None:
    """Which its own daemon would not pack: of chunks that small it has none."""
    reply.staging.nbytes, reply.staging.slot_nbytes = 1 << 20, SLOT_ALIGN // 2


@pytest.mark.parametrize(
    ("change", "code", "field"),
    [
        (with_regions, "malformed_handshake", "regions"),
        (with_members, "malformed_handshake", "members"),
        (with_small_slots, "protocol", "staging.slot_nbytes"),
    ],
)
async def test_an_answer_beyond_the_bounds_is_refused(
    both: tuple[DaemonService, DaemonService],
    stack: AsyncExitStack,
    change: Callable[[Reply], None],
    code: str,
    field: str,
) -> None:
    theirs, ours = both
    name = change.__name__
    await engine_on(stack, f"{name}-s", theirs)
    _, router = await engine_on(stack, f"{name}-r", ours)
    async with peer_stub(theirs) as stub:
        said = await stub.Handshake(peer_pb2.HandshakeRequest(**SPOKEN, engine_id=f"{name}-s"))
    change(said)
    async with impostor(said) as (service, address):
        service.moves_to(address) if name == "with_small_slots" else None
        with pytest.raises(KvferryError) as refused:
            await router.prewarm(PeerRequest(engine_id=f"{name}-s", address=address))
    assert (refused.value.code, refused.value.field) == (code, field)
