"""A daemon that is advertised by name, and comes back at another address: its pod was made anew. An interface that gets
another address."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
from fleet import TIMEOUT_S, Daemons, peer_stub
from hosts import Host, _ip
from lives import engine_on
from ranks import Kv, TestEngine

from kvferry.rpc import PROTOCOL_MAX, PROTOCOL_MIN
from kvferry.v1 import peer_pb2
from kvferryd.demo.fleet import DaemonService

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
T = TypeVar("T")
NAME, BEFORE, AFTER = "source.test", "127.0.0.2", "127.0.0.3"
CLONE_FS, CLONE_NEWNS = 0x200, 0x20000
_libc = ctypes.CDLL(None, use_errno=True)


class Names:
    """/etc/hosts of processes that are started by `start`: a file of the test's."""

    def __init__(self, hosts: Path) -> None:
        self._hosts = hosts
        self.lead_to(BEFORE)

    def lead_to(self, address: str) -> None:
        with self._hosts.open("w") as file:  # the same file: it is mounted
            file.write(f"127.0.0.1 localhost\n{address} {NAME}\n")

    def start(self, start: Callable[[], T]) -> T:
        """Skips the test where no mount can be made."""

        def apart() -> T:
            if _libc.unshare(CLONE_FS | CLONE_NEWNS):
                pytest.skip(f"names of its own need the right to mount: {os.strerror(ctypes.get_errno())}")
            for mount in (["--make-rprivate", "/"], ["--bind", str(self._hosts), "/etc/hosts"]):
                subprocess.run(["mount", *mount], check=True, capture_output=True, timeout=60)
            return start()

        with ThreadPoolExecutor(1) as pool:  # the thread ends with its mounts
            return pool.submit(apart).result()


async def moved(source: TestEngine, reader: TestEngine, request_id: str) -> None:
    kv, given, taken = Kv.random(100), source.take(100), reader.take(100)
    source.write(kv, given)
    expected = reader.snapshot()
    reader.write_into(expected, kv, taken)
    await source.publish(request_id, given, 100)
    await reader.receive(request_id, taken, source=source.source())
    assert reader.differences(expected) == ""


async def test_a_source_that_comes_back_at_another_address_of_its_name_is_read_at_the_first_try(
    daemons: Daemons, stack: AsyncExitStack, tmp_path: Path
) -> None:
    names, port = Names(tmp_path / "hosts"), daemons.fleet.free_port()
    told = f"{NAME}:{port}"

    def source_at(address: str) -> DaemonService:
        flags = ["--peer", f"{address}:{port}", "--advertise", told, "--roster", told]
        allowed = ["--allow-peers", f"127.0.0.0/8,{NAME}"]
        started = names.start(lambda: daemons.fleet.daemon(f"at-{address[-1]}", flags=[*flags, *allowed]))
        return replace(started, peer=told)

    reader_of = names.start(
        lambda: daemons.fleet.daemon("reads-by-name", flags=["--allow-peers", f"127.0.0.0/8,{NAME}"])
    )
    before = source_at(BEFORE)
    await daemons.fleet.ready(before, reader_of, timeout_s=TIMEOUT_S)
    reader, _ = await engine_on(stack, "reader", reader_of)
    async with AsyncExitStack() as first:
        source, _ = await engine_on(first, "source", before)
        await moved(source, reader, "before")
        before.process.kill()
        before.process.wait(TIMEOUT_S)
    names.lead_to(AFTER)
    after = source_at(AFTER)
    await daemons.fleet.ready(after, timeout_s=TIMEOUT_S)
    source, _ = await engine_on(stack, "source", after)
    await moved(source, reader, "after")


async def test_a_source_says_the_addresses_that_its_interface_had_when_the_engine_registered(
    daemons: Daemons, far: Host, stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", far.device)
    daemon = daemons.fleet.daemon("gets-an-address", flags=())
    await daemons.fleet.ready(daemon, timeout_s=TIMEOUT_S)
    await engine_on(stack, "before", daemon)
    _ip("addr", "add", "fd00:7::1/64", "dev", far.device, "nodad")
    await engine_on(stack, "after", daemon)

    async def told(engine_id: str) -> list[str]:
        asked = peer_pb2.HandshakeRequest(protocol_min=PROTOCOL_MIN, protocol_max=PROTOCOL_MAX, engine_id=engine_id)
        async with peer_stub(daemon) as stub:
            return list((await stub.Handshake(asked, timeout=TIMEOUT_S)).ucx)

    listens = f"{far.here} ({far.device})"
    assert await told("before") == [listens]
    assert await told("after") == [listens, f"fd00:7::1 ({far.device})"]
