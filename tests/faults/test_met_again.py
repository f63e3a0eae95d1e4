"""A daemon that takes over has met the peers of the one before when it says that it is ready."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
from fleet import TIMEOUT_S
from keepers import eventually, serving
from load import Engine
from ranks import Blocks, Kv
from test_daemon_dies import START_S, stands_by

from kvferry.router import RouterClient
from kvferry.schemas import TransferRecord
from kvferryd.demo.fleet import DaemonService, Fleet

SLOW = ("--connect-timeout-s", "300")
"""A peer that says nothing is given longer than any test."""


@contextmanager
def engines(fleet: Fleet, request_id: str, *flags: str) -> Iterator[tuple[Engine, Engine]]:
    """A source and a reader, each beside a daemon under a keeper; another daemon stands by."""
    daemons = [fleet.daemon(name, kept=True, flags=flags) for name in ("source", "reader")]
    asyncio.run(fleet.ready(*daemons, timeout_s=START_S))
    source, reader = (Engine(f"{daemon.name}-{request_id[-8:]}", daemon, "1") for daemon in daemons)
    for daemon in daemons:
        eventually(lambda daemon=daemon: stands_by(daemon), "another daemon stands by")
    yield source, reader
    for engine in (source, reader):
        engine.client.close()


def moved(source: Engine, reader: Engine, request_id: str) -> TransferRecord:
    """The record of one request from source to reader."""
    blocks, kv = Blocks((3, 1, 4), 5), Kv.random(40)
    source.publish(request_id, kv, blocks)
    reader.receive(request_id, blocks, source)

    async def record() -> TransferRecord:
        async with RouterClient(reader.daemon.url) as router:
            (found,) = await router.transfers(request_id)
            return found

    return asyncio.run(record())


def handshakes(daemon: DaemonService) -> dict[str, float]:
    """How many have ended, by what came of them."""
    lines = httpx.get(f"{daemon.url}/metrics", trust_env=False, timeout=TIMEOUT_S).text.splitlines()
    counts = (line.split('"') for line in lines if line.startswith("kvferry_handshakes_total{"))
    return {outcome: float(count.strip("} ")) for _, outcome, count in counts if float(count.strip("} "))}


def killed(engine: Engine) -> None:
    """Its daemon is killed, and another one has taken over and says that it is ready."""
    gone = serving(engine.daemon)
    os.kill(gone, signal.SIGKILL)
    assert "has gone" in engine.said.get(timeout=TIMEOUT_S)
    ready_again(engine, gone)


def ready_again(engine: Engine, gone: int) -> None:
    assert "there again" in engine.said.get(timeout=TIMEOUT_S)
    assert serving(engine.daemon) != gone
    url = f"{engine.daemon.url}/readyz"
    eventually(lambda: httpx.get(url, trust_env=False, timeout=TIMEOUT_S).status_code == 200, "it is ready")


@pytest.mark.parametrize("side", ["source", "reader"])
def test_the_first_request_after_a_crash_of_either_daemon_shakes_no_hands(
    own_fleet: Fleet, request_id: str, side: str
) -> None:
    with engines(own_fleet, request_id) as (source, reader):
        victim = source if side == "source" else reader
        moved(source, reader, f"{request_id}-first")
        before = moved(source, reader, f"{request_id}-later")
        for count in range(2):  # the daemon after the next has it, too
            eventually(lambda: stands_by(victim.daemon), "another daemon stands by")
            killed(victim)
            shaken = handshakes(reader.daemon)
            after = moved(source, reader, f"{request_id}-after-{count}")
            assert handshakes(reader.daemon) == shaken == {"ok": 1.0 if side == "reader" else count + 2.0}
            assert (after.path, after.phases_ms.keys()) == (before.path, before.phases_ms.keys())


def test_after_an_upgrade_of_all_daemons_no_request_shakes_hands(own_fleet: Fleet, request_id: str) -> None:
    """As of all keepers of a host: one daemon is back before the other."""
    with engines(own_fleet, request_id) as (source, reader):
        before = moved(source, reader, f"{request_id}-before")
        gone = {engine: serving(engine.daemon) for engine in (source, reader)}
        for engine in gone:
            engine.daemon.signal(signal.SIGHUP)
        for engine, pid in gone.items():
            assert "has gone" in engine.said.get(timeout=TIMEOUT_S)
            ready_again(engine, pid)
        shaken = handshakes(reader.daemon)
        after = moved(source, reader, f"{request_id}-after")
        assert handshakes(reader.daemon) == shaken
        assert shaken["ok"]
        assert (after.path, after.phases_ms.keys()) == (before.path, before.phases_ms.keys())


@pytest.mark.parametrize("peer", ["stopped", "gone"])
def test_a_peer_that_does_not_answer_does_not_hold_ready(own_fleet: Fleet, request_id: str, peer: str) -> None:
    with engines(own_fleet, request_id, *SLOW) as (source, reader):
        moved(source, reader, request_id)
        silent = serving(source.daemon)
        if peer == "stopped":
            os.kill(silent, signal.SIGSTOP)
        else:
            source.daemon.process.kill()  # its keeper, and with it the daemon
        try:
            killed(reader)
            neighbours = httpx.get(f"{reader.daemon.url}/v1/peers", trust_env=False, timeout=TIMEOUT_S).json()
            assert not neighbours["peers"]
            assert len(neighbours["unmet"]) == (peer == "gone"), "it waits for no word of one that stands still"
        finally:
            if peer == "stopped":
                os.kill(silent, signal.SIGCONT)
