"""A daemon that takes over has met the peers of the one before when it says that it is ready."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import signal
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
from fleet import TIMEOUT_S
from keepers import eventually, serving
from load import Engine
from ranks import Blocks, Bytes, Kv, Shape, describe
from test_daemon_dies import START_S, stands_by

from kvferry.blocking import BlockingEngineClient
from kvferry.memory import SharedRegion
from kvferry.router import RouterClient
from kvferry.schemas import SourceBody, TransferRecord
from kvferryd.demo.fleet import DaemonService, Fleet

TP2 = Shape.tp(2)
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
    lines = asked(daemon, "/metrics").text.splitlines()
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
    eventually(lambda: serving(engine.daemon) != gone, "the next one says so: engines may come before its line")
    is_ready(engine.daemon)


def asked(daemon: DaemonService, path: str) -> httpx.Response:
    return httpx.get(f"{daemon.url}{path}", trust_env=False, timeout=TIMEOUT_S)


def is_ready(daemon: DaemonService) -> None:
    eventually(lambda: asked(daemon, "/readyz").is_success, f"{daemon.name} is ready")


def has_met(daemon: DaemonService, engine_id: str) -> None:
    """No order has asked for it. A machine that is slow is ready before, as it waits for so long and no longer."""

    def all_ranks() -> bool:
        peers = asked(daemon, "/v1/peers").json()["peers"]
        return {(peer["engine_id"], peer["state"]) for peer in peers} == {(engine_id, "connected")}

    eventually(all_ranks, f"{daemon.name} has met {engine_id}")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Engine]]:
    """Two engines for all tests of one rank: their keepers outlive what is done to their daemons."""
    with (
        contextlib.closing(Fleet(tmp_path_factory.mktemp("fleet"))) as fleet,
        engines(fleet, uuid.uuid4().hex, *SLOW) as both,
    ):
        yield both


@pytest.mark.parametrize("side", ["source", "reader"])
def test_the_first_request_after_a_crash_of_either_daemon_shakes_no_hands(
    pair: tuple[Engine, Engine], request_id: str, side: str
) -> None:
    source, reader = pair
    victim = source if side == "source" else reader
    moved(source, reader, f"{request_id}-first")
    before = moved(source, reader, f"{request_id}-later")
    met = handshakes(reader.daemon)
    for count in range(2):  # the daemon after the next has it, too
        eventually(lambda: stands_by(victim.daemon), "another daemon stands by")
        killed(victim)
        has_met(reader.daemon, source.name)
        shaken = handshakes(reader.daemon)
        after = moved(source, reader, f"{request_id}-after-{count}")
        assert handshakes(reader.daemon) == shaken == {"ok": 1.0 if side == "reader" else met["ok"] + count + 1}
        assert (after.path, after.phases_ms.keys()) == (before.path, before.phases_ms.keys())


def test_after_an_upgrade_of_all_daemons_no_request_shakes_hands(pair: tuple[Engine, Engine], request_id: str) -> None:
    """As of all keepers of a host: one daemon is back before the other."""
    source, reader = pair
    moved(source, reader, f"{request_id}-first")
    before = moved(source, reader, f"{request_id}-before")
    gone = {engine: serving(engine.daemon) for engine in (source, reader)}
    for engine in gone:
        engine.daemon.signal(signal.SIGHUP)
    for engine, pid in gone.items():
        assert "has gone" in engine.said.get(timeout=TIMEOUT_S)
        ready_again(engine, pid)
    has_met(reader.daemon, source.name)
    shaken = handshakes(reader.daemon)
    after = moved(source, reader, f"{request_id}-after")
    assert handshakes(reader.daemon) == shaken
    assert shaken["ok"]
    assert (after.path, after.phases_ms.keys()) == (before.path, before.phases_ms.keys())


def test_a_peer_that_does_not_answer_does_not_hold_ready(pair: tuple[Engine, Engine], request_id: str) -> None:
    """The last test of these two engines: it takes one's keeper away."""
    source, reader = pair
    moved(source, reader, request_id)

    def unmet() -> int:
        """How many peers another daemon of the reader knows of, and has not met, when it is ready. It has met none."""
        eventually(lambda: stands_by(reader.daemon), "another daemon stands by")
        killed(reader)
        neighbours = asked(reader.daemon, "/v1/peers").json()
        assert not neighbours["peers"]
        return len(neighbours["unmet"])

    silent = serving(source.daemon)
    os.kill(silent, signal.SIGSTOP)
    try:
        assert unmet() == 0, "it waits for no word of one that stands still"
    finally:
        os.kill(silent, signal.SIGCONT)
    has_met(reader.daemon, source.name)
    source.daemon.process.kill()  # its keeper, and with it the daemon
    unmet()
    eventually(lambda: len(asked(reader.daemon, "/v1/peers").json()["unmet"]) == 1, "it is named, perhaps later")


class TwoRanks:
    """An engine of two ranks, each of which attaches again by itself, and their daemons under keepers."""

    def __init__(self, name: str, daemons: list[DaemonService]) -> None:
        self.name, self.daemons = name, daemons
        self.clients, self.said = list[BlockingEngineClient](), [queue.Queue[str]() for _ in daemons]
        self.memories = list[Bytes]()
        for rank, daemon in enumerate(daemons):
            client = BlockingEngineClient.connect(
                str(daemon.socket), engine_id=name, epoch="1", rank=rank, world_size=2, timeout_s=TIMEOUT_S,
                say=self.said[rank].put,
            )  # fmt: skip
            region = client.allocate(TP2.nbytes(rank))
            assert isinstance(region, SharedRegion)
            client.register(describe(name, "1", TP2, rank, region))
            self.clients.append(client)
            self.memories.append(region.array())

    def reads(self, source: TwoRanks, number: int) -> None:
        """A request by this number, on both ranks: every byte comes."""
        request_id, kv, blocks = f"{self.name}-{number}", Kv.random(40), Blocks((3, 1, 4), 5)
        for rank, client in enumerate(source.clients):
            TP2.write(rank, source.memories[rank], kv, blocks, (0, kv.tokens), True)
            client.publish(request_id, blocks.tables(), kv.tokens, lease=number)
        named = SourceBody(engine_id=source.name, address=source.daemons[0].peer)
        receiving = [
            client.receive(request_id, blocks.tables(), source=named, attempt=number, deadline_s=30)
            for client in self.clients
        ]
        for each in receiving:
            each.result(TIMEOUT_S)
        assert not any(TP2.wrong(rank, memory, kv, blocks) for rank, memory in enumerate(self.memories))


@pytest.mark.parametrize(
    ("side", "rank"),
    [
        ("reader", 0),
        pytest.param("source", 1, marks=pytest.mark.slow),
        *(pytest.param(*which, marks=pytest.mark.long) for which in [("reader", 1), ("source", 0)]),
    ],
)
def test_no_rank_shakes_hands_for_the_first_request_after_one_has_lost_its_daemon(
    own_fleet: Fleet, request_id: str, side: str, rank: int
) -> None:
    both = {name: own_fleet.daemons(name, 2, kept=True) for name in ("source", "reader")}
    every = [daemon for daemons in both.values() for daemon in daemons]
    asyncio.run(own_fleet.ready(*every, timeout_s=START_S))
    source, reader = (TwoRanks(f"{name}-{request_id[-8:]}", daemons) for name, daemons in both.items())
    reader.reads(source, 1)
    victim = source if side == "source" else reader
    eventually(lambda: stands_by(victim.daemons[rank]), "another daemon stands by")
    gone = serving(victim.daemons[rank])
    os.kill(gone, signal.SIGKILL)
    while "there again" not in victim.said[rank].get(timeout=TIMEOUT_S):
        pass
    for daemon in every:
        is_ready(daemon)
    for daemon in reader.daemons:  # also where the roster alone was made anew
        has_met(daemon, source.name)
    shaken = [handshakes(daemon) for daemon in reader.daemons]
    reader.reads(source, 2)
    assert [handshakes(daemon) for daemon in reader.daemons] == shaken
    for engine in (source, reader):
        for client in engine.clients:
            client.close()
