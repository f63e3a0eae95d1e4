"""Peers that share a secret: who has it is let in, on both sides, and nobody learns it or can use what was heard."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc
import pytest
from fleet import SPOKEN, TIMEOUT_S, Daemons, peer_stub, tap, under_way, until
from lives import engine_on, reads_from
from test_hostile_metadata import Impostor

from kvferry.errors import KvferryError
from kvferry.router import RouterClient
from kvferry.schemas import PeerRequest, SourceBody
from kvferry.v1 import peer_pb2, peer_pb2_grpc
from kvferryd.demo.fleet import DaemonService
from kvferryd.peers.secret import NAME, PeerSecret
from support import refused

pytestmark = pytest.mark.anyio
OURS, THEIRS = secrets.token_hex(32), secrets.token_hex(32)


def secret_file(path: Path, *lines: str) -> Path:
    """Written whole, as Kubernetes and every careful hand do it."""
    beside = path.with_suffix(".new")
    beside.write_text("".join(f"{line}\n" for line in lines))
    os.replace(beside, path)
    return path


async def start(daemons: Daemons, name: str, file: Path) -> DaemonService:
    (daemon,) = await daemons.start(name, 1, "--peer-secret-file", str(file))
    return daemon


@asynccontextmanager
async def dialled(daemon: DaemonService, credentials: grpc.ChannelCredentials) -> AsyncIterator[peer_pb2_grpc.PeerStub]:
    options = [("grpc.ssl_target_name_override", NAME)]
    async with grpc.aio.secure_channel(daemon.peer, credentials, options=options) as channel:
        yield peer_pb2_grpc.PeerStub(channel)


async def answer_to(stub: peer_pb2_grpc.PeerStub) -> str:
    """The answer to a handshake: a status of gRPC, or the daemon's own code."""
    request = peer_pb2.HandshakeRequest(**SPOKEN, engine_id="nobody")
    try:
        await stub.Handshake(request, timeout=TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        return "let in" if error.code() is grpc.StatusCode.NOT_FOUND else str(error.code().name)
    return "let in"


async def prewarm(router: RouterClient, source: SourceBody) -> str:
    try:
        await router.prewarm(PeerRequest(engine_id=source.engine_id, address=source.address))
    except KvferryError as error:
        return error.code
    return "let in"


async def test_who_has_no_secret_or_another_is_not_let_in(daemons: Daemons, tmp_path: Path) -> None:
    daemon = await start(daemons, "door", secret_file(tmp_path / "ours", OURS))
    right, wrong = (PeerSecret(secret_file(tmp_path / each[:4], each)).current() for each in (OURS, THEIRS))
    async with dialled(daemon, right.for_dialling()) as stub:
        assert await answer_to(stub) == "let in"
    no_proof = grpc.ssl_channel_credentials(right.authority)
    for stranger in (
        wrong.for_dialling(),
        no_proof,
        grpc.ssl_channel_credentials(right.authority, wrong.key, wrong.certificate),
    ):
        async with dialled(daemon, stranger) as stub:
            assert await answer_to(stub) == "UNAVAILABLE"
    async with peer_stub(daemon) as stub:
        assert await answer_to(stub) == "UNAVAILABLE"


async def test_daemons_move_bytes_with_one_secret_and_none_with_two(
    daemons: Daemons, stack: AsyncExitStack, tmp_path: Path
) -> None:
    ours, theirs = secret_file(tmp_path / "ours", OURS), secret_file(tmp_path / "theirs", THEIRS)
    source, _ = await engine_on(stack, "s", await start(daemons, "s", ours))
    reader, _ = await engine_on(stack, "r", await start(daemons, "r", ours))
    _, stranger = await engine_on(stack, "x", await start(daemons, "x", theirs))
    await reads_from(reader, source, "one")
    assert await prewarm(stranger, source.source()) == "proof_failed"


@pytest.mark.slow
async def test_what_was_heard_between_two_daemons_is_of_no_use(
    daemons: Daemons, stack: AsyncExitStack, tmp_path: Path
) -> None:
    ours = secret_file(tmp_path / "ours", OURS)
    there = await start(daemons, "tapped", ours)
    await engine_on(stack, "tapped", there)
    _, router = await engine_on(stack, "dials", await start(daemons, "dials", ours))
    tapped, address = await stack.enter_async_context(tap())
    tapped.to = there.peer
    assert await prewarm(router, SourceBody(engine_id="tapped", address=address)) == "let in"
    heard = bytes(tapped.answered) + b"".join(tapped.said)
    for part in (OURS.encode(), bytes.fromhex(OURS), b"tapped", b"kvferry.v1.Peer"):
        assert part not in heard, "neither the secret nor a message went in the clear"
    shaken = there.log.read_text().count('"event": "handshake"')
    assert shaken
    # The same bytes again, to the same daemon: a proof is of no use a second time.
    host, _, at = there.peer.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(at))
    writer.write(bytes(tapped.said[0]))
    await writer.drain()
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(TIMEOUT_S):
            while await reader.read(1 << 16):
                continue
    writer.close()
    assert there.log.read_text().count('"event": "handshake"') == shaken, "the daemon hung up on the replayed proof"
    await router.forget_peer("tapped")


@pytest.mark.slow
async def test_an_impostor_that_is_dialled_gets_no_call(
    daemons: Daemons, stack: AsyncExitStack, tmp_path: Path
) -> None:
    """The address of a source comes from a public request: it may be anybody's."""
    calls: list[str] = []

    class Curious(Impostor):
        def __init__(self) -> None:
            super().__init__(peer_pb2.HandshakeReply())

        async def Handshake(self, request: peer_pb2.HandshakeRequest, context: object) -> peer_pb2.HandshakeReply:
            calls.append(request.engine_id)
            return await super().Handshake(request, context)

    _, router = await engine_on(stack, "r2", await start(daemons, "r2", secret_file(tmp_path / "ours", OURS)))
    own = PeerSecret(secret_file(tmp_path / "theirs", THEIRS))
    for credentials in (own.server_credentials(), None):
        server = grpc.aio.server()
        peer_pb2_grpc.add_PeerServicer_to_server(Curious(), server)
        at = "127.0.0.1:0"
        port = server.add_secure_port(at, credentials) if credentials else server.add_insecure_port(at)
        await server.start()
        try:
            source = SourceBody(engine_id="s", address=f"127.0.0.1:{port}")
            assert await prewarm(router, source) == ("proof_failed" if credentials else "peer_unreachable")
        finally:
            await server.stop(0)
    assert calls == []


@pytest.mark.slow
async def test_an_impostor_sees_no_certificate_of_a_daemon_that_dials_it(
    daemons: Daemons, stack: AsyncExitStack, tmp_path: Path
) -> None:
    """Not even what an offline search for a weak secret would start from: the caller proves itself last."""
    own = PeerSecret(secret_file(tmp_path / "theirs", THEIRS)).current()
    (tmp_path / "cert").write_bytes(own.certificate)
    (tmp_path / "key").write_bytes(own.key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert", tmp_path / "key")
    context.set_alpn_protocols(["h2"])
    context.verify_mode = ssl.CERT_OPTIONAL
    ours = secret_file(tmp_path / "ours", OURS)
    context.load_verify_locations(
        cadata=PeerSecret(ours).current().authority.decode()
    )  # it would take what it is shown
    seen: list[bytes | None] = []

    async def look(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(writer.get_extra_info("ssl_object").getpeercert(binary_form=True))
        writer.close()

    server = await asyncio.start_server(look, "127.0.0.1", 0, ssl=context)
    stack.callback(server.close)
    _, router = await engine_on(stack, "r3", await start(daemons, "r3", ours))
    source = SourceBody(engine_id="s", address=f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
    assert await prewarm(router, source) == "proof_failed"
    assert not any(seen)


@pytest.mark.long  # tests/faults/test_rotation.py does it in connections that stand
async def test_a_secret_is_rotated_without_a_failed_transfer(
    daemons: Daemons, stack: AsyncExitStack, tmp_path: Path
) -> None:
    """Both secrets on every daemon, one daemon after another; then the new one alone. Every transfer dials anew."""
    files = {name: secret_file(tmp_path / name, OURS) for name in ("rotated-s", "rotated-r")}
    source, _ = await engine_on(stack, "rotated-s", await start(daemons, "rotated-s", files["rotated-s"]))
    reader, router = await engine_on(stack, "rotated-r", await start(daemons, "rotated-r", files["rotated-r"]))
    moved = itertools.count()
    done = 0

    async def traffic() -> None:
        nonlocal done
        while True:
            request = f"r{next(moved)}"
            await reads_from(reader, source, request)
            await router.forget_peer(source.engine_id)
            done += 1

    async with under_way(traffic()) as running:

        async def goes_on() -> bool:
            assert not running.done(), running.exception()
            return done >= wanted

        old = OURS
        for order in (list(files), list(reversed(files))):
            new = secrets.token_hex(32)
            for lines in ((new, old), (new,)):
                for name in order:
                    secret_file(files[name], *lines)
                    wanted = done + 3
                    await until(goes_on, "transfers go on")
            old = new
    stale = PeerSecret(secret_file(tmp_path / "stale", OURS)).current()
    async with dialled(source.daemons[0], stale.for_dialling()) as stub:
        assert await answer_to(stub) == "UNAVAILABLE", "the first secret has gone"


async def test_a_file_that_makes_no_sense_leaves_the_secret_in_use(
    daemons: Daemons, stack: AsyncExitStack, tmp_path: Path
) -> None:
    file = secret_file(tmp_path / "ours", OURS)
    source, _ = await engine_on(stack, "steady-s", await start(daemons, "steady-s", file))
    reader, _ = await engine_on(stack, "steady-r", await start(daemons, "steady-r", file))
    for nonsense in ((), ("short",), (OURS, THEIRS, secrets.token_hex(32))):
        secret_file(file, *nonsense)
        request = f"r-{len(nonsense)}"
        await reads_from(reader, source, request)


@pytest.mark.parametrize("lines", [["short"], [OURS, "short"], [OURS, THEIRS, OURS]])
def test_a_daemon_does_not_start_with_a_file_that_makes_no_sense(tmp_path: Path, lines: list[str]) -> None:
    with refused("bad_config", field="peer_secret_file") as caught:
        PeerSecret(secret_file(tmp_path / "it", *lines))
    assert "openssl rand -hex 32" in caught.value.remedy
    assert OURS not in str(caught.value)
