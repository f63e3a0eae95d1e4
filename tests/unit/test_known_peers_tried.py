"""The peers that the settings name, where they do not answer, and where their names cannot be looked up."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from typing import Any

import pytest
from test_channels_of_ranks import first_of_two

from kvferryd.config import Config
from kvferryd.observe.metrics import Metrics
from kvferryd.peers.known import AGAIN_S, KnownPeers
from kvferryd.peers.peers import Peers

pytestmark = pytest.mark.anyio
NOBODY = "127.0.0.1:1"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_a_peer_that_has_not_answered_a_thousand_times_is_tried_no_more_often() -> None:
    config = Config(known_peers=(NOBODY,))
    engine, peers = first_of_two(NOBODY), Peers(config, Metrics())
    known = KnownPeers(config, peers, lambda: [engine])
    known._failed[engine, NOBODY] = 1024, 0.0, "peer_unreachable"
    before = time.monotonic()
    await known._meet(engine, NOBODY)
    failures, again_at, _ = known._failed[engine, NOBODY]
    assert failures == 1025 and again_at >= before + AGAIN_S
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
