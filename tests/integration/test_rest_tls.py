"""REST over mutual TLS: only certificates of our authority, and new ones without a restart."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest
from fleet import until
from test_rest_daemons import served

from kvferry.proxy.options import Endpoint, Options
from kvferry.router import RouterClient
from kvferryd.commands.cli import main
from kvferryd.config import Config
from kvferryd.demo.fleet import Fleet, Service
from kvferryd.ferry import Ferry
from kvferryd.observe.metrics import Metrics

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates with the openssl command")


def openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


def authority(directory: Path, name: str) -> Path:
    """A certificate authority; gives its certificate, the key lies beside it."""
    cert = directory / f"{name}.pem"
    openssl(
        "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
        "-subj", f"/CN={name}", "-keyout", str(cert.with_suffix(".key")), "-out", str(cert),
    )  # fmt: skip
    return cert


def certificate(directory: Path, name: str, ca: Path) -> tuple[Path, Path]:
    """(certificate, key) for 127.0.0.1, signed by `ca`."""
    cert, key, request = (directory / f"{name}.{kind}" for kind in ("pem", "key", "csr"))
    openssl(
        "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", f"/CN={name}",
        "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(request),
    )  # fmt: skip
    openssl(
        "x509", "-req", "-in", str(request), "-CA", str(ca), "-CAkey", str(ca.with_suffix(".key")), "-days", "1",
        "-copy_extensions", "copy", "-out", str(cert),
    )  # fmt: skip
    return cert, key


def client_tls(ca: Path, pair: tuple[Path, Path] | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(ca))
    if pair is not None:
        context.load_cert_chain(*pair)
    return context


def subject(port: int, tls: ssl.SSLContext) -> str:
    async def look() -> str:
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls)
        peer = writer.get_extra_info("peercert")
        writer.close()
        return str(peer["subject"][0][0][1])

    return asyncio.run(look())


def test_only_certificates_of_our_authority_are_let_in_and_replaced_ones_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = authority(tmp_path, "ours"), authority(tmp_path, "theirs")
    cert, key = certificate(tmp_path, "daemon", ours)
    config = Config(rest="127.0.0.1:0", rest_tls=True, tls_cert=cert, tls_key=key, tls_ca=ours)
    router = client_tls(ours, certificate(tmp_path, "router", ours))
    strangers = [client_tls(ours, None), client_tls(ours, certificate(tmp_path, "stranger", theirs))]

    async def run() -> None:
        async with served(Ferry(config, Metrics())) as port, asyncio.timeout(60):
            url = f"https://127.0.0.1:{port}"
            async with RouterClient(url, tls=router) as client:
                assert await client.healthy()
            for stranger in strangers:
                async with httpx.AsyncClient(verify=stranger) as http:
                    with pytest.raises(httpx.TransportError):
                        await http.get(f"{url}/healthz")

            monkeypatch.setenv("KVFERRY_TLS_CERT", str(cert))
            monkeypatch.setenv("KVFERRY_TLS_KEY", str(key))
            monkeypatch.setenv("KVFERRY_TLS_CA", str(ours))
            assert await asyncio.to_thread(main, ["transfers", "--daemon", url]) == 0

            assert await asyncio.to_thread(subject, port, router) == "daemon"
            for new, old in zip(certificate(tmp_path, "renewed", ours), (cert, key), strict=True):
                os.replace(new, old)
            assert await asyncio.to_thread(subject, port, router) == "renewed"
            cert.write_text("torn")
            assert await asyncio.to_thread(subject, port, router) == "renewed"

    asyncio.run(run())


def test_the_proxy_proves_itself_to_daemons(tmp_path: Path) -> None:
    ours = authority(tmp_path, "ours")
    cert, key = certificate(tmp_path, "daemon", ours)
    config = Config(rest="127.0.0.1:0", rest_tls=True, tls_cert=cert, tls_key=key, tls_ca=ours)
    proof = dict(zip(("cert", "key", "ca"), (*certificate(tmp_path, "proxy", ours), ours), strict=True))

    async def run() -> None:
        async with served(Ferry(config, Metrics())) as port, Fleet() as fleet, asyncio.timeout(120):
            engines = [f"http://{role}.invalid:8000,daemon=https://127.0.0.1:{port}" for role in ("prefill", "decode")]
            shown = ["--fleet", "--order", "router"]
            known = fleet.proxy(*engines, flags=[*shown, *(f"--daemon-tls-{kind}={proof[kind]}" for kind in proof)])
            unknown = fleet.proxy(*engines, flags=shown)
            await fleet.ready(known, unknown, timeout_s=60)
            async with httpx.AsyncClient(trust_env=False, timeout=60) as http:

                async def told(proxy: Service, what: list[object]) -> bool:
                    rows = (await http.get(f"{proxy.url}/v1/fleet")).json()["daemons"]
                    return [row["error"]["code"] if row["error"] else row["reasons"] for row in rows] == what

                await until(lambda: told(known, [["no engine has registered its cache"]] * 2), "it is answered")
                await until(lambda: told(unknown, ["daemon_unreachable"] * 2), "it is not let in")

    asyncio.run(run())


def test_a_key_of_the_proxy_that_has_a_password_is_refused(tmp_path: Path) -> None:
    """OpenSSL would ask the terminal, before anything is served."""
    ours = authority(tmp_path, "ours")
    cert, key = certificate(tmp_path, "proxy", ours)
    openssl("pkey", "-in", str(key), "-aes256", "-passout", "pass:secret", "-out", str(tmp_path / "locked.key"))
    names = {"daemon_tls_cert": str(cert), "daemon_tls_key": str(tmp_path / "locked.key"), "daemon_tls_ca": str(ours)}
    with pytest.raises(ValueError, match=r"locked\.key.*nobody is there to type it"):
        Options(prefill=(Endpoint("http://prefill.invalid"),), decode=(Endpoint("http://decode.invalid"),), **names)


def let_in(port: int, tls: ssl.SSLContext, session: ssl.SSLSession | None = None) -> ssl.SSLSession | None:
    """The session that could be resumed; None where the daemon does not answer this client."""
    with socket.create_connection(("127.0.0.1", port), 60) as plain:
        try:
            with tls.wrap_socket(plain, server_hostname="127.0.0.1", session=session) as wrapped:
                wrapped.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
                return wrapped.session if wrapped.recv(4096).startswith(b"HTTP/1.1 200") else None
        except OSError:
            return None


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_session_does_not_outlast_the_authority_that_it_was_proven_with(
    tmp_path: Path, version: ssl.TLSVersion
) -> None:
    ours, theirs = authority(tmp_path, "ours"), authority(tmp_path, "theirs")
    cert, key = certificate(tmp_path, "daemon", ours)
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(ours.read_bytes() + theirs.read_bytes())
    config = Config(rest="127.0.0.1:0", rest_tls=True, tls_cert=cert, tls_key=key, tls_ca=trusted)
    leaving = client_tls(ours, certificate(tmp_path, "leaving", theirs))
    leaving.maximum_version = version

    async def run() -> None:
        async with served(Ferry(config, Metrics())) as port, asyncio.timeout(60):
            session = await asyncio.to_thread(let_in, port, leaving)
            assert session is not None
            assert await asyncio.to_thread(let_in, port, leaving, session) is not None
            trusted.write_bytes(ours.read_bytes())
            assert await asyncio.to_thread(let_in, port, leaving, session) is None

    asyncio.run(run())
