"""Daemons and a proxy that listen on every interface are found over IPv4 and over IPv6, by whatever asks them."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import subprocess
import sys

import httpx
import pytest

from kvferry import listening
from kvferryd.demo.fleet import Fleet

HOSTS = ("127.0.0.1", "[::1]")


def has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        return True
    return False


pytestmark = pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6")


@pytest.mark.parametrize("everywhere", ["*", "[::]"])
def test_a_daemon_is_reached_over_both_families_and_found_by_its_own_settings(
    own_fleet: Fleet, everywhere: str
) -> None:
    rest, peer = own_fleet.free_port(), own_fleet.free_port()
    secret, token = own_fleet.directory / "secret", own_fleet.directory / "token"
    secret.write_text(32 * "s")
    token.write_text("token")
    settings = {
        "KVFERRY_REST": f"{everywhere}:{rest}", "KVFERRY_TOKEN_FILE": str(token),
        "KVFERRY_PEER": f"{everywhere}:{peer}", "KVFERRY_ADVERTISE": f"[::1]:{peer}",
        "KVFERRY_PEER_SECRET_FILE": str(secret),
        "KVFERRY_ENGINE_SOCKET": str(own_fleet.directory / "engine.sock"),
    }  # fmt: skip
    command, environment = [sys.executable, "-m", "kvferryd"], os.environ | settings
    with open(own_fleet.directory / "log", "wb") as log:
        daemon = subprocess.Popen([*command, "serve"], env=environment, stderr=log)
    try:
        asked = ["curl", "--silent", "--fail", "--retry", "300", "--retry-delay", "1", "--retry-connrefused"]
        subprocess.run([*asked, f"http://127.0.0.1:{rest}/healthz"], check=True, capture_output=True, timeout=60)
        for host in HOSTS:
            assert httpx.get(f"http://{host}:{rest}/healthz", trust_env=False).status_code == 200
            with socket.create_connection((host.strip("[]"), peer)):
                pass
        status = subprocess.run([*command, "status"], env=environment, capture_output=True, text=True, timeout=60)
        assert "not ready" in status.stdout  # it answers: no engine is there
        drained = subprocess.run([*command, "drain"], env=environment, capture_output=True, text=True, timeout=60)
        assert drained.returncode == 0, drained.stderr
    finally:
        daemon.terminate()
        try:
            daemon.wait(60)
        finally:
            daemon.kill()


def test_a_proxy_is_reached_over_both_families(own_fleet: Fleet) -> None:
    port = own_fleet.free_port()
    command = [
        sys.executable, "-m", "kvferryd", "proxy", f"--listen=*:{port}", "--prefill=http://[::1]:1", "--decode=h:2",
    ]  # fmt: skip
    proxy = subprocess.Popen(command, stderr=subprocess.PIPE)
    try:
        asked = ["curl", "--silent", "--retry", "300", "--retry-delay", "1", "--retry-connrefused"]
        subprocess.run([*asked, f"http://127.0.0.1:{port}/healthz"], check=True, capture_output=True, timeout=60)
        for host in HOSTS:
            assert httpx.get(f"http://{host}:{port}/healthz", trust_env=False).status_code == 200
    finally:
        proxy.kill()
        proxy.communicate()


def test_a_port_that_somebody_has_over_ipv6_alone_is_refused() -> None:
    with socket.socket(socket.AF_INET6) as other:
        other.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        other.bind(("::", 0))
        other.listen()
        with pytest.raises(OSError, match=os.strerror(errno.EADDRINUSE)):
            listening.everywhere(other.getsockname()[1])
