"""Errors of a call to another daemon that comes to nothing. gRPC's own words are real, so that a change is seen."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from alone import peer_served
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from kvferry.errors import KvferryError
from kvferry.v1 import peer_pb2, peer_pb2_grpc
from kvferryd.config import Config
from kvferryd.peers.certificates import CertificateFiles, Certificates
from kvferryd.peers.channels import Channels
from kvferryd.peers.secret import PeerSecret
from kvferryd.peers.unreached import unreached

pytestmark = pytest.mark.anyio
HERE = "127.0.0.1"
DAY = datetime.timedelta(days=1)


class Authority:
    def __init__(self, name: str = "ours") -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.certificate = self._signed(self.name, self.key, x509.BasicConstraints(ca=True, path_length=None))

    def files(self, folder: Path, *names: str, days: int = 9) -> CertificateFiles:
        """As the tls_* settings name them: for these names, or for this host where none are given."""
        folder.mkdir()
        key = ec.generate_private_key(ec.SECP256R1())
        kinds = [x509.DNSName(each) for each in names] or [x509.IPAddress(ipaddress.ip_address(HERE))]
        who = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a daemon")])
        shown = self._signed(who, key, x509.SubjectAlternativeName(kinds), days)
        pem = serialization.Encoding.PEM
        (folder / "cert").write_bytes(shown.public_bytes(pem))
        (folder / "ca").write_bytes(self.certificate.public_bytes(pem))
        form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        (folder / "key").write_bytes(key.private_bytes(pem, *form))
        return CertificateFiles(folder / "cert", folder / "key", folder / "ca")

    def _signed(
        self, who: x509.Name, key: ec.EllipticCurvePrivateKey, extension: x509.ExtensionType, days: int = 9
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder(self.name, who, key.public_key(), x509.random_serial_number())
        builder = builder.not_valid_before(now - 20 * DAY).not_valid_after(now + days * DAY)
        return builder.add_extension(extension, critical=False).sign(self.key, hashes.SHA256())


@pytest.fixture(scope="module")
def ours() -> Authority:
    return Authority()


class Mute(peer_pb2_grpc.PeerServicer):
    async def Handshake(self, request: object, context: object) -> peer_pb2.HandshakeReply:
        await asyncio.Event().wait()
        raise AssertionError


@asynccontextmanager
async def served(proof: Certificates | None = None) -> AsyncIterator[str]:
    server = grpc.aio.server()
    peer_pb2_grpc.add_PeerServicer_to_server(Mute(), server)
    at = f"{HERE}:0"
    port = server.add_secure_port(at, proof.server_credentials()) if proof else server.add_insecure_port(at)
    await server.start()
    try:
        yield f"{HERE}:{port}"
    finally:
        await server.stop(0)


@asynccontextmanager
async def another_service(
    says: bytes, on: Callable[[asyncio.StreamReader], Awaitable[object]] = asyncio.StreamReader.readline
) -> AsyncIterator[str]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await on(reader)
        writer.write(says)
        writer.close()

    async with await asyncio.start_server(answer, HERE, 0) as server:
        yield f"{HERE}:{server.sockets[0].getsockname()[1]}"


async def failed(address: str, proof: Certificates | None = None, timeout_s: float = 60.0) -> KvferryError:
    """The error of a call to that address; what is kept of the daemon there is the same."""
    channels = Channels(Config(), proof)
    try:
        with pytest.raises(KvferryError) as caught:
            async with channels.calling(address) as stub:
                await stub.Handshake(peer_pb2.HandshakeRequest(), timeout=timeout_s)
        contact = channels.contact(address)
        assert contact.failures == 1
        assert contact.error is not None and str(contact.error) == str(caught.value)
    finally:
        await channels.close()
    assert caught.value.value == address
    assert caught.value.remedy
    return caught.value


async def test_nobody_listens() -> None:
    error = await failed(f"{HERE}:9")
    assert error.code == "peer_unreachable"
    assert error.message == f"nobody listens at {HERE}:9: the connection was refused"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("errors resolving p:1: [field:hostname lookup error:address lookup failed]", "nobody knows the name in p:1"),
        (
            "last error: UNKNOWN: ipv4:10.0.0.7:1: Failed to connect to remote host: No route to host",
            "there is no way to p:1: No route to host",
        ),
        ("Stream removed (Delayed close due to in-progress write (ping timeout))", "p:1 has not answered for 4.5 s"),
    ],
)
async def test_ends_that_no_test_can_make_here(words: str, said: str) -> None:
    nothing = grpc.aio.Metadata()
    error = await unreached(grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, words), "p:1", "", 0.0)
    assert error is not None and (error.code, error.message) == ("peer_unreachable", said)


async def test_a_daemon_that_is_silent() -> None:
    began = time.monotonic()
    async with served() as address:
        error = await failed(address, timeout_s=0.2)
    assert error.code == "peer_unreachable"
    said = re.fullmatch(rf"{address} has not answered for ([\d.]+) s", error.message)
    assert said is not None and 0.2 <= float(said[1]) <= round(time.monotonic() - began, 1)


@pytest.mark.parametrize("says", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-OpenSSH_9.6\r\n"])
async def test_a_port_of_another_service(says: bytes) -> None:
    async with another_service(says) as address:
        error = await failed(address)
    assert error.code == "peer_unreachable"
    assert error.message == f"what listens at {address} is no kvferry peer port"
    assert "is this the REST port" in error.remedy


async def test_a_service_that_hangs_up() -> None:
    async with another_service(b"") as address:
        error = await failed(address)
    assert (error.code, error.message) == (
        "peer_unreachable", f"{address} ended the connection before it said anything",
    )  # fmt: skip


async def test_a_daemon_without_a_proof_or_another_port(ours: Authority, tmp_path: Path) -> None:
    async with served() as address:
        error = await failed(address, ours.files(tmp_path / "own"))
    assert error.message == (
        f"what listens at {address} is no kvferry peer port, or its daemon asks for no proof while this one does"
    )


async def test_a_daemon_that_asks_for_a_proof(ours: Authority, tmp_path: Path) -> None:
    async with served(ours.files(tmp_path / "theirs")) as address:
        error = await failed(address)
    assert (error.code, error.message) == (
        "proof_failed",
        f"{address} asks for a proof, and this daemon has none: it shows a certificate for {HERE}",
    )


async def test_a_certificate_for_another_name(ours: Authority, tmp_path: Path) -> None:
    async with served(ours.files(tmp_path / "theirs", "prefill-0.example", "prefill-1.example")) as address:
        error = await failed(address, ours.files(tmp_path / "own"))
    assert (error.code, error.message) == (
        "proof_failed",
        f"{address} does not prove itself: a certificate for {HERE} was expected, one for prefill-0.example, "
        "prefill-1.example was shown: it is for another name",
    )


@pytest.mark.parametrize("name", ["theirs", "ours"], ids=["another name", "the same name"])
async def test_a_certificate_of_another_authority(ours: Authority, tmp_path: Path, name: str) -> None:
    async with served(Authority(name).files(tmp_path / "theirs")) as address:
        error = await failed(address, ours.files(tmp_path / "own"))
    assert error.code == "proof_failed"
    assert error.message.endswith(
        f"one for {HERE} was shown: an authority has signed it that this daemon does not know"
    )


async def test_a_certificate_that_has_expired(ours: Authority, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(served(ours.files(tmp_path / "theirs", days=-1)))
        error = await failed(address, ours.files(tmp_path / "own"))
    assert error.code == "proof_failed"
    assert error.message.endswith(f"one for {HERE} was shown: certificate has expired")


async def test_our_certificate_is_not_accepted(ours: Authority, tmp_path: Path) -> None:
    own = Authority("theirs").files(tmp_path / "own")
    (tmp_path / "own" / "ca").write_bytes((tmp_path / "own" / "ca").read_bytes() + _pem(ours))
    async with served(ours.files(tmp_path / "theirs")) as address:
        error = await failed(address, own)
    assert (error.code, error.message) == (
        "proof_failed",
        f"{address} ended the connection when it was shown this daemon's certificate; its own is for {HERE}",
    )


def _pem(authority: Authority) -> bytes:
    return authority.certificate.public_bytes(serialization.Encoding.PEM)


async def test_another_secret(tmp_path: Path) -> None:
    secrets = [tmp_path / "ours", tmp_path / "theirs"]
    for number, file in enumerate(secrets):
        file.write_text(f"{number}" * 64 + "\n")
    async with served(PeerSecret(secrets[1])) as address:
        error = await failed(address, PeerSecret(secrets[0]))
    assert error.code == "proof_failed"
    assert "an authority has signed it that this daemon does not know" in error.message
    assert "both need one peer_secret_file" in error.remedy


# ---- what is kept of a call that fails, and how a call ends when its channel is closed ----


NOBODY = "127.0.0.1:1"


class Silent(peer_pb2_grpc.PeerServicer):
    """Takes calls, and answers none."""

    def __init__(self) -> None:
        self.called = asyncio.Event()

    async def Handshake(self, request: Any, context: Any) -> peer_pb2.HandshakeReply:
        self.called.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def Order(self, request: Any, context: Any) -> AsyncIterator[peer_pb2.RankTransfer]:
        yield peer_pb2.RankTransfer(state="reading")
        self.called.set()
        await asyncio.Event().wait()


@pytest.fixture
async def silent() -> AsyncIterator[tuple[Silent, str]]:
    service = Silent()
    async with peer_served(service) as address:
        yield service, address


async def asked(channels: Channels, address: str) -> None:
    async with channels.calling(address) as stub:
        await stub.Handshake(peer_pb2.HandshakeRequest())


async def followed(channels: Channels, address: str) -> None:
    async with channels.calling(address) as stub:
        async for _ in stub.Order([peer_pb2.OrderRequest()]):
            pass


@pytest.mark.parametrize("calling", [asked, followed])
async def test_a_call_whose_channel_is_closed_has_lost_its_peer(
    silent: tuple[Silent, str], calling: Callable[[Channels, str], Coroutine[None, None, None]]
) -> None:
    """It raises an error of the peer, not CancelledError: the caller would take that for its own cancellation."""
    service, address = silent
    channels = Channels(Config())
    asking = asyncio.create_task(calling(channels, address))
    async with asyncio.timeout(60):
        await service.called.wait()
        await channels.close()
        with pytest.raises(KvferryError) as caught:
            await asking
    assert caught.value.code == "peer_lost"


async def test_a_call_that_is_cancelled_says_nothing_of_its_peer(silent: tuple[Silent, str]) -> None:
    service, address = silent
    channels = Channels(Config())
    asking = asyncio.create_task(asked(channels, address))
    async with asyncio.timeout(60):
        await service.called.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
    assert not channels.contact(address).failures


async def test_what_a_daemon_failed_with_is_kept_without_what_was_under_way() -> None:
    """A call that lives goes on dialling, though its channel is closed."""
    channels = Channels(Config())
    with pytest.raises(KvferryError):
        await asked(channels, NOBODY)
    error = channels.contact(NOBODY).error
    assert error is not None and error.code == "peer_unreachable"
    assert error.__traceback__ is error.__context__ is error.__cause__ is None
