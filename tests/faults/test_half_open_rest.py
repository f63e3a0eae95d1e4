"""Connections to the REST port that never send a request: they end, and /healthz answers whatever they hold."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from contextlib import AsyncExitStack

import httpx
import pytest
from fleet import TIMEOUT_S, Daemons, open_files

from kvferryd.demo.fleet import DaemonService

pytestmark = pytest.mark.anyio
LEFT, IDLERS = 40, 300


def connected(daemon: DaemonService, stack: AsyncExitStack) -> socket.socket:
    port = int(daemon.url.rpartition(":")[2])
    idler = stack.enter_context(socket.create_connection(("127.0.0.1", port), TIMEOUT_S))
    idler.sendall(b"GET /healthz HTTP/1.1\r\n")
    return idler


async def healthy(daemon: DaemonService) -> bool:
    """Asked on a connection of its own, as a kubelet does."""
    async with httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False) as http:
        return (await http.get(f"{daemon.url}/healthz")).status_code == 200


async def test_healthz_answers_while_half_open_connections_want_every_descriptor(
    daemons: Daemons, stack: AsyncExitStack
) -> None:
    (daemon,) = await daemons.start("besieged")
    assert await healthy(daemon)
    limit = open_files(daemon) + LEFT
    resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, (limit, limit))
    lines = len(daemon.log.read_text().splitlines())
    for _ in range(IDLERS):
        connected(daemon, stack)
    for _ in range(5):
        assert await healthy(daemon)
    assert len(daemon.log.read_text().splitlines()) < lines + 20
    await stack.aclose()
    assert await healthy(daemon)


async def test_a_request_whose_header_does_not_end_is_cut_off(daemons: Daemons, stack: AsyncExitStack) -> None:
    (daemon,) = await daemons.start("patient")
    silent = socket.create_connection(("127.0.0.1", int(daemon.url.rpartition(":")[2])), TIMEOUT_S)
    stack.enter_context(silent)
    dripping = connected(daemon, stack)

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
    silent.settimeout(TIMEOUT_S)
    assert await asyncio.to_thread(silent.recv, 1) == b""
    assert await healthy(daemon)
