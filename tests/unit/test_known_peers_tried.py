"""The peers that the settings name, where they do not answer, and where their names cannot be looked up."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import pytest

from kvferryd.config import Config
from kvferryd.observe.metrics import Metrics
from kvferryd.peers import known as known_peers
from kvferryd.peers.known import KnownPeers
from kvferryd.peers.peers import Peers

pytestmark = pytest.mark.anyio


async def test_a_name_whose_lookup_hangs_takes_one_thread_and_keeps_no_other_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answered, others = threading.Event(), threading.Semaphore(0)
    hanging: list[str] = []

    def looked_up(host: str, *_: Any, **__: Any) -> list[Any]:
        if host == "pod-silent":
            hanging.append(host)
            answered.wait()
        others.release()
        raise OSError("no such name")

    monkeypatch.setattr(socket, "getaddrinfo", looked_up)
    monkeypatch.setattr(known_peers, "SOON_S", 0.01)
    config = Config(known_peers=("pod-silent:7411", "pod-0:7411"), allow_peers=("pod-*",))
    peers = Peers(config, Metrics())
    known = KnownPeers(config, peers, list)
    running = asyncio.create_task(known.run())
    try:
        for _ in range(2 * known_peers.LOOKUPS):
            assert await asyncio.to_thread(others.acquire, timeout=60)
            known.look()
        assert len(hanging) == 1
    finally:
        answered.set()
        running.cancel()
        await asyncio.wait([running])
        await peers.close()


async def test_names_that_cannot_be_looked_up_keep_no_other_work_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answered = threading.Semaphore(0), threading.Event()

    def hangs(*_: Any, **__: Any) -> list[Any]:
        asked.release()
        answered.wait()
        raise OSError("no such name")

    monkeypatch.setattr(socket, "getaddrinfo", hangs)
    config = Config(known_peers=tuple(f"pod-{number}:7411" for number in range(64)), allow_peers=("pod-*",))
    peers = Peers(config, Metrics())
    running = asyncio.create_task(KnownPeers(config, peers, list).run())
    try:
        async with asyncio.timeout(60):
            while not asked.acquire(blocking=False):  # noqa: ASYNC110  a thread tells
                await asyncio.sleep(0.01)
            await asyncio.to_thread(int)
    finally:
        answered.set()
        running.cancel()
        await asyncio.wait([running])
        await peers.close()


async def test_a_look_that_fails_is_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Semaphore(0)

    def fails(*_: Any, **__: Any) -> list[Any]:
        asked.release()
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(socket, "getaddrinfo", fails)
    config = Config(known_peers=("pod:7411",), allow_peers=("pod",))
    peers = Peers(config, Metrics())
    known = KnownPeers(config, peers, list)
    running = asyncio.create_task(known.run())
    try:
        for _ in range(2):
            known.look()
            assert await asyncio.to_thread(asked.acquire, timeout=60)
    finally:
        running.cancel()
        await asyncio.wait([running])
        await peers.close()
