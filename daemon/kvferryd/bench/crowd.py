"""Many peers in one process, for `peers`: sources, or readers of one source.

    python -m kvferryd.bench.crowd FIRST COUNT [ENGINE_ID ADDRESS]

A source is an engine of one rank with a NIXL agent, a peer service and a port of its own. It lacks what its peers do
not see: a REST API, an engine that lives, a process. A reader has an agent, a connection and a stream of its own.
"""

from __future__ import annotations

import asyncio
import ctypes
import secrets
import sys
import uuid

import grpc
import numpy as np

from kvferry.manifest import Manifest, ManifestBuilder, ModelInfo
from kvferry.protocol.roster_events import Member
from kvferry.protocol.session_events import Rank
from kvferry.rpc import PEER_OPTIONS, PROTOCOL_MAX, PROTOCOL_MIN
from kvferry.v1 import peer_pb2, peer_pb2_grpc
from kvferryd.api.callers import Callers
from kvferryd.api.peer import PeerService
from kvferryd.bench.child import tell
from kvferryd.config import Config
from kvferryd.copy.sums import Sums
from kvferryd.engine import Engine
from kvferryd.engine.membership import Membership
from kvferryd.ferry import Ferry
from kvferryd.leases.leases import Leases
from kvferryd.observe.metrics import Metrics
from kvferryd.peers.channels import Channels
from kvferryd.peers.reader_stream import ReaderStream
from kvferryd.transport import nixl
from kvferryd.transport.agent import Agent
from kvferryd.transport.metadata import parse
from kvferryd.transport.read import Span

HOST, MEET_S = "127.0.0.1", 60.0
PROGRESS_DELAY_US = 100_000
"""How long the thread of each NIXL agent sleeps between two looks, microseconds. It is ten times the usual, because
hundreds of agents share a processor. While a peer connects, its agent looks as often as usual."""
BLOCKS, LAYERS, BLOCK, DIM = 16, 32, 16, 16
SHAPE = BLOCKS, LAYERS, 2, BLOCK, DIM
NBYTES = BLOCKS * LAYERS * 2 * BLOCK * DIM


def manifest(engine_id: str, epoch: str, address: int) -> Manifest:
    """The manifest of a cache at this address: as many layers as a real model has, those of a block side by side."""
    builder = ManifestBuilder(engine_id, epoch, ModelInfo(name="m", fingerprint="f"))
    builder.region(0, "host", nbytes=NBYTES, address=address)
    builder.group("full", num_blocks=BLOCKS, block_size=BLOCK)
    cache = np.ctypeslib.as_array((ctypes.c_uint8 * NBYTES).from_address(address)).reshape(SHAPE)
    for layer in range(LAYERS):
        for index, name in enumerate(("k", "v")):
            array = cache[:, layer, index]
            builder.component(
                "full", layer=layer, name=name, array=array, axes=("block", "slot", "dim"), encoding="uint8"
            )
    return builder.build()


async def _source(number: int, metrics: Metrics) -> dict[str, str]:
    """Serve engine peer-NUMBER until the process ends; where it is."""
    server = grpc.aio.server(options=PEER_OPTIONS)
    address = f"{HOST}:{server.add_insecure_port(f'{HOST}:0')}"
    config = Config(peer=address)
    ferry, rank = Ferry(config, metrics), Rank(f"peer-{number}", uuid.uuid4().hex, 0, 1)
    session = await ferry.registry.attach(rank)
    region = await session.add(0, NBYTES, lambda: ferry.memory.allocate(NBYTES))
    leases = Leases(rank.engine_id, rank.epoch, lambda _: None, config.max_leases)
    agent, metadata = await _agent(rank, region.span, leases.words.span)
    # Registering does more than this only for an engine that reads.
    session.engine = Engine(
        session, Membership(rank, {0: Member(address)}), manifest(rank.engine_id, rank.epoch, region.span.address),
        agent, metadata, leases, Sums(),
    )  # fmt: skip
    peer_pb2_grpc.add_PeerServicer_to_server(PeerService(ferry, Callers(config.allow_peers, None)), server)
    await server.start()
    _kept.append(server)
    return {"engine_id": rank.engine_id, "address": address}


async def _reader(number: int, engine_id: str, address: str) -> None:
    """Read from this engine once, and stay its reader until the process ends."""
    config, rank = Config(), Rank(f"reader-{number}", uuid.uuid4().hex, 0, 1)
    agent, _ = await _agent(rank)
    channel = Channels(config).open(address)
    asked = peer_pb2.HandshakeRequest(protocol_min=PROTOCOL_MIN, protocol_max=PROTOCOL_MAX, engine_id=engine_id)
    said = await channel.stub.Handshake(asked, timeout=MEET_S)
    source = parse(said.agent_name, said.agent_metadata)
    await agent.add_peer(source)
    await agent.warm(source.alias, Span(said.regions[0].address, said.regions[0].nbytes, "host"))
    reader = peer_pb2.Reader(**rank._asdict(), key=secrets.token_bytes(32))
    opening = peer_pb2.ReadOpening(
        engine_id=engine_id, epoch=said.manifest.epoch, reader=reader, several=True, agent_name=said.agent_name
    )
    _kept.append(ReaderStream(channel.stub, channel.contact, opening, several=True))


async def _agent(rank: Rank, *spans: Span) -> tuple[Agent, bytes]:
    """With what others need to read these."""
    agent = Agent(f"{rank.engine_id}-{rank.epoch}")
    await agent.start()
    _kept.append(agent)
    return agent, await agent.register(*spans)


_kept: list[object] = []
"""References: servers that nothing holds end."""


async def _main(first: int, count: int, *source: str) -> None:
    nixl.PROGRESS_DELAY_US = PROGRESS_DELAY_US
    numbers, metrics = range(first, first + count), Metrics()
    if source:
        for number in numbers:
            await _reader(number, *source)
    tell({"peers": [] if source else [await _source(number, metrics) for number in numbers]})
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]))
