"""Strict exposure: a peer with all that a daemon tells can read staging slots, and nothing else of it."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from fleet import SPOKEN, TIMEOUT_S, Daemons, peer_stub
from ranks import HND, Kv, Shape, TestEngine

from kvferry.engine import TransferFailed
from kvferry.router import RouterClient
from kvferry.v1 import peer_pb2
from kvferryd.transport.agent import Agent
from kvferryd.transport.metadata import parse
from kvferryd.transport.read import Span, TransportError
from support import refused

pytestmark = pytest.mark.anyio
SHAPE = Shape.tp(1, num_blocks=64)
STRICT = ("--strict", "--arena-mb", "4", "--ucx", "TLS=all")


@pytest.fixture(scope="module")
async def engines(shared_daemons: Daemons) -> AsyncIterator[dict[str, TestEngine]]:
    """Two strict ones, and one as open as the default is."""
    flags = {"strict-p": STRICT, "strict-d": STRICT, "open": ("--way", "direct")}
    started = await asyncio.gather(*(shared_daemons.start(name, 1, *more) for name, more in flags.items()))
    shapes = (SHAPE, Shape.tp(1, axes=HND, block_size=24), SHAPE)
    engines = await asyncio.gather(
        *(TestEngine.start(name, own, shape) for name, own, shape in zip(flags, started, shapes, strict=True))
    )
    yield dict(zip(flags, engines, strict=True))
    await asyncio.gather(*(engine.close() for engine in engines))


async def test_strict_daemons_move_every_byte(engines: dict[str, TestEngine], request_id: str) -> None:
    source, reader = engines["strict-p"], engines["strict-d"]
    kv, published = source.filled(300)
    await source.publish(request_id, published, 300)
    await reader.gets(request_id, kv, source=source.source())
    async with RouterClient(reader.daemons[0].url) as router:
        (record,) = await router.transfers(request_id)
        assert record.path == "staged"
        assert (await router.info()).strict


@pytest.mark.parametrize(("source", "reader"), [("strict-p", "open"), ("open", "strict-d")])
async def test_a_strict_daemon_and_one_that_cannot_stage_say_why_they_do_not_pair(
    engines: dict[str, TestEngine], request_id: str, source: str, reader: str
) -> None:
    kv, published = Kv.random(50), engines[source].take(50)
    engines[source].write(kv, published)
    await engines[source].publish(request_id, published, 50)
    with refused("cannot_stage", TransferFailed) as caught:
        await engines[reader].receive(request_id, engines[reader].take(50), source=engines[source].source())
    assert "strict" in caught.value.message
    assert "no staging arena" in caught.value.message


async def test_who_holds_a_strict_daemons_metadata_can_read_slots_but_not_the_pool(
    engines: dict[str, TestEngine],
) -> None:
    engine = engines["strict-p"]
    async with handshaken(engine) as (agent, said):
        assert not said.regions
        slot = Span(said.staging.address, said.staging.slot_nbytes, "host")
        await read(agent, said.agent_name, slot)
        with pytest.raises(TransportError):
            await read(agent, said.agent_name, pool(engine))
    assert engine.daemons[0].process.poll() is None


async def test_of_an_open_daemon_the_very_same_read_succeeds(engines: dict[str, TestEngine]) -> None:
    engine = engines["open"]
    async with handshaken(engine) as (agent, said):
        assert said.regions[0].address == pool(engine).address
        assert not said.HasField("staging")
        got = await read(agent, said.agent_name, pool(engine))
    assert np.array_equal(got, engine.ranks[0].memory[: len(got)])


async def read(agent: Agent, peer: str, span: Span) -> np.ndarray:
    here = np.zeros(4096, dtype=np.uint8)
    await agent.register(Span(here.ctypes.data, here.nbytes, "host"))
    own, far = (np.array([(at, here.nbytes, 0)], dtype=np.uint64) for at in (here.ctypes.data, span.address))
    reading = agent.read(peer, own, far, "DRAM", "DRAM")
    async with asyncio.timeout(TIMEOUT_S):
        await reading.done
    return here


def pool(engine: TestEngine) -> Span:
    """The engine's cache as its daemon has it mapped: what a peer might have learnt or guessed."""
    region = engine.ranks[0].region
    maps = Path(f"/proc/{engine.daemons[0].process.pid}/maps").read_text().splitlines()
    inode = os.fstat(region.file.fileno()).st_ino
    (line,) = [line for line in maps if line.split()[4] == str(inode)]
    return Span(int(line.split("-")[0], 16), region.nbytes, "host")


@asynccontextmanager
async def handshaken(engine: TestEngine) -> AsyncIterator[tuple[Agent, peer_pb2.HandshakeReply]]:
    """A NIXL agent that has loaded the metadata, and all that the daemon says to a peer."""
    async with peer_stub(engine.daemons[0]) as stub:
        said = await stub.Handshake(peer_pb2.HandshakeRequest(**SPOKEN, engine_id=engine.engine_id))
    agent = Agent(f"spy-{uuid.uuid4().hex}")
    await agent.start()
    try:
        metadata = parse(said.agent_name, said.agent_metadata)
        await agent.add_peer(metadata)
        said.agent_name = metadata.alias
        yield agent, said
    finally:
        await agent.close()
