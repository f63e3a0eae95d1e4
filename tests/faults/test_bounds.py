"""The share of a daemon that one caller may take: each bound is reached here, and others are served meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import resource
import select
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import grpc
import httpx
import pytest
from authority import Authority, replace
from bounded import bounded
from fleet import TIMEOUT_S, ByHand, Daemons, open_files, peer_stub, refusal, resident_mb, screens, until
from lives import engine_on, published, reads_from
from pair import all_read, meets, waits_for
from ranks import Kv, Shape
from test_peer_secret import secret_file
from wire import TCP

from kvferry.engine import TransferFailed
from kvferry.errors import KvferryError
from kvferry.rpc import error_of
from kvferry.schemas import Awaited, OrderBody, PeerRequest, SourceBody
from kvferry.v1 import layout_pb2, peer_pb2, peer_pb2_grpc
from kvferry.wire import manifest_from_proto
from kvferryd.api.callers import MAX_FROM_ONE, MAX_WAITING
from kvferryd.api.rest.explain import AT_ONCE
from kvferryd.demo.fleet import DaemonService
from kvferryd.transport.metadata import MAX_NBYTES, parse
from kvferryd.transport.read import TransportError
from stopping import stopped
from support import refused

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


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_streams_of_one_address_do_not_keep_others_out(daemons: Daemons, stack: AsyncExitStack) -> None:
    (there,), (here,) = await daemons.start("besieged-s"), await daemons.start("besieged-r")
    source, _ = await engine_on(stack, "besieged-s", there)
    reader, _ = await engine_on(stack, "besieged-r", here)
    asked = peer_pb2.MapRequest(engine_id="besieged-s", epoch=source.epoch)
    held: list[grpc.aio.UnaryStreamCall[peer_pb2.MapRequest, peer_pb2.MapReply]] = []
    connections = MAX_FROM_ONE // STREAMS_OF_ONE + 2
    stubs = itertools.cycle(
        [await stack.enter_async_context(from_address(there, STRANGER)) for _ in range(connections)]
    )

    async def no_more() -> KvferryError:
        """Why one more stream is refused, when as many as may be are open. A relay that pings do not pass in time, on
        a busy machine, loses its streams; others take their places."""
        while True:
            call = next(stubs).Map(asked)
            try:
                answer = await call.read()
            except grpc.aio.AioRpcError as error:
                refused = error_of(error, "the daemon")
                if refused.code == "too_many_calls":
                    return refused
            else:
                assert isinstance(answer, peer_pb2.MapReply)
                held.append(call)

    async with asyncio.timeout(100):
        error = await no_more()
    assert error.value == f"ipv4:{STRANGER}"
    assert sum(not call.done() for call in held) <= MAX_FROM_ONE <= len(held)
    await reads_from(reader, source, "r")
    for call in held[: len(held) // 2]:
        call.cancel()

    async def let_in() -> bool:
        with contextlib.suppress(grpc.aio.AioRpcError):
            return isinstance(await next(stubs).Map(asked).read(), peer_pb2.MapReply)
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


@pytest.mark.slow
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


@pytest.mark.slow
async def test_one_address_waits_for_its_own_turns_only(daemons: Daemons, stack: AsyncExitStack) -> None:
    (daemon,) = await daemons.start("turns")
    engine, _ = await engine_on(stack, "turns", daemon)
    manifest = hostile(1 << 20)
    asked = peer_pb2.PairRequest(engine_id="turns", epoch=engine.epoch, sources=[manifest], destination=manifest)
    stranger = await stack.enter_async_context(from_address(daemon, STRANGER))
    ours = await stack.enter_async_context(peer_stub(daemon))
    codes, waiting, ended = set[str](), set[asyncio.Task[KvferryError]](), set[asyncio.Task[KvferryError]]()
    async with asyncio.timeout(TIMEOUT_S):
        while "too_many_calls" not in codes:  # a call may have had its turn before the last has come
            more = range(MAX_WAITING + 1 - len(waiting))
            waiting |= {asyncio.create_task(refusal(stranger.Pair(asked))) for _ in more}
            ended, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            codes |= {(await each).code for each in ended}
    assert codes <= {"too_many_calls", "unknown_dtype"}
    small = peer_pb2.PairRequest(engine_id="turns", epoch=engine.epoch, sources=[hostile(1)], destination=hostile(1))
    assert (await refusal(ours.Pair(small))).code == "unknown_dtype"
    for each in waiting:
        each.cancel()


@pytest.fixture(scope="module")
async def tight(daemons: Daemons) -> DaemonService:
    """A daemon whose bounds are small, for all tests whose bounds do not meet."""
    sizes = {"kvferry.protocol.source.READINGS": 9, "kvferryd.api.rest.routes.LONGEST_WAIT_S": 0.2}
    with pytest.MonkeyPatch.context() as monkeypatch:
        bounded(monkeypatch, sizes)
        (daemon,) = await daemons.start("tight", 1, "--max-leases", "4")
    return daemon


@pytest.fixture(scope="module")
async def hasty(daemons: Daemons) -> DaemonService:
    """A daemon that waits for no request: not for one of ours either, where this process gets no time."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        bounded(monkeypatch, {"kvferry.listening.HEADER_S": 1.0, "kvferryd.api.rest.gate.BODY_TIMEOUT_S": 0.3})
        (daemon,) = await daemons.start("hasty")
    return daemon


async def greedy_reader(stack: AsyncExitStack, daemon: DaemonService) -> ByHand:
    engine, _ = await engine_on(stack, daemon.name, daemon)
    stub = await stack.enter_async_context(peer_stub(daemon))
    reader = peer_pb2.Reader(engine_id="greedy", epoch="1", rank=0, world_size=1)
    return ByHand(stub, peer_pb2.ReadOpening(engine_id=daemon.name, epoch=engine.epoch, reader=reader))


async def test_half_of_the_leases_may_be_waited_for(tight: DaemonService, stack: AsyncExitStack) -> None:
    greedy = await greedy_reader(stack, tight)
    for number in range(1, 4):
        await greedy.say(open=peer_pb2.LeaseOpen(reading=number, request_id=f"never-{number}"))
    refused = await greedy.heard()
    assert (refused.reading, refused.problem.code) == (3, "full")


async def test_a_reader_has_so_many_readings_on_a_stream(tight: DaemonService, stack: AsyncExitStack) -> None:
    greedy = await greedy_reader(stack, tight)

    async def the_end() -> object:
        reply = await greedy.call.read()
        return await the_end() if isinstance(reply, peer_pb2.ReadReply) and reply.reading else reply

    opens = [peer_pb2.LeaseOpen(reading=n, request_id=f"never-{n}") for n in range(1, 11)]
    await greedy.say(several=peer_pb2.ReadRequests(requests=[peer_pb2.ReadRequest(open=each) for each in opens]))
    assert (await refusal(the_end())).code == "malformed_read"


async def test_a_connection_that_proves_nothing_is_ended(
    daemons: Daemons, stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    bounded(monkeypatch, {"kvferryd.process.serve.HANDSHAKE_MS": 500})
    file = secret_file(tmp_path_factory.mktemp("silent") / "secret", "s" * 64)
    (daemon,) = await daemons.start("silent", 1, "--peer-secret-file", str(file))
    host, _, port = daemon.peer.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    stack.callback(writer.close)
    async with asyncio.timeout(TIMEOUT_S):
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""


def test_metadata_of_more_than_a_megabyte_is_not_even_read() -> None:
    with refused("malformed_metadata", TransportError) as caught:
        parse("x", b"nixlSerDes|".ljust(MAX_NBYTES + 1, b"x"))
    assert str(MAX_NBYTES + 1) in str(caught.value)


@pytest.mark.slow
async def test_a_process_that_tries_metadata_and_stands_still_speaks_against_no_peer(
    daemons: Daemons, stack: AsyncExitStack
) -> None:
    """The next process takes the question, and the one that stands still is ended."""
    (there,), (here,) = await daemons.start("tried-s"), await daemons.start("tried-r", 1, "--connect-timeout-s", "1")
    source, _ = await engine_on(stack, "tried-s", there)
    _, router = await engine_on(stack, "tried-r", here)
    await meets(router, source)
    await router.forget_peer(source.engine_id)

    async def one_is_left() -> bool:
        return len(screens(here)) == 1

    await until(one_is_left, "those that were given up have ended")
    (trying,) = screens(here)
    trying.suspend()
    await meets(router, source)  # with another process

    async def gone() -> bool:
        return trying not in screens(here)

    await until(gone, "the process that stands still is ended")


@pytest.mark.slow
async def test_a_process_that_tries_metadata_and_does_not_come_up_is_given_up(
    daemons: Daemons, stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no fault of the metadata that comes next."""
    bounded(monkeypatch, {"kvferryd.transport.screen.START_S": 0.01})
    (there,), (here,) = await daemons.start("slow-s"), await daemons.start("slow-r")
    source, _ = await engine_on(stack, "slow-s", there)
    _, router = await engine_on(stack, "slow-r", here)
    with refused("transport_failed"):
        await router.prewarm(PeerRequest(engine_id=source.engine_id, address=source.address))

    async def given_up() -> bool:  # after a handshake the next process is started, which does not come up either
        return not screens(here)

    await until(given_up, "none is left")


def plain(daemon: DaemonService, stack: AsyncExitStack | contextlib.ExitStack) -> socket.socket:
    """A connection to the REST port that says nothing yet."""
    host, _, port = daemon.url.removeprefix("http://").rpartition(":")
    return stack.enter_context(socket.create_connection((host, int(port)), TIMEOUT_S))


async def ended_by_the_other_side(connection: socket.socket) -> bool:
    with contextlib.suppress(ConnectionError):
        return await asyncio.to_thread(connection.recv, 1) == b""
    return True


async def healthy(daemon: DaemonService, tls: ssl.SSLContext | bool = True) -> bool:
    """Asked on a connection of its own, as a kubelet does. tls: what proves us, where the port listens with TLS."""
    url = daemon.url if tls is True else daemon.url.replace("http:", "https:")
    async with httpx.AsyncClient(verify=tls, trust_env=False, timeout=TIMEOUT_S) as http:
        return (await http.get(f"{url}/healthz")).status_code == 200


async def answers(daemon: DaemonService, tls: ssl.SSLContext | bool = True) -> None:
    """Wait until it answers a connection that it has not ended before."""

    async def taken() -> bool:
        with contextlib.suppress(httpx.TransportError):
            return await healthy(daemon, tls)
        return False

    await until(taken, f"{daemon.name} answers")


LEFT, IDLERS = 40, 300
"""Descriptors that a daemon has left, and connections that want them."""


def half_open(daemon: DaemonService, stack: AsyncExitStack) -> socket.socket:
    """A connection whose request does not end."""
    idler = plain(daemon, stack)
    idler.sendall(b"GET /healthz HTTP/1.1\r\n")
    return idler


async def test_healthz_answers_while_half_open_connections_want_every_descriptor(
    daemons: Daemons, stack: AsyncExitStack
) -> None:
    (daemon,) = await daemons.start("besieged")
    assert await healthy(daemon)
    limit = open_files(daemon) + LEFT
    resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, (limit, limit))
    lines = len(daemon.log.read_text().splitlines())
    for _ in range(IDLERS):
        half_open(daemon, stack)
    for _ in range(5):
        assert await healthy(daemon)
    assert len(daemon.log.read_text().splitlines()) < lines + 20
    await stack.aclose()
    assert await healthy(daemon)


async def test_a_request_whose_header_does_not_end_is_cut_off(hasty: DaemonService, stack: AsyncExitStack) -> None:
    silent, dripping = plain(hasty, stack), half_open(hasty, stack)

    def cut_off() -> bool:
        """Whether both are ended, though one of them sends a byte now and then."""
        dripping.settimeout(0.5)
        with contextlib.suppress(ConnectionError):
            for _ in range(int(TIMEOUT_S / 0.5)):
                dripping.sendall(b"x")
                try:
                    return dripping.recv(1) == b""
                except TimeoutError:
                    continue
            return False
        return True

    assert await asyncio.to_thread(cut_off)
    assert await ended_by_the_other_side(silent)
    await answers(hasty)


async def test_calls_of_all_addresses_together_are_bounded(
    daemons: Daemons, stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounded(monkeypatch, {"kvferryd.api.callers.MAX_CALLS": 8, "kvferryd.api.callers.MAX_FROM_ONE": 5})
    (daemon,) = await daemons.start("crowded")
    engine, _ = await engine_on(stack, "crowded", daemon)
    asked = peer_pb2.MapRequest(engine_id="crowded", epoch=engine.epoch)
    held = []
    for address in ("127.0.0.2", "127.0.0.3"):
        stub = await stack.enter_async_context(from_address(daemon, address))
        for _ in range(4):
            held.append(stub.Map(asked))
            assert isinstance(await held[-1].read(), peer_pb2.MapReply)
    ours = await stack.enter_async_context(peer_stub(daemon))
    assert (await refusal(ours.Map(asked).read())).code == "too_many_calls"
    held.pop().cancel()

    async def let_in() -> bool:
        with contextlib.suppress(grpc.aio.AioRpcError):
            return isinstance(await ours.Map(asked).read(), peer_pb2.MapReply)
        return False

    await until(let_in, "there is room again")
    for call in held:
        call.cancel()


@pytest.mark.slow
async def test_a_peer_that_is_not_read_from_for_long_is_forgotten(
    daemons: Daemons, stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When another one is met: a fleet that replaces its pods leaves no trace."""
    bounded(monkeypatch, {"kvferry.protocol.peers.IDLE_S": 1.0})
    (here,), (there,), (beside,) = [await daemons.start(f"idle-{name}") for name in ("r", "s", "t")]
    reader, router = await engine_on(stack, "idle-r", here)
    source, _ = await engine_on(stack, "idle-s", there)
    other, _ = await engine_on(stack, "idle-t", beside)
    await reads_from(reader, source, "r")
    body = PeerRequest(engine_id=other.engine_id, address=other.address)

    async def forgotten() -> bool:
        await router.forget_peer(other.engine_id) if await known() > {other.engine_id} else None
        await router.prewarm(body)
        return source.engine_id not in await known()

    async def known() -> set[str]:
        return {peer.engine_id for peer in await router.peers()}

    await until(forgotten, "it is forgotten")
    await reads_from(reader, source, "again")


async def test_a_body_that_does_not_come_is_not_waited_for(hasty: DaemonService, stack: AsyncExitStack) -> None:
    """Though a byte of it comes now and then."""
    connection = plain(hasty, stack)
    connection.sendall(b"POST /v1/transfers HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n")
    connection.settimeout(0.05)
    said = b""
    async with asyncio.timeout(TIMEOUT_S):
        while b"\r\n\r\n" not in said:
            with contextlib.suppress(TimeoutError):
                said += await asyncio.to_thread(connection.recv, 4096)
            with contextlib.suppress(ConnectionError):
                connection.sendall(b" ")
    assert b" 408 " in said.splitlines()[0], said
    assert b"connection: close" in said.lower()


async def test_a_poll_is_answered_as_things_stand_when_it_was_long_enough(
    tight: DaemonService, stack: AsyncExitStack
) -> None:
    await engine_on(stack, "polled", tight)
    order = {"request_id": "r", "source": {"engine_id": "x", "address": tight.peer}}
    async with httpx.AsyncClient(base_url=tight.url, trust_env=False, timeout=TIMEOUT_S) as http:
        ordered = (await http.post("/v1/transfers", json=order)).json()
        for asked in (f"/v1/transfers/{ordered['transfer_id']}?wait=3600", "/v1/transfers?request_id=r&wait=3600"):
            answer = await http.get(asked)
            assert answer.status_code == 200
            assert '"waiting"' in answer.text


@pytest.mark.slow
async def test_so_many_explanations_are_in_work_and_more_are_told_to_come_again(daemons: Daemons) -> None:
    """Each takes seconds of a core; the daemon answers others meanwhile."""
    (daemon,) = await daemons.start("explaining")
    large = hostile(1 << 18)
    large.components[-1].dtype, large.regions[0].nbytes = "float16", 1 << 45
    for component in large.components:
        component.offset = component.layer << 30
    manifest = manifest_from_proto(large).model_dump(mode="json")
    body = {"sources": [manifest | {"engine_id": "s"}], "destination": manifest}
    async with httpx.AsyncClient(base_url=daemon.url, trust_env=False, timeout=4 * TIMEOUT_S) as http:
        answers = await asyncio.gather(*(http.post("/v1/explain", json=body) for _ in range(AT_ONCE + 2)))
        assert (await http.get("/healthz")).status_code == 200
        full = [answer for answer in answers if answer.status_code == 429]
        assert full
        assert {(answer.json()["code"], answer.headers["retry-after"]) for answer in full} == {("full", "1")}
        assert sum(answer.status_code == 200 for answer in answers) >= AT_ONCE
        assert (await http.post("/v1/explain", json=body)).status_code == 200


@pytest.mark.slow
async def test_orders_beyond_the_bound_are_refused_before_they_cost_memory(
    daemons: Daemons, stack: AsyncExitStack
) -> None:
    """Each with tables of 100 KB: if they were kept it would be more than 40 MB."""
    (there,), (here,) = await daemons.start("flood-s"), await daemons.start("flood-r", 1, "--max-transfers", "4")
    source, _ = await engine_on(stack, "flood-s", there)
    reader, _ = await engine_on(stack, "flood-r", here, Shape.tp(1, block_size=1, num_blocks=20_000))
    tables = reader.take(20_000).json()
    order = {"source": source.source().model_dump()}
    large = {"destination": {"tables": tables, "token_range": [0, 20_000]}}
    async with httpx.AsyncClient(base_url=here.url, trust_env=False, timeout=TIMEOUT_S) as http:

        async def ordered(name: str, **more: object) -> httpx.Response:
            return await http.post("/v1/transfers", json=order | {"request_id": name} | more)

        for number in range(4):
            assert (await ordered(f"taken-{number}", deadline_ms=600_000)).status_code == 202

        async def refused(first: int, count: int) -> None:
            for number in range(first, first + count):
                answer = await ordered(f"r{number}", **large)
                assert (answer.status_code, answer.headers.get("retry-after")) == (429, "1"), answer.text

        await refused(0, 50)
        before = resident_mb(here)
        await asyncio.gather(*(refused(1000 * each, 100) for each in range(1, 5)))
        assert resident_mb(here) - before < 40
        assert len((await http.get("/v1/transfers")).json()["transfers"]) == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "files", "bound"),
    [({"kvferryd.api.rest.server.MAX_CONNECTIONS": 8}, 0, 8), ({}, 200, 50)],
    ids=["its number", "a quarter of the descriptors"],
)
async def test_more_connections_than_the_bound_end_the_one_longest_without_a_request(
    daemons: Daemons,
    stack: AsyncExitStack,
    monkeypatch: pytest.MonkeyPatch,
    sizes: dict[str, float],
    files: int,
    bound: int,
) -> None:
    """If each has a request the new one is ended."""
    bounded(monkeypatch, sizes | {"kvferry.listening.HEADER_S": 600.0}, files)
    name = f"connections-{bound}"
    (daemon,) = await daemons.start(name)
    engine, router = await engine_on(stack, name, daemon)
    ordered = await router.order(OrderBody(request_id="r", source=SourceBody(engine_id="x", address=engine.address)))
    await router.close()
    poll = f"GET /v1/transfers/{ordered.transfer_id}?wait=60 HTTP/1.1\r\nhost: x\r\n\r\n".encode()
    held = []
    for _ in range(bound):
        held.append(plain(daemon, stack))
        held[-1].sendall(b"HEAD /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
        assert await asyncio.to_thread(held[-1].recv, 1 << 12)
    assert select.select(held, [], [], 0) == ([], [], []), "none of them was ended"
    first, *_ = *held, plain(daemon, stack)
    assert await ended_by_the_other_side(first)
    for connection in held[1:]:
        connection.sendall(poll)

    async def one_more_is_ended() -> bool:
        """A caller that polls: unless it is ended at once it keeps its place."""
        one_more = plain(daemon, stack)
        one_more.settimeout(0.5)
        with contextlib.suppress(ConnectionError):
            one_more.sendall(poll)
        try:
            return await ended_by_the_other_side(one_more)
        except TimeoutError:
            return False

    await until(one_more_is_ended, "all have a request, and a new connection is ended")


HURRY = ("first", "second", "third", "fourth", "fifth", "urgent")


@pytest.mark.slow
async def test_an_order_of_a_higher_priority_overtakes_those_that_are_being_read(
    daemons: Daemons, stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many are read, chunk by chunk in turn: the one that was ordered, and published, last is done first."""
    bounded(monkeypatch, {"kvferryd.transport.read.CHUNK_DESCRIPTORS": 1})
    (there,), (here,) = await daemons.start("hurry-s", 1, *TCP), await daemons.start("hurry-r", 1, *TCP)
    tokens, shape = 2048, Shape.tp(1, num_blocks=1024)
    source, _ = await engine_on(stack, "hurry-s", there, shape)
    reader, router = await engine_on(stack, "hurry-r", here, shape)
    kv, done = Kv.random(tokens), list[str]()
    await reads_from(reader, source, "they meet")
    for request_id in HURRY:
        source.write(kv, blocks := source.take(tokens))
        await source.publish(request_id, blocks, tokens)
        priority = 7 if request_id == "urgent" else 0
        await router.order(OrderBody(request_id=request_id, source=source.source(), priority=priority, way="direct"))
        await until(partial(waits_for, router, request_id, Awaited.RESERVATION), "it is ordered")
    await reads_from(reader, source, "their announcements have come, which were sent before this one")
    async with asyncio.TaskGroup() as receiving:
        with stopped(there.process.pid):  # no byte can be read
            for request_id in HURRY:
                received = receiving.create_task(reader.receive(request_id, reader.take(tokens)))
                received.add_done_callback(lambda _, request_id=request_id: done.append(request_id))
                await all_read(router, request_id)
    assert done[0] == "urgent", done


BODY_TO_COME = b"POST /v1/transfers HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\nexpect: 100-continue\r\n\r\n"
PLACES = 3


def unread(connection: socket.socket) -> None:
    """Ask on it until nothing more is taken: the daemon waits for its answers to be read."""
    connection.settimeout(0.5)
    with contextlib.suppress(TimeoutError):
        while True:
            connection.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n" * 64)


async def test_clients_that_keep_the_daemon_waiting_keep_nobody_out(
    daemons: Daemons, stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body that does not come takes all places, and then answers that are not read do, as soon as the daemon waits
    for that: whoever comes while it still answers all of them is sent away."""
    server = "kvferryd.api.rest.server"
    bounded(monkeypatch, {f"{server}.MAX_CONNECTIONS": PLACES, f"{server}.UNREAD_S": 3600})  # which would end them, too
    (daemon,) = await daemons.start("stalled")
    for _ in range(PLACES):
        held = plain(daemon, stack)
        held.sendall(BODY_TO_COME)
        assert b" 100 " in await asyncio.to_thread(held.recv, 4096)
    assert await healthy(daemon)
    for _ in range(PLACES):
        await asyncio.to_thread(unread, plain(daemon, stack))
    await answers(daemon)


async def test_a_client_that_reads_no_answers_is_not_kept(
    daemons: Daemons, stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounded(monkeypatch, {"kvferryd.api.rest.server.UNREAD_S": 1.0})
    (daemon,) = await daemons.start("unread")
    before = open_files(daemon)
    await asyncio.to_thread(unread, plain(daemon, stack))

    async def gone() -> bool:
        return open_files(daemon) <= before

    await until(gone, "its connection has ended")


async def with_tls(daemons: Daemons, folder: Path) -> tuple[DaemonService, ssl.SSLContext]:
    """A daemon whose REST port listens with TLS, and what proves its clients."""
    authority = Authority("rest")
    cert, key = authority.issue("127.0.0.1")
    flags = []
    for kind, content in {"cert": cert, "key": key, "ca": authority.certificate}.items():
        replace(folder / kind, content)
        flags += [f"--tls-{kind}", str(folder / kind)]
    daemon = daemons.fleet.daemon(folder.name, flags=[*flags, "--rest-tls"])

    async def listens() -> bool:
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            plain(daemon, stack)
            return True
        return False

    await until(listens, "it listens")
    context = ssl.create_default_context(cadata=authority.certificate.decode())
    context.load_cert_chain(folder / "cert", folder / "key")
    return daemon, context


@pytest.mark.slow
async def test_a_tls_handshake_that_does_not_come_is_not_waited_for(
    daemons: Daemons, stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    bounded(monkeypatch, {"kvferry.listening.HEADER_S": 0.3})
    daemon, tls = await with_tls(daemons, tmp_path_factory.mktemp("tls"))
    assert await ended_by_the_other_side(plain(daemon, stack))
    await answers(daemon, tls)


async def test_tls_handshakes_that_do_not_come_keep_nobody_out(
    daemons: Daemons, stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    sizes = {"kvferryd.api.rest.server.MAX_CONNECTIONS": PLACES, "kvferry.listening.HEADER_S": 600.0}
    bounded(monkeypatch, sizes)
    daemon, tls = await with_tls(daemons, tmp_path_factory.mktemp("silent"))
    for _ in range(PLACES):
        plain(daemon, stack)
    assert await healthy(daemon, tls)


async def test_runs_that_are_too_many_are_not_read_one_by_one(
    daemons: Daemons, stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of some thousand tokens, each element of which is a run, took all memory of its reader's daemon."""
    bounded(monkeypatch, {"kvferryd.paths.direct.MOST_RUNS": 64})
    (there,), (here,) = await daemons.start("rows"), await daemons.start("columns", 1, "--way", "direct")
    source, _ = await engine_on(stack, "rows", there)
    turned = Shape.tp(1, axes=("block", "dim", "head", "slot"), num_blocks=16)
    reader, _ = await engine_on(stack, "columns", here, turned)
    await published(source, "r")
    with refused("too_many_runs", TransferFailed, match="arena_mb", blocks_safe=True):
        await reader.receive("r", reader.take(50), source=source.source())
