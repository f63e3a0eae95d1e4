"""A daemon keeps nothing of the addresses it has dialled, once nobody uses them."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from pathlib import Path

import grpc
import pytest
from fleet import TIMEOUT_S, Daemons, ended, open_files, until
from lives import TP1, engine_on, reads_from
from ranks import TestEngine
from test_rest_tls import authority, certificate

from kvferry.errors import KvferryError
from kvferry.schemas import PeerRequest
from kvferry.v1 import peer_pb2
from kvferryd.config import Config
from kvferryd.peers.channels import MAX_CHANNELS, Channels
from support import refused

pytestmark = pytest.mark.anyio
DEAD = 200
BACKOFF_S = 2.5
"""More than the longest pause between two attempts of gRPC to connect, as the daemon sets it."""


class Doorbell:
    """A port on all of 127.0.0.0/8 where every connection is counted and closed at once."""

    def __init__(self, port: int) -> None:
        self._listening = socket.create_server(("0.0.0.0", port), backlog=512)
        self.port = self._listening.getsockname()[1]
        self.rung = 0

    def answer(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            self.rung += 1
            connection.close()

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()


@contextmanager
def doorbell(port: int = 0) -> Iterator[Doorbell]:
    bell = Doorbell(port)
    answering = threading.Thread(target=bell.answer)
    answering.start()
    try:
        yield bell
    finally:
        bell.close()
        answering.join()


async def rang(bell: Doorbell) -> bool:
    return bell.rung > 0


async def is_not_dialled(bell: Doorbell) -> None:
    assert await silent(bell)


async def silent(bell: Doorbell) -> bool:
    rung = bell.rung
    await asyncio.sleep(BACKOFF_S)
    return bell.rung == rung


@pytest.mark.slow
async def test_a_peer_that_is_back_is_reached_at_once_though_others_hold_a_channel_to_it(daemons: Daemons) -> None:
    """gRPC lets up to two seconds pass before it dials again, and fails calls until then."""
    (daemon,) = await daemons.start("comes-back")
    channels = Channels(Config())
    held = channels.open(daemon.peer)
    try:
        for _ in range(3):
            await ended(daemon, signal.SIGKILL)
            with pytest.raises(grpc.aio.AioRpcError):
                await held.stub.Handshake(peer_pb2.HandshakeRequest(), timeout=TIMEOUT_S)
            daemon = daemons.fleet.again(daemon)
            await daemons.fleet.ready(daemon, timeout_s=TIMEOUT_S)
            with pytest.raises(KvferryError) as caught:
                async with channels.calling(daemon.peer) as stub:
                    await stub.Handshake(peer_pb2.HandshakeRequest(), timeout=TIMEOUT_S)
            assert caught.value.code != "peer_unreachable", caught.value
    finally:
        held.close()
        await channels.close()


@pytest.mark.slow
async def test_an_address_that_did_not_answer_is_not_dialled_again(daemons: Daemons, stack: AsyncExitStack) -> None:
    (daemon,) = await daemons.start("dialler")
    _, router = await engine_on(stack, "dialler", daemon)

    async def dial(address: str) -> None:
        with refused("peer_unreachable"):
            await router.prewarm(PeerRequest(engine_id="nobody", address=address))

    with doorbell() as bell:
        await dial(f"127.0.2.1:{bell.port}")
        before = open_files(daemon)
        for last in range(DEAD):
            await dial(f"127.0.1.{last + 1}:{bell.port}")
        assert bell.rung >= DEAD
        await is_not_dialled(bell)

    async def as_before() -> bool:
        return open_files(daemon) <= before

    await until(as_before, f"{open_files(daemon)} open files are {before} again")


async def test_a_peer_that_has_gone_is_asked_for_until_it_is_forgotten(daemons: Daemons, stack: AsyncExitStack) -> None:
    """A minute at most (simulation/peers_world): another daemon may take its place."""
    (ours,), (theirs,) = await daemons.start("left"), await daemons.start("leaver")
    reader, router = await engine_on(stack, "left", ours)
    source, _ = await engine_on(stack, "leaver", theirs)
    await reads_from(reader, source, "r")
    assert await ended(theirs, signal.SIGKILL) == -signal.SIGKILL
    with doorbell(int(theirs.peer.rpartition(":")[2])) as bell:
        await until(partial(rang, bell), "it is asked for")
        await router.forget_peer("leaver")
        await until(partial(silent, bell), "nobody dials any more")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates with the openssl command")
async def test_a_daemon_dials_with_the_certificates_that_its_files_hold_by_then(
    daemons: Daemons, stack: AsyncExitStack, tmp_path: Path
) -> None:
    files = {name: tmp_path / f"{name}.pem" for name in ("cert", "key", "ca")}
    issue(tmp_path, "first", files)
    flags = [part for name, file in files.items() for part in (f"--tls-{name}", str(file))]
    (ours,), (theirs,) = await daemons.start("tls-reader", 1, *flags), await daemons.start("tls-source", 1, *flags)
    reader, _ = await engine_on(stack, "tls-reader", ours)
    source = await TestEngine.start("tls-source", [theirs], TP1)
    await reads_from(reader, source, "before")

    issue(tmp_path, "second", files)
    await source.close()
    await ended(theirs, signal.SIGTERM)
    (theirs,) = [daemons.fleet.again(theirs)]
    await daemons.fleet.ready(theirs, timeout_s=TIMEOUT_S)
    source, _ = await engine_on(stack, "tls-source", theirs)
    await reads_from(reader, source, "after")


def issue(folder: Path, name: str, files: dict[str, Path]) -> None:
    """Replace all files with those of a new authority, which does not know the one before."""
    ca = authority(folder, f"{name}-ca")
    cert, key = certificate(folder, name, ca)
    for kind, made in {"cert": cert, "key": key, "ca": ca}.items():
        shutil.copy(made, f"{made}.new")
        os.replace(f"{made}.new", files[kind])


async def test_more_addresses_than_the_bound_are_refused_until_others_are_left() -> None:
    channels = Channels(Config())
    held = [channels.open(f"127.0.0.1:{port + 1}") for port in range(MAX_CHANNELS)]
    again = channels.open("127.0.0.1:1")
    with refused("too_many_peers"):
        channels.open("127.0.0.2:1")
    again.close()
    again.close()
    assert len(channels) == MAX_CHANNELS, "its other user is still there"
    held[0].close()
    channels.open("127.0.0.2:1").close()
    await channels.close()
    assert not len(channels)
