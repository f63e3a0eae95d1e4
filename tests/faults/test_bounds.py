"""What one caller may take of a daemon: each bound is reached here, and others are served meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import grpc
import httpx
import pytest
from fleet import TIMEOUT_S, ByHand, Daemons, peer_stub, refusal, until
from lives import engine_on, published, receives
from test_peer_secret import secret_file

from kvferry.v1 import layout_pb2, peer_pb2, peer_pb2_grpc
from kvferryd.api.callers import MAX_FROM_ONE, MAX_WAITING
from kvferryd.demo.fleet import DaemonService
from kvferryd.transport import TransportError
from kvferryd.transport.metadata import MAX_NBYTES, parse

pytestmark = pytest.mark.anyio
STRANGER = "127.0.0.2"
STREAMS_OF_ONE = 90
"""gRPC opens at most 100 on one connection."""


@asynccontextmanager
async def from_address(daemon: DaemonService, address: str) -> AsyncIterator[peer_pb2_grpc.PeerAsyncStub]:
    """Through a relay that dials the daemon from this address: gRPC cannot choose its own."""
    host, _, port = daemon.peer.rpartition(":")

    async def passed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while chunk := await reader.read(1 << 16):
                writer.write(chunk)
                await writer.drain()
        writer.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(host, int(port), local_addr=(address, 0))
        with contextlib.suppress(asyncio.CancelledError):  # asyncio logs the end of the test's loop as an error
            await asyncio.gather(passed(reader, back), passed(there, writer))

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    options = [("grpc.use_local_subchannel_pool", 1)]
    at = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with grpc.aio.insecure_channel(at, options=options) as channel:
        try:
            yield peer_pb2_grpc.PeerStub(channel)
        finally:
            server.close()


@pytest.mark.timeout(300)
async def test_streams_of_one_address_do_not_keep_others_out(daemons: Daemons, stack: AsyncExitStack) -> None:
    (there,), (here,) = await daemons.start("besieged-s"), await daemons.start("besieged-r")
    source, _ = await engine_on(stack, "besieged-s", there)
    reader, _ = await engine_on(stack, "besieged-r", here)
    asked = peer_pb2.MapRequest(engine_id="besieged-s", epoch=source.epoch)
    held = []
    stub = None
    for number in range(MAX_FROM_ONE):
        if number % STREAMS_OF_ONE == 0:
            stub = await stack.enter_async_context(from_address(there, STRANGER))
        assert stub is not None
        call = stub.Map(asked)
        assert isinstance(await call.read(), peer_pb2.MapReply)
        held.append(call)
    one_more = await stack.enter_async_context(from_address(there, STRANGER))
    error = await refusal(one_more.Map(asked).read())
    assert (error.code, error.value) == ("too_many_calls", f"ipv4:{STRANGER}")
    kv, _ = await published(source, "r")
    await receives(reader, "r", kv, source.source())
    held.pop().cancel()

    async def let_in() -> bool:
        with contextlib.suppress(grpc.aio.AioRpcError):
            return isinstance(await one_more.Map(asked).read(), peer_pb2.MapReply)
        return False

    await until(let_in, "there is room again")
    for call in held:
        call.cancel()


def hostile(nbytes: int) -> layout_pb2.Manifest:
    """Well-formed but for its last component, of about so many bytes."""
    manifest = layout_pb2.Manifest(engine_id="hostile", epoch="1", rank=0, world_size=1)
    manifest.model.name, manifest.model.fingerprint = "m", "f"
    manifest.regions.add(id=0, kind=layout_pb2.MEMORY_KIND_HOST, nbytes=1 << 40)
    manifest.groups.add(name="full", kind=layout_pb2.GROUP_KIND_PAGED, num_blocks=1024, block_size=16)
    axes = (("block", 1024, 1 << 20), ("slot", 16, 1024), ("head", 8, 128), ("dim", 64, 2))
    one = layout_pb2.Component(group="full", name="k", dtype="float16", region=0)
    for name, extent, stride in axes:
        one.axes.add(name=name, extent=extent, stride=stride)
    count = 1 + nbytes // (one.ByteSize() + 6)
    manifest.components.extend([one] * count)
    for layer, component in enumerate(manifest.components):
        component.layer = layer
    manifest.components[-1].dtype = "none"
    return manifest


@pytest.mark.timeout(300)
async def test_a_large_hostile_manifest_does_not_stop_the_loop(daemons: Daemons, stack: AsyncExitStack) -> None:
    """Seconds of work: others are answered again and again before it is."""
    (daemon,) = await daemons.start("reading")
    engine, _ = await engine_on(stack, "reading", daemon)
    manifest = hostile(4 << 20)
    asked = peer_pb2.PairRequest(engine_id="reading", epoch=engine.epoch, sources=[manifest], destination=manifest)
    stub = await stack.enter_async_context(peer_stub(daemon))
    answered = 0
    async with httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False) as http:
        await http.get(f"{daemon.url}/healthz")
        pairing = asyncio.create_task(refusal(stub.Pair(asked, timeout=4 * TIMEOUT_S)))
        while not pairing.done():
            assert (await http.get(f"{daemon.url}/healthz")).status_code == 200
            answered += 1
    assert (await pairing).code == "unknown_dtype"
    assert answered >= 10


async def test_one_address_waits_for_its_own_turns_only(daemons: Daemons, stack: AsyncExitStack) -> None:
    (daemon,) = await daemons.start("turns")
    engine, _ = await engine_on(stack, "turns", daemon)
    manifest = hostile(1 << 20)
    asked = peer_pb2.PairRequest(engine_id="turns", epoch=engine.epoch, sources=[manifest], destination=manifest)
    stranger = await stack.enter_async_context(from_address(daemon, STRANGER))
    ours = await stack.enter_async_context(peer_stub(daemon))
    many = [asyncio.create_task(refusal(stranger.Pair(asked))) for _ in range(MAX_WAITING + 1)]
    done, waiting = await asyncio.wait(many, return_when=asyncio.FIRST_COMPLETED, timeout=TIMEOUT_S)
    small = peer_pb2.PairRequest(engine_id="turns", epoch=engine.epoch, sources=[hostile(1)], destination=hostile(1))
    assert (await refusal(ours.Pair(small))).code == "unknown_dtype"
    codes = [(await each).code for each in done]
    assert "too_many_calls" in codes
    for each in waiting:
        each.cancel()


async def test_a_reader_has_so_many_readings_on_a_stream(daemons: Daemons, stack: AsyncExitStack) -> None:
    (daemon,) = await daemons.start("readings", 1, "--max-leases", "4")
    engine, _ = await engine_on(stack, "readings", daemon)
    stub = await stack.enter_async_context(peer_stub(daemon))
    reader = peer_pb2.Reader(engine_id="greedy", epoch="1", rank=0, world_size=1)
    greedy = ByHand(stub, peer_pb2.ReadOpening(engine_id="readings", epoch=engine.epoch, reader=reader))
    for number in range(1, 4):  # two wait for their publish: half of all waits; the third is told so
        await greedy.say(open=peer_pb2.LeaseOpen(reading=number, request_id=f"never-{number}"))
    refused = await greedy.heard()
    assert (refused.reading, refused.problem.code) == (3, "full")
    for number in (4, 5):
        await engine.publish(f"r{number}", engine.take(10), 10)
        assert (await greedy.open(f"r{number}", reading=number)).HasField("update")
    await greedy.say(open=peer_pb2.LeaseOpen(reading=6, request_id="r4"))
    assert (await refusal(greedy.call.read())).code == "malformed_read"


async def test_a_connection_that_proves_nothing_is_ended(
    daemons: Daemons, stack: AsyncExitStack, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = secret_file(tmp_path_factory.mktemp("silent") / "secret", "s" * 64)
    (daemon,) = await daemons.start("silent", 1, "--peer-secret-file", str(file))
    host, _, port = daemon.peer.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    stack.callback(writer.close)
    async with asyncio.timeout(TIMEOUT_S):
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""


def test_metadata_of_more_than_a_megabyte_is_not_even_read() -> None:
    with pytest.raises(TransportError) as refused:
        parse("x", b"nixlSerDes|".ljust(MAX_NBYTES + 1, b"x"))
    assert refused.value.code == "malformed_metadata"
    assert str(MAX_NBYTES + 1) in str(refused.value)
